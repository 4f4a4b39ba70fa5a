//! Reads which functions and type names a BTF blob (`/sys/kernel/btf/*`) holds. It resolves no types: that
//! is libbpf's work.
//!
//! The layout is that of the kernel's `include/uapi/linux/btf.h`.

/// Names that a BTF blob defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name<'a> {
    /// A function, `BTF_KIND_FUNC`.
    Function(&'a str),
    /// A `typedef`.
    Typedef(&'a str),
    /// A structure.
    Struct(&'a str),
    /// One of an `enum`'s names, and its value.
    Enumerator(&'a str, u32),
}

/// Bytes of a name that [`names`] looks at first.
pub(crate) const BEGINNING: usize = 4;

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_FUNC: u32 = 12;

/// Calls `found` for each function, typedef, structure and enumerator whose name begins in one of these ways, and returns
/// the length of the string section. `base_strings` is that length of the blob that this one builds on: 0 for
/// vmlinux, vmlinux's for a module.
///
/// A kernel has some hundred thousand types, so all but a few are left out before their names are looked at
/// as a whole.
pub(crate) fn names<'a>(
    blob: &'a [u8],
    base_strings: u32,
    beginnings: &[[u8; BEGINNING]],
    mut found: impl FnMut(Name<'a>),
) -> Result<u32, &'static str> {
    const CUT: &str = "the type information is cut short";
    let magic = blob.get(..2).ok_or(CUT)?;
    if magic != MAGIC.to_ne_bytes() {
        return Err("this is not type information for this machine's byte order (BTF)");
    }
    let header_length = word(blob, 4).ok_or(CUT)? as usize;
    let type_offset = word(blob, 8).ok_or(CUT)? as usize;
    let type_length = word(blob, 12).ok_or(CUT)? as usize;
    let string_offset = word(blob, 16).ok_or(CUT)? as usize;
    let string_length = word(blob, 20).ok_or(CUT)?;
    let body = blob.get(header_length..).ok_or(CUT)?;
    let section = |offset: usize, length: usize| body.get(offset..offset.checked_add(length)?);
    let types = section(type_offset, type_length).ok_or(CUT)?;
    let strings = section(string_offset, string_length as usize).ok_or(CUT)?;

    // The name at this offset, where it begins as one that is looked for.
    let named = |name: u32| -> Result<Option<&'a str>, &'static str> {
        // Names below the base's length stand in the base.
        let Some(own) = name.checked_sub(base_strings) else { return Ok(None) };
        let text = strings.get(own as usize..).ok_or(CUT)?;
        if !text.first_chunk().is_some_and(|begins| beginnings.contains(begins)) {
            return Ok(None);
        }
        let end = text.iter().position(|&byte| byte == 0).ok_or(CUT)?;
        Ok(std::str::from_utf8(&text[..end]).ok())
    };

    let mut at = 0;
    while at < types.len() {
        let start = at;
        let name = word(types, at).ok_or(CUT)?;
        let info = word(types, at + 4).ok_or(CUT)?;
        let kind = (info >> 24) & 0x1f;
        let members = (info & 0xffff) as usize;
        at += 12
            + match kind {
                1 | 14 | 17 => 4,                // INT, VAR, DECL_TAG
                3 => 12,                         // ARRAY
                4 | 5 | 15 | 19 => members * 12, // STRUCT, UNION, DATASEC, ENUM64
                6 | 13 => members * 8,           // ENUM, FUNC_PROTO
                2 | 7..=12 | 16 | 18 => 0,       // PTR, FWD, TYPEDEF, VOLATILE .. FUNC, FLOAT, TYPE_TAG
                _ => return Err("the type information has a kind of entry that is not known"),
            };
        match kind {
            KIND_STRUCT | KIND_TYPEDEF | KIND_FUNC => {
                let Some(text) = named(name)? else { continue };
                found(match kind {
                    KIND_FUNC => Name::Function(text),
                    KIND_TYPEDEF => Name::Typedef(text),
                    _ => Name::Struct(text),
                });
            }
            KIND_ENUM => {
                for member in (start + 12..at).step_by(8) {
                    let Some(text) = named(word(types, member).ok_or(CUT)?)? else { continue };
                    found(Name::Enumerator(text, word(types, member + 4).ok_or(CUT)?));
                }
            }
            _ => {}
        }
    }
    Ok(string_length)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blob(types: &[u8], strings: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_ne_bytes().to_vec();
        out.extend([1, 0]);
        for word in [24, 0, types.len(), types.len(), strings.len()] {
            out.extend(u32::try_from(word).unwrap().to_ne_bytes());
        }
        out.extend(types);
        out.extend(strings);
        out
    }

    fn entry(name: u32, kind: u32, members: u32, rest: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for word in [name, kind << 24 | members, 0] {
            out.extend(word.to_ne_bytes());
        }
        out.resize(12 + rest, 0);
        out
    }

    fn collect(blob: &[u8], base: u32) -> Result<(Vec<String>, u32), &'static str> {
        let mut all = Vec::new();
        let length = names(blob, base, &[*b"alph", *b"beta", *b"gamm", *b"own\0"], |name| {
            all.push(format!("{name:?}"));
        })?;
        Ok((all, length))
    }

    #[test]
    fn functions_typedefs_and_structures_are_found_among_all_kinds() {
        let strings = b"\0alpha\0beta\0gamma\0";
        let types: Vec<u8> = [
            entry(1, 4, 2, 24),
            entry(0, 1, 0, 4),
            entry(0, 3, 0, 12),
            entry(0, 6, 3, 24),
            entry(0, 13, 2, 16),
            entry(0, 19, 1, 12),
            entry(7, 12, 1, 0),
            entry(0, 17, 0, 4),
            entry(12, 8, 0, 0),
        ]
        .concat();
        let (all, length) = collect(&blob(&types, strings), 0).unwrap();
        assert_eq!(all, ["Struct(\"alpha\")", "Function(\"beta\")", "Typedef(\"gamma\")"]);
        assert_eq!(length as usize, strings.len());
    }

    #[test]
    fn enumerators_are_told_with_their_values() {
        let strings = b"\0alpha\0beta\0other\0";
        let mut types = entry(0, 6, 3, 0);
        for (name, value) in [(1u32, 7u32), (12, 8), (7, 9)] {
            types.extend([name.to_ne_bytes(), value.to_ne_bytes()].concat());
        }
        types.extend(entry(7, 12, 1, 0));
        let (all, _) = collect(&blob(&types, strings), 0).unwrap();
        assert_eq!(all, ["Enumerator(\"alpha\", 7)", "Enumerator(\"beta\", 9)", "Function(\"beta\")"]);
        let (_, cut) = types.split_last_chunk::<16>().map(|(rest, _)| ((), rest)).unwrap();
        assert!(collect(&blob(cut, strings), 0).is_err());
    }

    #[test]
    fn a_module_names_its_own_after_the_base() {
        let types = [entry(3, 12, 1, 0), entry(101, 12, 1, 0)].concat();
        let (all, _) = collect(&blob(&types, b"\0own\0"), 100).unwrap();
        assert_eq!(all, ["Function(\"own\")"]);
    }

    #[test]
    fn this_kernels_own_types_are_read() {
        let Ok(vmlinux) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            println!("skipped: this kernel has no /sys/kernel/btf/vmlinux");
            return;
        };
        let mut structs = 0;
        let mut functions = 0;
        names(&vmlinux, 0, &[*b"task", *b"sche"], |name| match name {
            Name::Struct("task_struct") => structs += 1,
            Name::Function("schedule") => functions += 1,
            _ => {}
        })
        .unwrap();
        assert_eq!((structs, functions), (1, 1));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), valid: bool) {
            if valid && bytes.len() >= 24 {
                let rest = u32::try_from(bytes.len() - 24).unwrap();
                bytes[..2].copy_from_slice(&MAGIC.to_ne_bytes());
                for (at, word) in [(4, 24), (8, 0), (12, rest / 2), (16, rest / 2), (20, rest - rest / 2)] {
                    bytes[at..at + 4].copy_from_slice(&u32::to_ne_bytes(word));
                }
            }
            let _read_or_refused = names(&bytes, 0, &[[0; 4], [1, 2, 3, 4]], |_| {});
        }

        #[test]
        fn no_cut_is_read_as_whole(cut in 0usize..60) {
            let whole = blob(&[entry(1, 12, 1, 0), entry(1, 4, 1, 12)].concat(), b"\0name\0");
            let cut = cut.min(whole.len() - 1);
            let read = names(&whole[..cut], 0, &[*b"name"], |_| {});
            prop_assert!(read.is_err());
        }
    }
}
