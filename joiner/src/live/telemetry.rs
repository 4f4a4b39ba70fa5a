//! The newest values of telemetry: what each metric of each object is at present, counters unwrapped and with their
//! rates. It keeps no past, and no more values than fit.

use run_format::{MetricKind, TelemetryBatch, TelemetryMetric, increase};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Values that are kept of all collectors together.
const MOST: usize = 20_000;
/// The metric whose rows say when a collector looked.
const SAMPLED: &str = "sampled";

#[derive(Clone, Copy, Debug)]
struct Value {
    /// The last row's value.
    last: f64,
    /// Of a counter, the last value with wraps undone; of events, all that came.
    grown: f64,
    /// Of a counter, what it grew a second within the batch of this number; within later ones it stood still.
    rate: f64,
    batch: u64,
}

#[derive(Debug, Default)]
struct Collector {
    metrics: Arc<[TelemetryMetric]>,
    objects: HashMap<Arc<str>, Vec<Option<Value>>>,
    /// When it looked last, and how often batches of it came.
    looked: Option<u64>,
    batches: u64,
}

/// The newest values.
#[derive(Debug, Default)]
pub(crate) struct Values {
    collectors: BTreeMap<String, Collector>,
    kept: usize,
    /// Rows that found no room.
    left_out: u64,
}

/// One value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known<'a> {
    pub(crate) metric: &'a TelemetryMetric,
    pub(crate) object: &'a str,
    /// A gauge's value, or a counter's with wraps undone.
    pub(crate) value: f64,
    /// A counter's growth, or what came of events, a second; `None` of a gauge.
    pub(crate) rate: Option<f64>,
}

impl Values {
    /// Rows came.
    pub(crate) fn take(&mut self, batch: &TelemetryBatch) {
        let collector = match self.collectors.get_mut(&batch.collector) {
            Some(collector) => collector,
            None => self.collectors.entry(batch.collector.clone()).or_default(),
        };
        collector.metrics = Arc::clone(&batch.metrics);
        collector.batches += 1;
        let number = collector.batches;
        let newest = batch.rows.iter().map(|row| row.at.0).max();
        let seconds = newest.zip(collector.looked).map(|(to, from)| to.saturating_sub(from) as f64 / 1e9);
        let seconds = seconds.filter(|seconds| *seconds > 0.0);
        for row in &batch.rows {
            let Some(metric) = batch.metrics.get(usize::from(row.metric)) else { continue };
            if metric.name == SAMPLED {
                continue;
            }
            let Some(new) = row.value else {
                if let Some(values) = collector.objects.get_mut(&row.object) {
                    let gone = values.get_mut(usize::from(row.metric)).and_then(Option::take);
                    self.kept -= usize::from(gone.is_some());
                    if values.iter().all(Option::is_none) {
                        collector.objects.remove(&row.object);
                    }
                }
                continue;
            };
            let known = collector.objects.get(&row.object);
            let known = known.and_then(|values| *values.get(usize::from(row.metric))?);
            if known.is_none() {
                if self.kept >= MOST {
                    self.left_out += 1;
                    continue;
                }
                self.kept += 1;
            }
            // Of events nothing came before.
            let before = if metric.kind == MetricKind::Event { 0.0 } else { new };
            let mut value = known.unwrap_or(Value { last: new, grown: before, rate: 0.0, batch: number });
            if metric.kind != MetricKind::Gauge {
                if value.batch != number {
                    value.rate = 0.0;
                    value.batch = number;
                }
                let grown = match metric.kind {
                    // Each row is so much more.
                    MetricKind::Event => Some(new.max(0.0)),
                    _ => increase(value.last, new, metric.bits),
                };
                match grown {
                    Some(more) => {
                        value.grown += more;
                        value.rate += seconds.map_or(0.0, |seconds| more / seconds);
                    }
                    // It began anew.
                    None => value.grown = new,
                }
            }
            value.last = new;
            let values = collector.objects.entry(Arc::clone(&row.object)).or_default();
            if values.len() <= usize::from(row.metric) {
                values.resize(usize::from(row.metric) + 1, None);
            }
            values[usize::from(row.metric)] = Some(value);
        }
        collector.looked = newest.or(collector.looked);
    }

    /// The collectors' names.
    pub(crate) fn collectors(&self) -> impl Iterator<Item = &str> {
        self.collectors.keys().map(String::as_str)
    }

    /// A collector's metrics, as far as it is known.
    pub(crate) fn metrics(&self, collector: &str) -> &[TelemetryMetric] {
        self.collectors.get(collector).map_or(&[], |c| &c.metrics)
    }

    /// All values of a collector's metric, by object.
    pub(crate) fn of(&self, collector: &str, metric: &str) -> Vec<Known<'_>> {
        let Some(c) = self.collectors.get(collector) else { return Vec::new() };
        let Some(place) = c.metrics.iter().position(|m| m.name == metric) else { return Vec::new() };
        let mut known: Vec<Known<'_>> = c
            .objects
            .iter()
            .filter_map(|(object, values)| {
                let value = (*values.get(place)?)?;
                let metric = c.metrics.get(place)?;
                let rate = if value.batch == c.batches { value.rate } else { 0.0 };
                Some(match metric.kind {
                    MetricKind::Gauge => Known { metric, object, value: value.last, rate: None },
                    MetricKind::Counter | MetricKind::Event => {
                        Known { metric, object, value: value.grown, rate: Some(rate) }
                    }
                })
            })
            .collect();
        known.sort_by(|a, b| a.object.cmp(b.object));
        known
    }

    /// Rows that found no room.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, Values};
    use run_format::{MetricKind, Nanos, TelemetryBatch, TelemetryMetric, TelemetryRow};

    fn batch(at: u64, rows: &[(u16, &str, Option<f64>)]) -> TelemetryBatch {
        let metric = |name: &str, kind, bits| TelemetryMetric {
            name: name.into(),
            unit: "segments".into(),
            kind,
            bits,
        };
        TelemetryBatch {
            collector: "tcp".into(),
            anew: false,
            rows: rows
                .iter()
                .map(|(metric, object, value)| TelemetryRow {
                    at: Nanos(at * 1_000_000_000),
                    metric: *metric,
                    object: (*object).into(),
                    value: *value,
                })
                .chain([TelemetryRow {
                    at: Nanos(at * 1_000_000_000),
                    metric: 2,
                    object: "".into(),
                    value: Some(1.0),
                }])
                .collect(),
            metrics: [
                metric("cwnd", MetricKind::Gauge, None),
                metric("retransmitted", MetricKind::Counter, Some(32)),
                metric("sampled", MetricKind::Gauge, None),
                metric("retransmit", MetricKind::Event, None),
            ]
            .into(),
        }
    }

    #[test]
    fn counters_have_rates_and_are_unwrapped_and_what_goes_is_forgotten() {
        let mut values = Values::default();
        let read = |values: &Values, metric: &str| -> Vec<(String, f64, Option<f64>)> {
            values.of("tcp", metric).iter().map(|k| (k.object.to_owned(), k.value, k.rate)).collect()
        };
        values.take(&batch(1, &[(0, "a", Some(10.0)), (1, "a", Some(4_294_967_290.0))]));
        assert_eq!(read(&values, "cwnd"), [("a".into(), 10.0, None)]);
        assert_eq!(read(&values, "retransmitted"), [("a".into(), 4_294_967_290.0, Some(0.0))]);
        // It wraps; and grows twice within a batch of two seconds.
        values.take(&batch(3, &[(1, "a", Some(2.0)), (1, "a", Some(4.0))]));
        assert_eq!(read(&values, "retransmitted"), [("a".into(), 4_294_967_300.0, Some(5.0))]);
        // It stands still.
        values.take(&batch(4, &[]));
        assert_eq!(read(&values, "retransmitted")[0].2, Some(0.0));
        // It begins anew.
        values.take(&batch(5, &[(1, "a", Some(1.0))]));
        assert_eq!(read(&values, "retransmitted"), [("a".into(), 1.0, Some(0.0))]);
        // Events are added up.
        values.take(&batch(6, &[(3, "a", Some(2.0)), (3, "a", Some(3.0))]));
        assert_eq!(read(&values, "retransmit"), [("a".into(), 5.0, Some(5.0))]);
        values.take(&batch(7, &[]));
        assert_eq!(read(&values, "retransmit"), [("a".into(), 5.0, Some(0.0))]);
        values.take(&batch(8, &[(1, "a", None), (0, "a", None), (3, "a", None)]));
        assert!(read(&values, "retransmitted").is_empty() && values.kept == 0);
        assert!(values.of("tcp", "none").is_empty() && values.of("none", "cwnd").is_empty());
        assert_eq!(values.collectors().collect::<Vec<_>>(), ["tcp"]);
    }

    #[test]
    fn no_more_is_kept_than_fits_and_the_rest_is_counted() {
        let mut values = Values::default();
        for n in 0..MOST + 7 {
            values.take(&batch(1, &[(0, &n.to_string(), Some(1.0))]));
        }
        assert_eq!((values.of("tcp", "cwnd").len(), values.left_out()), (MOST, 7));
    }
}
