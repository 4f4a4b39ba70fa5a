//! What is given to compare: finds the runs, reads and joins them, and keeps of each command only when it began,
//! its latency and its stages, class by class.

use super::ClassName;
use crate::describe::describe;
use crate::error::Error;
use crate::join::{BoundaryFigures, JoinOptions, join_recordings};
use crate::recording::{NONE, Recording};
use crate::report::{RunFigures, host_alone, one_sides_boundaries, run_figures, target_alone, why_nothing};
use run_format::{Boundary, Manifest, Operation, Run, Side, Transport};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What one repetition of a side is.
#[derive(Clone, Debug)]
pub struct Input {
    given: String,
    host: Option<Run>,
    target: Option<Run>,
}

/// Which sides were recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sides {
    Pair,
    Host,
    Target,
}

impl std::fmt::Display for Sides {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Sides::Pair => "a host's and a target's run",
            Sides::Host => "a host's run alone",
            Sides::Target => "a target's run alone",
        })
    }
}

impl Input {
    /// A host's and a target's run of the same load.
    #[must_use]
    pub fn pair(host: Run, target: Run) -> Input {
        let given = format!("{},{}", host.directory().display(), target.directory().display());
        Input { given, host: Some(host), target: Some(target) }
    }

    /// One side's run alone: only what that side knows is compared.
    #[must_use]
    pub fn one(run: Run) -> Input {
        let given = run.directory().display().to_string();
        match run.manifest().side {
            Side::Host => Input { given, host: Some(run), target: None },
            Side::Target => Input { given, host: None, target: Some(run) },
        }
    }

    /// As a person gave it.
    pub(crate) fn given(&self) -> &str {
        &self.given
    }

    /// The host's run, where there is one.
    #[must_use]
    pub fn host(&self) -> Option<&Run> {
        self.host.as_ref()
    }

    /// The target's run, where there is one.
    #[must_use]
    pub fn target(&self) -> Option<&Run> {
        self.target.as_ref()
    }

    /// Opens what a person gives: a run, a directory that holds one host's and one target's run (or one run),
    /// or two runs with a comma between them, in either order.
    ///
    /// # Errors
    /// [`Error::Input`] when it is none of these, or what opening a run ended with.
    pub fn find(given: &Path) -> Result<Input, Error> {
        let text = given.to_string_lossy();
        let bad = |why: String| Error::Input { given: text.to_string(), why };
        if !given.exists()
            && let Some((first, second)) = text.split_once(',')
        {
            if second.contains(',') {
                return Err(bad("a pair is two runs with one comma between them".into()));
            }
            let mut runs = Vec::new();
            for run in [first, second].map(Path::new) {
                has_run(run).map_err(&bad)?;
                runs.push(Run::open(run)?);
            }
            return Input::of(runs, &text);
        }
        if !given.is_dir() || has_run(given).map_err(&bad)? {
            return Ok(Input::one(Run::open(given)?));
        }
        let entries = std::fs::read_dir(given).map_err(|e| bad(format!("it can not be listed: {e}")))?;
        let mut folders: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
        folders.sort();
        let mut runs = Vec::new();
        for folder in folders {
            if has_run(&folder).map_err(&bad)? {
                runs.push(Run::open(&folder)?);
            }
        }
        if runs.is_empty() {
            return Err(bad(
                "it is no run and holds none: give a run, a directory that holds a host's and a target's run, or HOST.run,TARGET.run"
                    .into(),
            ));
        }
        Input::of(runs, &text)
    }

    fn of(runs: Vec<Run>, given: &str) -> Result<Input, Error> {
        let mut input = Input { given: given.to_owned(), host: None, target: None };
        let names: Vec<String> = runs.iter().map(|r| r.directory().display().to_string()).collect();
        for run in runs {
            let side = run.manifest().side;
            let place = match side {
                Side::Host => &mut input.host,
                Side::Target => &mut input.target,
            };
            if place.replace(run).is_some() {
                return Err(Error::Input {
                    given: given.to_owned(),
                    why: format!(
                        "it has more than one run of a {side} ({}): name the two that belong together as HOST.run,TARGET.run",
                        names.join(", ")
                    ),
                });
            }
        }
        Ok(input)
    }

    fn sides(&self) -> Sides {
        match (&self.host, &self.target) {
            (Some(_), Some(_)) => Sides::Pair,
            (Some(_), None) => Sides::Host,
            // An input has at least one run.
            (None, _) => Sides::Target,
        }
    }

    /// Reads it, and joins it where it is a pair.
    pub(crate) fn read(&self) -> Result<Reading, Error> {
        let recording = |run: &Option<Run>| run.as_ref().map(Recording::read).transpose();
        let (host, target) = rayon::join(|| recording(&self.host), || recording(&self.target));
        Reading::of(self.given.clone(), host?, target?)
    }
}

/// Whether a folder has a run's manifest. One that is no file is told before anything opens it: a pipe would keep
/// its reader waiting.
pub(crate) fn has_run(folder: &Path) -> Result<bool, String> {
    let path = folder.join("run.json");
    match std::fs::metadata(&path) {
        Ok(about) if about.is_file() => Ok(true),
        Ok(_) => Err(format!("{} is no file", path.display())),
        Err(_) if path.is_symlink() => Err(format!("{} is a link to nothing", path.display())),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// Whether two runs are one recording, perhaps copied.
fn is_same(one: &Run, other: &Run) -> bool {
    let place = |run: &Run| std::fs::canonicalize(run.directory()).ok();
    (place(one).is_some() && place(one) == place(other))
        || is_same_recording(one.manifest(), other.manifest())
}

/// Whether two manifests are of one recording.
pub(crate) fn is_same_recording(a: &Manifest, b: &Manifest) -> bool {
    let recorded = |m: &Manifest| (m.side, m.window, m.counters);
    a.machine.boot_id == b.machine.boot_id && recorded(a) == recorded(b) && a.clocks == b.clocks
}

/// That no recording is given twice: it would count for more than it tells. One run a side may be compared with
/// itself, which is then said.
pub(crate) fn given_twice(base: &[Input], new: &[Input]) -> Result<Option<String>, Error> {
    let shares = |a: &Input, b: &Input| {
        let both = [(&a.host, &b.host), (&a.target, &b.target)];
        both.into_iter().any(|pair| matches!(pair, (Some(x), Some(y)) if is_same(x, y)))
    };
    let all: Vec<&Input> = base.iter().chain(new).collect();
    for (n, input) in all.iter().enumerate() {
        let Some(earlier) = all[..n].iter().find(|earlier| shares(earlier, input)) else { continue };
        if let ([_], [_]) = (base, new) {
            return Ok(Some(
                "base and new are the same recording, or share one side's: nothing of what they share can differ".into(),
            ));
        }
        let why = if earlier.given == input.given {
            "it is given twice".to_owned()
        } else {
            format!("it is the same recording as {}, or shares one side's", earlier.given)
        };
        return Err(Error::Input {
            given: input.given.clone(),
            why: format!("{why}: repetitions have to be recordings of their own"),
        });
    }
    Ok(None)
}

/// That all inputs are of the same sides.
pub(crate) fn same_kind(base: &[Input], new: &[Input]) -> Result<(), Error> {
    let mut all = base.iter().chain(new);
    let Some(first) = all.next() else {
        return Err(Error::Input { given: String::new(), why: "there is nothing to compare".into() });
    };
    if base.is_empty() || new.is_empty() {
        return Err(Error::Input {
            given: first.given.clone(),
            why: "there is nothing to compare it with".into(),
        });
    }
    match all.find(|i| i.sides() != first.sides()) {
        None => Ok(()),
        Some(other) => Err(Error::MixedInputs {
            first: format!("{} is {}", first.given, first.sides()),
            second: format!("{} is {}", other.given, other.sides()),
        }),
    }
}

/// What a class is told by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClassKey {
    pub(crate) error: bool,
    pub(crate) opcode: u8,
    pub(crate) bytes: u32,
}

impl ClassKey {
    pub(crate) fn name(self) -> ClassName {
        ClassName { operation: Operation::of(self.opcode), bytes: self.bytes, error: self.error }
    }
}

/// The commands of one class of one repetition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// When each began, ns on the clock of the host (of the target, without a host).
    pub(crate) start: Vec<i64>,
    /// Latency, then the parts in the order of [`Sides::parts`], each of every command, ns.
    pub(crate) columns: Vec<Vec<i64>>,
    /// Whether any of them had an R2T.
    pub(crate) r2t: bool,
}

impl Sample {
    pub(crate) fn len(&self) -> usize {
        self.start.len()
    }
}

impl Sides {
    /// The parts that the latency is made of: name and title.
    pub(crate) fn parts(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Sides::Pair => &[
                ("host_block", "host block layer"),
                ("host_driver", "host driver"),
                ("network", "network"),
                ("target_driver", "target driver"),
                ("storage", "storage"),
            ],
            Sides::Host => &[
                ("host_block", "host block layer"),
                ("host_driver", "host driver"),
                ("beyond_host", "beyond the host"),
            ],
            Sides::Target => &[
                ("target_driver", "target driver"),
                ("storage", "storage"),
                ("data_wait", "wait for R2T data"),
            ],
        }
    }
}

/// One repetition, read.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) name: String,
    pub(crate) sides: Sides,
    pub(crate) host: Option<RunFigures>,
    pub(crate) target: Option<RunFigures>,
    pub(crate) manifests: Vec<Manifest>,
    pub(crate) boundaries: Vec<BoundaryFigures>,
    /// Commands with an R2T: how many passed the boundaries that only they pass.
    pub(crate) r2ts: u64,
    pub(crate) transports: BTreeSet<&'static str>,
    pub(crate) queues: usize,
    /// The share of commands inside both recordings that were joined; 1 for one side.
    pub(crate) joined_share: f64,
    pub(crate) classes: BTreeMap<ClassKey, Sample>,
    /// From when to when all sides of it were armed at once, in order and on the clock of [`Sample::start`]; `None`
    /// where they were throughout.
    pub(crate) armed: Option<Vec<(i64, i64)>>,
    pub(crate) notes: Vec<String>,
}

impl Reading {
    pub(crate) fn commands(&self) -> u64 {
        self.classes.values().map(|s| s.len() as u64).sum()
    }

    pub(crate) fn of(
        name: String,
        host: Option<Recording>,
        target: Option<Recording>,
    ) -> Result<Reading, Error> {
        for run in [&host, &target].into_iter().flatten() {
            if run.len() == 0 {
                return Err(Error::TooLittle {
                    why: format!(
                        "the {}'s run has no commands: was there load on this side while it was recorded?",
                        run.manifest.side
                    ),
                    runs: describe(run),
                });
            }
        }
        match (host, target) {
            (Some(host), Some(target)) => Reading::pair(name, host, target),
            (Some(run), None) => Reading::one(name, &run, Sides::Host, |row| host_alone(&run, row)),
            (None, Some(run)) => Reading::one(name, &run, Sides::Target, |row| target_alone(&run, row)),
            (None, None) => Err(Error::Input { given: name, why: "it has no run".into() }),
        }
    }

    fn pair(name: String, host: Recording, target: Recording) -> Result<Reading, Error> {
        let joined = join_recordings(host, target, &JoinOptions::default())?;
        if joined.pairs().is_empty() {
            return Err(Error::TooLittle {
                why: why_nothing(&joined),
                runs: format!("{}\n  {}", describe(&joined.host), describe(&joined.target)),
            });
        }
        let mut classes = BTreeMap::new();
        let mut r2ts = 0;
        for &pair in joined.pairs() {
            // A pair of this join has its stages.
            let Some(stages) = joined.stages(pair) else { continue };
            let (h, t) = (pair.host_row as usize, pair.target_row as usize);
            let r2t = joined.host.r2ts[h] > 0 || joined.target.r2ts[t] > 0;
            r2ts += u64::from(r2t);
            let [a, b, c, d, e] = stages.stages;
            let start = begin(&joined.host, h);
            add(&mut classes, &joined.host, h, start, r2t, &[stages.latency, a, b, c, d, e]);
        }
        let accounting = joined.accounting();
        let elsewhere = {
            use crate::join::SetAside::{OtherQueue, Outside, Unsampled};
            [Outside, Unsampled, OtherQueue].map(|why| accounting.host.of(why)).iter().sum::<u64>()
        };
        let inside = accounting.host_commands.saturating_sub(elsewhere).max(1);
        let used: BTreeSet<u32> = joined.links().iter().flat_map(|l| l.host.iter().map(|q| q.0)).collect();
        let transports = joined.host.queues.iter().filter(|(id, _)| used.contains(&id.0));
        Ok(Reading {
            name,
            sides: Sides::Pair,
            host: Some(run_figures(&joined.host)),
            target: Some(run_figures(&joined.target)),
            manifests: vec![joined.host.manifest.clone(), joined.target.manifest.clone()],
            boundaries: joined.boundaries().to_vec(),
            r2ts,
            transports: transports.map(|(_, q)| q.transport.name()).collect(),
            queues: joined.links().len(),
            joined_share: accounting.joined as f64 / inside as f64,
            classes,
            armed: joined.in_both(),
            notes: joined.notes().to_vec(),
        })
    }

    fn one(
        name: String,
        run: &Recording,
        sides: Sides,
        metrics: impl Fn(usize) -> Option<[i64; 4]>,
    ) -> Result<Reading, Error> {
        let mut classes = BTreeMap::new();
        let (mut rows, mut r2ts) = (Vec::new(), 0);
        for row in 0..run.len() {
            let Some(figures) = metrics(row).filter(|f| f.iter().all(|&v| v >= 0)) else { continue };
            let r2t = run.r2ts[row] > 0;
            r2ts += u64::from(r2t);
            rows.push(row);
            add(&mut classes, run, row, begin(run, row), r2t, &figures);
        }
        if rows.is_empty() {
            return Err(Error::TooLittle {
                why: format!("none of its {} commands has the times that a comparison needs", run.len()),
                runs: describe(run),
            });
        }
        let used: BTreeSet<u32> = run.queue.iter().copied().collect();
        let queues = run.queues.iter().filter(|(id, _)| used.contains(&id.0));
        let figures = Some(run_figures(run));
        let (host, target) = if sides == Sides::Host { (figures, None) } else { (None, figures) };
        Ok(Reading {
            name,
            sides,
            host,
            target,
            manifests: vec![run.manifest.clone()],
            boundaries: one_sides_boundaries(run, &rows),
            r2ts,
            transports: queues.map(|(_, q)| q.transport.name()).collect(),
            queues: used.len(),
            joined_share: 1.0,
            classes,
            armed: run.slices.as_deref().map(<[_]>::to_vec),
            notes: Vec::new(),
        })
    }
}

/// When a command began: its first time on this side.
fn begin(run: &Recording, row: usize) -> i64 {
    let times = Boundary::of(run.manifest.side).map(|b| run.time(b, row));
    times.filter(|&t| t != NONE).min().unwrap_or(0)
}

fn add(
    classes: &mut BTreeMap<ClassKey, Sample>,
    run: &Recording,
    row: usize,
    start: i64,
    r2t: bool,
    figures: &[i64],
) {
    let key = ClassKey { error: run.status[row] != 0, opcode: run.opcode[row], bytes: run.bytes[row] };
    let sample = classes.entry(key).or_default();
    sample.columns.resize_with(figures.len(), Vec::new);
    sample.start.push(start);
    sample.r2t |= r2t;
    for (column, &value) in sample.columns.iter_mut().zip(figures) {
        column.push(value);
    }
}

/// The transport that a reading's queues use, where it is one.
pub(crate) fn transport(reading: &Reading) -> Option<Transport> {
    match reading.transports.iter().collect::<Vec<_>>()[..] {
        [one] => Transport::parse(one),
        _ => None,
    }
}
