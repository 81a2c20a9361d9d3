//! The handshake, in which both ends of a new connection prove that they belong to one job.
//!
//! | from | frame |
//! |---|---|
//! | client | magic, version, a nonce |
//! | server | magic, version, a nonce |
//! | client | a proof, [`Greeting`] |
//! | server | a proof, [`Verdict`]; without the client's proof nothing |
//!
//! A proof is an HMAC, with the job's key, of both nonces and of the bytes after the proof. The
//! nonces are new for each connection, so an attacker cannot reuse recorded frames on another
//! connection. The client proves first, so that a server gives a client without the key nothing to
//! guess the key from. After the handshake frames are neither encrypted nor signed.

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use super::job_key::{JobKey, Proof, random};
use super::protocol::{Incoming, Reader, decode, encode, send_frame};
use crate::Patience;

/// First bytes of both ends.
const MAGIC: &[u8; 8] = b"FULGSTOR";
/// Increased with every change of the wire format.
const VERSION: u16 = 4;
/// Longest frame of a handshake, so that strangers cannot make the server allocate much.
pub(super) const MAX_HANDSHAKE_FRAME: usize = 512;

type Nonce = [u8; 16];

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Purpose {
    Requests,
    Health,
}

/// The client's identity and purpose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) rank: usize,
    /// The number of ranks that the client expects.
    pub(super) world_size: usize,
    pub(super) purpose: Purpose,
}

/// The server's answer to a client of its job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Verdict {
    Admitted,
    /// The reason of the refusal.
    Refused(String),
}

/// The reason why a connection failed.
#[derive(Debug, PartialEq)]
pub(super) enum HandshakeError {
    /// The other end is busy, or not ready yet, with the reason.
    Retry(String),
    /// This process cannot open a connection, with the reason.
    Exhausted(String),
    /// The other end is not a store of Fulgurite.
    NotAStore,
    /// The store speaks this version of the protocol.
    Version(u16),
    /// The store belongs to another job.
    OtherJob,
    /// The store refuses this process, with the reason.
    Refused(String),
}

/// Does the client's side. The patience is for the whole handshake.
pub(super) fn connect<S>(
    stream: S,
    key: &JobKey,
    greeting: &Greeting,
    patience: &mut Patience,
) -> Result<Reader<S>, HandshakeError>
where
    S: Read + Write,
{
    let retry = |e: &dyn std::fmt::Display| HandshakeError::Retry(e.to_string());
    let own: Nonce = random().map_err(|e| retry(&e))?;
    let mut reader = Reader::new(stream, MAX_HANDSHAKE_FRAME);
    send_frame(reader.stream_mut(), &hello(own)).map_err(|e| retry(&e))?;
    let theirs = match read(&mut reader, patience)? {
        Incoming::Message(body) => nonce(&body)?,
        _ => return Err(HandshakeError::NotAStore),
    };
    let body = encode(greeting).map_err(|e| retry(&e))?;
    let proof = key.proof(&[b"client", &own, &theirs, &body]);
    send_frame(reader.stream_mut(), &signed(proof, &body)).map_err(|e| retry(&e))?;
    let answer = match read(&mut reader, patience)? {
        Incoming::Message(answer) => answer,
        _ => return Err(HandshakeError::NotAStore),
    };
    if answer.is_empty() {
        return Err(HandshakeError::OtherJob);
    }
    let (proof, verdict) = split(&answer).ok_or(HandshakeError::NotAStore)?;
    if !key.verify(proof, &[b"server", &own, &theirs, &body, verdict]) {
        return Err(HandshakeError::OtherJob);
    }
    match decode(verdict) {
        Some(Verdict::Admitted) => Ok(reader.with_long_frames()),
        Some(Verdict::Refused(why)) => Err(HandshakeError::Refused(why)),
        None => Err(HandshakeError::NotAStore),
    }
}

/// The reason why a client of the job is not admitted.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Denial {
    /// The reason, which the client is told.
    Refused(String),
    /// Its connection was closed for others; it may try again.
    TryAgain,
}

/// Does the server's side. Returns `None` for a client without the job's key or an admission.
///
/// `admit` is only called for clients of the job.
pub(super) fn accept<S>(
    stream: S,
    key: &JobKey,
    patience: &mut Patience,
    admit: impl FnOnce(&Greeting) -> Result<(), Denial>,
) -> Option<Accepted<S>>
where
    S: Read + Write,
{
    let mut reader = Reader::new(stream, MAX_HANDSHAKE_FRAME);
    let mut message = |reader: &mut Reader<S>| match read(reader, patience) {
        Ok(Incoming::Message(body)) => Some(body),
        _ => None,
    };
    let theirs = message(&mut reader)?;
    if !theirs.starts_with(MAGIC) {
        return None;
    }
    let own: Nonce = random().ok()?;
    send_frame(reader.stream_mut(), &hello(own)).ok()?;
    let theirs = nonce(&theirs).ok()?;
    let answer = message(&mut reader)?;
    let signed_greeting = split(&answer)
        .filter(|(proof, body)| key.verify(proof, &[b"client", &theirs, &own, body]))
        .and_then(|(_, body)| Some((decode::<Greeting>(body)?, body)));
    let Some((greeting, body)) = signed_greeting else {
        let _ = send_frame(reader.stream_mut(), &[]);
        return None;
    };
    let admitted = admit(&greeting);
    let verdict = match &admitted {
        Ok(()) => Verdict::Admitted,
        Err(Denial::Refused(why)) => Verdict::Refused(why.clone()),
        // Without a verdict the client tries again.
        Err(Denial::TryAgain) => return None,
    };
    let verdict = encode(&verdict).ok()?;
    let proof = key.proof(&[b"server", &theirs, &own, body, &verdict]);
    let told = send_frame(reader.stream_mut(), &signed(proof, &verdict)).is_ok();
    admitted.ok()?;
    Some(Accepted { reader: reader.with_long_frames(), greeting, told })
}

/// An admitted client.
pub(super) struct Accepted<S> {
    pub(super) reader: Reader<S>,
    pub(super) greeting: Greeting,
    /// Whether the verdict reached the client.
    pub(super) told: bool,
}

fn read<S: Read>(
    reader: &mut Reader<S>,
    patience: &mut Patience,
) -> Result<Incoming<Vec<u8>>, HandshakeError> {
    match reader.frame_within(patience) {
        Incoming::Closed => Err(HandshakeError::Retry("it closed the connection".into())),
        Incoming::Idle => {
            Err(HandshakeError::Retry("something listens there but does not answer".into()))
        }
        message => Ok(message),
    }
}

/// Returns the first frame of either end.
fn hello(nonce: Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &nonce].concat()
}

/// Returns the nonce in the other end's first frame.
fn nonce(hello: &[u8]) -> Result<Nonce, HandshakeError> {
    let parts = hello.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk());
    let Some((version, nonce)) = parts else { return Err(HandshakeError::NotAStore) };
    match u16::from_le_bytes(*version) {
        VERSION => nonce.try_into().map_err(|_| HandshakeError::NotAStore),
        other => Err(HandshakeError::Version(other)),
    }
}

fn signed(proof: Proof, body: &[u8]) -> Vec<u8> {
    [&proof[..], body].concat()
}

fn split(frame: &[u8]) -> Option<(&Proof, &[u8])> {
    frame.split_first_chunk()
}

impl HandshakeError {
    /// Describes the error, after the store's address.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Retry(why) | Self::Exhausted(why) => why.clone(),
            Self::NotAStore => "something answers there that is not a Fulgurite store. If another \
                                program has the port, give this job another MASTER_PORT"
                .to_owned(),
            Self::Version(version) => format!(
                "it speaks version {version} of the store's protocol, this process version {VERSION}: \
                 all ranks must run the same build of the program"
            ),
            Self::OtherJob => "it is the store of another job, or has another key. If two jobs share \
                               the address and port, give one of them another MASTER_PORT; else all \
                               ranks must have the same FULGURITE_JOB_KEY (or \
                               trainer.job_key_file)"
                .to_owned(),
            Self::Refused(why) => format!("it refuses this process: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn later() -> Patience {
        Patience::new(Duration::from_secs(60))
    }

    fn key() -> JobKey {
        JobKey::new("a secret of the job", "job")
    }

    fn greeting() -> Greeting {
        Greeting { rank: 1, world_size: 2, purpose: Purpose::Health }
    }

    /// Returns the results of both ends. The client has the key `client`; the server refuses with
    /// this message.
    fn shake(
        client: &JobKey,
        refuse: Option<&str>,
    ) -> (Result<(), HandshakeError>, Option<(Greeting, bool)>) {
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(move || {
                let admit = |_: &Greeting| {
                    refuse.map_or(Ok(()), |why| Err(Denial::Refused(why.to_owned())))
                };
                accept(far, &key(), &mut later(), admit)
                    .map(|accepted| (accepted.greeting, accepted.told))
            });
            let client = connect(near, client, &greeting(), &mut later()).map(drop);
            (client, server.join().unwrap())
        })
    }

    #[test]
    fn only_key_holders_are_admitted() {
        assert_eq!(shake(&key(), None), (Ok(()), Some((greeting(), true))));
        let full = HandshakeError::Refused("full".into());
        assert_eq!(shake(&key(), Some("full")), (Err(full), None));
        for other in [JobKey::new("a secret of the job", "job2"), JobKey::new("", "job")] {
            assert_eq!(shake(&other, Some("full")), (Err(HandshakeError::OtherJob), None));
        }
    }

    /// Returns the client's frames in a successful handshake.
    fn overheard() -> [Vec<u8>; 2] {
        let (near, far) = UnixStream::pair().unwrap();
        let (tapped, server) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || accept(server, &key(), &mut later(), |_| Ok(())).is_some());
            scope.spawn(move || connect(near, &key(), &greeting(), &mut later()).is_ok());
            let mut from = Reader::new(far, MAX_HANDSHAKE_FRAME);
            let mut to = Reader::new(tapped, MAX_HANDSHAKE_FRAME);
            let frame = |reader: &mut Reader<UnixStream>| match reader.frame_within(&mut later()) {
                Incoming::Message(frame) => frame,
                other => panic!("{other:?}"),
            };
            let first = frame(&mut from);
            send_frame(to.stream(), &first).unwrap();
            send_frame(from.stream(), &frame(&mut to)).unwrap();
            let second = frame(&mut from);
            send_frame(to.stream(), &second).unwrap();
            send_frame(from.stream(), &frame(&mut to)).unwrap();
            [first, second]
        })
    }

    #[test]
    fn recorded_frames_cannot_be_replayed() {
        let frames = overheard();
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let server =
                scope.spawn(move || accept(far, &key(), &mut later(), |_| Ok(())).is_some());
            let mut reader = Reader::new(near, MAX_HANDSHAKE_FRAME);
            send_frame(reader.stream_mut(), &frames[0]).unwrap();
            assert!(matches!(reader.frame_within(&mut later()), Incoming::Message(_)));
            send_frame(reader.stream_mut(), &frames[1]).unwrap();
            assert_eq!(reader.frame_within(&mut later()), Incoming::Message(vec![]));
            assert!(!server.join().unwrap());
        });
    }

    #[test]
    fn server_without_the_key_is_refused() {
        for answer in [vec![], vec![0; 33], vec![0; 31], b"HTTP/1.1 400 Bad Request".to_vec()] {
            let (near, far) = UnixStream::pair().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut reader = Reader::new(far, MAX_HANDSHAKE_FRAME);
                    reader.frame_within(&mut later());
                    send_frame(reader.stream_mut(), &hello([0; 16])).unwrap();
                    reader.frame_within(&mut later());
                    send_frame(reader.stream_mut(), &answer).unwrap();
                });
                let error = connect(near, &key(), &greeting(), &mut later()).err().unwrap();
                assert!(
                    matches!(error, HandshakeError::OtherJob | HandshakeError::NotAStore),
                    "{error:?}"
                );
            });
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_not_admitted(bytes: Vec<u8>, well_begun: bool) {
            let (near, far) = UnixStream::pair().unwrap();
            let begin = if well_begun { hello([7; 16]) } else { vec![] };
            let mut stream = Vec::new();
            if well_begun {
                send_frame(&mut stream, &begin).unwrap();
            }
            stream.extend(bytes);
            (&near).write_all(&stream).unwrap();
            near.shutdown(std::net::Shutdown::Write).unwrap();
            let let_in = accept(far, &key(), &mut later(), |_| Ok(())).is_some();
            prop_assert!(!let_in);
        }
    }
}
