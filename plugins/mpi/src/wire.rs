//! [`MpiWire`]: exchanging messages.
#![allow(unsafe_code)] // Memory that MPI reads and writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulgurite_transports::network::{Incoming, Outgoing, POLL_INTERVAL, Watch, Wire, WireError};

use crate::library::{Done, Fault, Request, Tested};
use crate::pause::Pause;
use crate::process::MpiProcess;

/// Interval between calls of the watch during a wait.
const TELL: Duration = POLL_INTERVAL.checked_div(2).expect("two is not zero");

/// Messages between the members of a group, told apart by its tag.
pub(crate) struct MpiWire {
    process: Arc<MpiProcess>,
    /// MPI rank by member.
    peers: Vec<usize>,
    tag: usize,
    pieces: Pieces,
    tested: Tested,
}

/// The pieces of the messages of an exchange.
#[derive(Default)]
struct Pieces {
    requests: Vec<Request>,
    about: Vec<Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    member: usize,
    bytes: usize,
    /// Index of the receive that the piece belongs to, or `None` for a send.
    receive: Option<usize>,
}

/// Progress of a receive.
#[derive(Clone, Default)]
struct Received {
    /// Whether MPI has its memory.
    posted: bool,
    /// Number of pieces that have not arrived.
    missing: usize,
    /// Error of a piece that has arrived.
    fault: Option<WireError>,
    told: bool,
}

/// An exchange under way.
struct Exchange<'a> {
    receives: &'a [Incoming],
    received: Vec<Received>,
    members: Vec<Member>,
    /// Pieces that are not done, and their bytes.
    left: usize,
    bytes: usize,
}

#[derive(Clone, Default)]
struct Member {
    /// Number of unfinished pieces from and to the member.
    missing: usize,
    /// Whether the watch has seen a message from it, which shows that it is in the same collective.
    heard: bool,
    /// Used in [`Exchange::tell`]: whether an earlier receive is incomplete.
    blocked: bool,
}

impl<'a> Exchange<'a> {
    fn new(sends: &[Outgoing], receives: &'a [Incoming], members: usize, limit: usize) -> Self {
        let mut exchange = Self {
            receives,
            received: vec![Received::default(); receives.len()],
            members: vec![Member::default(); members],
            left: 0,
            bytes: 0,
        };
        for Outgoing { to, bytes } in sends {
            exchange.expect(*to, bytes.len(), limit);
        }
        for (index, Incoming { from, bytes }) in receives.iter().enumerate() {
            exchange.received[index].missing = exchange.expect(*from, bytes.len(), limit);
        }
        exchange
    }

    /// Counts the pieces of a message.
    fn expect(&mut self, member: usize, bytes: usize, limit: usize) -> usize {
        let pieces = bytes.div_ceil(limit);
        self.members[member].missing += pieces;
        self.left += pieces;
        self.bytes += bytes;
        pieces
    }

    /// Accounts for a piece that is done.
    fn take(&mut self, done: Done, piece: Piece) -> Result<(), WireError> {
        let Piece { member, bytes, receive } = piece;
        self.left -= 1;
        self.bytes -= bytes;
        self.members[member].missing -= 1;
        let fault = done.fault.map(|fault| of_one(fault, member));
        let Some(receive) = receive else { return fault.map_or(Ok(()), Err) };
        let receive = &mut self.received[receive];
        receive.missing -= 1;
        let short = || {
            let text = format!("a message of {} bytes came instead of {bytes}", done.bytes);
            (done.bytes != bytes).then_some(WireError::Failed(text))
        };
        receive.fault = receive.fault.take().or(fault).or_else(short);
        Ok(())
    }

    /// Tells the watch of complete receives, in order for each member.
    fn tell(&mut self, watch: &mut dyn Watch) -> Result<(), WireError> {
        self.members.iter_mut().for_each(|member| member.blocked = false);
        for (index, (incoming, received)) in
            self.receives.iter().zip(&mut self.received).enumerate()
        {
            let member = &mut self.members[incoming.from];
            if member.blocked || incoming.bytes.len() == 0 || received.told {
                continue;
            }
            if let Some(fault) = received.fault.take() {
                return Err(fault);
            }
            if received.missing > 0 {
                member.blocked = true;
                continue;
            }
            received.told = true;
            watch.received(index)?;
            member.heard = true;
        }
        Ok(())
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&member| self.members[member].missing > 0).collect()
    }
}

impl MpiWire {
    pub(crate) fn new(process: Arc<MpiProcess>, peers: Vec<usize>, tag: usize) -> Self {
        Self { process, peers, tag, pieces: Pieces::default(), tested: Tested::default() }
    }

    /// Begins the sends.
    ///
    /// # Safety
    /// As [`Wire::exchange`].
    unsafe fn send(&mut self, sends: &[Outgoing]) -> Result<(), WireError> {
        let Self { process, peers, tag, pieces, .. } = self;
        for Outgoing { to, bytes } in sends {
            for (offset, len) in cuts(bytes.len(), process.piece_bytes()) {
                let start = bytes.cast::<u8>().wrapping_add(offset);
                let piece = std::ptr::slice_from_raw_parts(start, len);
                // SAFETY: a part of memory that the caller promises to be valid, even after an
                // error.
                let request = unsafe { process.library.send(piece, peers[*to], *tag) };
                pieces.push(request, Piece { member: *to, bytes: len, receive: None })?;
            }
        }
        Ok(())
    }

    /// Begins to receive the first message of each member, and the others once the watch has seen
    /// the first.
    ///
    /// Open MPI 4.1 writes past the end of memory that is shorter than the message (between ranks
    /// of a host, from 4 KiB on). If the members are in different collectives, later messages may
    /// be longer than expected.
    ///
    /// # Safety
    /// As [`Wire::exchange`].
    unsafe fn receive(&mut self, exchange: &mut Exchange<'_>) -> Result<(), WireError> {
        let Self { process, peers, tag, pieces, .. } = self;
        let mut first = vec![true; exchange.members.len()];
        for (index, Incoming { from, bytes }) in exchange.receives.iter().enumerate() {
            let (member, received) = (&exchange.members[*from], &mut exchange.received[index]);
            if bytes.len() == 0 {
                continue;
            }
            let is_first = std::mem::replace(&mut first[*from], false);
            if received.posted || !(member.heard || is_first) {
                continue;
            }
            received.posted = true;
            for (offset, len) in cuts(bytes.len(), process.piece_bytes()) {
                let start = bytes.cast::<u8>().wrapping_add(offset);
                let piece = std::ptr::slice_from_raw_parts_mut(start, len);
                // SAFETY: as in `send`.
                let request = unsafe { process.library.receive(piece, peers[*from], *tag) };
                let piece = Piece { member: *from, bytes: len, receive: Some(index) };
                pieces.push(request, piece)?;
            }
        }
        Ok(())
    }

    /// Exchanges the messages.
    ///
    /// # Safety
    /// As [`Wire::exchange`].
    unsafe fn run(
        &mut self,
        sends: &[Outgoing],
        receives: &[Incoming],
        watch: &mut dyn Watch,
    ) -> Result<(), WireError> {
        let limit = self.process.piece_bytes();
        let mut exchange = Exchange::new(sends, receives, self.peers.len(), limit);
        self.pieces.clear();
        // Receives first, so that arriving messages have memory at once.
        // SAFETY: as the caller promises.
        unsafe { self.receive(&mut exchange) }?;
        // SAFETY: as the caller promises.
        unsafe { self.send(sends) }?;
        let mut told = Instant::now();
        let (mut pause, mut moved) = (Pause::new(told), false);
        while exchange.left > 0 {
            let before = exchange.left;
            let Self { process, pieces, tested, .. } = self;
            let mut lost = Ok(());
            for done in process.library.test(&mut pieces.requests, tested).map_err(of_all)? {
                let piece = pieces.about[done.index];
                lost = lost.and(exchange.take(done, piece));
            }
            let now = Instant::now();
            if exchange.left < before {
                moved = true;
                pause.reset(now);
                // A received message may explain more than a failed send.
                exchange.tell(watch)?;
                lost?;
                // SAFETY: as the caller promises.
                unsafe { self.receive(&mut exchange) }?;
            } else {
                pause.pause(now, exchange.bytes);
            }
            if exchange.left > 0 && now.saturating_duration_since(told) >= TELL {
                watch.waiting(moved, &exchange.missing())?;
                (told, moved) = (now, false);
            }
        }
        Ok(())
    }

    /// Abandons the exchange. Its memory stays valid.
    fn give_up(&mut self) {
        self.process.fail();
        let Self { process, pieces, tested, .. } = self;
        for (request, piece) in pieces.requests.iter_mut().zip(&pieces.about) {
            if piece.receive.is_some() && *request != Request::none() {
                process.library.cancel(request);
            }
        }
        // One test, which releases the cancelled requests.
        let _ = process.library.test(&mut pieces.requests, tested).map(Iterator::count);
    }
}

impl Wire for MpiWire {
    unsafe fn exchange(
        &mut self,
        sends: &[Outgoing],
        receives: &[Incoming],
        watch: &mut dyn Watch,
    ) -> Result<(), WireError> {
        let process = self.process.clone();
        let Some(_exchanging) = process.begin() else {
            return Err(WireError::Failed("this process has finalised MPI".to_owned()));
        };
        // SAFETY: as the caller promises.
        let result = unsafe { self.run(sends, receives, watch) };
        if result.is_err() {
            self.give_up();
        }
        result
    }
}

impl Pieces {
    fn push(&mut self, request: Result<Request, Fault>, piece: Piece) -> Result<(), WireError> {
        self.requests.push(request.map_err(|fault| of_one(fault, piece.member))?);
        self.about.push(piece);
        Ok(())
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.about.clear();
    }
}

/// Offsets and lengths of pieces of at most `limit` bytes.
fn cuts(len: usize, limit: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(limit).map(move |start| (start, limit.min(len - start)))
}

/// Converts the error of a message.
fn of_one(fault: Fault, member: usize) -> WireError {
    if fault.truncated {
        return WireError::Failed(format!("a message is longer than its memory ({})", fault.text));
    }
    WireError::Lost { member, why: fault.text }
}

fn of_all(fault: Fault) -> WireError {
    WireError::Failed(fault.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_into_pieces() {
        let cuts = |len, limit| cuts(len, limit).collect::<Vec<_>>();
        assert_eq!(cuts(0, 4), []);
        assert_eq!(cuts(4, 4), [(0, 4)]);
        assert_eq!(cuts(9, 4), [(0, 4), (4, 4), (8, 1)]);
    }
}
