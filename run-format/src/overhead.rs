//! What recording cost the recorded, as `record --measure-overhead` found it. How it is found is the recorder's
//! business.

use serde::{Deserialize, Serialize};

/// The difference between windows with the probes armed and windows without, in pairs that lie side by side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// What counted the commands: something that counts them whether or not anything is armed.
    pub counter: String,
    /// Pairs of one armed and one idle window.
    pub pairs: u32,
    /// Length of each window.
    pub length_ns: u64,
    /// Commands a second in the idle windows, the mean over the pairs.
    pub idle_per_second: f64,
    /// Commands a second in the armed windows.
    pub armed_per_second: f64,
    /// The time that recording adds between one command's end and the next one's: where the load keeps one core
    /// busy, that core's added time a command; with one command outstanding, its added latency. Nanoseconds.
    pub added_ns: Option<Effect>,
    /// What recording adds to the CPU time that the recorded process takes for a command, where it is one. Of a process
    /// that polls and is saturated, that is what its hooks take, and in no part the time in which it waits for its CPU,
    /// which [`Overhead::added_ns`] has in it. Nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_ns: Option<Effect>,
    /// CPU time of the recorder itself for each command of the armed windows, on whatever CPU it ran. Nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorder_ns: Option<f64>,
    /// The share of the throughput that recording takes.
    pub lost: Option<Effect>,
    /// What recording adds to the mean latency, where the counter tells times as well. Nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Effect>,
    /// Why there is no figure, or what a reader should know of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A mean difference and how sure it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// The mean over the pairs; positive where recording costs.
    pub mean: f64,
    /// Lower end of its 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The smallest true difference that pairs like these would have shown four times in five.
    pub smallest: f64,
}

impl Effect {
    /// Whether the interval leaves no room for no difference.
    #[must_use]
    pub fn is_shown(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}
