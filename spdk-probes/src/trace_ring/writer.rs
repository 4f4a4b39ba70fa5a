//! A trace ring as SPDK would write it, in any of its layouts: for tests of the reader. It writes what the reader
//! reads and shares nothing with it but the numbers of the file format.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::layout::Generation;

/// An argument's name, kind (0 number, 1 pointer, 2 text) and size.
pub(super) type Argument = (&'static str, u8, u8);

/// Tracepoints: number, name, arguments.
pub(super) type Tracepoints = &'static [(u16, &'static str, &'static [Argument])];

/// The target's tracepoints with the numbers and arguments of 24.09 and later.
pub(super) const TARGET: Tracepoints = &[
    (3 * 64, "BDEV_IO_START", &[("type", 0, 8), ("ctx", 1, 8), ("offset", 0, 8), ("qd", 0, 4)]),
    (3 * 64 + 1, "BDEV_IO_DONE", &[("ctx", 1, 8), ("qd", 0, 4)]),
    (5 * 64, "TCP_REQ_NEW", &[("qd", 0, 4)]),
    (5 * 64 + 6, "TCP_REQ_RDY_TO_EXECUTE", &[]),
    (5 * 64 + 9, "TCP_REQ_EXECUTED", &[]),
    (5 * 64 + 13, "TCP_REQ_COMPLETED", &[("qd", 0, 4)]),
    (5 * 64 + 16, "TCP_REQ_AWAIT_R2T_ACK", &[]),
    (5 * 64 + 20, "TCP_QP_DISCONNECT", &[]),
    (15 * 64 + 1, "SOCK_REQ_PEND", &[("ctx", 1, 8)]),
];

/// The same with those of 24.01.
pub(super) const TARGET_24_01: Tracepoints = &[
    (
        3 * 64,
        "BDEV_IO_START",
        &[("type", 0, 8), ("ctx", 1, 8), ("offset", 0, 8), ("len", 0, 8), ("name", 2, 40)],
    ),
    (3 * 64 + 1, "BDEV_IO_DONE", &[("ctx", 1, 8)]),
    (5 * 64, "TCP_REQ_NEW", &[("qpair", 1, 8)]),
    (5 * 64 + 5, "TCP_REQ_RDY_TO_EXECUTE", &[("qpair", 1, 8)]),
    (5 * 64 + 8, "TCP_REQ_EXECUTED", &[("qpair", 1, 8)]),
    (5 * 64 + 12, "TCP_REQ_COMPLETED", &[("qpair", 1, 8)]),
    (5 * 64 + 16, "TCP_REQ_AWAIT_R2T_ACK", &[("qpair", 1, 8)]),
    (5 * 64 + 20, "TCP_QP_DISCONNECT", &[]),
];

/// What a ring is made of.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) generation: Generation,
    pub(super) groups: usize,
    pub(super) lcores: Vec<usize>,
    pub(super) entries: u64,
    pub(super) rate: u64,
    pub(super) tracepoints: Tracepoints,
}

impl Shape {
    pub(super) fn new(generation: Generation) -> Shape {
        let (groups, tracepoints) = match generation {
            Generation::Flags => (16, TARGET_24_01),
            _ => (20, TARGET),
        };
        Shape { generation, groups, lcores: vec![0], entries: 1024, rate: 2_100_000_000, tracepoints }
    }
}

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer {
    map: MmapRaw,
    pub(super) file: tempfile::NamedTempFile,
    pub(super) shape: Shape,
    /// Of each lcore: position of its counts, of `next_entry` and of its entries.
    rings: Vec<(usize, usize, usize)>,
    owners_at: usize,
    masks_at: usize,
}

impl Writer {
    pub(super) fn new(shape: &Shape) -> Writer {
        Writer::write_to(tempfile::NamedTempFile::new().unwrap(), shape)
    }

    pub(super) fn write_to(file: tempfile::NamedTempFile, shape: &Shape) -> Writer {
        let count = shape.groups * 64;
        let ring = |before: usize| before + count * 8 + shape.entries as usize * 32;
        let number = shape.lcores.len();
        let (owners, owner) = (300, 128);
        let mut header = Vec::new();
        let mut put = |at: usize, bytes: &[u8]| {
            if header.len() < at + bytes.len() {
                header.resize(at + bytes.len(), 0u8);
            }
            header[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let describe = |put: &mut dyn FnMut(usize, &[u8]), table: usize| {
            for (id, name, arguments) in shape.tracepoints {
                let at = table + usize::from(*id) * 190;
                put(at, name.as_bytes());
                put(at + 24, &id.to_ne_bytes());
                put(at + 29, &[arguments.len() as u8]);
                for (n, (name, kind, size)) in arguments.iter().enumerate() {
                    put(at + 30 + n * 16, name.as_bytes());
                    put(at + 30 + n * 16 + 14, &[*kind, *size]);
                }
            }
        };
        let mut rings = Vec::new();
        let (length, owners_at, masks_at) = match shape.generation {
            Generation::Flags => {
                put(0, &shape.rate.to_ne_bytes());
                describe(&mut put, 1160);
                let first = 195_720 + 129 * 8;
                for (n, lcore) in shape.lcores.iter().enumerate() {
                    let at = first + n * ring(24);
                    put(195_720 + lcore * 8, &(at as u64).to_ne_bytes());
                    put(at, &(*lcore as u32).to_ne_bytes());
                    put(at + 8, &shape.entries.to_ne_bytes());
                    rings.push((at + 16, at + 16 + count * 8, at + 24 + count * 8));
                }
                let end = first + number * ring(24);
                put(195_720 + 128 * 8, &(end as u64).to_ne_bytes());
                (end, 0, 8)
            }
            Generation::File => {
                let tracepoints_at = 16 + shape.groups * 8 + 1024 * 16 + 1024;
                let numbers_at = tracepoints_at + count * 190;
                let offsets_at = numbers_at + 8;
                let owners_at = offsets_at + 1024 * 8 + 8;
                let first = owners_at + owners * owner;
                let end = first + number * ring(24);
                put(0, &(end as u64).to_ne_bytes());
                put(8, &shape.rate.to_ne_bytes());
                describe(&mut put, tracepoints_at);
                put(numbers_at, &(owners as u16).to_ne_bytes());
                put(numbers_at + 2, &119u16.to_ne_bytes());
                put(offsets_at + 1024 * 8, &(owners_at as u64).to_ne_bytes());
                for (n, lcore) in shape.lcores.iter().enumerate() {
                    let at = first + n * ring(24);
                    put(offsets_at + lcore * 8, &(at as u64).to_ne_bytes());
                    put(at, &(*lcore as u32).to_ne_bytes());
                    put(at + 8, &shape.entries.to_ne_bytes());
                    rings.push((at + 16, at + 16 + count * 8, at + 24 + count * 8));
                }
                (end, owners_at, 16)
            }
            Generation::Sections => {
                let most = shape.lcores.iter().max().map_or(0, |l| l + 1);
                let main = 72;
                let owner_section = main + 512;
                let masks = owner_section + 128 + owners * owner;
                let owner_types = masks + 128 + shape.groups * 8;
                let objects = owner_types + 128 + 512;
                let tracepoints = objects + 128 + 512;
                let offsets = tracepoints + 128 + count * 190;
                let first = offsets + 128 + most * 8;
                let end = first + number * ring(48);
                put(0, &(end as u64).to_ne_bytes());
                put(8, &7u64.to_ne_bytes());
                let sections = [main, owner_section, masks, owner_types, objects, tracepoints, offsets];
                for (n, at) in sections.into_iter().enumerate() {
                    put(16 + n * 8, &(at as u64).to_ne_bytes());
                }
                put(main, &shape.rate.to_ne_bytes());
                put(owner_section, &(owners as u16).to_ne_bytes());
                put(owner_section + 2, &119u16.to_ne_bytes());
                put(masks, &(shape.groups as u16).to_ne_bytes());
                put(tracepoints, &(count as u16).to_ne_bytes());
                put(offsets, &(most as u16).to_ne_bytes());
                describe(&mut put, tracepoints + 128);
                for (n, lcore) in shape.lcores.iter().enumerate() {
                    let at = first + n * ring(48);
                    put(offsets + 128 + lcore * 8, &(at as u64).to_ne_bytes());
                    put(at, &(*lcore as u32).to_ne_bytes());
                    put(at + 24, &shape.entries.to_ne_bytes());
                    put(at + 32, &(count as u64).to_ne_bytes());
                    rings.push((at + 48, at + 40, at + 48 + count * 8));
                }
                (end, owner_section + 128, masks + 128)
            }
        };
        header.resize(length, 0);
        std::fs::write(file.path(), &header).unwrap();
        let map =
            MmapOptions::new().map_raw(&File::options().read(true).write(true).open(file.path()).unwrap());
        Writer { map: map.unwrap(), file, shape: shape.clone(), rings, owners_at, masks_at }
    }

    /// A handle for the reader.
    pub(super) fn open(&self) -> File {
        File::open(self.file.path()).unwrap()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.map.len());
        // SAFETY: inside the mapping and aligned; only atomics touch it.
        unsafe { &*self.map.as_mut_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Overwrites a word of the file.
    pub(super) fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    /// The tracepoints of a group that are on.
    pub(super) fn mask(&self, group: usize) -> &AtomicU64 {
        self.word(self.masks_at + group * 8)
    }

    /// Records, if the tracepoint is there and on.
    pub(super) fn record_if_on(&self, name: &str, owner: u16, size: u32, object: u64, arguments: &[u64]) {
        let found = self.shape.tracepoints.iter().find(|(_, n, _)| *n == name);
        let on = |id: u16| self.mask(usize::from(id / 64)).load(Ordering::Relaxed) >> (id % 64) & 1 != 0;
        if found.is_some_and(|(id, ..)| on(*id)) {
            self.record(0, name, super::ticks::now(), owner, size, object, arguments);
        }
    }

    pub(super) fn next(&self, ring: usize) -> u64 {
        self.word(self.rings[ring].1).load(Ordering::Relaxed)
    }

    pub(super) fn set_next(&self, ring: usize, next: u64) {
        self.set(self.rings[ring].1, next);
    }

    pub(super) fn owner(&self, owner: u16, ticks: u64, description: &str) {
        let mut bytes = [0u8; 128];
        bytes[..8].copy_from_slice(&ticks.to_ne_bytes());
        bytes[8] = 48;
        bytes[9..9 + description.len()].copy_from_slice(description.as_bytes());
        for (n, word) in bytes.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(word.try_into().unwrap());
            self.set(self.owners_at + usize::from(owner) * 128 + n * 8, value);
        }
    }

    /// The entries of a record, as the writer lays them out.
    fn entries(
        &self,
        name: &str,
        ticks: u64,
        owner: u16,
        size: u32,
        object: u64,
        arguments: &[u64],
    ) -> (u16, Vec<[u64; 4]>) {
        let (id, _, described) = self.shape.tracepoints.iter().find(|(_, n, _)| *n == name).unwrap();
        let marker = (self.shape.groups * 64) as u64;
        let mut data = Vec::new();
        let mut values = arguments.iter();
        for (_, kind, size) in *described {
            let mut bytes = vec![0u8; usize::from(*size)];
            match kind {
                2 => bytes[..8].copy_from_slice(b"Malloc0\0"),
                _ => {
                    let value = values.next().copied().unwrap_or(0).to_le_bytes();
                    bytes.copy_from_slice(&value[..usize::from(*size)]);
                }
            }
            data.extend(bytes);
        }
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let first = data.len().min(8);
        let head = u64::from(*id) | u64::from(owner) << 16 | u64::from(size) << 32;
        let mut entries = vec![[ticks, head, object, word(&data[..first])]];
        for more in data[first..].chunks(22) {
            let mut bytes = [0u8; 24];
            bytes[..2].copy_from_slice(&(marker as u16).to_le_bytes());
            bytes[2..2 + more.len()].copy_from_slice(more);
            entries.push([ticks, word(&bytes[..8]), word(&bytes[8..16]), word(&bytes[16..])]);
        }
        (*id, entries)
    }

    #[allow(clippy::too_many_arguments, reason = "what an entry is made of")]
    /// Records, as SPDK does: the count of the tracepoint, the entries, the count of entries.
    pub(super) fn record(
        &self,
        ring: usize,
        name: &str,
        ticks: u64,
        owner: u16,
        size: u32,
        object: u64,
        arguments: &[u64],
    ) {
        let written = self.begin(ring, name, ticks, owner, size, object, arguments);
        self.publish(ring, written);
    }

    #[allow(clippy::too_many_arguments, reason = "what an entry is made of")]
    /// The first half: everything but the count of entries.
    pub(super) fn begin(
        &self,
        ring: usize,
        name: &str,
        ticks: u64,
        owner: u16,
        size: u32,
        object: u64,
        arguments: &[u64],
    ) -> u64 {
        let (id, entries) = self.entries(name, ticks, owner, size, object, arguments);
        let (counts, next, first) = self.rings[ring];
        let count = self.word(counts + usize::from(id) * 8);
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let position = self.word(next).load(Ordering::Relaxed);
        for (n, entry) in entries.iter().enumerate() {
            let slot = (position.wrapping_add(n as u64) & (self.shape.entries - 1)) as usize;
            for (m, value) in entry.iter().enumerate() {
                self.word(first + slot * 32 + m * 8).store(*value, Ordering::Relaxed);
            }
        }
        entries.len() as u64
    }

    /// The second half.
    pub(super) fn publish(&self, ring: usize, entries: u64) {
        let next = self.word(self.rings[ring].1);
        next.store(next.load(Ordering::Relaxed).wrapping_add(entries), Ordering::Release);
    }
}
