//! Live views under way, and what they give: lines of JSON, and answers to scrapes.

use super::{FABSCOPE, Process, SOON};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// A live view under way, in a directory of its own.
#[derive(Debug)]
pub struct Live {
    pub process: Process,
    home: PathBuf,
}

impl Live {
    /// Starts `watch` or `serve` on one side of an SPDK process.
    pub fn start(home: &Path, subcommand: &str, side: &str, pid: u32, more: &[&str]) -> Result<Live> {
        fs::create_dir_all(home.join("work"))?;
        let process = Process::start(
            Command::new(FABSCOPE)
                .args([subcommand, side, "--spdk", &pid.to_string()])
                .args(more)
                .current_dir(home.join("work"))
                .stdout(File::create(home.join("out"))?)
                .stderr(File::create(home.join("err"))?),
        )?;
        Ok(Live { process, home: home.to_owned() })
    }

    /// What it printed.
    pub fn out(&self) -> String {
        fs::read_to_string(self.home.join("out")).unwrap_or_default()
    }

    /// What it said.
    pub fn err(&self) -> String {
        fs::read_to_string(self.home.join("err")).unwrap_or_default()
    }

    /// Waits until what it wrote to one of its outputs is as it should be.
    pub fn until(&mut self, what: impl Fn(&Live) -> bool) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while !what(self) {
            if let Some(status) = self.process.ended()? {
                bail!("it ended ({status}): {} {}", self.out(), self.err());
            }
            ensure!(Instant::now() < deadline, "it does not come: {} {}", self.out(), self.err());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits for a good end, and that nothing was left behind.
    pub fn ended(mut self) -> Result<(String, String)> {
        let status = self.process.wait(SOON)?;
        ensure!(status.success(), "{status}: {}", self.err());
        let left: Vec<_> =
            fs::read_dir(self.home.join("work"))?.flatten().map(|entry| entry.path()).collect();
        ensure!(left.is_empty(), "it left {left:?}");
        Ok((self.out(), self.err()))
    }
}

/// Lines of JSON.
pub fn lines(out: &str) -> Result<Vec<Value>> {
    let mut lines = Vec::new();
    for line in out.lines() {
        lines.push(serde_json::from_str(line).with_context(|| line.to_owned())?);
    }
    Ok(lines)
}

/// An answer to a request over a plain connection: status, headers, body.
pub fn ask(address: &str, request: &str) -> Result<(String, String, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    let (status, headers) = head.split_once("\r\n").context("no headers")?;
    Ok((status.to_owned(), headers.to_owned(), body.to_owned()))
}

const OPEN: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text\r\n\r\n";

/// The figures, as OpenMetrics.
pub fn scrape(address: &str) -> Result<String> {
    let (status, headers, body) = ask(address, OPEN)?;
    ensure!(
        status.ends_with("200 OK") && headers.contains("application/openmetrics-text"),
        "{status} {headers}"
    );
    ensure!(body.ends_with("\n# EOF\n"), "{body}");
    Ok(body)
}

/// The sum of a metric's samples.
pub fn sum(exposition: &str, name: &str) -> f64 {
    let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let values =
        exposition.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

/// The address that a server told.
pub fn address(live: &mut Live) -> Result<String> {
    live.until(|live| live.err().contains("/metrics\n"))?;
    let err = live.err();
    let at = err.find("http://").context("no address")?;
    Ok(err[at + 7..].split('/').next().unwrap_or_default().to_owned())
}
