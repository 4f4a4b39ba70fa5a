//! The ring's texts about who records: a connection's addresses and names, a bdev's name.

use run_format::Endpoint;

use super::layout::{OWNER_HEAD, Owners, text};
use super::memory::Shared;

/// An owner, as the table has it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// When it was registered, in ticks.
    pub(super) since: u64,
    pub(super) description: String,
}

/// What a connection's description says: `10.0.0.1:41000 nqn.2016-06.io.spdk:cnode1 10.0.0.2:4420 qid:1`. Before
/// 26.05 the last two are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) peer: Option<Endpoint>,
    pub(super) subsystem: String,
    pub(super) listener: Option<Endpoint>,
    pub(super) qid: Option<u16>,
}

/// Since when an owner's place in the table is his.
pub(super) fn since(file: &Shared, owners: &Owners, owner: u16) -> Option<u64> {
    let at = place(owners, owner)?;
    if at.is_multiple_of(8) {
        return file.word(at);
    }
    Some(u64::from_ne_bytes(file.bytes(at, 8)?.try_into().ok()?))
}

/// An owner; `None` for one that the table does not have.
pub(super) fn owner(file: &Shared, owners: &Owners, owner: u16) -> Option<Owner> {
    let at = place(owners, owner)?;
    // The process writes it in several steps.
    let mut last = file.bytes(at, owners.size)?;
    for _ in 0..4 {
        let again = file.bytes(at, owners.size)?;
        if again == last {
            break;
        }
        last = again;
    }
    let since = u64::from_ne_bytes(last.get(..8)?.try_into().ok()?);
    let description = text(last.get(OWNER_HEAD..)?)?;
    (since != 0).then_some(Owner { since, description })
}

fn place(owners: &Owners, owner: u16) -> Option<usize> {
    let owner = usize::from(owner);
    (owner != 0 && owner < owners.number).then(|| owners.at + owner * owners.size)
}

/// Reads a connection's description.
pub(super) fn ends(description: &str) -> Ends {
    let mut ends = Ends::default();
    for (n, word) in description.split_whitespace().enumerate() {
        if let Some(qid) = word.strip_prefix("qid:") {
            ends.qid = qid.parse().ok();
        } else if word.starts_with("nqn.") {
            word.clone_into(&mut ends.subsystem);
        } else if let Some((address, port)) = word.rsplit_once(':')
            && let Ok(port) = port.parse()
        {
            let address = address.trim_start_matches('[').trim_end_matches(']');
            let end = Endpoint { address: crate::queues::plain_address(address), port };
            if n == 0 {
                ends.peer = Some(end);
            } else {
                ends.listener = Some(end);
            }
        }
    }
    ends
}

/// Whether both ends are on this machine: a send there may run the receiving side before it returns.
pub(super) fn is_local(host: Option<&Endpoint>, target: Option<&Endpoint>) -> bool {
    let Some(host) = host else { return false };
    let loopback = host.address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    loopback || target.is_some_and(|target| target.address == host.address)
}

#[cfg(test)]
mod tests {
    use super::{Ends, ends, is_local};
    use proptest::prelude::*;
    use run_format::Endpoint;

    fn end(address: &str, port: u16) -> Option<Endpoint> {
        Some(Endpoint { address: address.to_owned(), port })
    }

    #[test]
    fn descriptions_of_each_release_are_read() {
        let name = "nqn.2016-06.io.spdk:cnode1".to_owned();
        let whole = ends("127.0.0.1:35106 nqn.2016-06.io.spdk:cnode1 127.0.0.1:44777 qid:1");
        let expected = Ends {
            peer: end("127.0.0.1", 35106),
            subsystem: name.clone(),
            listener: end("127.0.0.1", 44777),
            qid: Some(1),
        };
        assert_eq!(whole, expected);
        let before = ends("fe80::1:4000 nqn.2016-06.io.spdk:cnode1");
        assert_eq!(before, Ends { peer: end("fe80::1", 4000), subsystem: name, ..Ends::default() });
        assert_eq!(ends(""), Ends::default());
        assert_eq!(ends("bdev_Malloc0"), Ends::default());
    }

    #[test]
    fn connections_within_a_machine_are_known() {
        let (a, b) = (end("10.0.0.1", 1), end("10.0.0.2", 2));
        assert!(!is_local(a.as_ref(), b.as_ref()) && !is_local(None, a.as_ref()));
        assert!(is_local(a.as_ref(), end("10.0.0.1", 7).as_ref()));
        assert!(is_local(end("::1", 1).as_ref(), None));
    }

    proptest! {
        #[test]
        fn any_description_is_read(text in ".{0,120}") {
            let _ = ends(&text);
        }
    }
}
