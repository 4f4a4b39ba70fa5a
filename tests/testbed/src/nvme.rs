//! What tests of NVMe-oF do again and again in a VM: connect the kernel's host, set up the kernel's
//! target, make a drive. All of it by the kernel's own files, without nvme-cli.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::network::enter;
use crate::vm::{SHORT, Vm, quote};

/// A controller of the kernel's host in a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// As under `/sys/class/nvme`: `nvme0`.
    pub name: String,
    /// The controller's id at the target.
    pub cntlid: u16,
}

/// A `null_blk` drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NullBlk {
    /// Its size in MiB.
    pub size_mb: u64,
    /// How long each command takes, by a timer; at zero it completes where it is submitted.
    pub completion: Duration,
    /// Whether it keeps what is written, and takes discards. Otherwise reads give whatever the buffer held.
    pub memory_backed: bool,
    /// How many commands it works on at once. The others wait in its block layer, first come first served where it
    /// is one.
    pub at_once: u32,
}

/// A network that carries NVMe-oF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// NVMe/TCP.
    Tcp,
    /// NVMe/RDMA.
    Rdma,
}

impl Transport {
    /// As the kernel calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// Where the kernel's target listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port<'a> {
    /// Over what.
    pub transport: Transport,
    /// An IPv4 address of the VM; over TCP also `0.0.0.0`.
    pub address: &'a str,
    /// The port's number.
    pub number: u16,
    /// The network namespace that it listens in, where it is not the VM's own.
    pub within: Option<&'a str>,
    /// The bytes of data that it takes with a capsule, where they are not the kernel's choice.
    pub in_capsule: Option<u32>,
}

impl<'a> Port<'a> {
    /// A port in the VM's own network.
    pub const fn new(transport: Transport, address: &'a str, number: u16) -> Port<'a> {
        Port { transport, address, number, within: None, in_capsule: None }
    }
}

/// What the kernel's target does a namespace's I/O with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing<'a> {
    /// A block device.
    Block(&'a str),
    /// A file, past the page cache, which not every file system can.
    File(&'a str),
    /// A file or a block device, through the page cache.
    Buffered(&'a str),
}

/// The two ends of a network of soft RoCE devices inside one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftRoce {
    /// The host's network device.
    pub host_device: &'static str,
    /// The host's address.
    pub host_address: &'static str,
    /// The target's network device.
    pub target_device: &'static str,
    /// The target's address.
    pub target_address: &'static str,
}

impl Default for NullBlk {
    fn default() -> Self {
        Self { size_mb: 256, completion: Duration::ZERO, memory_backed: false, at_once: 64 }
    }
}

impl Vm {
    /// Loads a module and what it depends on.
    ///
    /// # Errors
    ///
    /// When the image does not carry it, or it does not load.
    pub fn load_module(&self, name: &str) -> Result<()> {
        self.sh(&format!("modprobe {}", quote(name))).map(drop)
    }

    /// Connects the kernel's NVMe/TCP host to a subsystem. `options` are further options of
    /// `/dev/nvme-fabrics`, separated by commas (`nr_io_queues=1,queue_size=32`), or empty.
    /// [`Self::namespace`] waits for the block device.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, with what it logged.
    pub fn connect_tcp(&self, address: &str, port: u16, subnqn: &str, options: &str) -> Result<Controller> {
        self.connect(&Port::new(Transport::Tcp, address, port), subnqn, options)
    }

    /// As [`Self::connect_tcp`], over any transport and to where a target of this VM listens.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, with what it logged.
    pub fn connect(&self, port: &Port<'_>, subnqn: &str, options: &str) -> Result<Controller> {
        let Port { transport, address, number, .. } = port;
        let transport = transport.name();
        self.load_module(&format!("nvme-{transport}"))?;
        let mut words = format!("transport={transport},traddr={address},trsvcid={number},nqn={subnqn}");
        if !options.is_empty() {
            words.push(',');
            words.push_str(options);
        }
        // The answer is read from where the options were written.
        let output = self.run(
            &format!("exec 3<>/dev/nvme-fabrics && printf %s {} >&3 && cat <&3", quote(&words)),
            SHORT,
        )?;
        if output.status != 0 {
            let log = self.sh("dmesg | tail -n 15")?;
            bail!(
                "the VM's host cannot connect with {words}: {}\nits kernel said:\n{log}",
                output.errors().trim()
            );
        }
        let text = output.text();
        controller_of(&text).with_context(|| format!("/dev/nvme-fabrics answered {text:?}"))
    }

    /// Waits for a namespace of a controller and returns its block device. With native multipath it
    /// is that of the subsystem: `/dev/nvme0n1` over `nvme0c0n1`.
    ///
    /// # Errors
    ///
    /// When there is none within 30 s.
    pub fn namespace(&self, controller: &Controller, nsid: u32) -> Result<String> {
        let name = &controller.name;
        let script = format!(
            "for try in $(seq 600); do \
               for link in /sys/class/nvme-subsystem/*/{name}; do \
                 for file in ${{link%/*}}/nvme*n*/nsid /sys/class/nvme/{name}/nvme*n*/nsid; do \
                   block=${{file%/nsid}}; block=${{block##*/}}; \
                   case $block in *c*n*) continue;; esac; \
                   if [ \"$(cat $file 2>/dev/null)\" = {nsid} ] && [ -b /dev/$block ] \
                     && [ \"$(cat /sys/class/block/$block/size)\" != 0 ]; then \
                     echo /dev/$block; exit 0; \
                   fi; \
                 done; \
               done; \
               sleep 0.05; \
             done; exit 1"
        );
        let output = self.run(&script, SHORT)?;
        if output.status != 0 {
            let log = self.sh("dmesg | tail -n 15; ls /sys/class/nvme-subsystem/* /sys/class/block")?;
            bail!("{name} has no block device for namespace {nsid}; the VM has:\n{log}");
        }
        Ok(output.text().trim().to_owned())
    }

    /// Disconnects a controller and waits until it is gone.
    ///
    /// # Errors
    ///
    /// When there is no such controller.
    pub fn disconnect(&self, controller: &Controller) -> Result<()> {
        self.sh(&format!("echo 1 > /sys/class/nvme/{}/delete_controller", controller.name)).map(drop)
    }

    /// Makes a `null_blk` drive and returns its device.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn null_blk(&self, drive: NullBlk) -> Result<String> {
        let NullBlk { size_mb, completion, memory_backed, at_once } = drive;
        let nanos = completion.as_nanos();
        let irqmode = if completion.is_zero() { 0 } else { 2 };
        // Without a scheduler whoever submits would wait, and the scheduler goes by addresses unless all is late.
        let one = if at_once == 1 {
            "echo mq-deadline > $q/scheduler; echo 128 > $q/nr_requests; echo 1 > $q/iosched/fifo_batch; \
             echo 0 > $q/iosched/read_expire; echo 0 > $q/iosched/write_expire;"
        } else {
            ""
        };
        let text = self.sh(&format!(
            "set -e; modprobe null_blk nr_devices=0; cd /sys/kernel/config/nullb; n=0; \
             while [ -e nullb$n ]; do n=$((n + 1)); done; mkdir nullb$n; cd nullb$n; \
             echo {size_mb} > size; echo {irqmode} > irqmode; echo {nanos} > completion_nsec; \
             echo {0} > memory_backed; echo {0} > discard; echo {at_once} > hw_queue_depth; echo 1 > power; \
             q=/sys/block/nullb$(cat index)/queue; {one} echo /dev/nullb$(cat index)",
            u8::from(memory_backed)
        ))?;
        Ok(text.trim().to_owned())
    }

    /// Serves a block device as namespace 1 of a new subsystem by the kernel's NVMe/TCP target, on
    /// all the VM's addresses. Several subsystems may share a port.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the subsystem exists already.
    pub fn nvmet_tcp(&self, subnqn: &str, device: &str, port: u16) -> Result<()> {
        let port = Port::new(Transport::Tcp, "0.0.0.0", port);
        self.nvmet(subnqn, &[Backing::Block(device)], &port)
    }

    /// Serves namespaces 1, 2 and so on in a new subsystem by the kernel's target. Several subsystems may
    /// share a port.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the subsystem exists already.
    pub fn nvmet(&self, subnqn: &str, namespaces: &[Backing<'_>], port: &Port<'_>) -> Result<()> {
        let mut script = String::new();
        for (nsid, backing) in (1..).zip(namespaces) {
            let (path, buffered) = match backing {
                Backing::Block(path) | Backing::File(path) => (path, 0),
                Backing::Buffered(path) => (path, 1),
            };
            script.push_str(&format!(
                "n=\"$s\"/namespaces/{nsid}; mkdir \"$n\"; printf %s {} > \"$n\"/device_path; \
                 echo {buffered} > \"$n\"/buffered_io; echo 1 > \"$n\"/enable; ",
                quote(path)
            ));
        }
        self.subsystem(subnqn, &script, port)
    }

    /// Serves a controller of the VM (`/dev/nvme0`) as it is, in a new subsystem by the kernel's target: its
    /// commands are passed through. Kernels before 6.12 here can not.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the subsystem exists already.
    pub fn nvmet_passthru(&self, subnqn: &str, controller: &str, port: &Port<'_>) -> Result<()> {
        let script = format!(
            "printf %s {} > \"$s\"/passthru/device_path; echo 1 > \"$s\"/passthru/enable; ",
            quote(controller)
        );
        self.subsystem(subnqn, &script, port)
    }

    fn subsystem(&self, subnqn: &str, fill: &str, port: &Port<'_>) -> Result<()> {
        let subnqn = quote(subnqn);
        let Port { transport, address, number, within, in_capsule } = port;
        let transport = transport.name();
        self.load_module(&format!("nvmet-{transport}"))?;
        let in_capsule =
            in_capsule.map_or(String::new(), |bytes| format!("echo {bytes} > $p/param_inline_data_size; "));
        // It listens in the network namespace of who links the subsystem.
        let inside = within.map_or(String::new(), enter);
        self.sh(&format!(
            "set -e; cd /sys/kernel/config/nvmet; s=subsystems/{subnqn}; p=ports/{number}; \
             mkdir \"$s\"; echo 1 > \"$s\"/attr_allow_any_host; {fill}\
             if ! [ -e $p ]; then mkdir $p; echo {transport} > $p/addr_trtype; \
             echo ipv4 > $p/addr_adrfam; echo {address} > $p/addr_traddr; \
             echo {number} > $p/addr_trsvcid; {in_capsule}fi; \
             {inside} ln -s \"$PWD/$s\" $p/subsystems/{subnqn}"
        ))
        .context("cannot set up the VM's NVMe target")
        .map(drop)
    }

    /// Makes two soft RoCE devices on a pair of network devices. What one end sends to the other goes
    /// through both network devices, though both are in this VM: without the rules made here the kernel
    /// would keep it inside one. Carry `ip` and `rdma`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or they are there already.
    pub fn soft_roce(&self) -> Result<SoftRoce> {
        let ends = SoftRoce {
            host_device: "roce-host",
            host_address: "10.9.0.1",
            target_device: "roce-target",
            target_address: "10.9.0.2",
        };
        let SoftRoce { host_device: h, host_address: ha, target_device: t, target_address: ta } = ends;
        self.sh(&format!(
            "set -e; modprobe -a veth rdma_rxe; ip link add {h} type veth peer name {t}; \
             for d in {h} {t} all; do c=/proc/sys/net/ipv4/conf/$d; \
               echo 1 > $c/accept_local; echo 0 > $c/rp_filter; done; \
             ip link set {h} up; ip link set {t} up; ip addr add {ha}/32 dev {h}; ip addr add {ta}/32 dev {t}; \
             ip route add {ta} dev {h} src {ha} table 100; ip route add {ha} dev {t} src {ta} table 101; \
             ip rule add pref 10 iif lo to {ta} lookup 100; ip rule add pref 11 iif lo to {ha} lookup 101; \
             ip rule add pref 12 oif {h} to {ta} lookup 100; ip rule add pref 13 oif {t} to {ha} lookup 101; \
             ip rule add pref 100 lookup local; ip rule del pref 0; \
             ip neigh replace {ta} lladdr $(cat /sys/class/net/{t}/address) dev {h} nud permanent; \
             ip neigh replace {ha} lladdr $(cat /sys/class/net/{h}/address) dev {t} nud permanent; \
             rdma link add rxe-host type rxe netdev {h}; rdma link add rxe-target type rxe netdev {t}; \
             for try in $(seq 600); do \
               [ $(rdma link | grep -c ACTIVE) = 2 ] && exit 0; sleep 0.1; done; rdma link >&2; exit 1"
        ))
        .context("cannot make the VM's soft RoCE devices")?;
        Ok(ends)
    }

    /// Holds up what a network device sends by this long, in whole microseconds; zero ends that. `lo` sends in both directions.
    /// Carry `tc`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn delay_network(&self, device: &str, delay: Duration) -> Result<()> {
        let (device, micros) = (quote(device), delay.as_micros());
        let change = if delay.is_zero() {
            format!("tc qdisc del dev {device} root")
        } else {
            format!("tc qdisc replace dev {device} root netem limit 100000 delay {micros}us")
        };
        self.sh(&change).map(drop)
    }
}

/// Reads `instance=0,cntlid=1`.
fn controller_of(answer: &str) -> Option<Controller> {
    let field =
        |name: &str| answer.trim().split(',').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let instance: u32 = field("instance")?.parse().ok()?;
    Some(Controller { name: format!("nvme{instance}"), cntlid: field("cntlid")?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_connect_is_read() {
        let controller = Controller { name: "nvme3".to_owned(), cntlid: 12 };
        assert_eq!(controller_of("instance=3,cntlid=12\n"), Some(controller));
        for wrong in
            ["", "instance=3", "instance=x,cntlid=1", "cntlid=1,instance=", "instance=1,cntlid=70000"]
        {
            assert_eq!(controller_of(wrong), None, "{wrong}");
        }
    }
}
