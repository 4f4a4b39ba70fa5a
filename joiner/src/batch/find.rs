//! Finds the runs beneath directories, and which belong together. It reads manifests and, where nothing else tells,
//! queues; never commands.

use crate::compare::{has_run, is_same_recording};
use crate::describe::wall_clock;
use crate::error::Error;
use crate::queues::link;
use run_format::{Manifest, Queue, QueueId, Run, Side};
use std::cell::OnceCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run that was found.
#[derive(Clone, Debug)]
pub struct FoundRun {
    /// Its directory, as it was come to.
    pub directory: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// Its directory without links.
    place: PathBuf,
    /// The directories that it, or a link to it, was found in, without links.
    parents: Vec<PathBuf>,
    /// Of all that is in it, without reading its commands.
    fingerprint: u128,
}

/// A host's and a target's run of the same load, or one side's run alone.
#[derive(Clone, Debug)]
pub struct RunPair {
    /// The host's run.
    pub host: Option<Arc<FoundRun>>,
    /// The target's run.
    pub target: Option<Arc<FoundRun>>,
}

/// Something that was found and is no run that can be read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Skipped {
    /// What: a run, a pair of runs or a directory.
    pub path: String,
    /// Why.
    pub why: String,
}

/// What is beneath the directories.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Runs that can be read.
    pub runs: usize,
    /// Pairs and single runs, in the order of their paths.
    pub pairs: Vec<RunPair>,
    /// What can not be read, or counts already.
    pub skipped: Vec<Skipped>,
}

impl RunPair {
    /// The runs' directories.
    #[must_use]
    pub fn name(&self) -> String {
        let runs = [&self.host, &self.target].into_iter().flatten();
        runs.map(|run| run.directory.display().to_string()).collect::<Vec<_>>().join(",")
    }

    /// Of where the runs are and what is in them, and of the format of results: another one where any of them changed.
    pub(crate) fn key(&self, format: &str) -> u128 {
        let mut hash = Fingerprint::new();
        hash.add(format.as_bytes());
        for run in [&self.host, &self.target] {
            match run {
                None => hash.add(b"none"),
                Some(run) => {
                    hash.add(run.place.as_os_str().as_encoded_bytes());
                    hash.add(run.directory.as_os_str().as_encoded_bytes());
                    hash.add(&run.fingerprint.to_le_bytes());
                }
            }
        }
        hash.get()
    }
}

/// FNV-1a of 128 bits: the same everywhere and for ever. It guards against accidents, not against forgery.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fingerprint(u128);

impl Fingerprint {
    pub(crate) fn new() -> Fingerprint {
        Fingerprint(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Adds bytes, and that they end here.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            // Eight bytes at a time: it is not to be the published function, only as good.
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
        self.mix(bytes.len() as u64);
    }

    fn mix(&mut self, word: u64) {
        self.0 = (self.0 ^ u128::from(word)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        self.0 ^= self.0 >> 67;
    }

    pub(crate) fn get(self) -> u128 {
        self.0
    }
}

/// Finds all runs beneath directories. A run that is come to twice, or a copy of one, counts once; links are followed,
/// once each. `None` where `stop`, which is asked at each directory, said so: a share of a network may take its time.
///
/// # Errors
/// [`Error::Input`] where a directory that was given is none. Whatever is wrong beneath them is among
/// [`Found::skipped`].
pub fn find(directories: &[PathBuf], stop: &dyn Fn() -> bool) -> Result<Option<Found>, Error> {
    let mut found = Found::default();
    let Some(runs) = walk(directories, &mut found.skipped, stop)? else { return Ok(None) };
    let runs = without_copies(runs, &mut found.skipped);
    found.runs = runs.len();
    found.pairs = paired(runs);
    Ok(Some(found))
}

/// Folders that a run consists of.
const OF_A_RUN: [&str; 3] = ["commands", "queues", "telemetry"];
/// No manifest is longer: what is, is a foreign file of the same name. Bytes.
const LONGEST: u64 = 64 << 20;

/// `None` where `stop` said so.
fn walk(
    directories: &[PathBuf],
    skipped: &mut Vec<Skipped>,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<FoundRun>>, Error> {
    for directory in directories {
        let why = match fs::metadata(directory) {
            Ok(about) if about.is_dir() => continue,
            Ok(_) => "it is no directory".to_owned(),
            Err(e) if e.kind() == ErrorKind::NotFound => "there is no such directory".to_owned(),
            Err(e) => format!("it can not be read: {e}"),
        };
        return Err(Error::Input { given: directory.display().to_string(), why });
    }
    let mut runs: Vec<FoundRun> = Vec::new();
    // Which run is in each directory that was looked at.
    let mut seen: HashMap<(u64, u64), Option<usize>> = HashMap::new();
    let mut left: Vec<PathBuf> = directories.iter().rev().cloned().collect();
    while let Some(directory) = left.pop() {
        if stop() {
            return Ok(None);
        }
        let mut skip = |path: &Path, why: String| {
            skipped.push(Skipped { path: path.display().to_string(), why });
        };
        let about = match fs::metadata(&directory) {
            Ok(about) if about.is_dir() => about,
            Ok(_) => continue,
            // It went meanwhile, or is a link to nothing.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => {
                skip(&directory, format!("it can not be read: {e}"));
                continue;
            }
        };
        let place = match seen.entry((about.dev(), about.ino())) {
            Entry::Vacant(place) => place.insert(None),
            Entry::Occupied(place) => {
                if let Some(run) = place.get().and_then(|n| runs.get_mut(n)) {
                    run.is_in(&directory);
                }
                continue;
            }
        };
        match has_run(&directory) {
            Err(why) => skip(&directory, why),
            Ok(true) => match FoundRun::read(&directory) {
                Ok(mut run) => {
                    run.is_in(&directory);
                    *place = Some(runs.len());
                    runs.push(run);
                }
                Err(error) => skip(&directory, error.to_string()),
            },
            Ok(false) => {}
        }
        let is_run = place.is_some();
        match folders(&directory, &mut skip) {
            Ok(mut folders) => {
                // What a run consists of holds no other run; what somebody put beside that may.
                folders.retain(|folder| !is_run || !OF_A_RUN.iter().any(|of| folder.ends_with(of)));
                folders.sort_unstable_by(|a, b| b.cmp(a));
                left.append(&mut folders);
            }
            Err(e) => skip(&directory, format!("it can not be listed: {e}")),
        }
    }
    Ok(Some(runs))
}

/// The folders of a directory, and links, which may lead to some.
fn folders(directory: &Path, skip: &mut dyn FnMut(&Path, String)) -> std::io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(directory)? {
        match entry.and_then(|entry| Ok((entry.file_type()?, entry.path()))) {
            Ok((kind, path)) if kind.is_dir() || kind.is_symlink() => folders.push(path),
            Ok(_) => {}
            Err(e) => skip(directory, format!("it can not be listed whole: {e}")),
        }
    }
    Ok(folders)
}

impl FoundRun {
    fn read(directory: &Path) -> Result<FoundRun, run_format::Error> {
        let io = |path: &Path, source| run_format::Error::Io { doing: "read", path: path.to_owned(), source };
        let path = directory.join("run.json");
        if fs::metadata(&path).map_err(|e| io(&path, e))?.len() > LONGEST {
            let reason = format!("it is longer than {} MiB: not a fabscope run", LONGEST >> 20);
            return Err(run_format::Error::Manifest { path, reason });
        }
        let mut hash = Fingerprint::new();
        hash.add(&fs::read(&path).map_err(|e| io(&path, e))?);
        let manifest = Manifest::read(directory)?;
        for folder in ["commands", "queues"].map(|folder| directory.join(folder)) {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(io(&folder, e)),
            };
            let mut files = Vec::new();
            for entry in entries {
                let entry = entry.map_err(|e| io(&folder, e))?;
                // One that went meanwhile is none.
                if let Ok(about) = fs::metadata(entry.path()) {
                    files.push((entry.file_name(), about.len(), about.mtime(), about.mtime_nsec()));
                }
            }
            files.sort_unstable();
            for (name, size, seconds, nanos) in files {
                hash.add(name.as_encoded_bytes());
                hash.add(&[size.to_le_bytes(), seconds.to_le_bytes(), nanos.to_le_bytes()].concat());
            }
            hash.add(folder.file_name().unwrap_or_default().as_encoded_bytes());
        }
        if let Ok(about) = fs::metadata(directory.join("slices.csv")) {
            hash.add(&[about.len().to_le_bytes(), about.mtime().to_le_bytes()].concat());
        }
        let place = fs::canonicalize(directory).map_err(|e| io(directory, e))?;
        let (directory, parents, fingerprint) = (directory.to_owned(), Vec::new(), hash.get());
        Ok(FoundRun { directory, manifest, place, parents, fingerprint })
    }

    /// Notes where it, or a link to it, is.
    fn is_in(&mut self, directory: &Path) {
        let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = fs::canonicalize(parent.unwrap_or(Path::new(".")));
        let parent = parent.unwrap_or_else(|_| self.place.clone());
        if !self.parents.contains(&parent) {
            self.parents.push(parent);
        }
    }
}

/// One of each recording: the first by path.
fn without_copies(runs: Vec<FoundRun>, skipped: &mut Vec<Skipped>) -> Vec<FoundRun> {
    let mut kept: Vec<FoundRun> = Vec::with_capacity(runs.len());
    let mut by_time: HashMap<(String, u64, u64), Vec<usize>> = HashMap::new();
    for run in runs {
        let m = &run.manifest;
        let alike =
            by_time.entry((m.machine.boot_id.clone(), m.window.start_ns.0, m.window.end_ns.0)).or_default();
        // Without a boot nothing tells recordings apart.
        let copy = alike.iter().find(|&&n| {
            !m.machine.boot_id.is_empty() && m.counters.seen > 0 && is_same_recording(&kept[n].manifest, m)
        });
        if let Some(&first) = copy {
            skipped.push(Skipped {
                path: run.directory.display().to_string(),
                why: format!("it is the same recording as {}", kept[first].directory.display()),
            });
            continue;
        }
        alike.push(kept.len());
        kept.push(run);
    }
    kept
}

/// The least share of the shorter of two recordings in which both were recorded.
const TOGETHER: f64 = 0.5;

/// A run, and its queues once they were asked for; none where they can not be read.
struct Candidate {
    run: Arc<FoundRun>,
    window: Option<(i64, i64)>,
    queues: OnceCell<Option<BTreeMap<QueueId, Queue>>>,
}

impl Candidate {
    fn of(run: &Arc<FoundRun>) -> Candidate {
        let window = wall_clock(&run.manifest).filter(|(from, to)| from <= to);
        Candidate { window, run: Arc::clone(run), queues: OnceCell::new() }
    }

    fn queues(&self) -> Option<&BTreeMap<QueueId, Queue>> {
        let read = || Run::open(&self.run.directory).and_then(|run| run.queues()).ok();
        self.queues.get_or_init(read).as_ref()
    }

    /// Whether both were recorded at one time, by their wall clocks, and share a queue.
    fn belongs_to(&self, target: &Candidate) -> bool {
        let (Some(h), Some(t)) = (self.window, target.window) else { return false };
        let shorter = (h.1 - h.0).min(t.1 - t.0).max(1);
        let both = h.1.min(t.1) - h.0.max(t.0);
        if (both as f64) < TOGETHER * shorter as f64 {
            return false;
        }
        match (self.queues(), target.queues()) {
            (Some(host), Some(target)) => !link(host, target).links.is_empty(),
            _ => false,
        }
    }
}

/// What belongs together: a host's and a target's run that are the only ones of a directory, they or links to them; else
/// those that were recorded at one time and share a queue, each with each. The others stand alone.
fn paired(runs: Vec<FoundRun>) -> Vec<RunPair> {
    let runs: Vec<Arc<FoundRun>> = runs.into_iter().map(Arc::new).collect();
    let mut folders: BTreeMap<&Path, [Vec<usize>; 2]> = BTreeMap::new();
    for (n, run) in runs.iter().enumerate() {
        for parent in &run.parents {
            folders.entry(parent).or_default()[run.manifest.side as usize].push(n);
        }
    }
    let of_folders: BTreeSet<(usize, usize)> = folders
        .into_values()
        .filter_map(|[hosts, targets]| match (&hosts[..], &targets[..]) {
            (&[host], &[target]) => Some((host, target)),
            _ => None,
        })
        .collect();
    let mut taken: HashSet<usize> = of_folders.iter().flat_map(|&(host, target)| [host, target]).collect();
    let pair = |host: Option<usize>, target: Option<usize>| {
        let run = |n: Option<usize>| n.map(|n| Arc::clone(&runs[n]));
        RunPair { host: run(host), target: run(target) }
    };
    let mut pairs: Vec<RunPair> =
        of_folders.iter().map(|&(host, target)| pair(Some(host), Some(target))).collect();
    let candidates = |side: Side| -> Vec<(usize, Candidate)> {
        let free = runs.iter().enumerate().filter(|(n, run)| !taken.contains(n) && run.manifest.side == side);
        free.map(|(n, run)| (n, Candidate::of(run))).collect()
    };
    let (hosts, targets) = (candidates(Side::Host), candidates(Side::Target));
    for (host, of_host) in &hosts {
        for (target, _) in targets.iter().filter(|(_, of_target)| of_host.belongs_to(of_target)) {
            taken.extend([host, target]);
            pairs.push(pair(Some(*host), Some(*target)));
        }
    }
    let alone = |of: &[(usize, Candidate)]| -> Vec<usize> {
        of.iter().map(|(n, _)| *n).filter(|n| !taken.contains(n)).collect()
    };
    pairs.extend(alone(&hosts).into_iter().map(|host| pair(Some(host), None)));
    pairs.extend(alone(&targets).into_iter().map(|target| pair(None, Some(target))));
    pairs.sort_by_cached_key(RunPair::name);
    pairs
}

const _: () = assert!(Side::Host as usize == 0 && Side::Target as usize == 1);
