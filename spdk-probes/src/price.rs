//! What recording costs a command: the price of a hit of each class of hook, measured on this machine
//! ([`crate::calibrate`]) or taken from another, times the hits of a command.

use std::collections::{BTreeMap, BTreeSet};

use run_format::{Ladder, Side};
use serde::{Deserialize, Serialize};

use crate::functions::{self, At, Hits, Uprobe};
use crate::offer::{Offer, PerKind};
use crate::place::Class;

/// What a hook is, as far as its price goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookClass {
    /// A uprobe on a five-byte nop.
    Nop5,
    /// A uprobe on a ten-byte nop.
    Nop10,
    /// A uprobe on an instruction that the kernel carries out itself.
    Emulated,
    /// A uprobe on the one-byte nop of a USDT probe.
    Usdt,
    /// A uprobe on an instruction that is single-stepped.
    SingleStep,
    /// A tracepoint of the kernel.
    Tracepoint,
    /// fentry or fexit on a function of the kernel.
    Fentry,
    /// A kprobe.
    Kprobe,
    /// A record in SPDK's trace ring.
    Record,
}

/// The price of a hit, in nanoseconds of the thread that hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// In a tight loop, where all that a hit needs is in the nearest caches.
    pub ns: u32,
    /// With memory walked through between hits, more than the nearest caches hold.
    pub in_place_ns: u32,
    /// Whether it was measured on this machine.
    pub measured: bool,
}

/// The price of each class of hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prices {
    costs: [(HookClass, Cost); 9],
    /// Why a class was not measured on this machine, though others were.
    why: BTreeMap<HookClass, String>,
    /// Why nothing was measured on this machine; none where it was.
    pub not_measured: Option<String>,
}

impl Default for Prices {
    /// Of another machine: Linux 6.18 in a virtual machine on an idle 2.1 GHz core, the uprobes and the records
    /// measured there, the kernel's own hooks an estimate.
    fn default() -> Prices {
        let cost = |class, ns, in_place_ns| (class, Cost { ns, in_place_ns, measured: false });
        Prices {
            costs: [
                cost(HookClass::Nop5, 280, 600),
                cost(HookClass::Nop10, 280, 600),
                cost(HookClass::Emulated, 510, 900),
                cost(HookClass::Usdt, 510, 900),
                cost(HookClass::SingleStep, 4700, 5500),
                cost(HookClass::Tracepoint, 60, 150),
                cost(HookClass::Fentry, 60, 150),
                cost(HookClass::Kprobe, 250, 500),
                cost(HookClass::Record, 40, 70),
            ],
            why: BTreeMap::from([(HookClass::Record, RECORD.to_owned())]),
            not_measured: None,
        }
    }
}

/// Why the price of a record is never measured.
const RECORD: &str = "the target writes it itself";

impl Prices {
    /// Those that stand in where nothing was measured, for this reason.
    pub(crate) fn of_another_machine(why: &str) -> Prices {
        Prices { not_measured: Some(why.to_owned()), ..Prices::default() }
    }

    /// The price of a hit.
    #[must_use]
    pub fn of(&self, class: HookClass) -> Cost {
        self.costs
            .iter()
            .find(|(of, _)| *of == class)
            .map_or(Cost { ns: 0, in_place_ns: 0, measured: false }, |(_, cost)| *cost)
    }

    /// Each class with its price, cheapest kind of hook first within uprobes.
    pub fn iter(&self) -> impl Iterator<Item = (HookClass, Cost)> {
        self.costs.iter().copied()
    }

    /// Why the price of a hit is that of another machine; none where it was measured.
    #[must_use]
    pub fn why(&self, class: HookClass) -> Option<&str> {
        if self.of(class).measured {
            return None;
        }
        let of_all = self.not_measured.as_deref();
        of_all.or_else(|| self.why.get(&class).map(String::as_str)).or(Some("it was not tried"))
    }

    /// A price that was measured, or why it was not.
    pub(crate) fn set(&mut self, class: HookClass, cost: Result<Cost, String>) {
        match cost {
            Ok(cost) => {
                self.costs.iter_mut().filter(|(of, _)| *of == class).for_each(|(_, known)| *known = cost);
            }
            Err(why) => _ = self.why.insert(class, why),
        }
    }
}

/// What some hooks cost a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// How many are hit.
    pub hits: u32,
    /// In nanoseconds, with everything in the caches: the least.
    pub ns: u32,
    /// With colder caches, which is nearer to what it is in place.
    pub in_place_ns: u32,
}

impl Amount {
    /// With so many more hits of a price.
    #[must_use]
    pub fn and(self, hits: u32, cost: Cost) -> Amount {
        Amount {
            hits: self.hits.saturating_add(hits),
            ns: self.ns.saturating_add(hits.saturating_mul(cost.ns)),
            in_place_ns: self.in_place_ns.saturating_add(hits.saturating_mul(cost.in_place_ns)),
        }
    }
}

/// What a plan costs a command of each kind, and what the naive one would: a probe at the entry of every function
/// that any rung of the table names, whatever instruction stands there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPrice {
    /// The hooks that are used.
    pub per_command: PerKind<Amount>,
    /// The naive ones; none where there is no naive way, as to a trace ring.
    pub naive: Option<PerKind<Amount>>,
    /// What the hooks are that are used.
    #[serde(default)]
    pub classes: BTreeSet<HookClass>,
}

fn add(to: &mut PerKind<Amount>, hits: PerKind<u32>, cost: Cost) {
    to.read = to.read.and(hits.read, cost);
    to.write = to.write.and(hits.write, cost);
    to.r2t_write = to.r2t_write.and(hits.r2t_write, cost);
}

impl PlanPrice {
    /// Adds a hook that is used, at these prices: the hits of a command of each kind.
    pub fn add(&mut self, hits: PerKind<u32>, class: HookClass, prices: &Prices) {
        add(&mut self.per_command, hits, prices.of(class));
        self.classes.insert(class);
    }

    /// Adds a hook of the naive plan.
    pub fn add_naive(&mut self, hits: PerKind<u32>, class: HookClass, prices: &Prices) {
        add(self.naive.get_or_insert_default(), hits, prices.of(class));
    }
}

impl Offer {
    /// What recording this side costs at these prices.
    #[must_use]
    pub fn price(&self, prices: &Prices) -> PlanPrice {
        let mut price = PlanPrice::default();
        for uprobe in &self.here.cost.uprobes {
            price.add(uprobe.hits, HookClass::of_name(&uprobe.at.class), prices);
        }
        for (class, hits) in kernel_hooks(&self.here.boundaries) {
            price.add(hits, class, prices);
        }
        let mut seen = BTreeSet::new();
        for uprobe in functions::named(self.here.side) {
            // A function's own entry is where each of its programs is hit, wherever the plan puts it.
            let Some(class) = self.build.functions.get(uprobe.function).and_then(entry) else { continue };
            if seen.insert(uprobe.function) {
                let Hits { read, write, r2t_write } = functions::hits(&Uprobe { at: At::Entry, ..uprobe });
                price.add_naive(PerKind { read, write, r2t_write }, class, prices);
            }
        }
        price
    }
}

/// The dearest of the instructions that a function's copies begin with.
fn entry(function: &crate::offer::FunctionOffer) -> Option<HookClass> {
    let openings = function.copies.iter().filter_map(|copy| copy.opening.first());
    openings.map(|first| HookClass::of_name(&first.class)).max()
}

/// The kernel's hooks that a plan uses, each once, as they stand in the names of its rungs.
fn kernel_hooks(boundaries: &[Ladder]) -> Vec<(HookClass, PerKind<u32>)> {
    let mut seen = BTreeSet::new();
    let mut hooks = Vec::new();
    for hook in boundaries.iter().filter_map(Ladder::rung).flat_map(|rung| rung.hook.split(", ")) {
        let class = match hook.split(' ').next() {
            Some("fentry" | "fexit") => HookClass::Fentry,
            Some("raw" | "tracepoint") => HookClass::Tracepoint,
            _ => continue,
        };
        if seen.insert(hook) {
            // What is sent or received for an R2T is one more of each.
            hooks.push((class, PerKind { read: 1, write: 1, r2t_write: 2 }));
        }
    }
    hooks
}

/// What SPDK's trace ring costs a command as a source: the records of the tracepoints that a recording switches on,
/// those of the sends with them where `sends` says so ([`crate::ring_sends`]), and for the hybrid one uprobe on an
/// emulated instruction.
#[must_use]
pub fn ring_price(side: Side, prices: &Prices, identities: bool, sends: bool) -> PlanPrice {
    let mut price = PlanPrice::default();
    if side == Side::Target {
        price.add(PerKind { read: 5, write: 5, r2t_write: 6 }, HookClass::Record, prices);
        if sends {
            // One for each PDU, and one for the request's end.
            price.add(PerKind { read: 3, write: 2, r2t_write: 3 }, HookClass::Record, prices);
        }
        if identities {
            price.add(PerKind { read: 1, write: 1, r2t_write: 1 }, HookClass::Emulated, prices);
        }
    }
    price
}

impl HookClass {
    /// Of a uprobe by its class's name.
    #[must_use]
    pub fn of_name(name: &str) -> HookClass {
        match name {
            "nop5" => HookClass::Nop5,
            "nop10" => HookClass::Nop10,
            "emulated" => HookClass::Emulated,
            _ => HookClass::SingleStep,
        }
    }

    /// The name that programs read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HookClass::Nop5 => "nop5",
            HookClass::Nop10 => "nop10",
            HookClass::Emulated => "emulated",
            HookClass::Usdt => "usdt",
            HookClass::SingleStep => "single-step",
            HookClass::Tracepoint => "tracepoint",
            HookClass::Fentry => "fentry",
            HookClass::Kprobe => "kprobe",
            HookClass::Record => "record",
        }
    }
}

impl From<Class> for HookClass {
    fn from(class: Class) -> HookClass {
        match class {
            Class::Nop5 => HookClass::Nop5,
            Class::Nop10 => HookClass::Nop10,
            Class::Emulated => HookClass::Emulated,
            Class::SingleStep => HookClass::SingleStep,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use run_format::Boundary;

    use super::*;
    use crate::compare::tests::{ladder, rung};

    #[test]
    fn the_kernel_s_hooks_count_once_each() {
        let ladders = [
            "uprobe f+1, fentry tcp_sendmsg",
            "uprobe g, fentry tcp_sendmsg",
            "uprobe g, raw tracepoint sock_recv_length",
            "uprobe h (call sendmsg)",
        ]
        .map(|hook| ladder(Boundary::TSent, vec![rung(hook)]));
        let classes: Vec<HookClass> = kernel_hooks(&ladders).into_iter().map(|(class, _)| class).collect();
        assert_eq!(classes, [HookClass::Fentry, HookClass::Tracepoint]);
    }

    #[test]
    fn each_class_has_a_name_of_its_own_that_programs_read() {
        let prices = Prices::default();
        let names: BTreeSet<&str> = prices.iter().map(|(class, _)| class.name()).collect();
        assert_eq!(names.len(), prices.iter().count());
        for (class, cost) in prices.iter() {
            assert_eq!(serde_json::to_value(class).unwrap(), class.name());
            assert_eq!(prices.of(class), cost);
        }
        for class in [Class::Nop5, Class::Nop10, Class::Emulated, Class::SingleStep] {
            assert_eq!(HookClass::from(class), HookClass::of_name(class.name()));
        }
    }

    #[test]
    fn the_ring_is_cheaper_than_one_uprobe_more() {
        let prices = Prices::default();
        let ring = ring_price(Side::Target, &prices, false, false);
        let hybrid = ring_price(Side::Target, &prices, true, false);
        let uprobe = prices.of(HookClass::Emulated);
        assert_eq!(hybrid.per_command.read.ns - ring.per_command.read.ns, uprobe.ns);
        assert!(ring.per_command.read.in_place_ns < uprobe.in_place_ns);
        assert_eq!(ring.per_command.read.hits, 5);
        // Sends are recorded only where there are any to record.
        let sends = ring_price(Side::Target, &prices, false, true).per_command;
        assert_eq!((sends.read.hits, sends.write.hits, sends.r2t_write.hits), (8, 7, 9));
        // There is no naive way to a ring, which is another thing than one that costs nothing.
        assert_eq!(serde_json::to_value(&ring).unwrap()["naive"], serde_json::Value::Null);
        assert_eq!(ring_price(Side::Host, &prices, true, true), PlanPrice::default());
    }

    #[test]
    fn what_is_not_measured_says_why() {
        let cost = Cost { ns: 500, in_place_ns: 900, measured: true };
        let mut prices = Prices::default();
        prices.set(HookClass::Emulated, Ok(cost));
        prices.set(HookClass::Kprobe, Err("there are none here".to_owned()));
        assert_eq!(prices.why(HookClass::Emulated), None);
        assert_eq!(prices.why(HookClass::Kprobe), Some("there are none here"));
        assert_eq!(prices.why(HookClass::Record), Some(RECORD));
        assert!(prices.iter().all(|(class, cost)| cost.measured || prices.why(class).is_some()));
        let none = Prices::of_another_machine("for a reason");
        assert!(none.iter().all(|(class, cost)| cost.ns > 0 && none.why(class) == Some("for a reason")));
    }

    proptest! {
        #[test]
        fn an_amount_is_the_sum_of_its_hits(costs in prop::collection::vec((0u32..20, 0u32..20_000, 0u32..20_000), 0..20)) {
            let mut price = PlanPrice::default();
            for (hits, ns, more) in &costs {
                let mut prices = Prices::default();
                prices.set(HookClass::Nop5, Ok(Cost { ns: *ns, in_place_ns: ns + more, measured: true }));
                price.add(PerKind { read: *hits, write: 0, r2t_write: 2 * hits }, HookClass::Nop5, &prices);
            }
            let sum = |of: fn(&(u32, u32, u32)) -> u32| costs.iter().map(of).sum::<u32>();
            prop_assert_eq!(price.per_command.read.hits, sum(|c| c.0));
            prop_assert_eq!(price.per_command.read.ns, sum(|c| c.0 * c.1));
            prop_assert_eq!(price.per_command.r2t_write.in_place_ns, sum(|c| 2 * c.0 * (c.1 + c.2)));
            prop_assert_eq!(price.per_command.write, Amount::default());
            prop_assert_eq!(price.naive, None);
        }
    }
}
