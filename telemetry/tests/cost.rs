//! What samples cost, on a machine of many CPUs that is made of files: no allocation once all is known, and a fraction
//! of what reading the same files with strings and maps takes. Nothing here is held against a clock of the wall.
#![allow(clippy::unwrap_used)] // the helpers of tests, too

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::Path;
use telemetry::{Collector, Nanos, Places, Rows, Subject, monotonic, open, thread_cpu};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn counted() {
    // A thread that ends has no counter any more.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: all is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        counted();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        counted();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// The files of a machine with this many CPUs, half of which did something in each step.
fn machine(root: &Path, cpus: u64, step: u64) {
    let busy = |cpu: u64| if cpu.is_multiple_of(2) { step } else { 0 };
    let (mut stat, mut softnet, mut sched) =
        ("cpu 1 2 3 4 5 6 7 8 0 0\n".to_owned(), String::new(), String::new());
    sched.push_str("version 15\ntimestamp 1\n");
    let mut softirqs = " ".to_owned();
    for cpu in 0..cpus {
        let n = busy(cpu);
        writeln!(stat, "cpu{cpu} {} 5 {} 900000 7 0 {} 3 0 0", 1_000 + n, 400 + n, 30 + n).unwrap();
        writeln!(
            softnet,
            "{:08x} 00000000 00000010 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 {cpu:08x} 00000000 00000000",
            100_000 + n
        )
        .unwrap();
        writeln!(sched, "cpu{cpu} 0 0 0 0 0 0 {} {} 77\ndomain0 ff 0 0 0", 1_000_000 + n, 50_000 + n)
            .unwrap();
        write!(softirqs, " CPU{cpu}").unwrap();
    }
    for name in ["HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "SCHED"] {
        write!(softirqs, "\n{name}:").unwrap();
        for cpu in 0..cpus {
            write!(softirqs, " {}", 5_000 + busy(cpu)).unwrap();
        }
    }
    softirqs.push('\n');
    stat.push_str("intr 5");
    for irq in 0..2_000 {
        write!(stat, " {}", irq % 7).unwrap();
    }
    stat.push_str("\nctxt 5\nprocs_running 1\nprocs_blocked 0\n");
    put(root, "proc/stat", &stat);
    put(root, "proc/net/softnet_stat", &softnet);
    put(root, "proc/schedstat", &sched);
    put(root, "proc/softirqs", &softirqs);
    put(root, "sys/devices/system/cpu/possible", &format!("0-{}\n", cpus - 1));
    for irq in 100..164 {
        put(root, &format!("sys/class/net/eth0/device/msi_irqs/{irq}"), "msix\n");
        put(root, &format!("sys/kernel/irq/{irq}/actions"), "eth0-rx\n");
        let counts: Vec<String> =
            (0..cpus).map(|cpu| if cpu == irq - 100 { 5 + step } else { 0 }.to_string()).collect();
        put(root, &format!("sys/kernel/irq/{irq}/per_cpu_count"), &format!("{}\n", counts.join(",")));
    }
}

const PARSED: [&str; 5] = ["cpu", "softnet", "sched", "softirqs", "interrupts"];

fn collectors(root: &Path) -> Vec<(Box<dyn Collector>, Rows)> {
    let places = Places {
        proc: root.join("proc"),
        sys: root.join("sys"),
        dev: root.join("dev"),
        nvml: root.join("none.so"),
    };
    let opened = open(&places, &Subject::default());
    let taken = opened.into_iter().filter(|(about, _)| PARSED.contains(&about.name));
    taken.map(|(about, collector)| (collector.unwrap(), Rows::new(about))).collect()
}

fn sample(collector: &mut dyn Collector, rows: &mut Rows, at: u64) {
    rows.begin(Nanos(at));
    collector.sample(Nanos(at), rows).unwrap();
    rows.finish(Nanos(1));
}

#[test]
fn a_sample_allocates_nothing_once_all_is_known() {
    let root = tempfile::tempdir().unwrap();
    machine(root.path(), 256, 1);
    let mut collectors = collectors(root.path());
    assert_eq!(collectors.len(), PARSED.len());
    for step in 2..6 {
        machine(root.path(), 256, step);
        for (collector, rows) in &mut collectors {
            let before = ALLOCATIONS.get();
            sample(collector.as_mut(), rows, step);
            let allocations = ALLOCATIONS.get() - before;
            let name = collector.about().name;
            let batch = rows.take().unwrap();
            // Two samples find everything, and the room for rows grows with the first.
            assert!(step < 4 || allocations == 0, "{name}, step {step}: {allocations} allocations");
            assert!(batch.rows.len() > 50, "{name}: {} rows", batch.rows.len());
        }
    }
}

/// What a straightforward reader does: strings, and a map by name.
fn plainly(root: &Path, into: &mut HashMap<String, u64>) {
    for file in ["proc/stat", "proc/net/softnet_stat", "proc/schedstat", "proc/softirqs"] {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        let hexadecimal = file.ends_with("softnet_stat");
        for (number, line) in text.lines().enumerate() {
            let mut fields = line.split_whitespace();
            let name = fields.next().unwrap_or_default().to_owned();
            for (position, field) in fields.enumerate() {
                let radix = if hexadecimal { 16 } else { 10 };
                if let Ok(value) = u64::from_str_radix(field, radix) {
                    into.insert(format!("{file} {number} {name} {position}"), value);
                }
            }
        }
    }
}

#[test]
fn a_sample_costs_a_fraction_of_reading_the_files_plainly() {
    let root = tempfile::tempdir().unwrap();
    machine(root.path(), 256, 1);
    let mut collectors = collectors(root.path());
    let mut map = HashMap::new();
    let (mut ours, mut plain) = (u64::MAX, u64::MAX);
    for step in 2..12 {
        machine(root.path(), 256, step);
        let before = thread_cpu().0;
        for (collector, rows) in collectors.iter_mut().filter(|(c, _)| c.about().name != "interrupts") {
            sample(collector.as_mut(), rows, step);
            black_box(rows.take());
        }
        let middle = thread_cpu().0;
        plainly(root.path(), &mut map);
        let after = thread_cpu().0;
        black_box(&map);
        (ours, plain) = (ours.min(middle - before), plain.min(after - middle));
    }
    println!("256 CPUs: {ours} ns a sample, {plain} ns plainly (1 : {:.1})", plain as f64 / ours as f64);
    assert!(ours * 3 < plain, "{ours} ns, and plainly {plain} ns");
}

#[test]
fn time_is_taken_from_the_recording_s_clock() {
    let before = monotonic();
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let seconds: f64 = uptime.split_whitespace().next().unwrap().parse().unwrap();
    // The uptime may count suspended time, which this clock does not.
    assert!(before.0 as f64 / 1e9 <= seconds + 1.0, "{before:?}, up for {seconds} s");
}
