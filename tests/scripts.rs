//! The project's own scripts: what is read from the tests' output to try those that failed once more.

use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::process::{Command, Stdio};

/// What `scripts/again.awk` makes of an output.
fn again(output: &str) -> Result<String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/again.awk");
    let mut awk = Command::new("awk")
        .args(["-f", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("awk")?;
    awk.stdin.take().context("its input")?.write_all(output.as_bytes())?;
    let said = awk.wait_with_output()?;
    ensure!(said.status.success());
    Ok(String::from_utf8(said.stdout)?)
}

#[test]
fn failed_tests_are_found_by_name_and_program() -> Result<()> {
    let output = "\
     Running unittests src/main.rs (target/debug/deps/fabscope-1)
running 3 tests
test a::b ... FAILED
test c ... ok
test d ... FAILED

failures:

---- a::b stdout ----
    no name, but what the test said
---- d stdout ----

failures:
    a::b
    d

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 7.61s

error: test failed, to rerun pass `-p fabscope --bin fabscope`
     Running tests/good.rs (target/debug/deps/good-1)
test e ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 7.61s
     Running tests/demo.rs (target/debug/deps/demo-1)
test f ... FAILED

failures:
    f

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 7.61s

error: test failed, to rerun pass `-p fabscope --test demo`
   Doc-tests testbed
test src/lib.rs - (line 7) ... FAILED

failures:
    src/lib.rs - (line 7)

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.61s

error: doctest failed, to rerun pass `-p testbed --doc`
error: 3 targets failed:
    `-p fabscope --bin fabscope`
    `-p fabscope --test demo`
    `-p testbed --doc`
";
    ensure!(
        again(output)? == "--bin fabscope\ta::b\td\n--test demo\tf\n--doc\tsrc/lib.rs - (line 7)\n",
        "{}",
        again(output)?
    );
    Ok(())
}

#[test]
fn a_program_that_crashed_has_no_names_whatever_failed_before() -> Result<()> {
    let output = "\
     Running tests/one.rs (target/debug/deps/one-1)
failures:
    f
test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 7.61s

error: test failed, to rerun pass `-p fabscope --test one`
     Running tests/two.rs (target/debug/deps/two-1)
test g ... FAILED
error: test failed, to rerun pass `-p fabscope --test two`

Caused by:
  process didn't exit successfully: `target/debug/deps/two-1` (signal: 9, SIGKILL: kill)
";
    ensure!(again(output)? == "--test one\tf\n--test two\n", "{}", again(output)?);
    ensure!(again("error: could not compile `x`\n")?.is_empty());
    Ok(())
}
