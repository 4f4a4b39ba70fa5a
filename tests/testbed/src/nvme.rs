//! What tests of NVMe-oF do again and again in a VM: connect the kernel's host, set up the kernel's
//! target, make a drive. All of it by the kernel's own files, without nvme-cli.

use std::time::Duration;

use anyhow::{Context, Result, bail};

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
    /// Whether it keeps what is written. Otherwise reads give whatever the buffer held.
    pub memory_backed: bool,
}

impl Default for NullBlk {
    fn default() -> Self {
        Self { size_mb: 256, completion: Duration::ZERO, memory_backed: false }
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
        self.connect("tcp", address, port, subnqn, options)
    }

    /// As [`Self::connect_tcp`], over RDMA.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, with what it logged.
    pub fn connect_rdma(&self, address: &str, port: u16, subnqn: &str, options: &str) -> Result<Controller> {
        self.connect("rdma", address, port, subnqn, options)
    }

    fn connect(
        &self,
        transport: &str,
        address: &str,
        port: u16,
        subnqn: &str,
        options: &str,
    ) -> Result<Controller> {
        self.load_module(&format!("nvme-{transport}"))?;
        let mut words = format!("transport={transport},traddr={address},trsvcid={port},nqn={subnqn}");
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
        let NullBlk { size_mb, completion, memory_backed } = drive;
        let nanos = completion.as_nanos();
        let irqmode = if completion.is_zero() { 0 } else { 2 };
        let text = self.sh(&format!(
            "set -e; modprobe null_blk nr_devices=0; cd /sys/kernel/config/nullb; n=0; \
             while [ -e nullb$n ]; do n=$((n + 1)); done; mkdir nullb$n; cd nullb$n; \
             echo {size_mb} > size; echo {irqmode} > irqmode; echo {nanos} > completion_nsec; \
             echo {} > memory_backed; echo 1 > power; echo /dev/nullb$(cat index)",
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
        self.nvmet("tcp", "0.0.0.0", subnqn, device, port)
    }

    /// As [`Self::nvmet_tcp`], over RDMA and on one address.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the subsystem exists already.
    pub fn nvmet_rdma(&self, address: &str, subnqn: &str, device: &str, port: u16) -> Result<()> {
        self.nvmet("rdma", address, subnqn, device, port)
    }

    fn nvmet(&self, transport: &str, address: &str, subnqn: &str, device: &str, port: u16) -> Result<()> {
        let (subnqn, device) = (quote(subnqn), quote(device));
        self.load_module(&format!("nvmet-{transport}"))?;
        self.sh(&format!(
            "set -e; cd /sys/kernel/config/nvmet; s=subsystems/{subnqn}; p=ports/{port}; \
             mkdir \"$s\"; echo 1 > \"$s\"/attr_allow_any_host; \
             mkdir \"$s\"/namespaces/1; printf %s {device} > \"$s\"/namespaces/1/device_path; \
             echo 1 > \"$s\"/namespaces/1/enable; \
             if ! [ -e $p ]; then mkdir $p; echo {transport} > $p/addr_trtype; \
             echo ipv4 > $p/addr_adrfam; echo {address} > $p/addr_traddr; \
             echo {port} > $p/addr_trsvcid; fi; \
             ln -s \"$PWD/$s\" $p/subsystems/{subnqn}"
        ))
        .context("cannot set up the VM's NVMe target")
        .map(drop)
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
