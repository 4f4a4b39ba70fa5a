//! The example alert rules, by Prometheus' own tool: they are rules, and fire when they should.

mod support;

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;
use support::{outcome, skipped};

#[test]
fn the_example_rules_fire_when_they_should() -> Result<()> {
    if Command::new("promtool").arg("--version").output().is_err() {
        skipped("the alert rules by promtool, which is not installed");
        return Ok(());
    }
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rules = home.join("docs/examples/alerts-fabscope.yml");
    outcome(Command::new("promtool").args(["check", "rules"]).arg(&rules))?.expect(0, &[])?;
    let here = tempfile::tempdir()?;
    let tests = here.path().join("tests.yml");
    let text = fs::read_to_string(home.join("tests/data/alerts.yml"))?;
    let rules = rules.to_str().context("the rules' path is no text")?;
    fs::write(&tests, text.replace("RULES", rules))?;
    outcome(Command::new("promtool").args(["test", "rules"]).arg(&tests))?.expect(0, &[])?;
    Ok(())
}
