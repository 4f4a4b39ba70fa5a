//! Measures on this machine what a hit of each class of hook costs: a child of this process calls one function a
//! class in a loop, without and with a small BPF program attached. It takes a third of a second, and touches no
//! other process.
//!
//! What is measured is the trap or the call into the kernel, the entry into a BPF program, and the least that a
//! program does; the recording programs do more. It is a lower bound of what a hit costs the recorded program in two
//! respects: that program's own caches and branch predictors suffer from the visit, which shows only in the
//! program, and a loop has everything a hit needs in the nearest caches. For the second there is the other figure,
//! with memory walked through between the hits.

mod child;

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, OpenObject, ProgramAttachType, UprobeMultiOpts, UprobeOpts};

use crate::loader::{Attach, kernel_version};
use crate::price::{Cost, HookClass, Prices};
use crate::{Options, process};
use child::{Between, Child, Work};

#[allow(missing_docs, missing_debug_implementations, unreachable_pub, unused_qualifications, clippy::all)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/calibrate.skel.rs"));
}

/// How long one function is called in a loop, and with memory walked through between the calls.
const WARM: Duration = Duration::from_millis(4);
const COLD: Duration = Duration::from_millis(12);
/// A measurement that took longer is given up between two steps: the machine has other things to do.
const LONGEST: Duration = Duration::from_millis(800);

/// The works that every kernel takes a uprobe on, and whose price each tells.
const UPROBES: [(Work, HookClass); 4] = [
    (Work::Push, HookClass::Emulated),
    (Work::Step, HookClass::SingleStep),
    (Work::Nop, HookClass::Usdt),
    (Work::Nop5, HookClass::Nop5),
];
/// Kernels that do not optimise it refuse a uprobe on it, for its prefix.
const NOP10: [(Work, HookClass); 1] = [(Work::Nop10, HookClass::Nop10)];

/// The programs on hooks of the kernel, and whose price each tells.
const KERNEL: [(&str, HookClass); 3] = [
    ("at_tracepoint", HookClass::Tracepoint),
    ("at_fentry", HookClass::Fentry),
    ("at_kprobe", HookClass::Kprobe),
];

/// What a uprobe on a five-byte nop does to what its function keeps below the stack pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RedZone {
    /// Nothing.
    Kept,
    /// It overwrites it.
    Overwritten,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The price of each class of hook; where it could not be measured, that of another machine.
    pub prices: Prices,
    /// Whether this kernel's uprobe on a five-byte nop keeps the function's red zone; none where it was not tried.
    pub red_zone: Option<RedZone>,
    /// How long it took.
    pub took: Duration,
}

impl Calibration {
    /// What stands for a measurement that there is none of.
    #[must_use]
    pub fn none(why: &str) -> Calibration {
        Calibration { prices: Prices::of_another_machine(why), red_zone: None, took: Duration::ZERO }
    }
}

/// Measures. What can not be measured here has the price of another machine, and says so.
#[must_use]
pub fn calibrate(options: &Options) -> Calibration {
    let start = Instant::now();
    // What the kernel refuses is told by the figures that are missing.
    let before = libbpf_rs::set_print(None);
    let mut calibration = match process::check_rights() {
        Ok(()) => measure(options, start).unwrap_or_else(|why| Calibration::none(&why)),
        Err(_) => Calibration::none("it takes the right to attach BPF programs"),
    };
    libbpf_rs::set_print(before);
    calibration.took = start.elapsed();
    calibration
}

fn measure(options: &Options, start: Instant) -> Result<Calibration, String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| match error.kind() {
            // The measured process got no CPU for so long that it was given up.
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => busy(),
            _ => format!("{what}: {error}"),
        }
    };
    let mut child = Child::start().map_err(failed("start the measured process"))?;
    let mut bare = BTreeMap::new();
    for work in UPROBES.iter().chain(&NOP10).map(|(work, _)| *work).chain([Work::Rename]) {
        let time = time(&mut child, work).map_err(failed("measure without a probe"))?;
        bare.insert(work, time);
    }

    let mut prices = Prices::default();
    let mut red_zone = None;
    for works in [&UPROBES[..], &NOP10] {
        let sites: Vec<Work> = works.iter().map(|(work, _)| *work).chain([Work::RedZone]).collect();
        let attached = attach(options, &child, "at_uprobe", &sites);
        for (work, class) in works {
            let price = match &attached {
                Err(why) if red_zone.is_none() => return Err(why.to_string()),
                Err(_) => Err("the kernel takes no probe on it".to_owned()),
                Ok(_) if start.elapsed() > LONGEST => Err(busy()),
                Ok(uprobes) => {
                    let (time, done) =
                        hits(&mut child, *work, uprobes).map_err(failed("measure with a probe"))?;
                    told(done, time, bare.get(work))
                }
            };
            prices.set(*class, price);
        }
        if attached.is_ok() && red_zone.is_none() {
            let tried = child.measure(Work::RedZone, Between::Nothing, WARM / 4);
            let overwritten = tried.map_err(failed("try the red zone"))?.sum > 0;
            red_zone = Some(if overwritten { RedZone::Overwritten } else { RedZone::Kept });
        }
    }
    for (program, class) in KERNEL {
        let price = of_kernel(options, &mut child, program, &mut bare, start);
        prices.set(class, price.map_err(failed("measure a hook"))?);
    }
    // What was not reached in time has another machine's price, and says so; without these two nothing is told.
    let told = [HookClass::Emulated, HookClass::SingleStep].iter().all(|class| prices.of(*class).measured);
    if !told {
        return Err("the machine is too busy".to_owned());
    }
    Ok(Calibration { prices, red_zone, took: start.elapsed() })
}

fn busy() -> String {
    format!("the machine is so busy that the {LONGEST:?} for measuring were over")
}

/// What a hit costs, of a time with the probe and one without; or why it can not be told.
fn told(done: Done, with: Time, without: Option<&Time>) -> Result<Cost, String> {
    match (done, without) {
        // A loop that went by the probe measured nothing.
        (Done::Missed, _) => Err("not every pass was a hit".to_owned()),
        (Done::Hit, Some(without)) => {
            with.beyond(*without).ok_or_else(|| "it is lost in what else the machine does".to_owned())
        }
        (Done::Hit, None) => Err(busy()),
    }
}

/// The price of a hook of the kernel. What it costs is little beside what passes it, so it is tried again where other
/// work on the machine hides it.
fn of_kernel(
    options: &Options,
    child: &mut Child,
    program: &str,
    bare: &mut BTreeMap<Work, Time>,
    start: Instant,
) -> std::io::Result<Result<Cost, String>> {
    let mut price = Err(busy());
    let mut best: Option<Time> = None;
    for again in [false, true, true] {
        if start.elapsed() > LONGEST {
            break;
        }
        if again {
            let time = time(child, Work::Rename)?;
            bare.entry(Work::Rename).and_modify(|least| *least = least.least(time)).or_insert(time);
        }
        // A kernel without one of them has the others.
        let attached = match attach(options, child, program, &[]) {
            Ok(attached) => attached,
            Err(error) => return Ok(Err(format!("the kernel takes none: {}", reason(&error)))),
        };
        let (time, done) = hits(child, Work::Rename, &attached)?;
        let least = best.map_or(time, |best| best.least(time));
        best = Some(least);
        price = told(done, least, bare.get(&Work::Rename));
        if price.is_ok() {
            break;
        }
    }
    Ok(price)
}

/// What the kernel said, without what was asked of it.
fn reason(error: &crate::Error) -> String {
    match error {
        crate::Error::Bpf { source, .. } => source.to_string(),
        error => error.to_string(),
    }
}

/// Whether each call of a function was a hit of its probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    Hit,
    Missed,
}

/// Calls a function that is probed.
fn hits(child: &mut Child, work: Work, attached: &Attached) -> std::io::Result<(Time, Done)> {
    let before = attached.hits();
    let (time, done) = time_and_count(child, work)?;
    let hit = attached.hits().saturating_sub(before) >= done;
    Ok((time, if hit { Done::Hit } else { Done::Missed }))
}

/// The time of one call, with everything in the caches and without.
#[derive(Clone, Copy, Debug)]
struct Time {
    warm: f64,
    cold: f64,
}

impl Time {
    /// How much longer than that, in whole nanoseconds; none where it is no longer, which no hit is.
    fn beyond(self, bare: Time) -> Option<Cost> {
        let more = |with: f64, without: f64| (with - without).round().max(0.0) as u32;
        let ns = more(self.warm, bare.warm);
        // The walk's noise must not make the colder one the cheaper.
        (ns > 0).then(|| Cost { ns, in_place_ns: more(self.cold, bare.cold).max(ns), measured: true })
    }

    /// The lesser of two: other work only adds to a time.
    fn least(self, other: Time) -> Time {
        Time { warm: self.warm.min(other.warm), cold: self.cold.min(other.cold) }
    }
}

fn time(child: &mut Child, work: Work) -> std::io::Result<Time> {
    time_and_count(child, work).map(|(time, _)| time)
}

fn time_and_count(child: &mut Child, work: Work) -> std::io::Result<(Time, u64)> {
    let warm = child.measure(work, Between::Nothing, WARM)?;
    let cold = child.measure(work, Between::Memory, COLD)?;
    Ok((Time { warm: warm.ns, cold: cold.ns }, warm.done + cold.done))
}

/// An attached program. The link goes first.
struct Attached {
    links: Vec<Link>,
    hits: libbpf_rs::MapHandle,
}

impl Attached {
    /// How often it ran.
    fn hits(&self) -> u64 {
        let values = self.hits.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten();
        let number = |value: &Vec<u8>| {
            value.get(..8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map_or(0, u64::from_ne_bytes)
        };
        values.iter().flatten().map(number).sum()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        while self.links.pop().is_some() {}
    }
}

/// Loads one program and attaches it, the way a recording attaches its own: a uprobe to these works.
fn attach(options: &Options, child: &Child, wanted: &str, works: &[Work]) -> Result<Attached, crate::Error> {
    let refused = |what: &str| {
        let what = format!("{what} the program that measures the price of hooks");
        move |source| crate::Error::Bpf { what, source }
    };
    let how = Attach::here(options);
    let mut storage = MaybeUninit::<OpenObject>::uninit();
    let mut open = skeleton::CalibrateSkelBuilder::default().open(&mut storage).map_err(refused("open"))?;
    for mut program in open.open_object_mut().progs_mut() {
        program.set_autoload(program.name() == wanted);
        if program.name() == "at_uprobe" && how == Attach::Multi {
            program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
        }
    }
    let loaded = open.load().map_err(refused("load"))?;
    let hits = crate::loader::map(loaded.object(), "hits")?;
    let mut links = Vec::new();
    for program in loaded.object().progs_mut().filter(|program| program.name() == wanted) {
        match wanted {
            "at_kprobe" => {
                links.push(program.attach_kprobe(false, "__set_task_comm").map_err(refused("attach"))?);
            }
            "at_uprobe" => {
                let offsets: Vec<usize> = works
                    .iter()
                    .filter_map(|work| child::file_offset(work.site()?))
                    .filter_map(|offset| usize::try_from(offset).ok())
                    .collect();
                let file = "/proc/self/exe";
                match how {
                    Attach::Multi => {
                        // Until 6.10 the PID of a multi-uprobe meant a thread; this process calls none of them.
                        let pid = if kernel_version() >= (6, 10) { child.pid() } else { -1 };
                        let opts = UprobeMultiOpts { offsets, ..UprobeMultiOpts::default() };
                        let link = program.attach_uprobe_multi_with_opts(pid, file, "", opts);
                        links.push(link.map_err(refused("attach"))?);
                    }
                    Attach::Single => {
                        for offset in offsets {
                            let opts = UprobeOpts::default();
                            let link = program.attach_uprobe_with_opts(child.pid(), file, offset, opts);
                            links.push(link.map_err(refused("attach"))?);
                        }
                    }
                }
            }
            _ => links.push(program.attach_trace().map_err(refused("attach"))?),
        }
    }
    Ok(Attached { links, hits })
}

#[cfg(test)]
mod tests {
    use super::{Calibration, Done, RedZone, Time, calibrate};
    use crate::place::{Emulation, Optimised};
    use crate::price::HookClass;
    use crate::{Avoid, Options};

    /// The measurement is of this machine, which has other work: what is sure is the order of things.
    #[test]
    fn what_the_kernel_emulates_is_cheaper_than_what_it_steps_over() {
        for avoid in [vec![], vec![Avoid::MultiUprobes]] {
            let calibration = calibrate(&Options { avoid, ..Options::default() });
            if let Some(why) = &calibration.prices.not_measured {
                println!("skipped: not measured here: {why}");
                continue;
            }
            let of = |class| calibration.prices.of(class);
            let (emulated, stepped) = (of(HookClass::Emulated), of(HookClass::SingleStep));
            assert!(emulated.measured && stepped.measured && emulated.ns > 0, "{calibration:?}");
            assert!(
                emulated.ns < stepped.ns && emulated.in_place_ns < stepped.in_place_ns,
                "{calibration:?}"
            );
            assert!(of(HookClass::Usdt).ns < stepped.ns, "{calibration:?}");
            for (class, cost) in calibration.prices.iter() {
                assert!(0 < cost.ns && cost.ns <= cost.in_place_ns, "{calibration:?}");
                assert_eq!(cost.measured, calibration.prices.why(class).is_none(), "{calibration:?}");
            }
            assert!(calibration.took.as_secs() < 2, "{calibration:?}");
            // Where no kernel of this version optimises a five-byte nop, none overwrites anything.
            let red_zone = calibration.red_zone.unwrap();
            let optimised = Emulation::of_this_kernel().optimised;
            assert!(optimised == Optimised::Nop5 || red_zone == RedZone::Kept, "{calibration:?}");
        }
    }

    #[test]
    fn what_was_not_measured_says_so_and_has_a_price() {
        let none = Calibration::none("for a reason");
        assert_eq!(none.prices.not_measured.as_deref(), Some("for a reason"));
        assert!(none.prices.iter().all(|(_, cost)| cost.ns > 0 && !cost.measured));
        assert_eq!(none.red_zone, None);
    }

    #[test]
    fn noise_makes_no_price_negative_and_no_cold_hit_cheaper() {
        let time = |warm, cold| Time { warm, cold };
        let cost = time(510.4, 900.0).beyond(time(10.0, 1000.0)).unwrap();
        assert_eq!((cost.ns, cost.in_place_ns), (500, 500));
        // Nothing costs nothing: what can not be told is not told.
        for with in [5.0, 10.0, 10.4] {
            assert_eq!(time(with, 500.0).beyond(time(10.0, 10.0)), None, "{with}");
        }
    }

    #[test]
    fn what_can_not_be_told_has_its_reason() {
        let time = |warm| Time { warm, cold: warm };
        let told = |done, with| super::told(done, time(with), Some(&time(100.0)));
        assert_eq!(told(Done::Hit, 150.0).unwrap().ns, 50);
        assert!(told(Done::Hit, 100.0).unwrap_err().contains("what else the machine does"));
        assert!(told(Done::Missed, 150.0).unwrap_err().contains("not every pass"));
        assert!(super::told(Done::Hit, time(150.0), None).unwrap_err().contains("busy"));
        assert_eq!(time(3.0).least(Time { warm: 5.0, cold: 2.0 }).cold, 2.0);
    }
}
