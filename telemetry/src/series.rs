//! The user's own series (tokens a second, request latency) out of a CSV file, put on the recording's clock. What can
//! not be taken is told with its line and left out; a gap stays a gap.

use crate::csv::Records;
use crate::{Batch, Kind, Metric, Nanos, Row, SAMPLED};
use jiff::Timestamp;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The same instant on two clocks of the machine that recorded, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockPair {
    /// `CLOCK_MONOTONIC`.
    pub monotonic: Nanos,
    /// `CLOCK_REALTIME`.
    pub realtime: Nanos,
}

/// Why a file has no series.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SeriesError {
    /// It can not be read.
    #[error("read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It is not what a series has to be.
    #[error("{path}: {why}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what it has to be.
        why: String,
    },
}

/// Something in the file that was not taken as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// What.
    pub what: String,
    /// How many lines it was so.
    pub lines: u64,
    /// The first of them, counted from 1 with the head; 0 where it is no line's.
    pub first: u64,
    /// What stands there.
    pub example: String,
}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.lines, self.first) {
            (_, 0) => write!(f, "{}", self.what)?,
            (1, line) => write!(f, "line {line}: {}", self.what)?,
            (lines, first) => write!(f, "{lines} lines, the first is {first}: {}", self.what)?,
        }
        if self.example.is_empty() { Ok(()) } else { write!(f, " ({:?})", self.example) }
    }
}

/// A file's series on the recording's clock.
#[derive(Clone, Debug)]
pub struct Series {
    /// What the time column was taken for, such as `UNIX milliseconds`.
    pub time: String,
    /// The columns that are series.
    pub columns: Vec<String>,
    /// Each line's time and its columns' values, in the order of time; `None` is a gap.
    pub lines: Vec<(Nanos, Vec<Option<f64>>)>,
    /// What was not taken as it stands.
    pub told: Vec<Told>,
}

/// The longest file that is read, in bytes.
const LONGEST: u64 = 256 << 20;
/// More columns than this are not taken.
const COLUMNS: usize = 256;
/// A wall clock that was set meanwhile: between two pairs of clocks, one went this much (1 in N) faster than the other.
const SET: i128 = 1_000;

impl Series {
    /// Reads a file. `clocks` are the recording machine's, in order; a line's time is the wall clock's of that machine,
    /// or of one that agrees with it. Lines outside of `within` are left out.
    ///
    /// # Errors
    /// When the file can not be read, has no head, no time or no numbers.
    pub fn read(path: &Path, clocks: &[ClockPair], within: (Nanos, Nanos)) -> Result<Series, SeriesError> {
        let io = |source| SeriesError::Io { path: path.to_owned(), source };
        let refused = |why: &str| SeriesError::Refused { path: path.to_owned(), why: why.to_owned() };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(refused("it is no file"));
        }
        if metadata.len() > LONGEST {
            return Err(refused("it is longer than 256 MiB: thin it out"));
        }
        Series::parse(file.take(LONGEST), clocks, within).map_err(|why| match why {
            Why::Io(source) => io(source),
            Why::Refused(why) => refused(&why),
        })
    }

    fn parse(text: impl Read, clocks: &[ClockPair], within: (Nanos, Nanos)) -> Result<Series, Why> {
        let mut text = BufReader::new(text);
        // A mark of the byte order is no part of the first name.
        if text.fill_buf().map_err(Why::Io)?.starts_with(b"\xef\xbb\xbf") {
            text.consume(3);
        }
        let delimiter = delimiter(text.fill_buf().map_err(Why::Io)?);
        let mut records = Records::new(text, delimiter);
        let Some(head) = records.next().map_err(Why::Io)? else {
            return Err(Why::Refused("it is empty: it needs a head that names its columns".to_owned()));
        };
        let head: Vec<String> = (0..head.len()).map(|column| head.get(column)).collect();
        if head.iter().all(|name| name.is_empty() || name.parse::<f64>().is_ok() || time(name).is_ok()) {
            return Err(Why::Refused(
                "line 1 names no columns: put a head above it, such as time,tokens_per_second".to_owned(),
            ));
        }
        if head.len() < 2 {
            return Err(Why::Refused(
                "it has one column: it needs a time and at least one series".to_owned(),
            ));
        }
        let mut tally = Tally::default();
        let time_column = time_column(&head);
        let columns = columns(&head, time_column, &mut tally);
        let mut lines = Vec::new();
        let mut unit = None;
        while let Some(record) = records.next().map_err(Why::Io)? {
            let number = record.line;
            let cell = record.get(time_column);
            let at = cell.as_str();
            let realtime = match time(at) {
                Ok((realtime, its)) if *unit.get_or_insert(its) == its => realtime,
                Ok(_) => {
                    tally.tell("its time is of another kind than the first line's", number, at);
                    continue;
                }
                Err(why) => {
                    tally.tell(why, number, at);
                    continue;
                }
            };
            match record.len().cmp(&head.len()) {
                std::cmp::Ordering::Less => tally.tell("it has fewer fields than the head: gaps", number, ""),
                std::cmp::Ordering::Greater => {
                    tally.tell("it has more fields than the head: left out", number, "");
                }
                std::cmp::Ordering::Equal => {}
            }
            let values = columns.iter().map(|(column, name)| {
                let text = record.get(*column);
                value(&text).unwrap_or_else(|why| {
                    tally.tell(&format!("{name} {why}: a gap"), number, &text);
                    None
                })
            });
            let values: Vec<Option<f64>> = values.collect();
            let Some(at) = wall_to_monotonic(realtime, clocks) else {
                // Before the machine was started.
                tally.tell("it is outside of the recording", number, &cell);
                continue;
            };
            if at < within.0 || at > within.1 {
                tally.tell("it is outside of the recording", number, &cell);
                continue;
            }
            lines.push((at, number, values));
        }
        let Some(unit) = unit else {
            let why =
                tally.0.into_values().next().map_or_else(|| "it has no lines".to_owned(), |t| t.to_string());
            return Err(Why::Refused(format!("no line has a time: {why}")));
        };
        sort(&mut lines, &mut tally);
        let mut series = Series {
            time: unit.name().to_owned(),
            columns: columns.into_iter().map(|(_, name)| name).collect(),
            lines: lines.into_iter().map(|(at, _, values)| (at, values)).collect(),
            told: Vec::new(),
        };
        series.leave_out_empty(&mut tally);
        series.told = tally.0.into_values().collect();
        Ok(series)
    }

    /// Columns of nothing but gaps are no series.
    fn leave_out_empty(&mut self, tally: &mut Tally) {
        let has = |column: usize| self.lines.iter().any(|(_, v)| v.get(column).is_some_and(Option::is_some));
        let kept: Vec<bool> = (0..self.columns.len()).map(has).collect();
        for (name, _) in self.columns.iter().zip(&kept).filter(|(_, kept)| !**kept && !self.lines.is_empty())
        {
            tally.tell(&format!("{name} has no number within the recording: left out"), 0, "");
        }
        let keep = |column: &mut usize| {
            let kept = kept.get(*column).copied().unwrap_or(false);
            *column += 1;
            kept
        };
        let mut column = 0;
        self.columns.retain(|_| keep(&mut column));
        for (_, values) in &mut self.lines {
            let mut column = 0;
            values.retain(|_| keep(&mut column));
        }
    }

    /// Its rows: every line's values, and `sampled` with each. `object` is what the rows' object is to be.
    #[must_use]
    pub fn batch(&self, object: &str) -> Batch {
        let (object, nameless): (Arc<str>, Arc<str>) = (object.into(), "".into());
        let gauge = |name: &String| Metric {
            name: Cow::Owned(name.clone()),
            unit: Cow::Borrowed(""),
            kind: Kind::Gauge,
            meaning: "",
        };
        let metrics: Vec<Metric> = self.columns.iter().map(gauge).chain([SAMPLED]).collect();
        let sampled = u16::try_from(self.columns.len()).unwrap_or(u16::MAX);
        let mut rows = Vec::with_capacity(self.lines.len() * metrics.len());
        for (at, values) in &self.lines {
            for (metric, value) in (0u16..).zip(values) {
                rows.push(Row { at: *at, metric, object: Arc::clone(&object), value: *value });
            }
            rows.push(Row { at: *at, metric: sampled, object: Arc::clone(&nameless), value: Some(0.0) });
        }
        Batch { collector: "series", anew: true, rows, metrics: metrics.into() }
    }
}

/// Puts lines in the order of time; of several at the same time the last counts.
fn sort(lines: &mut Vec<(Nanos, u64, Vec<Option<f64>>)>, tally: &mut Tally) {
    for pair in lines.windows(2) {
        if let [before, after] = pair
            && after.0 < before.0
        {
            tally.tell("it is before the line above it: sorted", after.1, "");
        }
    }
    lines.sort_by_key(|(at, number, _)| (*at, *number));
    lines.dedup_by(|later, earlier| {
        let same = later.0 == earlier.0;
        if same {
            tally.tell("it has the time of an earlier line, which it replaces", later.1, "");
            std::mem::swap(later, earlier);
        }
        same
    });
}

enum Why {
    Io(std::io::Error),
    Refused(String),
}

/// What was not taken, by what it is.
#[derive(Debug, Default)]
struct Tally(BTreeMap<String, Told>);

impl Tally {
    fn tell(&mut self, what: &str, line: u64, example: &str) {
        if let Some(told) = self.0.get_mut(what) {
            if line < told.first {
                told.first = line;
                told.example = shortened(example);
            }
            told.lines += 1;
        } else if self.0.len() < 1_000 {
            let told = Told { what: what.to_owned(), lines: 1, first: line, example: shortened(example) };
            self.0.insert(what.to_owned(), told);
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

/// What stands between the fields of the first line: a comma, a semicolon or a tab, whichever is more frequent.
fn delimiter(text: &[u8]) -> u8 {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let count = |of: u8| line.iter().filter(|byte| **byte == of).count();
    [b'\t', b';', b','].into_iter().max_by_key(|of| count(*of)).unwrap_or(b',')
}

/// The column whose name says time, else the first.
fn time_column(head: &[String]) -> usize {
    const NAMES: [&str; 9] =
        ["time", "timestamp", "ts", "date", "datetime", "at", "unix", "epoch", "realtime_ns"];
    NAMES
        .iter()
        .find_map(|name| head.iter().position(|column| column.eq_ignore_ascii_case(name)))
        .or_else(|| head.iter().position(|column| column.to_ascii_lowercase().starts_with("time")))
        .unwrap_or(0)
}

/// The other columns, with names that are told apart.
fn columns(head: &[String], time_column: usize, tally: &mut Tally) -> Vec<(usize, String)> {
    let mut columns: Vec<(usize, String)> = Vec::new();
    for (position, name) in head.iter().enumerate().filter(|(position, _)| *position != time_column) {
        if columns.len() >= COLUMNS {
            tally.tell(&format!("more than {COLUMNS} columns: the others are left out"), 1, name);
            break;
        }
        let mut name = if name.is_empty() { format!("column {}", position + 1) } else { name.clone() };
        let taken = |name: &str| name == SAMPLED.name || columns.iter().any(|(_, known)| known == name);
        if taken(&name) {
            let other = format!("{name} ({})", position + 1);
            tally.tell(&format!("the name {name} is taken: its column is {other:?}"), 1, "");
            name = other;
        }
        columns.push((position, name));
    }
    columns
}

/// A number, or a gap where nothing stands or a word for nothing.
fn value(text: &str) -> Result<Option<f64>, &'static str> {
    const NOTHING: [&str; 8] = ["", "-", "na", "n/a", "nan", "null", "none", "nil"];
    if NOTHING.iter().any(|word| text.eq_ignore_ascii_case(word)) {
        return Ok(None);
    }
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(Some(value)),
        Ok(_) => Err("is infinite"),
        Err(_) => Err("is no number"),
    }
}

/// What a time was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Rfc3339,
    Seconds,
    Milliseconds,
    Microseconds,
    Nanoseconds,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Rfc3339 => "RFC 3339",
            Unit::Seconds => "UNIX seconds",
            Unit::Milliseconds => "UNIX milliseconds",
            Unit::Microseconds => "UNIX microseconds",
            Unit::Nanoseconds => "UNIX nanoseconds",
        }
    }
}

/// Nanoseconds since 1970, and what the text was taken for. UNIX times of the years 1973 to 5138 have a size that
/// tells their unit.
fn time(text: &str) -> Result<(i128, Unit), &'static str> {
    if text.is_empty() {
        return Err("it has no time");
    }
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !whole.is_empty() && digits(whole) && digits(fraction) {
        let whole: i128 = whole.parse().map_err(|_| "its time is no time after 1973")?;
        let (unit, scale) = match whole {
            100_000_000..100_000_000_000 => (Unit::Seconds, 1_000_000_000),
            100_000_000_000..100_000_000_000_000 => (Unit::Milliseconds, 1_000_000),
            100_000_000_000_000..100_000_000_000_000_000 => (Unit::Microseconds, 1_000),
            100_000_000_000_000_000..100_000_000_000_000_000_000 => (Unit::Nanoseconds, 1),
            _ => return Err("its time is no time after 1973 (UNIX time or RFC 3339 are taken)"),
        };
        let mut ns = whole * scale;
        // Digit by digit, so that none is rounded away.
        let mut place = scale;
        for digit in fraction.bytes() {
            place /= 10;
            ns += i128::from(digit - b'0') * place;
        }
        return Ok((ns, unit));
    }
    match text.parse::<Timestamp>() {
        Ok(timestamp) => Ok((timestamp.as_nanosecond(), Unit::Rfc3339)),
        Err(_) if text.parse::<jiff::civil::DateTime>().is_ok() => {
            Err("its time has no zone: write Z or an offset such as +02:00 behind it")
        }
        Err(_) => Err("its time is neither RFC 3339 with a zone nor UNIX time"),
    }
}

/// A wall-clock time (ns since 1970) on the monotonic clock, by the pairs of clocks on both sides of it: between two it
/// is where it is between their times, unless the wall clock was set meanwhile; outside of them it is as far from the
/// nearest. `None` without pairs, or before the machine was started.
#[must_use]
pub fn wall_to_monotonic(realtime: i128, clocks: &[ClockPair]) -> Option<Nanos> {
    let wall = |pair: &ClockPair| i128::from(pair.realtime.0);
    let steady = |pair: &ClockPair| i128::from(pair.monotonic.0);
    let between = clocks.windows(2).find_map(|pair| {
        let [before, after] = pair else { return None };
        let (wide, long) = (wall(after) - wall(before), steady(after) - steady(before));
        let inside = wall(before) <= realtime && realtime <= wall(after);
        let was_set = (wide - long).abs() > long / SET + 1_000_000;
        (inside && wide > 0 && long > 0 && !was_set)
            .then(|| steady(before) + (realtime - wall(before)) * long / wide)
    });
    let nearest = || {
        let pair = clocks.iter().min_by_key(|pair| (wall(pair) - realtime).abs())?;
        Some(steady(pair) + realtime - wall(pair))
    };
    u64::try_from(between.or_else(nearest)?).ok().map(Nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 2026-11-30T00:00:00Z, at 1,000 s of the monotonic clock.
    const WALL: i128 = 1_795_996_800_000_000_000;
    const SECOND: u64 = 1_000_000_000;

    fn clocks() -> [ClockPair; 2] {
        let pair = |s: u64| ClockPair {
            monotonic: Nanos((1_000 + s) * SECOND),
            realtime: Nanos(WALL as u64 + s * SECOND),
        };
        [pair(0), pair(60)]
    }

    fn read(text: &str) -> Result<Series, String> {
        let all = (Nanos(1_000 * SECOND), Nanos(1_060 * SECOND));
        Series::parse(text.as_bytes(), &clocks(), all).map_err(|why| match why {
            Why::Io(error) => error.to_string(),
            Why::Refused(why) => why,
        })
    }

    fn told(series: &Series) -> Vec<String> {
        series.told.iter().map(ToString::to_string).collect()
    }

    /// Seconds into the recording, and the first column's values.
    fn first(series: &Series) -> Vec<(f64, Option<f64>)> {
        series.lines.iter().map(|(at, v)| ((at.0 as f64) / 1e9 - 1_000.0, v[0])).collect()
    }

    #[test]
    fn every_kind_of_time_is_the_same_instant() {
        for (time, unit) in [
            ("2026-11-30T00:00:05.25Z", "RFC 3339"),
            ("2026-11-30T01:00:05.250+01:00", "RFC 3339"),
            ("2026-11-29 19:00:05.25-05:00", "RFC 3339"),
            ("1795996805.25", "UNIX seconds"),
            ("1795996805250", "UNIX milliseconds"),
            ("1795996805250000", "UNIX microseconds"),
            ("1795996805250000.0", "UNIX microseconds"),
            ("1795996805250000000", "UNIX nanoseconds"),
        ] {
            let series = read(&format!("time,tokens\n{time},7\n")).unwrap();
            assert_eq!(series.time, unit, "{time}");
            assert_eq!(first(&series), [(5.25, Some(7.0))], "{time}");
            assert!(series.told.is_empty(), "{:?}", series.told);
        }
    }

    #[test]
    fn gaps_and_text_and_unsorted_lines_are_told_with_their_lines() {
        let text = "Timestamp,tokens/s,ttft,name\n\
            1795996803,30,,a\n\
            1795996801,10,0.5,b\n\
            1795996802,fast,0.6\n\
            soon,1,1,c\n\
            1795996804,NaN,1e999,d,e\n\
            1795996899,5,5,f\n\
            2026-11-30T00:00:05Z,5,5,g\n\
            1795996801,11,0.7,h\n";
        let series = read(text).unwrap();
        assert_eq!(series.columns, ["tokens/s", "ttft"]);
        assert_eq!(first(&series), [(1.0, Some(11.0)), (2.0, None), (3.0, Some(30.0)), (4.0, None)]);
        assert_eq!(series.lines[0].1[1], Some(0.7));
        let told = told(&series);
        for part in [
            "line 4: tokens/s is no number: a gap (\"fast\")",
            "line 4: it has fewer fields",
            "line 5: its time is neither RFC 3339 with a zone nor UNIX time (\"soon\")",
            "line 6: ttft is infinite",
            "line 6: it has more fields",
            "line 7: it is outside of the recording (\"1795996899\")",
            "line 8: its time is of another kind",
            "2 lines, the first is 3: it is before the line above it: sorted",
            "line 9: it has the time of an earlier line",
            "name is no number: a gap (\"a\")",
            "name has no number within the recording: left out",
        ] {
            assert!(told.iter().any(|line| line.contains(part)), "{part:?} in {told:#?}");
        }
    }

    #[test]
    fn what_is_no_series_is_refused_with_what_to_do() {
        for (text, why) in [
            ("", "needs a head"),
            ("1795996801,5\n1795996802,6\n", "put a head"),
            ("time\n1795996801\n", "one column"),
            ("time,x\n", "no lines"),
            ("time,x\n2026-11-30T00:00:05,1\n", "has no zone"),
            ("time,x\n12.5,1\n", "no time after 1973"),
            ("time,x\n-5,1\n", "neither RFC 3339"),
            ("\u{0}\u{1}\u{2}", "one column"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.csv");
        let window = (Nanos(0), Nanos(u64::MAX));
        assert!(matches!(Series::read(&path, &clocks(), window), Err(SeriesError::Io { .. })));
        assert!(Series::read(folder.path(), &clocks(), window).unwrap_err().to_string().contains("no file"));
    }

    #[test]
    fn other_separators_quotes_and_marks_are_taken() {
        let series = read("\u{feff}\"request latency\";Time\r\n\"1.5\";1795996801\r\n").unwrap();
        assert_eq!(series.columns, ["request latency"]);
        assert_eq!(first(&series), [(1.0, Some(1.5))]);
        let series = read("a\ttime\ta\tsampled\n1\t1795996801\t2\t3\n").unwrap();
        assert_eq!(series.columns, ["a", "a (3)", "sampled (4)"]);
        let batch = series.batch("load.csv");
        assert_eq!(batch.rows.len(), 4);
        assert_eq!(batch.metrics[3].name, "sampled");
        assert_eq!(batch.rows[1].value, Some(2.0));
    }

    #[test]
    fn a_wall_clock_that_was_set_meanwhile_moves_no_line_far() {
        let pair = |m: u64, r: u64| ClockPair { monotonic: Nanos(m * SECOND), realtime: Nanos(r * SECOND) };
        let at = |r: u64, clocks: &[ClockPair]| {
            wall_to_monotonic(i128::from(r) * i128::from(SECOND), clocks).map(|n| n.0 / SECOND)
        };
        // Put forward by an hour within a minute.
        let forward = [pair(100, 5_000), pair(160, 8_660)];
        assert_eq!(at(5_010, &forward), Some(110));
        assert_eq!(at(8_650, &forward), Some(150));
        // Put back.
        let back = [pair(100, 5_000), pair(160, 1_460)];
        assert_eq!(at(5_001, &back), Some(101));
        assert_eq!(at(1_459, &back), Some(159));
        assert_eq!(at(4_800, &back), None);
        assert_eq!(at(5_000, &[]), None);
        // Slow and steady drift is spread over the time between.
        let drift =
            [pair(0, 1_000), ClockPair { monotonic: Nanos(1_000 * SECOND + 10_000_000), ..pair(0, 2_000) }];
        let half = wall_to_monotonic(1_500 * i128::from(SECOND), &drift).unwrap();
        assert_eq!(half, Nanos(500 * SECOND + 5_000_000));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_series_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), headed: bool) {
            let mut text = if headed { b"time,a,b\n1795996801,1,2\n".to_vec() } else { Vec::new() };
            text.extend(bytes);
            let within = (Nanos(1_000 * SECOND), Nanos(1_060 * SECOND));
            if let Ok(series) = Series::parse(text.as_slice(), &clocks(), within) {
                prop_assert!(series.lines.is_sorted_by(|a, b| a.0 < b.0));
                for (at, values) in &series.lines {
                    prop_assert!(within.0 <= *at && *at <= within.1);
                    prop_assert_eq!(values.len(), series.columns.len());
                    prop_assert!(values.iter().flatten().all(|value| value.is_finite()));
                }
                prop_assert_eq!(series.batch("x").rows.len(), series.lines.len() * (series.columns.len() + 1));
            }
        }

        #[test]
        fn a_time_is_read_to_the_nanosecond(ns in 100_000_000_000_000_000i128..9_000_000_000_000_000_000) {
            let seconds = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
            prop_assert_eq!(time(&seconds), Ok((ns, Unit::Seconds)));
            prop_assert_eq!(time(&ns.to_string()), Ok((ns, Unit::Nanoseconds)));
            let text = Timestamp::from_nanosecond(ns).unwrap().to_string();
            prop_assert_eq!(time(&text), Ok((ns, Unit::Rfc3339)));
        }
    }
}
