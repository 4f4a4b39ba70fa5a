//! The screen of `fabscope watch`: what it shows of a view, and which keys do what. It draws what it is given, and
//! computes nothing but bars and positions. How the terminal is taken and given back is in `terminal`.

use joiner::live::{ClassView, LiveView, Over, QueueView, StageView, byte_rate};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};
use run_format::Nanos;
use std::collections::VecDeque;

/// Slots whose figures the sparklines have.
const PAST: usize = 240;
/// Width of a full bar.
const BAR: usize = 24;
/// How a stage's part of a bar looks without colour, and with it.
const FILLS: [(&str, Color); 3] = [("█", Color::Yellow), ("▒", Color::Cyan), ("·", Color::DarkGray)];

/// A page of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Classes of commands.
    #[default]
    Classes,
    /// Queues.
    Queues,
    /// Telemetry.
    Telemetry,
}

impl Page {
    const ALL: [Page; 3] = [Page::Classes, Page::Queues, Page::Telemetry];

    fn title(self) -> &'static str {
        match self {
            Page::Classes => "1 classes",
            Page::Queues => "2 queues",
            Page::Telemetry => "3 telemetry",
        }
    }
}

/// What the rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// As they came.
    #[default]
    Order,
    /// Commands a second.
    Iops,
    /// Mean latency.
    Mean,
    /// 99th percentile.
    P99,
}

impl Sort {
    const ALL: [Sort; 4] = [Sort::Order, Sort::Iops, Sort::Mean, Sort::P99];

    fn name(self) -> &'static str {
        match self {
            Sort::Order => "as they came",
            Sort::Iops => "IOPS",
            Sort::Mean => "mean",
            Sort::P99 => "p99",
        }
    }
}

/// A key that the screen knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Press {
    /// A character.
    Char(char),
    /// The next page.
    Tab,
    /// The page before.
    BackTab,
    /// One row up or down.
    Up,
    /// One row down.
    Down,
    /// Sort by the column before.
    Left,
    /// Sort by the next column.
    Right,
    /// Ctrl-C, which ends as `q` does.
    Interrupt,
    /// Escape.
    Escape,
}

/// A class's or queue's figures over the last slots.
#[derive(Clone, Debug, Default)]
struct Past {
    name: String,
    iops: VecDeque<u64>,
    mean_ns: VecDeque<u64>,
}

/// What the user chose, and what was lately.
#[derive(Clone, Debug)]
pub struct Screen {
    page: Page,
    over: Over,
    sort: Sort,
    /// The row that is chosen.
    row: usize,
    help: bool,
    /// What is looked at while it is paused.
    frozen: bool,
    over_it: bool,
    past: Vec<Past>,
    has_colour: bool,
}

impl Screen {
    /// The first page, over ten slots.
    pub fn new(has_colour: bool) -> Screen {
        Screen {
            page: Page::default(),
            over: Over::Ten,
            sort: Sort::default(),
            row: 0,
            help: false,
            frozen: false,
            over_it: false,
            past: Vec::new(),
            has_colour,
        }
    }

    /// Which stretch of time is wanted.
    pub fn over(&self) -> Over {
        self.over
    }

    /// Whether the user has had enough.
    pub fn is_over(&self) -> bool {
        self.over_it
    }

    /// Whether what is shown stays as it is.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// A key was pressed.
    pub fn press(&mut self, key: Press) {
        let next = |all: &[Over], at: Over| {
            let place = all.iter().position(|o| *o == at).unwrap_or(0);
            all.get((place + 1) % all.len()).copied().unwrap_or_default()
        };
        let step = |by: usize| {
            let place = Page::ALL.iter().position(|p| *p == self.page).unwrap_or(0);
            Page::ALL.get((place + by) % Page::ALL.len()).copied().unwrap_or_default()
        };
        let sorted = |by: usize| {
            let place = Sort::ALL.iter().position(|s| *s == self.sort).unwrap_or(0);
            Sort::ALL.get((place + by) % Sort::ALL.len()).copied().unwrap_or_default()
        };
        match key {
            Press::Char('q') | Press::Interrupt => self.over_it = true,
            Press::Char('?' | 'h') => self.help = !self.help,
            Press::Escape => self.help = false,
            Press::Char('p' | ' ') => self.frozen = !self.frozen,
            Press::Char('w') => self.over = next(&Over::ALL, self.over),
            Press::Char('1') => self.turn(Page::Classes),
            Press::Char('2') => self.turn(Page::Queues),
            Press::Char('3') => self.turn(Page::Telemetry),
            Press::Tab => self.turn(step(1)),
            Press::BackTab => self.turn(step(Page::ALL.len() - 1)),
            Press::Up | Press::Char('k') => self.row = self.row.saturating_sub(1),
            // How many rows there are, drawing knows.
            Press::Down | Press::Char('j') => self.row = self.row.saturating_add(1),
            Press::Left => self.sort = sorted(Sort::ALL.len() - 1),
            Press::Right => self.sort = sorted(1),
            Press::Char(_) => {}
        }
    }

    fn turn(&mut self, page: Page) {
        self.page = page;
        self.row = 0;
    }

    /// A slot is over: its figures are remembered for the sparklines. `slot` is a view of it alone.
    pub fn remember(&mut self, slot: &LiveView) {
        for class in &slot.classes {
            let name = class.name();
            if !self.past.iter().any(|past| past.name == name) {
                self.past.push(Past { name, ..Past::default() });
            }
        }
        for past in &mut self.past {
            let class = slot.classes.iter().find(|class| class.name() == past.name);
            let iops = class.and_then(|class| class.totals.iops).unwrap_or(0.0);
            let mean = class.and_then(|class| class.latency).map_or(0.0, |latency| latency.mean_ns);
            for (values, value) in [(&mut past.iops, iops), (&mut past.mean_ns, mean)] {
                if values.len() == PAST {
                    values.pop_front();
                }
                values.push_back(value.round() as u64);
            }
        }
    }

    /// Draws a view.
    pub fn draw(&mut self, frame: &mut Frame<'_>, view: &LiveView) {
        let [head, tabs, body, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(self.head(view), head);
        frame.render_widget(self.tabs(view), tabs);
        match (self.help, self.page) {
            (true, _) => frame.render_widget(Paragraph::new(HELP), body),
            (false, Page::Classes) => self.classes(frame, body, view),
            (false, Page::Queues) => self.queues(frame, body, view),
            (false, Page::Telemetry) => self.telemetry(frame, body, view),
        }
        let keys = "q quit  Tab or 1 2 3 page  w stretch  p pause  arrows choose, sort  ? help";
        frame.render_widget(Paragraph::new(keys).style(self.dim()), foot);
    }

    fn head(&self, view: &LiveView) -> Paragraph<'static> {
        let lost = view.counters.lost.total();
        let sums = Line::raw(view.sums());
        let sums = if lost > 0 { sums.style(self.coloured(Color::Red)) } else { sums };
        Paragraph::new(vec![Line::styled(view.head(), Modifier::BOLD), sums])
    }

    fn tabs(&self, view: &LiveView) -> Line<'static> {
        let mut spans: Vec<Span<'static>> = Vec::new();
        for page in Page::ALL {
            let style =
                if page == self.page { Style::new().add_modifier(Modifier::REVERSED) } else { self.dim() };
            spans.push(Span::styled(format!(" {} ", page.title()), style));
        }
        let over = match view.stretch.over {
            Over::Start => format!("since the start ({:.0} s)", view.elapsed_seconds),
            _ => format!("last {:.1} s", view.stretch.seconds),
        };
        let paused = if self.frozen { "  PAUSED" } else { "" };
        spans.push(Span::raw(format!("   {over}, sorted: {}{paused}", self.sort.name())));
        Line::from(spans)
    }

    fn dim(&self) -> Style {
        if self.has_colour { Style::new().fg(Color::DarkGray) } else { Style::new() }
    }

    fn coloured(&self, colour: Color) -> Style {
        if self.has_colour { Style::new().fg(colour) } else { Style::new().add_modifier(Modifier::BOLD) }
    }

    /// The row that is chosen, of this many.
    fn chosen(&mut self, rows: usize) -> usize {
        self.row = self.row.min(rows.saturating_sub(1));
        self.row
    }

    fn table(
        &self,
        head: &[&'static str],
        rows: Vec<Row<'static>>,
        chosen: usize,
        height: u16,
    ) -> Table<'static> {
        let widths: Vec<Constraint> = std::iter::once(Constraint::Length(22))
            .chain([12, 12, 9, 9, 9, 9, 9].map(Constraint::Length))
            .chain([Constraint::Min(10)])
            .collect();
        // The chosen row stays in sight.
        let room = usize::from(height.saturating_sub(1)).max(1);
        let first = (chosen + 1).saturating_sub(room);
        let rows = rows.into_iter().skip(first);
        let head: Vec<Cell<'static>> = head
            .iter()
            .enumerate()
            .map(|(n, text)| {
                Cell::from(if (1..8).contains(&n) { right(text, n) } else { (*text).to_owned() })
            })
            .collect();
        Table::new(rows, widths).header(Row::new(head).style(self.dim())).column_spacing(1)
    }

    fn row(&self, name: String, cells: [String; 7], last: Line<'static>, is_chosen: bool) -> Row<'static> {
        let numbers = (1..).zip(cells).map(|(n, cell)| Cell::from(right(&cell, n)));
        let name = format!("{} {name}", if is_chosen { '>' } else { ' ' });
        let row = Row::new([Cell::from(name)].into_iter().chain(numbers).chain([Cell::from(last)]));
        if is_chosen { row.style(Modifier::BOLD) } else { row }
    }

    fn classes(&mut self, frame: &mut Frame<'_>, area: Rect, view: &LiveView) {
        let mut classes: Vec<&ClassView> = view.classes.iter().collect();
        let key = |class: &ClassView| match self.sort {
            Sort::Order => 0.0,
            Sort::Iops => class.totals.iops.unwrap_or(0.0),
            Sort::Mean => class.latency.map_or(0.0, |l| l.mean_ns),
            Sort::P99 => class.latency.and_then(|l| l.p99_ns).unwrap_or(0) as f64,
        };
        classes.sort_by(|a, b| key(b).total_cmp(&key(a)));
        let chosen = self.chosen(classes.len());
        let [table, below] = Layout::vertical([Constraint::Min(4), Constraint::Length(9)]).areas(area);
        let rows = classes
            .iter()
            .enumerate()
            .map(|(n, class)| self.row(class.name(), class.cells(), self.bar(&class.stages), n == chosen));
        let head = ["  class", "IOPS", "bytes/s", "in fl.", "mean", "p50", "p99", "p99.9", "stages"];
        frame.render_widget(self.table(&head, rows.collect(), chosen, table.height), table);
        if let Some(class) = classes.get(chosen) {
            self.class(frame, below, class);
        } else {
            frame.render_widget(Paragraph::new("no command has come yet"), below);
        }
    }

    /// The chosen class: its stages, and how it went lately.
    fn class(&self, frame: &mut Frame<'_>, area: Rect, class: &ClassView) {
        let [stages, lately] = Layout::horizontal([Constraint::Length(76), Constraint::Min(0)]).areas(area);
        let percentile = |ns: Option<i64>| ns.map_or_else(|| "-".to_owned(), time);
        let mut lines = vec![
            Line::default(),
            Line::styled(
                format!("{:<24}{:>8}{:>10}{:>10}{:>10}", class.name(), "share", "p50", "p99", "p99.9"),
                self.dim(),
            ),
        ];
        for (stage, (fill, colour)) in class.stages.iter().zip(FILLS) {
            let slowest = class.slowest == Some(stage.name);
            let text = format!(
                " {:<22}{:>6.1} %{:>10}{:>10}{:>10}{}",
                stage.name.replace('_', " "),
                stage.share * 1e2,
                percentile(stage.times.p50_ns),
                percentile(stage.times.p99_ns),
                percentile(stage.times.p999_ns),
                if slowest { "  tail" } else { "" }
            );
            let line = Line::from(vec![Span::styled(fill, self.coloured(colour)), Span::raw(text)]);
            lines.push(if slowest { line.style(Modifier::BOLD) } else { line });
        }
        frame.render_widget(Paragraph::new(lines), stages);
        let Some(past) = self.past.iter().find(|past| past.name == class.name()) else { return };
        let [_, iops, mean] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(4), Constraint::Length(4)])
                .areas(lately);
        for (area, name, values) in [(iops, "IOPS", &past.iops), (mean, "mean latency", &past.mean_ns)] {
            let most = values.iter().copied().max().unwrap_or(0);
            let most = if name == "IOPS" { most.to_string() } else { Nanos(most).to_string() };
            let [title, line] = Layout::vertical([Constraint::Length(1), Constraint::Length(2)]).areas(area);
            frame.render_widget(Paragraph::new(format!("{name}, up to {most}")).style(self.dim()), title);
            let room = usize::from(line.width);
            let shown: Vec<u64> = values.iter().skip(values.len().saturating_sub(room)).copied().collect();
            frame.render_widget(Sparkline::default().data(&shown).style(self.coloured(Color::Green)), line);
        }
    }

    /// A bar of the stages' shares.
    fn bar(&self, stages: &[StageView]) -> Line<'static> {
        let (mut spans, mut sum, mut drawn) = (Vec::new(), 0.0, 0);
        for (stage, (fill, colour)) in stages.iter().zip(FILLS) {
            sum += stage.share;
            let upto = ((sum * BAR as f64).round() as usize).min(BAR);
            spans.push(Span::styled(fill.repeat(upto.saturating_sub(drawn)), self.coloured(colour)));
            drawn = drawn.max(upto);
        }
        Line::from(spans)
    }

    fn queues(&mut self, frame: &mut Frame<'_>, area: Rect, view: &LiveView) {
        let mut queues: Vec<&QueueView> = view.queues.iter().collect();
        let key = |queue: &QueueView| match self.sort {
            Sort::Order => 0.0,
            Sort::Iops => queue.totals.iops.unwrap_or(0.0),
            Sort::Mean => queue.latency.map_or(0.0, |l| l.mean_ns),
            Sort::P99 => queue.latency.and_then(|l| l.p99_ns).unwrap_or(0) as f64,
        };
        queues.sort_by(|a, b| key(b).total_cmp(&key(a)));
        let chosen = self.chosen(queues.len());
        let rows = queues.iter().enumerate().map(|(n, queue)| {
            let place = [queue.host.as_deref(), queue.served_by.as_deref(), queue.subsystem_nqn.as_deref()];
            let place: Vec<&str> = place.into_iter().flatten().filter(|text| !text.is_empty()).collect();
            let went = if queue.went { "went; " } else { "" };
            let last = Line::raw(harmless(&format!("{went}{}", place.join("  "))));
            self.row(queue.name(), queue.cells(), last, n == chosen)
        });
        let head = [
            "  queue",
            "IOPS",
            "bytes/s",
            "in fl.",
            "mean",
            "p50",
            "p99",
            "p99.9",
            "host, thread, subsystem",
        ];
        frame.render_widget(self.table(&head, rows.collect(), chosen, area.height), area);
    }

    fn telemetry(&mut self, frame: &mut Frame<'_>, area: Rect, view: &LiveView) {
        if view.telemetry.is_empty() {
            frame.render_widget(Paragraph::new("no telemetry has come yet, or --telemetry is off"), area);
            return;
        }
        let chosen = self.chosen(view.telemetry.len());
        let value = |value: f64, unit: &str| match unit {
            "bytes" => byte_rate(Some(value)).trim_end_matches("/s").to_owned(),
            "bytes/s" => byte_rate(Some(value)),
            _ if value.fract() == 0.0 && value.abs() < 1e15 => format!("{value} {unit}"),
            _ => format!("{value:.2} {unit}"),
        };
        let rows = view.telemetry.iter().enumerate().map(|(n, metric)| {
            let mark = if n == chosen { '>' } else { ' ' };
            let row = Row::new([
                format!("{mark} {} {}", metric.collector, metric.metric),
                metric.sum.map_or_else(String::new, |sum| value(sum, &metric.unit)),
                value(metric.worst, &metric.unit),
                harmless(&metric.of),
            ]);
            match (n == chosen, metric.is_news()) {
                (true, _) => row.style(Modifier::BOLD),
                (false, true) => row,
                (false, false) => row.style(self.dim()),
            }
        });
        let room = usize::from(area.height.saturating_sub(1)).max(1);
        let rows = rows.skip((chosen + 1).saturating_sub(room));
        let widths =
            [Constraint::Length(34), Constraint::Length(20), Constraint::Length(20), Constraint::Min(10)];
        let head = Row::new(["  metric", "all", "worst", "whose"]).style(self.dim());
        frame.render_widget(Table::new(rows, widths).header(head).column_spacing(1), area);
    }
}

const HELP: &str = "
 q, Ctrl-C      end
 Tab, 1 2 3     pages: classes of commands, queues, telemetry
 w              the stretch of time: one interval, 10, 60, all since the start
 p, space       pause: what is shown stays, and what comes is counted all the same
 Up, Down, j k  choose a row; its stages and its last intervals are below
 Left, Right    sort by: as they came, IOPS, mean, p99
 ?, h           this page

 Latency is this side's alone: a host's from its block layer and back, a target's from
 capsule to response. The bar has its two stages and what lies elsewhere: beyond the
 host (network and target), or the wait for a write's data. Percentiles are shown where
 ten commands lie above them; - elsewhere. In flight is the mean, rate times latency.
";

fn time(ns: i64) -> String {
    Nanos(ns.unsigned_abs()).to_string()
}

/// Numbers stand at the right of their columns.
fn right(text: &str, column: usize) -> String {
    let width = if column <= 2 { 12 } else { 9 };
    format!("{text:>width$}")
}

/// Names are what other machines sent: nothing in them is to steer the terminal.
fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::{Page, Press, Screen};
    use joiner::live::{Live, LiveOptions, LiveView, Over};
    use proptest::prelude::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use run_format::{
        Boundary, Command, Kind, Manifest, MetricKind, Nanos, Operation, Queue, Side, Sink, TelemetryBatch,
        TelemetryMetric, TelemetryRow,
    };

    fn view(over: Over) -> LiveView {
        let mut live = Live::new(Side::Target, LiveOptions::default(), Nanos(0));
        let queue = live.queue(Queue {
            cntlid: 1,
            qid: 3,
            subsystem_nqn: "nqn.x\u{1b}[2J".into(),
            ..Queue::default()
        });
        for (bytes, opcode) in [(4096, Operation::Read), (131_072, Operation::Write)] {
            for n in 0..2_000 {
                let mut command = Command { queue, opcode: opcode.opcode(), bytes, ..Command::default() };
                let end = 41_000 + n * 10;
                for (boundary, at) in [
                    (Boundary::TRecv, 1_000),
                    (Boundary::TSubmit, 11_000),
                    (Boundary::TDone, end),
                    (Boundary::TResp, end),
                    (Boundary::TSent, end),
                ] {
                    command.times[boundary.slot()] = Some(Nanos(at));
                }
                live.command(&command);
            }
        }
        live.telemetry(&TelemetryBatch {
            collector: "tcp".into(),
            anew: true,
            rows: vec![TelemetryRow { at: Nanos(1), metric: 0, object: "a>b".into(), value: Some(77.0) }],
            metrics: [TelemetryMetric {
                name: "rtt".into(),
                unit: "us".into(),
                kind: MetricKind::Gauge,
                bits: None,
            }]
            .into(),
        });
        live.end_slot(Nanos(1_000_000_000));
        live.view(over, &Manifest::begun(Side::Target, Kind::Spdk, "0"))
    }

    fn drawn(screen: &mut Screen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let view = view(screen.over());
        terminal.draw(|frame| screen.draw(frame, &view)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn pages_show_classes_queues_and_telemetry() {
        let mut screen = Screen::new(false);
        screen.remember(&view(Over::Slot));
        let text = drawn(&mut screen, 130, 24);
        for part in [
            "target spdk",
            "> read 4 KiB",
            "write 128 KiB",
            "2 000",
            "█████▒▒▒▒",
            "storage",
            "tail",
            "IOPS, up to 2000",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        screen.press(Press::Down);
        assert!(drawn(&mut screen, 130, 24).contains("> write 128 KiB"));
        screen.press(Press::Tab);
        let text = drawn(&mut screen, 130, 24);
        assert!(text.contains("queue 1/3") && text.contains("nqn.x\u{fffd}[2J"), "{text}");
        screen.press(Press::Char('3'));
        let text = drawn(&mut screen, 130, 24);
        assert!(text.contains("tcp rtt") && text.contains("77 us") && text.contains("a>b"), "{text}");
        screen.press(Press::Char('?'));
        assert!(drawn(&mut screen, 130, 24).contains("sort by"));
        screen.press(Press::Escape);
        screen.press(Press::BackTab);
        assert_eq!(screen.page, Page::Queues);
    }

    #[test]
    fn keys_choose_the_stretch_pause_and_end() {
        let mut screen = Screen::new(true);
        let mut stretches = Vec::new();
        for _ in 0..4 {
            stretches.push(screen.over());
            screen.press(Press::Char('w'));
        }
        assert_eq!(stretches, [Over::Ten, Over::Sixty, Over::Start, Over::Slot]);
        screen.press(Press::Char('p'));
        assert!(screen.is_frozen() && drawn(&mut screen, 100, 24).contains("PAUSED"));
        screen.press(Press::Right);
        assert!(drawn(&mut screen, 100, 24).contains("sorted: IOPS"));
        assert!(!screen.is_over());
        screen.press(Press::Interrupt);
        assert!(screen.is_over());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_size_and_no_key_is_too_much(
            width in 1u16..200, height in 1u16..60, keys in proptest::collection::vec(0usize..12, 0..20), colour in any::<bool>(),
        ) {
            let all = [
                Press::Char('2'), Press::Char('3'), Press::Char('x'), Press::Char('w'), Press::Char('?'), Press::Tab,
                Press::BackTab, Press::Up, Press::Down, Press::Left, Press::Right, Press::Escape,
            ];
            let mut screen = Screen::new(colour);
            screen.remember(&view(Over::Slot));
            keys.into_iter().for_each(|key| screen.press(all[key]));
            drawn(&mut screen, width, height);
        }
    }
}
