//! A small HTTP/1.1 server for scrapes: it answers GET and HEAD, one request a connection, and no client can hold it
//! up. It knows nothing of what it answers.
//!
//! Bounds: so many connections at once (more are told to come again), a request's head of so many bytes, and a time by
//! which a request has come and its answer has gone. A request's body is never read.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections at once.
const CONNECTIONS: usize = 16;
/// Longest head of a request, and most of its headers.
const HEAD: usize = 8 << 10;
const HEADERS: usize = 64;
/// How long a client may take.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// By when a request has to be there.
    asked: Duration,
    /// By when its answer has to be taken.
    answered: Duration,
}
const PATIENCE: Patience = Patience { asked: Duration::from_secs(5), answered: Duration::from_secs(10) };
/// A client that can not be served is told so quickly.
const REFUSED: Duration = Duration::from_millis(200);
/// How often the acceptor looks whether it is over.
const LOOK: Duration = Duration::from_millis(50);
/// A connection's thread needs little.
const STACK: usize = 256 << 10;

/// What was asked for.
#[derive(Debug)]
pub struct Request<'a> {
    /// The path, without what follows a question mark.
    pub path: &'a str,
    /// All `Accept` headers together.
    pub accept: String,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status code and reason.
    pub status: (u16, &'static str),
    /// Media type of the body.
    pub media_type: &'static str,
    /// The body.
    pub body: Arc<str>,
}

impl Answer {
    /// A line of text.
    pub fn text(status: (u16, &'static str), text: &str) -> Answer {
        Answer { status, media_type: "text/plain; charset=utf-8", body: text.into() }
    }
}

/// What answers requests; called from several threads.
pub type Handler = Arc<dyn Fn(&Request<'_>) -> Answer + Send + Sync>;

/// A server under way. Dropping it ends it: connections that are open end by their own bounds.
#[derive(Debug)]
pub struct Server {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

impl Server {
    /// Answers on this listener.
    ///
    /// # Errors
    /// When the listener or a thread can not be had.
    pub fn start(listener: TcpListener, handler: Handler) -> Result<Server> {
        Server::with(listener, handler, PATIENCE)
    }

    fn with(listener: TcpListener, handler: Handler, patience: Patience) -> Result<Server> {
        let address = listener.local_addr().context("the address that is listened on")?;
        listener.set_nonblocking(true).context("set up the listener")?;
        let over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new()
            .name("scrapes".into())
            .spawn({
                let over = Arc::clone(&over);
                move || accept(&listener, &handler, patience, &over)
            })
            .context("start the thread that accepts scrapes")?;
        Ok(Server { over, thread: Some(thread), address })
    }

    /// Where it answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panics only by a fault of its own, and then it is over.
            let _ = thread.join();
        }
    }
}

/// Counts a connection for as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn accept(listener: &TcpListener, handler: &Handler, patience: Patience, over: &AtomicBool) {
    let open = Arc::new(AtomicUsize::new(0));
    while !over.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            // Nobody is there, or there is no descriptor for them: both pass.
            wait(listener);
            continue;
        };
        let counted = Counted(Arc::clone(&open));
        if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            refuse(&stream);
            continue;
        }
        let handler = Arc::clone(handler);
        let serve = move || {
            let _counted = counted;
            // A client that went away is its own affair.
            let _ = serve(&stream, &handler, patience);
        };
        // Without a thread the client is gone, and counted no more.
        let _ = std::thread::Builder::new().name("scrape".into()).stack_size(STACK).spawn(serve);
    }
}

/// Waits until somebody comes, or a little.
fn wait(listener: &TcpListener) {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
    match poll(&mut fds, timeout) {
        Ok(0) => {}
        // What is there could not be accepted a moment ago, or not be waited for: not at once again.
        _ => std::thread::sleep(Duration::from_millis(1)),
    }
}

fn refuse(stream: &TcpStream) {
    let answer = Answer::text((503, "Service Unavailable"), "too many connections: come again\n");
    let _ = send(stream, &answer, true, Instant::now() + REFUSED);
}

fn serve(stream: &TcpStream, handler: &Handler, patience: Patience) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    let mut head = Vec::new();
    let answered = match receive(stream, &mut head, Instant::now() + patience.asked) {
        Ok(()) => answer(&head, handler),
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            (Answer::text((408, "Request Timeout"), "the request did not come in time\n"), true)
        }
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            let text = format!("the request's head is longer than {HEAD} bytes\n");
            (Answer::text((431, "Request Header Fields Too Large"), &text), true)
        }
        Err(error) => return Err(error),
    };
    let (answer, with_body) = answered;
    send(stream, &answer, with_body, Instant::now() + patience.answered)?;
    // What the client still sends is left unread, which would reset the connection and with it the answer; so it is told
    // that this is the end, and given a moment to take it.
    stream.shutdown(std::net::Shutdown::Write)?;
    let until = Instant::now() + REFUSED;
    let mut rest = [0; 1024];
    while let Ok(n) = read(stream, &mut rest, until) {
        if n == 0 {
            break;
        }
    }
    Ok(())
}

/// Reads until the head is whole. `InvalidData` where it is too long.
fn receive(stream: &TcpStream, head: &mut Vec<u8>, until: Instant) -> std::io::Result<()> {
    let mut part = [0; 1024];
    loop {
        let n = read(stream, &mut part, until)?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        // A line's end may lie in two parts.
        let from = head.len().saturating_sub(3);
        head.extend_from_slice(part.get(..n).unwrap_or_default());
        let fresh = head.get(from..).unwrap_or_default();
        if fresh.windows(4).any(|end| end == b"\r\n\r\n") || fresh.windows(2).any(|end| end == b"\n\n") {
            return Ok(());
        }
        if head.len() > HEAD {
            return Err(ErrorKind::InvalidData.into());
        }
    }
}

fn read(mut stream: &TcpStream, into: &mut [u8], until: Instant) -> std::io::Result<usize> {
    loop {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(into) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// How long it is until then; an error where it is past.
fn left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The answer to a whole head, and whether its body is wanted.
fn answer(head: &[u8], handler: &Handler) -> (Answer, bool) {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let bad = |why: &str| (Answer::text((400, "Bad Request"), why), true);
    match request.parse(head) {
        Err(httparse::Error::TooManyHeaders) => {
            let text = format!("more than {HEADERS} headers\n");
            return (Answer::text((431, "Request Header Fields Too Large"), &text), true);
        }
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) | Err(_) => return bad("that is no HTTP request\n"),
    }
    let (Some(method), Some(target)) = (request.method, request.path) else {
        return bad("that is no HTTP request\n");
    };
    let with_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => {
            return (Answer::text((405, "Method Not Allowed"), "only GET and HEAD are answered\n"), true);
        }
    };
    let accept = request.headers.iter().filter(|h| h.name.eq_ignore_ascii_case("accept"));
    let accept: Vec<String> = accept.map(|h| String::from_utf8_lossy(h.value).into_owned()).collect();
    // Also as a proxy is asked, which servers have to take (RFC 9112, 3.2.2).
    let target = match target.strip_prefix("http://") {
        Some(whole) => whole.find('/').and_then(|at| whole.get(at..)).unwrap_or("/"),
        None => target,
    };
    let path = target.split('?').next().unwrap_or_default();
    (handler(&Request { path, accept: accept.join(",") }), with_body)
}

fn send(mut stream: &TcpStream, answer: &Answer, with_body: bool, until: Instant) -> std::io::Result<()> {
    let (code, reason) = answer.status;
    let allow = if code == 405 { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {code} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        answer.media_type,
        answer.body.len()
    );
    let body = if with_body { answer.body.as_bytes() } else { &[] };
    for mut part in [head.as_bytes(), body] {
        while !part.is_empty() {
            stream.set_write_timeout(Some(left(until)?))?;
            match stream.write(part) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => part = part.get(n..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Answer, CONNECTIONS, HEAD, Handler, Patience, Server};
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn handler() -> Handler {
        Arc::new(|request| match request.path {
            "/a" => Answer::text((200, "OK"), &format!("accepts {}", request.accept)),
            "/big" => Answer::text((200, "OK"), &"x".repeat(4 << 20)),
            _ => Answer::text((404, "Not Found"), "not here"),
        })
    }

    fn server() -> Server {
        Server::start(TcpListener::bind("127.0.0.1:0").unwrap(), handler()).unwrap()
    }

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        // The server may have answered and gone before all is sent.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[test]
    fn requests_are_answered_or_refused_for_what_they_are() {
        let server = server();
        let status = |request: &str| {
            let answer = ask(server.address(), request.as_bytes());
            answer.split(' ').nth(1).unwrap_or_default().to_owned()
        };
        let answer =
            ask(server.address(), b"GET /a?b=c HTTP/1.1\r\nHost: x\r\nAccept: p\r\nACCEPT: q\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(
            answer.ends_with("\r\n\r\naccepts p,q") && answer.contains("Content-Length: 11\r\n"),
            "{answer}"
        );
        let answer = ask(server.address(), b"HEAD /a HTTP/1.0\n\n");
        assert!(answer.contains("Content-Length: 8\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
        assert_eq!(status("GET http://x:1/a?b HTTP/1.1\r\n\r\n"), "200");
        assert_eq!(status("GET http://x HTTP/1.1\r\n\r\n"), "404");
        assert_eq!(status("GET /b HTTP/1.1\r\n\r\n"), "404");
        assert_eq!(status("POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"), "405");
        assert_eq!(status("nonsense\r\n\r\n"), "400");
        assert_eq!(status("\u{0}\u{1}\u{2}\r\n\r\n"), "400");
        assert_eq!(status(&format!("GET /a HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65))), "431");
        assert_eq!(status(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(2 * HEAD))), "431");
    }

    /// Asks until this is the answer's status.
    fn ask_until(address: SocketAddr, status: &str) {
        let until = Instant::now() + LONG;
        loop {
            let answer = ask(address, b"GET /a HTTP/1.1\r\n\r\n");
            if answer.starts_with(&format!("HTTP/1.1 {status} ")) {
                return;
            }
            assert!(Instant::now() < until, "not {status}: {answer}");
        }
    }

    /// Far longer than a busy machine keeps a thread waiting.
    const LONG: Duration = Duration::from_secs(120);

    /// They take their time with the request, or with the answer.
    fn slow_clients(address: SocketAddr, count: usize) -> Vec<TcpStream> {
        let slow = |n| {
            let mut stream = TcpStream::connect(address).unwrap();
            let part: &[u8] = if n % 2 == 0 { b"GET /a" } else { b"GET /big HTTP/1.1\r\n\r\n" };
            stream.write_all(part).unwrap();
            stream
        };
        (0..count).map(slow).collect()
    }

    #[test]
    fn slow_clients_hold_up_nobody_and_more_than_fit_are_told() {
        let patience = Patience { asked: LONG, answered: LONG };
        let server = Server::with(TcpListener::bind("127.0.0.1:0").unwrap(), handler(), patience).unwrap();
        let mut slow = slow_clients(server.address(), CONNECTIONS - 1);
        let asked = Instant::now();
        ask_until(server.address(), "200");
        assert!(asked.elapsed() < LONG, "it waited for the slow ones");
        slow.extend(slow_clients(server.address(), 2));
        ask_until(server.address(), "503");
        // Their places are free when they are gone.
        drop(slow);
        ask_until(server.address(), "200");
    }

    #[test]
    fn clients_that_hang_are_let_go() {
        let patience = Patience { asked: Duration::from_millis(300), answered: Duration::from_millis(300) };
        let server = Server::with(TcpListener::bind("127.0.0.1:0").unwrap(), handler(), patience).unwrap();
        let mut slow = slow_clients(server.address(), CONNECTIONS);
        let mut end = String::new();
        slow[0].set_read_timeout(Some(LONG)).unwrap();
        slow[0].read_to_string(&mut end).unwrap();
        assert!(end.starts_with("HTTP/1.1 408"), "{end}");
        // Those that do not take their answer, too: their connections are still open here, their places free.
        ask_until(server.address(), "200");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn whatever_comes_is_answered(head in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (answer, _) = super::answer(&head, &handler());
            prop_assert!([200, 400, 404, 405, 431].contains(&answer.status.0));
        }
    }
}
