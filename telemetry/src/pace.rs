//! How often each of several collectors samples, so that together they stay within a share of one core. It measures
//! nothing.

/// What one collector's samples cost, and how often it takes one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    /// As often as was asked for, ns.
    pub(crate) asked: u64,
    /// As often as it does, ns: `asked` times a power of two.
    pub(crate) every: u64,
    /// A sample's CPU time, ns, recent ones more than older ones.
    pub(crate) cost: f64,
}

/// Never more seldom than this many times the asked interval.
const SLOWEST: u64 = 64;

impl Pace {
    pub(crate) fn new(asked: u64) -> Pace {
        let asked = asked.max(1);
        Pace { asked, every: asked, cost: 0.0 }
    }

    /// A sample took this long.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 ns")]
    pub(crate) fn took(&mut self, cost: u64) {
        let cost = cost as f64;
        self.cost = if self.cost == 0.0 { cost } else { self.cost * 0.9 + cost * 0.1 };
    }

    /// Its share of one core.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 ns")]
    pub(crate) fn share(&self) -> f64 {
        self.cost / self.every as f64
    }
}

/// Together.
pub(crate) fn share(paces: &[Pace]) -> f64 {
    paces.iter().map(Pace::share).sum()
}

/// Slows the dearest down until all are within `most`, or lets the one that was slowed most be quicker where there
/// is room for it.
pub(crate) fn adjust(paces: &mut [Pace], most: f64) {
    let mut slowed = false;
    while share(paces) > most {
        let dearest = paces
            .iter_mut()
            .filter(|pace| pace.every < pace.asked.saturating_mul(SLOWEST))
            .max_by(|a, b| a.share().total_cmp(&b.share()));
        let Some(dearest) = dearest else { return };
        dearest.every *= 2;
        slowed = true;
    }
    if slowed {
        return;
    }
    let now = share(paces);
    let slowest = paces.iter_mut().filter(|p| p.every > p.asked).max_by_key(|p| p.every / p.asked);
    if let Some(slowest) = slowest {
        // Twice as often is one share more; with room to spare, so that it does not go to and fro.
        if now + slowest.share() < most * 0.7 {
            slowest.every /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Pace, SLOWEST, adjust, share};
    use proptest::prelude::*;

    fn pace(asked: u64, cost: f64) -> Pace {
        Pace { cost, ..Pace::new(asked) }
    }

    #[test]
    fn the_dear_one_is_slowed_and_the_cheap_ones_are_not() {
        let ms = 1_000_000;
        let mut paces = [pace(100 * ms, 20_000.0), pace(100 * ms, 3_000_000.0), pace(100 * ms, 50_000.0)];
        adjust(&mut paces, 0.008);
        assert_eq!((paces[0].every, paces[2].every), (100 * ms, 100 * ms));
        assert_eq!(paces[1].every, 800 * ms);
        // It became cheap: step by step as before.
        paces[1].cost = 100_000.0;
        for _ in 0..3 {
            adjust(&mut paces, 0.008);
        }
        assert_eq!(paces[1].every, 100 * ms);
    }

    #[test]
    fn costs_are_smoothed() {
        let mut pace = Pace::new(1_000);
        pace.took(100);
        assert_eq!(pace.cost, 100.0);
        pace.took(200);
        assert_eq!(pace.cost, 110.0);
        assert_eq!(pace.share(), 0.11);
        assert_eq!(Pace::new(0).every, 1);
    }

    proptest! {
        #[test]
        fn all_are_within_the_share_or_as_slow_as_may_be(
            costs in proptest::collection::vec((1u64..10_000_000_000, 0f64..1e9), 1..12), rounds in 1usize..10,
        ) {
            let mut paces: Vec<Pace> = costs.iter().map(|(asked, cost)| pace(*asked, *cost)).collect();
            for _ in 0..rounds {
                adjust(&mut paces, 0.008);
                let slowest = paces.iter().all(|p| p.every >= p.asked * SLOWEST);
                prop_assert!(share(&paces) <= 0.008 || slowest);
                prop_assert!(paces.iter().all(|p| p.every >= p.asked && p.every <= p.asked * SLOWEST));
            }
            // Where nothing changes it comes to rest.
            for _ in 0..100 { adjust(&mut paces, 0.008); }
            let before = paces.clone();
            adjust(&mut paces, 0.008);
            prop_assert_eq!(before, paces);
        }
    }
}
