//! Messages between two members of a group.
//!
//! Each used pair and direction has its own connection and thread, a *lane*. So messages of
//! different members, and collectives, make progress at once. Messages of a lane keep their order.
#![allow(unsafe_code)] // Exchanges with memory of tensors that the lane holds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use bytemuck::{Pod, Zeroable};
use candle_core::Tensor;
use fulgurite_engine::collective::check;
use fulgurite_error::{Error, Result, advice};

use super::memory::Memory;
use super::shared::{Greeting, Shared, Waiting};
use super::wire::Wire;
use crate::engine::{Buffer, Completion, Failure, P2pTask, dtype_code};

/// The lanes of a group, by member and by whether this rank sends.
pub(super) struct Lanes {
    shared: Arc<Shared>,
    lanes: Mutex<HashMap<(usize, bool), Lane>>,
}

struct Lane {
    messages: Sender<(Tensor, Arc<Completion>)>,
    thread: JoinHandle<()>,
}

impl Lanes {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, lanes: Mutex::default() }
    }

    /// Starts a message.
    pub(super) fn push(&self, task: P2pTask) -> Result<Arc<Completion>> {
        let P2pTask { sending, peer, tensor } = task;
        let mut lanes = self.lanes.lock().expect("no panic while a lane is made");
        let lane = match lanes.entry((peer, sending)) {
            Entry::Occupied(lane) => lane.into_mut(),
            Entry::Vacant(place) => place.insert(self.open(peer, sending)?),
        };
        let done = Arc::new(Completion::default());
        // The lane outlives its sender.
        let _ = lane.messages.send((tensor, done.clone()));
        Ok(done)
    }

    fn open(&self, peer: usize, sending: bool) -> Result<Lane> {
        let (messages, queue) = channel();
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name(format!("p2p-{peer}"))
            .spawn(move || run(&shared, peer, sending, &queue))
            .map_err(|e| {
                Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
            })?;
        Ok(Lane { messages, thread })
    }

    /// Finishes started messages, or abandons them when the group has failed.
    pub(super) fn close(&self) {
        let mut lanes = self.lanes.lock().expect("no panic while a lane is made");
        for (_, Lane { messages, thread }) in lanes.drain() {
            drop(messages);
            // The thread catches panics.
            let _ = thread.join();
        }
    }
}

/// The body of a lane's thread.
fn run(shared: &Shared, peer: usize, sending: bool, queue: &Receiver<(Tensor, Arc<Completion>)>) {
    // In the order of the group, which is the wire's numbering.
    let members = [shared.identity.rank.min(peer), shared.identity.rank.max(peer)];
    let mut wire: Option<Box<dyn Wire>> = None;
    while let Ok((tensor, done)) = queue.recv() {
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(failure) = shared.broken() {
                return Err(failure);
            }
            let wire = match &mut wire {
                Some(wire) => wire,
                none => none.insert(connect(shared, &members, peer, sending)?),
            };
            transfer(shared, wire.as_mut(), &members, peer, sending, &tensor)
        }));
        let result = result.unwrap_or_else(|panic| {
            let message = crate::threads::panic_message(&*panic);
            Err(Failure::Group(format!("a message panicked: {message}")))
        });
        match &result {
            Ok(()) => drop(tensor),
            Err(failure) => {
                shared.fail(failure);
                // A network may still access it.
                std::mem::forget(tensor);
                wire = None;
            }
        }
        done.set(result);
    }
}

fn connect(
    shared: &Shared,
    members: &[usize; 2],
    peer: usize,
    sending: bool,
) -> Result<Box<dyn Wire>, Failure> {
    let (from, to) =
        if sending { (shared.identity.rank, peer) } else { (peer, shared.identity.rank) };
    let key = format!("{}/from{from}to{to}", shared.identity.key);
    let global = members.map(|member| shared.identity.global_ranks[member]);
    let own = usize::from(members[1] == shared.identity.rank);
    let wanted = || match shared.broken_anywhere() {
        Some(failure) => Err(shared.identity.error("connect", failure)),
        None if shared.queue.is_over() => {
            let dropped = Failure::Group("the group was dropped".to_owned());
            Err(shared.identity.error("connect", dropped))
        }
        None => shared.store.give_up().map_or(Ok(()), Err),
    };
    let network = shared.network.clone();
    network.connect(&key, &global, own, shared.timeout, &wanted).map_err(|error| {
        let rank = shared.identity.global_ranks[peer];
        match (shared.broken_anywhere(), error) {
            (Some(failure), _) => failure,
            (None, Error::Launch(why)) => {
                let missing = shared.describe_missing(rank);
                Failure::Group(format!("{why}; waited for {missing}"))
            }
            (None, other) => other.into(),
        }
    })
}

/// Description of a message, which the sender sends before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Label {
    dtype: u64,
    bytes: u64,
}

fn transfer(
    shared: &Shared,
    wire: &mut dyn Wire,
    members: &[usize; 2],
    peer: usize,
    sending: bool,
    tensor: &Tensor,
) -> Result<(), Failure> {
    let buffer = if sending { Buffer::read(tensor)? } else { Buffer::written(tensor)? };
    let memory = Memory::of(&buffer.host)?;
    let own = Label { dtype: dtype_code(tensor.dtype()).into(), bytes: memory.len() as u64 };
    let mut label = Box::new(own);
    if !sending {
        *label = Label::zeroed();
    }
    let label_memory = Memory::of_bytes(bytemuck::bytes_of_mut(&mut *label));
    let member = usize::from(members[1] == peer);
    let rank = shared.identity.global_ranks[peer];
    let (op, direction) = if sending { ("send", "to") } else { ("recv", "from") };
    let what = || format!("in {op} of {} bytes {direction} rank {rank}", memory.len());
    let expected = Expected { own, rank };
    let greetings = [(member, label_memory)];
    let greetings = if sending { &greetings[..0] } else { &greetings };
    let mut waiting = Waiting::new(shared, members, &what, Some(&expected), greetings);
    let exchanged = if sending {
        let sends = [label_memory.to(member), memory.to(member)];
        // SAFETY: the caller holds the tensor, and leaks it after an error. The labels are leaked
        // below.
        unsafe { wire.exchange(&sends, &[], &mut waiting) }
    } else {
        let receives = [label_memory.from(member), memory.from(member)];
        // SAFETY: as above.
        unsafe { wire.exchange(&[], &receives, &mut waiting) }
    };
    let ended = waiting.ended.take();
    drop(waiting);
    match exchanged {
        Ok(()) => Ok(buffer.finish()?),
        Err(error) => {
            let failure = shared.failure_of(error, members, ended, &what());
            std::mem::forget((buffer, label));
            Err(failure)
        }
    }
}

/// Compares an expected message with the sender's label.
struct Expected {
    own: Label,
    rank: usize,
}

impl Greeting for Expected {
    fn mismatch(&self, _member: usize, theirs: &[u8]) -> Option<String> {
        let theirs: Label = bytemuck::pod_read_unaligned(theirs);
        if theirs == self.own {
            return None;
        }
        let text = |label: Label| {
            let dtype = (label.dtype as usize).checked_sub(1).and_then(|i| check::DTYPES.get(i));
            let dtype = dtype.map_or("an unknown dtype", |dtype| dtype.as_str());
            format!("{} bytes of {dtype}", label.bytes)
        };
        Some(format!(
            "rank {} sends {}, but {} are received; `send` and `recv` must be given tensors of one \
             shape and dtype, in the same order",
            self.rank,
            text(theirs),
            text(self.own)
        ))
    }
}
