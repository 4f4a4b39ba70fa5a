//! Switches tracepoints on for the length of a recording, over the target's RPC, and off again: only those that
//! were off before, and those of several recordings with the last of them. It never writes to the target's memory itself.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::note::Note;
use super::rpc::{Rpc, RpcError};
use super::turn::Turns;

/// The group in which commands begin and end: it goes on last and off first, so that none is recorded in part.
const COMMANDS: &str = "nvmf_tcp";

/// Tracepoints of a group, by its name: one bit each.
pub(super) type Masks = BTreeMap<String, u64>;

/// What `trace_get_info` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Info {
    /// The ring's file, as the target sees it.
    pub(super) path: String,
    /// The name of each group by its number, and the tracepoints that are on.
    pub(super) groups: BTreeMap<u16, (String, u64)>,
}

impl Info {
    /// Asks for it.
    pub(super) fn ask(rpc: &Rpc) -> Result<Info, RpcError> {
        let answer = rpc.call("trace_get_info", None)?;
        Ok(Info::parse(&answer))
    }

    /// Takes what recordings have switched on for off, and returns what of it is on.
    fn forget(&mut self, left: &Masks) -> Masks {
        let mut found = Masks::new();
        for (name, on) in self.groups.values_mut() {
            let bits = *on & left.get(name).copied().unwrap_or(0);
            if bits != 0 {
                *on &= !bits;
                found.insert(name.clone(), bits);
            }
        }
        found
    }

    fn parse(answer: &Value) -> Info {
        let mut info = Info::default();
        let number = |value: Option<&Value>| {
            let text = value?.as_str()?;
            u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
        };
        for (name, value) in answer.as_object().into_iter().flatten() {
            if name == "tpoint_shm_path" {
                info.path = value.as_str().unwrap_or_default().to_owned();
            } else if let Some(mask) = number(value.get("mask")).filter(|mask| mask.is_power_of_two()) {
                let on = number(value.get("tpoint_mask")).unwrap_or(0);
                info.groups.insert(mask.trailing_zeros() as u16, (name.clone(), on));
            }
        }
        info
    }
}

/// Tracepoints that are needed, and go off again with this.
#[derive(Debug)]
pub(super) struct Switch {
    rpc: Rpc,
    turns: Turns,
    /// What was on before any recording, by group.
    before: BTreeMap<u16, (String, u64)>,
    /// What this recording needs and was off before it, whoever has switched it on.
    on: Masks,
    /// What tells other recordings of it, and the next one, should this one not come to switch it off.
    note: Option<Note>,
}

impl Switch {
    /// Looks at what is on in a process, and switches nothing yet. What recordings left on that were killed goes off with
    /// this, and is returned.
    pub(super) fn new(rpc: Rpc, turns: Turns, pid: u32) -> Result<(Switch, Masks), RpcError> {
        let turn = turns.take();
        let (mut note, others) = Note::leave(pid);
        let mut info = match Info::ask(&rpc) {
            Ok(info) => info,
            Err(error) => {
                note.take().into_iter().for_each(Note::remove);
                return Err(error);
            }
        };
        let left = info.forget(&others.left);
        info.forget(&others.live);
        if let Some(note) = &mut note {
            note.write(&left);
        }
        drop(turn);
        Ok((Switch { rpc, turns, before: info.groups, on: left.clone(), note }, left))
    }

    /// Switches on what of `wanted` (by group number) was off before.
    pub(super) fn more(&mut self, wanted: &BTreeMap<u16, u64>) -> Result<(), RpcError> {
        let missing = wanted.iter().filter_map(|(group, bits)| {
            let (name, on) = self.before.get(group)?;
            Some((name.clone(), bits & !on)).filter(|(_, missing)| *missing != 0)
        });
        let mut missing: Vec<_> = missing.collect();
        missing.sort_by_key(|(name, _)| *name == COMMANDS);
        let _turn = self.turns.take();
        // Noted first: a call whose answer is lost may have been carried out.
        for (name, bits) in &missing {
            *self.on.entry(name.clone()).or_insert(0) |= bits;
        }
        if let Some(note) = &mut self.note {
            note.write(&self.on);
        }
        for (name, bits) in missing {
            // Another recording may have switched it on, which does no harm.
            self.rpc.call("trace_set_tpoint_mask", Some(parameters(&name, bits)))?;
        }
        Ok(())
    }

    /// Switches one tracepoint off before the others, unless it was on before or another recording needs it.
    pub(super) fn off_first(&mut self, number: u16) -> Result<(), RpcError> {
        let bit = 1 << (number % 64);
        let Some((name, _)) = self.before.get(&(number / 64)) else { return Ok(()) };
        let _turn = self.turns.take();
        let needed = needed_by_others(self.note.as_ref());
        match self.on.get_mut(name) {
            Some(on) if *on & bit & !needed.get(name).copied().unwrap_or(0) != 0 => {
                self.rpc.call("trace_clear_tpoint_mask", Some(parameters(name, bit)))?;
                *on &= !bit;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Switches off what no other recording needs, for good.
    pub(super) fn off(&mut self) -> Result<(), RpcError> {
        let done = self.rest();
        // One that failed is for the next recording, if the process lives on.
        if let Some(note) = self.note.take_if(|note| done.is_ok() || note.is_over()) {
            note.remove();
        }
        done
    }

    /// Switches off what no other recording needs, until [`Switch::more`].
    pub(super) fn rest(&mut self) -> Result<(), RpcError> {
        let _turn = self.turns.take();
        let needed = needed_by_others(self.note.as_ref());
        let mut first = Ok(());
        let mut on: Vec<_> = std::mem::take(&mut self.on).into_iter().collect();
        on.sort_by_key(|(name, _)| name != COMMANDS);
        for (name, bits) in on {
            let bits = bits & !needed.get(&name).copied().unwrap_or(0);
            if bits == 0 {
                continue;
            }
            if let Err(error) = self.rpc.call("trace_clear_tpoint_mask", Some(parameters(&name, bits))) {
                first = first.and(Err(error));
                self.on.insert(name, bits);
            }
        }
        // Last, so that it says too much if this is killed meanwhile, and not too little.
        if let Some(note) = &mut self.note {
            note.write(&self.on);
        }
        first
    }
}

/// The tracepoints that other recordings need.
fn needed_by_others(note: Option<&Note>) -> Masks {
    note.map(Note::live_others).unwrap_or_default()
}

impl Drop for Switch {
    fn drop(&mut self) {
        // A target that has ended has nothing to switch off, and there is nobody to tell here.
        let _ = self.off();
    }
}

fn parameters(name: &str, mask: u64) -> Value {
    json!({ "name": name, "tpoint_mask": mask })
}

#[cfg(test)]
mod tests {
    use super::{Info, Masks, Switch};
    use crate::trace_ring::rpc::Rpc;
    use crate::trace_ring::turn::Turns;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn information_is_read_and_nonsense_is_not() {
        let info = Info::parse(&json!({
            "tpoint_shm_path": "/dev/shm/nvmf_trace.pid7",
            "tpoint_group_mask": "0x20",
            "nvmf_tcp": { "mask": "0x20", "tpoint_mask": "0x12241" },
            "odd": { "mask": "0x30", "tpoint_mask": "0x1" },
            "odder": { "mask": 7 },
        }));
        assert_eq!(info.path, "/dev/shm/nvmf_trace.pid7");
        assert_eq!(info.groups, BTreeMap::from([(5, ("nvmf_tcp".to_owned(), 0x12241))]));
        assert_eq!(Info::parse(&json!([1])), Info::default());
    }

    /// Answers like a target whose masks are these, so many times, and returns them as they were after each change.
    fn target(path: &std::path::Path, calls: usize) -> std::thread::JoinHandle<Vec<Masks>> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let mut masks = Masks::from([("bdev".to_owned(), 0b100), ("nvmf_tcp".to_owned(), 0)]);
            let mut history = vec![masks.clone()];
            for _ in 0..calls {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 4096];
                let n = stream.read(&mut request).unwrap();
                let request: Value = serde_json::from_slice(&request[..n]).unwrap();
                let bits = request["params"]["tpoint_mask"].as_u64();
                let method = request["method"].as_str().unwrap();
                let result = if method == "trace_get_info" {
                    let of = |group: u64, name: &str| json!({ "mask": format!("{:#x}", 1u64 << group), "tpoint_mask": format!("{:#x}", masks[name]) });
                    json!({ "bdev": of(3, "bdev"), "nvmf_tcp": of(5, "nvmf_tcp") })
                } else {
                    let mask = masks.get_mut(request["params"]["name"].as_str().unwrap()).unwrap();
                    match method {
                        "trace_set_tpoint_mask" => *mask |= bits.unwrap(),
                        "trace_clear_tpoint_mask" => *mask &= !bits.unwrap(),
                        other => panic!("{other}"),
                    }
                    json!(true)
                };
                let answer = json!({ "jsonrpc": "2.0", "id": 1, "result": result }).to_string();
                stream.write_all(answer.as_bytes()).unwrap();
                if history.last() != Some(&masks) {
                    history.push(masks.clone());
                }
            }
            history
        })
    }

    fn masks(bdev: u64, nvmf_tcp: u64) -> Masks {
        [("bdev".to_owned(), bdev), ("nvmf_tcp".to_owned(), nvmf_tcp)].into()
    }

    /// A process of one's own to be recorded.
    fn process() -> std::process::Child {
        std::process::Command::new("sleep").arg("60").spawn().unwrap()
    }

    #[test]
    fn only_what_was_off_goes_on_and_off_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let server = target(&path, 5);
        let mut process = process();
        let turns = Turns::of(&tempfile::tempfile().unwrap());
        let (mut switch, left) = Switch::new(Rpc::new(&path), turns, process.id()).unwrap();
        assert_eq!(left, Masks::new());
        switch.more(&BTreeMap::from([(3, 0b110), (5, 0b1), (15, 0b10)])).unwrap();
        // What was on before, and what is not there, is left alone.
        switch.off_first(3 * 64 + 2).unwrap();
        switch.off_first(15 * 64 + 1).unwrap();
        switch.off_first(3 * 64 + 1).unwrap();
        drop(switch);
        let history = server.join().unwrap();
        assert_eq!(
            history,
            [masks(0b100, 0), masks(0b110, 0), masks(0b110, 1), masks(0b100, 1), masks(0b100, 0)]
        );
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Whichever ends first, and however often one rests, what the other needs stays on; with the last all goes off.
    #[test]
    fn what_several_recordings_need_goes_off_with_the_last_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let server = target(&path, 12);
        let mut process = process();
        let ring = tempfile::tempfile().unwrap();
        let begin = || Switch::new(Rpc::new(&path), Turns::of(&ring), process.id()).unwrap().0;
        let (common, more) = (BTreeMap::from([(3, 0b111), (5, 0b1)]), BTreeMap::from([(5, 0b100)]));
        // Three calls each: what is on, and two groups.
        let mut first = begin();
        first.more(&common).unwrap();
        let mut second = begin();
        second.more(&common).unwrap();
        // One, and one: what only the first needs.
        first.more(&more).unwrap();
        first.off_first(5 * 64).unwrap();
        first.rest().unwrap();
        second.off_first(3 * 64 + 2).unwrap();
        // Two: armed again, and all that it needs is on but what it alone needs.
        first.more(&common).unwrap();
        second.off().unwrap();
        first.off().unwrap();
        drop((first, second));
        let history = server.join().unwrap();
        assert_eq!(
            history,
            [
                masks(0b100, 0),
                masks(0b111, 0),
                masks(0b111, 0b1),
                masks(0b111, 0b101),
                masks(0b111, 0b1),
                masks(0b111, 0),
                masks(0b100, 0)
            ]
        );
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
