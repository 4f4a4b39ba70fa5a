//! The frames that the machine and the VM exchange over one virtio-serial port. It knows nothing of
//! processes; the agent and the library give the frames their meaning.
//!
//! A frame is one byte of kind, four of command number, four of payload length (both little-endian)
//! and the payload.

use std::io::{self, Read, Write};

/// No payload is larger than this.
pub(crate) const MAX_PAYLOAD: usize = 64 * 1024;

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// VM to machine, once: the agent takes commands now.
    Hello = 1,
    /// Machine to VM: run the payload with `/bin/sh -c`.
    Exec = 2,
    /// Machine to VM: bytes for the command's standard input; none of them closes it.
    Stdin = 3,
    /// Machine to VM: send the command's process group the signal in the payload's first byte.
    Signal = 4,
    /// VM to machine: bytes from standard output.
    Stdout = 5,
    /// VM to machine: bytes from standard error.
    Stderr = 6,
    /// VM to machine: the command ended and its output is complete; the payload is the status, four
    /// bytes little-endian, 128 plus the signal's number where one ended it.
    Exit = 7,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Exec,
            3 => Self::Stdin,
            4 => Self::Signal,
            5 => Self::Stdout,
            6 => Self::Stderr,
            7 => Self::Exit,
            _ => return None,
        })
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    /// What it says.
    pub(crate) kind: Kind,
    /// The command it belongs to; 0 for [`Kind::Hello`].
    pub(crate) id: u32,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub(crate) payload: Vec<u8>,
}

/// Writes one frame with a single call, so that frames of several threads stay whole under a lock.
///
/// # Errors
///
/// `InvalidInput` when the payload is too large, else what the writer says.
pub(crate) fn write_frame(to: &mut impl Write, kind: Kind, id: u32, payload: &[u8]) -> io::Result<()> {
    if payload.len() > MAX_PAYLOAD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a frame of {} bytes; the most is {MAX_PAYLOAD}", payload.len()),
        ));
    }
    let mut bytes = Vec::with_capacity(9 + payload.len());
    bytes.push(kind as u8);
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads one frame.
///
/// # Errors
///
/// `UnexpectedEof` when the stream ends, also in the middle of a frame; `InvalidData` for a kind or
/// a length that no frame has.
pub(crate) fn read_frame(from: &mut impl Read) -> io::Result<Frame> {
    let mut head = [0u8; 9];
    from.read_exact(&mut head)?;
    let [kind, i0, i1, i2, i3, l0, l1, l2, l3] = head;
    let kind = Kind::from_byte(kind)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("frame kind {kind}")))?;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > MAX_PAYLOAD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes; the most is {MAX_PAYLOAD}"),
        ));
    }
    let mut payload = vec![0u8; length];
    from.read_exact(&mut payload)?;
    Ok(Frame { kind, id: u32::from_le_bytes([i0, i1, i2, i3]), payload })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_payload_too_large_is_refused() {
        let mut out = Vec::new();
        assert!(write_frame(&mut out, Kind::Stdin, 1, &vec![0; MAX_PAYLOAD + 1]).is_err());
        assert!(out.is_empty());
        let mut header = [0u8; 9];
        header[0] = Kind::Stdin as u8;
        header[5..].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        assert_eq!(read_frame(&mut header.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn frames_come_back_as_they_went(
            frames in proptest::collection::vec((1u8..8, any::<u32>(), proptest::collection::vec(any::<u8>(), 0..50)), 1..9),
            cut in 1usize..9,
        ) {
            let mut bytes = Vec::new();
            for (kind, id, payload) in &frames {
                write_frame(&mut bytes, Kind::from_byte(*kind).unwrap(), *id, payload).unwrap();
            }
            let mut from = bytes.as_slice();
            for (kind, id, payload) in &frames {
                let frame = read_frame(&mut from).unwrap();
                prop_assert_eq!((frame.kind as u8, frame.id, &frame.payload), (*kind, *id, payload));
            }
            prop_assert_eq!(read_frame(&mut from).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);

            // Cut short, the last frame is never taken for whole.
            let mut from = &bytes[..bytes.len() - cut];
            let whole = std::iter::from_fn(|| read_frame(&mut from).ok()).count();
            prop_assert_eq!(whole, frames.len() - 1);
        }

        #[test]
        fn junk_is_no_trouble(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut from = bytes.as_slice();
            while read_frame(&mut from).is_ok() {}
        }
    }
}
