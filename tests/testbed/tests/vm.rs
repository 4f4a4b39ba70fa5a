//! Boots every kernel of the test bed and uses what the library offers, on few boots.

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::{Backing, Kernel, NullBlk, Port, Signal, Transport, Vm};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The text of the error that is expected.
fn refusal<T: std::fmt::Debug>(result: Result<T>) -> Result<String> {
    match result {
        Ok(value) => anyhow::bail!("went well where it should not: {value:?}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// What holds for every kernel.
fn usual(vm: &Vm) -> Result<()> {
    ensure!(vm.sh("uname -r")?.trim() == vm.release());

    let output = vm.run("echo out; echo err >&2; exit 7", MINUTE)?;
    ensure!((output.text().as_str(), output.errors().as_str(), output.status) == ("out\n", "err\n", 7));
    ensure!(vm.run("kill -TERM $$", MINUTE)?.status == 128 + 15);
    ensure!(refusal(vm.sh("no-such-program"))?.contains("no-such-program"));

    for mount in [
        "/proc",
        "/sys",
        "/sys/kernel/debug",
        "/sys/kernel/tracing",
        "/sys/kernel/config",
        "/sys/fs/bpf",
        "/sys/fs/cgroup",
    ] {
        vm.sh(&format!("grep -q ' {mount} ' /proc/mounts")).with_context(|| mount.to_owned())?;
    }
    ensure!(vm.sh("ulimit -l")?.trim() == "unlimited");
    vm.sh("test -s /sys/kernel/btf/vmlinux")?;
    the_machine_is_reachable(vm)
}

/// The kernel's target and host in one VM.
fn target_and_host(vm: &Vm) -> Result<()> {
    const NQN: &str = "nqn.2024-01.org.example:testbed";
    let drive = NullBlk {
        size_mb: 64,
        completion: Duration::from_micros(200),
        memory_backed: true,
        ..NullBlk::default()
    };
    let device = vm.null_blk(drive)?;
    ensure!(vm.null_blk(NullBlk::default())? != device);
    vm.nvmet_tcp(NQN, &device, 4420)?;
    let error = refusal(vm.connect_tcp("127.0.0.1", 4420, "nqn.2024-01.org.example:other", ""))?;
    ensure!(error.contains("cannot connect") && error.contains("nvme"), "{error}");
    let controller = vm.connect_tcp("127.0.0.1", 4420, NQN, "nr_io_queues=1,queue_size=32")?;
    let block = vm.namespace(&controller, 1)?;
    ensure!(vm.sh(&format!("blockdev --getsize64 {block}"))?.trim() == (64 << 20).to_string());
    vm.sh(&format!(
        "yes fabscope | head -c 65536 > /tmp/pattern && dd if=/tmp/pattern of={block} bs=4k oflag=direct \
         && dd if={block} of=/tmp/back bs=4k count=16 iflag=direct && cmp /tmp/pattern /tmp/back"
    ))?;
    ensure!(
        vm.sh(&format!("dd if={device} bs=9 count=1"))? == "fabscope\n",
        "the target's own drive holds it"
    );
    vm.disconnect(&controller)?;
    ensure!(vm.run(&format!("test -e /sys/class/nvme/{}", controller.name), MINUTE)?.status == 1);
    Ok(())
}

#[test]
fn debian_6_1_boots_and_serves_nvme_tcp() -> Result<()> {
    if !testbed::available(Kernel::Debian6_1)? {
        return Ok(());
    }
    let vm = Vm::builder(Kernel::Debian6_1).boot()?;
    usual(&vm)?;
    target_and_host(&vm)?;
    vm.shutdown()
}

#[test]
fn the_newest_kernel_boots_and_serves_nvme_tcp() -> Result<()> {
    if !testbed::available(Kernel::Newest)? {
        return Ok(());
    }
    let vm = Vm::builder(Kernel::Newest).boot()?;
    usual(&vm)?;
    target_and_host(&vm)?;
    vm.shutdown()
}

#[test]
fn debian_6_12_does_everything() -> Result<()> {
    if !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("hello");
    fs::write(&script, "#!/bin/sh\necho hello $1\n")?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let inner = folder.path().join("tree/inner");
    fs::create_dir_all(&inner)?;
    let bytes: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(inner.join("data.bin"), &bytes)?;
    fs::write(folder.path().join("tree/note it's"), "quoted")?;

    let vm = Vm::builder(Kernel::Debian6_12)
        .program(&script)
        .program("fio")
        .program("ip")
        .program("rdma")
        .program("tc")
        .nvme_drive(64)
        .file(folder.path().join("tree"), "/carried")
        .file(&script, "/lib/carried-too")
        .forward(4420)
        .boot()?;
    usual(&vm)?;

    // What was carried, and files both ways.
    ensure!(vm.sh("hello there")? == "hello there\n");
    let pulled = vm.pull("/carried", &folder.path().join("back"))?;
    ensure!(fs::read(pulled.join("inner/data.bin"))? == bytes);
    vm.push(&folder.path().join("tree"), "/tmp/pushed/here")?;
    let pulled = vm.pull("/tmp/pushed/here/", &folder.path().join("again"))?;
    ensure!(fs::read(pulled.join("inner/data.bin"))? == bytes);
    ensure!(fs::read_to_string(pulled.join("note it's"))? == "quoted");
    vm.push(&script, "/tmp/it's")?;
    ensure!(vm.sh("\"/tmp/it's\" you")? == "hello you\n");
    ensure!(vm.pull("/no/such", folder.path()).is_err());
    ensure!(vm.push(&folder.path().join("missing"), "/tmp/x").is_err());

    ensure!(vm.sh("/usr/lib/carried-too 2")? == "hello 2\n");
    // A program that busybox has too, in lesser form.
    vm.sh("tc qdisc add dev lo root netem delay 1ms && tc qdisc show dev lo | grep -q netem")?;
    vm.sh("tc qdisc del dev lo root")?;

    // Large output, both streams at once.
    let output = vm.run("yes 0123456 | head -c 1048576; yes e | head -c 100000 >&2", MINUTE)?;
    ensure!(output.stdout.len() == 1 << 20 && output.stdout.ends_with(b"0123456\n"));
    ensure!(output.stderr.len() == 100_000);

    background_and_timeouts(&vm)?;
    target_and_host(&vm)?;
    fio_runs(&vm)?;
    storage_of_each_kind(&vm)?;
    soft_roce_goes_through_the_network_devices(&vm)?;
    from_another_vm(&vm, Kernel::Debian6_12)?;

    // A VM that ends under a command says so, with its console.
    let error = refusal(vm.run("echo o > /proc/sysrq-trigger; sleep 60", MINUTE))?;
    ensure!(error.contains("the VM's console"), "{error}");
    ensure!(vm.run("true", MINUTE).is_err());
    Ok(())
}

fn background_and_timeouts(vm: &Vm) -> Result<()> {
    let reader = vm.spawn(
        "echo ready; read line; echo got $line; trap 'echo term; exit 3' TERM; \
                           while :; do sleep 0.1; done",
    )?;
    reader.wait_for("ready", MINUTE)?;
    ensure!(vm.sh("echo meanwhile")? == "meanwhile\n");
    reader.write(b"a line\n")?;
    reader.wait_for("got a line", MINUTE)?;
    ensure!(reader.is_running());
    thread::sleep(SECOND / 5);
    reader.signal(Signal::SIGTERM)?;
    let output = reader.wait(MINUTE)?;
    ensure!(output.status == 3 && output.text().ends_with("term\n"), "{output:?}");

    let start = Instant::now();
    let text = refusal(vm.run("echo before; sleep 987 & sleep 987", 2 * SECOND))?;
    ensure!(text.contains("before") && text.contains("was killed"), "{text}");
    ensure!(start.elapsed() < 5 * MINUTE, "it did not wait for the command's own end");
    ensure!(vm.run("ps | grep -q 'sleep 98[7]'", MINUTE)?.status == 1, "its children are killed too");
    ensure!(vm.spawn("true")?.wait_for("never", MINUTE).is_err());
    Ok(())
}

fn the_machine_is_reachable(vm: &Vm) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let reader = thread::spawn(move || -> Result<String> {
        let mut text = String::new();
        listener.accept()?.0.read_to_string(&mut text)?;
        Ok(text)
    });
    vm.sh(&format!("echo from the VM | nc 10.0.2.2 {port}"))?;
    let text = reader.join().map_err(|_| anyhow::anyhow!("the reader failed"))??;
    ensure!(text == "from the VM\n", "{text:?}");
    Ok(())
}

fn fio_runs(vm: &Vm) -> Result<()> {
    let device = vm.null_blk(NullBlk::default())?;
    let json = vm.sh(&format!(
        "fio --name=x --filename={device} --ioengine=libaio --iodepth=4 --direct=1 --rw=randread \
         --number_ios=200 --output-format=json"
    ))?;
    ensure!(json.contains("\"total_ios\" : 200"), "{json}");
    Ok(())
}

/// Writes a pattern through the fabric and reads it back there and, where it is kept, beneath.
fn written_through(vm: &Vm, block: &str, beneath: &str) -> Result<()> {
    vm.sh(&format!(
        "yes fabscope | head -c 65536 > /tmp/pattern && dd if=/tmp/pattern of={block} bs=64k oflag=direct \
         && dd if={block} of=/tmp/back bs=4k count=16 iflag=direct && cmp /tmp/pattern /tmp/back \
         && sync && dd if={beneath} of=/tmp/back bs=4k count=16 && cmp /tmp/pattern /tmp/back"
    ))
    .with_context(|| format!("{block} on {beneath}"))
    .map(drop)
}

fn storage_of_each_kind(vm: &Vm) -> Result<()> {
    vm.load_module("nvme")?;
    vm.sh("for try in $(seq 600); do [ -b /dev/nvme0n1 ] && exit; sleep 0.1; done; exit 1")?;
    let drive = vm.null_blk(NullBlk { size_mb: 32, memory_backed: true, ..NullBlk::default() })?;
    vm.sh(&format!("mke2fs -q {drive}; mkdir /tmp/ext4; mount -t ext4 {drive} /tmp/ext4"))?;
    vm.sh("truncate -s 16777216 /tmp/ext4/file /tmp/file")?;
    let port = Port::new(Transport::Tcp, "127.0.0.1", 4430);
    let backings =
        [Backing::Block("/dev/nvme0n1"), Backing::File("/tmp/ext4/file"), Backing::Buffered("/tmp/file")];
    vm.nvmet("nqn.2024-01.org.example:kinds", &backings, &port)?;
    let controller =
        vm.connect(&port, "nqn.2024-01.org.example:kinds", "nr_io_queues=1,hdr_digest,data_digest")?;
    for (nsid, backing) in (1..).zip(backings) {
        let (Backing::Block(beneath) | Backing::File(beneath) | Backing::Buffered(beneath)) = backing;
        written_through(vm, &vm.namespace(&controller, nsid)?, beneath)?;
    }
    vm.disconnect(&controller)?;

    vm.sh("dd if=/dev/zero of=/dev/nvme0n1 bs=64k count=1 oflag=direct")?;
    vm.nvmet_passthru("nqn.2024-01.org.example:whole", "/dev/nvme0", &port)?;
    let controller = vm.connect(&port, "nqn.2024-01.org.example:whole", "nr_io_queues=1")?;
    written_through(vm, &vm.namespace(&controller, 1)?, "/dev/nvme0n1")?;
    vm.disconnect(&controller)
}

fn soft_roce_goes_through_the_network_devices(vm: &Vm) -> Result<()> {
    let roce = vm.soft_roce()?;
    let drive = vm.null_blk(NullBlk { size_mb: 32, memory_backed: true, ..NullBlk::default() })?;
    let port = Port::new(Transport::Rdma, roce.target_address, 4440);
    vm.nvmet("nqn.2024-01.org.example:rdma", &[Backing::Block(&drive)], &port)?;
    let controller = vm.connect(&port, "nqn.2024-01.org.example:rdma", "nr_io_queues=1")?;
    let block = vm.namespace(&controller, 1)?;
    let sent = |device: &str| -> Result<u64> {
        Ok(vm.sh(&format!("cat /sys/class/net/{device}/statistics/tx_bytes"))?.trim().parse()?)
    };
    let before = (sent(roce.host_device)?, sent(roce.target_device)?);
    written_through(vm, &block, &drive)?;
    for (device, before) in [(roce.host_device, before.0), (roce.target_device, before.1)] {
        ensure!(sent(device)? - before > 65536, "{device} carried none of it");
    }
    let reads = || -> Result<Duration> {
        let start = vm.sh("cat /proc/uptime")?;
        vm.sh(&format!("dd if={block} of=/dev/null bs=4k count=16 iflag=direct"))?;
        let end = vm.sh("cat /proc/uptime")?;
        let seconds = |text: &str| -> Result<f64> {
            Ok(text.split(' ').next().context("nothing in /proc/uptime")?.parse()?)
        };
        Ok(Duration::from_secs_f64(seconds(&end)? - seconds(&start)?))
    };
    for device in [roce.host_device, roce.target_device] {
        vm.delay_network(device, Duration::from_millis(50))?;
    }
    let slow = reads()?;
    for device in [roce.host_device, roce.target_device] {
        vm.delay_network(device, Duration::ZERO)?;
    }
    ensure!(slow > Duration::from_millis(1600), "16 reads took {slow:?}, with a way of 50 ms each way");
    vm.disconnect(&controller)
}

/// The VM's time goes on as its instructions do, and skips what it would sleep.
#[test]
fn counted_time_is_the_same_each_time() -> Result<()> {
    if !testbed::available(Kernel::Debian6_12)? {
        return Ok(());
    }
    let vm = Vm::builder(Kernel::Debian6_12).program("fio").counted_time().boot()?;
    let start = Instant::now();
    vm.sh("sleep 600")?;
    ensure!(start.elapsed() < 5 * MINUTE, "slept for {:?}", start.elapsed());
    let mut medians = Vec::new();
    for micros in [100, 400, 100] {
        let completion = Duration::from_micros(micros);
        let device = vm.null_blk(NullBlk { size_mb: 64, completion, ..NullBlk::default() })?;
        let json = vm.sh(&format!(
            "fio --name=x --filename={device} --ioengine=psync --direct=1 --rw=randread --number_ios=100 \
             --lat_percentiles=1 --output-format=terse --terse-version=3"
        ))?;
        // Field 40 of this format is the mean of the whole latency of reads, in microseconds.
        medians.push(json.split(';').nth(39).context("fio's line is short")?.parse::<f64>()?);
    }
    let [first, delayed, again] = medians[..] else { anyhow::bail!("{medians:?}") };
    ensure!((delayed - first - 300.0).abs() < 5.0 && (again - first).abs() < 5.0, "{medians:?}");
    vm.shutdown()
}

/// A second VM, alive at the same time, whose host uses the first one's target.
fn from_another_vm(vm: &Vm, kernel: Kernel) -> Result<()> {
    let other = Vm::builder(kernel).memory_mb(512).cpus(1).boot()?;
    let port = vm.forwarded(4420).context("no forwarded port")?;
    let controller =
        other.connect_tcp("10.0.2.2", port, "nqn.2024-01.org.example:testbed", "nr_io_queues=1")?;
    let block = other.namespace(&controller, 1)?;
    let text = other.sh(&format!("dd if={block} bs=9 count=1"))?;
    ensure!(text == "fabscope\n", "{text:?}");
    other.shutdown()
}
