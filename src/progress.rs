//! The progress lines of a recording and of reading runs: on a terminal they move, elsewhere they are silent.

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use run_format::Counters;
use std::time::Duration;

/// Commands seen, recorded and lost, as they come.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A line for a recording of `total` length, or of unknown length. `quiet` shows nothing.
    pub fn new(total: Option<Duration>, quiet: bool) -> Progress {
        let bar = match total {
            Some(total) => ProgressBar::new(total.as_millis() as u64),
            None => ProgressBar::new_spinner(),
        };
        if quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let template = match total {
            Some(_) => "{bar:24} {elapsed} {msg}",
            None => "{spinner} {elapsed} {msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// Shows how far it is.
    pub fn update(&self, elapsed: Duration, counters: &Counters) {
        self.0.set_position(elapsed.as_millis() as u64);
        self.0.set_message(summary(counters));
    }

    /// Takes the line away.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// How far the reading of large runs is.
#[derive(Debug)]
pub struct Reading(ProgressBar);

impl Reading {
    /// A line that shows with the first news.
    pub fn new() -> Reading {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {percent} %, {eta} left, joining") {
            bar.set_style(style);
        }
        Reading(bar)
    }

    /// Shows that `done` is done `of` the work.
    pub fn update(&self, done: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(done);
    }

    /// Takes the line away.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// How many pairs of runs are done.
#[derive(Debug)]
pub struct Pairs(ProgressBar);

impl Pairs {
    /// A line that shows with the first news. `quiet` shows nothing.
    pub fn new(quiet: bool) -> Pairs {
        let bar = ProgressBar::new(0);
        if quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos} of {len} pairs, {eta} left") {
            bar.set_style(style);
        }
        Pairs(bar)
    }

    /// Shows that `done` are done `of` all.
    pub fn update(&self, done: usize, of: usize) {
        self.0.set_length(of as u64);
        self.0.set_position(done as u64);
    }

    /// Takes the line away.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// "12 345 commands seen, 12 340 recorded, 5 lost".
pub fn summary(c: &Counters) -> String {
    let mut text = format!("{} commands seen, {} recorded", count(c.seen), count(c.recorded));
    for (commands, what) in [
        (c.unsampled, "left out by sampling"),
        (c.no_start, "ended that had begun before"),
        (c.cut, "not whole within a window"),
        (c.in_flight, "not over at the end"),
    ] {
        if commands > 0 {
            text += &format!(", {} {what}", count(commands));
        }
    }
    text + &format!(", {} lost", count(c.lost.total()))
}

/// A number as the reports show it.
fn count(number: u64) -> String {
    HumanCount(number).to_string().replace(',', " ")
}
