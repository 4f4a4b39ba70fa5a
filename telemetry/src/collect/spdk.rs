//! What an SPDK target counts of itself, over its JSON-RPC (SPDK's `doc/jsonrpc.md`).
//!
//! The target answers on its app thread, mostly on a reactor that also serves I/O, and most of these methods visit
//! every thread once: an answer was measured to take a tenth to a fifth of a millisecond of that reactor, in which the
//! commands on it wait. So they are asked seldom: the reactors' times once a second, all else every five.

use super::rpc::{Rpc, RpcError};
use super::{Collector, Lack, Places, Subject};
use crate::about::metrics;
use crate::text::value;
use crate::{About, Nanos, ObjectId, Rows};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

metrics! {
    ThreadBusy = "thread_busy", "ns", Counter64, "an SPDK thread's time in which its pollers did something (object: the thread)";
    ThreadIdle = "thread_idle", "ns", Counter64, "an SPDK thread's time in which its pollers found nothing";
    ThreadPollers = "thread_active_pollers", "", Gauge, "pollers that run each time";
    AdminQpairs = "admin_qpairs", "", Gauge, "admin queues of a poll group at present (object: the poll group)";
    IoQpairs = "io_qpairs", "", Gauge, "I/O queues of a poll group at present";
    PendingBdevIo = "pending_bdev_io", "", Counter64, "commands that had to wait for a bdev_io";
    Completed = "completed_nvme_io", "", Counter64, "commands that a poll group completed";
    BdevReads = "bdev_reads", "", Counter64, "reads that a bdev completed (object: the bdev)";
    BdevWrites = "bdev_writes", "", Counter64, "writes that a bdev completed";
    BdevReadBytes = "bdev_read_bytes", "bytes", Counter64, "read from a bdev";
    BdevWrittenBytes = "bdev_written_bytes", "bytes", Counter64, "written to a bdev";
    BdevReadTime = "bdev_read_time", "ns", Counter64, "that reads took in a bdev, all together";
    BdevWriteTime = "bdev_write_time", "ns", Counter64, "that writes took in a bdev, all together";
    BdevQueueDepth = "bdev_queue_depth", "", Gauge, "in flight on a bdev, where SPDK was told to sample it";
    BufferCache = "buffer_cache_hits", "", Counter64, "buffers taken from a thread's own cache (object: `MODULE small` or `MODULE large`)";
    BufferMain = "buffer_pool_hits", "", Counter64, "buffers taken from the common pool";
    BufferRetry = "buffer_waits", "", Counter64, "times that no buffer was there and a command had to wait";
    PollGroupTransport = "transport_pending_buffers", "", Counter64, "times that a transport's commands waited for a data buffer (object: `POLL GROUP TRANSPORT`)";
}

pub(super) const ABOUT: About = About {
    name: "spdk",
    source: "thread_get_stats, nvmf_get_stats, bdev_get_iostat, iobuf_get_stats over the RPC socket",
    object: "as each metric says",
    at_most_every: Some(Duration::from_secs(5)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "where the kernel is recorded or the process has no RPC socket; methods that its version has not; transport_pending_buffers for TCP, which has none (`buffer_waits` of nvmf_TCP tells)",
};

/// A method, and what takes its answer.
pub(super) type Method = (&'static str, fn(&Value, &mut Rows));

const METHODS: &[Method] = &[
    ("thread_get_stats", threads),
    ("nvmf_get_stats", poll_groups),
    ("bdev_get_iostat", bdevs),
    ("iobuf_get_stats", buffers),
];

/// Calls in a row that may come to nothing.
const FAILURES: u32 = 3;

/// A collector that calls some methods each time.
#[derive(Debug)]
pub(super) struct Spdk {
    about: &'static About,
    methods: &'static [Method],
    /// Sockets that may be the one, until one has answered.
    candidates: Vec<PathBuf>,
    path: PathBuf,
    rpc: Option<Rpc>,
    refused: Vec<bool>,
    failures: u32,
}

impl Spdk {
    /// Nothing is asked yet: a socket that does not answer would hold up the recording.
    pub(super) fn open(places: &Places, subject: &Subject) -> Result<Spdk, Lack> {
        Spdk::of(&ABOUT, METHODS, places, subject)
    }

    pub(super) fn of(
        about: &'static About,
        methods: &'static [Method],
        places: &Places,
        subject: &Subject,
    ) -> Result<Spdk, Lack> {
        let pid = subject.pid.ok_or_else(|| Lack("the kernel is recorded, not SPDK".to_owned()))?;
        let mut candidates = subject.rpc.clone();
        if candidates.is_empty() {
            candidates = listening(&places.proc, pid);
        }
        if candidates.is_empty() {
            return Err(Lack("the process listens on no UNIX socket, so it answers no SPDK RPC".to_owned()));
        }
        let refused = vec![false; methods.len()];
        Ok(Spdk { about, methods, candidates, path: PathBuf::new(), rpc: None, refused, failures: 0 })
    }

    /// Finds the socket that answers.
    fn find(&mut self) -> Result<(), Lack> {
        let mut last = Lack(String::new());
        for path in std::mem::take(&mut self.candidates) {
            match answers(&path) {
                Ok(rpc) => {
                    (self.path, self.rpc) = (path, Some(rpc));
                    return Ok(());
                }
                Err(lack) => last = lack,
            }
        }
        Err(last)
    }
}

/// The UNIX sockets that a process listens on (/proc/net/unix, unix(7)), as they are seen from here. Those whose names
/// say what they are come first.
fn listening(proc: &Path, pid: u32) -> Vec<PathBuf> {
    let process = proc.join(pid.to_string());
    let own: BTreeSet<String> = std::fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let link = std::fs::read_link(entry.path()).ok()?;
            Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = std::fs::read(process.join("net/unix")).unwrap_or_default();
    let mut found: Vec<String> =
        String::from_utf8_lossy(&table).lines().filter_map(|l| path_of(l, &own)).collect();
    found.sort_by_key(|path| !(path.contains("spdk") || path.contains("rpc")));
    found.dedup();
    let seen = |path: String| match path.strip_prefix('/') {
        Some(inside) => process.join("root").join(inside),
        None => process.join("cwd").join(path),
    };
    found.into_iter().map(seen).filter(|path| path.exists()).collect()
}

/// `Num RefCount Protocol Flags Type St Inode Path`: the path, where it is one of these that listens (`SO_ACCEPTCON`)
/// and has a place in the file system.
fn path_of(line: &str, own: &BTreeSet<String>) -> Option<String> {
    let mut fields = line.split_whitespace();
    let flags = u32::from_str_radix(fields.nth(3)?, 16).ok()?;
    let inode = fields.nth(2)?;
    let path = fields.next()?;
    (flags & 0x1_0000 != 0 && own.contains(inode) && !path.starts_with('@')).then(|| path.to_owned())
}

/// Whether SPDK answers there.
fn answers(path: &Path) -> Result<Rpc, Lack> {
    let mut rpc = Rpc::open(path).map_err(|e| Lack::of(path, &e))?;
    match rpc.call("spdk_get_version") {
        Ok(_) => Ok(rpc),
        Err(error) => Err(Lack(format!("{}: {error}", path.display()))),
    }
}

impl Collector for Spdk {
    fn about(&self) -> &'static About {
        self.about
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if !self.candidates.is_empty() {
            self.find()?;
        }
        let lost = |error: &dyn std::fmt::Display, path: &Path| Lack(format!("{}: {error}", path.display()));
        if self.rpc.is_none() {
            match Rpc::open(&self.path) {
                Ok(rpc) => self.rpc = Some(rpc),
                Err(error) => {
                    self.failures += 1;
                    return if self.failures >= FAILURES { Err(lost(&error, &self.path)) } else { Ok(()) };
                }
            }
        }
        let Some(rpc) = &mut self.rpc else { return Ok(()) };
        for ((method, take), refused) in self.methods.iter().zip(&mut self.refused) {
            if *refused {
                continue;
            }
            match rpc.call(method) {
                Ok(answer) => take(&answer, rows),
                Err(error @ RpcError::Refused { .. }) => {
                    *refused = true;
                    rows.lack("", &error.to_string());
                }
                Err(error @ RpcError::Broken(_)) => {
                    self.rpc = None;
                    self.failures += 1;
                    return if self.failures >= FAILURES { Err(lost(&error, &self.path)) } else { Ok(()) };
                }
            }
        }
        self.failures = 0;
        Ok(())
    }
}

pub(super) fn list<'a>(of: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    of.get(name).and_then(Value::as_array).into_iter().flatten()
}

fn named(of: &Value, rows: &mut Rows) -> Option<ObjectId> {
    rows.object(of.get("name")?.as_str()?)
}

fn counts(of: &Value, object: ObjectId, metrics: &[(M, &str)], rows: &mut Rows) {
    for (metric, name) in metrics {
        if let Some(count) = of.get(name).and_then(Value::as_u64) {
            rows.count(object, *metric, count);
        }
    }
}

/// Ticks as nanoseconds, by the rate that the answer tells.
pub(super) fn times<M: Copy + Into<u16>>(
    answer: &Value,
    of: &Value,
    object: ObjectId,
    metrics: &[(M, &str)],
    rows: &mut Rows,
) {
    let Some(rate) = answer.get("tick_rate").and_then(Value::as_u64).filter(|rate| *rate > 0) else { return };
    for (metric, name) in metrics {
        if let Some(ticks) = of.get(name).and_then(Value::as_u64) {
            let ns = u128::from(ticks) * 1_000_000_000 / u128::from(rate);
            if let Ok(ns) = u64::try_from(ns) {
                rows.put(object, *metric, value(ns));
            }
        }
    }
}

fn threads(answer: &Value, rows: &mut Rows) {
    for thread in list(answer, "threads") {
        let Some(object) = named(thread, rows) else { continue };
        times(answer, thread, object, &[(M::ThreadBusy, "busy"), (M::ThreadIdle, "idle")], rows);
        counts(thread, object, &[(M::ThreadPollers, "active_pollers_count")], rows);
    }
}

fn poll_groups(answer: &Value, rows: &mut Rows) {
    for group in list(answer, "poll_groups") {
        let Some(object) = named(group, rows) else { continue };
        let metrics = [
            (M::AdminQpairs, "current_admin_qpairs"),
            (M::IoQpairs, "current_io_qpairs"),
            (M::PendingBdevIo, "pending_bdev_io"),
            (M::Completed, "completed_nvme_io"),
        ];
        counts(group, object, &metrics, rows);
        for transport in list(group, "transports") {
            let names =
                (group.get("name").and_then(Value::as_str), transport.get("trtype").and_then(Value::as_str));
            let (Some(group), Some(transport_name)) = names else { continue };
            let waits = transport.get("pending_data_buffer").and_then(Value::as_u64);
            if let (Some(waits), Some(object)) = (waits, rows.object(&format!("{group} {transport_name}"))) {
                rows.count(object, M::PollGroupTransport, waits);
            }
        }
    }
}

fn bdevs(answer: &Value, rows: &mut Rows) {
    for bdev in list(answer, "bdevs") {
        let Some(object) = named(bdev, rows) else { continue };
        let metrics = [
            (M::BdevReads, "num_read_ops"),
            (M::BdevWrites, "num_write_ops"),
            (M::BdevReadBytes, "bytes_read"),
            (M::BdevWrittenBytes, "bytes_written"),
            (M::BdevQueueDepth, "queue_depth"),
        ];
        counts(bdev, object, &metrics, rows);
        let metrics = [(M::BdevReadTime, "read_latency_ticks"), (M::BdevWriteTime, "write_latency_ticks")];
        times(answer, bdev, object, &metrics, rows);
    }
}

fn buffers(answer: &Value, rows: &mut Rows) {
    for module in answer.as_array().into_iter().flatten() {
        let Some(name) = module.get("module").and_then(Value::as_str) else { continue };
        for (pool, size) in [("small_pool", "small"), ("large_pool", "large")] {
            let Some(pool) = module.get(pool) else { continue };
            let Some(object) = rows.object(&format!("{name} {size}")) else { return };
            let metrics = [(M::BufferCache, "cache"), (M::BufferMain, "main"), (M::BufferRetry, "retry")];
            counts(pool, object, &metrics, rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rpc::tests::serve;
    use super::*;
    use crate::rows::tests::{key, sampled, values};
    use proptest::prelude::*;

    fn answer(method: &str) -> Option<&'static str> {
        Some(match method {
            "spdk_get_version" => r#"{"version":"SPDK v26.05"}"#,
            "thread_get_stats" => {
                r#"{"tick_rate":2000000000,"threads":[{"name":"app_thread","busy":10,"idle":20,"active_pollers_count":2}]}"#
            }
            "nvmf_get_stats" => {
                r#"{"poll_groups":[{"name":"g0","admin_qpairs":9,"current_io_qpairs":4,"pending_bdev_io":1,"completed_nvme_io":7,"transports":[{"trtype":"RDMA","pending_data_buffer":12}]}]}"#
            }
            "bdev_get_iostat" => {
                r#"{"tick_rate":2000000000,"bdevs":[{"name":"M0","bytes_read":8192,"num_read_ops":2,"read_latency_ticks":3000}]}"#
            }
            _ => return None,
        })
    }

    fn subject(path: PathBuf) -> Subject {
        Subject { pid: Some(1), rpc: vec!["/nonexistent.sock".into(), path], ..Subject::default() }
    }

    #[test]
    fn each_method_s_figures_are_taken_and_one_that_is_not_there_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let (asked, count) = std::sync::mpsc::channel();
        let path = serve(folder.path(), move |method, id| {
            asked.send(method.to_owned()).unwrap();
            Some(match answer(method) {
                Some(result) => format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#),
                None => format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32601,"message":"Method not found"}}}}"#
                ),
            })
        });
        let mut spdk = Spdk::open(&Places::default(), &subject(path)).unwrap();
        let mut rows = Rows::new(&ABOUT);
        for at in 1..4 {
            rows.begin(Nanos(at));
            spdk.sample(Nanos(at), &mut rows).unwrap();
            rows.finish(Nanos(0));
        }
        let found = values(&rows);
        for (object, metric, value) in [
            ("app_thread", "thread_idle", 10.0),
            ("g0", "io_qpairs", 4.0),
            ("g0 RDMA", "transport_pending_buffers", 12.0),
            ("M0", "bdev_read_bytes", 8192.0),
            ("M0", "bdev_read_time", 1500.0),
        ] {
            assert_eq!(found.get(&key(object, metric)), Some(&value), "{object} {metric}");
        }
        assert_eq!(
            rows.lacks(),
            [(String::new(), "iobuf_get_stats is refused: Method not found".to_owned())]
        );
        assert_eq!(count.try_iter().filter(|method| method == "iobuf_get_stats").count(), 1);
    }

    #[test]
    fn buffers_of_each_module_and_size() {
        let answer: Value = serde_json::from_str(
            r#"[{"module":"nvmf_TCP","small_pool":{"cache":6566,"main":1,"retry":2,"cache_size":4096},"large_pool":{"cache":0}}]"#,
        )
        .unwrap();
        let found = sampled(&ABOUT, |rows| buffers(&answer, rows));
        assert_eq!(found[&key("nvmf_TCP small", "buffer_waits")], 2.0);
        assert_eq!(found.len(), 4);
    }

    #[test]
    fn a_target_that_ends_ends_the_collector_and_not_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = serve(folder.path(), |method, id| {
            (method == "spdk_get_version").then(|| format!(r#"{{"jsonrpc":"2.0","id":{id},"result":1}}"#))
        });
        let mut spdk = Spdk::open(&Places::default(), &subject(path)).unwrap();
        let mut rows = Rows::new(&ABOUT);
        rows.begin(Nanos(1));
        assert!(spdk.sample(Nanos(1), &mut rows).is_ok());
        assert!(spdk.sample(Nanos(2), &mut rows).is_ok());
        assert!(spdk.sample(Nanos(3), &mut rows).is_err());
    }

    #[test]
    fn without_spdk_it_is_told() {
        let places = Places::default();
        let lack = Spdk::open(&places, &Subject::default()).unwrap_err().to_string();
        assert!(lack.contains("kernel is recorded"), "{lack}");
        let mut spdk = Spdk::open(&places, &subject("/nonexistent.sock".into())).unwrap();
        let lack = spdk.sample(Nanos(1), &mut Rows::new(&ABOUT)).unwrap_err().to_string();
        assert!(lack.contains("nonexistent"), "{lack}");
        let gone = Subject { pid: Some(u32::MAX), ..Subject::default() };
        assert!(Spdk::open(&places, &gone).is_err());
    }

    #[test]
    fn the_socket_that_a_process_listens_on_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        let _other = std::os::unix::net::UnixListener::bind(&other).unwrap();
        let path = serve(folder.path(), |_, id| Some(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":1}}"#)));
        let found = listening(Path::new("/proc"), std::process::id());
        let place =
            |path: &Path| found.iter().position(|f| f.ends_with(path.strip_prefix("/").unwrap())).unwrap();
        assert!(place(&path) < place(&other), "{found:?}");
        let mut spdk = Spdk::open(&Places::default(), &subject(found[place(&path)].clone())).unwrap();
        spdk.sample(Nanos(1), &mut Rows::new(&ABOUT)).unwrap();
        let own = BTreeSet::from(["7".to_owned()]);
        assert_eq!(path_of("0: 00000002 00000000 00010000 0001 01 7 /a b", &own).as_deref(), Some("/a"));
        for line in ["0: 2 0 00010000 1 1 8 /a", "0: 2 0 0 1 1 7 /a", "0: 2 0 00010000 1 1 7 @a", "x", ""] {
            assert_eq!(path_of(line, &own), None, "{line}");
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let names = prop::sample::select(vec![
            "reactors",
            "threads",
            "poll_groups",
            "bdevs",
            "name",
            "tick_rate",
            "busy",
            "lcore",
            "transports",
            "module",
            "small_pool",
            "retry",
            "trtype",
            "lw_threads",
            "num_read_ops",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<u64>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 48, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(names.clone().prop_map(str::to_owned), inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_answer_is_taken_or_left(answer in any_json()) {
            let found = sampled(&ABOUT, |rows| {
                for (_, take) in METHODS {
                    take(&answer, rows);
                }
            });
            prop_assert!(found.values().all(|value| value.is_finite()));
        }
    }
}
