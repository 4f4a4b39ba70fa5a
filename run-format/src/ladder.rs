//! The ladder of a boundary: every way to take it on a system, best first, and which one is used. It is what
//! `probe` shows; a run keeps only the rung that was used ([`crate::Hook`]).

use crate::{Boundary, Hook, Transport};
use serde::{Deserialize, Serialize};

/// The ways to take one boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ladder {
    /// The boundary.
    pub boundary: Boundary,
    /// The transport whose commands it is for; `None`: for those of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Whether nothing can be recorded without this boundary.
    pub essential: bool,
    /// Index in `rungs` of the one that is used; `None` where none can be had.
    pub chosen: Option<usize>,
    /// The ways, best first.
    pub rungs: Vec<Rung>,
    /// What a recording loses where none can be had.
    pub without: String,
}

/// One way to take a boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rung {
    /// How it is taken, such as `fentry nvme_tcp_queue_rq` or `uprobe bdev_io_submit`.
    pub hook: String,
    /// Whether it can be had here.
    pub usable: bool,
    /// Whether it is the boundary's own moment, as opposed to a near one that stands for it.
    pub measured: bool,
    /// Whether it sees every command.
    pub whole: bool,
    /// Why it can not be had; `None` where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Whose lack that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lack: Option<Lack>,
    /// What is less good about it than about the rungs before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Where its uprobes go.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uprobes: Vec<Spot>,
}

/// Who has not what a rung needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lack {
    /// It was not asked for.
    Request,
    /// The kernel, or how it is set up here.
    Kernel,
    /// The program.
    Program,
}

/// The place of a uprobe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// The symbol, with the compiler's suffix: `nvmf_tcp_req_process.isra.0`.
    pub symbol: String,
    /// How far behind the symbol's address, in bytes.
    pub offset: u64,
    /// The instruction there: `push r15`.
    pub instruction: String,
    /// What the kernel does at this instruction: `nop5`, `emulated` or `single-step`.
    pub class: String,
    /// Estimated price of a hit, in nanoseconds.
    pub estimated_ns: u32,
    /// Why there.
    pub why: String,
}

impl Ladder {
    /// The rung that is used.
    #[must_use]
    pub fn rung(&self) -> Option<&Rung> {
        self.rungs.get(self.chosen?)
    }

    /// Why the rung that is used is not a better one, or what is lost without any.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        let passed = self.rungs.iter().take(self.chosen.unwrap_or(usize::MAX));
        let mut reasons: Vec<String> =
            passed.map(|rung| format!("not {}: {}", rung.hook, rung.reason())).collect();
        match self.rung() {
            Some(rung) => reasons.splice(0..0, rung.note.clone()).for_each(drop),
            None => reasons.push(format!("lost: {}", self.without)),
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// As a run's manifest has it.
    #[must_use]
    pub fn hook(&self) -> Hook {
        let rung = self.rung();
        let spot = rung.and_then(|rung| rung.uprobes.first());
        Hook {
            boundary: self.boundary,
            transport: self.transport,
            hook: rung.map(|rung| rung.hook.clone()),
            rung: u32::try_from(self.chosen.unwrap_or(self.rungs.len())).unwrap_or(u32::MAX),
            measured: rung.is_some_and(|rung| rung.measured),
            instruction: spot.map(|spot| spot.instruction.clone()),
            estimated_ns: spot.map(|spot| spot.estimated_ns),
            why: self.why(),
        }
    }
}

impl Rung {
    /// Why it is not used where it could be or not: what it lacks, else what is less good about it.
    #[must_use]
    pub fn reason(&self) -> &str {
        self.why.as_deref().or(self.note.as_deref()).unwrap_or("not needed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rung(hook: &str, why: Option<&str>, note: Option<&str>) -> Rung {
        Rung {
            hook: hook.into(),
            usable: why.is_none(),
            measured: true,
            whole: true,
            why: why.map(Into::into),
            lack: why.map(|_| Lack::Program),
            note: note.map(Into::into),
            uprobes: Vec::new(),
        }
    }

    #[test]
    fn the_reasons_are_those_of_the_rungs_that_were_passed() {
        let mut ladder = Ladder {
            boundary: Boundary::TSent,
            transport: None,
            essential: false,
            chosen: Some(1),
            rungs: vec![
                rung("a", Some("no a"), Some("better")),
                rung("b", None, Some("so so")),
                rung("c", None, None),
            ],
            without: "the wait".into(),
        };
        assert_eq!(ladder.why().as_deref(), Some("so so; not a: no a"));
        let hook = ladder.hook();
        assert_eq!((hook.hook.as_deref(), hook.rung, hook.measured), (Some("b"), 1, true));
        ladder.chosen = Some(0);
        ladder.rungs[0] = rung("a", None, None);
        assert_eq!(ladder.why(), None);
        ladder.rungs.truncate(1);
        ladder.rungs[0].why = Some("no a".into());
        ladder.chosen = None;
        assert_eq!(ladder.why().as_deref(), Some("not a: no a; lost: the wait"));
        assert_eq!((ladder.hook().hook, ladder.hook().rung, ladder.hook().measured), (None, 1, false));
    }

    #[test]
    fn a_ladder_is_read_as_it_was_written() {
        let ladder = Ladder {
            boundary: Boundary::HSent,
            transport: None,
            essential: true,
            chosen: None,
            rungs: vec![rung("a", Some("no a"), None)],
            without: "all".into(),
        };
        let text = serde_json::to_string(&ladder).unwrap();
        assert_eq!(serde_json::from_str::<Ladder>(&text).unwrap(), ladder);
    }
}
