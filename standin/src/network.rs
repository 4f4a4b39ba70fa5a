//! A network of its own for the stand-in: a namespace with nothing but its loopback, which can be made to lose packets.
//! It is for the demonstration and for tests; it never touches a network that others use.
//!
//! A packet is lost where it arrives, by a BPF program on the interface's receive path (XDP), as a switch loses one:
//! the sender's own kernel does not know. It needs root, and neither `tc` nor a module.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use libbpf_rs::libbpf_sys as sys;
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

const LOOPBACK: &CStr = c"lo";

/// Runs this on a thread whose network is new: a loopback and nothing else. Programs that it starts are in it too. The
/// network goes with the last of them.
///
/// # Errors
/// What `run` says, or that there are no rights for such a network.
pub fn in_own_network<T: Send>(run: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("a network namespace needs CAP_SYS_ADMIN")?;
            loopback_up().context("setting the new network's loopback up")?;
            run()
        });
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn loopback_up() -> Result<()> {
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: an all-zero `ifreq` is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(LOOPBACK.to_bytes()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request is a whole `ifreq` and outlives the call.
    let rc = unsafe { libc::ioctl(any.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    Errno::result(rc)?;
    Ok(())
}

/// Packets are being lost on this thread's loopback. Dropping it ends that.
#[derive(Debug)]
pub struct Loss {
    _link: OwnedFd,
}

impl Loss {
    /// Loses this share of the packets, drawn at random, on the loopback of this thread's network. One packet is
    /// what the sender hands over at once: up to 64 KiB.
    ///
    /// # Errors
    /// The share is none, the network is the machine's own, or the kernel refuses the program.
    pub fn on_loopback(share: f64) -> Result<Loss> {
        if !(0.0..=1.0).contains(&share) {
            bail!("{share} is no share of packets: write 0 to 1");
        }
        let own = |path: &str| std::fs::read_link(path).ok();
        // `self` is the process's first thread, whose network others may use.
        if own("/proc/thread-self/ns/net") == own("/proc/self/ns/net") {
            bail!("packets are lost only in a network of one's own: use in_own_network");
        }
        let program = load(limit(share)).context("loading the program that loses packets")?;
        // SAFETY: the name ends with a zero.
        let index = unsafe { libc::if_nametoindex(LOOPBACK.as_ptr()) };
        // SAFETY: the descriptor is open; no options are given.
        let link = unsafe {
            sys::bpf_link_create(program.as_raw_fd(), index.cast_signed(), sys::BPF_XDP, std::ptr::null())
        };
        Ok(Loss { _link: descriptor(link).context("attaching the program that loses packets")? })
    }
}

/// A random number of 32 bits below this is a loss.
fn limit(share: f64) -> u32 {
    (share * f64::from(u32::MAX)) as u32
}

fn descriptor(fd: i32) -> Result<OwnedFd, Errno> {
    if fd < 0 {
        return Err(Errno::from_raw(-fd));
    }
    // SAFETY: the descriptor is new, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `bpf_get_prandom_u32() < limit ? XDP_DROP : XDP_PASS`.
fn load(limit: u32) -> Result<OwnedFd, Errno> {
    const GET_PRANDOM_U32: i32 = 7;
    const DROP: i32 = 1;
    const PASS: i32 = 2;
    let op = |code: u8, off: i16, imm: i32| sys::bpf_insn {
        code,
        _bitfield_align_1: [],
        // All registers are r0.
        _bitfield_1: sys::__BindgenBitfieldUnit::new([0]),
        off,
        imm,
    };
    // The kernel's Documentation/bpf/standardization/instruction-set.rst.
    let (call, exit) = (0x85, 0x95);
    let (if_less_32, set) = (0xa6, 0xb7);
    let program = [
        op(call, 0, GET_PRANDOM_U32),
        op(if_less_32, 2, limit.cast_signed()),
        op(set, 0, PASS),
        op(exit, 0, 0),
        op(set, 0, DROP),
        op(exit, 0, 0),
    ];
    let name = CString::new("standin_loss").map_err(|_| Errno::EINVAL)?;
    // SAFETY: the strings end with a zero, the count is the array's, and no options are given.
    let fd = unsafe {
        sys::bpf_prog_load(
            sys::BPF_PROG_TYPE_XDP,
            name.as_ptr(),
            c"Dual BSD/GPL".as_ptr(),
            program.as_ptr(),
            program.len() as sys::size_t,
            std::ptr::null_mut(),
        )
    };
    descriptor(fd)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Segments that this end sent again.
    fn sent_again(stream: &TcpStream) -> u32 {
        // SAFETY: an all-zero `tcp_info` is valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        // SAFETY: the structure is writable for `length` bytes.
        let rc = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut length,
            )
        };
        assert_eq!(rc, 0);
        info.tcpi_total_retrans
    }

    fn transfer() -> u32 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let data: Vec<u8> = (0..400_000u32).map(|n| (n % 251) as u8).collect();
        let wanted = data.clone();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; wanted.len()];
            far.read_exact(&mut got).unwrap();
            assert!(got == wanted);
        });
        for piece in data.chunks(4_000) {
            near.write_all(piece).unwrap();
        }
        reader.join().unwrap();
        sent_again(&near)
    }

    #[test]
    fn packets_are_lost_in_a_network_of_its_own_and_all_data_arrives() {
        let is_root = nix::unistd::geteuid().is_root();
        if !is_root {
            println!("skipped: a network of one's own needs root");
            return;
        }
        in_own_network(|| {
            // A busy machine acknowledges late now and then, and TCP sends again what was not lost: one or two at most.
            const LATE: u32 = 2;
            assert!(transfer() <= LATE);
            match Loss::on_loopback(0.1) {
                Ok(loss) => {
                    // Two or three of some thirty packets each time.
                    let lost: u32 = (0..10).map(|_| transfer()).sum();
                    assert!(lost > 5 * LATE, "{lost}");
                    drop(loss);
                    assert!(transfer() <= LATE);
                }
                Err(error) => println!("skipped: {error:#}"),
            }
            Ok(())
        })
        .unwrap();
        assert!(Loss::on_loopback(0.1).unwrap_err().to_string().contains("one's own"));
        assert!(Loss::on_loopback(f64::NAN).is_err() && Loss::on_loopback(1.1).is_err());
    }

    #[test]
    fn shares_are_of_all_numbers() {
        assert_eq!((limit(0.0), limit(1.0)), (0, u32::MAX));
        assert!((limit(0.25) as f64 / u32::MAX as f64 - 0.25).abs() < 1e-6);
    }
}
