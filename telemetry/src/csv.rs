//! The records of comma-separated text (RFC 4180): quotes, line ends within quotes, and either line end. It knows no
//! meaning of a field.

use std::io::{BufRead, Error, ErrorKind};

/// The longest record, in bytes: more is a quote that is never closed, or no text.
const LONGEST: usize = 1 << 20;

/// Reads records one after another.
#[derive(Debug)]
pub(crate) struct Records<R> {
    text: R,
    delimiter: u8,
    bytes: Vec<u8>,
    /// Where each field ends in `bytes`.
    ends: Vec<usize>,
    /// Lines read so far.
    lines: u64,
}

/// One record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    bytes: &'a [u8],
    ends: &'a [usize],
    /// Its first line, counted from 1.
    pub(crate) line: u64,
}

impl Record<'_> {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// A field's text, empty where there is none.
    pub(crate) fn get(&self, position: usize) -> String {
        let start = position.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let field = self.ends.get(position).and_then(|end| self.bytes.get(start..*end)).unwrap_or_default();
        String::from_utf8_lossy(field).trim().to_owned()
    }
}

impl<R: BufRead> Records<R> {
    pub(crate) fn new(text: R, delimiter: u8) -> Records<R> {
        Records { text, delimiter, bytes: Vec::new(), ends: Vec::new(), lines: 0 }
    }

    /// The next record that is not an empty line; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Record<'_>>, Error> {
        loop {
            let line = self.lines + 1;
            if !self.record()? {
                return Ok(None);
            }
            if self.ends.len() > 1 || !self.bytes.is_empty() {
                return Ok(Some(Record { bytes: &self.bytes, ends: &self.ends, line }));
            }
        }
    }

    /// Reads one record; whether there was one.
    fn record(&mut self) -> Result<bool, Error> {
        self.bytes.clear();
        self.ends.clear();
        // Of a field: whether it began with a quote, is within quotes, and had one just now that may be its end.
        let (mut quoted, mut inside, mut closing) = (false, false, false);
        let mut begun = false;
        let mut field = 0;
        loop {
            let buffer = match self.text.fill_buf() {
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                buffer => buffer?,
            };
            if buffer.is_empty() {
                if begun {
                    self.lines += 1;
                    self.ends.push(self.bytes.len());
                }
                return Ok(begun);
            }
            let mut taken = 0;
            for byte in buffer {
                taken += 1;
                begun = true;
                if closing {
                    closing = false;
                    if *byte == b'"' {
                        self.bytes.push(b'"');
                        continue;
                    }
                    inside = false;
                }
                match *byte {
                    b'"' if inside => closing = true,
                    b'"' if !quoted && self.bytes.len() == field => (quoted, inside) = (true, true),
                    b'\n' if !inside => {
                        if self.bytes.len() > field && self.bytes.last() == Some(&b'\r') {
                            self.bytes.pop();
                        }
                        self.ends.push(self.bytes.len());
                        self.lines += 1;
                        self.text.consume(taken);
                        return Ok(true);
                    }
                    byte if byte == self.delimiter && !inside => {
                        self.ends.push(self.bytes.len());
                        field = self.bytes.len();
                        quoted = false;
                    }
                    byte => {
                        self.lines += u64::from(byte == b'\n');
                        self.bytes.push(byte);
                    }
                }
            }
            self.text.consume(taken);
            if self.bytes.len() + self.ends.len() > LONGEST {
                let line = self.lines + 1;
                return Err(Error::new(
                    ErrorKind::InvalidData,
                    format!("line {line}: a record of more than 1 MiB (is a quote not closed?)"),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Records;
    use proptest::prelude::*;
    use std::io::BufReader;

    fn all(text: &[u8]) -> Vec<(u64, Vec<String>)> {
        // A buffer that ends within everything.
        let mut records = Records::new(BufReader::with_capacity(3, text), b',');
        let mut found = Vec::new();
        while let Some(record) = records.next().unwrap() {
            found.push((record.line, (0..record.len()).map(|n| record.get(n)).collect()));
        }
        found
    }

    #[test]
    fn quotes_line_ends_and_empty_lines() {
        let text = b"a,\"b,\"\"c\"\"\",d\r\n\r\n\n1,\"two\nlines\",\n\"\",x\"y,\"z\"w\nlast";
        let of = |fields: &[&str]| fields.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            all(text),
            [
                (1, of(&["a", "b,\"c\"", "d"])),
                (4, of(&["1", "two\nlines", ""])),
                (6, of(&["", "x\"y", "zw"])),
                (7, of(&["last"])),
            ]
        );
        assert!(all(b"").is_empty() && all(b"\n\r\n").is_empty());
    }

    #[test]
    fn a_quote_that_is_never_closed_is_an_error() {
        let text = format!("a,b\n\"{}", "x\n".repeat(1 << 20));
        let mut records = Records::new(text.as_bytes(), b',');
        assert_eq!(records.next().unwrap().unwrap().len(), 2);
        assert!(records.next().unwrap_err().to_string().contains("quote"));
    }

    proptest! {
        #[test]
        fn what_was_quoted_comes_back(table in proptest::collection::vec(proptest::collection::vec("[a-z\",;\n]{1,9}", 2..5), 1..6)) {
            let quoted = |field: &String| format!("\"{}\"", field.replace('"', "\"\""));
            let text: Vec<String> =
                table.iter().map(|row| row.iter().map(quoted).collect::<Vec<_>>().join(",")).collect();
            let found: Vec<Vec<String>> = all(text.join("\n").as_bytes()).into_iter().map(|(_, row)| row).collect();
            let trimmed: Vec<Vec<String>> =
                table.iter().map(|row| row.iter().map(|f| f.trim().to_owned()).collect()).collect();
            prop_assert_eq!(found, trimmed);
        }

        #[test]
        fn any_bytes_are_records(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let lines = bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
            for (line, fields) in all(&bytes) {
                prop_assert!(line >= 1 && line <= lines + 1 && !fields.is_empty());
            }
        }
    }
}
