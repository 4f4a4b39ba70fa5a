//! Durations and sizes as people write them: `500us`, `1.5ms`, `4K`.

use std::time::Duration;

/// Reads a duration: a number and `ns`, `us`, `ms`, `s` or `m`. Zero needs no unit.
///
/// # Errors
/// Says what was given and what is understood.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration; write for example 500us, 1.5ms or 2s");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let ns_per_unit = match unit {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        "" if value == 0.0 => 1.0,
        _ => return Err(wrong()),
    };
    let ns = value * ns_per_unit;
    if !ns.is_finite() || ns > 1e18 {
        return Err(wrong());
    }
    Ok(Duration::from_nanos(ns.round() as u64))
}

/// Reads a size in bytes: a number and `K`, `M`, `G` or `T` (powers of 1024), or nothing.
///
/// # Errors
/// Says what was given and what is understood.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; write for example 512, 4K or 64M");
    let (number, shift) = match text.chars().last().map(|c| c.to_ascii_uppercase()) {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        Some('T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let value: u64 = number.parse().map_err(|_| wrong())?;
    value.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Reads a size that fits into 32 bits.
///
/// # Errors
/// As for [`parse_size`], or too large.
pub fn parse_size_u32(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| format!("{text:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations() {
        assert_eq!(parse_duration("500us"), Ok(Duration::from_micros(500)));
        assert_eq!(parse_duration("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert_eq!(parse_duration("2s"), Ok(Duration::from_secs(2)));
        for bad in ["", "5", "us", "-1us", "1h", "1e3us", "..us", "99999999999999999999s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("4K"), Ok(4096));
        assert_eq!(parse_size("64m"), Ok(64 << 20));
        assert_eq!(parse_size("512"), Ok(512));
        for bad in ["", "K", "4KB", "-1", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert!(parse_size_u32("8G").is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_them_panic(text in "\\PC*") {
            let _ = parse_duration(&text);
            let _ = parse_size(&text);
        }
    }
}
