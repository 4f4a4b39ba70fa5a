//! Unpacks a bzImage into the ELF kernel inside. Under emulation the kernel's own unpacking takes up
//! to half of the boot; QEMU starts the ELF file directly, by its PVH entry. It runs nothing.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use object::Object;
use object::read::elf::{FileHeader, ProgramHeader};

/// Reads a `vmlinuz` and returns what QEMU boots fastest: the kernel inside where that has a PVH
/// entry, else the file as it is.
pub(crate) fn unpack(vmlinuz: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(vmlinuz).with_context(|| vmlinuz.display().to_string())?;
    let Some(payload) = payload(&bytes) else { return Ok(bytes) };
    let Some(kernel) = decompress(payload)? else { return Ok(bytes) };
    Ok(if has_pvh_entry(&kernel) { kernel } else { bytes })
}

/// The compressed kernel, by the fields of the boot protocol (the kernel's
/// `Documentation/arch/x86/boot.rst`): number of real-mode sectors at 0x1f1, signature at 0x202,
/// protocol version at 0x206, payload's offset and length at 0x248.
fn payload(bytes: &[u8]) -> Option<&[u8]> {
    let u32_at = |at: usize| -> Option<usize> {
        Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize)
    };
    let version = u16::from_le_bytes(bytes.get(0x206..0x208)?.try_into().ok()?);
    if bytes.get(0x202..0x206)? != b"HdrS" || version < 0x208 {
        return None;
    }
    let sectors = match bytes.get(0x1f1)? {
        0 => 4,
        n => usize::from(*n),
    };
    let start = (sectors + 1).checked_mul(512)?.checked_add(u32_at(0x248)?)?;
    bytes.get(start..start.checked_add(u32_at(0x24c)?)?)
}

/// Decompresses a payload; none where its compression is another than Debian's.
fn decompress(payload: &[u8]) -> Result<Option<Vec<u8>>> {
    let (program, arguments) = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", vec!["-dc", "--single-stream"]),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", vec!["-dc"]),
        _ => return Ok(None),
    };
    // The length of the kernel follows the compressed data, four bytes; xz is told to ignore it.
    let data = if program == "zstd" { &payload[..payload.len() - 4] } else { payload };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{program}, needed to unpack the kernel"))?;
    let stdin = child.stdin.take();
    let output = thread::scope(|scope| {
        if let Some(mut stdin) = stdin {
            scope.spawn(move || {
                // It stops reading early only to fail, and then says why itself.
                let _failed = stdin.write_all(data);
            });
        }
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("{program} cannot unpack the kernel: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(Some(output.stdout))
}

/// Whether the ELF file has the note that tells QEMU where to enter: owner "Xen", type 18.
fn has_pvh_entry(kernel: &[u8]) -> bool {
    const PHYS32_ENTRY: object::elf::NoteType = object::elf::NoteType(18);
    if object::File::parse(kernel).map(|file| file.is_64()) != Ok(true) {
        return false;
    }
    let Ok(header) = object::elf::FileHeader64::<object::Endianness>::parse(kernel) else { return false };
    let Ok(endian) = header.endian() else { return false };
    let Ok(segments) = header.program_headers(endian, kernel) else { return false };
    segments.iter().any(|segment| {
        let Ok(Some(mut notes)) = segment.notes(endian, kernel) else { return false };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == b"Xen" && note.n_type(endian) == PHYS32_ENTRY {
                return true;
            }
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_files_are_taken_as_they_are() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), b"not a kernel").unwrap();
        assert_eq!(unpack(file.path()).unwrap(), b"not a kernel");
    }

    #[test]
    fn the_payload_is_found_and_unpacked() {
        let packed = Command::new("sh").args(["-c", "printf hello | zstd -c"]).output().unwrap().stdout;
        let mut image = vec![0u8; 1024];
        image[0x1f1] = 1;
        image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        image[0x248] = 7;
        image[0x24c] = u8::try_from(packed.len() + 4).unwrap();
        image.extend_from_slice(&[0xee; 7]);
        image.extend_from_slice(&packed);
        image.extend_from_slice(&5u32.to_le_bytes());
        image.extend_from_slice(&[0xee; 100]);
        let payload = payload(&image).unwrap();
        assert_eq!(decompress(payload).unwrap().unwrap(), b"hello");
    }

    proptest! {
        #[test]
        fn no_file_makes_it_fail_badly(
            mut bytes in proptest::collection::vec(any::<u8>(), 0x250..2000), start: u32, length: u32
        ) {
            bytes[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
            bytes[0x248..0x24c].copy_from_slice(&start.to_le_bytes());
            bytes[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
            let _none_or_some = payload(&bytes);
            // As an ELF file of random content it has no such note either, and is no trouble.
            bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
            prop_assert!(!has_pvh_entry(&bytes));
        }
    }
}
