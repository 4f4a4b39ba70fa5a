//! Places where the compiler put a function's body into a caller's: what debug information says of them, and
//! whether the first instruction there is passed exactly once for each call. It reads no files and attaches
//! nothing.
//!
//! An optimiser may double the code of such a place, merge it with another's, or turn it into a loop of the
//! caller's; debug information still names one address. Since a probe there must miss no call and count none
//! twice, the caller's own instructions decide: every way from the caller's entry to an instruction of the place
//! that has an effect must lead over that address, and no loop of the place's own may come back to it.
//! Computations alone are no call: optimisers do them early, for several calls at once, or in vain.

use serde::{Deserialize, Serialize};

use crate::place::{Code, Reg, flows};

/// What a value is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Base {
    /// Nothing: it is a constant.
    Nothing,
    /// A register.
    Register(Reg),
    /// The canonical frame address of the function at hand (DWARF 5, section 6.4).
    Frame,
}

/// Where a value is, or what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// What it is computed from.
    pub base: Base,
    /// Added to the base.
    pub offset: i64,
    /// Whether the value is in memory there; else the sum itself is the value.
    pub memory: bool,
}

impl Place {
    pub(crate) fn register(register: Reg) -> Place {
        Place { base: Base::Register(register), offset: 0, memory: false }
    }

    /// The register that must not change for the place to hold.
    pub(crate) fn depends_on(self) -> Option<Reg> {
        match self.base {
            Base::Nothing => None,
            Base::Register(register) => Some(register),
            Base::Frame => Some(Reg::Rsp),
        }
    }
}

/// Where an argument is while the instruction pointer is in a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) place: Place,
}

/// One place where a function was inlined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InlinedSite {
    /// Where it begins.
    pub(crate) entry: u64,
    /// All of its code: beginnings and ends.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// The function that it is in.
    pub(crate) caller: String,
    /// All code of that, its entry first.
    pub(crate) caller_ranges: Vec<(u64, u64)>,
    /// Whether its compiler names every such place, as gcc does. clang drops one whose code it has merged with
    /// another's, and says nothing of it.
    pub(crate) complete: bool,
    /// Whether the compiler carried a marker along for where it begins; else that is only where its first
    /// instruction went.
    pub(crate) marked: bool,
    /// Each argument's places; none where the debug information names none.
    pub(crate) arguments: Vec<Vec<Span>>,
}

impl InlinedSite {
    /// Where an argument is at an address.
    pub(crate) fn argument(&self, number: usize, at: u64) -> Option<Place> {
        let spans = self.arguments.get(number)?;
        spans.iter().find(|span| span.begin <= at && at < span.end).map(|span| span.place)
    }

    fn holds(&self, at: u64) -> bool {
        self.ranges.iter().any(|(begin, end)| *begin <= at && at < *end)
    }

    /// Whether each call passes the entry exactly once; else why not. `code` is that of the caller, all parts.
    pub(crate) fn exact(&self, code: &[Code<'_>]) -> Result<(), &'static str> {
        if !self.complete {
            return Err("was made by a compiler that leaves out some such places");
        }
        let instructions = flows(code);
        let find = |at: u64| instructions.binary_search_by_key(&at, |flow| flow.at).ok();
        let entry = find(self.entry).ok_or("it does not begin at an instruction of its caller")?;
        let next = |index: usize| {
            let end = instructions.get(index).map(|flow| flow.end);
            end.and_then(find)
        };
        let ways = |index: usize| -> [Option<usize>; 2] {
            let Some(flow) = instructions.get(index) else { return [None; 2] };
            [flow.target.and_then(find), if flow.falls_through { next(index) } else { None }]
        };

        // What nothing in the code leads to directly is led to by a jump through a table.
        let mut led_to = vec![false; instructions.len()];
        for index in 0..instructions.len() {
            for to in ways(index).into_iter().flatten() {
                if let Some(to) = led_to.get_mut(to) {
                    *to = true;
                }
            }
        }
        let own_table = instructions.iter().any(|flow| flow.table && self.holds(flow.at));
        let mut open: Vec<usize> = Vec::new();
        open.extend(self.caller_ranges.first().and_then(|(begin, _)| find(*begin)));
        for (index, flow) in instructions.iter().enumerate() {
            let from_table = !led_to.get(index).copied().unwrap_or(true);
            if from_table && !(own_table && self.holds(flow.at)) && !flow.padding {
                open.push(index);
            }
        }

        let jumped_to = |index: usize| {
            let at = instructions.get(index).map(|flow| flow.at);
            instructions.iter().any(|flow| flow.target == at)
        };
        let runs_into = |before: usize, after: usize| {
            let flow = instructions.get(before);
            flow.is_some_and(|flow| flow.falls_through && flow.target.is_none())
                && next(before) == Some(after)
                && !jumped_to(after)
        };
        // Other code may have been moved in front of its own, but only on the line that leads there. What has no
        // effect may have been moved far ahead, and without a marker it does not tell where the call begins.
        let mut own = entry;
        while !instructions.get(own).is_some_and(|flow| self.holds(flow.at) && (self.marked || flow.effect)) {
            if !runs_into(own, own + 1) {
                return Err("nothing is left of its code where it begins");
            }
            own += 1;
        }
        // What runs through to the entry is passed as often as that is.
        let mut straight = entry;
        while let Some(before) = straight.checked_sub(1)
            && runs_into(before, straight)
        {
            straight = before;
        }

        // Everything that is reached without passing the entry.
        let mut reached = vec![false; instructions.len()];
        while let Some(index) = open.pop() {
            if index == entry {
                continue;
            }
            match reached.get_mut(index) {
                Some(seen) if !*seen => *seen = true,
                _ => continue,
            }
            let on_the_line = (straight..entry).contains(&index);
            if instructions.get(index).is_some_and(|flow| flow.effect && !on_the_line && self.holds(flow.at))
            {
                return Err("some ways into its code do not lead over where it begins");
            }
            open.extend(ways(index).into_iter().flatten());
        }

        // A loop that the function itself has: its jump back is the function's own.
        let mut seen = vec![false; instructions.len()];
        open.push(entry);
        while let Some(index) = open.pop() {
            match seen.get_mut(index) {
                Some(seen) if !*seen => *seen = true,
                _ => continue,
            }
            let Some(flow) = instructions.get(index) else { continue };
            if flow.target.is_some() && !self.holds(flow.at) {
                continue;
            }
            for to in ways(index).into_iter().flatten() {
                if to == entry {
                    return Err("it begins with a loop");
                }
                open.push(to);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(entry: u64, ranges: &[(u64, u64)]) -> InlinedSite {
        InlinedSite {
            entry,
            ranges: ranges.to_vec(),
            caller: "caller".to_owned(),
            caller_ranges: vec![(0x1000, 0x2000)],
            complete: true,
            marked: true,
            arguments: Vec::new(),
        }
    }

    fn exact(bytes: &[u8], entry: u64, ranges: &[(u64, u64)]) -> Result<(), &'static str> {
        site(entry, ranges).exact(&[Code { vaddr: 0x1000, bytes }])
    }

    #[test]
    fn a_place_in_a_straight_line_is_exact_also_in_pieces() {
        // push rbx; xor eax,eax; inc eax; nop; pop rbx; ret
        let bytes = [0x53, 0x31, 0xc0, 0xff, 0xc0, 0x90, 0x5b, 0xc3];
        assert_eq!(exact(&bytes, 0x1001, &[(0x1001, 0x1006)]), Ok(()));
        assert_eq!(exact(&bytes, 0x1001, &[(0x1001, 0x1003), (0x1005, 0x1006)]), Ok(()));
        assert_eq!(exact(&bytes, 0x1003, &[(0x1001, 0x1006)]), Ok(()));
        assert_eq!(
            exact(&bytes, 0x1002, &[(0x1001, 0x1006)]),
            Err("it does not begin at an instruction of its caller")
        );
        // Other code was moved between its beginning and its first own instruction.
        assert_eq!(exact(&bytes, 0x1001, &[(0x1003, 0x1006)]), Ok(()));
        let unmarked = InlinedSite { marked: false, ..site(0x1001, &[(0x1001, 0x1006)]) };
        let nothing = Err("nothing is left of its code where it begins");
        assert_eq!(unmarked.exact(&[Code { vaddr: 0x1000, bytes: &bytes }]), nothing);
        assert_eq!(exact(&bytes, 0x1006, &[(0x1001, 0x1006)]), nothing);
    }

    #[test]
    fn code_that_was_doubled_is_not_exact() {
        // test edi,edi; je +4; mov [rsi],eax; jmp +2; mov [rsi],eax; ret: both arms are the place's.
        let bytes = [0x85, 0xff, 0x74, 0x04, 0x89, 0x06, 0xeb, 0x02, 0x89, 0x06, 0xc3];
        let elsewhere = Err("some ways into its code do not lead over where it begins");
        assert_eq!(exact(&bytes, 0x1004, &[(0x1004, 0x1006), (0x1008, 0x100a)]), elsewhere);
        // One arm alone is.
        assert_eq!(exact(&bytes, 0x1004, &[(0x1004, 0x1006)]), Ok(()));
    }

    #[test]
    fn what_is_only_computed_early_is_no_call() {
        // lea eax,[rdi+1]; test edi,edi; je +4; mov [rsi],eax; mov [rsi],eax; ret: the lea is the place's.
        let bytes = [0x8d, 0x47, 0x01, 0x85, 0xff, 0x74, 0x04, 0x89, 0x06, 0x89, 0x06, 0xc3];
        assert_eq!(exact(&bytes, 0x1007, &[(0x1000, 0x1003), (0x1007, 0x1009)]), Ok(()));
        // Of the second mov, which both ways reach, it is one.
        let elsewhere = Err("some ways into its code do not lead over where it begins");
        assert_eq!(exact(&bytes, 0x1007, &[(0x1007, 0x100b)]).and(Ok(())), Ok(()));
        assert_eq!(
            exact(&[&bytes[..6], &[0x02], &bytes[7..]].concat(), 0x1007, &[(0x1007, 0x100b)]),
            elsewhere
        );
    }

    #[test]
    fn a_loop_of_the_function_is_told_from_one_of_its_caller() {
        // xor eax,eax; 1: inc eax; dec edi; jne 1b; ret
        let bytes = [0x31, 0xc0, 0xff, 0xc0, 0xff, 0xcf, 0x75, 0xfa, 0xc3];
        assert_eq!(exact(&bytes, 0x1002, &[(0x1002, 0x1008)]), Err("it begins with a loop"));
        assert_eq!(exact(&bytes, 0x1002, &[(0x1002, 0x1004)]), Ok(()));
    }
}
