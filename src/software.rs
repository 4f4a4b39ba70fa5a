//! Which software a side is: the kernel's driver or an SPDK process. It decides from the flags and, without
//! them, from what runs here; it records nothing.

use anyhow::{Result, bail};
use run_format::Side;
use spdk_probes::{Choice, Process};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// What takes part on a side.
#[derive(Debug)]
pub enum Software {
    /// The kernel's driver.
    Kernel,
    /// A process that has SPDK's functions.
    Spdk(Process),
}

/// What `--kernel` and `--spdk` say; without both, the one that is here.
///
/// # Errors
/// When there is none, or both are here and have to be chosen from.
pub fn find(side: Side, kernel: bool, spdk: Option<&OsStr>) -> Result<Software> {
    match (kernel, spdk) {
        (true, _) => Ok(Software::Kernel),
        (false, Some(choice)) => Ok(Software::Spdk(spdk_probes::find(side, &parse_choice(choice)?)?)),
        (false, None) => found_by_itself(side),
    }
}

/// An SPDK process that serves or uses NVMe/TCP, else the kernel's driver; where both are there, both are
/// named.
fn found_by_itself(side: Side) -> Result<Software> {
    let kernel = match side {
        Side::Host => controllers(Path::new("/sys/class/nvme")),
        Side::Target => ports(Path::new("/sys/kernel/config/nvmet/ports")),
    };
    match spdk_probes::find(side, &Choice::Only) {
        Ok(process) if kernel.is_empty() => Ok(Software::Spdk(process)),
        Ok(process) => bail!(
            "two {side}s are here: SPDK in process {} ({}) and the kernel's {}: choose with --spdk or --kernel",
            process.pid,
            process.path.display(),
            kernel.join(", ")
        ),
        // Whether SPDK runs can not be known, and the kernel's driver does.
        Err(spdk_probes::Error::NoProcess { .. } | spdk_probes::Error::Privilege { .. })
            if !kernel.is_empty() =>
        {
            Ok(Software::Kernel)
        }
        // A host's driver may be about to connect; a target without a port is no target.
        Err(spdk_probes::Error::NoProcess { .. }) if side == Side::Host => Ok(Software::Kernel),
        Err(spdk_probes::Error::NoProcess { .. }) => bail!(
            "no target is here: no SPDK process serves NVMe/TCP, and the kernel's nvmet has no TCP or RDMA port with a subsystem; start one, or name it with --spdk PID or --kernel"
        ),
        Err(error) => Err(error.into()),
    }
}

/// The transports that are recorded, as sysfs and configfs call them.
fn is_recorded(transport: &str) -> bool {
    run_format::Transport::parse(transport.trim()).is_some()
}

/// The kernel's NVMe over Fabrics controllers, by name.
fn controllers(class: &Path) -> Vec<String> {
    let mut names: Vec<String> = entries(class)
        .filter(|path| fs::read_to_string(path.join("transport")).is_ok_and(|t| is_recorded(&t)))
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    names
}

/// The ports of the kernel's target that serve a subsystem, as `nvmet port 1 (tcp 10.0.0.1:4420)`.
fn ports(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = entries(directory)
        .filter(|port| entries(&port.join("subsystems")).next().is_some())
        .filter_map(|port| {
            let of = |name: &str| fs::read_to_string(port.join(name)).unwrap_or_default().trim().to_owned();
            let transport = of("addr_trtype");
            let number = port.file_name()?.to_string_lossy();
            is_recorded(&transport).then(|| {
                format!("nvmet port {number} ({transport} {}:{})", of("addr_traddr"), of("addr_trsvcid"))
            })
        })
        .collect();
    names.sort();
    names
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// What `--spdk` says: nothing, a PID or a path.
///
/// # Errors
/// When it is a number that no PID can be.
pub fn parse_choice(text: &OsStr) -> Result<Choice> {
    match text.to_str() {
        Some("") => Ok(Choice::Only),
        Some(number) if number.bytes().all(|b| b.is_ascii_digit()) => match number.parse() {
            // include/linux/threads.h: PID_MAX_LIMIT.
            Ok(pid @ 1..=4_194_304) => Ok(Choice::Pid(pid)),
            _ => bail!("{number} is no PID: they go from 1 to 4194304 (a file of that name is ./{number})"),
        },
        _ => Ok(Choice::Path(PathBuf::from(text))),
    }
}

#[cfg(test)]
mod tests {
    use super::{controllers, parse_choice, ports};
    use spdk_probes::Choice;
    use std::ffi::OsStr;
    use std::fs;
    use std::path::Path;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn only_controllers_and_ports_of_recorded_transports_count() {
        let home = tempfile::tempdir().unwrap();
        for (name, transport) in [("nvme0", "pcie"), ("nvme2", "rdma"), ("nvme1", "tcp")] {
            write(&home.path().join(name).join("transport"), &format!("{transport}\n"));
        }
        assert_eq!(controllers(home.path()), ["nvme1", "nvme2"]);
        assert!(controllers(&home.path().join("none")).is_empty());

        let home = tempfile::tempdir().unwrap();
        for (port, transport, subsystem) in [("1", "tcp", true), ("2", "loop", true), ("3", "rdma", false)] {
            let port = home.path().join(port);
            write(&port.join("addr_trtype"), &format!("{transport}\n"));
            write(&port.join("addr_traddr"), "10.0.0.1\n");
            write(&port.join("addr_trsvcid"), "4420\n");
            fs::create_dir_all(port.join("subsystems")).unwrap();
            if subsystem {
                fs::create_dir_all(port.join("subsystems/nqn.x")).unwrap();
            }
        }
        assert_eq!(ports(home.path()), ["nvmet port 1 (tcp 10.0.0.1:4420)"]);
    }

    #[test]
    fn a_number_is_a_pid_or_refused() {
        let of = |text: &str| parse_choice(OsStr::new(text));
        assert!(matches!(of(""), Ok(Choice::Only)));
        assert!(matches!(of("4194304"), Ok(Choice::Pid(4_194_304))));
        assert!(matches!(of("./1"), Ok(Choice::Path(_))));
        for bad in ["0", "4194305", "99999999999999999999"] {
            assert!(of(bad).unwrap_err().to_string().contains("is no PID"), "{bad}");
        }
    }
}
