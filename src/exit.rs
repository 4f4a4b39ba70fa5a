//! What scripts rely on: the exit codes (0 good, 1 an error, 2 wrong usage, 3 a gate that did not hold, 4 too little data to say;
//! `record -- CMD` ends as CMD did), and that output which nobody reads any more is no error.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

/// A gate did not hold.
pub const GATE: u8 = 3;
/// Too little data to say anything.
pub const TOO_LITTLE: u8 = 4;

/// The reader of our output went away, as `head` does.
#[derive(Debug)]
struct ReaderGone;

impl std::fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl std::error::Error for ReaderGone {}

/// The exit code of gates, by what came of them together.
pub fn of_gates(outcome: joiner::Outcome) -> ExitCode {
    match outcome {
        joiner::Outcome::Holds => ExitCode::SUCCESS,
        joiner::Outcome::DoesNotHold => ExitCode::from(GATE),
        joiner::Outcome::CannotTell => ExitCode::from(TOO_LITTLE),
    }
}

/// Prints an error with its chain of causes once, and turns it into the exit code.
pub fn code(result: Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) if error.chain().any(|cause| cause.is::<ReaderGone>()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&text(&error));
            if is_too_little(&error) { ExitCode::from(TOO_LITTLE) } else { ExitCode::FAILURE }
        }
    }
}

/// Whether an error says that there is too little data, and nothing else.
pub fn is_too_little(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| matches!(cause.downcast_ref(), Some(error) if joiner::Error::is_too_little(error)))
}

/// An error and its causes in one line, without the causes that the text before them holds already.
pub fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Lines that wait while the terminal is drawn on.
static HELD: Mutex<Option<Vec<String>>> = Mutex::new(None);

/// From now on lines to standard error wait: the terminal is drawn on.
pub fn hold() {
    *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
}

/// Prints the lines that wait, and from now on at once again.
pub fn release() {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner).take();
    held.into_iter().flatten().for_each(|line| say(&line));
}

/// Prints a line to standard error, where somebody reads it.
pub fn say(text: &str) {
    if let Some(held) = HELD.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        held.push(text.to_owned());
        return;
    }
    // Without a reader there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "fabscope: {}", harmless(text));
}

/// Names in a run are what the other machines sent: nothing in them is to steer a terminal.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { char::REPLACEMENT_CHARACTER } else { c })
        .collect()
}

/// Prints to standard output. That its reader went away ends the program without an error.
///
/// # Errors
/// When standard output can not be written.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout();
    match stdout.write_all(harmless(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        written => written.context("write to standard output"),
    }
}

#[cfg(test)]
mod tests {
    use super::text;
    use anyhow::Context;

    #[test]
    fn a_cause_that_the_text_holds_is_not_said_twice() {
        let full = || std::io::Error::from_raw_os_error(28);
        let inner = run_format::Error::Io { doing: "write", path: "a.run".into(), source: full() };
        let error = Err::<(), _>(inner).context("write the run").unwrap_err();
        assert_eq!(text(&error), format!("write the run: write a.run: {}", full()));
        let error = Err::<(), _>(full()).context("one").context("two").unwrap_err();
        assert_eq!(text(&error), format!("two: one: {}", full()));
    }
}
