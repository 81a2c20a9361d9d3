//! Discovery of ranks, and the handshake of a connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Time limit of the handshake.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of one read in the handshake.
const READ_SLICE: Duration = Duration::from_millis(500);
/// The caller's last message: it accepts the answer as the wanted rank's, and keeps the connection.
const AGREED: [u8; 1] = [1];
/// The first bytes of a connection.
const MAGIC: [u8; 8] = *b"FulgTcp1";
/// Limit for a group's key from an unknown caller.
const MAX_KEY: usize = 4096;

type Token = [u8; 16];

/// A rank's entry in the store, which only ranks of the job can read: its address, the caller's
/// token and the token of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Contact {
    pub(super) address: SocketAddr,
    asked: Token,
    answered: Token,
    /// [`Tcp::chunk_bytes`](super::Tcp::chunk_bytes), the same on all ranks.
    pub(super) chunk_bytes: usize,
}

impl Contact {
    pub(super) fn new(address: SocketAddr, chunk_bytes: usize) -> Result<Self> {
        let random = || -> Result<Token> {
            let mut token = Token::default();
            getrandom::fill(&mut token)
                .map_err(|e| Error::Launch(format!("the system has no random numbers: {e}")))?;
            Ok(token)
        };
        Ok(Self { address, asked: random()?, answered: random()?, chunk_bytes })
    }

    /// Connects to the rank as rank `from`, for the group `key`. Once connected, `tick` is called
    /// at least once a second.
    pub(super) fn call(
        &self,
        key: &str,
        from: usize,
        timeout: Duration,
        tick: &mut dyn FnMut(),
    ) -> io::Result<TcpStream> {
        let timeout = timeout.clamp(Duration::from_millis(1), GREETING_TIMEOUT);
        let mut stream = TcpStream::connect_timeout(&self.address, timeout)?;
        tick();
        let until = Instant::now() + GREETING_TIMEOUT;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_SLICE))?;
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        let mut message = Vec::with_capacity(64 + key.len());
        message.extend(MAGIC);
        message.extend(self.asked);
        message.extend((from as u32).to_le_bytes());
        message.extend((key.len() as u32).to_le_bytes());
        message.extend(key.as_bytes());
        stream.write_all(&message)?;
        let mut answer = Token::default();
        read(&mut stream, &mut answer, until, tick)?;
        if !same(&answer, &self.answered) {
            return Err(io::Error::other("somebody else answers there"));
        }
        stream.write_all(&AGREED)?;
        Ok(stream)
    }

    /// Answers an accepted connection. Returns the calling rank and the key of its group.
    pub(super) fn answer(&self, stream: &mut TcpStream) -> io::Result<(usize, String)> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_SLICE))?;
        stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
        let until = Instant::now() + GREETING_TIMEOUT;
        let mut head = [0; 32];
        read(stream, &mut head, until, &mut || {})?;
        let (magic, rest) = head.split_at(MAGIC.len());
        let (token, numbers) = rest.split_at(size_of::<Token>());
        if magic != MAGIC || !same(token, &self.asked) {
            return Err(io::Error::other("a stranger"));
        }
        let number = |at: usize| {
            u32::from_le_bytes([numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]])
        };
        let (from, len) = (number(0) as usize, number(4) as usize);
        if len > MAX_KEY {
            return Err(io::Error::other("a key that is too long"));
        }
        let mut key = vec![0; len];
        read(stream, &mut key, until, &mut || {})?;
        let key = String::from_utf8(key).map_err(io::Error::other)?;
        stream.write_all(&self.answered)?;
        // The caller may have given up before the answer, and called again.
        let mut agreed = [0; AGREED.len()];
        read(stream, &mut agreed, until, &mut || {})?;
        if agreed != AGREED {
            return Err(io::Error::other("a stranger"));
        }
        Ok((from, key))
    }
}

/// Fills `buffer`, in slices of [`READ_SLICE`], before `until`.
fn read(
    stream: &mut TcpStream,
    mut buffer: &mut [u8],
    until: Instant,
    tick: &mut dyn FnMut(),
) -> io::Result<()> {
    use io::ErrorKind::{Interrupted, TimedOut, UnexpectedEof, WouldBlock};
    while !buffer.is_empty() {
        if Instant::now() >= until {
            return Err(TimedOut.into());
        }
        match stream.read(buffer) {
            Ok(0) => return Err(UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {}
            Err(error) => return Err(error),
        }
        tick();
    }
    Ok(())
}

/// Compares in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}
