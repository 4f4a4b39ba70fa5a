//! What the target says over its RPC of its connections and namespaces: what the ring's texts leave out. Asking
//! takes a while and happens on a thread of its own, so that the ring goes on being read.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

use run_format::Endpoint;
use serde_json::{Value, json};

use super::rpc::{Rpc, RpcError};

/// A connection as the target lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    pub(super) subsystem: String,
    /// Empty before 24.05.
    pub(super) host: String,
    pub(super) cntlid: u16,
    pub(super) qid: u16,
    pub(super) thread: Option<String>,
    /// The host's end; none before 24.05.
    pub(super) peer: Option<Endpoint>,
    pub(super) listener: Option<Endpoint>,
}

/// The first release whose list of connections can be asked for. Those before it end (a null pointer is followed) where a
/// connection is there that has not sent its Connect command yet, as any is for a moment (SPDK's commit 1965c4ddc2).
const LISTS_CONNECTIONS: (u64, u64) = (25, 5);

/// The first release whose ring tells the host's end of a connection, by which the host knows it too.
const TELLS_PEERS: (u64, u64) = (24, 5);

/// Connections, namespaces and block sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Directory {
    pub(super) connections: Vec<Connection>,
    /// Nothing more will be told of connections.
    pub(super) silent: bool,
    /// Where hosts may come from.
    pub(super) listeners: Vec<Endpoint>,
    /// By subsystem and bdev.
    pub(super) namespaces: HashMap<(String, String), u32>,
    /// By bdev, in bytes.
    pub(super) blocks: HashMap<String, u32>,
}

impl Directory {
    /// Asks for all of it.
    pub(super) fn ask(rpc: &Rpc) -> Result<Directory, RpcError> {
        let release = release(&rpc.call("spdk_get_version", None)?);
        let silent = release.is_none_or(|release| release < LISTS_CONNECTIONS);
        let mut directory = Directory { silent, ..Directory::default() };
        let mut controllers = Vec::new();
        let subsystems = rpc.call("nvmf_get_subsystems", None)?;
        for subsystem in subsystems.as_array().into_iter().flatten() {
            let Some(nqn) = subsystem.get("nqn").and_then(Value::as_str) else { continue };
            let discovery = subsystem.get("subtype").and_then(Value::as_str) == Some("Discovery");
            if discovery {
                continue;
            }
            directory.add_namespaces(nqn, subsystem);
            directory.add_listeners(subsystem);
            // One that was removed meanwhile has no connections.
            if release.is_some_and(|release| release < TELLS_PEERS) {
                let of_it = rpc.call("nvmf_subsystem_get_controllers", Some(json!({ "nqn": nqn })));
                controllers.extend(of_it.into_iter().map(|of_it| (nqn.to_owned(), of_it)));
            } else if !silent
                && let Ok(connections) = rpc.call("nvmf_subsystem_get_qpairs", Some(json!({ "nqn": nqn })))
            {
                directory.add_connections(nqn, &connections);
            }
        }
        directory.add_controllers(&controllers);
        if let Ok(bdevs) = rpc.call("bdev_get_bdevs", None) {
            directory.add_bdevs(&bdevs);
        }
        Ok(directory)
    }

    /// Whether a connection leaves this machine, or may do so.
    pub(super) fn has_remote(&self) -> bool {
        self.connections.iter().any(|c| !super::owners::is_local(c.peer.as_ref(), c.listener.as_ref()))
    }

    /// The same, or where there is none yet, that the first may be one.
    pub(super) fn may_become_remote(&self) -> bool {
        let beyond = |listener: &Endpoint| !super::owners::is_local(Some(listener), None);
        self.has_remote() || self.connections.is_empty() && self.listeners.iter().any(beyond)
    }

    fn add_listeners(&mut self, subsystem: &Value) {
        let listeners = subsystem.get("listen_addresses").and_then(Value::as_array).into_iter().flatten();
        self.listeners.extend(listeners.filter_map(|listener| endpoint(Some(listener))));
    }

    fn add_namespaces(&mut self, nqn: &str, subsystem: &Value) {
        for namespace in subsystem.get("namespaces").and_then(Value::as_array).into_iter().flatten() {
            let nsid =
                namespace.get("nsid").and_then(Value::as_u64).and_then(|nsid| u32::try_from(nsid).ok());
            let bdev = namespace.get("bdev_name").or_else(|| namespace.get("name")).and_then(Value::as_str);
            if let (Some(nsid), Some(bdev)) = (nsid, bdev) {
                let key = (nqn.to_owned(), bdev.to_owned());
                // A bdev that is two namespaces does not tell which.
                self.namespaces.entry(key).and_modify(|known| *known = 0).or_insert(nsid);
            }
        }
    }

    fn add_connections(&mut self, nqn: &str, connections: &Value) {
        for connection in connections.as_array().into_iter().flatten() {
            let number =
                |name: &str| connection.get(name).and_then(Value::as_u64).and_then(|n| u16::try_from(n).ok());
            let text = |name: &str| connection.get(name).and_then(Value::as_str).map(str::to_owned);
            if let (Some(cntlid), Some(qid)) = (number("cntlid"), number("qid")) {
                self.connections.push(Connection {
                    subsystem: nqn.to_owned(),
                    host: text("hostnqn").unwrap_or_default(),
                    cntlid,
                    qid,
                    thread: text("thread").filter(|name| !name.is_empty()),
                    peer: endpoint(connection.get("peer_address")),
                    listener: endpoint(connection.get("listen_address")),
                });
            }
        }
    }

    /// Of a target that does not list its connections: where it has one controller, each is that one's.
    fn add_controllers(&mut self, controllers: &[(String, Value)]) {
        let all = controllers.iter().flat_map(|(nqn, of_it)| {
            of_it.as_array().into_iter().flatten().map(move |controller| (nqn, controller))
        });
        let all: Vec<_> = all.collect();
        let [(nqn, controller)] = all.as_slice() else { return };
        let number =
            |name: &str| controller.get(name).and_then(Value::as_u64).and_then(|n| u16::try_from(n).ok());
        let (Some(cntlid), Some(queues)) = (number("cntlid"), number("num_io_qpairs")) else { return };
        let host = controller.get("hostnqn").and_then(Value::as_str).unwrap_or_default();
        self.connections.extend((0..=queues).map(|qid| Connection {
            subsystem: (*nqn).clone(),
            host: host.to_owned(),
            cntlid,
            qid,
            thread: None,
            peer: None,
            listener: None,
        }));
    }

    fn add_bdevs(&mut self, bdevs: &Value) {
        for bdev in bdevs.as_array().into_iter().flatten() {
            let size =
                bdev.get("block_size").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
            if let (Some(name), Some(size)) = (bdev.get("name").and_then(Value::as_str), size) {
                self.blocks.insert(name.to_owned(), size);
            }
        }
    }
}

/// Major and minor number of a target's release; one that does not say may be any.
fn release(version: &Value) -> Option<(u64, u64)> {
    let field = |name: &str| version.get("fields")?.get(name)?.as_u64();
    field("major").zip(field("minor"))
}

fn endpoint(address: Option<&Value>) -> Option<Endpoint> {
    let text = |name: &str| address?.get(name)?.as_str();
    Some(Endpoint {
        address: crate::queues::plain_address(text("traddr")?),
        port: text("trsvcid")?.parse().ok()?,
    })
}

/// Asks again and again, when told to.
#[derive(Debug)]
pub(super) struct Asking {
    ask: SyncSender<()>,
    answers: Receiver<Directory>,
    waiting: bool,
}

impl Asking {
    pub(super) fn new(rpc: Rpc) -> Asking {
        let (ask, asked) = sync_channel(1);
        let (answer, answers) = sync_channel(1);
        // It ends with the first question or answer that nobody is there for.
        std::thread::spawn(move || {
            while asked.recv().is_ok() {
                // A target that does not answer now may do later: what it would have said is missing till then.
                if answer.send(Directory::ask(&rpc).unwrap_or_default()).is_err() {
                    return;
                }
            }
        });
        Asking { ask, answers, waiting: false }
    }

    /// Asks, unless an answer is still to come.
    pub(super) fn ask(&mut self) {
        self.waiting = self.waiting || self.ask.try_send(()).is_ok();
    }

    /// The answer, when it has come.
    pub(super) fn answer(&mut self) -> Option<Directory> {
        match self.answers.try_recv() {
            Ok(directory) => {
                self.waiting = false;
                Some(directory)
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Directory, LISTS_CONNECTIONS, release};
    use serde_json::json;

    #[test]
    fn only_releases_that_survive_it_are_asked_for_their_connections() {
        let version = |major: u64, minor: u64| json!({ "fields": { "major": major, "minor": minor } });
        for (major, minor, asked) in
            [(23, 9, false), (24, 9, false), (25, 1, false), (25, 5, true), (26, 1, true), (27, 0, true)]
        {
            let release = release(&version(major, minor)).unwrap();
            assert_eq!(release >= LISTS_CONNECTIONS, asked, "{major}.{minor}");
        }
        for odd in [json!(null), json!({ "version": "SPDK v26.05" }), json!({ "fields": 7 })] {
            assert_eq!(release(&odd), None, "{odd}");
        }
    }

    #[test]
    fn the_connections_of_a_lone_controller_are_known() {
        let controller = |cntlid: u64| json!({ "cntlid": cntlid, "hostnqn": "nqn.h", "num_io_qpairs": 2 });
        let of = |controllers: serde_json::Value| {
            let mut directory = Directory::default();
            directory.add_controllers(&[("nqn.a".to_owned(), controllers), ("nqn.b".to_owned(), json!([]))]);
            directory.connections.iter().map(|c| (c.subsystem.clone(), c.cntlid, c.qid)).collect::<Vec<_>>()
        };
        let each = |qid: u16| ("nqn.a".to_owned(), 7, qid);
        assert_eq!(of(json!([controller(7)])), [each(0), each(1), each(2)]);
        // Of two nothing tells whose a connection is.
        assert_eq!(of(json!([controller(7), controller(8)])), []);
        assert_eq!(of(json!([{ "cntlid": -1 }])), []);
        assert_eq!(of(json!(7)), []);
    }

    #[test]
    fn sends_are_expected_where_a_connection_may_leave_the_machine() {
        let qpair = |peer: &str, listener: &str| {
            let end = |address: &str| json!({ "traddr": address, "trsvcid": "4420" });
            json!([{ "cntlid": 1, "qid": 1, "peer_address": end(peer), "listen_address": end(listener) }])
        };
        let (loopback, lan) = ("127.0.0.1", "192.0.2.1");
        for (listener, peer, expected) in [
            (loopback, None, false),
            (lan, None, true),
            ("0.0.0.0", None, true),
            (lan, Some(lan), false),
            (lan, Some("192.0.2.7"), true),
            (loopback, Some(loopback), false),
        ] {
            let mut directory = Directory::default();
            directory.add_listeners(
                &json!({ "listen_addresses": [{ "traddr": listener, "trsvcid": "4420" }, 7] }),
            );
            if let Some(peer) = peer {
                directory.add_connections("nqn.a", &qpair(peer, listener));
            }
            assert_eq!(directory.may_become_remote(), expected, "{listener} {peer:?}");
        }
    }

    #[test]
    fn what_the_target_says_is_kept_and_nonsense_is_not() {
        let mut directory = Directory::default();
        directory.add_namespaces(
            "nqn.a",
            &json!({ "namespaces": [
                { "nsid": 1, "bdev_name": "Malloc0" },
                { "nsid": 2, "bdev_name": "Twice" },
                { "nsid": 3, "bdev_name": "Twice" },
                { "nsid": -1, "bdev_name": "x" },
                7,
            ] }),
        );
        assert_eq!(directory.namespaces[&("nqn.a".to_owned(), "Malloc0".to_owned())], 1);
        assert_eq!(directory.namespaces[&("nqn.a".to_owned(), "Twice".to_owned())], 0);
        assert_eq!(directory.namespaces.len(), 2);
        directory.add_connections(
            "nqn.a",
            &json!([
                { "cntlid": 1, "qid": 3, "hostnqn": "nqn.h", "thread": "poll_group_0",
                  "peer_address": { "traddr": "::ffff:10.0.0.1", "trsvcid": "4000" },
                  "listen_address": { "traddr": "10.0.0.2", "trsvcid": "4420" } },
                { "cntlid": 1, "qid": 4 },
                { "cntlid": 70_000, "qid": 4 },
                "x",
            ]),
        );
        assert_eq!(directory.connections.len(), 2);
        let peer = directory.connections[0].peer.as_ref().unwrap();
        assert_eq!((peer.address.as_str(), peer.port), ("10.0.0.1", 4000));
        assert_eq!(directory.connections[1].peer, None);
        directory.add_bdevs(&json!([{ "name": "Malloc0", "block_size": 512 }, { "name": 1 }]));
        assert_eq!(directory.blocks["Malloc0"], 512);
        directory.add_bdevs(&json!("nothing"));
    }
}
