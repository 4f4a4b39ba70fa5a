//! What `probe` prints for programs, `fabscope-probe/1`, which is also the baseline that a later build is compared
//! with.

use crate::price::{self, Priced};
use anyhow::{Context, Result, bail};
use kernel_probes::{Choice, Survey};
use run_format::{Boundary, Kind, Lack, Ladder, Rung, Side, Transport};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spdk_probes::{Build, Calibration, Comparison, Cost, EventOffer, Offer, SideOffer};
use std::fs;
use std::path::{Path, PathBuf};

/// Name and version of the format.
const FORMAT: &str = "fabscope-probe/1";
/// The format's name without its version.
const FORMAT_NAME: &str = "fabscope-probe/";
const COMPARISON_FORMAT: &str = "fabscope-probe-comparison/1";
/// More than this no baseline has.
const LARGEST: u64 = 16 << 20;

/// How a baseline is made.
fn how(side: Side) -> String {
    format!("make one with `fabscope probe {side} --spdk OLD --format json > FILE`")
}

/// What a side of some software can be recorded with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    format: String,
    /// Version of the fabscope that made it.
    pub tool: String,
    pub kind: Kind,
    /// The program, the process or the kernel.
    pub of: String,
    /// Release of the kernel that was asked what it offers.
    pub kernel: String,
    pub side: Side,
    /// The transports that are recorded.
    pub transports: Vec<Transport>,
    /// The ladder of each boundary, in the order a command passes them.
    pub boundaries: Vec<Ladder>,
    /// What else is watched.
    pub events: Vec<EventOffer>,
    /// What the uprobes cost, at prices that are the same on every machine; null where there are none.
    pub cost: Option<Cost>,
    /// What a command costs on this machine; null where only builds are compared.
    #[serde(default)]
    pub price: Option<Priced>,
    /// What keeps anything from being recorded.
    pub obstacles: Vec<String>,
    /// The other side, where the program has it.
    pub other_side: Option<SideOffer>,
    /// What SPDK's ladders stand on.
    pub build: Option<Build>,
}

impl Document {
    /// Of an SPDK program.
    pub fn of_spdk(of: String, offer: Offer, calibration: Option<&Calibration>) -> Document {
        let price = calibration.map(|calibration| Priced::new(calibration, offer.price(&calibration.prices)));
        let Offer { kernel, here, other_side, build } = offer;
        Document {
            format: FORMAT.into(),
            tool: env!("CARGO_PKG_VERSION").into(),
            kind: Kind::Spdk,
            of,
            kernel,
            side: here.side,
            transports: vec![Transport::Tcp],
            boundaries: here.boundaries,
            events: here.events,
            cost: Some(here.cost),
            price,
            obstacles: here.obstacles,
            other_side,
            build: Some(build),
        }
    }

    /// Of the running kernel.
    pub fn of_kernel(survey: &Survey, calibration: &Calibration) -> Document {
        Document {
            format: FORMAT.into(),
            tool: env!("CARGO_PKG_VERSION").into(),
            kind: Kind::Kernel,
            of: format!("kernel {}", survey.kernel),
            kernel: survey.kernel.clone(),
            side: survey.side,
            transports: survey.transports.clone(),
            boundaries: survey.boundaries.iter().filter_map(ladder).collect(),
            events: survey.others.iter().map(event).collect(),
            cost: None,
            price: Some(Priced::new(calibration, price::of_kernel(survey, &calibration.prices))),
            obstacles: survey.obstacles.clone(),
            other_side: None,
            build: None,
        }
    }

    /// As one of two that are compared; none for a kernel.
    fn offer(&self) -> Option<Offer> {
        let here = SideOffer {
            side: self.side,
            boundaries: self.boundaries.clone(),
            events: self.events.clone(),
            cost: self.cost.clone()?,
            obstacles: self.obstacles.clone(),
        };
        Some(Offer {
            kernel: self.kernel.clone(),
            here,
            other_side: self.other_side.clone(),
            build: self.build.clone()?,
        })
    }
}

fn rungs(choice: &Choice) -> Vec<Rung> {
    let rung = |way: &kernel_probes::Way| Rung {
        hook: way.hook.to_owned(),
        usable: way.obstacle.is_none(),
        measured: way.measured,
        whole: true,
        why: way.obstacle.clone(),
        lack: way.obstacle.as_ref().map(|_| Lack::Kernel),
        note: way.lack.map(str::to_owned),
        uprobes: Vec::new(),
    };
    choice.rungs.iter().map(rung).collect()
}

fn ladder(choice: &Choice) -> Option<Ladder> {
    Some(Ladder {
        boundary: choice.boundary?,
        transport: choice.transport,
        essential: choice.essential,
        chosen: choice.chosen,
        rungs: rungs(choice),
        without: choice.without.to_owned(),
    })
}

fn event(choice: &Choice) -> EventOffer {
    let used = choice.chosen.or((!choice.rungs.is_empty()).then_some(0));
    let way = used.and_then(|at| choice.rungs.get(at));
    let mut reasons: Vec<&str> = Vec::new();
    for reason in choice.rungs.iter().filter_map(|way| way.obstacle.as_deref()) {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    EventOffer {
        event: match choice.transport {
            Some(transport) => format!("{} ({})", choice.what, transport.name()),
            None => choice.what.to_owned(),
        },
        hook: way.map(|way| way.hook.to_owned()).unwrap_or_default(),
        why: choice.chosen.is_none().then(|| reasons.join("; ")),
        uprobes: Vec::new(),
    }
}

/// An earlier build's document, and where it is.
#[derive(Debug)]
pub struct Baseline {
    file: PathBuf,
    document: Document,
    offer: Offer,
}

impl Baseline {
    /// Reads the baseline of a side.
    ///
    /// # Errors
    /// When the file can not be read, or is no baseline of an SPDK build for this side; with what to do.
    pub fn read(file: &Path, side: Side) -> Result<Baseline> {
        let name = file.display();
        let how = how(side);
        let read = || -> std::io::Result<Vec<u8>> {
            use std::io::Read as _;
            // What is no file may never end, or never begin.
            if !fs::metadata(file)?.is_file() {
                return Err(std::io::Error::other(format!("it is no regular file; {how}")));
            }
            let mut bytes = Vec::new();
            fs::File::open(file)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().with_context(|| format!("read the baseline {name}"))?;
        if bytes.len() as u64 > LARGEST {
            bail!("{name} is no baseline: it has more than {} MiB; {how}", LARGEST >> 20);
        }
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| anyhow::anyhow!("{name} is damaged, or no baseline at all: {error}; {how}"))?;
        let Value::Object(members) = &value else {
            bail!("{name} is no baseline, which is what `fabscope probe` prints as JSON; {how}");
        };
        match members.get("format").map(|format| format.as_str().unwrap_or_default()) {
            Some(FORMAT) => {}
            Some(other) if other.starts_with(FORMAT_NAME) => bail!(
                "{name} was made by another version of fabscope: its format is {other:?}, this one reads {FORMAT:?}; make it anew"
            ),
            Some(other) => bail!("{name} is no baseline: its format is {other:?}, not {FORMAT:?}; {how}"),
            None => bail!("{name} is no baseline: it states no format; {how}"),
        }
        let damaged = |what: String| {
            anyhow::anyhow!("{name} says that it is a baseline ({FORMAT}), and is damaged: {what}; {how}")
        };
        // From the bytes, so that the error tells the place.
        let document: Document =
            serde_json::from_slice(&bytes).map_err(|error| damaged(plain(&error.to_string())))?;
        if document.side != side {
            bail!(
                "{name} is the baseline of a {}, and a {side} is looked at: use `fabscope probe {}`, or make a baseline with `fabscope probe {side} --spdk OLD --format json`",
                document.side,
                document.side
            );
        }
        let Some(offer) = document.offer() else {
            bail!("{name} is of {}, and --baseline compares builds of SPDK; {how}", document.of);
        };
        let mut sides = std::iter::once(&offer.here).chain(&offer.other_side);
        sides.try_for_each(consistent).map_err(damaged)?;
        Ok(Baseline { file: file.to_owned(), document, offer })
    }
}

/// A reader's error without the names that only the source has.
fn plain(error: &str) -> String {
    match error.split_once("expected struct ") {
        Some((before, after)) => {
            let rest = after.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
            format!("{before}expected an object{rest}")
        }
        None => error.to_owned(),
    }
}

/// Whether it is what a look at a program comes to: every boundary once, and the rung in use one that can be. The
/// error says what is not so. A comparison with less would hold whatever the new build is.
fn consistent(offer: &SideOffer) -> Result<(), String> {
    for boundary in Boundary::of(offer.side) {
        match offer.boundaries.iter().filter(|ladder| ladder.boundary == boundary).count() {
            0 => return Err(format!("it has no boundary {boundary}")),
            1 => {}
            count => return Err(format!("it has the boundary {boundary} {count} times")),
        }
    }
    for ladder in &offer.boundaries {
        let Ladder { boundary, rungs, .. } = ladder;
        if boundary.side() != offer.side {
            return Err(format!("{boundary} is no boundary of a {}", offer.side));
        }
        match ladder.chosen {
            Some(at) => match rungs.get(at) {
                None => return Err(format!("{boundary} uses rung {at}, and has {}", rungs.len())),
                Some(rung) if !rung.usable => {
                    return Err(format!("{boundary} uses rung {at}, which can not be used"));
                }
                Some(_) => {}
            },
            None if rungs.iter().any(|rung| rung.usable) => {
                return Err(format!("{boundary} uses no rung, and has one that can be used"));
            }
            None => {}
        }
    }
    Ok(())
}

/// What `probe --baseline` prints for programs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparisonDocument {
    format: &'static str,
    tool: &'static str,
    pub side: Side,
    pub baseline: Compared,
    pub new: Compared,
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// One of the two builds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The baseline's file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Version of the fabscope that looked at it.
    pub tool: String,
    /// The program or process.
    pub of: String,
    /// What it says that it is.
    pub version: Option<String>,
    pub build_id: Option<String>,
    /// The kernel that was asked.
    pub kernel: String,
}

impl ComparisonDocument {
    /// Compares.
    ///
    /// # Errors
    /// When the new one is no SPDK program.
    pub fn of(baseline: &Baseline, new: &Document) -> Result<ComparisonDocument> {
        let Some(offer) = new.offer() else {
            bail!("{} is no SPDK program, and --baseline compares builds of SPDK", new.of);
        };
        let mut comparison = baseline.offer.compare(&offer);
        if baseline.document.tool != new.tool {
            comparison.notes.push(format!(
                "the baseline was made by fabscope {}, this is {}: it may know other hooks",
                baseline.document.tool, new.tool
            ));
        }
        if let Some(obstacle) = baseline.document.obstacles.first() {
            comparison.notes.push(format!("the baseline's build could not be recorded itself: {obstacle}"));
        }
        let compared = |document: &Document, offer: &Offer, file: Option<&Path>| Compared {
            file: file.map(|file| file.display().to_string()),
            tool: document.tool.clone(),
            of: document.of.clone(),
            version: offer.build.version.as_ref().map(|version| version.text.clone()),
            build_id: offer.build.build_id.clone(),
            kernel: document.kernel.clone(),
        };
        Ok(ComparisonDocument {
            format: COMPARISON_FORMAT,
            tool: env!("CARGO_PKG_VERSION"),
            side: new.side,
            baseline: compared(&baseline.document, &baseline.offer, Some(&baseline.file)),
            new: compared(new, &offer, None),
            comparison,
        })
    }
}
