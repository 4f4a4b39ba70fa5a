//! Switches tracepoints on for the length of a recording, over the target's RPC, and off again: only those that
//! were off before. It never writes to the target's memory itself.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::note::Note;
use super::rpc::{Rpc, RpcError};

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

    /// Takes what an earlier recording left on for off, and returns what of it is on.
    pub(super) fn forget(&mut self, left: &Masks) -> Masks {
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

/// Tracepoints that were switched on, and go off again with this.
#[derive(Debug)]
pub(super) struct Switch {
    rpc: Rpc,
    on: Masks,
    /// What tells the next recording, should this one not come to switch them off.
    note: Option<Note>,
}

impl Switch {
    /// Switches on what of `wanted` (by group number) is off. What was `left` on goes off with it.
    pub(super) fn on(
        rpc: Rpc,
        info: &Info,
        wanted: &BTreeMap<u16, u64>,
        note: Option<Note>,
        left: Masks,
    ) -> Result<Switch, RpcError> {
        let mut switch = Switch { rpc, on: left, note };
        switch.more(info, wanted)?;
        Ok(switch)
    }

    /// Switches on more of what was off before.
    pub(super) fn more(&mut self, info: &Info, wanted: &BTreeMap<u16, u64>) -> Result<(), RpcError> {
        let missing = wanted.iter().filter_map(|(group, bits)| {
            let (name, on) = info.groups.get(group)?;
            Some((name, bits & !on)).filter(|(_, missing)| *missing != 0)
        });
        let mut missing: Vec<_> = missing.collect();
        missing.sort_by_key(|(name, _)| *name == COMMANDS);
        // Noted first: a call whose answer is lost may have been carried out.
        for (name, bits) in &missing {
            *self.on.entry((*name).clone()).or_insert(0) |= bits;
        }
        if let Some(note) = &mut self.note {
            note.write(&self.on);
        }
        for (name, bits) in missing {
            self.rpc.call("trace_set_tpoint_mask", Some(parameters(name, bits)))?;
        }
        Ok(())
    }

    /// Switches one tracepoint off before the others, if it was switched on.
    pub(super) fn off_first(&mut self, info: &Info, number: u16) -> Result<(), RpcError> {
        let Some((name, _)) = info.groups.get(&(number / 64)) else { return Ok(()) };
        let bit = 1 << (number % 64);
        match self.on.get_mut(name) {
            Some(on) if *on & bit != 0 => {
                self.rpc.call("trace_clear_tpoint_mask", Some(parameters(name, bit)))?;
                *on &= !bit;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Switches off what was switched on, for good.
    pub(super) fn off(&mut self) -> Result<(), RpcError> {
        let done = self.rest();
        // One that failed is for the next recording, if the process lives on.
        if let Some(note) = self.note.take_if(|note| done.is_ok() || note.is_over()) {
            note.remove();
        }
        done
    }

    /// Switches off what was switched on, until [`Switch::more`].
    pub(super) fn rest(&mut self) -> Result<(), RpcError> {
        let mut first = Ok(());
        let mut on: Vec<_> =
            std::mem::take(&mut self.on).into_iter().filter(|(_, bits)| *bits != 0).collect();
        on.sort_by_key(|(name, _)| name != COMMANDS);
        for (name, bits) in on {
            let done = self.rpc.call("trace_clear_tpoint_mask", Some(parameters(&name, bits)));
            first = first.and(done.map(drop));
        }
        first
    }
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

    #[test]
    fn only_what_was_off_goes_on_and_off_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rpc.sock");
        let listener = UnixListener::bind(&path).unwrap();
        // The target's masks, as its methods change them.
        let server = std::thread::spawn(move || {
            let mut masks = BTreeMap::from([("bdev".to_owned(), 0b100u64), ("nvmf_tcp".to_owned(), 0)]);
            let mut history = vec![masks.clone()];
            for _ in 0..4 {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 4096];
                let n = stream.read(&mut request).unwrap();
                let request: Value = serde_json::from_slice(&request[..n]).unwrap();
                let mask = masks.get_mut(request["params"]["name"].as_str().unwrap()).unwrap();
                let bits = request["params"]["tpoint_mask"].as_u64().unwrap();
                match request["method"].as_str().unwrap() {
                    "trace_set_tpoint_mask" => *mask |= bits,
                    "trace_clear_tpoint_mask" => *mask &= !bits,
                    other => panic!("{other}"),
                }
                stream.write_all(br#"{"jsonrpc":"2.0","id":1,"result":true}"#).unwrap();
                history.push(masks.clone());
            }
            history
        });
        let groups = BTreeMap::from([(3, ("bdev".to_owned(), 0b100)), (5, ("nvmf_tcp".to_owned(), 0))]);
        let info = Info { path: String::new(), groups };
        let wanted = BTreeMap::from([(3, 0b110), (5, 0b1), (15, 0b10)]);
        let mut switch = Switch::on(Rpc::new(&path), &info, &wanted, None, Masks::new()).unwrap();
        // What was on before, and what is not there, is left alone.
        switch.off_first(&info, 3 * 64 + 2).unwrap();
        switch.off_first(&info, 15 * 64 + 1).unwrap();
        switch.off_first(&info, 3 * 64 + 1).unwrap();
        drop(switch);
        let history = server.join().unwrap();
        assert_eq!(history[3], BTreeMap::from([("bdev".to_owned(), 0b100), ("nvmf_tcp".to_owned(), 1)]));
        assert_eq!(history[2], BTreeMap::from([("bdev".to_owned(), 0b110), ("nvmf_tcp".to_owned(), 1)]));
        assert_eq!(history.first(), history.last());
    }
}
