//! What this machine's TCP did in all, from `/proc/net/snmp` and `/proc/net/netstat`
//! (Documentation/networking/snmp_counter.rst).

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::kept::Kept;
use crate::text::{fields, lines, number};
use crate::{About, Nanos, Rows};

metrics! {
    OutSegs = "segments_out", "segments", Counter64, "sent, without those that only repeat";
    RetransSegs = "retransmitted", "segments", Counter64, "sent again";
    InCsumErrors = "checksum_errors", "segments", Counter64, "received with a wrong checksum";
    Timeouts = "timeouts", "", Counter64, "retransmission timers that ran out";
    FastRetrans = "fast_retransmitted", "segments", Counter64, "sent again by fast retransmission";
    SlowStartRetrans = "slow_start_retransmitted", "segments", Counter64, "sent again in slow start";
    LostRetransmit = "lost_retransmits", "segments", Counter64, "sent again and lost again";
    LossProbes = "loss_probes", "", Counter64, "tail loss probes sent";
    SynRetrans = "syn_retransmitted", "segments", Counter64, "connection requests sent again";
    BacklogDrop = "backlog_dropped", "segments", Counter64, "dropped because a socket's backlog was full";
    RcvQDrop = "receive_queue_dropped", "segments", Counter64, "dropped because a socket's receive queue was full";
    ZeroWindowDrop = "zero_window_dropped", "segments", Counter64, "dropped because the window was closed";
    ToZeroWindow = "to_zero_window", "", Counter64, "times that a receive window closed";
    Pruned = "pruned", "", Counter64, "times that a receive queue was pruned for want of memory";
    Collapsed = "collapsed", "", Counter64, "segments merged for want of memory";
    ListenDrops = "listen_dropped", "", Counter64, "connection requests that a listener dropped";
    Reordered = "out_of_order", "segments", Counter64, "put into an out-of-order queue";
    CePackets = "ecn_ce_received", "packets", Counter64, "IP packets received that a switch marked for congestion (CE)";
    EctPackets = "ecn_ect_received", "packets", Counter64, "IP packets received that may be marked (ECT(0))";
}

pub(super) const ABOUT: About = About {
    name: "netstat",
    source: "/proc/net/snmp and /proc/net/netstat",
    object: "none: of the network namespace that fabscope runs in",
    at_most_every: None,
    waits: false,
    metrics: METRICS,
    further: "",
    lacks: "which connection it was: `tcp` has that",
};

/// The collector.
#[derive(Debug)]
pub(super) struct Netstat {
    files: Vec<Kept>,
}

impl Netstat {
    pub(super) fn open(places: &Places) -> Result<Netstat, Lack> {
        let mut files = Vec::new();
        for name in ["net/snmp", "net/netstat"] {
            let path = places.proc.join(name);
            files.push(Kept::open(&path).map_err(|e| Lack::of(&path, &e))?);
        }
        Ok(Netstat { files })
    }
}

impl Collector for Netstat {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        for file in &mut self.files {
            let text = file.read().map_err(|e| Lack(format!("/proc/net/snmp, /proc/net/netstat: {e}")))?;
            parse(text, rows);
        }
        Ok(())
    }
}

fn metric(group: &[u8], name: &[u8]) -> Option<M> {
    Some(match (group, name) {
        (b"Tcp:", b"OutSegs") => M::OutSegs,
        (b"Tcp:", b"RetransSegs") => M::RetransSegs,
        (b"Tcp:", b"InCsumErrors") => M::InCsumErrors,
        (b"TcpExt:", b"TCPTimeouts") => M::Timeouts,
        (b"TcpExt:", b"TCPFastRetrans") => M::FastRetrans,
        (b"TcpExt:", b"TCPSlowStartRetrans") => M::SlowStartRetrans,
        (b"TcpExt:", b"TCPLostRetransmit") => M::LostRetransmit,
        (b"TcpExt:", b"TCPLossProbes") => M::LossProbes,
        (b"TcpExt:", b"TCPSynRetrans") => M::SynRetrans,
        (b"TcpExt:", b"TCPBacklogDrop") => M::BacklogDrop,
        (b"TcpExt:", b"TCPRcvQDrop") => M::RcvQDrop,
        (b"TcpExt:", b"TCPZeroWindowDrop") => M::ZeroWindowDrop,
        (b"TcpExt:", b"TCPToZeroWindowAdv") => M::ToZeroWindow,
        (b"TcpExt:", b"PruneCalled") => M::Pruned,
        (b"TcpExt:", b"TCPRcvCollapsed") => M::Collapsed,
        (b"TcpExt:", b"ListenDrops") => M::ListenDrops,
        (b"TcpExt:", b"TCPOFOQueue") => M::Reordered,
        (b"IpExt:", b"InCEPkts") => M::CePackets,
        (b"IpExt:", b"InECT0Pkts") => M::EctPackets,
        _ => return None,
    })
}

/// Pairs of lines: the names of a group, then their values.
fn parse(text: &[u8], rows: &mut Rows) {
    let mut lines = lines(text);
    while let Some(names) = lines.next() {
        let Some(values) = lines.next() else { return };
        let (mut names, mut values) = (fields(names), fields(values));
        let Some(group) = names.next() else { continue };
        if values.next() != Some(group) {
            return;
        }
        for (name, value) in names.zip(values) {
            let Some(metric) = metric(group, name) else { continue };
            if let (Some(object), Some(value)) = (rows.object(""), number(value)) {
                rows.count(object, metric, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, METRICS, Netstat, parse};
    use crate::collect::{Collector, Places};
    use crate::rows::tests::{key, sampled};
    use crate::{Nanos, Rows};

    const TEXT: &str = "Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs\n\
        Tcp: 1 200 120000 -1 12096 160215483 160140977 35109 0\n\
        TcpExt: SyncookiesSent TCPTimeouts TCPFastRetrans\nTcpExt: 0 7 9\n\
        IpExt: InNoRoutes InCEPkts\nIpExt: 0 11\n";

    #[test]
    fn names_and_values_stand_in_pairs_of_lines() {
        let found = sampled(&ABOUT, |rows| parse(TEXT.as_bytes(), rows));
        assert_eq!(found[&key("", "retransmitted")], 35_109.0);
        assert_eq!(found[&key("", "timeouts")], 7.0);
        assert_eq!(found[&key("", "ecn_ce_received")], 11.0);
        assert_eq!(found.len(), 5);
    }

    #[test]
    fn this_kernel_has_them() {
        let mut netstat = Netstat::open(&Places::default()).unwrap();
        let found = sampled(&ABOUT, |rows: &mut Rows| netstat.sample(Nanos(1), rows).unwrap());
        assert_eq!(found.len(), METRICS.len(), "{found:?}");
    }

    super::super::parser_properties!(&ABOUT, TEXT, parse);
}
