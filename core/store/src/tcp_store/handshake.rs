//! How both ends of a new connection show each other that they belong to one job.
//!
//! | from | frame |
//! |---|---|
//! | client | magic, version, a nonce |
//! | server | magic, version, a nonce |
//! | client | a proof, [`Greeting`] |
//! | server | a proof, [`Verdict`]; without the client's proof nothing |
//!
//! A proof is an HMAC, with the job's key, of both nonces and of what follows the proof. The nonces are new
//! for each connection, so what was overheard on one is of no use on another. The client proves first: a
//! server tells those who have no key nothing that would help to guess it. What follows the handshake is
//! neither encrypted nor signed.

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use super::job_key::{JobKey, Proof, random};
use super::protocol::{Incoming, Reader, decode, encode, send_frame};
use crate::Patience;

/// The first bytes of both ends.
const MAGIC: &[u8; 8] = b"FULGSTOR";
/// Increased with every change of the wire format.
const VERSION: u16 = 3;
/// Longest frame of a handshake, so that strangers cannot make the server allocate much.
pub(super) const MAX_HANDSHAKE_FRAME: usize = 512;

type Nonce = [u8; 16];

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) enum Purpose {
    Requests,
    Health,
}

/// Who connects, and for what.
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
    /// Why not.
    Refused(String),
}

/// Why there is no connection.
#[derive(Debug, PartialEq)]
pub(super) enum HandshakeError {
    /// The other end is not ready, or busy: why.
    Retry(String),
    /// This process can open no connection: why.
    Exhausted(String),
    /// The other end is no store of ours.
    NotAStore,
    /// The store speaks this version of the protocol.
    Version(u16),
    /// The store is not of this process's job.
    OtherJob,
    /// The store refuses this process: why.
    Refused(String),
}

/// The client's side. The patience is for the whole handshake.
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

/// Why a client of the job is not let in.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Denial {
    /// For this reason, which the client is told.
    Refused(String),
    /// It lost its place to others, and may come again.
    TryAgain,
}

/// The server's side: `None` if the client has no key of the job, or was not let in. `admit` is asked about
/// clients of the job alone.
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

/// A client that was admitted.
pub(super) struct Accepted<S> {
    pub(super) reader: Reader<S>,
    pub(super) greeting: Greeting,
    /// Whether the client was told.
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

/// The first frame of either end.
fn hello(nonce: Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &nonce].concat()
}

/// The nonce of the other end's first frame.
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
    /// What to say of it, after the store's address.
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

    /// What both ends come to, the client with the key `client` and the server refusing with this message.
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
    fn those_with_the_key_meet_and_others_learn_nothing() {
        assert_eq!(shake(&key(), None), (Ok(()), Some((greeting(), true))));
        let full = HandshakeError::Refused("full".into());
        assert_eq!(shake(&key(), Some("full")), (Err(full), None));
        for other in [JobKey::new("a secret of the job", "job2"), JobKey::new("", "job")] {
            assert_eq!(shake(&other, Some("full")), (Err(HandshakeError::OtherJob), None));
        }
    }

    /// The frames of the client in a handshake that succeeds.
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
    fn what_was_overheard_opens_no_other_connection() {
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
    fn a_server_without_the_key_is_not_believed() {
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
        fn no_bytes_are_let_in(bytes: Vec<u8>, well_begun: bool) {
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
