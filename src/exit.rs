//! The exit codes that scripts rely on: 0 good, 1 an error, 2 wrong usage, 3 a gate that did not hold, 4 too
//! little data to say; `record -- CMD` ends as CMD did.

use std::process::ExitCode;

/// Too little data to say anything.
pub const TOO_LITTLE: u8 = 4;

/// Prints an error with its chain of causes once, and turns it into the exit code.
pub fn code(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fabscope: {error:#}");
            let too_little = error.chain().any(|cause| {
                matches!(cause.downcast_ref(), Some(joiner::Error::TooLittle { .. }))
            });
            if too_little { ExitCode::from(TOO_LITTLE) } else { ExitCode::FAILURE }
        }
    }
}

/// Whether the reader of our output went away, as `head` does: that is no error.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
