//! Each retransmission, with its moment and its connection. Who sees them is given: it knows no BPF, and which
//! connections are wanted it is told by `tcp`.

use super::{Collector, Lack, Places, Ports, Subject};
use crate::about::metrics;
use crate::text::Name;
use crate::{About, Nanos, Rows};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};

metrics! {
    Retransmit = "retransmit", "segments", Event, "sent again at this moment";
    Lost = "lost", "", Counter64, "events that were lost, since more came than there was room for (object: none)";
}

pub(super) const ABOUT: About = About {
    name: "retransmits",
    source: "the tracepoint tcp_retransmit_skb, by a BPF program",
    object: "the connection as `LOCAL>REMOTE`, as `tcp` has it",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "all of it where the kernel does not take the BPF program (no rights, no type information); before Linux 6.17, those that the machine's own queueing discipline refused, which `tcp` counts; other network namespaces than that of the recorded process; connections to others' ports until `tcp` has found one to the same port (2 s)",
};

/// One, as it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retransmission {
    /// When.
    pub at: Nanos,
    /// This machine's end of the connection.
    pub local: SocketAddr,
    /// The other.
    pub remote: SocketAddr,
    /// Segments that were sent again.
    pub segments: u32,
}

/// What sees retransmissions.
pub trait Retransmissions: Send {
    /// From now on only those in this network namespace (its inode), from these local or to these remote ports; where
    /// there are no ports, those of all.
    fn only(&mut self, namespace: Option<u32>, local: &BTreeSet<u16>, remote: &BTreeSet<u16>);
    /// Adds those since the last call, in the order of their times.
    ///
    /// # Errors
    /// When no more can come, and why.
    fn take(&mut self, into: &mut Vec<Retransmission>) -> Result<(), Lack>;
    /// How many were lost, until now.
    fn lost(&self) -> u64;
}

/// Opens what sees retransmissions.
pub type OpenRetransmissions = fn() -> Result<Box<dyn Retransmissions>, Lack>;

/// The collector.
pub(super) struct Retransmits {
    source: Box<dyn Retransmissions>,
    namespace: Option<u32>,
    /// What `tcp` knows, and what the source was told of it.
    ports: Arc<Mutex<Ports>>,
    told: Ports,
    events: Vec<Retransmission>,
}

impl Retransmits {
    pub(super) fn open(
        places: &Places,
        subject: &Subject,
        ports: &Arc<Mutex<Ports>>,
    ) -> Result<Retransmits, Lack> {
        let open = subject
            .retransmissions
            .ok_or_else(|| Lack("nothing that sees retransmissions was given".to_owned()))?;
        let whose = match subject.pid {
            Some(pid) => places.proc.join(format!("{pid}/ns/net")),
            None => places.proc.join("thread-self/ns/net"),
        };
        let namespace = std::fs::metadata(&whose).map_err(|e| Lack::of(&whose, &e))?.ino();
        let namespace = u32::try_from(namespace).ok();
        let mut source = open()?;
        source.only(namespace, &BTreeSet::new(), &BTreeSet::new());
        let (ports, told) = (Arc::clone(ports), Ports::default());
        Ok(Retransmits { source, namespace, ports, told, events: Vec::new() })
    }
}

impl Collector for Retransmits {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, at: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        {
            let ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
            if *ports != self.told {
                self.told.clone_from(&ports);
                self.source.only(self.namespace, &ports.local, &ports.remote);
            }
        }
        self.source.take(&mut self.events)?;
        // What came while it looked is of the next sample.
        let later = self.events.partition_point(|event| event.at <= at);
        for event in self.events.drain(..later).filter(|e| self.told.has(e.local.port(), e.remote.port())) {
            let name = Name::of(format_args!("{}>{}", event.local, event.remote));
            if let Some(object) = rows.object(name.as_str()) {
                rows.event(object, M::Retransmit, event.at, f64::from(event.segments));
            }
        }
        if let Some(object) = rows.object("") {
            rows.count(object, M::Lost, self.source.lost());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::tests::{key, values};

    /// Sees what it is given, and keeps what it was told.
    #[derive(Default)]
    struct Given {
        next: Vec<Retransmission>,
        lost: u64,
        gone: bool,
        only: Vec<(Option<u32>, usize, usize)>,
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Given>>);

    impl Retransmissions for Shared {
        fn only(&mut self, namespace: Option<u32>, local: &BTreeSet<u16>, remote: &BTreeSet<u16>) {
            self.0.lock().unwrap().only.push((namespace, local.len(), remote.len()));
        }
        fn take(&mut self, into: &mut Vec<Retransmission>) -> Result<(), Lack> {
            let mut given = self.0.lock().unwrap();
            into.append(&mut given.next);
            if given.gone { Err(Lack("gone".into())) } else { Ok(()) }
        }
        fn lost(&self) -> u64 {
            self.0.lock().unwrap().lost
        }
    }

    fn seen(at: u64, local: &str, remote: &str) -> Retransmission {
        let of = |end: &str| end.parse().unwrap();
        Retransmission { at: Nanos(at), local: of(local), remote: of(remote), segments: 2 }
    }

    #[test]
    fn each_is_a_row_at_its_own_time_once_and_of_the_wanted_ports() {
        let given = Shared::default();
        let ports = Arc::new(Mutex::new(Ports::default()));
        let mut collector = Retransmits {
            source: Box::new(given.clone()),
            namespace: Some(7),
            ports: Arc::clone(&ports),
            told: Ports::default(),
            events: Vec::new(),
        };
        let mut rows = Rows::new(&ABOUT);
        let mut sample = |collector: &mut Retransmits, at: u64| {
            rows.begin(Nanos(at));
            let taken = collector.sample(Nanos(at), &mut rows);
            rows.finish(Nanos(0));
            let events: Vec<(u64, String)> = rows
                .take()
                .unwrap()
                .rows
                .iter()
                .filter(|row| row.metric == 0)
                .map(|row| (row.at.0, row.object.to_string()))
                .collect();
            let lost = values(&rows).get(&key("", "lost")).copied();
            taken.map(|()| (events, lost))
        };
        let (near, far) = ("10.0.0.1:50000", "10.0.0.2:4420");
        let name = format!("{near}>{far}");
        // While no port is known all are taken; what is later than the sample waits for the next.
        given.0.lock().unwrap().next = vec![seen(5, near, far), seen(6, far, near), seen(12, near, far)];
        let (events, lost) = sample(&mut collector, 10).unwrap();
        assert_eq!(events, [(5, name.clone()), (6, format!("{far}>{near}"))]);
        assert_eq!(lost, Some(0.0));
        // Then only those of the ports, whichever end they are at, also before the source has heard of it.
        ports.lock().unwrap().remote.insert(4420);
        given.0.lock().unwrap().next = vec![seen(13, far, near), seen(14, near, far)];
        given.0.lock().unwrap().lost = 3;
        let (events, lost) = sample(&mut collector, 20).unwrap();
        assert_eq!(events, [(12, name.clone()), (14, name)]);
        assert_eq!(lost, Some(3.0));
        assert!(sample(&mut collector, 30).unwrap().0.is_empty());
        assert_eq!(given.0.lock().unwrap().only, [(Some(7), 0, 1)]);
        given.0.lock().unwrap().gone = true;
        assert_eq!(sample(&mut collector, 40), Err(Lack("gone".into())));
    }

    #[test]
    fn without_a_source_there_is_nothing_and_why_is_said() {
        let ports = Arc::default();
        let open = |subject| Retransmits::open(&Places::default(), &subject, &ports).err().map(|l| l.0);
        assert!(open(Subject::default()).unwrap().contains("given"));
        let refused: OpenRetransmissions = || Err(Lack("EPERM".to_owned()));
        let subject = Subject { retransmissions: Some(refused), ..Subject::default() };
        assert_eq!(open(subject).unwrap(), "EPERM");
        let gone = Subject { pid: Some(u32::MAX), retransmissions: Some(refused), ..Subject::default() };
        assert!(open(gone).unwrap().contains("ns/net"));
    }
}
