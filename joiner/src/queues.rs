//! Finds which queues of the two runs are the same queue. It looks at what the queues are, never at their
//! commands.
//!
//! A queue is known on both sides by (subsystem NQN, host NQN, cntlid, qid); cntlid is reused after a
//! reconnect, so each connection is an epoch of its own, named by the host's port. Where no port tells the
//! epochs apart (a side does not know it, or an address translation changed it), the epochs of one
//! identity form one link: they follow each other in time, so time keeps their commands apart.

use run_format::{Queue, QueueId};
use std::collections::{BTreeMap, BTreeSet};

/// What two queues were found to be the same by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkedBy {
    /// The same names and the same host port.
    Port,
    /// The same names; at least one side has no port, or an address translation changed it.
    Names,
}

/// Queues of the two runs that are the same queue (several where epochs could not be told apart).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Link {
    /// Controller identifier.
    pub cntlid: u16,
    /// Queue identifier.
    pub qid: u16,
    /// Numbers of the queues in the host run.
    pub host: Vec<QueueId>,
    /// Numbers of the queues in the target run.
    pub target: Vec<QueueId>,
    /// What they were found to be the same by.
    pub by: LinkedBy,
}

/// The links, and which link a queue of either side belongs to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    pub(crate) links: Vec<Link>,
    pub(crate) host: BTreeMap<QueueId, u32>,
    pub(crate) target: BTreeMap<QueueId, u32>,
    /// Queues that fit more than one queue of the other side and so were linked to none.
    pub(crate) unclear: usize,
}

/// Empty names are unknown ones: SPDK's own initiator may send no host NQN.
fn same_or_unknown(a: &str, b: &str) -> bool {
    a.is_empty() || b.is_empty() || a == b
}

/// The controller identifier that no controller has: a target's source did not learn the queue's.
const NO_CNTLID: u16 = 0xffff;

fn names_agree(h: &Queue, t: &Queue) -> bool {
    h.transport == t.transport
        && same_or_unknown(&h.subsystem_nqn, &t.subsystem_nqn)
        && same_or_unknown(&h.host_nqn, &t.host_nqn)
}

/// Whether a target's queue whose controller is not known is this connection all the same.
fn is_connection(h: &Queue, t: &Queue) -> bool {
    t.cntlid == NO_CNTLID
        && (t.qid == 0 || t.qid == h.qid)
        && names_agree(h, t)
        && ports_agree(h, t) == Some(true)
}

fn ports_agree(h: &Queue, t: &Queue) -> Option<bool> {
    Some(h.host.as_ref()?.port == t.host.as_ref()?.port)
}

/// Links the queues of a host run to those of a target run.
pub(crate) fn link(host: &BTreeMap<QueueId, Queue>, target: &BTreeMap<QueueId, Queue>) -> Links {
    let mut by_number: BTreeMap<(u16, u16), Vec<QueueId>> = BTreeMap::new();
    let mut nameless: Vec<QueueId> = Vec::new();
    for (&id, q) in target {
        match q.cntlid {
            NO_CNTLID => nameless.push(id),
            cntlid => by_number.entry((cntlid, q.qid)).or_default().push(id),
        }
    }
    let mut pairs: Vec<(QueueId, QueueId, Option<bool>)> = Vec::new();
    for (&h, hq) in host {
        for &t in by_number.get(&(hq.cntlid, hq.qid)).map_or(&[][..], Vec::as_slice) {
            if names_agree(hq, &target[&t]) {
                pairs.push((h, t, ports_agree(hq, &target[&t])));
            }
        }
        let same = nameless.iter().filter(|t| is_connection(hq, &target[t]));
        pairs.extend(same.map(|&t| (h, t, Some(true))));
    }
    // Where some connection has the same port on both sides nothing translates ports, so queues whose
    // ports differ are different connections.
    let ports_hold = pairs.iter().any(|p| p.2 == Some(true));
    let host_by_port: BTreeSet<QueueId> = pairs.iter().filter(|p| p.2 == Some(true)).map(|p| p.0).collect();
    let target_by_port: BTreeSet<QueueId> = pairs.iter().filter(|p| p.2 == Some(true)).map(|p| p.1).collect();
    pairs.retain(|&(h, t, ports)| match ports {
        Some(true) => true,
        Some(false) => !ports_hold,
        None => !host_by_port.contains(&h) && !target_by_port.contains(&t),
    });

    let mut links = Links::default();
    for (hs, ts) in components(&pairs) {
        let hosts: Vec<&Queue> = hs.iter().map(|id| &host[id]).collect();
        let targets: Vec<&Queue> = ts.iter().map(|id| &target[id]).collect();
        if !one_identity(&hosts) || !one_identity(&targets) {
            links.unclear += hs.len() + ts.len();
            continue;
        }
        let number = u32::try_from(links.links.len()).unwrap_or(u32::MAX);
        links.host.extend(hs.iter().map(|&id| (id, number)));
        links.target.extend(ts.iter().map(|&id| (id, number)));
        let by = if hs.iter().all(|id| host_by_port.contains(id)) { LinkedBy::Port } else { LinkedBy::Names };
        links.links.push(Link { cntlid: hosts[0].cntlid, qid: hosts[0].qid, host: hs, target: ts, by });
    }
    links
}

/// Whether queues of one side are epochs of one queue: no two of them are known by different names.
fn one_identity(queues: &[&Queue]) -> bool {
    let differ = |name: fn(&Queue) -> &str| {
        let names: BTreeSet<&str> = queues.iter().map(|q| name(q)).filter(|n| !n.is_empty()).collect();
        names.len() > 1
    };
    !differ(|q| &q.subsystem_nqn) && !differ(|q| &q.host_nqn)
}

type Component = (Vec<QueueId>, Vec<QueueId>);

/// The connected components of the pairs, each as its host's and its target's queues.
fn components(pairs: &[(QueueId, QueueId, Option<bool>)]) -> Vec<Component> {
    let mut components: Vec<(BTreeSet<QueueId>, BTreeSet<QueueId>)> = Vec::new();
    for &(h, t, _) in pairs {
        let mut merged = (BTreeSet::from([h]), BTreeSet::from([t]));
        let (touched, apart): (Vec<_>, Vec<_>) =
            components.into_iter().partition(|(hs, ts)| hs.contains(&h) || ts.contains(&t));
        for (hs, ts) in touched {
            merged.0.extend(hs);
            merged.1.extend(ts);
        }
        components = apart;
        components.push(merged);
    }
    components.sort();
    components.into_iter().map(|(h, t)| (h.into_iter().collect(), t.into_iter().collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::{LinkedBy, link};
    use run_format::{Endpoint, Queue, QueueId};
    use std::collections::BTreeMap;

    fn queue(nqn: &str, host_nqn: &str, cntlid: u16, qid: u16, port: Option<u16>) -> Queue {
        Queue {
            subsystem_nqn: nqn.into(),
            host_nqn: host_nqn.into(),
            cntlid,
            qid,
            host: port.map(|port| Endpoint { address: "192.0.2.1".into(), port }),
            ..Queue::default()
        }
    }

    fn run(queues: Vec<Queue>) -> BTreeMap<QueueId, Queue> {
        queues.into_iter().enumerate().map(|(i, q)| (QueueId(i as u32), q)).collect()
    }

    fn ids(n: &[u32]) -> Vec<QueueId> {
        n.iter().map(|&n| QueueId(n)).collect()
    }

    #[test]
    fn a_reconnect_with_the_same_cntlid_is_an_epoch_of_its_own() {
        let host = run(vec![queue("a", "h", 1, 1, Some(100)), queue("a", "h", 1, 1, Some(200))]);
        let target = run(vec![queue("a", "h", 1, 1, Some(200)), queue("a", "h", 1, 1, Some(300))]);
        let links = link(&host, &target).links;
        assert_eq!(links.len(), 1);
        assert_eq!((links[0].host.clone(), links[0].target.clone()), (ids(&[1]), ids(&[0])));
        assert_eq!(links[0].by, LinkedBy::Port);
    }

    #[test]
    fn a_host_that_sends_no_nqn_is_found_by_the_rest() {
        let host = run(vec![queue("a", "h", 1, 1, None), queue("a", "h", 2, 1, None)]);
        let target = run(vec![queue("a", "", 2, 1, Some(9)), queue("a", "", 1, 1, Some(8))]);
        let links = link(&host, &target).links;
        assert_eq!(links.len(), 2);
        assert!(links.iter().all(|l| l.by == LinkedBy::Names && l.host.len() == 1));
        assert_eq!((links[0].host.clone(), links[0].target.clone()), (ids(&[0]), ids(&[1])));
    }

    #[test]
    fn translated_ports_do_not_hinder() {
        let host = run(vec![queue("a", "h", 1, 1, Some(100)), queue("a", "h", 1, 2, Some(101))]);
        let target = run(vec![queue("a", "h", 1, 1, Some(7)), queue("a", "h", 1, 2, Some(8))]);
        assert_eq!(link(&host, &target).links.len(), 2);
    }

    #[test]
    fn epochs_without_ports_are_one_link() {
        let host = run(vec![queue("a", "h", 1, 1, None), queue("a", "h", 1, 1, None)]);
        let target = run(vec![queue("a", "h", 1, 1, None), queue("a", "h", 1, 1, None)]);
        let links = link(&host, &target).links;
        assert_eq!(links.len(), 1);
        assert_eq!((links[0].host.len(), links[0].target.len()), (2, 2));
    }

    #[test]
    fn a_queue_that_fits_two_is_linked_to_none() {
        let host = run(vec![queue("a", "h", 1, 1, None), queue("b", "h", 1, 1, None)]);
        let target = run(vec![queue("", "", 1, 1, None)]);
        let links = link(&host, &target);
        assert!(links.links.is_empty());
        assert_eq!(links.unclear, 3);
    }

    #[test]
    fn a_controller_that_is_not_known_is_told_by_its_connection() {
        let host = run(vec![queue("a", "h", 1, 1, Some(40_000)), queue("a", "h", 1, 2, Some(40_001))]);
        let target =
            run(vec![queue("a", "", 0xffff, 2, Some(40_001)), queue("a", "", 0xffff, 0, Some(40_000))]);
        let links = link(&host, &target);
        let linked: Vec<_> = links.links.iter().map(|l| (l.host.clone(), l.target.clone())).collect();
        let ids = |h, t| (vec![QueueId(h)], vec![QueueId(t)]);
        assert_eq!(linked, [ids(0, 1), ids(1, 0)]);
        for other in [
            queue("a", "", 0xffff, 2, Some(40_000)),
            queue("b", "", 0xffff, 1, Some(40_000)),
            queue("a", "", 0xffff, 1, None),
        ] {
            assert!(link(&host, &run(vec![other])).links.is_empty());
        }
    }

    #[test]
    fn other_subsystems_hosts_controllers_and_queues_are_no_partners() {
        let host = run(vec![queue("a", "h", 1, 1, None)]);
        for other in [
            queue("b", "h", 1, 1, None),
            queue("a", "g", 1, 1, None),
            queue("a", "h", 2, 1, None),
            queue("a", "h", 1, 2, None),
        ] {
            assert!(link(&host, &run(vec![other])).links.is_empty());
        }
    }
}
