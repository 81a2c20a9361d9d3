//! Runs a rank's collectives, in the order they were started.
#![allow(unsafe_code)] // Exchanges with memory of tensors; the worker holds it, or never frees it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use candle_core::DType;
use fulgurite_engine::collective::{RANKS_DIFFER, ReduceOp};

use super::collectives::{self, Round};
use super::memory::{Memory, Scratch};
use super::shared::{Greeting, Shared, Waiting};
use super::wire::{Incoming, Outgoing, Wire};
use crate::engine::{Collective, Failure, Fingerprint, Job, RunJobs, Task, reduce, wait_for};

/// Runs a rank's collectives and counts them.
pub(super) struct Worker {
    shared: Arc<Shared>,
    /// `None` once the group has failed, so that other ranks see its connections end.
    wire: Option<Box<dyn Wire>>,
    /// All members, by the wire's numbers.
    members: Vec<usize>,
    sequence: u64,
    scratch: Scratch,
}

impl RunJobs for Worker {
    fn run(&mut self, job: Job, _: u32) {
        let Job { task, after, done } = job;
        let Task::Collective(collective) = task else {
            // Messages use their own lanes.
            return done.set(Err(Failure::Group("a message among the collectives".to_owned())));
        };
        let run = || {
            wait_for(after)?;
            self.collective(&collective)
        };
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let message = crate::threads::panic_message(&*panic);
            Err(Failure::Group(format!("a collective panicked: {message}")))
        });
        match &result {
            // Release the tensors before telling the caller of the end.
            Ok(()) => drop(collective),
            Err(failure) => {
                self.shared.fail(failure);
                // A network may still access all of this memory.
                std::mem::forget((collective, std::mem::take(&mut self.scratch)));
                self.wire = None;
            }
        }
        done.set(result);
    }
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, wire: Box<dyn Wire>) -> Self {
        let members = (0..shared.identity.size()).collect();
        Self { shared, wire: Some(wire), members, sequence: 0, scratch: Scratch::default() }
    }

    fn collective(&mut self, collective: &Collective) -> Result<(), Failure> {
        if let Some(failure) = self.shared.broken() {
            return Err(failure);
        }
        let Some(wire) = self.wire.as_deref_mut() else {
            return Err(Failure::Group("the group has failed before".to_owned()));
        };
        self.sequence += 1;
        let mut operation = Operation {
            shared: &self.shared,
            wire,
            members: &self.members,
            fingerprint: collective.fingerprint(),
            sequence: self.sequence,
            said: vec![false; self.shared.identity.size()],
            heard: vec![false; self.shared.identity.size()],
            all_meet: !matches!(collective, Collective::Broadcast(..)),
        };
        collectives::run(&mut operation, collective, &mut self.scratch)
    }
}

/// A collective under way.
pub(super) struct Operation<'a> {
    shared: &'a Shared,
    wire: &'a mut dyn Wire,
    members: &'a [usize],
    fingerprint: Fingerprint,
    sequence: u64,
    /// By member, whether this rank's greeting was sent, and whether the member's greeting was
    /// received.
    said: Vec<bool>,
    heard: Vec<bool>,
    /// Whether every member greets every other in the first round. Otherwise only members that
    /// exchange messages greet.
    all_meet: bool,
}

/// The first message of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Hello {
    sequence: u64,
    kind: u32,
    dtype: u32,
    bytes: u64,
    detail: u64,
}

impl Operation<'_> {
    pub(super) fn rank(&self) -> usize {
        self.shared.identity.rank
    }

    pub(super) fn size(&self) -> usize {
        self.shared.identity.size()
    }

    pub(super) fn chunk_bytes(&self) -> usize {
        self.shared.chunk_bytes
    }

    /// Reduces `sources`, one of each member in rank order, into `out`, which must be separate
    /// memory.
    pub(super) fn reduce(&self, dtype: DType, op: ReduceOp, sources: &[Memory], out: Memory) {
        // SAFETY: no exchange is under way, and the worker holds all memory; `out` is separate.
        let sources: Vec<&[u8]> = sources.iter().map(|source| unsafe { source.bytes() }).collect();
        // SAFETY: as above.
        reduce(dtype, op, &sources, unsafe { out.bytes_mut() });
    }

    /// Exchanges the messages of a round, after greetings between members that have not greeted
    /// yet.
    pub(super) fn exchange(&mut self, round: Round) -> Result<(), Failure> {
        let (rank, size, all_meet) = (self.rank(), self.size(), self.all_meet);
        let new = |list: &[(usize, Memory)], known: &mut [bool]| -> Vec<usize> {
            let among = |peer| list.iter().any(|(p, memory)| *p == peer && memory.len() > 0);
            let greets = |&peer: &usize| peer != rank && !known[peer] && (all_meet || among(peer));
            let peers: Vec<usize> = (0..size).filter(greets).collect();
            peers.iter().for_each(|&peer| known[peer] = true);
            peers
        };
        let to = new(&round.sends, &mut self.said);
        let from = new(&round.receives, &mut self.heard);
        let Fingerprint { kind, dtype, bytes, detail } = self.fingerprint;
        let own = Hello { sequence: self.sequence, kind, dtype, bytes, detail };
        let mut hello = Box::new(own);
        let mut hellos = vec![Hello::zeroed(); from.len()];
        let greeting = Memory::of_bytes(bytemuck::bytes_of_mut(&mut *hello));
        let greetings: Vec<(usize, Memory)> = hellos
            .iter_mut()
            .zip(&from)
            .map(|(hello, &peer)| (peer, Memory::of_bytes(bytemuck::bytes_of_mut(hello))))
            .collect();
        let sends: Vec<Outgoing> = to
            .iter()
            .map(|&peer| greeting.to(peer))
            .chain(round.sends.iter().map(|(peer, memory)| memory.to(*peer)))
            .collect();
        let receives: Vec<Incoming> = greetings
            .iter()
            .chain(&round.receives)
            .map(|(peer, memory)| memory.from(*peer))
            .collect();
        let (shared, members) = (self.shared, self.members);
        let (fingerprint, sequence) = (self.fingerprint, self.sequence);
        let what = || format!("in {fingerprint} (collective {sequence} of this group)");
        let compared = Compared { shared, own, fingerprint };
        let mut waiting = Waiting::new(shared, members, &what, Some(&compared), &greetings);
        // SAFETY: all memory belongs to tensors that the worker holds, to its scratch buffers, or
        // to `hello` and `hellos`. After an error each of them is leaked, here or by the worker.
        let exchanged = unsafe { self.wire.exchange(&sends, &receives, &mut waiting) };
        let ended = waiting.ended.take();
        drop(waiting);
        exchanged.map_err(|error| {
            let failure = shared.failure_of(error, members, ended, &what());
            std::mem::forget((hello, hellos));
            failure
        })
    }
}

/// Compares this rank's collective with the greetings of other members.
struct Compared<'a> {
    shared: &'a Shared,
    own: Hello,
    fingerprint: Fingerprint,
}

impl Greeting for Compared<'_> {
    fn mismatch(&self, member: usize, theirs: &[u8]) -> Option<String> {
        let theirs: Hello = bytemuck::pod_read_unaligned(theirs);
        if theirs == self.own {
            return None;
        }
        let Hello { sequence, kind, dtype, bytes, detail } = theirs;
        let (mine, other) =
            (self.fingerprint.to_string(), Fingerprint { kind, dtype, bytes, detail }.to_string());
        let what = match mine == other {
            true => format!(
                "both called {mine}, but with different arguments (counts, operation, source or \
                 partition)"
            ),
            false => {
                let rank = self.shared.identity.global_ranks[member];
                format!("rank {}: {mine}; rank {rank}: {other}", self.shared.identity.own_rank())
            }
        };
        let (here, there) = (self.own.sequence, sequence);
        let number = match here == there {
            true => format!("collective {here}"),
            false => format!("collective {here} (there {there})"),
        };
        Some(format!(
            "{RANKS_DIFFER} {number} of this group: {what}. All ranks must call the same \
             collectives in the same order"
        ))
    }
}
