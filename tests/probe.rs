//! `fabscope probe`: the ladders as people and programs see them, and the check of a build against a baseline, on
//! the stand-in's programs and on what binary tools make of them.

mod support;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{FABSCOPE, Outcome, fabscope, outcome, schema};

fn standin(name: &str) -> Result<PathBuf> {
    standin::spawn::program(name)
}

fn probe(side: &str, program: &Path, more: &[&str]) -> Result<Outcome> {
    outcome(Command::new(FABSCOPE).args(["probe", side, "--spdk"]).arg(program).args(more))
}

/// What `probe --format json` says, checked against its schema.
fn document(side: &str, program: &Path, code: i32, more: &[&str]) -> Result<Value> {
    let said = probe(side, program, &[&["--format", "json"], more].concat())?.expect(code, &[])?;
    let value = serde_json::from_str(&said.stdout)?;
    schema::check(&value, &of_schema("probe")?)?;
    Ok(value)
}

/// The same with a baseline.
fn comparison(program: &Path, baseline: &Path, code: i32, more: &[&str]) -> Result<Value> {
    let baseline = baseline.to_str().context("a path in UTF-8")?;
    let more = [&["--format", "json", "--baseline", baseline], more].concat();
    let said = probe("target", program, &more)?.expect(code, &[])?;
    let value = serde_json::from_str(&said.stdout)?;
    schema::check(&value, &of_schema("probe-baseline")?)?;
    Ok(value)
}

fn of_schema(of: &str) -> Result<Value> {
    Ok(serde_json::from_str(&fabscope(["schema", of])?.expect(0, &[])?.stdout)?)
}

/// A baseline of the stand-in's target, in a file.
fn baseline(folder: &Path) -> Result<PathBuf> {
    let file = folder.join("hooks.json");
    let value = document("target", &standin("standin-target")?, 0, &[])?;
    fs::write(&file, value.to_string())?;
    Ok(file)
}

/// What a binary tool makes of the stand-in's target.
fn made(folder: &Path, tool: &str, arguments: &[&str]) -> Result<PathBuf> {
    let to = folder.join("made");
    outcome(Command::new(tool).args(arguments).arg(standin("standin-target")?).arg(&to))?.expect(0, &[])?;
    Ok(to)
}

fn ladder<'a>(document: &'a Value, boundary: &str) -> Result<&'a Value> {
    let all = document["boundaries"].as_array().context("boundaries")?;
    all.iter().find(|ladder| ladder["boundary"] == boundary).with_context(|| boundary.to_owned())
}

fn verdict(comparison: &Value, boundary: &str) -> Result<String> {
    let verdict = ladder(comparison, boundary)?["verdict"].as_str().context("a verdict")?;
    Ok(verdict.to_owned())
}

#[test]
fn the_whole_ladder_is_told_of_both_sides() -> Result<()> {
    let target = document("target", &standin("standin-target")?, 0, &[])?;
    let submit = ladder(&target, "t_submit")?;
    ensure!(submit["chosen"] == 0 && submit["rungs"].as_array().is_some_and(|r| r.len() == 2), "{submit}");
    ensure!(submit["rungs"][1]["usable"] == true && submit["rungs"][1]["measured"] == false, "{submit}");
    let spot = &submit["rungs"][0]["uprobes"][0];
    ensure!(spot["symbol"] == "bdev_io_submit" && spot["estimated_ns"].as_u64() > Some(0), "{spot}");
    ensure!(ladder(&target, "t_recv")?["essential"] == true);
    // A read enters the state machine three times, of which the last is no boundary, and passes submission.
    let price = &target["cost"]["per_command"]["read"];
    ensure!(price["hits"] == 3, "{price}");
    ensure!(price["estimated_ns"].as_u64() <= price["at_entry_ns"].as_u64(), "{price}");
    let build = &target["build"];
    ensure!(build["version"]["product"] == "stand-in" && build["knowledge"] == "dwarf", "{build}");
    ensure!(build["members"]["spdk_nvmf_tcp_req.state"]["size"] == 4, "{build}");
    let functions = &build["functions"]["nvmf_tcp_req_process"];
    ensure!(functions["copies"][0]["arguments_by"] == "dwarf", "{functions}");
    ensure!(build["usdt"].as_object().is_some_and(|probes| !probes.is_empty()), "{build}");

    let host = document("host", &standin("standin-initiator")?, 0, &[])?;
    ensure!(ladder(&host, "h_done")?["essential"] == true && host["other_side"].is_null());
    Ok(())
}

#[test]
fn people_see_what_is_below_and_with_detail_every_rung() -> Result<()> {
    let program = standin("standin-target")?;
    let short = probe("target", &program, &[])?.expect(0, &[])?.stdout;
    for text in
        ["t_submit", "below: uprobe spdk_nvmf_request_exec (another moment)", "a command costs: read "]
    {
        ensure!(short.contains(text), "{text:?} in {short}");
    }
    // One price, that of this machine.
    ensure!(!short.contains("estimated price"), "{short}");
    let long = probe("target", &program, &["--detail"])?.expect(0, &[])?.stdout;
    for text in ["  * 0 uprobe bdev_io_submit", "  + 1 uprobe spdk_nvmf_request_exec", "without any: storage"]
    {
        ensure!(long.contains(text), "{text:?} in {long}");
    }
    Ok(())
}

#[test]
fn a_file_needs_no_rights_and_comes_out_the_same() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        support::skipped("only root can run a program as another user");
        return Ok(());
    }
    let here = tempfile::tempdir()?;
    let open = |path: &Path| -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let copy = here.path().join(path.file_name().context("a name")?);
        fs::copy(path, &copy)?;
        for path in [here.path(), &copy] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(copy)
    };
    let (command, program) = (open(Path::new(FABSCOPE))?, open(&standin("standin-target")?)?);
    let of = |uid: u32| -> Result<Value> {
        let mut command = Command::new(&command);
        command.args(["probe", "target", "--format", "json", "--spdk"]).arg(&program).uid(uid).gid(uid);
        Ok(serde_json::from_str(&outcome(&mut command)?.expect(0, &[])?.stdout)?)
    };
    let (root, nobody) = (of(0)?, of(65534)?);
    ensure!(root["build"] == nobody["build"] && root["cost"] == nobody["cost"]);
    for boundary in ["t_recv", "t_submit", "t_done", "t_resp"] {
        ensure!(ladder(&root, boundary)? == ladder(&nobody, boundary)?, "{boundary}");
    }
    Ok(())
}

#[test]
fn what_a_recording_would_fail_at_is_an_obstacle() -> Result<()> {
    let here = tempfile::tempdir()?;
    // Symbols without types.
    let program = made(here.path(), "objcopy", &["--strip-debug"])?;
    let value = document("target", &program, 1, &[])?;
    let obstacles = value["obstacles"].to_string();
    ensure!(obstacles.contains("no debug information") && obstacles.contains("--save-layout"), "{obstacles}");
    ensure!(value["build"]["knowledge"] == "symbols" && value["build"]["members"] == json!({}));
    let said = probe("target", &program, &[])?.expect(1, &[])?.stdout;
    ensure!(said.contains("can not record:") && said.contains("structures unknown"), "{said}");

    // The state machine is gone from the symbols: the rest of the ladder is still told.
    let program = made(here.path(), "objcopy", &["--strip-symbol=nvmf_tcp_req_process", "-g"])?;
    let value = document("target", &program, 1, &[])?;
    ensure!(ladder(&value, "t_recv")?["chosen"].is_null());
    ensure!(ladder(&value, "t_submit")?["chosen"] == 0);
    Ok(())
}

#[test]
fn the_kernel_s_ladders_have_the_same_shape() -> Result<()> {
    if !support::can_trace() {
        return Ok(());
    }
    for side in ["host", "target"] {
        let said = fabscope(["probe", side, "--kernel", "--format", "json"])?;
        let value: Value = serde_json::from_str(&said.stdout).with_context(|| format!("{said:#?}"))?;
        schema::check(&value, &of_schema("probe")?)?;
        ensure!(value["kind"] == "kernel" && value["build"].is_null());
        let obstacles = value["obstacles"].as_array().context("obstacles")?;
        ensure!(said.code == Some(i32::from(!obstacles.is_empty())), "{said:#?}");
        let table = fabscope(["probe", side, "--kernel"])?.stdout;
        ensure!(!table.contains("per hit") && !table.contains("instruction"), "{table}");
        let loaded = value["transports"].as_array().is_some_and(|all| !all.is_empty());
        ensure!(loaded || table.matches(" is loaded").count() == 1, "{table}");
        ensure!(
            loaded
                || value["boundaries"]
                    .as_array()
                    .is_some_and(|all| all.iter().all(|l| l["chosen"].is_null()))
        );
        // What keeps it from recording is said before any boundary.
        let obstacle = table.find("can not record:");
        ensure!(obstacle.is_none_or(|at| Some(at) < table.find("boundary  ")), "{table}");
        ensure!(obstacle.is_none() == obstacles.is_empty(), "{table}");
        // Of one kernel, its own ladders and SPDK's say the same.
        let refuses = "the kernel refuses fentry programs";
        let of_spdk = document("target", &standin("standin-target")?, 0, &[])?.to_string();
        ensure!(of_spdk.contains(refuses) == value.to_string().contains(refuses), "{value}");
    }
    Ok(())
}

#[test]
fn a_build_holds_against_itself_also_stripped_with_its_layout() -> Result<()> {
    let here = tempfile::tempdir()?;
    let file = baseline(here.path())?;
    let program = standin("standin-target")?;
    let same = comparison(&program, &file, 0, &[])?;
    ensure!(same["holds"] == true && same["changes"] == json!([]), "{same}");
    ensure!(same["notes"].to_string().contains("both are one build"), "{same}");
    let said = probe("target", &program, &["--baseline", &file.display().to_string()])?.expect(0, &[])?;
    ensure!(said.stdout.contains("holds: every boundary of the target"), "{said:#?}");

    let layout = here.path().join("layout").display().to_string();
    probe("target", &program, &["--save-layout", &layout])?.expect(0, &["layout of build-id"])?;
    let stripped = made(here.path(), "objcopy", &["--strip-all"])?;
    let same = comparison(&stripped, &file, 0, &["--layout", &layout])?;
    ensure!(same["holds"] == true && same["changes"] == json!([]), "{same}");
    ensure!(same["notes"].to_string().contains("a layout file"), "{same}");
    // Without it nothing can be said, which is no verdict.
    let baseline = file.display().to_string();
    probe("target", &stripped, &["--baseline", &baseline])?.expect(1, &["stripped", "--save-layout"])?;

    let nameless = made(here.path(), "objcopy", &["--remove-section=.note.gnu.build-id"])?;
    probe("target", &nameless, &["--save-layout", &layout])?
        .expect(1, &["no layout file can be made", "no build-id"])?;
    Ok(())
}

#[test]
fn what_no_longer_resolves_is_named_and_exits_with_3() -> Result<()> {
    let here = tempfile::tempdir()?;
    let file = baseline(here.path())?;
    // Without its types the symbol table alone tells of functions.
    for (symbol, boundary, expected) in
        [("bdev_io_submit", "t_submit", "worse"), ("nvmf_tcp_req_process", "t_recv", "lost")]
    {
        let layout = here.path().join("layout").display().to_string();
        let strip = format!("--strip-symbol={symbol}");
        let program = made(here.path(), "objcopy", &[&strip])?;
        probe("target", &program, &["--save-layout", &layout])?;
        let program = made(here.path(), "objcopy", &[&strip, "--strip-debug"])?;
        let value = comparison(&program, &file, 3, &["--layout", &layout])?;
        ensure!(value["holds"] == false && verdict(&value, boundary)? == expected, "{value}");
        let gone = json!({ "weight": "gone", "what": "function", "name": symbol, "was": symbol, "is": null });
        ensure!(value["changes"].as_array().is_some_and(|all| all.contains(&gone)), "{value}");
        let baseline = file.display().to_string();
        let said =
            probe("target", &program, &["--layout", &layout, "--baseline", &baseline])?.expect(3, &[])?;
        ensure!(said.stdout.contains("does not hold:") && said.stdout.contains(boundary), "{said:#?}");
    }

    // What would keep a recording from starting takes every boundary.
    let program = made(here.path(), "objcopy", &["--strip-debug"])?;
    let value = comparison(&program, &file, 3, &[])?;
    for boundary in ["t_recv", "t_submit", "t_sent"] {
        ensure!(verdict(&value, boundary)? == "lost", "{value}");
    }
    Ok(())
}

#[test]
fn what_moved_and_holds_is_told_and_exits_with_0() -> Result<()> {
    let here = tempfile::tempdir()?;
    let file = baseline(here.path())?;
    let mut value: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    let build = &mut value["build"];
    build["members"]["spdk_nvmf_tcp_req.state"]["offset"] = json!(920);
    build["functions"]["bdev_io_submit"]["copies"][0]["arguments"] = json!(["rsi"]);
    build["usdt"]["spdk:nvmf_request_io_exec_path"] = json!([["8@rdx", "8@rbx"]]);
    build["version"]["text"] = json!("an older one");
    fs::write(&file, value.to_string())?;
    let moved = comparison(&standin("standin-target")?, &file, 0, &[])?;
    ensure!(moved["holds"] == true && moved["baseline"]["version"] == "an older one", "{moved}");
    let named: Vec<(&str, &str)> = moved["changes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|change| Some((change["what"].as_str()?, change["name"].as_str()?)))
        .collect();
    let expected = [
        ("argument", "bdev_io_submit"),
        ("member", "spdk_nvmf_tcp_req.state"),
        ("usdt", "spdk:nvmf_request_io_exec_path"),
    ];
    ensure!(named == expected, "{named:?}");
    Ok(())
}

#[test]
fn a_baseline_that_is_none_is_refused_with_the_way_out() -> Result<()> {
    let here = tempfile::tempdir()?;
    let file = baseline(here.path())?;
    let whole = fs::read_to_string(&file)?;
    let program = standin("standin-target")?;
    let name = file.display().to_string();
    let refused = |text: &[u8], expected: &[&str]| -> Result<()> {
        fs::write(&file, text)?;
        probe("target", &program, &["--baseline", &name])?
            .expect(1, &[&[name.as_str()], expected].concat())?;
        Ok(())
    };
    refused(b"", &["damaged", "--format json > FILE"])?;
    refused(b"hello", &["damaged"])?;
    refused(b"{}", &["states no format"])?;
    refused(br#"{"format":"fabscope-report/1"}"#, &["its format is \"fabscope-report/1\""])?;
    refused(br#"{"format":"fabscope-probe/2"}"#, &["another version of fabscope", "make it anew"])?;
    refused(br#"{"format":"fabscope-probe/1"}"#, &["and is damaged", "missing field"])?;
    for part in 1..16 {
        refused(&whole.as_bytes()[..whole.len() * part / 16], &["damaged"])?;
    }
    let changed = |change: &dyn Fn(&mut Value)| -> Result<Vec<u8>> {
        let mut value: Value = serde_json::from_str(&whole)?;
        change(&mut value);
        Ok(value.to_string().into_bytes())
    };
    refused(&changed(&|v| v["side"] = json!("host"))?, &["of a host, and a target is looked at"])?;
    refused(&changed(&|v| v["build"] = json!(null))?, &["compares builds of SPDK"])?;
    refused(&changed(&|v| v["boundaries"] = json!("many"))?, &["and is damaged"])?;
    refused(&changed(&|v| v["boundaries"][0]["chosen"] = json!(-1))?, &["and is damaged"])?;
    // One that tells less than it should would hold against any build.
    let first = |v: &Value| v["boundaries"][0].clone();
    refused(&changed(&|v| v["boundaries"] = json!([]))?, &["and is damaged", "it has no boundary t_recv"])?;
    refused(&changed(&|v| v["boundaries"] = json!([first(v)]))?, &["it has no boundary t_r2t"])?;
    refused(&changed(&|v| v["boundaries"][1] = first(v))?, &["the boundary t_recv 2 times"])?;
    refused(&changed(&|v| v["boundaries"][0]["chosen"] = json!(99))?, &["t_recv uses rung 99"])?;
    refused(&changed(&|v| v["boundaries"][0]["chosen"] = json!(null))?, &["t_recv uses no rung"])?;
    let unusable = |v: &mut Value| v["boundaries"][0]["rungs"][0]["usable"] = json!(false);
    refused(&changed(&unusable)?, &["and is damaged", "can not be used"])?;
    refused(&changed(&|v| v["boundaries"][2] = json!([1]))?, &["and is damaged"])?;
    for (text, expected) in
        [("null", "no baseline, which is what `fabscope probe` prints"), ("[]", "as JSON")]
    {
        refused(text.as_bytes(), &[expected, "--format json > FILE"])?;
    }
    fs::write(&file, changed(&|v| v["boundaries"][0] = json!("none"))?)?;
    let said = probe("target", &program, &["--baseline", &name])?.expect(1, &["expected an object"])?;
    ensure!(!said.stderr.contains("struct"), "{said:#?}");

    // What would never come is not waited for.
    let fifo = here.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)?;
    let fifo = fifo.display().to_string();
    for none in [fifo.as_str(), "/dev/zero"] {
        probe("target", &program, &["--baseline", none])?.expect(1, &[none, "no regular file"])?;
    }

    let huge = fs::File::create(&file)?;
    huge.set_len(1 << 40)?;
    probe("target", &program, &["--baseline", &name])?.expect(1, &["more than 16 MiB"])?;
    for none in ["/no/such/file", "/"] {
        probe("target", &program, &["--baseline", none])?.expect(1, &["read the baseline", none])?;
    }
    fabscope(["probe", "target", "--kernel", "--baseline", &name])?.expect(2, &["--baseline"])?;
    Ok(())
}
