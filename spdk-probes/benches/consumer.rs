//! How many records a second the ring's reader takes into a run: `cargo bench -p spdk-probes`.
//!
//! A small BPF program fills a ring of the default size with records like a target's; the very code that
//! records SPDK then empties it into a run directory. Filling is not timed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use divan::Bencher;
use divan::counter::ItemsCount;
use run_format::{Kind, Manifest, RunWriter, Side};
use spdk_probes::measure::Flood;

fn main() {
    divan::main();
}

/// Records of one filling: about half of the ring.
const ROUNDS: u64 = 40;

fn manifest() -> Manifest {
    Manifest::begun(Side::Target, Kind::Spdk, env!("CARGO_PKG_VERSION"))
}

#[divan::bench(sample_count = 25, sample_size = 1)]
fn ring_to_run(bencher: Bencher<'_, '_>) {
    let folder = tempfile::tempdir().unwrap();
    let flood = std::cell::RefCell::new(Flood::new().expect("BPF can be loaded (as root)"));
    let writer =
        std::cell::RefCell::new(RunWriter::create(&folder.path().join("run"), manifest(), false).unwrap());
    let records = ROUNDS * Flood::RECORDS;
    bencher
        .counter(ItemsCount::new(records))
        .with_inputs(|| {
            // What earlier samples left for the disk is written by then: the clock runs for the reader.
            flood.borrow_mut().fill(ROUNDS).unwrap();
        })
        .bench_local_values(|()| {
            let mut writer = writer.borrow_mut();
            let taken = flood.borrow_mut().drain(&mut *writer);
            assert_eq!(taken as u64, records, "records were lost");
            writer.tick().unwrap();
        });
}
