//! `slices.csv`: from when to when a windowed run's probes were armed, one line a slice, appended as each slice
//! ends. It knows no commands.
//!
//! The file only grows, so a day of one slice a second costs 86,400 short appends and no rewriting. A line counts
//! when it is whole: what a `kill -9` or a full disk cut off in the middle reads as never written. The slice that was
//! under way then is in the manifest, up to the last segment. DuckDB, pandas and polars read the file as it is.

use crate::{ClockPair, Error, Manifest, Nanos, State, Window};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The file's name in a run.
const NAME: &str = "slices.csv";
/// Its first line.
const HEADER: &str = "start_ns,end_ns,realtime_ns";
/// The longest file that is read: a slice a second for ten years. What is longer is no slice list.
const MOST_BYTES: u64 = 1 << 35;

/// The file of a run being recorded.
#[derive(Debug)]
pub(crate) struct SliceLog {
    path: PathBuf,
    file: File,
}

impl SliceLog {
    /// Creates it in the run's directory.
    pub(crate) fn create(directory: &Path) -> Result<SliceLog, Error> {
        let path = directory.join(NAME);
        let mut file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .open(&path)
            .map_err(|source| Error::Io { doing: "create", path: path.clone(), source })?;
        writeln!(file, "{HEADER}").map_err(|source| Error::Io {
            doing: "write",
            path: path.clone(),
            source,
        })?;
        Ok(SliceLog { path, file })
    }

    /// Appends a slice, in one write.
    pub(crate) fn append(&mut self, slice: Window, clock: ClockPair) -> Result<(), Error> {
        let into = slice.start_ns.as_i64() - clock.monotonic_ns.as_i64();
        let realtime = clock.realtime_ns.0.saturating_add_signed(into);
        let line = format!("{},{},{realtime}\n", slice.start_ns.0, slice.end_ns.0);
        self.file.write_all(line.as_bytes()).map_err(|source| Error::Io {
            doing: "write",
            path: self.path.clone(),
            source,
        })
    }
}

/// The slices of a run, in order; `None` where the manifest says that it was not windowed.
pub(crate) fn read(directory: &Path, manifest: &Manifest) -> Result<Option<Vec<Window>>, Error> {
    if manifest.windows.is_none() {
        return Ok(None);
    }
    let path = directory.join(NAME);
    let io = |source| Error::Io { doing: "read", path: path.clone(), source };
    let metadata = match fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(bad(&path, 0, "it is missing")),
        Err(source) => return Err(io(source)),
    };
    if !metadata.is_file() || metadata.len() > MOST_BYTES {
        return Err(bad(&path, 0, "it is no list of slices"));
    }
    let bytes = fs::read(&path).map_err(io)?;
    let mut slices = parse(&path, &bytes)?;
    within(&path, &slices, manifest)?;
    slices.extend(under_way(&slices, manifest));
    Ok(Some(slices))
}

/// The slice in which a recording was cut short, as far as its commands reached the disk. The list may have it
/// already: it is written with every slice, and the manifest with every segment.
fn under_way(slices: &[Window], manifest: &Manifest) -> Option<Window> {
    let slice = manifest.windows.filter(|_| manifest.state == State::Open)?.under_way?;
    let end_ns = slice.end_ns.min(manifest.window.end_ns);
    let follows = slices.last().is_none_or(|last| last.end_ns <= slice.start_ns);
    (follows && manifest.window.start_ns <= slice.start_ns && slice.start_ns < end_ns)
        .then_some(Window { end_ns, ..slice })
}

fn bad(path: &Path, line: usize, reason: &str) -> Error {
    Error::Slices { path: path.to_owned(), line, reason: reason.to_owned() }
}

/// The whole lines of the file: each slice begins before it ends, and not before the one before it ended.
fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Window>, Error> {
    // What follows the last line's end was cut off while it was written.
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let text = bytes.get(..whole).unwrap_or_default();
    let mut slices = Vec::<Window>::new();
    for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if number == 0 {
            if line != HEADER.as_bytes() && !bytes.is_empty() && whole > 0 {
                return Err(bad(path, 1, &format!("it does not begin with {HEADER}")));
            }
            continue;
        }
        if line.is_empty() {
            continue;
        }
        let slice = slice(line).ok_or_else(|| bad(path, number + 1, "it is not two times and a third"))?;
        if slice.start_ns >= slice.end_ns {
            return Err(bad(path, number + 1, "the slice ends before it begins"));
        }
        if slices.last().is_some_and(|last| slice.start_ns < last.end_ns) {
            return Err(bad(path, number + 1, "the slice begins before the one above it has ended"));
        }
        slices.push(slice);
    }
    Ok(slices)
}

fn slice(line: &[u8]) -> Option<Window> {
    let text = std::str::from_utf8(line).ok()?;
    let mut fields = text.split(',');
    let mut number = || {
        let field = fields.next()?;
        // No sign and no blanks, which `parse` would take or which another reader would not.
        field.bytes().all(|byte| byte.is_ascii_digit()).then(|| field.parse::<u64>().ok())?
    };
    let (start, end, _realtime) = (number()?, number()?, number()?);
    let most = i64::MAX as u64;
    (fields.next().is_none() && start <= most && end <= most)
        .then_some(Window { start_ns: Nanos(start), end_ns: Nanos(end) })
}

/// Their times together, ns.
pub(crate) fn armed(slices: &[Window]) -> u64 {
    slices.iter().map(|slice| slice.end_ns.0 - slice.start_ns.0).fold(0, u64::saturating_add)
}

/// The slices are those that the manifest of a closed run counts, and they lie in the run's window. That of an open run may be older than the last slices.
fn within(path: &Path, slices: &[Window], manifest: &Manifest) -> Result<(), Error> {
    let window = manifest.window;
    let early = slices.iter().position(|slice| slice.start_ns < window.start_ns);
    let late = slices.iter().position(|slice| slice.end_ns > window.end_ns);
    let outside = early.or(late.filter(|_| manifest.state == State::Closed));
    if let Some(slice) = outside {
        return Err(bad(path, slice + 2, "the slice is outside the time that the run recorded"));
    }
    match manifest.windows {
        Some(windows)
            if manifest.state == State::Closed
                && (windows.slices, windows.armed_ns) != (slices.len() as u64, armed(slices)) =>
        {
            let reason = format!(
                "the run had {} slices of {} together, and the list has {} of {}",
                windows.slices,
                Nanos(windows.armed_ns),
                slices.len(),
                Nanos(armed(slices))
            );
            Err(bad(path, slices.len() + 2, &reason))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{HEADER, parse};
    use crate::{Error, Nanos, Window};
    use proptest::prelude::*;
    use std::path::Path;

    fn read(text: &str) -> Result<Vec<Window>, Error> {
        parse(Path::new("slices.csv"), text.as_bytes())
    }

    fn refused(text: &str) -> (usize, String) {
        match read(text) {
            Err(Error::Slices { line, reason, .. }) => (line, reason),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_line_that_was_cut_off_was_never_written() {
        let text = format!("{HEADER}\n10,20,1000\n30,40,1020\n50,6");
        let slices = read(&text).unwrap();
        assert_eq!(slices.len(), 2);
        assert_eq!(slices[1], Window { start_ns: Nanos(30), end_ns: Nanos(40) });
        assert!(read("").unwrap().is_empty());
        assert!(read("start_ns,en").unwrap().is_empty());
        assert!(read(&format!("{HEADER}\n")).unwrap().is_empty());
    }

    #[test]
    fn what_no_recorder_writes_is_refused_with_its_line() {
        let with = |line: &str| format!("{HEADER}\n10,20,0\n{line}\n90,95,0\n");
        for (line, reason) in [
            ("15,30,0", "before the one above"),
            ("5,8,0", "before the one above"),
            ("40,40,0", "ends before it begins"),
            ("50,40,0", "ends before it begins"),
            ("40,50", "not two times"),
            ("40,50,0,0", "not two times"),
            ("40,+50,0", "not two times"),
            ("40, 50,0", "not two times"),
            ("-40,50,0", "not two times"),
            ("40,99999999999999999999,0", "not two times"),
            ("40,18446744073709551615,0", "not two times"),
            ("\u{0},\u{0},\u{0}", "not two times"),
            (",,", "not two times"),
        ] {
            let (number, said) = refused(&with(line));
            assert_eq!(number, 3, "{line}");
            assert!(said.contains(reason), "{line}: {said}");
        }
        assert_eq!(refused("a,b\n1,2,3\n").0, 1);
        assert_eq!(refused("1,2,3\n").0, 1);
    }

    proptest! {
        #[test]
        fn any_bytes_are_slices_in_order_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), headed: bool) {
            let mut text = if headed { format!("{HEADER}\n").into_bytes() } else { Vec::new() };
            text.extend(bytes);
            if let Ok(slices) = parse(Path::new("x"), &text) {
                prop_assert!(slices.iter().all(|s| s.start_ns < s.end_ns));
                prop_assert!(slices.is_sorted_by(|a, b| a.end_ns <= b.start_ns));
            }
        }

        #[test]
        fn every_cut_leaves_the_lines_before_it(lengths in proptest::collection::vec((1u64..1_000, 1u64..1_000), 0..20), cut in 0usize..400) {
            let mut text = format!("{HEADER}\n");
            let (mut at, mut all) = (0, Vec::new());
            for (gap, length) in lengths {
                let slice = Window { start_ns: Nanos(at + gap), end_ns: Nanos(at + gap + length) };
                at = slice.end_ns.0;
                text += &format!("{},{},{}\n", slice.start_ns.0, slice.end_ns.0, at);
                all.push(slice);
            }
            let cut = cut.min(text.len());
            let read = read(&text[..cut]).unwrap();
            let whole = text[..cut].matches('\n').count().saturating_sub(1);
            prop_assert_eq!(&read[..], &all[..whole]);
        }
    }
}
