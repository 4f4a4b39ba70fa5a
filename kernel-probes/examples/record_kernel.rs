//! Records the kernel's NVMe-oF host or target for a while and prints what came, as lines of text:
//! `hook`, `ready`, `queue`, `went`, `event`, `command` and `counters`, with tab-separated fields.

use clap::{Parser, ValueEnum};
use kernel_probes::{Host, Target};
use run_format::{Boundary, Command, Event, Nanos, Queue, QueueId, Side, Sink, Source};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Records the kernel's NVMe-oF host or target and prints every command.
#[derive(Debug, Parser)]
struct Arguments {
    /// Which of the two.
    side: Which,
    /// Only print what this kernel offers.
    #[arg(long)]
    survey: bool,
    /// Seconds to record.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// End sooner, when this file exists.
    #[arg(long)]
    until: Option<PathBuf>,
    /// Keep one command in this many.
    #[arg(long, default_value_t = 1)]
    one_in: u32,
    /// Bytes of the ring.
    #[arg(long, default_value_t = kernel_probes::Options::default().ring_bytes)]
    ring_bytes: u32,
    /// Commands in flight at once.
    #[arg(long, default_value_t = kernel_probes::Options::default().in_flight)]
    in_flight: u32,
    /// Do not use hooks whose name begins so.
    #[arg(long)]
    avoid: Vec<String>,
    /// Do not read the ring while recording, so that it fills.
    #[arg(long)]
    lazy: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Which {
    Host,
    Target,
}

struct Printer<W: Write> {
    side: Side,
    out: W,
    queues: u32,
}

impl<W: Write> Printer<W> {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // A closed pipe ends the program at its next flush.
        let _closed = writeln!(self.out, "{line}");
    }
}

impl<W: Write> Sink for Printer<W> {
    fn queue(&mut self, queue: Queue) -> QueueId {
        let id = self.queues;
        self.queues += 1;
        let end = |end: &Option<run_format::Endpoint>| {
            end.as_ref().map_or("-\t-".to_owned(), |end| format!("{}\t{}", end.address, end.port))
        };
        self.line(format_args!(
            "queue\t{id}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            queue.subsystem_nqn,
            queue.host_nqn,
            queue.cntlid,
            queue.qid,
            end(&queue.host),
            end(&queue.target),
            queue.device.as_deref().unwrap_or("-"),
            queue.served_by.as_deref().unwrap_or("-"),
            queue.came.0,
            queue.existed,
            queue.transport.name(),
        ));
        QueueId(id)
    }

    fn queue_is(&mut self, _: QueueId, _: Queue) {}

    fn queue_went(&mut self, id: QueueId, at: Nanos) {
        self.line(format_args!("went\t{}\t{}", id.0, at.0));
    }

    fn command(&mut self, c: &Command) {
        let times: Vec<String> = Boundary::of(self.side)
            .map(|boundary| c.time(boundary).map_or("-".to_owned(), |at| at.0.to_string()))
            .collect();
        self.line(format_args!(
            "command\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            c.queue.0,
            c.cid.0,
            c.opcode,
            c.nsid,
            c.slba,
            c.nlb0,
            c.bytes,
            c.status,
            c.cpu,
            c.flags,
            c.r2ts,
            c.stream_position.map_or("-".to_owned(), |p| p.to_string()),
            c.r2t_turnaround.map_or("-".to_owned(), |n| n.0.to_string()),
            c.drive.map_or("-".to_owned(), |n| n.0.to_string()),
            times.join("\t"),
        ));
    }

    fn event(&mut self, event: Event) {
        self.line(format_args!("event\t{}\t{}\t{}", event.at_ns.0, event.what, event.on));
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let side = match arguments.side {
        Which::Host => Side::Host,
        Which::Target => Side::Target,
    };
    if arguments.survey {
        return print_survey(side);
    }
    let options = kernel_probes::Options {
        one_in: arguments.one_in,
        ring_bytes: arguments.ring_bytes,
        in_flight: arguments.in_flight,
        avoid: arguments.avoid.clone(),
    };
    let start = Instant::now();
    match arguments.side {
        Which::Host => record(Host::attach(&options)?, start, &arguments),
        Which::Target => record(Target::attach(&options)?, start, &arguments),
    }
}

fn print_survey(side: Side) -> anyhow::Result<()> {
    let survey = kernel_probes::survey(side)?;
    println!("kernel\t{}", survey.kernel);
    for choice in survey.boundaries.iter().chain(&survey.others) {
        for (index, way) in choice.rungs.iter().enumerate() {
            let mark = if choice.chosen == Some(index) { "*" } else { " " };
            let obstacle = way.obstacle.as_deref().unwrap_or("-");
            println!("rung\t{}\t{mark}\t{}\t{obstacle}", choice.what, way.hook);
        }
    }
    for obstacle in &survey.obstacles {
        println!("obstacle\t{obstacle}");
    }
    Ok(())
}

fn record<S: Source>(mut source: S, start: Instant, arguments: &Arguments) -> anyhow::Result<()> {
    let mut printer = Printer { side: source.side(), out: BufWriter::new(std::io::stdout()), queues: 0 };
    for hook in source.hooks() {
        printer.line(format_args!(
            "hook\t{}\t{}\t{}\t{}\t{}\t{}",
            hook.boundary,
            hook.hook.as_deref().unwrap_or("-"),
            hook.rung,
            hook.measured,
            hook.why.as_deref().unwrap_or("-"),
            hook.transport.map_or("-", run_format::Transport::name),
        ));
    }
    printer.line(format_args!("ready\t{}", start.elapsed().as_millis()));
    printer.out.flush()?;
    let end = Instant::now() + Duration::from_secs_f64(arguments.seconds);
    while Instant::now() < end && !arguments.until.as_ref().is_some_and(|path| path.exists()) {
        if arguments.lazy {
            std::thread::sleep(Duration::from_millis(50));
        } else {
            source.poll(Duration::from_millis(100), &mut printer)?;
        }
    }
    source.stop(&mut printer)?;
    let c = source.counters()?;
    printer.line(format_args!(
        "counters\tseen\t{}\trecorded\t{}\tunsampled\t{}\tring_full\t{}\tmap_full\t{}\tunfinished\t{}\
         \tunreadable\t{}\tprobe_missed\t{}\tin_flight\t{}\tno_start\t{}",
        c.seen,
        c.recorded,
        c.unsampled,
        c.lost.ring_full,
        c.lost.map_full,
        c.lost.unfinished,
        c.lost.unreadable,
        c.lost.probe_missed,
        c.in_flight,
        c.no_start,
    ));
    printer.out.flush()?;
    Ok(())
}
