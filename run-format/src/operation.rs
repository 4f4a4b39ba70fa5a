//! NVMe I/O commands by opcode (NVM Command Set Specification, section 3; Base Specification, figure
//! "Opcodes for I/O Commands").

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! operations {
    ($($(#[doc = $doc:literal])+ $name:ident $opcode:literal $text:literal $blocks:literal;)+) => {
        /// What a command does.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(into = "String")]
        #[serde(from = "String")]
        pub enum Operation {
            $($(#[doc = $doc])+ $name,)+
            /// Any other opcode of the I/O command sets.
            Other(u8),
        }

        impl Operation {
            /// The operation that an opcode stands for.
            #[must_use]
            pub const fn of(opcode: u8) -> Operation {
                match opcode { $($opcode => Operation::$name,)+ other => Operation::Other(other) }
            }

            /// Its opcode.
            #[must_use]
            pub const fn opcode(self) -> u8 {
                match self { $(Operation::$name => $opcode,)+ Operation::Other(o) => o }
            }

            /// Whether CDW10 to CDW12 hold a starting LBA and a number of blocks.
            #[must_use]
            pub const fn has_blocks(self) -> bool {
                match self { $(Operation::$name => $blocks,)+ Operation::Other(_) => false }
            }

            const NAMES: &[(&str, Operation)] = &[$(($text, Operation::$name),)+];
        }
    };
}

operations! {
    /// Flush.
    Flush 0x00 "flush" false;
    /// Write.
    Write 0x01 "write" true;
    /// Read.
    Read 0x02 "read" true;
    /// Write Uncorrectable.
    WriteUncorrectable 0x04 "write uncorrectable" true;
    /// Compare.
    Compare 0x05 "compare" true;
    /// Write Zeroes.
    WriteZeroes 0x08 "write zeroes" true;
    /// Dataset Management (deallocate, and so on): CDW10 holds the number of ranges.
    DatasetManagement 0x09 "dataset management" false;
    /// Verify.
    Verify 0x0c "verify" true;
    /// Copy.
    Copy 0x19 "copy" false;
    /// Zone Append.
    ZoneAppend 0x7d "zone append" true;
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Operation::NAMES.iter().find(|(_, o)| o == self) {
            Some((name, _)) => f.pad(name),
            None => f.pad(&format!("opcode {:#04x}", self.opcode())),
        }
    }
}

impl From<Operation> for String {
    fn from(operation: Operation) -> String {
        operation.to_string()
    }
}

impl From<String> for Operation {
    /// A name that is not known reads as opcode 0xff, which no I/O command set uses.
    fn from(text: String) -> Operation {
        if let Some((_, o)) = Operation::NAMES.iter().find(|(name, _)| *name == text) {
            return *o;
        }
        let number = text.strip_prefix("opcode 0x").and_then(|hex| u8::from_str_radix(hex, 16).ok());
        Operation::of(number.unwrap_or(0xff))
    }
}

#[cfg(test)]
mod tests {
    use super::Operation;

    #[test]
    fn every_opcode_survives_its_name() {
        for opcode in 0..=u8::MAX {
            let o = Operation::of(opcode);
            assert_eq!(o.opcode(), opcode);
            assert_eq!(Operation::from(String::from(o)), o);
        }
    }
}
