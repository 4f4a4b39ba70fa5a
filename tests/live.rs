//! Looking at one side live, on the stand-in: as lines, on a terminal, and scraped; what ends it, and that it leaves
//! nothing behind. As root, where uprobes are allowed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use standin::{Initiator, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use support::live::{Live, address, ask, lines, scrape, sum};
use support::load::{Load, against};
use support::{FABSCOPE, Process, SOON, can_trace, fabscope, schema, skipped, turn};

const SECOND: Duration = Duration::from_secs(1);

/// A load that does nothing but what its summary counts: it neither prepares nor checks.
fn plain_load(duration: Duration) -> Result<Load> {
    let target = Target::spawn(Vec::<String>::new())?;
    let address = target.address().to_string();
    let duration = format!("{}ms", duration.as_millis());
    let arguments = ["--connect", &address, "--rw", "randrw", "--queue-depth", "4", "--duration", &duration];
    let initiator = Initiator::spawn(arguments)?;
    Ok(Load { target, initiator })
}

/// Commands since the start, of all classes.
fn commands(view: &Value) -> u64 {
    let classes = view["classes"].as_array().map_or(&[][..], Vec::as_slice);
    classes.iter().filter_map(|class| class["commands_since_start"].as_u64()).sum()
}

#[test]
fn lines_are_what_their_schema_says_and_count_every_command() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let schema: Value = serde_json::from_str(&fabscope(["schema", "watch"])?.expect(0, &[])?.stdout)?;
    let mut load = plain_load(4 * SECOND)?;
    let pid = load.target.pid();
    let mut live =
        Live::start(home.path(), "watch", "target", pid, &["--format", "json", "--interval", "500ms"])?;
    // All probes are in place with the first line.
    live.until(|live| live.out().contains('\n'))?;
    load.initiator.start()?;
    let summary = load.initiator.finish()?;
    ensure!(summary.errors == 0, "{summary:?}");
    live.process.signal(Signal::SIGINT)?;
    let (out, err) = live.ended()?;
    ensure!(err.contains("ended by a signal"), "{err}");
    load.target.stop()?;

    let lines = lines(&out)?;
    for line in &lines {
        schema::check(line, &schema)?;
    }
    let last = lines.last().context("no lines")?;
    ensure!(commands(last) == summary.commands, "{} of {}", commands(last), summary.commands);
    ensure!(last["counters"]["lost"].as_object().is_some_and(|lost| lost.values().all(|n| n == 0)), "{last}");
    // Each interval's commands add up to all.
    let sum: u64 = lines.iter().filter_map(|line| line["totals"]["commands"].as_u64()).sum();
    ensure!(sum == summary.commands, "{sum} of {}", summary.commands);
    let busy = lines.iter().max_by_key(|line| line["totals"]["commands"].as_u64()).context("no lines")?;
    let class = &busy["classes"][0];
    for pointer in ["/stages/storage/mean_ns", "/stages/target_driver/mean_ns", "/latency/p50_ns", "/iops"] {
        ensure!(
            class.pointer(pointer).and_then(Value::as_f64).is_some_and(|v| v > 0.0),
            "{pointer}: {class}"
        );
    }
    ensure!(busy["queues"][0]["host"].as_str().is_some_and(|host| host.starts_with("127.0.0.1:")), "{busy}");
    let telemetry = lines.iter().filter_map(|line| line["telemetry"].as_array()).flatten();
    let seen: BTreeSet<&str> = telemetry.filter_map(|metric| metric["collector"].as_str()).collect();
    ensure!(seen.contains("tcp") && seen.contains("cpu"), "{seen:?}");
    Ok(())
}

#[test]
fn a_count_ends_it_in_windows_and_samples_too_and_text_is_for_persons() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let load = Load::running("read", 4, 14 * SECOND)?;
    let pid = load.target.pid();
    let (out, err) =
        Live::start(home.path(), "watch", "target", pid, &["--count", "2", "--telemetry", "off"])?.ended()?;
    for part in ["target spdk fabscope stand-in", " IOPS, ", "read 4 KiB", "storage ", "queue 1/1"] {
        ensure!(out.contains(part), "{part} in {out}");
    }
    ensure!(out.matches("boundaries measured").count() == 2, "{out}");
    ensure!(!out.contains("telemetry") && !out.contains('\u{1b}'), "{out}");
    ensure!(err.contains("as many intervals as were asked for"), "{err}");

    let more = ["--count", "5", "--window", "100ms/400ms", "--sample", "2", "--format", "json"];
    let (out, _) = Live::start(home.path(), "watch", "target", pid, &more)?.ended()?;
    let lines = lines(&out)?;
    let last = lines.last().context("no lines")?;
    ensure!(last["one_in"] == 2 && last["windows"]["slices"].as_u64() > Some(3), "{last}");
    let some = lines.iter().filter(|line| line["totals"]["commands"].as_u64() > Some(0));
    for line in some {
        // Rates are those of all commands while the probes were armed.
        let (commands, seconds) = (&line["totals"]["commands"], &line["stretch"]["seconds"]);
        let rate = commands.as_f64().context("commands")? * 2.0 / seconds.as_f64().context("seconds")?;
        let iops = line["totals"]["iops"].as_f64().context("iops")?;
        ensure!((rate - iops).abs() < 1.0 && seconds.as_f64() < Some(0.9), "{line}");
    }
    load.unharmed()?;
    Ok(())
}

#[test]
fn the_end_of_the_target_ends_it_and_nothing_is_left() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let load = Load::running("read", 2, 20 * SECOND)?;
    let mut live = Live::start(home.path(), "watch", "target", load.target.pid(), &["--interval", "200ms"])?;
    live.until(|live| live.out().contains("read 4 KiB"))?;
    kill(Pid::from_raw(load.target.pid().cast_signed()), Signal::SIGKILL)?;
    let (_, err) = live.ended()?;
    ensure!(err.contains("the recorded process ended"), "{err}");

    // What can not be recorded is told as by record.
    fabscope(["watch", "target", "--spdk", "4194304"])?.expect(1, &["4194304"])?;
    fabscope(["watch", "target", "--interval", "1ms"])?.expect(2, &["from 100ms to 1h"])?;
    fabscope(["watch", "target", "--count", "0"])?.expect(2, &["--count"])?;
    fabscope(["watch", "target", "--kernel", "--source", "trace"])?.expect(2, &["--source"])?;
    Ok(())
}

#[test]
fn on_a_terminal_it_draws_and_q_gives_the_terminal_back() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    if Command::new("script").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        skipped("there is no script(1), which makes a terminal");
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let load = Load::running("read", 2, 90 * SECOND)?;
    let path = |name: &str| home.path().join(name).display().to_string();
    // How the terminal is set up is the same before and after.
    let run = |name: &str, more: &str| {
        format!(
            "stty cols 140 rows 40; stty -g > {}; {FABSCOPE} watch target --spdk {} --interval 200ms {more} 2> {}; echo code $? > {}; stty -g > {}",
            path(&format!("{name}.before")),
            load.target.pid(),
            path(&format!("{name}.err")),
            path(&format!("{name}.code")),
            path(&format!("{name}.after"))
        )
    };
    for (name, end) in [("key", "q"), ("interrupt", "\u{3}"), ("signal", "")] {
        let typescript = path(&format!("{name}.typescript"));
        let mut child = Command::new("script")
            .args(["-q", "-f", "-c", &run(name, ""), &typescript])
            .env("TERM", "xterm-256color")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let mut keys = child.stdin.take().context("its keys")?;
        let shown = || String::from_utf8_lossy(&fs::read(&typescript).unwrap_or_default()).into_owned();
        let until = |text: &str| -> Result<()> {
            let deadline = Instant::now() + SOON;
            while !shown().contains(text) {
                ensure!(Instant::now() < deadline, "{text} does not come: {}", shown());
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        };
        until("\u{1b}[?1049h")?;
        until("KiB")?;
        if end.is_empty() {
            let found = Command::new("pgrep")
                .args(["-f", &format!("{FABSCOPE} watch target --spdk {}", load.target.pid())])
                .output()?;
            let pids = String::from_utf8(found.stdout)?;
            for pid in pids.split_whitespace() {
                let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                if program == fs::canonicalize(FABSCOPE)? {
                    kill(Pid::from_raw(pid.parse()?), Signal::SIGTERM)?;
                }
            }
        } else {
            keys.write_all(b"2")?;
            until("1/1")?;
            keys.write_all(b"?")?;
            until("Ctrl-C")?;
            keys.write_all(end.as_bytes())?;
        }
        let deadline = Instant::now() + SOON;
        while !Path::new(&path(&format!("{name}.after"))).exists()
            || fs::read(path(&format!("{name}.after")))?.is_empty()
        {
            ensure!(Instant::now() < deadline, "{name} does not end it");
            thread::sleep(Duration::from_millis(20));
        }
        drop(keys);
        child.wait()?;
        let read = |what: &str| fs::read_to_string(path(&format!("{name}.{what}")));
        ensure!(read("code")?.trim() == "code 0", "{name}: {} {}", read("code")?, read("err")?);
        ensure!(read("before")? == read("after")?, "{name}: {} and {}", read("before")?, read("after")?);
        let shown = shown();
        let (on, off) = (shown.rfind("\u{1b}[?1049h"), shown.rfind("\u{1b}[?1049l"));
        ensure!(
            on.is_some() && on < off && shown.rfind("\u{1b}[?25l") < shown.rfind("\u{1b}[?25h"),
            "{name}"
        );
        ensure!(read("err")?.contains("commands seen"), "{name}: {}", read("err")?);
    }
    load.initiator.finish()?;
    load.target.stop()?;
    Ok(())
}

/// The names of this project's metrics in a text.
fn metrics(text: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !word(c)).filter(|w| w.starts_with("fabscope_")).map(str::to_owned).collect()
}

#[test]
fn scrapes_have_what_the_target_did_and_the_examples_use_what_is_there() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let mut load = plain_load(10 * SECOND)?;
    let pid = load.target.pid();
    let mut live =
        Live::start(home.path(), "serve", "target", pid, &["--listen", "127.0.0.1:0", "--queues"])?;
    let address = address(&mut live)?;
    ensure!(!live.err().contains("not a loopback address"), "{}", live.err());
    // The same port can not be had twice, which is told before anything is attached.
    let taken = fabscope(["serve", "target", "--spdk", &pid.to_string(), "--listen", &address])?;
    taken.expect(1, &["listen on", "--listen"])?;
    fabscope(["serve", "target", "--listen", "localhost:9966"])?.expect(2, &["such as 127.0.0.1:9966"])?;
    load.initiator.start()?;
    let deadline = Instant::now() + SOON;
    // The connections' telemetry goes when they do.
    let meanwhile = loop {
        let meanwhile = scrape(&address)?;
        if sum(&meanwhile, "fabscope_commands_total") > 0.0
            && sum(&meanwhile, "fabscope_telemetry_tcp_sent_bytes_total") > 0.0
        {
            break meanwhile;
        }
        ensure!(Instant::now() < deadline, "{meanwhile}");
        thread::sleep(SECOND / 4);
    };
    examples_use(&meanwhile)?;
    // Slow, wrong and many clients do no harm.
    let mut slow: Vec<TcpStream> = Vec::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(&address)?;
        stream.write_all(b"GET /met")?;
        slow.push(stream);
    }
    drop(slow);
    let summary = load.initiator.finish()?;
    ensure!(summary.errors == 0 && summary.verify_errors == 0, "{summary:?}");
    let deadline = Instant::now() + SOON;
    let all = loop {
        let all = scrape(&address).unwrap_or_default();
        if sum(&all, "fabscope_commands_total") == summary.commands as f64 {
            break all;
        }
        ensure!(Instant::now() < deadline, "{} commands were done: {all}", summary.commands);
        thread::sleep(SECOND / 4);
    };
    for name in
        ["fabscope_latency_seconds_count", "fabscope_queue_commands_total", "fabscope_seen_commands_total"]
    {
        ensure!(sum(&all, name) == summary.commands as f64, "{name}: {all}");
    }
    ensure!(sum(&all, "fabscope_stage_seconds_count") == 3.0 * summary.commands as f64);
    ensure!(sum(&all, "fabscope_lost_commands_total") == 0.0);

    // Other answers.
    let (status, headers, body) = ask(&address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    ensure!(status.ends_with("200 OK") && headers.contains("text/plain; version=0.0.4"), "{headers}");
    ensure!(body.contains("# TYPE fabscope_commands_total counter\n") && !body.contains("# EOF"));
    ensure!(ask(&address, "GET /healthz HTTP/1.1\r\n\r\n")?.2 == "ok\n");
    ensure!(ask(&address, "GET /x HTTP/1.1\r\n\r\n")?.0.contains("404"));
    ensure!(ask(&address, "DELETE /metrics HTTP/1.1\r\n\r\n")?.0.contains("405"));

    live.process.signal(Signal::SIGTERM)?;
    live.ended()?;
    ensure!(TcpStream::connect(&address).is_err(), "it still listens");
    load.target.stop()?;
    Ok(())
}

/// Each metric of the example rules and of the dashboard is among those that are given.
fn examples_use(exposition: &str) -> Result<()> {
    let given: BTreeSet<String> = exposition
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(str::to_owned)
        .collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples");
    let rules = fs::read_to_string(folder.join("alerts-fabscope.yml"))?;
    let dashboard = fs::read_to_string(folder.join("grafana-fabscope.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    let mut expressions: Vec<String> = Vec::new();
    collect(&dashboard, &mut expressions);
    ensure!(expressions.len() >= 8, "{expressions:?}");
    let used = rules.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut used: BTreeSet<String> = used.flat_map(metrics).collect();
    ensure!(used.len() >= 3, "{used:?}");
    used.extend(expressions.iter().flat_map(|e| metrics(e)));
    let missing: Vec<&String> = used.iter().filter(|name| !given.contains(*name)).collect();
    ensure!(missing.is_empty(), "{missing:?} are not among {given:?}");
    Ok(())
}

/// All that stands under a key `expr`, or as a query of a variable.
fn collect(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value) {
                    ("expr" | "query", Value::String(expression)) => into.push(expression.clone()),
                    _ => collect(value, into),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
        _ => {}
    }
}

/// CPU time of a process so far, seconds.
fn cpu(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after = stat.rsplit(')').next().context("no name")?;
    let ticks: u64 = after.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
    let second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock ticks")?;
    Ok(ticks as f64 / second as f64)
}

/// What watching and serving take of a core, beside what recording takes: five rounds of the three in turn under one
/// load. `cargo test --workspace --test live -- --ignored --nocapture watching_costs` prints the figures for
/// docs/performance.md.
#[test]
#[ignore = "takes three minutes and a quiet machine"]
fn watching_costs_no_more_than_recording_and_two_percent_of_a_core() -> Result<()> {
    if !can_trace() {
        return Ok(());
    }
    let _turn = turn()?;
    let home = tempfile::tempdir()?;
    let target = Target::spawn(Vec::<String>::new())?;
    let pid = target.pid().to_string();
    let mut shares: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for round in 0..5 {
        let run = home.path().join(format!("{round}.run")).display().to_string();
        let ways: [(&str, Vec<&str>); 3] = [
            ("record", vec!["record", "target", "--spdk", &pid, "-q", "-o", &run]),
            ("watch", vec!["watch", "target", "--spdk", &pid]),
            ("serve", vec!["serve", "target", "--spdk", &pid, "--listen", "127.0.0.1:0"]),
        ];
        for (way, arguments) in ways {
            let err = home.path().join("err");
            let mut process = Process::start(
                Command::new(FABSCOPE)
                    .args(&arguments)
                    .stdout(Stdio::null())
                    .stderr(File::create(&err)?)
                    .current_dir(home.path()),
            )?;
            // Attaching is over well before.
            thread::sleep(5 * SECOND);
            let mut initiator = against(&target, "randrw", 4, 7 * SECOND)?;
            initiator.start()?;
            thread::sleep(SECOND);
            let (before, at) = (cpu(process.pid())?, Instant::now());
            // A scrape each second, far more often than anybody's.
            for _ in 0..5 {
                thread::sleep(SECOND);
                if way == "serve" {
                    let text = fs::read_to_string(&err)?;
                    let at = text.find("http://").context("no address")?;
                    scrape(text[at + 7..].split('/').next().unwrap_or_default())?;
                }
            }
            let share = (cpu(process.pid())? - before) / at.elapsed().as_secs_f64();
            let summary = initiator.finish()?;
            process.signal(Signal::SIGINT)?;
            process.wait(SOON)?;
            println!("{way}: {:.2} % of a core at {:.0} IOPS", share * 1e2, summary.iops);
            shares.entry(way).or_default().push((share, summary.iops));
        }
    }
    let mean = |way: &str| {
        let shares = &shares[way];
        shares.iter().map(|(share, _)| share).sum::<f64>() / shares.len() as f64
    };
    // A share of a command's cost: the load is not the same each time.
    let each = |way: &str| {
        let (share, iops) = shares[way].iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        share / iops * 1e6
    };
    for way in ["watch", "serve"] {
        let more = mean(way) - mean("record");
        println!(
            "{way} less record: {:+.2} % of a core; {:.2} and {:.2} us a command, ratio {:.2}",
            more * 1e2,
            each(way),
            each("record"),
            each(way) / each("record")
        );
        ensure!(more <= 0.02, "{way} costs {more} of a core more than record");
    }
    target.stop()?;
    Ok(())
}
