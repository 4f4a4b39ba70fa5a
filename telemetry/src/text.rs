//! The text of procfs and sysfs, without allocating. Only whole lines count: a number at the end of text that was
//! cut off may lack digits, so it is none.

/// The lines that are ended, without their ends.
pub(crate) fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let text = text.get(..whole).unwrap_or_default();
    text.split(|byte| *byte == b'\n')
}

/// What blanks separate.
pub(crate) fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|field| !field.is_empty())
}

/// A decimal number, digits only.
pub(crate) fn number(field: &[u8]) -> Option<u64> {
    if field.is_empty() || field.len() > 20 {
        return None;
    }
    let mut value = 0u64;
    for byte in field {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(value)
}

/// A hexadecimal number of 32 bits, digits only.
pub(crate) fn hex(field: &[u8]) -> Option<u32> {
    if field.is_empty() || field.len() > 8 {
        return None;
    }
    field.iter().try_fold(0u32, |value, byte| {
        let digit = char::from(*byte).to_digit(16)?;
        Some(value << 4 | digit)
    })
}

/// The number of an attribute of sysfs that has just one, with its line's end.
pub(crate) fn single(text: &[u8]) -> Option<u64> {
    number(text.strip_suffix(b"\n")?.trim_ascii())
}

/// A number as a value. Beyond 2^53 its last digits are lost, which no rate can tell.
#[expect(clippy::cast_precision_loss, reason = "said above")]
pub(crate) fn value(number: u64) -> f64 {
    number as f64
}

/// The CPUs of a list such as `0-3,8` (`cpuset(7)`, list format).
pub(crate) fn cpu_list(text: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            cpus.extend(first..=last.min(first.saturating_add(65_535)));
        }
    }
    cpus
}

/// Text with a fixed room, so that an object's name is made without allocating. What does not fit is cut.
#[derive(Debug)]
pub(crate) struct Name {
    bytes: [u8; 160],
    length: usize,
}

impl Name {
    pub(crate) fn of(arguments: std::fmt::Arguments<'_>) -> Name {
        let mut name = Name { bytes: [0; 160], length: 0 };
        // It reports no errors: what does not fit is cut.
        let _ = std::fmt::Write::write_fmt(&mut name, arguments);
        name
    }

    pub(crate) fn as_str(&self) -> &str {
        // Only whole characters were written.
        std::str::from_utf8(self.bytes.get(..self.length).unwrap_or_default()).unwrap_or_default()
    }
}

impl std::fmt::Write for Name {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for character in text.chars() {
            let end = self.length + character.len_utf8();
            let Some(room) = self.bytes.get_mut(self.length..end) else { break };
            character.encode_utf8(room);
            self.length = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Name, cpu_list, fields, hex, lines, number, single};
    use proptest::prelude::*;

    #[test]
    fn only_whole_lines_count() {
        let of =
            |text: &str| lines(text.as_bytes()).map(|l| String::from_utf8(l.to_vec()).unwrap()).collect();
        let all: Vec<String> = of("a 1\nb 2\nc 3");
        assert_eq!(all, ["a 1", "b 2"]);
        let none: Vec<String> = of("a 1");
        assert_eq!(none, [""]);
        let found: Vec<&[u8]> = fields(b"  a \t 1 ").collect();
        assert_eq!(found, [b"a", b"1"]);
    }

    #[test]
    fn numbers_are_digits() {
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for bad in ["18446744073709551616", "", "-1", "+1", "1x", " 1", "99999999999999999999999"] {
            assert_eq!(number(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(hex(b"ffFF00aa"), Some(0xffff_00aa));
        for bad in ["", "0x1", "g", "123456789", "-1"] {
            assert_eq!(hex(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(single(b"12\n"), Some(12));
        assert_eq!(single(b"12"), None);
        assert_eq!(single(b"-1\n"), None);
    }

    #[test]
    fn a_list_of_cpus() {
        assert_eq!(cpu_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert!(cpu_list("").is_empty() && cpu_list("x-,").is_empty());
        assert_eq!(cpu_list("0-4294967295").len(), 65_536);
    }

    #[test]
    fn a_name_that_is_too_long_is_cut_between_characters() {
        let name = Name::of(format_args!("{}", "\u{e4}".repeat(100)));
        assert_eq!(name.as_str(), "\u{e4}".repeat(80));
        assert_eq!(Name::of(format_args!("cpu{}", 7)).as_str(), "cpu7");
    }

    proptest! {
        #[test]
        fn numbers_are_what_the_library_reads(n: u64, m: u32) {
            prop_assert_eq!(number(n.to_string().as_bytes()), Some(n));
            prop_assert_eq!(hex(format!("{m:08x}").as_bytes()), Some(m));
        }

        #[test]
        fn any_bytes_are_a_number_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..24)) {
            if let Some(n) = number(&bytes) {
                let text = std::str::from_utf8(&bytes).unwrap();
                prop_assert_eq!(text.parse::<u64>().unwrap(), n);
            }
            let _ = (hex(&bytes), single(&bytes));
        }
    }
}
