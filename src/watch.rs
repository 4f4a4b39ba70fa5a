//! `fabscope watch host|target`: shows one side as it is, on a screen or as lines.

use crate::attach::{Going, Subject};
use crate::cli::{Format, Watch, WatchSide};
use crate::destination::Destination;
use crate::exit;
use crate::live::{Show, View};
use crate::signals::Signals;
use crate::terminal::OnTerminal;
use anyhow::{Context, Result};
use joiner::live::{Live, LiveOptions, Over};
use run_format::{Manifest, Side};
use std::io::IsTerminal;
use std::process::ExitCode;

/// Runs `watch`.
///
/// # Errors
/// When nothing can be recorded, with what is missing and what to do; or when it can not be shown.
pub fn run(what: &Watch) -> Result<ExitCode> {
    let signals = Signals::until_counted()?;
    let (side, options, from) = match what {
        Watch::Host(options) => (Side::Host, options, None),
        Watch::Target(options) => (Side::Target, &options.side, Some(&options.from)),
    };
    let subject = Subject { side, observe: &options.observe, from };
    subject.check();
    let slot = options.interval;
    let open = &|manifest| open(manifest, options, LiveOptions { slot, ..LiveOptions::default() });
    subject.record(&Going::into_view(open), &signals)
}

fn open(manifest: Manifest, options: &WatchSide, live: LiveOptions) -> Result<Box<dyn Destination>> {
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let draws = options.format.format == Format::Table && !options.plain && !is_dumb;
    if draws && std::io::stdout().is_terminal() {
        return Ok(Box::new(View::new("watch", manifest, live, OnTerminal::take(options.count)?)));
    }
    let lines = Lines { format: options.format.format, left: options.count };
    Ok(Box::new(View::new("watch", manifest, live, lines)))
}

/// A block of text or a line of JSON each interval.
struct Lines {
    format: Format,
    /// Intervals that are left.
    left: Option<u64>,
}

impl Show for Lines {
    fn news(&mut self, live: &Live, manifest: &Manifest) -> Result<()> {
        let view = live.view(Over::Slot, manifest);
        let text = match self.format {
            Format::Table => view.to_text(),
            Format::Json => serde_json::to_string(&view).context("write JSON")? + "\n",
        };
        exit::print(&text)?;
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
        Ok(())
    }

    fn tick(&mut self, _: &Live, _: &Manifest) -> Result<()> {
        Ok(())
    }

    fn enough(&self) -> Option<&'static str> {
        (self.left == Some(0)).then_some("as many intervals as were asked for")
    }
}
