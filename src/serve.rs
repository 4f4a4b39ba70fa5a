//! `fabscope serve host|target`: gives one side's figures to whoever scrapes them.

use crate::attach::{Going, Subject};
use crate::cli::{Serve, ServeSide};
use crate::destination::Destination;
use crate::exit;
use crate::http::{Answer, Request, Server};
use crate::live::{Show, View};
use crate::signals::Signals;
use anyhow::{Context, Result};
use joiner::live::openmetrics::{Exposition, ExpositionOptions, TextFormat};
use joiner::live::{Live, LiveOptions};
use run_format::{Manifest, Side, monotonic_now};
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// Runs `serve`.
///
/// # Errors
/// When the address can not be listened on, or nothing can be recorded, with what is missing and what to do.
pub fn run(what: &Serve) -> Result<ExitCode> {
    let signals = Signals::until_counted()?;
    let (side, options, from) = match what {
        Serve::Host(options) => (Side::Host, options, None),
        Serve::Target(options) => (Side::Target, &options.side, Some(&options.from)),
    };
    let subject = Subject { side, observe: &options.observe, from };
    subject.check();
    // Before the system under test is touched.
    let listener = TcpListener::bind(options.listen).with_context(|| {
        format!(
            "listen on {}: is another fabscope serve there? Give another address or port with --listen",
            options.listen
        )
    })?;
    let open = &|manifest| open(manifest, options, listener.try_clone().context("keep the listener")?);
    subject.record(&Going::into_view(open), &signals)
}

fn open(manifest: Manifest, options: &ServeSide, listener: TcpListener) -> Result<Box<dyn Destination>> {
    let how = ExpositionOptions {
        queues: options.queues,
        telemetry_series: options.telemetry_series as usize,
        meaning,
    };
    let nothing_yet = Live::new(manifest.side, LiveOptions::default(), monotonic_now());
    let newest = Arc::new(Mutex::new(Arc::new(nothing_yet.exposition(&manifest, &how))));
    let server = Server::start(listener, {
        let newest = Arc::clone(&newest);
        Arc::new(move |request: &Request<'_>| answer(request, &newest))
    })?;
    let address = server.address();
    exit::say(&format!("metrics are at http://{address}/metrics"));
    if !address.ip().is_loopback() {
        exit::say(&format!(
            "{address} is not a loopback address: whoever reaches it can read what this machine's storage does"
        ));
    }
    Ok(Box::new(View::new("serve", manifest, LiveOptions::default(), Given { how, newest, _server: server })))
}

/// What one of the telemetry's metrics is.
fn meaning(collector: &str, metric: &str) -> &'static str {
    let about = ::telemetry::all().into_iter().find(|about| about.name == collector);
    let metric = about.and_then(|about| about.metrics.iter().find(|known| known.name == metric));
    metric.map_or("", |metric| metric.meaning)
}

fn answer(request: &Request<'_>, newest: &Mutex<Arc<Exposition>>) -> Answer {
    match request.path {
        "/metrics" => {
            let exposition = Arc::clone(&newest.lock().unwrap_or_else(PoisonError::into_inner));
            let format = TextFormat::wanted(&request.accept);
            Answer { status: (200, "OK"), media_type: format.media_type(), body: exposition.text(format) }
        }
        "/healthz" => Answer::text((200, "OK"), "ok\n"),
        "/" => Answer::text((200, "OK"), "fabscope: the metrics are at /metrics\n"),
        _ => Answer::text((404, "Not Found"), "there are only /metrics and /healthz\n"),
    }
}

/// The newest figures, for the server.
struct Given {
    how: ExpositionOptions,
    newest: Arc<Mutex<Arc<Exposition>>>,
    _server: Server,
}

impl Show for Given {
    fn news(&mut self, live: &Live, manifest: &Manifest) -> Result<()> {
        let exposition = Arc::new(live.exposition(manifest, &self.how));
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = exposition;
        Ok(())
    }

    fn tick(&mut self, _: &Live, _: &Manifest) -> Result<()> {
        Ok(())
    }

    fn enough(&self) -> Option<&'static str> {
        None
    }
}
