//! A server in this process, for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde_json::Value as Json;

use crate::remote::Patience;

/// Enough for a server that answers, also on a busy machine.
pub(crate) const QUICK: Patience = Patience {
    request: Duration::from_secs(20),
    pause: Duration::from_millis(1),
    attempts: 3,
    end: Duration::from_secs(20),
    retry_at_end: Duration::from_secs(20),
};

/// A request that the server has received.
pub(crate) struct Request {
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Json,
}

/// Answers a request with status and body.
pub(crate) type Answer = Box<dyn FnMut(&str, &Json) -> (u16, Json) + Send>;

/// Starts a server; returns its address and the received requests.
pub(crate) fn serve(mut answer: Answer) -> (String, Receiver<Request>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // Serves one connection at a time, until the client closes it.
            let _ = converse(stream.unwrap(), &sender, &mut answer);
        }
    });
    (address, requests)
}

fn converse(
    mut stream: TcpStream,
    requests: &Sender<Request>,
    answer: &mut Answer,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split_whitespace().nth(1).unwrap().to_owned();
        let mut headers = Vec::new();
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            let Some((name, value)) = header.trim().split_once(':') else { break };
            let (name, value) = (name.to_ascii_lowercase(), value.trim().to_owned());
            if name == "content-length" {
                length = value.parse().unwrap();
            }
            headers.push((name, value));
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let (status, said) = answer(&path, &body);
        let _ = requests.send(Request { path, headers, body });
        let said = said.to_string();
        let leads = if status / 100 == 3 { "Location: http://localhost/login\r\n" } else { "" };
        write!(
            stream,
            "HTTP/1.1 {status} x\r\n{leads}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{said}",
            said.len()
        )?;
    }
}
