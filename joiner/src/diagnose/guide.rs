//! What the rules are, in Markdown: the part of the guide that has to say what the code does.

use super::cause::Cause;
use super::rules::{LESS, RULES, Rule, Threshold, number};
use std::fmt::Write;

/// A section for each cause: what shows it, what refutes it, its thresholds and why, what to change, what that costs.
#[must_use]
pub fn diagnose_guide() -> String {
    let mut out = String::new();
    for rule in RULES {
        // Writing into a String can not fail.
        let _ = section(&mut out, rule);
    }
    out
}

fn section(out: &mut String, rule: &Rule) -> std::fmt::Result {
    writeln!(out, "### `{}`: {}\n", rule.cause, rule.cause.title())?;
    writeln!(out, "- **Shown by:** {}.", rule.shows)?;
    writeln!(out, "- **Refuted by:** {}.", rule.refutes)?;
    let names =
        |of: &[Cause]| of.iter().map(|cause| format!("`{cause}`")).collect::<Vec<String>>().join(", ");
    if !rule.yields_to.is_empty() {
        let names = names(rule.yields_to);
        writeln!(out, "- **Gives way to** {names}, which look like it and have evidence of their own.")?;
    }
    for (_, others) in LESS.iter().filter(|(cause, _)| *cause == rule.cause) {
        let names = names(others);
        writeln!(out, "- **Less what** {names} explain of the same commands, which have evidence of each.")?;
    }
    writeln!(out, "- **Change:** {}.", rule.mitigation)?;
    writeln!(out, "- **Trade-off:** {}.", rule.trade_off)?;
    writeln!(out, "\n| threshold | value | why |\n|---|---|---|")?;
    for Threshold { name, value, unit, why } in rule.thresholds {
        writeln!(out, "| {name} | {} {unit} | {why} |", number(*value))?;
    }
    writeln!(out)
}
