//! Messages between two members of a group.
//!
//! Messages begin together, in one NCCL group of calls, at the first wait for a message, the next
//! collective, or when the group is asked to begin them. Otherwise ranks that all send first and
//! then receive would wait for each other. Each pair of members has its own communicator and
//! stream, made at its first message. So messages of different pairs wait neither for each other
//! nor for collectives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Timing, Work};
use fulgurite_error::Result;

use crate::communicator::{Communicator, call, settle};
use crate::failure::Failure;
use crate::flight::{Flight, Notice};
use crate::library::{Call, Operands, UniqueId};
use crate::pending::Pending;
use crate::shared::Shared;
use crate::timed::Timed;

/// The messages of a group.
pub(crate) struct Messages {
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Messages that have not begun.
    waiting: Vec<Message>,
    /// Communicators by group rank of the other member.
    pairs: HashMap<usize, Arc<Communicator>>,
}

struct Message {
    tensor: Tensor,
    peer: usize,
    sending: bool,
    place: Place,
    timing: Option<Arc<Timing>>,
}

/// The launched message, once it has begun.
type Place = Arc<Mutex<Option<Pending>>>;

impl Messages {
    pub(crate) fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self { shared, state: Mutex::default() })
    }

    /// Adds a message. The tensor must have elements.
    pub(crate) fn push(self: &Arc<Self>, tensor: &Tensor, peer: usize, sending: bool) -> Work {
        let place = Place::default();
        let (tensor, timing) = (tensor.clone(), Timing::current());
        let message = Message { tensor, peer, sending, place: place.clone(), timing };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).waiting.push(message);
        let begun = Begun { messages: self.clone(), place };
        let op = if sending { "send" } else { "recv" };
        Work::pending(move || begun.wait(op))
    }

    /// Connects this rank with another one. Both call this.
    pub(crate) fn connect_to(&self, peer: usize, device: &Device) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.connect(&mut state, std::iter::once(peer), device)
            .inspect_err(|failure| self.shared.fail(failure.clone()))
    }

    /// Begins all waiting messages.
    pub(crate) fn flush(&self) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = std::mem::take(&mut state.waiting);
        if waiting.is_empty() {
            return Ok(());
        }
        self.begin(&mut state, waiting).inspect_err(|failure| self.shared.fail(failure.clone()))
    }

    fn begin(&self, state: &mut State, waiting: Vec<Message>) -> Result<(), Failure> {
        let shared = &self.shared;
        if let Some(failure) = shared.failure() {
            return Err(failure);
        }
        let tickets: Vec<u64> =
            waiting.iter().map(|message| shared.begin(Flight::new(self.notice(message)))).collect();
        let Some(device) = waiting.first().map(|message| message.tensor.device().clone()) else {
            return Ok(());
        };
        self.connect(state, waiting.iter().map(|message| message.peer), &device)?;
        shared.world.streams.bind(&device)?;
        let mut calls: Vec<(&Communicator, Vec<(Call, Operands)>)> = Vec::new();
        let mut peers = Vec::new();
        let mut memories = Vec::new();
        for Message { tensor, peer, sending, .. } in &waiting {
            let memory = shared.world.streams.memory(tensor, !sending)?;
            let (at, count, dtype) = (memory.address, tensor.elem_count(), tensor.dtype());
            memories.push(memory);
            let operands = Operands { input: at, output: at, count, dtype };
            // The peer's rank within the pair.
            let other = usize::from(*peer > shared.rank);
            let call = match sending {
                true => Call::Send { peer: other },
                false => Call::Recv { peer: other },
            };
            let Some(pair) = state.pairs.get(peer) else { continue };
            match calls.iter_mut().find(|(known, _)| std::ptr::eq(*known, &**pair)) {
                Some((_, calls)) => calls.push((call, operands)),
                None => {
                    calls.push((pair, vec![(call, operands)]));
                    peers.push(*peer);
                }
            }
        }
        let mut timed = Vec::new();
        for (peer, (pair, _)) in peers.into_iter().zip(&calls) {
            pair.stream.follow_compute()?;
            let timings = waiting.iter().filter(|message| message.peer == peer);
            let timings = timings.filter_map(|message| message.timing.clone());
            let begun = Timed::begin(&*pair.stream, timings)?;
            timed.extend(begun.map(|timed| (shared.global_ranks[peer], timed)));
        }
        let launched = call(shared, &calls);
        if let Err(failure) = launched {
            // Some messages may be under way.
            std::mem::forget(memories);
            return Err(failure);
        }
        for (peer, timed) in timed {
            timed.end(&format!("{}, with rank {peer}", shared.name))?;
        }
        let mut events = HashMap::new();
        for ((message, ticket), memory) in waiting.into_iter().zip(tickets).zip(memories) {
            let Some(pair) = state.pairs.get(&message.peer) else { continue };
            let event = match events.get(&message.peer) {
                Some(event) => Arc::clone(event),
                None => {
                    let event: Arc<dyn crate::streams::Event> = pair.stream.record()?.into();
                    events.insert(message.peer, event.clone());
                    event
                }
            };
            let memory = vec![memory];
            let pending = Pending { shared: shared.clone(), ticket, event: event.clone(), memory };
            shared.launched(ticket, event)?;
            *message.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(pending);
        }
        Ok(())
    }

    fn notice(&self, message: &Message) -> Notice {
        let Message { tensor, peer, sending, .. } = message;
        let (op, to) = if *sending { ("send", "to") } else { ("recv", "from") };
        let rank = self.shared.global_ranks[*peer];
        let (count, dtype) = (tensor.elem_count(), tensor.dtype().as_str());
        let what = format!("{op} of {count} {dtype} {to} rank {rank}");
        Notice { number: None, what, label: None, peers: vec![*peer] }
    }

    /// Makes the missing communicators of pairs, all at once, as the other members may make theirs
    /// in any order.
    fn connect(
        &self,
        state: &mut State,
        peers: impl Iterator<Item = usize>,
        device: &Device,
    ) -> Result<(), Failure> {
        let shared = &self.shared;
        let mut new: Vec<usize> = peers.collect();
        new.sort_unstable();
        new.dedup();
        new.retain(|peer| !state.pairs.contains_key(peer));
        // The lower of two ranks makes the id.
        let mut ids = Vec::new();
        for &peer in &new {
            let (id, work) = if shared.rank < peer {
                let UniqueId(id) = {
                    let _calls = shared.world.calls();
                    shared.world.library.unique_id()?
                };
                let id = Tensor::new(&id, &Device::Cpu).map_err(fulgurite_error::Error::from)?;
                let work = shared.host.send(&id, peer)?;
                (id, work)
            } else {
                let id = Tensor::zeros(128, DType::U8, &Device::Cpu);
                let id = id.map_err(fulgurite_error::Error::from)?;
                let work = shared.host.recv(&id, peer)?;
                (id, work)
            };
            ids.push((peer, id, work));
        }
        let mut made = Vec::new();
        for (peer, id, work) in ids {
            work.wait()?;
            let mut bytes = [0; 128];
            storage::with_host(&id, |id: &[u8]| bytes.copy_from_slice(id))?;
            let own = usize::from(shared.rank > peer);
            made.push((peer, Communicator::new(shared, device, UniqueId(bytes), own, 2)?));
        }
        settle(shared, made.iter().map(|(_, communicator)| &**communicator))?;
        state.pairs.extend(made);
        Ok(())
    }
}

/// A message that was started.
struct Begun {
    messages: Arc<Messages>,
    place: Place,
}

impl Begun {
    fn wait(self, op: &'static str) -> Result<()> {
        let shared = self.messages.shared.clone();
        let wait = || {
            self.messages.flush()?;
            let pending = self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
            match pending {
                Some(pending) => pending.wait(),
                None => Err(shared
                    .failure()
                    .unwrap_or_else(|| Failure::Group("the message was not begun".to_owned()))),
            }
        };
        wait().map_err(|failure| shared.error(op, failure))
    }
}

impl Drop for Begun {
    /// A dropped message still begins.
    fn drop(&mut self) {
        let _ = self.messages.flush();
    }
}
