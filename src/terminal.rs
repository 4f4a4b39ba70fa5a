//! Takes the terminal for a screen, and gives it back as it was: at the end, on an error, and on a panic. It draws
//! nothing.

use crate::exit;
use crate::live::Show;
use crate::screen::{Press, Screen};
use anyhow::{Context, Result, bail};
use joiner::live::{Live, LiveView, Over};
use ratatui::Terminal;
use ratatui::backend::TermionBackend;
use ratatui::termion::event::Key;
use ratatui::termion::get_tty;
use ratatui::termion::input::TermRead;
use ratatui::termion::raw::{IntoRawMode, RawTerminal};
use run_format::Manifest;
use signal_hook::consts::SIGWINCH;
use std::fs::File;
use std::io::{Stdout, Write, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Onto the other screen, without a cursor; and back.
const TAKE: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";
const GIVE_BACK: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// The terminal while it is taken: its drop sets it up as it was.
static TAKEN: Mutex<Option<RawTerminal<File>>> = Mutex::new(None);

/// Gives the terminal back if it is taken.
fn give_back() {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner).take();
    if taken.is_some() {
        // Without a terminal there is none to be given back.
        let mut out = stdout();
        let _ = out.write_all(GIVE_BACK).and_then(|()| out.flush());
    }
}

/// A screen on the terminal. Dropping it gives the terminal back.
pub struct OnTerminal {
    screen: Screen,
    terminal: Terminal<TermionBackend<Stdout>>,
    keys: Receiver<Press>,
    resized: Arc<AtomicBool>,
    /// What is shown.
    view: Option<LiveView>,
    /// Intervals that are left.
    left: Option<u64>,
}

impl OnTerminal {
    /// Takes the terminal. Ends by itself after `left` intervals, where that is given.
    ///
    /// # Errors
    /// When there is none that can be drawn on.
    pub fn take(left: Option<u64>) -> Result<OnTerminal> {
        let resized = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGWINCH, Arc::clone(&resized)).context("catch changes of size")?;
        let keys = keys(get_tty().context("open the terminal")?)?;
        let raw = get_tty().and_then(IntoRawMode::into_raw_mode).context("set up the terminal")?;
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(raw);
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            previous(panic);
        }));
        // Until all is in place; then this drop is that of the whole.
        let guard = Guard;
        let mut out = stdout();
        out.write_all(TAKE).and_then(|()| out.flush()).context("write to the terminal")?;
        let terminal = Terminal::new(TermionBackend::new(stdout())).context("draw on the terminal")?;
        exit::hold();
        std::mem::forget(guard);
        // https://no-color.org: set and not empty.
        let has_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Ok(OnTerminal { screen: Screen::new(has_colour), terminal, keys, resized, view: None, left })
    }

    fn draw(&mut self) -> Result<()> {
        // A thread that panicked has given the terminal back and told why on it, which drawing would hide.
        if TAKEN.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            bail!("a part of the program failed, and with it the screen");
        }
        if let Some(view) = &self.view {
            let screen = &mut self.screen;
            self.terminal.draw(|frame| screen.draw(frame, view)).context("draw on the terminal")?;
        }
        Ok(())
    }
}

/// Gives the terminal back where it could not be taken whole.
struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        give_back();
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        give_back();
        exit::release();
    }
}

/// The keys as they are pressed, read on a thread of its own, which ends with the program.
fn keys(tty: File) -> Result<Receiver<Press>> {
    let (sender, keys) = channel();
    let read = move || {
        for key in tty.keys() {
            let press = match key {
                Ok(Key::Char('\t')) => Press::Tab,
                Ok(Key::Char(c)) => Press::Char(c),
                Ok(Key::BackTab) => Press::BackTab,
                Ok(Key::Up) => Press::Up,
                Ok(Key::Down) => Press::Down,
                Ok(Key::Left) => Press::Left,
                Ok(Key::Right) => Press::Right,
                Ok(Key::Ctrl('c')) => Press::Interrupt,
                Ok(Key::Esc) => Press::Escape,
                Ok(_) => continue,
                // The terminal is gone; a signal says so too.
                Err(_) => return,
            };
            if sender.send(press).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("keys".into())
        .spawn(read)
        .context("start the thread that reads keys")?;
    Ok(keys)
}

impl Show for OnTerminal {
    fn news(&mut self, live: &Live, manifest: &Manifest) -> Result<()> {
        self.screen.remember(&live.view(Over::Slot, manifest));
        if !self.screen.is_frozen() {
            self.view = Some(live.view(self.screen.over(), manifest));
        }
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
        self.draw()
    }

    fn tick(&mut self, live: &Live, manifest: &Manifest) -> Result<()> {
        let over = self.screen.over();
        let mut pressed = self.resized.swap(false, Ordering::Relaxed) || self.view.is_none();
        while let Ok(key) = self.keys.try_recv() {
            self.screen.press(key);
            pressed = true;
        }
        if !pressed {
            return Ok(());
        }
        // Another stretch is shown at once, also while it is paused.
        if self.view.is_none() || over != self.screen.over() {
            self.view = Some(live.view(self.screen.over(), manifest));
        }
        self.draw()
    }

    fn enough(&self) -> Option<&'static str> {
        if self.screen.is_over() {
            return Some("ended by a key");
        }
        (self.left == Some(0)).then_some("as many intervals as were asked for")
    }
}

#[cfg(test)]
mod tests {
    use super::OnTerminal;
    use crate::live::Show;
    use joiner::live::{Live, LiveOptions};
    use run_format::{Kind, Manifest, Side, monotonic_now};
    use std::process::{Command, Stdio};

    /// Not a test: what [`a_panic_gives_the_terminal_back`] runs on a terminal.
    #[test]
    #[ignore = "panics, on a terminal of its own: run by another test"]
    fn panics_on_a_terminal() {
        let Ok(thread) = std::env::var("FABSCOPE_TEST_PANICS_ON") else { return };
        let mut screen = OnTerminal::take(None).unwrap();
        let live = Live::new(Side::Target, LiveOptions::default(), monotonic_now());
        let manifest = Manifest::begun(Side::Target, Kind::Spdk, "0");
        screen.news(&live, &manifest).unwrap();
        if thread == "another" {
            std::thread::spawn(|| panic!("in the middle")).join().unwrap_err();
            let error = screen.news(&live, &manifest).unwrap_err();
            assert!(error.to_string().contains("a part of the program failed"), "{error}");
            return;
        }
        panic!("in the middle");
    }

    #[test]
    fn a_panic_gives_the_terminal_back() {
        if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: there is no script(1), which makes a terminal");
            return;
        }
        for (thread, code) in [("its own", "101"), ("another", "0")] {
            let here = tempfile::tempdir().unwrap();
            let at = |name: &str| here.path().join(name).display().to_string();
            let run = format!(
                "stty -g > {}; {} --ignored --exact terminal::tests::panics_on_a_terminal --nocapture --test-threads=1; echo $? > {}; stty -g > {}",
                at("before"),
                std::env::current_exe().unwrap().display(),
                at("code"),
                at("after")
            );
            let status = Command::new("script")
                .args(["-q", "-f", "-c", &run, &at("typescript")])
                .envs([("TERM", "xterm-256color"), ("FABSCOPE_TEST_PANICS_ON", thread)])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .status();
            assert!(status.unwrap().success());
            let read = |name: &str| {
                String::from_utf8_lossy(&std::fs::read(at(name)).unwrap_or_default()).into_owned()
            };
            let shown = read("typescript");
            assert_eq!(read("code").trim(), code, "{shown}");
            assert!(!read("before").is_empty() && read("before") == read("after"), "{shown}");
            // The other screen, the cursor gone; back, and only then what went wrong.
            let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("{text:?} in {shown:?}"));
            assert!(at("\u{1b}[?1049h") < at("\u{1b}[?1049l"), "{shown:?}");
            assert!(at("\u{1b}[?25h") < at("in the middle"), "{shown:?}");
            assert_eq!(shown.rfind("\u{1b}[?1049l"), shown.find("\u{1b}[?1049l"), "{shown:?}");
            assert_eq!(
                shown.rfind("\u{1b}[?25l"),
                shown[..at("\u{1b}[?1049l")].rfind("\u{1b}[?25l"),
                "{shown:?}"
            );
        }
    }
}
