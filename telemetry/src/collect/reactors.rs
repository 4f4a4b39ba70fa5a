//! How busy an SPDK process's reactors are, over its JSON-RPC: one method, once a second (`spdk.rs` says why no oftener).

use super::spdk::{Method, Spdk, list, times};
use super::{Lack, Places, Subject};
use crate::about::metrics;
use crate::{About, Rows};
use serde_json::Value;
use std::time::Duration;

metrics! {
    Busy = "busy", "ns", Counter64, "time in which its pollers did something";
    Idle = "idle", "ns", Counter64, "time in which its pollers found nothing";
    Threads = "threads", "", Gauge, "SPDK threads on it";
    Interrupt = "in_interrupt", "", Gauge, "1 where it sleeps until an interrupt and does not poll";
}

pub(super) const ABOUT: About = About {
    name: "reactors",
    source: "framework_get_reactors over SPDK's RPC socket",
    object: "`lcore N`",
    at_most_every: Some(Duration::from_secs(1)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "where the kernel is recorded or the process has no RPC socket",
};

const METHODS: &[Method] = &[("framework_get_reactors", reactors)];

pub(super) fn open(places: &Places, subject: &Subject) -> Result<Spdk, Lack> {
    Spdk::of(&ABOUT, METHODS, places, subject)
}

fn reactors(answer: &Value, rows: &mut Rows) {
    for reactor in list(answer, "reactors") {
        let Some(core) = reactor.get("lcore").and_then(Value::as_u64) else { continue };
        let Some(object) = rows.object(&format!("lcore {core}")) else { return };
        times(answer, reactor, object, &[(M::Busy, "busy"), (M::Idle, "idle")], rows);
        if let Some(threads) = reactor.get("lw_threads").and_then(Value::as_array) {
            rows.count(object, M::Threads, threads.len() as u64);
        }
        if let Some(sleeps) = reactor.get("in_interrupt").and_then(Value::as_bool) {
            rows.count(object, M::Interrupt, u64::from(sleeps));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, reactors};
    use crate::rows::tests::{key, sampled};

    #[test]
    fn ticks_are_times_by_the_rate_that_is_told() {
        let answer = r#"{"tick_rate":2000000000,"pid":1,"reactors":[{"lcore":3,"busy":4000000000,"idle":18446744073709551615,"in_interrupt":false,"lw_threads":[{"name":"app_thread"}]},{"busy":1}]}"#;
        let answer = serde_json::from_str(answer).unwrap();
        let found = sampled(&ABOUT, |rows| reactors(&answer, rows));
        assert_eq!(found[&key("lcore 3", "busy")], 2e9);
        assert_eq!(found[&key("lcore 3", "threads")], 1.0);
        assert_eq!(found.len(), 4);
        let none = serde_json::json!({ "reactors": [{ "lcore": 1, "busy": 5 }] });
        assert!(sampled(&ABOUT, |rows| reactors(&none, rows)).is_empty());
    }
}
