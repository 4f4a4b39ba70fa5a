//! What a run is, in a line: for errors that must say which two runs were given.

use crate::recording::Recording;
use run_format::{ClockPair, Manifest, Nanos};

/// Side, kind, software, machine, wall-clock time, commands and queues of a run.
pub(crate) fn describe(recording: &Recording) -> String {
    describe_of(recording, recording.len() as u64)
}

/// As [`describe`], of a run of which not all commands are in memory.
pub(crate) fn describe_of(recording: &Recording, commands: u64) -> String {
    let m = &recording.manifest;
    let mut subsystems: Vec<&str> = recording.queues.values().map(|q| q.subsystem_nqn.as_str()).collect();
    subsystems.sort_unstable();
    subsystems.dedup();
    let cntlids = {
        let mut c: Vec<u16> = recording.queues.values().map(|q| q.cntlid).collect();
        c.sort_unstable();
        c.dedup();
        c.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
    };
    let queues = match recording.queues.len() {
        0 => "no queues".to_owned(),
        n => format!(
            "{n} queue{} of {} (cntlid {cntlids})",
            if n == 1 { "" } else { "s" },
            subsystems
                .iter()
                .map(|s| if s.is_empty() { "an unknown subsystem" } else { s })
                .collect::<Vec<_>>()
                .join(", "),
        ),
    };
    format!("{}: {}, {commands} commands, {queues}", recording.directory.display(), describe_manifest(m))
}

/// Side, kind, software, machine and wall-clock time of a run.
pub(crate) fn describe_manifest(m: &Manifest) -> String {
    let when = match wall_clock(m) {
        Some((from, to)) => {
            format!(", {} to {} UTC", utc(from), utc(to).split(' ').next_back().unwrap_or_default())
        }
        None => String::new(),
    };
    format!(
        "{} {} ({} {}) on {}{when}",
        m.kind, m.side, m.software.name, m.software.version, m.machine.hostname
    )
}

/// From when to when a run recorded, `CLOCK_REALTIME` nanoseconds, by the nearest pair of its clocks.
pub(crate) fn wall_clock(m: &Manifest) -> Option<(i64, i64)> {
    let at = |t: Nanos| {
        let nearest = |p: &&ClockPair| p.monotonic_ns.0.abs_diff(t.0);
        let pair = m.clocks.iter().min_by_key(nearest)?;
        pair.realtime_ns.as_i64().checked_add(t.as_i64())?.checked_sub(pair.monotonic_ns.as_i64())
    };
    Some((at(m.window.start_ns)?, at(m.window.end_ns)?))
}

/// `2026-01-31 23:59:59`, from nanoseconds since 1970 (proleptic Gregorian calendar).
pub(crate) fn utc(ns: i64) -> String {
    let seconds = ns.div_euclid(1_000_000_000);
    let (day, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 0000-03-01, so that a leap day is the last of its year.
    let z = day + 719_468;
    let era = z.div_euclid(146_097);
    let of_era = z.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{:04}-{month:02}-{date:02} {:02}:{:02}:{:02}",
        era * 400 + year_of_era + next,
        second / 3_600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00");
        assert_eq!(utc(951_827_696_000_000_000), "2000-02-29 12:34:56");
        assert_eq!(utc(1_767_225_599_999_999_999), "2025-12-31 23:59:59");
        assert_eq!(utc(-1), "1969-12-31 23:59:59");
    }
}
