//! What a recording costs the recorded system: told before it begins, and held against `--max-overhead`. It attaches
//! nothing to the recorded system; how the figures come about, docs/cost.md says.

use crate::counting::Counter;
use crate::software::Software;
use crate::window::{self, Spec};
use anyhow::{Result, bail};
use run_format::{Kind, PerKindNs, Price, Side};
use serde::{Deserialize, Serialize};
use spdk_probes::{
    Amount, Calibration, HookClass, Options, PerKind, PlanPrice, Prices, Process, RedZone, ring_price,
    ring_sends,
};
use std::cell::LazyCell;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

// Writing into a String can not fail; `let _ =` says so throughout.

/// How long the recorded system is watched for a budget that is a share of its commands' time: so many times so long.
const WATCHES: u32 = 5;
const WATCH: Duration = Duration::from_millis(200);
/// What each of them needs to be told from the others: commands, and the time that they took together.
const COMMANDS: f64 = 100.0;
const TOGETHER_NS: f64 = 20e6;
/// What all of them need to tell anything: the kernel counts its devices' time in milliseconds.
const LEAST_NS: f64 = 5e6;
/// A saturated SPDK core spends no less than this on a 4 KiB command (measured on a 2.1 GHz core).
const SPDK_COMMAND_NS: f64 = 2_000.0;
/// No NVMe/TCP or RDMA command of a kernel's host or target takes less.
const KERNEL_COMMAND_NS: f64 = 10_000.0;

/// What `--max-overhead` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A share of the time that a command takes at present.
    Share(f64),
    /// A time for each command, in nanoseconds.
    Time(f64),
}

impl Budget {
    /// From `2%` or `1us`.
    pub fn parse(text: &str) -> Result<Budget, String> {
        let text = text.trim();
        if let Some(number) = text.strip_suffix('%') {
            let share = number.trim().parse::<f64>().ok().filter(|p| p.is_finite());
            return match share {
                Some(p) if p > 0.0 && p <= 100.0 => Ok(Budget::Share(p / 100.0)),
                Some(_) => Err(format!("{text} is no budget: more than 0% and at most 100%, such as 2%")),
                None => Err(format!(
                    "{number:?} is not a number: write a share such as 2%, or a time such as 1us"
                )),
            };
        }
        if text.starts_with('-') && text.contains(|c: char| c.is_ascii_digit()) {
            return Err(format!("{text} is no budget: less than nothing can not be kept"));
        }
        let unit_at = text.find(|c: char| c.is_ascii_alphabetic() || c == 'µ').unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let nanos = match unit {
            "ns" => 1.0,
            "us" | "µs" => 1e3,
            "ms" => 1e6,
            "" if crate::cli::is_nothing(number) => {
                return Err("write a share such as 2%, or a time such as 1us".into());
            }
            "" => {
                return Err(format!(
                    "{text:?} has no unit: write {text}% of a command's time, or {text}us, ns or ms for each command"
                ));
            }
            _ => return Err(format!("{unit:?} is no unit of a budget: write %, ns, us or ms")),
        };
        let number = number.trim().parse::<f64>().map_err(|_| format!("{number:?} is not a number"))?;
        let nanos = number * nanos;
        if !(1.0..=1e9).contains(&nanos) {
            return Err(format!("{text} is no budget: at least 1ns for each command, and at most 1s"));
        }
        Ok(Budget::Time(nanos))
    }
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Budget::Share(share) => write!(f, "{}%", round(share * 100.0)),
            Budget::Time(nanos) => f.write_str(&time(*nanos)),
        }
    }
}

fn round(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

/// `0.92 us`, `14 us`, `40 ns`, `0.2 ns`.
fn time(nanos: f64) -> String {
    match nanos {
        n if n < 10.0 => format!("{n:.1} ns"),
        n if n < 100.0 => format!("{n:.0} ns"),
        n if n < 10_000.0 => format!("{:.2} us", n / 1e3),
        n if n < 1e6 => format!("{:.0} us", n / 1e3),
        n => format!("{:.1} ms", n / 1e6),
    }
}

/// A source of an SPDK target's commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Uprobes, or the kernel's hooks.
    Hooks,
    /// The trace ring with one uprobe.
    Hybrid,
    /// The trace ring alone.
    Trace,
}

impl Choice {
    fn name(self) -> &'static str {
        match self {
            Choice::Hooks => "the hooks",
            Choice::Hybrid => "--source hybrid",
            Choice::Trace => "--source trace",
        }
    }
}

/// What is decided on.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What one command may cost on average.
    pub allowed_ns: f64,
    /// What was asked for, or would be used, and its price.
    pub planned: (Choice, f64),
    /// What may be used instead, best first.
    pub instead: Vec<(Choice, f64)>,
    /// The windows that were asked for.
    pub window: Option<Spec>,
}

/// How the budget is kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// As planned.
    Keep,
    /// With another source.
    Source(Choice),
    /// As planned, in windows in which probes are in place for at most this share of the time.
    Windows(f64),
    /// Not at all, for this reason.
    Refuse(String),
}

/// Decides how a budget is kept. How long probes are in place around a window, the recorder finds out: what can not be
/// kept even if that is nothing is refused here.
pub fn decide(question: &Question) -> Decision {
    let Question { allowed_ns, planned: (choice, price), instead, window: spec } = question;
    if price <= allowed_ns {
        return Decision::Keep;
    }
    let share = allowed_ns / price;
    if let Some(spec) = spec {
        let armed = spec.length.as_secs_f64() / spec.every.as_secs_f64();
        return if armed <= share {
            Decision::Windows(share)
        } else {
            Decision::Refuse(format!(
                "{} in windows of {spec} cost {} for each command on average (the probes are in place {:.1}% of the time): make the windows rarer, or leave --window out and it is chosen",
                choice.name(),
                time(armed * price),
                armed * 100.0
            ))
        };
    }
    if let Some((source, _)) = instead.iter().find(|(_, price)| price <= allowed_ns) {
        return Decision::Source(*source);
    }
    if share * window::RAREST.as_secs_f64() >= window::CHOSEN.as_secs_f64() {
        return Decision::Windows(share);
    }
    let others: Vec<String> =
        instead.iter().map(|(source, price)| format!(", {} {}", source.name(), time(*price))).collect();
    Decision::Refuse(format!(
        "{} cost {} for each command{}, and windows of {:?} would come more rarely than each {:?}: allow more, or give shorter ones with --window",
        choice.name(),
        time(*price),
        others.concat(),
        window::CHOSEN,
        window::RAREST
    ))
}

/// The time that a command takes at present, of which a budget is a share.
#[derive(Clone, Debug, PartialEq)]
pub struct Base {
    /// In nanoseconds.
    pub ns: f64,
    /// What it is and where it is from.
    pub what: String,
}

/// Commands that ended in a while, and the time that they took together; ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Watched {
    commands: f64,
    together_ns: f64,
}

impl Base {
    /// Watches what is to be recorded for a second.
    fn of(software: &Software, side: Side, rpc: Option<&Path>) -> Base {
        let (watched, assumed_ns, most_ns) = match software {
            // A reactor that is held up counts that time as busy.
            Software::Spdk(process) => {
                let whole = (WATCH * WATCHES).as_nanos() as f64;
                (reactors(process, rpc), SPDK_COMMAND_NS, Some(whole))
            }
            // Of many in flight at once, the latencies together are longer than the time.
            Software::Kernel => (devices(side), KERNEL_COMMAND_NS, None),
        };
        let what = match (software, side) {
            (Software::Spdk(_), _) => "the core time of a command now",
            (Software::Kernel, Side::Host) => "the mean latency of a command now",
            // The drives' own time is less than the command's, so that the budget is never too large.
            (Software::Kernel, Side::Target) => "the mean time of a command in the target's drives now",
        };
        match watched {
            Ok(watched) => Base::of_watched(&watched, what, assumed_ns, most_ns),
            Err(why) => Base::assumed(assumed_ns, &why),
        }
    }

    /// The least of what was watched, where each holds enough: what else runs on a machine only makes commands take
    /// longer. So it does where few commands came: time of `most_ns` or more was then not theirs.
    fn of_watched(watched: &[Watched], what: &str, assumed_ns: f64, most_ns: Option<f64>) -> Base {
        let over = WATCH * WATCHES;
        let all = watched.iter().fold(Watched::default(), |sum, one| Watched {
            commands: sum.commands + one.commands,
            together_ns: sum.together_ns + one.together_ns,
        });
        if all.commands < 1.0 {
            return Base::assumed(assumed_ns, &format!("no command came in {over:?}"));
        }
        if all.together_ns < LEAST_NS {
            return Base::assumed(assumed_ns, &format!("too little I/O came in {over:?}"));
        }
        let commands = all.commands;
        let each = |one: &Watched| one.together_ns / one.commands;
        if watched.iter().all(|one| one.commands >= COMMANDS && one.together_ns >= TOGETHER_NS) {
            let (least, most) = watched
                .iter()
                .map(each)
                .fold((f64::INFINITY, 0.0f64), |(least, most), ns| (least.min(ns), most.max(ns)));
            let what = format!(
                "{what}, {} (the least of {} times {WATCH:?}, the most {}; {commands} commands)",
                time(least),
                watched.len(),
                time(most)
            );
            return Base { ns: least.max(1.0), what };
        }
        if most_ns.is_some_and(|most| all.together_ns >= most) {
            return Base::assumed(
                assumed_ns,
                &format!("busy or held up throughout, with {commands} commands in {over:?}"),
            );
        }
        let ns = each(&all);
        Base { ns: ns.max(1.0), what: format!("{what}, {} ({commands} commands in {over:?})", time(ns)) }
    }

    fn assumed(ns: f64, why: &str) -> Base {
        Base { ns, what: format!("{} for each command, which few commands are below ({why})", time(ns)) }
    }
}

/// What a process's reactors did.
fn reactors(process: &Process, rpc: Option<&Path>) -> Result<Vec<Watched>, String> {
    (0..WATCHES)
        .map(|_| {
            let load = spdk_probes::load(process, rpc, WATCH)?;
            Ok(Watched { commands: load.commands as f64, together_ns: load.busy.as_nanos() as f64 })
        })
        .collect()
}

/// What the block devices of a kernel's side did.
fn devices(side: Side) -> Result<Vec<Watched>, String> {
    let counter = Counter::of(side, Kind::Kernel, None).map_err(|error| error.to_string())?;
    let sample = || counter.sample().map_err(|error| error.to_string());
    let mut before = sample()?;
    let mut watched = Vec::new();
    for _ in 0..WATCHES {
        std::thread::sleep(WATCH);
        let after = sample()?;
        let (commands, together_ns) = counter.between(&before, &after);
        watched.push(Watched { commands, together_ns: together_ns.unwrap_or(0.0) });
        before = after;
    }
    Ok(watched)
}

/// The price of a plan, as programs read it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Priced {
    /// Why figures of another machine stand for those of this one; null where they were measured.
    pub not_measured: Option<String>,
    /// Of the classes that were measured, how long that took.
    pub took_ms: u64,
    /// What a probe on a five-byte nop does to what a leaf function keeps on its stack; null where it was not tried.
    pub red_zone: Option<RedZone>,
    /// A hit of each class of hook.
    pub hooks: Vec<Hit>,
    /// What a command costs, and what it would at the entries of all functions of the table.
    #[serde(flatten)]
    pub plan: PlanPrice,
}

/// The price of a hit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hit {
    /// What the hook is.
    pub class: HookClass,
    /// In a tight loop; null where it was not measured on this machine.
    pub ns: Option<u32>,
    /// With colder caches; null where it was not measured on this machine.
    pub in_place_ns: Option<u32>,
    /// Whether it was measured on this machine.
    pub measured: bool,
    /// Why not; null where it was.
    #[serde(default)]
    pub why: Option<String>,
    /// The figures of another machine that stand for those that were not measured; null where they were.
    #[serde(default)]
    pub instead: Option<Instead>,
}

/// The price of a hit on another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instead {
    /// In a tight loop.
    pub ns: u32,
    /// With colder caches.
    pub in_place_ns: u32,
}

impl Hit {
    fn new(class: HookClass, prices: &Prices) -> Hit {
        let cost = prices.of(class);
        let measured = |ns: u32| cost.measured.then_some(ns);
        Hit {
            class,
            ns: measured(cost.ns),
            in_place_ns: measured(cost.in_place_ns),
            measured: cost.measured,
            why: prices.why(class).map(str::to_owned),
            instead: (!cost.measured).then_some(Instead { ns: cost.ns, in_place_ns: cost.in_place_ns }),
        }
    }

    /// `0.92 to 1.95 us`.
    pub fn text(&self) -> String {
        let instead = self.instead.unwrap_or(Instead { ns: 0, in_place_ns: 0 });
        let (from, to) = (self.ns.unwrap_or(instead.ns), self.in_place_ns.unwrap_or(instead.in_place_ns));
        format!("{} to {} us", micros(from), micros(to))
    }
}

impl Priced {
    /// At the prices that were measured.
    pub fn new(calibration: &Calibration, plan: PlanPrice) -> Priced {
        Priced {
            not_measured: calibration.prices.not_measured.clone(),
            took_ms: u64::try_from(calibration.took.as_millis()).unwrap_or(u64::MAX),
            red_zone: calibration.red_zone,
            hooks: calibration.prices.iter().map(|(class, _)| Hit::new(class, &calibration.prices)).collect(),
            plan,
        }
    }

    /// The dearest kind of command's price, which a budget is held against.
    fn dearest_of_reads_and_writes(plan: &PlanPrice) -> f64 {
        let PerKind { read, write, .. } = plan.per_command;
        f64::from(read.in_place_ns.max(write.in_place_ns))
    }

    /// As a run keeps it.
    pub fn manifest(&self, budget: Option<String>) -> Price {
        let of = |each: &PerKind<Amount>| PerKindNs {
            read_ns: each.read.in_place_ns,
            write_ns: each.write.in_place_ns,
            r2t_write_ns: each.r2t_write.in_place_ns,
        };
        Price {
            per_command: of(&self.plan.per_command),
            naive: self.plan.naive.as_ref().map(of),
            not_measured: self.not_measured.clone(),
            budget,
        }
    }

    /// For people: the price of a command, and of a naive plan's.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let line = |text: &mut String, what: &str, each: &PerKind<Amount>| {
            let kinds = [("read", each.read), ("write", each.write), ("R2T write", each.r2t_write)];
            let parts: Vec<String> = kinds
                .iter()
                .map(|(kind, of)| {
                    format!("{kind} {} to {} us ({} hits)", micros(of.ns), micros(of.in_place_ns), of.hits)
                })
                .collect();
            let _ = writeln!(text, "{what}: {}", parts.join(", "));
        };
        line(&mut text, "a command costs", &self.plan.per_command);
        if let Some(naive) = &self.plan.naive {
            line(&mut text, "naive placement", naive);
        }
        let _ = match &self.not_measured {
            None => {
                writeln!(text, "measured here in {} ms: {}", self.took_ms, self.classes(|hit| hit.measured))
            }
            Some(why) => {
                // Uprobes are what plans are held against.
                let uprobes = [HookClass::Emulated, HookClass::SingleStep];
                let told = self
                    .classes(|hit| self.plan.classes.contains(&hit.class) || uprobes.contains(&hit.class));
                writeln!(text, "not measured here: {why}; figures of a 2.1 GHz core: {told}")
            }
        };
        // Of the rest only what this plan uses is of interest.
        let missing = |hit: &&Hit| {
            self.not_measured.is_none() && !hit.measured && self.plan.classes.contains(&hit.class)
        };
        for hit in self.hooks.iter().filter(missing) {
            let why = hit.why.as_deref().unwrap_or_default();
            let _ = writeln!(
                text,
                "not measured here: {}: {why}; figures of a 2.1 GHz core: {}",
                hit.class.name(),
                hit.text()
            );
        }
        text
    }

    /// The price of a hit of some classes.
    fn classes(&self, wanted: impl Fn(&Hit) -> bool) -> String {
        let hits = self.hooks.iter().filter(|hit| wanted(hit));
        let each: Vec<String> = hits.map(|hit| format!("{} {}", hit.class.name(), hit.text())).collect();
        each.join(", ")
    }

    /// The price of a hit of the class of this name.
    pub fn of_class(&self, name: &str) -> Option<&Hit> {
        self.hooks.iter().find(|hit| hit.class.name() == name)
    }
}

fn micros(nanos: u32) -> String {
    format!("{}.{:02}", nanos / 1000, nanos % 1000 / 10)
}

/// What the kernel's hooks cost: those of the boundaries that are taken, and the one that tells who a command is.
pub fn of_kernel(survey: &kernel_probes::Survey, prices: &Prices) -> PlanPrice {
    let mut price = PlanPrice::default();
    for choice in &survey.boundaries {
        let Some(way) = choice.chosen.and_then(|at| choice.rungs.get(at)) else { continue };
        // Hooks of two transports are not hit by one command.
        if choice.transport.is_some() && choice.transport != survey.transports.first().copied() {
            continue;
        }
        let Some(class) = class_of(way.hook) else { continue };
        let hits = 1 + u32::from(way.hook.contains(" in "));
        let asked =
            choice.boundary.is_some_and(|b| matches!(b.name(), "h_r2t" | "h_data_sent" | "t_r2t" | "t_data"));
        let each = if asked { 0 } else { hits };
        let per = PerKind { read: each, write: each, r2t_write: hits };
        price.add(per, class, prices);
        price.add_naive(per, HookClass::Kprobe, prices);
    }
    for choice in survey.others.iter().filter(|choice| choice.essential) {
        let way = choice.chosen.and_then(|at| choice.rungs.get(at));
        if let Some(class) = way.and_then(|way| class_of(way.hook)) {
            let once = PerKind { read: 1, write: 1, r2t_write: 1 };
            price.add(once, class, prices);
            price.add_naive(once, HookClass::Kprobe, prices);
        }
    }
    price
}

/// What a hook of the kernel is; none where another hook's program does it.
fn class_of(hook: &str) -> Option<HookClass> {
    match hook.split(' ').next() {
        Some("tp_btf" | "raw_tp") => Some(HookClass::Tracepoint),
        Some("fentry" | "fexit") => Some(HookClass::Fentry),
        Some("kprobe") => Some(HookClass::Kprobe),
        _ => None,
    }
}

/// What is to be recorded, as far as its price goes.
#[derive(Debug)]
pub struct Asked<'a> {
    /// The side.
    pub side: Side,
    /// How uprobes would be placed.
    pub options: &'a Options,
    /// The source that was asked for; none where it may be chosen.
    pub source: Option<Choice>,
    /// The RPC socket that was named.
    pub rpc: Option<&'a Path>,
    /// The windows that were asked for.
    pub window: Option<Spec>,
    /// What it may cost.
    pub budget: Option<Budget>,
}

/// What is recorded in the end.
#[derive(Debug)]
pub struct Agreed {
    /// With what.
    pub source: Choice,
    /// With probes in place for at most this share of the time, where a budget needs it: in windows.
    pub share: Option<f64>,
    /// For the manifest.
    pub price: Price,
    /// For people.
    pub text: String,
    /// What hits cost.
    pub prices: Prices,
}

/// The price of a recording before it begins, and how it keeps its budget.
///
/// # Errors
/// When what is to be recorded can not be looked at, or the budget can not be kept, with the figures.
pub fn agree(asked: &Asked<'_>, software: &Software) -> Result<Agreed> {
    let planned = asked.source.unwrap_or(Choice::Hooks);
    // A program's file is read while the child measures on another core.
    let (calibration, hooks) = std::thread::scope(|scope| {
        let hooks = scope.spawn(|| Hooks::of(software, asked, planned));
        let calibration = spdk_probes::calibrate(asked.options);
        (calibration, hooks.join().unwrap_or_else(|_| bail!("the price of the hooks was not found out")))
    });
    let (prices, hooks) = (&calibration.prices, hooks?);
    // Asked for only where a ring is of interest.
    let sends = LazyCell::new(|| match software {
        Software::Spdk(process) => ring_sends(process, asked.rpc),
        Software::Kernel => false,
    });
    let of = |choice: Choice| match choice {
        Choice::Hooks => hooks.price(prices),
        Choice::Hybrid => ring_price(asked.side, prices, true, *sends),
        Choice::Trace => ring_price(asked.side, prices, false, *sends),
    };
    let plan = of(planned);
    let planned_ns = Priced::dearest_of_reads_and_writes(&plan);
    let agreed = |source, share, plan: PlanPrice, said: Option<String>| {
        let priced = Priced::new(&calibration, plan);
        let nothing = priced.plan.per_command == PerKind::default();
        let mut text = if nothing { String::new() } else { priced.text() };
        if let Some(said) = &said {
            let _ = writeln!(text, "--max-overhead {said}");
        }
        Agreed { source, share, price: priced.manifest(said), text, prices: prices.clone() }
    };
    let Some(budget) = asked.budget else {
        return Ok(agreed(planned, None, plan, None));
    };
    let (allowed_ns, base) = match budget {
        Budget::Share(share) => {
            let base = Base::of(software, asked.side, asked.rpc);
            let allowed = share * base.ns;
            (allowed, format!(" of {} = {}", base.what, time(allowed)))
        }
        Budget::Time(nanos) => (nanos, String::new()),
    };
    let mut instead = Vec::new();
    if let (Software::Spdk(process), Side::Target, None) = (software, asked.side, asked.source)
        && ring_usable(process, asked.rpc)
    {
        for choice in [Choice::Hybrid, Choice::Trace] {
            // The ring knows no cid, by which a sample is chosen.
            if choice == Choice::Hybrid || asked.options.one_in == 1 {
                instead.push((choice, Priced::dearest_of_reads_and_writes(&of(choice))));
            }
        }
    }
    let question = Question { allowed_ns, planned: (planned, planned_ns), instead, window: asked.window };
    let (source, share, what) = match decide(&question) {
        Decision::Keep => (planned, None, "kept as planned".to_owned()),
        Decision::Source(choice) => (choice, None, format!("kept by {}", choice.name())),
        Decision::Windows(share) => (
            planned,
            Some(share),
            format!("by time windows, probes in place for at most {:.2} % of the time", share * 100.0),
        ),
        Decision::Refuse(why) => {
            bail!("--max-overhead {budget}{base} can not be kept: {why}");
        }
    };
    Ok(agreed(source, share, of(source), Some(format!("{budget}{base}: {what}"))))
}

/// The hooks that a recording would use, before they have a price.
enum Hooks {
    /// Not looked at: the plan is the ring.
    None,
    Spdk(Box<spdk_probes::Offer>),
    Kernel(kernel_probes::Survey),
}

impl Hooks {
    fn of(software: &Software, asked: &Asked<'_>, planned: Choice) -> Result<Hooks> {
        Ok(match (software, planned) {
            (_, Choice::Hybrid | Choice::Trace) => Hooks::None,
            (Software::Spdk(process), Choice::Hooks) => {
                Hooks::Spdk(Box::new(spdk_probes::offer(process, asked.side, asked.options)?))
            }
            (Software::Kernel, Choice::Hooks) => {
                let survey = kernel_probes::survey(asked.side)?;
                // What can not be recorded has no price.
                if !survey.obstacles.is_empty() {
                    bail!(survey.obstacles.join("; "));
                }
                Hooks::Kernel(survey)
            }
        })
    }

    fn price(&self, prices: &Prices) -> PlanPrice {
        match self {
            Hooks::None => PlanPrice::default(),
            Hooks::Spdk(offer) => offer.price(prices),
            Hooks::Kernel(survey) => of_kernel(survey, prices),
        }
    }
}

fn ring_usable(process: &Process, rpc: Option<&Path>) -> bool {
    spdk_probes::ring_usable(process, rpc).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn budgets_are_shares_or_times() {
        assert_eq!(Budget::parse("2%"), Ok(Budget::Share(0.02)));
        assert_eq!(Budget::parse(" 0.5 % "), Ok(Budget::Share(0.005)));
        assert_eq!(Budget::parse("100%"), Ok(Budget::Share(1.0)));
        assert_eq!(Budget::parse("1us"), Ok(Budget::Time(1000.0)));
        assert_eq!(Budget::parse("1.5µs"), Ok(Budget::Time(1500.0)));
        assert_eq!(Budget::parse("250 ns"), Ok(Budget::Time(250.0)));
        assert_eq!(Budget::parse("1ms"), Ok(Budget::Time(1e6)));
        for (bad, said) in [
            ("0%", "more than 0%"),
            ("-2%", "more than 0%"),
            ("-", "has no unit"),
            ("300%", "at most 100%"),
            ("NaN%", "not a number"),
            ("inf%", "not a number"),
            ("%", "not a number"),
            ("two%", "not a number"),
            ("1", "has no unit"),
            ("", "a share such as 2%"),
            ("us", "not a number"),
            ("0us", "at least 1ns"),
            ("-1us", "less than nothing"),
            ("-1", "less than nothing"),
            ("2s", "no unit of a budget"),
            ("5 parsecs", "no unit of a budget"),
            ("1e30us", "no unit of a budget"),
            ("10000ms", "at most 1s"),
            ("1.2.3us", "not a number"),
        ] {
            let error = Budget::parse(bad).unwrap_err();
            assert!(error.contains(said), "{bad:?}: {error}");
        }
        assert_eq!(Budget::Share(0.02).to_string(), "2%");
        assert_eq!(Budget::Time(1000.0).to_string(), "1.00 us");
    }

    fn question(allowed_ns: f64, price: f64) -> Question {
        Question { allowed_ns, planned: (Choice::Hooks, price), instead: Vec::new(), window: None }
    }

    #[test]
    fn the_least_change_that_keeps_the_budget_is_made() {
        assert_eq!(decide(&question(1000.0, 900.0)), Decision::Keep);
        let with =
            |instead: &[(Choice, f64)]| Question { instead: instead.to_vec(), ..question(1000.0, 5000.0) };
        let ring = [(Choice::Hybrid, 800.0), (Choice::Trace, 300.0)];
        assert_eq!(decide(&with(&ring)), Decision::Source(Choice::Hybrid));
        assert_eq!(
            decide(&with(&[(Choice::Hybrid, 1200.0), (Choice::Trace, 300.0)])),
            Decision::Source(Choice::Trace)
        );
        // A fifth of the time; how long windows are, the recorder decides.
        assert_eq!(decide(&with(&[(Choice::Trace, 1200.0)])), Decision::Windows(0.2));
        assert_eq!(decide(&question(100.0, 5000.0)), Decision::Windows(0.02));
        let Decision::Refuse(why) = decide(&Question { instead: ring.to_vec(), ..question(1.0, 5000.0) })
        else {
            panic!("it can not be kept");
        };
        for text in ["5.00 us", "--source hybrid 0.80 us", "--source trace 0.30 us", "allow more"] {
            assert!(why.contains(text), "{why}");
        }
    }

    #[test]
    fn windows_that_were_asked_for_are_held_against_the_budget_and_not_changed() {
        let spec = Spec { length: Duration::from_millis(100), every: Duration::from_secs(1) };
        let with = |allowed| Question { window: Some(spec), ..question(allowed, 5000.0) };
        assert_eq!(decide(&with(5000.0)), Decision::Keep);
        assert_eq!(decide(&with(550.0)), Decision::Windows(0.11));
        let Decision::Refuse(why) = decide(&with(400.0)) else { panic!("it can not be kept") };
        assert!(why.contains("0.50 us") && why.contains("10.0%") && why.contains("rarer"), "{why}");
    }

    #[test]
    fn the_base_says_what_it_is() {
        let watched = |each: &[(f64, f64)]| {
            let watched: Vec<Watched> =
                each.iter().map(|&(commands, ns)| Watched { commands, together_ns: commands * ns }).collect();
            Base::of_watched(&watched, "the mean", 2000.0, Some(1e9))
        };
        // What else the machine did made all but one of them longer.
        let base = watched(&[(50_000.0, 2300.0), (50_000.0, 1990.0), (40_000.0, 9000.0)]);
        assert!(base.ns == 1990.0, "{base:?}");
        assert!(
            base.what.contains("the mean, 1.99 us (the least of 3 times 200ms, the most 9.00 us"),
            "{base:?}"
        );
        // Few commands, or little time, are not told apart.
        let base = watched(&[(50.0, 200_000.0), (150.0, 400_000.0)]);
        assert!(base.ns == 350_000.0 && base.what.contains("350 us (200 commands in 1s)"), "{base:?}");
        assert!(watched(&[(150.0, 10e3), (300.0, 20e3)]).ns > 16e3);
        let base = watched(&[(0.0, 0.0), (0.0, 0.0)]);
        assert!(base.ns == 2000.0 && base.what.contains("no command came in 1s"), "{base:?}");
        // Milliseconds are too coarse for it.
        let base = watched(&[(30.0, 40_000.0)]);
        assert!(base.ns == 2000.0 && base.what.contains("too little I/O"), "{base:?}");
        assert_eq!(watched(&[]).ns, 2000.0);
        // A core of which others took most.
        let base = watched(&[(90.0, 1.2e6), (966.0, 1.2e6)]);
        assert!(base.ns == 2000.0 && base.what.contains("busy or held up throughout, with 1056"), "{base:?}");
    }

    #[test]
    fn a_plan_is_told_with_what_it_stands_on() {
        let calibration = Calibration::none("for a reason");
        let plan = ring_price(Side::Target, &calibration.prices, true, false);
        let priced = Priced::new(&calibration, plan);
        let text = priced.text();
        for part in [
            "a command costs: read 0.71 to 1.25 us (6 hits)",
            "not measured here: for a reason; figures of a 2.1 GHz core: emulated 0.51 to 0.90 us, single-step",
            "record 0.04 to 0.07 us",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("naive"), "{text}");
        let price = priced.manifest(Some("2%".into()));
        assert_eq!((price.per_command.read_ns, price.naive), (1250, None));
        // What was not measured is no figure, and its reason stands with it.
        for hit in &priced.hooks {
            assert!(hit.ns.is_none() && hit.in_place_ns.is_none() && !hit.measured, "{hit:?}");
            assert!(hit.why.as_deref() == Some("for a reason") && hit.instead.is_some(), "{hit:?}");
        }
        let again: Priced = serde_json::from_str(&serde_json::to_string(&priced).unwrap()).unwrap();
        assert_eq!(again, priced);
    }

    proptest! {
        #[test]
        fn whatever_is_decided_keeps_the_budget(
            allowed in 1.0f64..1e6,
            price in 1.0f64..1e6,
            hybrid in 1.0f64..1e5,
            asked: bool,
            length in 2u64..900,
        ) {
            let every = Duration::from_secs(1);
            let spec = Spec { length: Duration::from_millis(length), every };
            let question = Question {
                allowed_ns: allowed,
                planned: (Choice::Hooks, price),
                instead: vec![(Choice::Hybrid, hybrid)],
                window: asked.then_some(spec),
            };
            let armed = spec.length.as_secs_f64();
            match decide(&question) {
                Decision::Keep => prop_assert!(price <= allowed),
                Decision::Source(_) => prop_assert!(!asked && hybrid <= allowed && price > allowed),
                Decision::Windows(share) => {
                    prop_assert!(share * price <= allowed * 1.000_001 && share < 1.0);
                    prop_assert!(!asked || armed <= share);
                }
                Decision::Refuse(_) if asked => prop_assert!(armed * price > allowed),
                Decision::Refuse(_) => {
                    prop_assert!(window::CHOSEN.as_secs_f64() * price / allowed > window::RAREST.as_secs_f64());
                    prop_assert!(hybrid > allowed);
                }
            }
        }

        #[test]
        fn any_text_is_a_budget_or_refused(text in ".{0,12}") {
            if let Ok(budget) = Budget::parse(&text) {
                match budget {
                    Budget::Share(share) => prop_assert!(share > 0.0 && share <= 1.0),
                    Budget::Time(nanos) => prop_assert!((1.0..=1e9).contains(&nanos)),
                }
            }
        }
    }
}
