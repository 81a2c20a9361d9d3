//! Messages over the sockets of a group.
#![allow(unsafe_code)] // Messages are memory whose validity the caller promises.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use fulgurite_core::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::network::TcpNetwork;
use crate::network::wire::{Incoming, Outgoing, POLL_INTERVAL, Watch, Wire, WireError};

/// Number of messages passed to the kernel at once.
const SLICES: usize = 32;
/// The error for a member that closes its connection.
const CLOSED: &str = "it was closed";

/// The connections of one group, by member; `None` for this member.
pub(super) struct TcpWire {
    streams: Vec<Option<TcpStream>>,
    /// Listens as long as there are groups.
    _network: Arc<TcpNetwork>,
}

impl TcpWire {
    pub(super) fn new(streams: Vec<Option<TcpStream>>, network: Arc<TcpNetwork>) -> Result<Self> {
        for stream in streams.iter().flatten() {
            stream
                .set_nonblocking(true)
                .map_err(|e| Error::Launch(format!("a connection to a rank: {e}")))?;
        }
        Ok(Self { streams, _network: network })
    }
}

/// The messages to and from one member, in order.
#[derive(Default)]
struct Traffic {
    sends: Vec<*const [u8]>,
    /// With their numbers.
    receives: Vec<(usize, *mut [u8])>,
    /// Number of finished messages, and bytes of the next one.
    sent: (usize, usize),
    received: (usize, usize),
}

impl Traffic {
    fn sends(&self) -> bool {
        self.sent.0 < self.sends.len()
    }

    fn receives(&self) -> bool {
        self.received.0 < self.receives.len()
    }

    /// Sends as much as the kernel accepts at once. Returns whether it sent any byte.
    ///
    /// # Safety
    /// The memory of the messages is valid.
    unsafe fn send(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let (first, offset) = self.sent;
        let slices: Vec<IoSlice<'_>> = self.sends[first..]
            .iter()
            .take(SLICES)
            .enumerate()
            .map(|(i, &message)| {
                // SAFETY: as the caller promises.
                let bytes: &[u8] = unsafe { &*message };
                IoSlice::new(if i == 0 { &bytes[offset..] } else { bytes })
            })
            .collect();
        let Some(moved) = attempt(|| stream.write_vectored(&slices))? else { return Ok(false) };
        advance(&mut self.sent, moved, |i| self.sends[i].len());
        Ok(true)
    }

    /// Receives as much as has arrived. Returns whether it received any byte.
    ///
    /// # Safety
    /// The memory of the messages is valid, and no other code accesses it.
    unsafe fn receive(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let (first, offset) = self.received;
        let mut slices: Vec<IoSliceMut<'_>> = self.receives[first..]
            .iter()
            .take(SLICES)
            .enumerate()
            .map(|(i, &(_, message))| {
                // SAFETY: as the caller promises.
                let bytes: &mut [u8] = unsafe { &mut *message };
                IoSliceMut::new(if i == 0 { &mut bytes[offset..] } else { bytes })
            })
            .collect();
        let Some(moved) = attempt(|| stream.read_vectored(&mut slices))? else { return Ok(false) };
        if moved == 0 {
            return Err(io::Error::other(CLOSED));
        }
        advance(&mut self.received, moved, |i| self.receives[i].1.len());
        Ok(true)
    }
}

/// Runs a transfer. Returns `None` if the socket is not ready.
fn attempt(mut transfer: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match transfer() {
            Ok(moved) => return Ok(Some(moved)),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(e),
        }
    }
}

fn advance((message, offset): &mut (usize, usize), moved: usize, len: impl Fn(usize) -> usize) {
    let mut moved = moved;
    while moved > 0 {
        let rest = len(*message) - *offset;
        if moved < rest {
            *offset += moved;
            return;
        }
        moved -= rest;
        (*message, *offset) = (*message + 1, 0);
    }
}

impl Wire for TcpWire {
    unsafe fn exchange(
        &mut self,
        sends: &[Outgoing],
        receives: &[Incoming],
        watch: &mut dyn Watch,
    ) -> std::result::Result<(), WireError> {
        let mut traffic: Vec<Traffic> = Vec::new();
        traffic.resize_with(self.streams.len(), Traffic::default);
        for message in sends.iter().filter(|message| !message.bytes.is_empty()) {
            traffic[message.to].sends.push(message.bytes);
        }
        for (number, message) in receives.iter().enumerate() {
            if !message.bytes.is_empty() {
                traffic[message.from].receives.push((number, message.bytes));
            }
        }
        let mut moved_since = false;
        let mut told = Instant::now();
        loop {
            let (mut moved, mut rest) = (false, false);
            for (member, traffic) in traffic.iter_mut().enumerate() {
                let Some(stream) = &self.streams[member] else { continue };
                let lost = |error: io::Error| WireError::Lost { member, why: error.to_string() };
                if traffic.sends() {
                    // SAFETY: as the caller promises.
                    moved |= unsafe { traffic.send(stream) }.map_err(lost)?;
                }
                if traffic.receives() {
                    let before = traffic.received.0;
                    // SAFETY: as the caller promises.
                    moved |= unsafe { traffic.receive(stream) }.map_err(lost)?;
                    for &(number, _) in &traffic.receives[before..traffic.received.0] {
                        watch.received(number)?;
                    }
                }
                rest |= traffic.sends() || traffic.receives();
            }
            if !rest {
                return Ok(());
            }
            moved_since |= moved;
            if !moved {
                self.sleep(&traffic);
            }
            if told.elapsed() >= POLL_INTERVAL {
                let open = |traffic: &Traffic| traffic.sends() || traffic.receives();
                let missing: Vec<usize> =
                    (0..traffic.len()).filter(|&member| open(&traffic[member])).collect();
                watch.waiting(moved_since, &missing)?;
                (moved_since, told) = (false, Instant::now());
            }
        }
    }
}

impl TcpWire {
    /// Sleeps until a socket is ready, for at most [`POLL_INTERVAL`].
    fn sleep(&self, traffic: &[Traffic]) {
        let mut fds = Vec::with_capacity(traffic.len());
        for (stream, traffic) in self.streams.iter().zip(traffic) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, traffic.sends());
            flags.set(PollFlags::IN, traffic.receives());
            if let (Some(stream), false) = (stream, flags.is_empty()) {
                fds.push(PollFd::new(stream, flags));
            }
        }
        let nanos = POLL_INTERVAL.as_nanos() as i64;
        // The next transfer detects any error.
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: nanos }));
    }
}
