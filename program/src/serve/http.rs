//! One request and one answer on a connection, in HTTP/1.1. Compressed and chunked requests are
//! refused.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::error::ApiError;

/// The largest request line and header fields, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// The most header fields.
const MAX_FIELDS: usize = 100;

/// The time to write a piece of an answer.
const WRITE_TIME: Duration = Duration::from_secs(10);

/// The time for a client to read an answer before the connection closes.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Limits of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The largest body, in bytes.
    pub(super) body: usize,
    /// The time until the request has come as a whole.
    pub(super) time: Duration,
}

/// A request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    /// The path, without a query.
    pub(super) path: String,
    pub(super) is_json: bool,
    pub(super) body: Vec<u8>,
}

/// The reason that a connection has no request.
#[derive(Debug)]
pub(super) enum NoRequest {
    /// The client is gone, or sent nothing.
    Gone,
    /// The request is refused.
    Refused(ApiError),
}

impl From<ApiError> for NoRequest {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

/// The first part of a request.
struct Head {
    /// Its length in bytes.
    length: usize,
    request: Request,
    body: usize,
    expects_continue: bool,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Whether an answer without a length can be sent in chunks.
    takes_chunks: bool,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_TIME))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, takes_chunks: false })
    }

    /// Reads the request.
    pub(super) fn read(&mut self, limits: Limits) -> Result<Request, NoRequest> {
        let until = Instant::now() + limits.time;
        let mut bytes = Vec::new();
        let head = loop {
            if let Some(head) = self.parse(&bytes, limits.body)? {
                break head;
            }
            if bytes.len() > MAX_HEAD {
                let what = format!("the header fields have more than {MAX_HEAD} bytes");
                return Err(ApiError::request(413, "request_too_large", what).into());
            }
            self.receive(&mut bytes, until)?;
        };
        if head.expects_continue && bytes.len() == head.length {
            let sent = self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
            sent.map_err(|_gone| NoRequest::Gone)?;
        }
        let mut request = head.request;
        request.body = bytes.split_off(head.length);
        while request.body.len() < head.body {
            self.receive(&mut request.body, until)?;
        }
        request.body.truncate(head.body);
        Ok(request)
    }

    /// Parses the first part of a request, once it has come.
    fn parse(&mut self, bytes: &[u8], max_body: usize) -> Result<Option<Head>, ApiError> {
        let malformed = |what: &str| ApiError::request(400, "malformed_request", what);
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut parsed = httparse::Request::new(&mut fields);
        let length = match parsed.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(error) => return Err(malformed(&format!("this is no request of HTTP: {error}"))),
        };
        self.takes_chunks = parsed.version == Some(1);
        let (mut body, mut is_json, mut expects_continue) = (None, false, false);
        for field in &*parsed.headers {
            let value = String::from_utf8_lossy(field.value).trim().to_ascii_lowercase();
            match field.name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    let is_number = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
                    if !is_number || body.as_ref().is_some_and(|other| *other != value) {
                        return Err(malformed("`Content-Length` is not one number"));
                    }
                    body = Some(value);
                }
                "transfer-encoding" => {
                    return Err(malformed(
                        "`Transfer-Encoding` is not supported; send `Content-Length`",
                    ));
                }
                "content-encoding" if value != "identity" => {
                    return Err(malformed("`Content-Encoding` is not supported; send plain JSON"));
                }
                "content-type" => {
                    let media_type = value.split(';').next().unwrap_or_default();
                    is_json = media_type.trim_end() == "application/json";
                }
                "expect" => expects_continue = value == "100-continue",
                _ => {}
            }
        }
        // A length with more digits than a `usize` is too large.
        let body = body.map_or(0, |body| body.parse().unwrap_or(usize::MAX));
        if body > max_body {
            let what = format!("the request has {body} bytes, and the most is {max_body}");
            return Err(ApiError::request(413, "request_too_large", what));
        }
        let path = parsed.path.unwrap_or_default().split('?').next().unwrap_or_default().to_owned();
        let method = parsed.method.unwrap_or_default().to_owned();
        let request = Request { method, path, is_json, body: Vec::new() };
        Ok(Some(Head { length, request, body, expects_continue }))
    }

    /// Adds bytes of the client to `bytes`.
    fn receive(&mut self, bytes: &mut Vec<u8>, until: Instant) -> Result<(), NoRequest> {
        let late = || ApiError::request(408, "request_timeout", "the request did not come in time");
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late().into());
        }
        self.stream.set_read_timeout(Some(left)).map_err(|_gone| NoRequest::Gone)?;
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => Err(NoRequest::Gone),
            Ok(count) => {
                bytes.extend_from_slice(&buffer[..count]);
                Ok(())
            }
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => Ok(()),
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Err(late().into()),
                _ => Err(NoRequest::Gone),
            },
        }
    }

    /// Whether the client has hung up.
    pub(super) fn is_gone(&self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let seen = self.stream.peek(&mut [0]);
        let gone = match seen {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        };
        gone || self.stream.set_nonblocking(false).is_err()
    }

    /// Writes an answer of JSON and closes the connection.
    pub(super) fn answer(
        mut self,
        status: u16,
        more: &[(&str, &str)],
        body: &Value,
    ) -> io::Result<()> {
        let body = body.to_string();
        let length = body.len().to_string();
        let fields = [("Content-Type", "application/json"), ("Content-Length", &length)];
        let mut answer = head(status, fields.iter().chain(more));
        answer.push_str(&body);
        self.stream.write_all(answer.as_bytes())?;
        self.close()
    }

    /// Writes an answer and closes the connection at once, without reading the request.
    pub(super) fn refuse(mut self, status: u16, body: &Value) {
        // The kernel forgets the answer if bytes of the client are unread.
        if self.stream.set_nonblocking(true).is_ok() {
            let _ = self.stream.read(&mut [0; 16 << 10]);
            let length = body.to_string().len().to_string();
            let fields = [("Content-Type", "application/json"), ("Content-Length", &length)];
            let _ =
                self.stream.write_all(format!("{}{body}", head(status, fields.iter())).as_bytes());
        }
    }

    /// Begins an answer of server-sent events.
    pub(super) fn begin_events(&mut self) -> io::Result<()> {
        let mut fields = vec![("Content-Type", "text/event-stream"), ("Cache-Control", "no-store")];
        if self.takes_chunks {
            fields.push(("Transfer-Encoding", "chunked"));
        }
        self.stream.write_all(head(200, fields.iter()).as_bytes())
    }

    /// Writes an event.
    pub(super) fn event(&mut self, data: &str) -> io::Result<()> {
        let event = format!("data: {data}\n\n");
        let event = match self.takes_chunks {
            true => format!("{:x}\r\n{event}\r\n", event.len()),
            false => event,
        };
        self.stream.write_all(event.as_bytes())
    }

    /// Ends an answer of events and closes the connection.
    pub(super) fn end_events(mut self) -> io::Result<()> {
        if self.takes_chunks {
            self.stream.write_all(b"0\r\n\r\n")?;
        }
        self.close()
    }

    /// Closes the connection. Bytes that the client still sends are read for a while: the kernel
    /// would otherwise tell it that the connection broke, and it might not read the answer.
    fn close(mut self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)?;
        let until = Instant::now() + CLOSE_TIME;
        let mut unread = [0; 16 << 10];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.stream.set_read_timeout(Some(left))?;
            if self.stream.read(&mut unread)? == 0 {
                return Ok(());
            }
        }
    }
}

/// The status line and the header fields of an answer, the last on its connection.
fn head<'a>(status: u16, fields: impl Iterator<Item = &'a (&'a str, &'a str)>) -> String {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    };
    let fields: String = fields.map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status} {reason}\r\nConnection: close\r\n{fields}\r\n")
}
