//! The ranks of a communicator, and where their calls meet.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use crate::reduce::{reduce, size};

/// An address of memory, which the tasks of streams access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) *mut c_void);

// SAFETY: who calls a collective has given its memory to the streams.
unsafe impl Send for Address {}

impl Address {
    fn at(self, bytes: usize) -> *mut u8 {
        self.0.cast::<u8>().wrapping_add(bytes)
    }
}

/// What is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce { op: c_int },
    AllGather,
    ReduceScatter { op: c_int },
    Broadcast { root: c_int },
}

/// A rank's call of a collective. `count` is NCCL's: of a part for all-gathers and reduce-scatters.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) input: Address,
    pub(crate) output: Address,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
}

/// A message, of a call of `ncclSend` or `ncclRecv`.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) memory: Address,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
    pub(crate) peer: usize,
    pub(crate) sending: bool,
}

struct Meeting {
    calls: Vec<Option<Call>>,
    ran: bool,
    fits: bool,
    left: usize,
}

/// A message that is sent, until its receiver has it.
struct Sent {
    memory: Address,
    count: usize,
    dtype: c_int,
    number: u64,
}

#[derive(Default)]
struct State {
    joined: Vec<bool>,
    meetings: HashMap<u64, Meeting>,
    /// By sender and receiver.
    sent: HashMap<(usize, usize), VecDeque<Sent>>,
    /// How many messages of a sender and a receiver have been received.
    received: HashMap<(usize, usize), u64>,
    aborted: Vec<bool>,
}

/// The ranks of a communicator.
pub(crate) struct Clique {
    pub(crate) size: usize,
    seed: u64,
    state: Mutex<State>,
}

impl Clique {
    pub(crate) fn new(size: usize, seed: u64) -> Self {
        let state =
            State { joined: vec![false; size], aborted: vec![false; size], ..State::default() };
        Self { size, seed, state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic in a communicator")
    }

    /// Notes that a rank has come; false if it had before.
    pub(crate) fn join(&self, rank: usize) -> bool {
        !std::mem::replace(&mut self.state().joined[rank], true)
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.state().joined.iter().all(|&joined| joined)
    }

    pub(crate) fn abort(&self, rank: usize) {
        let mut state = self.state();
        state.aborted[rank] = true;
        // Its memory may be gone.
        state.meetings.values_mut().filter(|m| !m.ran).for_each(|m| m.calls[rank] = None);
        for ((from, _), sent) in &mut state.sent {
            if *from == rank {
                sent.clear();
            }
        }
    }

    /// Takes part in collective `number`. Whether this rank's part in it has ended.
    pub(crate) fn meet(
        &self,
        rank: usize,
        number: u64,
        call: &Call,
        misfit: impl Fn(String),
    ) -> bool {
        let mut state = self.state();
        if state.aborted[rank] {
            return true;
        }
        let new = || Meeting { calls: vec![None; self.size], ran: false, fits: true, left: 0 };
        let meeting = state.meetings.entry(number).or_insert_with(new);
        meeting.calls[rank] = Some(*call);
        if !meeting.ran && meeting.fits {
            let calls: Vec<Call> = meeting.calls.iter().flatten().copied().collect();
            if calls.len() < self.size {
                return false;
            }
            let like =
                |a: &Call, b: &Call| (a.kind, a.count, a.dtype) == (b.kind, b.count, b.dtype);
            meeting.fits = calls.iter().all(|other| like(other, call));
            if meeting.fits {
                self.run(&calls, number);
                meeting.ran = true;
            } else {
                // As NCCL's kernels may: they wait for data that does not come.
                misfit(format!("the ranks are in different collectives {number}"));
            }
        }
        if meeting.ran {
            meeting.left += 1;
            if meeting.left == self.size {
                state.meetings.remove(&number);
            }
            return true;
        }
        false
    }

    fn run(&self, calls: &[Call], number: u64) {
        let Call { kind, count, dtype, .. } = calls[0];
        let bytes = count * size(dtype).unwrap_or(1);
        let mut random = fastrand::Rng::with_seed(self.seed ^ (number << 20));
        let mut inputs = |at: usize| {
            let mut inputs: Vec<*const c_void> =
                calls.iter().map(|call| call.input.at(at).cast_const().cast()).collect();
            random.shuffle(&mut inputs);
            inputs
        };
        let write = |target: Address, at: usize, result: &[u8]| {
            // SAFETY: memory of that many bytes, by the caller's word; nobody else accesses it until all ranks have
            // seen that the collective ran.
            unsafe { std::ptr::copy(result.as_ptr(), target.at(at), result.len()) };
        };
        // All inputs are read before an output is written, which may be the same memory.
        // SAFETY: as above.
        let read =
            |source: Address| unsafe { std::slice::from_raw_parts(source.at(0), bytes) }.to_vec();
        match kind {
            Kind::AllReduce { op } => {
                // SAFETY: as above.
                let sum = unsafe { reduce(&inputs(0), count, dtype, op) };
                calls.iter().for_each(|call| write(call.output, 0, &sum));
            }
            Kind::ReduceScatter { op } => {
                let sums: Vec<Vec<u8>> = (0..self.size)
                    // SAFETY: as above.
                    .map(|rank| unsafe { reduce(&inputs(rank * bytes), count, dtype, op) })
                    .collect();
                calls.iter().zip(&sums).for_each(|(call, sum)| write(call.output, 0, sum));
            }
            Kind::AllGather => {
                let parts: Vec<Vec<u8>> = calls.iter().map(|call| read(call.input)).collect();
                for call in calls {
                    parts
                        .iter()
                        .enumerate()
                        .for_each(|(i, part)| write(call.output, i * bytes, part));
                }
            }
            Kind::Broadcast { root } => {
                let part = read(calls[root as usize].input);
                calls.iter().for_each(|call| write(call.output, 0, &part));
            }
        }
    }

    /// Takes part in the messages of one group of calls. `begun` has, by message, its number once it is under way.
    /// Whether all have ended.
    pub(crate) fn exchange(
        &self,
        rank: usize,
        messages: &[Message],
        begun: &mut [Option<u64>],
        ended: &mut [bool],
        misfit: impl Fn(String),
    ) -> bool {
        let mut state = self.state();
        if state.aborted[rank] {
            return true;
        }
        let State { sent, received, .. } = &mut *state;
        for (i, message) in messages.iter().enumerate().filter(|(_, message)| message.sending) {
            let pair = (rank, message.peer);
            let queue = sent.entry(pair).or_default();
            let done = received.entry(pair).or_default();
            begun[i].get_or_insert_with(|| {
                let Message { memory, count, dtype, .. } = *message;
                let number = *done + queue.len() as u64;
                queue.push_back(Sent { memory, count, dtype, number });
                number
            });
        }
        for (i, message) in messages.iter().enumerate().filter(|(_, message)| !message.sending) {
            // Messages of a sender are received in order.
            let earlier = |(j, other): (usize, &Message)| {
                !other.sending && other.peer == message.peer && !ended[j]
            };
            if ended[i] || messages[..i].iter().enumerate().any(earlier) {
                continue;
            }
            let pair = (message.peer, rank);
            let Some(first) = sent.get_mut(&pair).and_then(|queue| queue.front()) else { continue };
            if (first.count, first.dtype) != (message.count, message.dtype) {
                misfit(format!("message {} has another length than is received", first.number));
                continue;
            }
            let bytes = message.count * size(message.dtype).unwrap_or(1);
            // SAFETY: memory of that many bytes, which both sides have given to their streams.
            unsafe { std::ptr::copy(first.memory.at(0), message.memory.at(0), bytes) };
            sent.get_mut(&pair).and_then(VecDeque::pop_front);
            *received.entry(pair).or_default() += 1;
            ended[i] = true;
        }
        for (i, message) in messages.iter().enumerate().filter(|(_, message)| message.sending) {
            let done = received.get(&(rank, message.peer)).copied().unwrap_or(0);
            ended[i] = begun[i].is_some_and(|number| number < done);
        }
        ended.iter().all(|&ended| ended)
    }
}
