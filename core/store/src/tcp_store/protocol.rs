//! The wire format: frames of a little-endian `u32` length and that many bytes, each a message in
//! [postcard](https://postcard.jamesmunns.com)'s format.

use std::io::{self, Read, Write};
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ClientIdentity;

/// The first bytes of a greeting.
const MAGIC: &[u8; 8] = b"FULGSTOR";
/// Increased with every change of the wire format.
pub(super) const VERSION: u16 = 2;
/// Longest frame. Control messages are smaller; a longer frame is none of this protocol.
const MAX_FRAME: usize = 64 << 20;
/// Longest greeting, so that a stray connection cannot make the server allocate much.
const MAX_GREETING: usize = 4096;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Purpose {
    Requests,
    Health,
}

/// The first frame of a client: [`MAGIC`], [`VERSION`], and this message.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) identity: ClientIdentity,
    pub(super) purpose: Purpose,
}

/// What a client sends after its greeting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Health: this rank has failed.
    Fail {
        message: String,
    },
    /// Wait until all ranks have joined.
    WaitForAll {
        timeout_ms: u64,
    },
    /// Health: a heartbeat.
    Ping,
    /// Health: this rank leaves (`true`) or is back (`false`).
    Left(bool),
    /// Health: confirms [`Reply::Failed`].
    FailureReceived,
    /// Health: another rank has failed, as this one has noticed.
    Noticed {
        rank: usize,
        message: String,
    },
}

/// What a server sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    Value(Vec<u8>),
    Number(i64),
    Timeout,
    /// These ranks have not joined in time.
    Missing(Vec<usize>),
    /// A rank failed: the answer to a request, or a notice on a health connection.
    Failed {
        rank: usize,
        message: String,
    },
    /// The server refuses the request or the greeting; its message.
    Refused(String),
    /// Health: a heartbeat.
    Ping,
    /// Health: the hosting process leaves (`true`) or is back (`false`).
    HostLeft(bool),
    /// Health: confirms [`Request::Fail`].
    Recorded,
}

impl Greeting {
    /// The body of its frame.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let mut body = MAGIC.to_vec();
        body.extend(VERSION.to_le_bytes());
        body.extend(encode(self)?);
        Ok(body)
    }

    /// Fails with the message for the client.
    pub(super) fn decode(body: &[u8]) -> Result<Self, String> {
        let Some(rest) = body.strip_prefix(MAGIC) else {
            return Err("this is a Fulgurite store, and that was no greeting of its client".into());
        };
        let (version, rest) = rest.split_first_chunk().ok_or("the greeting is cut off")?;
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!(
                "the store speaks version {VERSION} of its protocol, this client version \
                 {version}: all ranks must run the same build of the program"
            ));
        }
        decode(rest).ok_or_else(|| "the greeting is cut off or has the wrong form".into())
    }
}

/// The body of a message's frame.
fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(io::Error::other)
}

/// The message in `body`; `None` if it is malformed or followed by more bytes.
fn decode<T: DeserializeOwned>(body: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

/// Sends one message.
pub(super) fn send(stream: impl Write, message: &impl Serialize) -> io::Result<()> {
    send_frame(stream, &encode(message)?)
}

/// Writes one frame with one call, so that the frames of two threads do not mix as long as each
/// fits into the socket's buffer. Frames on health connections, where two threads write, do.
pub(super) fn send_frame(mut stream: impl Write, body: &[u8]) -> io::Result<()> {
    if body.len() > MAX_FRAME {
        return Err(io::Error::other(format!(
            "a message of {} bytes is too large for the store, which takes {MAX_FRAME} bytes at \
             most",
            body.len()
        )));
    }
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend((body.len() as u32).to_le_bytes());
    frame.extend(body);
    stream.write_all(&frame)
}

/// The outcome of a read.
#[derive(Debug, PartialEq)]
pub(super) enum Incoming<T> {
    Message(T),
    /// The stream's read timeout passed. A part of a frame that has arrived is kept.
    Idle,
    /// The other side ended or broke the connection.
    Closed,
    /// This is no message of the protocol.
    Malformed,
}

/// The reading half of a connection, whose stream has a read timeout. It buffers what follows the
/// message that was asked for, so a connection keeps one reader all its life.
pub(super) struct Reader<S> {
    stream: S,
    buffer: Vec<u8>,
    max: usize,
}

impl<S: Read> Reader<S> {
    /// A reader at the client's end of a new connection.
    pub(super) fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::new(), max: MAX_FRAME }
    }

    /// A reader at the server's end, and the greeting, whose size is limited, that it has read.
    pub(super) fn with_greeting(
        stream: S,
        deadline: Instant,
    ) -> (Self, Incoming<Result<Greeting, String>>) {
        let mut reader = Self { max: MAX_GREETING, ..Self::new(stream) };
        let frame = retry_until(deadline, || reader.frame());
        reader.max = MAX_FRAME;
        let greeting = match frame {
            Incoming::Message(body) => Incoming::Message(Greeting::decode(&body)),
            // Another protocol. The refusal says that this is a store.
            Incoming::Malformed => Incoming::Message(Greeting::decode(&[])),
            Incoming::Idle => Incoming::Idle,
            Incoming::Closed => Incoming::Closed,
        };
        (reader, greeting)
    }

    /// The stream, to write to.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// The next message; [`Incoming::Idle`] each time the stream's read timeout passes.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Incoming<T> {
        match self.frame() {
            Incoming::Message(body) => decode(&body).map_or(Incoming::Malformed, Incoming::Message),
            Incoming::Idle => Incoming::Idle,
            Incoming::Closed => Incoming::Closed,
            Incoming::Malformed => Incoming::Malformed,
        }
    }

    /// The next message; [`Incoming::Idle`] once `deadline` has passed.
    pub(super) fn next_before<T: DeserializeOwned>(&mut self, deadline: Instant) -> Incoming<T> {
        retry_until(deadline, || self.next())
    }

    /// The body of the next frame. Memory is allocated for the bytes that arrive, not for the
    /// length that the frame claims.
    fn frame(&mut self) -> Incoming<Vec<u8>> {
        loop {
            if let Some((len, rest)) = self.buffer.split_first_chunk::<4>() {
                let len = u32::from_le_bytes(*len) as usize;
                if len > self.max {
                    return Incoming::Malformed;
                }
                if rest.len() >= len {
                    let body = rest[..len].to_vec();
                    self.buffer.drain(..4 + len);
                    return Incoming::Message(body);
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
}

/// Calls `next` again while it is idle and `deadline` has not passed.
fn retry_until<T>(deadline: Instant, mut next: impl FnMut() -> Incoming<T>) -> Incoming<T> {
    loop {
        match next() {
            Incoming::Idle if Instant::now() < deadline => {}
            other => return other,
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
            Just(Request::FailureReceived),
            (any::<usize>(), ".*").prop_map(|(rank, message)| Request::Noticed { rank, message }),
        ]
    }

    /// Replies with values of fewer than `bytes` bytes.
    fn replies(bytes: usize) -> impl Strategy<Value = Reply> {
        prop_oneof![
            Just(Reply::Done),
            prop::collection::vec(any::<u8>(), 0..bytes).prop_map(Reply::Value),
            any::<i64>().prop_map(Reply::Number),
            Just(Reply::Timeout),
            prop::collection::vec(any::<usize>(), 0..9).prop_map(Reply::Missing),
            (any::<usize>(), ".*").prop_map(|(rank, message)| Reply::Failed { rank, message }),
            ".*".prop_map(Reply::Refused),
            Just(Reply::Ping),
            any::<bool>().prop_map(Reply::HostLeft),
            Just(Reply::Recorded),
        ]
    }

    /// A stream of `bytes` in pieces of these sizes (in turn), each after a read timeout.
    struct Pieces<'a> {
        bytes: &'a [u8],
        sizes: std::iter::Cycle<std::slice::Iter<'a, usize>>,
        paused: bool,
    }

    impl<'a> Pieces<'a> {
        fn new(bytes: &'a [u8], sizes: &'a [usize]) -> Self {
            Self { bytes, sizes: sizes.iter().cycle(), paused: false }
        }
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.paused = !self.paused;
            if self.paused {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let size = *self.sizes.next().expect("there are sizes");
            self.bytes.read(&mut out[..size.min(4096)])
        }
    }

    /// All messages of a stream, and how it ends.
    fn read_all<T: DeserializeOwned>(bytes: &[u8], sizes: &[usize]) -> Vec<Incoming<T>> {
        let mut reader = Reader::new(Pieces::new(bytes, sizes));
        let mut all = Vec::new();
        loop {
            match reader.next() {
                Incoming::Idle => {}
                Incoming::Message(message) => all.push(Incoming::Message(message)),
                end => {
                    all.push(end);
                    return all;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_however_the_stream_is_cut(
            replies in prop::collection::vec(replies(9000), 0..6),
            sizes in prop::collection::vec(1usize..6000, 1..6),
            kept: prop::sample::Index,
        ) {
            let mut bytes = Vec::new();
            let mut ends = Vec::new();
            for reply in &replies {
                send(&mut bytes, reply).unwrap();
                ends.push(bytes.len());
            }
            let cut = kept.index(bytes.len() + 1);
            let whole = ends.iter().filter(|&&end| end <= cut).count();
            let mut expected: Vec<_> =
                replies[..whole].iter().cloned().map(Incoming::Message).collect();
            expected.push(Incoming::Closed);
            prop_assert_eq!(read_all::<Reply>(&bytes[..cut], &sizes), expected);
        }

        #[test]
        fn bodies_that_are_cut_or_too_long_are_refused(
            request in requests(), reply in replies(100), job_id in ".{0,40}", rank: usize,
        ) {
            fn check<T>(message: T, mut body: Vec<u8>, decode: impl Fn(&[u8]) -> Option<T>)
                -> Result<(), TestCaseError>
            where T: PartialEq + std::fmt::Debug
            {
                for cut in 0..body.len() {
                    prop_assert_eq!(decode(&body[..cut]), None);
                }
                prop_assert_eq!(decode(&body), Some(message));
                body.push(0);
                prop_assert_eq!(decode(&body), None);
                Ok(())
            }
            let body = encode(&request).unwrap();
            check(request, body, decode)?;
            let body = encode(&reply).unwrap();
            check(reply, body, decode)?;
            let identity = ClientIdentity { job_id, rank, world_size: 7 };
            let greeting = Greeting { identity, purpose: Purpose::Health };
            let body = greeting.encode().unwrap();
            check(greeting, body, |body| Greeting::decode(body).ok())?;
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            bytes: Vec<u8>, sizes in prop::collection::vec(1usize..300, 1..4),
        ) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<Reply>(&bytes);
            prop_assert!(Greeting::decode(&bytes).is_err());
            let _ = Greeting::decode(&[&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat());
            read_all::<Request>(&bytes, &sizes);
        }
    }

    #[test]
    fn a_length_that_is_claimed_allocates_nothing() {
        // A frame of MAX_FRAME bytes of which four arrive; a text and a list in a frame of a few.
        let claimed = [&(MAX_FRAME as u32).to_le_bytes()[..], &[0; 4]].concat();
        let mut reader = Reader::new(Pieces::new(&claimed, &[100]));
        while reader.next::<Reply>() != Incoming::Closed {}
        assert!(reader.buffer.capacity() <= 4096);
        let above = (MAX_FRAME as u32 + 1).to_le_bytes();
        assert_eq!(read_all::<Reply>(&above, &[100]), [Incoming::Malformed]);
        const LARGEST: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let text = [&[6], &LARGEST[..], b"abc"].concat();
        let list = [&[1], &LARGEST[..], b"abc"].concat();
        assert_eq!((decode::<Reply>(&text), decode::<Reply>(&list)), (None, None));
    }

    #[test]
    fn a_greeting_is_small_and_what_follows_need_not_be() {
        let greeting = Greeting {
            identity: ClientIdentity { job_id: "job".into(), rank: 1, world_size: 2 },
            purpose: Purpose::Requests,
        };
        let request = Request::Set { key: "key".into(), value: vec![7; 3 * MAX_GREETING] };
        let mut bytes = Vec::new();
        send_frame(&mut bytes, &greeting.encode().unwrap()).unwrap();
        send(&mut bytes, &request).unwrap();
        let now = Instant::now();
        let (mut reader, greeted) = Reader::with_greeting(&bytes[..], now);
        assert_eq!(greeted, Incoming::Message(Ok(greeting)));
        assert_eq!(reader.next_before(now), Incoming::Message(request.clone()));

        let mut bytes = Vec::new();
        send(&mut bytes, &request).unwrap();
        let (_, greeted) = Reader::with_greeting(&bytes[..], now);
        let Incoming::Message(Err(why)) = greeted else { panic!("admitted: {greeted:?}") };
        insta::assert_snapshot!(why, @"this is a Fulgurite store, and that was no greeting of its client");
    }
}
