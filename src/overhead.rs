//! What recording costs the recorded, from windows with the probes armed and windows without: the pairs, their order,
//! and what they show. Where the counts come from is in `counting`; nothing here reads a clock or a counter.
//!
//! The windows of a pair lie side by side, in an order that is drawn anew for each pair: a load that drifts moves
//! both alike, and one that swings with any period can not favour one of the two. Each pair gives one difference;
//! the interval is the jackknife's over the pairs with Student's quantile, which holds where the pairs are alike and
//! do not depend on each other. A load that jumps about makes it wide, never wrong by more than that.

use run_format::{Effect, Overhead};

/// Fewer pairs say nothing.
const LEAST_PAIRS: usize = 5;
/// How surely the interval holds the true difference.
const CONFIDENCE: f64 = 0.95;
/// How surely a difference as large as [`Effect::smallest`] would have been shown.
const POWER: f64 = 0.8;

/// One window, as it was counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counted {
    /// Whether the probes were armed.
    pub armed: bool,
    /// How long it was, ns.
    pub ns: f64,
    /// Units that were counted: commands, or bytes.
    pub units: f64,
    /// How long the counted commands took together, ns, where the counter tells.
    pub busy_ns: Option<f64>,
    /// The CPU time that the recorded process had, ns, where it is one.
    pub cpu_ns: Option<f64>,
}

impl Counted {
    fn rate(&self) -> f64 {
        self.units / self.ns
    }
}

/// Which of a pair's windows is armed: drawn for every pair (SplitMix64).
#[derive(Clone, Debug)]
pub struct Draw {
    state: u64,
    second_armed: Option<bool>,
}

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw { state: seed, second_armed: None }
    }

    /// Whether the next window is armed.
    pub fn next(&mut self) -> bool {
        if let Some(armed) = self.second_armed.take() {
            return armed;
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let first = (z ^ (z >> 31)) & 1 == 1;
        self.second_armed = Some(!first);
        first
    }

    /// Forgets a pair's second window: one of it was left out.
    pub fn again(&mut self) {
        self.second_armed = None;
    }
}

/// What pairs of windows show. `per_command` is how many units one command counts.
pub fn of(windows: &[Counted], counter: &str, length_ns: u64, per_command: Option<f64>) -> Overhead {
    let pairs: Vec<(Counted, Counted)> = windows
        .chunks_exact(2)
        .filter_map(|pair| match pair {
            [a, b] if a.armed && !b.armed => Some((*a, *b)),
            [a, b] if b.armed && !a.armed => Some((*b, *a)),
            _ => None,
        })
        .filter(|(armed, idle)| armed.ns > 0.0 && idle.ns > 0.0)
        .collect();
    let mut overhead = Overhead {
        counter: counter.to_owned(),
        pairs: u32::try_from(pairs.len()).unwrap_or(u32::MAX),
        length_ns,
        ..Overhead::default()
    };
    if pairs.len() < LEAST_PAIRS {
        overhead.notes.push(format!(
            "{} pairs of windows are too few to tell: at least {LEAST_PAIRS} are needed, so record longer",
            pairs.len()
        ));
        return overhead;
    }
    let all = Sums::of(&pairs);
    if all.armed.units <= 0.0 || all.idle.units <= 0.0 {
        overhead.notes.push("there were no commands, so there is nothing to compare".to_owned());
        return overhead;
    }
    let still = pairs.iter().filter(|(armed, idle)| armed.units <= 0.0 || idle.units <= 0.0).count();
    if still > 0 {
        overhead.notes.push(format!(
            "{still} of the pairs had a window without any command: the load is not steady, or the machine is busy"
        ));
    }
    overhead.lost = effect(&pairs, |sums| 1.0 - sums.armed.rate() / sums.idle.rate());
    match per_command.filter(|units| *units > 0.0) {
        Some(units) => {
            overhead.idle_per_second = all.idle.rate() * 1e9 / units;
            overhead.armed_per_second = all.armed.rate() * 1e9 / units;
            let added = |sums: &Sums| units / sums.armed.rate() - units / sums.idle.rate();
            overhead.added_ns = effect(&pairs, added);
            if all.armed.cpu_ns.is_some() && all.idle.cpu_ns.is_some() {
                overhead.core_ns = effect(&pairs, |sums| {
                    let core = |window: &Counted| units * window.cpu_ns.unwrap_or(f64::NAN) / window.units;
                    core(&sums.armed) - core(&sums.idle)
                });
            }
        }
        None => overhead.notes.push("how much of the counter a command is could not be told".to_owned()),
    }
    if all.armed.busy_ns.is_some() && all.idle.busy_ns.is_some() {
        overhead.latency_ns = effect(&pairs, |sums| {
            let latency = |window: &Counted| window.busy_ns.unwrap_or(f64::NAN) / window.units;
            latency(&sums.armed) - latency(&sums.idle)
        });
    }
    overhead
}

/// All armed windows of some pairs together, and all idle ones. Rates are those of the sums: a mean over each
/// window's own would count the shortest times between commands most, and have none where a window is empty.
struct Sums {
    armed: Counted,
    idle: Counted,
}

impl Sums {
    fn of(pairs: &[(Counted, Counted)]) -> Sums {
        let add = |sum: Counted, window: &Counted| Counted {
            ns: sum.ns + window.ns,
            units: sum.units + window.units,
            busy_ns: sum.busy_ns.zip(window.busy_ns).map(|(a, b)| a + b),
            cpu_ns: sum.cpu_ns.zip(window.cpu_ns).map(|(a, b)| a + b),
            ..sum
        };
        let nothing = |armed| Counted { armed, ns: 0.0, units: 0.0, busy_ns: Some(0.0), cpu_ns: Some(0.0) };
        Sums {
            armed: pairs.iter().fold(nothing(true), |sum, pair| add(sum, &pair.0)),
            idle: pairs.iter().fold(nothing(false), |sum, pair| add(sum, &pair.1)),
        }
    }
}

/// For a person, in a sentence.
pub fn summary(overhead: &Overhead) -> String {
    let said = match (overhead.added_ns, overhead.lost) {
        (Some(added), Some(lost)) if added.is_shown() => format!(
            "recording adds {:.2} us a command ({:.2} to {:.2}) and takes {:.1} % of the throughput ({:.1} to {:.1})",
            added.mean / 1e3,
            added.low / 1e3,
            added.high / 1e3,
            lost.mean * 1e2,
            lost.low * 1e2,
            lost.high * 1e2
        ),
        (Some(added), Some(lost)) => format!(
            "what recording adds can not be told: less than {:.2} us a command, or {:.1} % of the throughput, would not have shown",
            added.smallest / 1e3,
            lost.smallest * 1e2
        ),
        _ => format!("what recording adds was not measured: {}", overhead.notes.join("; ")),
    };
    let core = match overhead.core_ns {
        Some(core) if core.is_shown() => format!(
            "; of the recorded process's CPU time it takes {:.2} us a command ({:.2} to {:.2})",
            core.mean / 1e3,
            core.low / 1e3,
            core.high / 1e3
        ),
        _ => String::new(),
    };
    let own = overhead.recorder_ns.map_or_else(String::new, |own| {
        format!("; the recorder itself took {:.2} us of CPU time a command", own / 1e3)
    });
    format!("{said}{core}{own} [{} pairs of windows, 95 % intervals]", overhead.pairs)
}

/// A figure of all pairs, with its interval: the jackknife's over the pairs, each left out in turn, which gives the
/// interval of a ratio of sums as Student's gives that of a mean. `None` where a figure is not finite.
fn effect(pairs: &[(Counted, Counted)], figure: impl Fn(&Sums) -> f64) -> Option<Effect> {
    let n = pairs.len() as f64;
    let all = figure(&Sums::of(pairs));
    let values: Vec<f64> = (0..pairs.len())
        .map(|left_out| {
            let mut others = pairs.to_vec();
            others.swap_remove(left_out);
            n * all - (n - 1.0) * figure(&Sums::of(&others))
        })
        .collect();
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let error = (variance / n).sqrt();
    let freedom = u32::try_from(pairs.len() - 1).unwrap_or(u32::MAX);
    let wide = quantile(freedom, 1.0 - (1.0 - CONFIDENCE) / 2.0);
    let effect = Effect {
        mean: all,
        low: all - wide * error,
        high: all + wide * error,
        smallest: (wide + quantile(freedom, POWER)) * error,
    };
    (all.is_finite() && error.is_finite()).then_some(effect)
}

/// The value that Student's t stays below with this probability, of at least one half (Abramowitz and Stegun,
/// 26.7.3 and 26.7.4, inverted by halving).
fn quantile(freedom: u32, probability: f64) -> f64 {
    let within = 2.0 * probability - 1.0;
    let (mut low, mut high) = (0.0, 1e4);
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if between(freedom, middle) < within { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// How probable it is that Student's t lies within `t` either way.
fn between(freedom: u32, t: f64) -> f64 {
    let freedom = freedom.clamp(1, 10_000);
    let angle = (t / f64::from(freedom).sqrt()).atan();
    let (sine, square) = (angle.sin(), angle.cos().powi(2));
    if freedom.is_multiple_of(2) {
        let (mut term, mut sum) = (1.0, 1.0);
        for k in (2..freedom - 1).step_by(2) {
            term *= square * f64::from(k - 1) / f64::from(k);
            sum += term;
        }
        return sine * sum;
    }
    let mut sum = 0.0;
    if freedom > 1 {
        let mut term = angle.cos();
        sum = term;
        for k in (3..freedom - 1).step_by(2) {
            term *= square * f64::from(k - 1) / f64::from(k);
            sum += term;
        }
    }
    std::f64::consts::FRAC_2_PI * (angle + sine * sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn student_s_quantiles_are_those_of_the_tables() {
        for (freedom, probability, value) in [
            (1, 0.975, 12.706),
            (2, 0.975, 4.303),
            (3, 0.975, 3.182),
            (4, 0.975, 2.776),
            (9, 0.975, 2.262),
            (10, 0.8, 0.879),
            (29, 0.975, 2.045),
            (30, 0.975, 2.042),
            (1000, 0.975, 1.962),
        ] {
            let found = quantile(freedom, probability);
            assert!((found - value).abs() < 1e-3, "{freedom} {probability}: {found}");
        }
    }

    /// Windows of a load of 2 us a command that costs so much more when armed, with noise and a drift.
    fn windows(pairs: usize, cost_ns: f64, noise: f64, seed: u64) -> Vec<Counted> {
        let mut draw = Draw::new(seed);
        let mut random = Draw::new(!seed);
        let mut unit = move || {
            let mut bit = || {
                random.again();
                f64::from(u8::from(random.next()))
            };
            (1..32).map(|n| bit() * 0.5f64.powi(n)).sum::<f64>()
        };
        (0..2 * pairs)
            .map(|n| {
                let armed = draw.next();
                // The sum of twelve is about normal.
                let normal = (0..12).map(|_| unit()).sum::<f64>() - 6.0;
                let drift = 1.0 + n as f64 * 0.002;
                let each = (2_000.0 * (1.0 + noise * normal)) * drift + if armed { cost_ns } else { 0.0 };
                // It has its core half of the time.
                let cpu_ns = Some(1e8);
                Counted { armed, ns: 2e8, units: 2e8 / each, busy_ns: Some(32.0 * 2e8), cpu_ns }
            })
            .collect()
    }

    #[test]
    fn a_cost_is_found_and_none_is_not() {
        let found = of(&windows(40, 500.0, 0.02, 7), "commands", 1, Some(1.0));
        let added = found.added_ns.unwrap();
        assert!(added.is_shown() && added.low < 500.0 && 500.0 < added.high, "{added:?}");
        assert!(added.high - added.low < 100.0, "{added:?}");
        assert!(found.lost.unwrap().is_shown() && found.lost.unwrap().low > 0.1, "{found:?}");
        // 32 commands at a time: what each takes more, all take.
        let latency = found.latency_ns.unwrap();
        assert!(latency.low < 16_000.0 && 16_000.0 < latency.high, "{latency:?}");
        // Half of the added time the process waits for its core.
        let core = found.core_ns.unwrap();
        assert!(core.low < 250.0 && 250.0 < core.high && core.is_shown(), "{core:?}");
        // Of pairs without a difference, one in twenty shows one.
        let shown = (0..400)
            .filter(|seed| of(&windows(20, 0.0, 0.05, *seed), "", 1, Some(1.0)).added_ns.unwrap().is_shown())
            .count();
        assert!((5..45).contains(&shown), "{shown} of 400");
    }

    #[test]
    fn what_could_have_been_shown_mostly_is() {
        let none = of(&windows(20, 0.0, 0.05, 1), "", 1, Some(1.0)).added_ns.unwrap();
        let shown = (0..400)
            .filter(|seed| {
                let found = of(&windows(20, none.smallest, 0.05, *seed), "", 1, Some(1.0));
                found.added_ns.unwrap().is_shown()
            })
            .count();
        assert!((230..=390).contains(&shown), "{shown} of 400");
    }

    #[test]
    fn too_little_is_said_to_be() {
        let few = of(&windows(4, 500.0, 0.0, 1), "bytes", 5, Some(1.0));
        assert!(few.added_ns.is_none() && few.notes[0].contains("too few"), "{few:?}");
        let mut still = windows(10, 0.0, 0.0, 1);
        still[3].units = 0.0;
        let found = of(&still, "bytes", 5, Some(1.0));
        assert!(found.lost.is_some() && found.notes[0].contains("1 of the pairs"), "{found:?}");
        still.iter_mut().for_each(|window| window.units = 0.0);
        let found = of(&still, "bytes", 5, Some(1.0));
        assert!(found.lost.is_none() && found.notes[0].contains("no commands"), "{found:?}");
        let unknown = of(&windows(10, 0.0, 0.0, 1), "bytes", 5, None);
        assert!(unknown.lost.is_some() && unknown.added_ns.is_none() && unknown.notes.len() == 1);
        assert!(of(&[], "", 0, None).lost.is_none());
    }

    proptest! {
        #[test]
        fn each_pair_has_one_of_each_in_an_order_that_changes(seed: u64) {
            let mut draw = Draw::new(seed);
            let pairs: Vec<(bool, bool)> = (0..64).map(|_| (draw.next(), draw.next())).collect();
            prop_assert!(pairs.iter().all(|(a, b)| a != b));
            let first = pairs.iter().filter(|pair| pair.0).count();
            prop_assert!((8..=56).contains(&first));
        }

        #[test]
        fn any_counts_give_finite_figures_or_none(counts in proptest::collection::vec((any::<bool>(), 0.0f64..1e12, 0.0f64..1e12), 0..40), units in proptest::option::of(0.0f64..1e6)) {
            let windows: Vec<Counted> = counts
                .into_iter()
                .map(|(armed, ns, units)| Counted { armed, ns, units, busy_ns: Some(ns), cpu_ns: Some(ns / 2.0) })
                .collect();
            let found = of(&windows, "", 1, units);
            for effect in [found.lost, found.added_ns, found.core_ns, found.latency_ns].into_iter().flatten() {
                prop_assert!(effect.low <= effect.mean && effect.mean <= effect.high && effect.smallest >= 0.0);
            }
        }
    }
}
