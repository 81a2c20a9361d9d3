//! The wire format: frames of a little-endian `u32` length and that many bytes.
//!
//! Each frame is a message in the format of [postcard](https://postcard.jamesmunns.com).

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Patience;

/// Longest frame. Control messages are smaller; a longer frame does not belong to this protocol.
const MAX_FRAME: usize = 16 << 20;

/// A client's message after the handshake.
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
    /// Health: this rank has noticed the failure of another rank.
    Noticed {
        rank: usize,
        message: String,
    },
    CompareSet {
        key: String,
        expected: Option<Vec<u8>>,
        value: Vec<u8>,
    },
}

/// A server's message.
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
    /// The server refuses the request, with a message.
    Refused(String),
    /// Health: a heartbeat.
    Ping,
    /// Health: the hosting process leaves (`true`) or is back (`false`).
    HostLeft(bool),
    /// Health: confirms [`Request::Fail`].
    Recorded,
    /// Whether a value was the expected one.
    Compared(bool),
}

/// Encodes a message as the body of its frame.
pub(super) fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(io::Error::other)
}

/// Decodes the message in `body`; `None` if it is malformed or followed by more bytes.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

/// Sends one message.
pub(super) fn send(stream: impl Write, message: &impl Serialize) -> io::Result<()> {
    send_frame(stream, &encode(message)?)
}

/// Writes one frame with one call.
///
/// So the frames of two threads do not mix, if each fits into the socket's buffer. They fit on
/// health connections, where two threads write.
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
    /// The stream's read timeout passed. The received part of a frame is kept.
    Idle,
    /// The other side ended or broke the connection.
    Closed,
    /// The bytes are not a message of the protocol.
    Malformed,
}

/// The reading half of a connection, whose stream has a read timeout.
///
/// It buffers bytes after the current message, so a connection keeps one reader for its lifetime.
pub(super) struct Reader<S> {
    stream: S,
    buffer: Vec<u8>,
    max: usize,
}

impl<S: Read> Reader<S> {
    /// Creates a reader of frames of at most `max` bytes.
    pub(super) fn new(stream: S, max: usize) -> Self {
        Self { stream, buffer: Vec::new(), max }
    }

    /// Continues with all frames of the protocol.
    pub(super) fn with_long_frames(self) -> Self {
        Self { max: MAX_FRAME, ..self }
    }

    /// Returns the stream for writing.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns the stream mutably, for writing.
    pub(super) fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Returns the next message; [`Incoming::Idle`] each time the stream's read timeout passes.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Incoming<T> {
        match self.frame() {
            Incoming::Message(body) => decode(&body).map_or(Incoming::Malformed, Incoming::Message),
            Incoming::Idle => Incoming::Idle,
            Incoming::Closed => Incoming::Closed,
            Incoming::Malformed => Incoming::Malformed,
        }
    }

    /// Returns the body of the next frame; [`Incoming::Idle`] once `patience` has ended.
    ///
    /// A frame that arrives slowly does not extend it. The stream's read timeout is at most a slice
    /// of patience.
    pub(super) fn frame_within(&mut self, patience: &mut Patience) -> Incoming<Vec<u8>> {
        loop {
            let mut over = false;
            let frame = self.frame_or(|| {
                over = patience.slice().is_none();
                over
            });
            match frame {
                Incoming::Idle if !over => {}
                other => return other,
            }
        }
    }

    /// Returns the body of the next frame. Memory is allocated for the bytes that arrive, not for
    /// the length that the frame claims.
    fn frame(&mut self) -> Incoming<Vec<u8>> {
        self.frame_or(|| false)
    }

    /// Reads as [`frame`](Self::frame), but also returns [`Incoming::Idle`] before a read if `stop`
    /// says so.
    fn frame_or(&mut self, mut stop: impl FnMut() -> bool) -> Incoming<Vec<u8>> {
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
            if stop() {
                return Incoming::Idle;
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

    /// Generates replies with values of fewer than `bytes` bytes.
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

    /// Returns all messages of a stream, and its end.
    fn read_all<T: DeserializeOwned>(bytes: &[u8], sizes: &[usize]) -> Vec<Incoming<T>> {
        let mut reader = Reader::new(Pieces::new(bytes, sizes), MAX_FRAME);
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
        fn messages_survive_any_stream_split(
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
        fn truncated_or_long_bodies_are_refused(
            request in requests(), reply in replies(100),
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
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            bytes: Vec<u8>, sizes in prop::collection::vec(1usize..300, 1..4),
        ) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<Reply>(&bytes);
            read_all::<Request>(&bytes, &sizes);
        }
    }

    #[test]
    fn claimed_length_does_not_allocate() {
        // A frame claims MAX_FRAME bytes, and four arrive. Then a text and a list claim more than
        // their frame.
        let claimed = [&(MAX_FRAME as u32).to_le_bytes()[..], &[0; 4]].concat();
        let mut reader = Reader::new(Pieces::new(&claimed, &[100]), MAX_FRAME);
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
    fn long_frames_only_after_the_handshake() {
        let request = Request::Set { key: "key".into(), value: vec![7; 3 * 512] };
        let mut bytes = Vec::new();
        send_frame(&mut bytes, &[1; 512]).unwrap();
        send(&mut bytes, &request).unwrap();
        let mut reader = Reader::new(&bytes[..], 512);
        let later = &mut Patience::new(std::time::Duration::from_secs(60));
        assert_eq!(reader.frame_within(later), Incoming::Message(vec![1; 512]));
        let mut reader = reader.with_long_frames();
        assert_eq!(reader.next(), Incoming::Message(request.clone()));

        let mut bytes = Vec::new();
        send(&mut bytes, &request).unwrap();
        let mut reader = Reader::new(&bytes[..], 512);
        assert_eq!(reader.frame_within(later), Incoming::Malformed);
    }
}
