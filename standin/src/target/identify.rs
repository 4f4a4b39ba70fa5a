//! What Identify, Get Log Page and the properties answer: pure functions from a description of the
//! controller to bytes. Every name in here says that this is a stand-in.

use crate::wire::{Status, opc};

/// Serial number and model of every controller.
pub(crate) const MODEL: &str = "fabscope stand-in (not SPDK)";

/// What the answers depend on.
#[derive(Clone, Debug)]
pub(crate) struct Description<'a> {
    pub(crate) cntlid: u16,
    pub(crate) subnqn: &'a [u8],
    pub(crate) serial: &'a [u8],
    pub(crate) max_io_size: u32,
    pub(crate) in_capsule: u32,
    pub(crate) max_queue_depth: u16,
    pub(crate) ana: bool,
    pub(crate) namespaces: &'a [NamespaceDescription],
}

/// One namespace; its identifier is its place, counted from one.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceDescription {
    pub(crate) blocks: u64,
    pub(crate) block_bytes: u32,
    pub(crate) uuid: [u8; 16],
}

fn put(data: &mut [u8], at: usize, bytes: &[u8]) {
    data[at..at + bytes.len()].copy_from_slice(bytes);
}

fn put_text(data: &mut [u8], at: usize, len: usize, text: &[u8]) {
    let n = text.len().min(len);
    data[at..at + len].fill(b' ');
    data[at..at + n].copy_from_slice(&text[..n]);
}

/// The version that the controller claims: 1.4.0.
pub(crate) const VS: u32 = 0x0001_0400;

/// Capabilities: queue entries, contiguous queues required, 15 s to become ready, NVM command set.
pub(crate) fn cap(max_queue_depth: u16) -> u64 {
    u64::from(max_queue_depth - 1) | (1 << 16) | (30 << 24) | (1 << 37)
}

/// Answers Identify.
///
/// # Errors
/// The status to complete the command with.
pub(crate) fn identify(d: &Description<'_>, cns: u8, nsid: u32, csi: u8) -> Result<Vec<u8>, Status> {
    let mut data = vec![0u8; 4096];
    match cns {
        0x00 => {
            if nsid == u32::MAX {
                common_namespace(&mut data);
                return Ok(data);
            }
            let Some(ns) = namespace(d, nsid)? else {
                return Ok(data);
            };
            common_namespace(&mut data);
            put(&mut data, 0, &ns.blocks.to_le_bytes());
            put(&mut data, 8, &ns.blocks.to_le_bytes());
            put(&mut data, 16, &ns.blocks.to_le_bytes());
            if d.ana {
                put(&mut data, 92, &1u32.to_le_bytes());
            }
            put(&mut data, 104, &ns.uuid);
            data[130] = ns.block_bytes.trailing_zeros() as u8;
        }
        0x01 => controller(d, &mut data),
        0x02 => {
            if nsid >= 0xffff_fffe {
                return Err(Status::INVALID_NAMESPACE);
            }
            for (slot, id) in (nsid + 1..=d.namespaces.len() as u32).take(1024).enumerate() {
                put(&mut data, slot * 4, &id.to_le_bytes());
            }
        }
        0x03 => {
            let Some(ns) = namespace(d, nsid)? else {
                return Err(Status::INVALID_NAMESPACE);
            };
            put(&mut data, 0, &[2, 16, 0, 0]);
            put(&mut data, 4, &ns.uuid);
            put(&mut data, 20, &[3, 16, 0, 0]);
            put(&mut data, 24, &ns.uuid);
            put(&mut data, 40, &[4, 1, 0, 0, 0]);
        }
        // I/O command set specific: namespace, controller, active list.
        0x05 if csi == 0 => {
            namespace(d, nsid)?;
        }
        0x06 if csi == 0 => {}
        0x07 if csi == 0 => return identify(d, 0x02, nsid, 0),
        0x08 => {
            // I/O command set independent namespace.
            if namespace(d, nsid)?.is_none() {
                return Ok(data);
            }
            data[1] = 1;
            put(&mut data, 8, &u32::from(d.ana).to_le_bytes());
            data[14] = 1;
        }
        0x1c => put(&mut data, 0, &1u64.to_le_bytes()),
        _ => return Err(Status::INVALID_FIELD),
    }
    Ok(data)
}

fn namespace<'a>(d: &'a Description<'_>, nsid: u32) -> Result<Option<&'a NamespaceDescription>, Status> {
    if nsid == 0 || nsid > MAX_NAMESPACES {
        return Err(Status::INVALID_NAMESPACE);
    }
    Ok(d.namespaces.get(nsid as usize - 1))
}

/// The most namespaces that a subsystem may have.
pub(crate) const MAX_NAMESPACES: u32 = 128;

fn common_namespace(data: &mut [u8]) {
    // Deallocated blocks read as zeroes; shared between controllers.
    data[33] = 0b1001;
    data[30] = 1;
}

fn controller(d: &Description<'_>, data: &mut [u8]) {
    put_text(data, 4, 20, d.serial);
    put_text(data, 24, 40, MODEL.as_bytes());
    put_text(data, 64, 8, env!("CARGO_PKG_VERSION").as_bytes());
    data[72] = 6;
    // Several controllers; ANA where asked for.
    data[76] = (1 << 1) | (u8::from(d.ana) << 3);
    data[77] = (d.max_io_size / 4096).trailing_zeros() as u8;
    put(data, 78, &d.cntlid.to_le_bytes());
    put(data, 80, &VS.to_le_bytes());
    // Namespace attribute notices, and ANA change notices.
    let oaes: u32 = (1 << 8) | (u32::from(d.ana) << 11);
    put(data, 92, &oaes.to_le_bytes());
    // 128-bit host identifiers.
    put(data, 96, &1u32.to_le_bytes());
    data[111] = 1;
    data[258] = 3;
    data[259] = AER_LIMIT as u8 - 1;
    // One firmware slot, read only; effects and extended data in Get Log Page; one error entry.
    data[260] = 0b11;
    data[261] = 0b110;
    data[262] = 0;
    // Keep-alive granularity: one second.
    put(data, 320, &10u16.to_le_bytes());
    if d.ana {
        data[342] = 10;
        data[343] = 0b0001;
        put(data, 344, &1u32.to_le_bytes());
        put(data, 348, &1u32.to_le_bytes());
    }
    data[512] = 0x66;
    data[513] = 0x44;
    put(data, 514, &d.max_queue_depth.to_le_bytes());
    put(data, 516, &MAX_NAMESPACES.to_le_bytes());
    // Compare, Dataset Management, Write Zeroes.
    put(data, 520, &0b1101u16.to_le_bytes());
    // A volatile write cache; Flush does not take the broadcast namespace.
    data[525] = 0b101;
    // SGLs without alignment, and offsets inside the capsule.
    put(data, 536, &(1u32 | (1 << 20)).to_le_bytes());
    put(data, 540, &MAX_NAMESPACES.to_le_bytes());
    let nqn = &d.subnqn[..d.subnqn.len().min(223)];
    put(data, 768, nqn);
    put(data, 1792, &((64 + d.in_capsule) / 16).to_le_bytes());
    put(data, 1796, &1u32.to_le_bytes());
    data[1803] = 1;
    put(data, 2048, &[0; 32]);
}

/// Asynchronous Event Requests that a controller holds.
pub(crate) const AER_LIMIT: usize = 4;

/// The whole of a log page; Get Log Page returns a part of it.
///
/// # Errors
/// The status to complete the command with.
pub(crate) fn log_page(d: &Description<'_>, lid: u8) -> Result<Vec<u8>, Status> {
    match lid {
        // Error information: one entry, empty.
        0x01 => Ok(vec![0; 64]),
        0x02 => {
            let mut page = vec![0; 512];
            // 300 K, all of the spare left.
            put(&mut page, 1, &300u16.to_le_bytes());
            page[3] = 100;
            page[4] = 10;
            Ok(page)
        }
        0x03 => {
            let mut page = vec![0; 512];
            page[0] = 1;
            put_text(&mut page, 8, 8, env!("CARGO_PKG_VERSION").as_bytes());
            Ok(page)
        }
        // Changed namespaces: none ever change.
        0x04 => Ok(vec![0; 4096]),
        0x05 => {
            let mut page = vec![0; 4096];
            for code in [
                opc::GET_LOG_PAGE,
                opc::IDENTIFY,
                opc::ABORT,
                opc::SET_FEATURES,
                opc::GET_FEATURES,
                opc::ASYNC_EVENT_REQUEST,
                opc::KEEP_ALIVE,
            ] {
                put(&mut page, usize::from(code) * 4, &1u32.to_le_bytes());
            }
            for (code, changes_data) in [
                (opc::FLUSH, true),
                (opc::WRITE, true),
                (opc::READ, false),
                (opc::COMPARE, false),
                (opc::WRITE_ZEROES, true),
                (opc::DATASET_MANAGEMENT, true),
            ] {
                let effects = 1u32 | (u32::from(changes_data) << 1);
                put(&mut page, 1024 + usize::from(code) * 4, &effects.to_le_bytes());
            }
            Ok(page)
        }
        0x0c if d.ana => {
            // One group, optimized, with every namespace in it.
            let count = d.namespaces.len() as u32;
            let mut page = vec![0; 16 + 32 + 4 * count as usize];
            put(&mut page, 8, &1u16.to_le_bytes());
            put(&mut page, 16, &1u32.to_le_bytes());
            put(&mut page, 20, &count.to_le_bytes());
            page[32] = 1;
            for nsid in 1..=count {
                put(&mut page, 48 + 4 * (nsid as usize - 1), &nsid.to_le_bytes());
            }
            Ok(page)
        }
        _ => Err(Status::INVALID_LOG_PAGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn description(namespaces: &[NamespaceDescription], ana: bool) -> Description<'_> {
        Description {
            cntlid: 7,
            subnqn: b"nqn.2024-01.io.fabscope:standin0",
            serial: b"STANDIN0",
            max_io_size: 131_072,
            in_capsule: 8192,
            max_queue_depth: 128,
            ana,
            namespaces,
        }
    }

    fn two() -> Vec<NamespaceDescription> {
        (0..2)
            .map(|i| NamespaceDescription {
                blocks: 1000 + i,
                block_bytes: 512 << (3 * i),
                uuid: [i as u8 + 1; 16],
            })
            .collect()
    }

    #[test]
    fn the_controller_says_that_it_is_a_stand_in() {
        let namespaces = two();
        let data = identify(&description(&namespaces, false), 0x01, 0, 0).unwrap();
        let model = String::from_utf8_lossy(&data[24..64]).into_owned();
        assert!(model.contains("stand-in"), "{model}");
        assert!(model.contains("not SPDK"), "{model}");
        assert_eq!(&data[78..80], &[7, 0]);
        // 2^5 pages of 4 KiB.
        assert_eq!(data[77], 5);
        assert_eq!(u32::from_le_bytes(data[1792..1796].try_into().unwrap()), (64 + 8192) / 16);
    }

    #[test]
    fn namespaces_are_listed_in_order_and_after_the_one_asked_for() {
        let namespaces = two();
        let d = description(&namespaces, false);
        assert_eq!(&identify(&d, 0x02, 0, 0).unwrap()[..12], &[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&identify(&d, 0x02, 1, 0).unwrap()[..8], &[2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(identify(&d, 0x00, 2, 0).unwrap()[130], 12);
        assert_eq!(identify(&d, 0x03, 9, 0), Err(Status::INVALID_NAMESPACE));
    }

    #[test]
    fn the_ana_log_exists_only_where_it_is_announced() {
        let namespaces = two();
        assert!(log_page(&description(&namespaces, false), 0x0c).is_err());
        let page = log_page(&description(&namespaces, true), 0x0c).unwrap();
        assert_eq!(page.len(), 16 + 32 + 8);
        assert_eq!(page[32], 1);
    }

    proptest! {
        #[test]
        fn any_question_gets_an_answer(cns: u8, nsid: u32, csi: u8, lid: u8, ana: bool) {
            let namespaces = two();
            let d = description(&namespaces, ana);
            if let Ok(data) = identify(&d, cns, nsid, csi) {
                prop_assert_eq!(data.len(), 4096);
            }
            if let Ok(page) = log_page(&d, lid) {
                prop_assert!(page.len() <= 4096);
            }
        }
    }
}
