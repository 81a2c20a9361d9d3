//! What goes over the wire: frames of a little-endian `u32` length and that many bytes, the first
//! of which says what it is.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::Identity;

/// First bytes of a greeting, before anything else is read.
const MAGIC: &[u8; 8] = b"FULGSTOR";
/// Changes with every change of what goes over the wire.
pub(super) const VERSION: u16 = 1;
/// Control messages are small; anything above is not of this protocol.
const MAX_FRAME: usize = 64 << 20;
/// A greeting is smaller still, so that a stray connection cannot make the server allocate.
pub(super) const MAX_GREETING: usize = 4096;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Purpose {
    Requests,
    Health,
}

/// The first frame of a client.
#[derive(Debug, PartialEq)]
pub(super) struct Greeting {
    pub(super) identity: Identity,
    pub(super) purpose: Purpose,
}

/// A client's frames.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        key: String,
        timeout_ms: u64,
    },
    Add {
        key: String,
        amount: i64,
    },
    Fail {
        message: String,
    },
    /// Wait until all ranks have joined.
    WaitForAll {
        timeout_ms: u64,
    },
    /// Health: a sign of life.
    Ping,
    /// Health: this rank leaves (or is back).
    Left(bool),
    /// Health: the failure has arrived.
    Told,
}

/// A server's frames.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Reply {
    Done,
    Value(Vec<u8>),
    Number(i64),
    Timeout,
    /// In answer to a request, or unasked on a health connection.
    Failed {
        rank: u64,
        message: String,
    },
    /// The request or greeting makes no sense; in the server's words.
    Refused(String),
    /// Health: a sign of life.
    Ping,
    /// Health: the hosting process leaves (or is back).
    HostLeft(bool),
}

impl Greeting {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.push(matches!(self.purpose, Purpose::Health).into());
        out.extend((self.identity.rank as u64).to_le_bytes());
        out.extend((self.identity.world_size as u64).to_le_bytes());
        put_bytes(&mut out, self.identity.job_id.as_bytes());
        out
    }

    /// The error is what to tell the stranger.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut rest = Fields(bytes);
        if rest.take(MAGIC.len()) != Some(MAGIC) {
            return Err("this is a Fulgurite store, and that was no greeting of its client".into());
        }
        let version = rest.u16().unwrap_or_default();
        if version != VERSION {
            return Err(format!(
                "the store speaks version {VERSION} of its protocol, this client version \
                 {version}: all ranks must run the same build of the program"
            ));
        }
        let parsed = (|| {
            let purpose = if rest.u8()? == 0 { Purpose::Requests } else { Purpose::Health };
            let rank = usize::try_from(rest.u64()?).ok()?;
            let world_size = usize::try_from(rest.u64()?).ok()?;
            let job_id = rest.string()?;
            Some(Self { identity: Identity { job_id, rank, world_size }, purpose })
        })();
        parsed.ok_or_else(|| "the greeting is cut off".into())
    }
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Set { key, value } => {
                out.push(0);
                put_bytes(&mut out, key.as_bytes());
                put_bytes(&mut out, value);
            }
            Self::Get { key, timeout_ms } => {
                out.push(1);
                put_bytes(&mut out, key.as_bytes());
                out.extend(timeout_ms.to_le_bytes());
            }
            Self::Add { key, amount } => {
                out.push(2);
                put_bytes(&mut out, key.as_bytes());
                out.extend(amount.to_le_bytes());
            }
            Self::Fail { message } => {
                out.push(3);
                put_bytes(&mut out, message.as_bytes());
            }
            Self::WaitForAll { timeout_ms } => {
                out.push(4);
                out.extend(timeout_ms.to_le_bytes());
            }
            Self::Ping => out.push(5),
            Self::Left(left) => out.extend([6, (*left).into()]),
            Self::Told => out.push(7),
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Fields(bytes);
        Some(match rest.u8()? {
            0 => Self::Set { key: rest.string()?, value: rest.bytes()?.to_vec() },
            1 => Self::Get { key: rest.string()?, timeout_ms: rest.u64()? },
            2 => Self::Add { key: rest.string()?, amount: rest.u64()?.cast_signed() },
            3 => Self::Fail { message: rest.string()? },
            4 => Self::WaitForAll { timeout_ms: rest.u64()? },
            5 => Self::Ping,
            6 => Self::Left(rest.u8()? != 0),
            7 => Self::Told,
            _ => return None,
        })
    }
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Done => out.push(0),
            Self::Value(value) => {
                out.push(1);
                put_bytes(&mut out, value);
            }
            Self::Number(number) => {
                out.push(2);
                out.extend(number.to_le_bytes());
            }
            Self::Timeout => out.push(3),
            Self::Failed { rank, message } => {
                out.push(4);
                out.extend(rank.to_le_bytes());
                put_bytes(&mut out, message.as_bytes());
            }
            Self::Refused(message) => {
                out.push(5);
                put_bytes(&mut out, message.as_bytes());
            }
            Self::Ping => out.push(6),
            Self::HostLeft(left) => out.extend([7, (*left).into()]),
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Fields(bytes);
        Some(match rest.u8()? {
            0 => Self::Done,
            1 => Self::Value(rest.bytes()?.to_vec()),
            2 => Self::Number(rest.u64()?.cast_signed()),
            3 => Self::Timeout,
            4 => Self::Failed { rank: rest.u64()?, message: rest.string()? },
            5 => Self::Refused(rest.string()?),
            6 => Self::Ping,
            7 => Self::HostLeft(rest.u8()? != 0),
            _ => return None,
        })
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

/// What of a frame is still to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u64()?).ok()?;
        self.take(len)
    }

    fn string(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.bytes()?).into_owned())
    }
}

/// Writes one frame with one system call, so that frames of two threads do not mix.
pub(super) fn write_frame(mut stream: &TcpStream, body: &[u8]) -> io::Result<()> {
    if body.len() > MAX_FRAME {
        return Err(io::Error::other(format!(
            "a value of {} bytes is too large for the store, which takes control messages only",
            body.len()
        )));
    }
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend(body);
    stream.write_all(&frame)
}

/// What reading brought.
#[derive(Debug, PartialEq)]
pub(super) enum Incoming {
    Frame(Vec<u8>),
    /// The stream's read timeout passed. What came of a frame is kept.
    Idle,
    /// The other side ended or broke the connection.
    Closed,
    /// This is no frame of the protocol.
    Garbage,
}

/// Reads frames from a stream that has a read timeout.
pub(super) struct FrameReader<'a> {
    stream: &'a TcpStream,
    buffer: Vec<u8>,
    max: usize,
}

impl<'a> FrameReader<'a> {
    pub(super) fn new(stream: &'a TcpStream) -> Self {
        Self { stream, buffer: Vec::new(), max: MAX_FRAME }
    }

    /// Refuses frames above `max` bytes.
    pub(super) fn with_max(mut self, max: usize) -> Self {
        self.max = max;
        self
    }

    /// The next frame, [`Incoming::Idle`] each time the stream's read timeout passes.
    pub(super) fn next(&mut self) -> Incoming {
        loop {
            if let Some((len, rest)) = self.buffer.split_first_chunk::<4>() {
                let len = u32::from_le_bytes(*len) as usize;
                if len > self.max {
                    return Incoming::Garbage;
                }
                if rest.len() >= len {
                    let frame = rest[..len].to_vec();
                    self.buffer.drain(..4 + len);
                    return Incoming::Frame(frame);
                }
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Incoming::Closed,
                Ok(n) => self.buffer.extend(&chunk[..n]),
                Err(e) => match e.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Incoming::Idle,
                    _ => return Incoming::Closed,
                },
            }
        }
    }

    /// The next frame; [`Incoming::Idle`] once `deadline` has passed.
    pub(super) fn next_before(&mut self, deadline: Instant) -> Incoming {
        loop {
            match self.next() {
                Incoming::Idle if Instant::now() < deadline => {}
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests() -> impl Strategy<Value = Request> {
        prop_oneof![
            (".*", any::<Vec<u8>>()).prop_map(|(key, value)| Request::Set { key, value }),
            (".*", any::<u64>()).prop_map(|(key, timeout_ms)| Request::Get { key, timeout_ms }),
            (".*", any::<i64>()).prop_map(|(key, amount)| Request::Add { key, amount }),
            ".*".prop_map(|message| Request::Fail { message }),
            any::<u64>().prop_map(|timeout_ms| Request::WaitForAll { timeout_ms }),
            Just(Request::Ping),
            any::<bool>().prop_map(Request::Left),
            Just(Request::Told),
        ]
    }

    fn replies() -> impl Strategy<Value = Reply> {
        prop_oneof![
            Just(Reply::Done),
            any::<Vec<u8>>().prop_map(Reply::Value),
            any::<i64>().prop_map(Reply::Number),
            Just(Reply::Timeout),
            (any::<u64>(), ".*").prop_map(|(rank, message)| Reply::Failed { rank, message }),
            ".*".prop_map(Reply::Refused),
            Just(Reply::Ping),
            any::<bool>().prop_map(Reply::HostLeft),
        ]
    }

    proptest! {
        #[test]
        fn frames_round_trip_and_cut_ones_are_refused(
            request in requests(), reply in replies(), job_id in ".{0,40}", rank: u32,
        ) {
            let bytes = request.encode();
            prop_assert_eq!(Request::decode(&bytes[..bytes.len() - 1]), None);
            prop_assert_eq!(Request::decode(&bytes), Some(request));
            let bytes = reply.encode();
            prop_assert_eq!(Reply::decode(&bytes[..bytes.len() - 1]), None);
            prop_assert_eq!(Reply::decode(&bytes), Some(reply));
            let identity = Identity { job_id, rank: rank as usize, world_size: 7 };
            let greeting = Greeting { identity, purpose: Purpose::Health };
            let bytes = greeting.encode();
            prop_assert!(Greeting::decode(&bytes[..bytes.len() - 1]).is_err());
            prop_assert_eq!(Greeting::decode(&bytes), Ok(greeting));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = Request::decode(&bytes);
            let _ = Reply::decode(&bytes);
            prop_assert!(Greeting::decode(&bytes).is_err());
        }
    }
}
