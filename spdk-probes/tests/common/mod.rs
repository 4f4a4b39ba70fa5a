//! What the tests of the recorders share: a sink that keeps everything, and what must hold for every command.
#![allow(dead_code, reason = "each test file uses its part")]

mod kept;
pub(crate) mod nvmf;
pub(crate) mod standin;

use std::time::{Duration, Instant};

pub(crate) use kept::Kept;
use run_format::{Boundary, Command, Counters, Nanos, Side, Source};

/// Polls until `done` says so or the time is up; returns whether it did.
pub(crate) fn poll_until<S: Source>(
    source: &mut S,
    kept: &mut Kept,
    most: Duration,
    mut done: impl FnMut(&Kept) -> bool,
) -> bool {
    let end = Instant::now() + most;
    while Instant::now() < end {
        source.poll(Duration::from_millis(50), kept).unwrap();
        if done(kept) {
            return true;
        }
    }
    false
}

/// Stops, and checks that everything that was seen is accounted for.
pub(crate) fn stop<S: Source>(source: &mut S, kept: &mut Kept) -> Counters {
    source.stop(kept).unwrap();
    let counters = source.counters().unwrap();
    assert_eq!(
        counters.seen,
        counters.recorded + counters.unsampled + counters.lost.total() + counters.in_flight,
        "{counters:?}"
    );
    assert_eq!(counters.recorded, kept.commands.len() as u64, "{counters:?}");
    counters
}

/// Every boundary that is there comes no earlier than the ones before it on the command's way.
///
/// # Panics
/// When one does not.
pub(crate) fn assert_ordered(side: Side, command: &Command) {
    let mut last: Option<(Boundary, Nanos)> = None;
    for boundary in Boundary::of(side) {
        // On the way of a write, the answer to an R2T comes between h_sent and h_recv; all slots stand in the
        // order of passing.
        let Some(time) = command.time(boundary) else { continue };
        if let Some((before, earlier)) = last {
            assert!(earlier <= time, "{before} at {earlier:?} is after {boundary} at {time:?}: {command:#?}");
        }
        last = Some((boundary, time));
    }
}

/// These boundaries are all there.
///
/// # Panics
/// When one is not.
pub(crate) fn assert_has(command: &Command, boundaries: &[Boundary]) {
    for &boundary in boundaries {
        assert!(command.time(boundary).is_some(), "no {boundary}: {command:#?}");
    }
}
