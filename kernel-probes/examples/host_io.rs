//! Does a known number of commands of each kind on an NVMe block device, past the page cache, and prints
//! how many of each opcode that was: a load whose truth is known. It overwrites the device.

use anyhow::{Context, Result};
use clap::Parser;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Does a known load on an NVMe block device. OVERWRITES THE DEVICE.
#[derive(Debug, Parser)]
struct Options {
    /// Block device, such as /dev/nvme0n1; at least 16 MiB.
    device: PathBuf,
    /// Reads of 4 KiB, shared out to the threads.
    #[arg(long, default_value_t = 800)]
    reads: u64,
    /// Threads that read and write.
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Only read, for so many seconds, and print nothing.
    #[arg(long)]
    read_for: Option<f64>,
    /// Only read, one after the other, so many times, and print what the reads took.
    #[arg(long)]
    time_reads: Option<usize>,
}

/// Memory at a page's beginning, as O_DIRECT wants it.
struct Pages {
    start: *mut u8,
    layout: Layout,
}

impl Pages {
    fn new(bytes: usize) -> Result<Pages> {
        let layout = Layout::from_size_align(bytes, 4096)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc_zeroed(layout) };
        anyhow::ensure!(!start.is_null(), "no memory");
        Ok(Pages { start, layout })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory was allocated with this length, zeroed, and is borrowed with self.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in new with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}

/// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
#[repr(C)]
#[derive(Default)]
struct Passthrough {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2_3: [u32; 2],
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const NVME_IOCTL_ID: libc::c_ulong = 0x4e40;
const NVME_IOCTL_IO_CMD: libc::c_ulong = 0xc048_4e43;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;

fn ioctl<T>(device: &File, request: libc::c_ulong, argument: &mut T) -> Result<i32> {
    // SAFETY: each request here takes a pointer to what its callers pass, which outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    if result < 0 {
        return Err(std::io::Error::last_os_error()).with_context(|| format!("ioctl {request:#x}"));
    }
    Ok(result)
}

/// Passes a command through, at this byte.
fn pass(device: &File, opcode: u8, at: u32, data: Option<&mut Pages>) -> Result<i32> {
    let nsid = u32::try_from(ioctl(device, NVME_IOCTL_ID, &mut [0u8; 0])?)?;
    let mut command = Passthrough { opcode, nsid, ..Passthrough::default() };
    if let Some(pages) = data {
        command.addr = pages.start as u64;
        command.data_len = u32::try_from(pages.layout.size())?;
        let mut block = 0u32;
        ioctl(device, BLKSSZGET, &mut block)?;
        command.cdw10_15[0] = at / block;
        command.cdw10_15[2] = command.data_len / block - 1;
    }
    ioctl(device, NVME_IOCTL_IO_CMD, &mut command)
}

const FLUSH: u8 = 0;
const WRITE: u8 = 1;
const READ: u8 = 2;
const COMPARE: u8 = 5;
const WRITE_ZEROES: u8 = 8;
const DATASET_MANAGEMENT: u8 = 9;

fn main() -> Result<()> {
    let options = Options::parse();
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&options.device)
        .with_context(|| format!("cannot open {}", options.device.display()))?;
    if let Some(seconds) = options.read_for {
        return read_for(&device, options.threads, Duration::from_secs_f64(seconds));
    }
    if let Some(reads) = options.time_reads {
        return time_reads(&device, reads);
    }
    let mut done: BTreeMap<u8, u64> = BTreeMap::new();
    let each = options.reads / options.threads;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|thread| {
                let device = &device;
                scope.spawn(move || -> Result<()> {
                    let mut page = Pages::new(4096)?;
                    for i in 0..each {
                        // Spread over 8 MiB, never the same twice in a row.
                        let at = (i * 7919 + thread * 104_729) % 2048 * 4096;
                        device.read_exact_at(page.bytes(), at)?;
                        if i % 8 == 0 {
                            device.write_all_at(page.bytes(), at)?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread ended"))?)
    })?;
    done.insert(READ, each * options.threads);
    done.insert(WRITE, each.div_ceil(8) * options.threads);

    for (bytes, times) in [(4096, 10), (16384, 5), (65536, 8), (1 << 20, 3)] {
        let mut pages = Pages::new(bytes)?;
        for i in 0..times {
            device.write_all_at(pages.bytes(), i * bytes as u64)?;
            device.read_exact_at(pages.bytes(), i * bytes as u64)?;
        }
        *done.entry(WRITE).or_default() += times;
        *done.entry(READ).or_default() += times;
    }
    for _ in 0..3 {
        device.sync_all()?;
        pass(&device, FLUSH, 0, None)?;
    }
    // Without a volatile cache there is nothing to flush, and only those that are passed through go out.
    done.insert(FLUSH, if has_write_cache(&options.device)? { 6 } else { 3 });
    for i in 0..4u64 {
        ioctl(&device, BLKZEROOUT, &mut [i * 65536, 65536])?;
        ioctl(&device, BLKDISCARD, &mut [i * 65536, 65536])?;
        let mut page = Pages::new(4096)?;
        // A target may not know compare: the command is sent all the same.
        pass(&device, COMPARE, u32::try_from(i)? * 4096, Some(&mut page))?;
        pass(&device, READ, u32::try_from(i)? * 4096, Some(&mut page))?;
    }
    done.insert(WRITE_ZEROES, 4);
    done.insert(DATASET_MANAGEMENT, 4);
    done.insert(COMPARE, 4);
    *done.entry(READ).or_default() += 4;
    for (opcode, commands) in done {
        println!("expect\t{opcode}\t{commands}");
    }
    Ok(())
}

fn has_write_cache(device: &std::path::Path) -> Result<bool> {
    let name = device.file_name().context("a device has a name")?;
    let file = std::path::Path::new("/sys/class/block").join(name).join("queue/write_cache");
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    Ok(text.trim() == "write back")
}

fn read_for(device: &File, threads: u64, time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || -> Result<()> {
                    let mut page = Pages::new(4096)?;
                    let mut at = thread;
                    while Instant::now() < end {
                        at = (at + 7919) % 2048;
                        device.read_exact_at(page.bytes(), at * 4096)?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread ended"))?)
    })
}

/// Prints how many reads were timed, and their first decile, median and mean in ns; the first sixteenth only warms up.
fn time_reads(device: &File, reads: usize) -> Result<()> {
    let mut page = Pages::new(4096)?;
    let mut took = Vec::with_capacity(reads);
    let warm = reads / 16;
    for i in 0..warm + reads {
        let start = Instant::now();
        device.read_exact_at(page.bytes(), (i as u64 * 7919) % 2048 * 4096)?;
        if i >= warm {
            took.push(start.elapsed().as_nanos());
        }
    }
    took.sort_unstable();
    let (decile, median) = (took.get(took.len() / 10), took.get(took.len() / 2));
    let (decile, median) = (decile.context("no reads")?, median.context("no reads")?);
    let mean = took.iter().sum::<u128>() / took.len() as u128;
    println!("took\t{}\t{decile}\t{median}\t{mean}", took.len());
    Ok(())
}
