//! A collector's values on their way into rows. It knows no sources and no files.
//!
//! A value is a row when it changes: most counters of most CPUs, interfaces and connections stand still most of the
//! time. A row without a value says that the value is not known from then on (the connection ended, the device went).
//! Each sample leaves one row of the metric `sampled`, so the rest is known: at each of these times, a value is what
//! its last row says. An event is a row of its own, at its own moment, and nothing lasts of it. Every so often all values are rows again ([`Rows::anew`]), so that what is before them can be
//! lost.

use crate::{About, Kind, Metric, Nanos, SAMPLED};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// More objects than this of one collector are not taken.
const OBJECTS: usize = 50_000;
/// More metrics than this, named by devices, are not taken.
const METRICS: usize = 2_000;

/// One value of one metric of one object at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// When, `CLOCK_MONOTONIC`.
    pub at: Nanos,
    /// Position in [`Batch::metrics`].
    pub metric: u16,
    /// Whose value it is, such as `cpu3`; empty where it is the machine's.
    pub object: Arc<str>,
    /// The value, in the metric's unit; `None` where it is not known from now on.
    pub value: Option<f64>,
}

/// Rows of one collector, in the order of their times.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The collector.
    pub collector: &'static str,
    /// Whether all values that there are come first: nothing before this batch is needed to read it.
    pub anew: bool,
    /// The rows.
    pub rows: Vec<Row>,
    /// All metrics that the collector has had so far.
    pub metrics: Arc<[Metric]>,
}

/// The number of an object within one collector; it keeps it for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectId(u32);

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// The last row's value, where there was one; `None` also before the first.
    last: Option<f64>,
    /// The sample that it was last seen in.
    seen: u64,
}

#[derive(Debug)]
struct Object {
    name: Arc<str>,
    live: bool,
    slots: Vec<Slot>,
}

/// One value that a collector has at present.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// Whose.
    pub object: Arc<str>,
    /// What.
    pub metric: Cow<'static, str>,
    /// The value.
    pub value: f64,
}

/// What one collector has found so far.
#[derive(Debug)]
pub struct Rows {
    collector: &'static str,
    metrics: Vec<Metric>,
    shared: Arc<[Metric]>,
    named: HashMap<Box<str>, u16>,
    sampled: u16,
    nameless: Arc<str>,
    objects: Vec<Object>,
    by_name: HashMap<Arc<str>, u32>,
    cpus: Vec<Option<ObjectId>>,
    live: Vec<u32>,
    rows: Vec<Row>,
    at: Nanos,
    sample: u64,
    /// All values are to be rows in the next sample.
    anew: bool,
    /// The rows that wait begin with all values.
    begins_anew: bool,
    lacks: Vec<(String, String)>,
    since_anew: usize,
}

impl Rows {
    /// Those of a collector that has not sampled yet.
    #[must_use]
    pub fn new(about: &About) -> Rows {
        let mut metrics = about.metrics.to_vec();
        let sampled = u16::try_from(metrics.len()).unwrap_or(u16::MAX);
        metrics.push(SAMPLED);
        Rows {
            collector: about.name,
            shared: metrics.clone().into(),
            metrics,
            named: HashMap::new(),
            sampled,
            nameless: "".into(),
            objects: Vec::new(),
            by_name: HashMap::new(),
            cpus: Vec::new(),
            live: Vec::new(),
            rows: Vec::new(),
            at: Nanos(0),
            sample: 0,
            anew: true,
            begins_anew: true,
            lacks: Vec::new(),
            since_anew: 0,
        }
    }

    /// A sample begins.
    pub fn begin(&mut self, at: Nanos) {
        self.at = at;
        self.sample += 1;
    }

    /// The object of this name; `None` where there are too many.
    pub fn object(&mut self, name: &str) -> Option<ObjectId> {
        if let Some(&id) = self.by_name.get(name) {
            return Some(ObjectId(id));
        }
        if self.objects.len() >= OBJECTS {
            self.lack("", &format!("more than {OBJECTS} objects: what came later is left out"));
            return None;
        }
        let id = u32::try_from(self.objects.len()).ok()?;
        let name: Arc<str> = name.into();
        self.by_name.insert(Arc::clone(&name), id);
        self.objects.push(Object { name, live: false, slots: Vec::new() });
        Some(ObjectId(id))
    }

    /// The object `cpuN`.
    pub fn cpu(&mut self, cpu: u64) -> Option<ObjectId> {
        let index = usize::try_from(cpu).ok().filter(|cpu| *cpu < 65_536)?;
        if let Some(Some(id)) = self.cpus.get(index) {
            return Some(*id);
        }
        let id = self.object(crate::text::Name::of(format_args!("cpu{cpu}")).as_str())?;
        if self.cpus.len() <= index {
            self.cpus.resize(index + 1, None);
        }
        if let Some(known) = self.cpus.get_mut(index) {
            *known = Some(id);
        }
        Some(id)
    }

    /// A metric that the device names; `None` where there are too many.
    pub fn named(&mut self, name: &str, unit: &'static str, kind: Kind) -> Option<u16> {
        if let Some(&position) = self.named.get(name) {
            return Some(position);
        }
        if self.metrics.len() >= METRICS {
            self.lack("", &format!("more than {METRICS} metrics: what came later is left out"));
            return None;
        }
        let position = u16::try_from(self.metrics.len()).ok()?;
        let unit = Cow::Borrowed(unit);
        self.metrics.push(Metric { name: Cow::Owned(name.to_owned()), unit, kind, meaning: "" });
        self.named.insert(name.into(), position);
        Some(position)
    }

    /// A value of this sample. What is no number is as if it had not been seen.
    pub fn put(&mut self, object: ObjectId, metric: impl Into<u16>, value: f64) {
        let (metric, sample, at) = (metric.into(), self.sample, self.at);
        let Some(place) = self.objects.get_mut(object.0 as usize).filter(|_| value.is_finite()) else {
            return;
        };
        if !place.live {
            place.live = true;
            self.live.push(object.0);
        }
        let index = usize::from(metric);
        if place.slots.len() <= index {
            place.slots.resize(index + 1, Slot::default());
        }
        let Some(slot) = place.slots.get_mut(index) else { return };
        slot.seen = sample;
        let same = slot.last == Some(value);
        if !same || self.anew {
            slot.last = Some(value);
            self.rows.push(Row { at, metric, object: Arc::clone(&place.name), value: Some(value) });
        }
    }

    /// Something that happened at a moment, between the sample before and this one.
    pub fn event(&mut self, object: ObjectId, metric: impl Into<u16>, at: Nanos, value: f64) {
        let Some(place) = self.objects.get(object.0 as usize).filter(|_| value.is_finite()) else { return };
        let object = Arc::clone(&place.name);
        self.rows.push(Row { at, metric: metric.into(), object, value: Some(value) });
    }

    /// [`Rows::put`] of a count.
    pub fn count(&mut self, object: ObjectId, metric: impl Into<u16>, value: u64) {
        self.put(object, metric, crate::text::value(value));
    }

    /// What is not there on this machine, and why: kept once, for the manifest. `metric` is empty where it is all of
    /// an object or of the collector.
    pub fn lack(&mut self, metric: &str, why: &str) {
        let known = |(m, w): &(String, String)| m == metric && w == why;
        if self.lacks.len() < 100 && !self.lacks.iter().any(known) {
            self.lacks.push((metric.to_owned(), why.to_owned()));
        }
    }

    /// A sample is over: what it did not see is not known any more.
    pub fn finish(&mut self, cost: Nanos) {
        let (sample, at) = (self.sample, self.at);
        let (objects, rows) = (&mut self.objects, &mut self.rows);
        self.live.retain(|id| {
            let Some(object) = objects.get_mut(*id as usize) else { return false };
            let mut live = false;
            for (metric, slot) in (0u16..).zip(&mut object.slots) {
                if slot.seen == sample {
                    live = true;
                } else if slot.last.take().is_some() {
                    rows.push(Row { at, metric, object: Arc::clone(&object.name), value: None });
                }
            }
            object.live = live;
            live
        });
        let object = Arc::clone(&self.nameless);
        let value = Some(crate::text::value(cost.0));
        self.rows.push(Row { at, metric: self.sampled, object, value });
        if self.anew {
            self.anew = false;
            self.since_anew = 0;
        }
        if self.shared.len() != self.metrics.len() {
            self.shared = self.metrics.clone().into();
        }
    }

    /// The collector does not sample any more: nothing is known from now on. A sample that it had begun is left out.
    pub fn end(&mut self, at: Nanos) {
        self.begin(at);
        self.finish(Nanos(0));
    }

    /// The rows since the last call; `None` where there are none.
    pub fn take(&mut self) -> Option<Batch> {
        if self.rows.is_empty() {
            return None;
        }
        self.since_anew += self.rows.len();
        let anew = std::mem::take(&mut self.begins_anew);
        let room = Vec::with_capacity(self.rows.len() + self.rows.len() / 4);
        let rows = std::mem::replace(&mut self.rows, room);
        Some(Batch { collector: self.collector, anew, rows, metrics: Arc::clone(&self.shared) })
    }

    /// All values are rows again in the next sample, and a batch begins with them. To be called when [`Rows::take`]
    /// has left nothing.
    pub fn anew(&mut self) {
        self.anew = true;
        self.begins_anew = true;
    }

    /// Rows since all values were rows.
    #[must_use]
    pub fn since_anew(&self) -> usize {
        self.since_anew
    }

    /// All its metrics so far.
    #[must_use]
    pub fn metrics(&self) -> Arc<[Metric]> {
        Arc::clone(&self.shared)
    }

    /// What is not there, and why: the metric (or nothing, where it is more than one) and the reason.
    #[must_use]
    pub fn lacks(&self) -> &[(String, String)] {
        &self.lacks
    }

    /// All values at present, in no order.
    pub fn known(&self) -> impl Iterator<Item = Known> + '_ {
        self.live.iter().filter_map(|id| self.objects.get(*id as usize)).flat_map(|object| {
            object.slots.iter().zip(&self.metrics).filter_map(|(slot, metric)| {
                let (object, metric) = (Arc::clone(&object.name), metric.name.clone());
                slot.last.map(|value| Known { object, metric, value })
            })
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The values at present, by object and metric.
    pub(crate) fn values(rows: &Rows) -> BTreeMap<(String, String), f64> {
        rows.known().map(|k| ((k.object.to_string(), k.metric.to_string()), k.value)).collect()
    }

    /// The values that one sample by `take` finds.
    pub(crate) fn sampled(about: &About, take: impl FnOnce(&mut Rows)) -> BTreeMap<(String, String), f64> {
        let mut rows = Rows::new(about);
        rows.begin(Nanos(1));
        take(&mut rows);
        rows.finish(Nanos(0));
        values(&rows)
    }

    pub(crate) fn key(object: &str, metric: &str) -> (String, String) {
        (object.to_owned(), metric.to_owned())
    }

    const ABOUT: About = About {
        name: "test",
        source: "",
        object: "",
        at_most_every: None,
        waits: false,
        metrics: &[
            Metric { name: Cow::Borrowed("a"), unit: Cow::Borrowed(""), kind: Kind::Gauge, meaning: "" },
            Metric { name: Cow::Borrowed("b"), unit: Cow::Borrowed(""), kind: Kind::Gauge, meaning: "" },
        ],
        further: "",
        lacks: "",
    };

    #[test]
    fn a_value_is_a_row_when_it_changes_and_when_it_goes() {
        let mut rows = Rows::new(&ABOUT);
        let mut step = |at: u64, values: &[(&str, u16, f64)]| -> Vec<(String, u16, Option<f64>)> {
            rows.begin(Nanos(at));
            for (object, metric, value) in values {
                let object = rows.object(object).unwrap();
                rows.put(object, *metric, *value);
            }
            rows.finish(Nanos(7));
            let batch = rows.take().unwrap();
            assert!(batch.rows.iter().all(|row| row.at == Nanos(at)));
            assert_eq!(batch.metrics.len(), 3);
            batch.rows.iter().map(|r| (r.object.to_string(), r.metric, r.value)).collect()
        };
        let cost = (String::new(), 2, Some(7.0));
        let row = |object: &str, metric, value| (object.to_owned(), metric, value);
        assert_eq!(step(1, &[("x", 0, 1.0), ("x", 1, f64::NAN)]), [row("x", 0, Some(1.0)), cost.clone()]);
        assert_eq!(step(2, &[("x", 0, 1.0)]), std::slice::from_ref(&cost));
        assert_eq!(step(3, &[("x", 1, 5.0)]), [row("x", 1, Some(5.0)), row("x", 0, None), cost.clone()]);
        assert_eq!(step(4, &[]), [row("x", 1, None), cost.clone()]);
        assert_eq!(step(5, &[]), std::slice::from_ref(&cost));
        assert_eq!(step(6, &[("x", 1, 5.0)]), [row("x", 1, Some(5.0)), cost]);
    }

    #[test]
    fn the_first_batch_and_each_after_anew_have_all_values() {
        let mut rows = Rows::new(&ABOUT);
        let sample = |rows: &mut Rows| {
            rows.begin(Nanos(1));
            let object = rows.cpu(3).unwrap();
            rows.count(object, 0u16, 9);
            rows.finish(Nanos(0));
            rows.take().unwrap()
        };
        let first = sample(&mut rows);
        assert!(first.anew && first.rows.len() == 2 && &*first.rows[0].object == "cpu3");
        let second = sample(&mut rows);
        assert!(!second.anew && second.rows.len() == 1);
        rows.anew();
        let third = sample(&mut rows);
        assert!(third.anew && third.rows.len() == 2);
        assert!(rows.take().is_none());
    }

    #[test]
    fn a_lack_is_kept_once() {
        let mut rows = Rows::new(&ABOUT);
        rows.lack("a", "not here");
        rows.lack("a", "not here");
        rows.lack("", "not here");
        assert_eq!(rows.lacks().len(), 2);
        for n in 0..1_000 {
            rows.lack("b", &n.to_string());
        }
        assert!(rows.lacks().len() <= 100);
    }

    proptest! {
        /// What the rows say, read as the module's head tells, is what was put.
        #[test]
        fn rows_tell_every_sample(samples in proptest::collection::vec(
            (proptest::collection::btree_map((0u8..4, 0u16..2), 0u8..3, 0..8), any::<bool>()), 1..20,
        )) {
            let mut rows = Rows::new(&ABOUT);
            let mut told: BTreeMap<(String, u16), f64> = BTreeMap::new();
            for (n, (values, anew)) in samples.iter().enumerate() {
                if *anew {
                    rows.anew();
                    told.clear();
                }
                rows.begin(Nanos(n as u64));
                for ((object, metric), value) in values {
                    let object = rows.object(&object.to_string()).unwrap();
                    rows.put(object, *metric, f64::from(*value));
                }
                rows.finish(Nanos(0));
                for row in rows.take().unwrap().rows {
                    let key = (row.object.to_string(), row.metric);
                    if row.metric == 2 { continue }
                    match row.value {
                        Some(value) => told.insert(key, value),
                        None => told.remove(&key),
                    };
                }
                let put: BTreeMap<(String, u16), f64> =
                    values.iter().map(|((o, m), v)| ((o.to_string(), *m), f64::from(*v))).collect();
                prop_assert_eq!(&told, &put);
            }
        }
    }
}
