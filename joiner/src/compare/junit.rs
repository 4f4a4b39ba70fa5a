//! A comparison as JUnit XML, which CI systems show as tests: one test case a gate and class; without gates, one a
//! class, which never fails. And what stands in its place where there is none.

use super::render::form_name;
use super::{Comparison, Outcome, Verdict};
use serde::Serialize;
use std::fmt::Write;

/// What is printed in a comparison's place where there is none, for programs: a CI that reads no file calls that a
/// fault of its own.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    format: &'static str,
    /// Why there is no comparison.
    pub error: String,
}

impl Failure {
    /// Of an error's text.
    #[must_use]
    pub fn new(error: impl Into<String>) -> Failure {
        Failure::of(super::FORMAT, error)
    }

    /// Of an error's text, in the place of another format.
    #[must_use]
    pub fn of(format: &'static str, error: impl Into<String>) -> Failure {
        Failure { format, error: error.into() }
    }

    /// As JUnit XML: one test case, with an error.
    #[must_use]
    pub fn to_junit(&self) -> String {
        let counts = "tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\"";
        let text = escape(&self.error);
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"fabscope compare\" {counts}>\n  \
             <testsuite name=\"fabscope compare\" {counts}>\n    \
             <testcase classname=\"fabscope\" name=\"compare\">\n      \
             <error type=\"compare\" message=\"{text}\">{text}</error>\n    \
             </testcase>\n  </testsuite>\n</testsuites>\n"
        )
    }
}

impl Comparison {
    /// The comparison as JUnit XML. A gate that does not hold is a failure, one that can not be told an error.
    #[must_use]
    pub fn to_junit(&self) -> String {
        let mut out = String::new();
        // Writing into a String can not fail.
        let _ = self.write_junit(&mut out);
        out
    }

    fn write_junit(&self, out: &mut String) -> std::fmt::Result {
        let of = |outcome| self.gates.iter().filter(|g| g.outcome == outcome).count();
        let (failures, errors) = (of(Outcome::DoesNotHold), of(Outcome::CannotTell));
        let skipped = if self.gates.is_empty() {
            self.classes.iter().filter(|c| c.verdict == Verdict::CannotTell).count()
        } else {
            0
        };
        let tests = if self.gates.is_empty() { self.classes.len() } else { self.gates.len() };
        let counts =
            format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"{errors}\" skipped=\"{skipped}\"");
        writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
        writeln!(out, "<testsuites name=\"fabscope compare\" {counts}>")?;
        writeln!(out, "  <testsuite name=\"fabscope compare ({})\" {counts}>", form_name(self.form))?;
        for gate in &self.gates {
            let class = gate.class.map_or("no class".to_owned(), |c| c.to_string());
            writeln!(
                out,
                "    <testcase classname=\"fabscope.{}\" name=\"{}\">",
                escape(&class),
                escape(&gate.gate)
            )?;
            let text = escape(&gate.text);
            match gate.outcome {
                Outcome::Holds => writeln!(out, "      <system-out>{text}</system-out>")?,
                Outcome::DoesNotHold => {
                    writeln!(
                        out,
                        "      <failure type=\"gate\" message=\"does not hold: {text}\">{text}</failure>"
                    )?;
                }
                Outcome::CannotTell => {
                    writeln!(
                        out,
                        "      <error type=\"gate\" message=\"cannot tell: {text}\">{text}</error>"
                    )?;
                }
            }
            writeln!(out, "    </testcase>")?;
        }
        if self.gates.is_empty() {
            for class in &self.classes {
                let text = escape(&class.sentence);
                writeln!(
                    out,
                    "    <testcase classname=\"fabscope\" name=\"{}\">",
                    escape(&class.class.to_string())
                )?;
                if class.verdict == Verdict::CannotTell {
                    writeln!(out, "      <skipped message=\"{text}\"/>")?;
                }
                writeln!(out, "      <system-out>{text}</system-out>\n    </testcase>")?;
            }
        }
        let mut table = self.to_table(false);
        table.retain(is_xml);
        writeln!(out, "    <system-out>{}</system-out>", escape(&table))?;
        writeln!(out, "  </testsuite>\n</testsuites>")
    }
}

/// Whether XML 1.0 may hold a character at all.
fn is_xml(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars().filter(|c| is_xml(*c)) {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c => out.push(c),
        }
    }
    out
}
