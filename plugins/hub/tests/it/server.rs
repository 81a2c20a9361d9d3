//! A server with the parts of the Hub's interface that a download uses.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The commit of every repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong in the next request: of a list, or of the contents of a large or small file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The list is refused with this status.
    List(u16),
    /// The contents are refused with this status.
    Status(u16),
    /// The connection ends after this many bytes of the file.
    Cut(usize),
    /// Nothing more comes after this many bytes of the file, and the connection stays.
    Silence(usize),
    /// A byte is another.
    Flipped,
    /// A byte of a small file is another.
    FlippedSmall,
    /// The range is ignored, and all is sent.
    IgnoredRange,
}

struct State {
    files: Vec<(&'static str, Vec<u8>)>,
    faults: Mutex<Vec<Fault>>,
    requests: Mutex<Vec<String>>,
    /// The address under another name, for large files.
    other: String,
}

/// A server of the Hub and its server of large files. Goes on to the end of the process.
pub(crate) struct Server {
    port: u16,
    state: Arc<State>,
}

/// Files with at least this many bytes are large.
const LARGE: usize = 1 << 20;

impl Server {
    pub(crate) fn start(files: Vec<(&'static str, Vec<u8>)>, faults: Vec<Fault>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            files,
            faults: Mutex::new(faults),
            requests: Mutex::default(),
            other: format!("http://localhost:{port}"),
        });
        let serving = state.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let state = serving.clone();
                std::thread::spawn(move || {
                    let _ = connection.and_then(|connection| serve(&connection, &state));
                });
            }
        });
        Self { port, state }
    }

    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The requests so far: first line, token, range.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.requests.lock().unwrap().clone()
    }
}

impl State {
    /// Takes the next fault, if it is one of these.
    fn fault(&self, of: impl Fn(Fault) -> bool) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap();
        let next = faults.first().copied().filter(|fault| of(*fault))?;
        faults.remove(0);
        Some(next)
    }
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serve(connection: &TcpStream, state: &State) -> std::io::Result<()> {
    let mut lines = BufReader::new(connection).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut noted = first.clone();
    let mut start = None;
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        let lower = line.to_lowercase();
        if let Some(range) = lower.strip_prefix("range: bytes=") {
            start = range.trim_end_matches('-').parse::<usize>().ok();
            noted += &format!(" {range} bytes={range}");
        }
        if lower.starts_with("authorization") {
            noted += &format!(" {line}");
        }
    }
    state.requests.lock().unwrap().push(noted);
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let mut out = connection;
    let head = |status: u16, more: &str, bytes: usize| {
        format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {bytes}\r\n{more}\r\n")
    };
    if path.starts_with("/api/") {
        if let Some(Fault::List(status)) = state.fault(|fault| matches!(fault, Fault::List(_))) {
            return out.write_all(head(status, "", 0).as_bytes());
        }
        let files: Vec<_> =
            state.files.iter().map(|(name, _)| format!("{{\"rfilename\":{name:?}}}")).collect();
        let body = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", files.join(","));
        return out.write_all((head(200, "", body.len()) + &body).as_bytes());
    }
    let name = path.rsplit_once(COMMIT).map_or("", |(_, name)| name.trim_start_matches('/'));
    let name = name.replace("%20", " ").replace("%23", "#");
    let Some((_, content)) = state.files.iter().find(|(file, _)| *file == name) else {
        return out.write_all(head(404, "", 0).as_bytes());
    };
    let large = content.len() >= LARGE;
    let is_cdn = path.starts_with("/cdn/");
    let hash = hex(&Sha256::digest(content));
    if large && !is_cdn {
        let more = format!(
            "Location: {}/cdn/{COMMIT}/{name}\r\nX-Linked-Etag: \"{hash}\"\r\nX-Linked-Size: {}\r\n",
            state.other,
            content.len()
        );
        return out.write_all(head(302, &more, 0).as_bytes());
    }
    let git = Sha1::new().chain_update(format!("blob {}\0", content.len())).chain_update(content);
    let etag = match large {
        true => "\"other\"".to_owned(),
        false => format!("W/\"{}\"", hex(&git.finalize())),
    };
    let is_of_small = |fault| fault == Fault::FlippedSmall;
    let fault = match (is_cdn, method) {
        (true, _) => state.fault(|fault| !matches!(fault, Fault::List(_)) && !is_of_small(fault)),
        (false, "GET") => state.fault(is_of_small),
        _ => None,
    };
    if let Some(Fault::Status(status)) = fault {
        return out.write_all(head(status, "", 0).as_bytes());
    }
    let start = start.filter(|_| fault != Some(Fault::IgnoredRange));
    let mut rest = content[start.unwrap_or(0)..].to_vec();
    let more = match start {
        Some(start) => {
            format!("Content-Range: bytes {start}-{}/{}\r\n", content.len() - 1, content.len())
        }
        None => String::new(),
    };
    let status = if start.is_some() { 206 } else { 200 };
    out.write_all(head(status, &format!("ETag: {etag}\r\n{more}"), rest.len()).as_bytes())?;
    match fault {
        Some(Fault::Cut(at)) => rest.truncate(at - start.unwrap_or(0)),
        Some(Fault::Silence(at)) => {
            out.write_all(&rest[..at - start.unwrap_or(0)])?;
            std::thread::sleep(std::time::Duration::from_secs(60));
            return Ok(());
        }
        Some(Fault::Flipped) => rest[5] ^= 1,
        Some(Fault::FlippedSmall) => rest[0] ^= 1,
        _ => {}
    }
    if method == "HEAD" { Ok(()) } else { out.write_all(&rest) }
}
