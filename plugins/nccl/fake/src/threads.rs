//! Ranks that are threads of one process.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use crate::clique::{Address, Call, Clique, Kind, Message};
use crate::reduce::size;

struct Meeting {
    calls: Vec<Option<Call>>,
    ran: bool,
    fits: bool,
    left: usize,
}

/// A sent message that its receiver does not have yet.
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
    /// Number of received messages, by sender and receiver.
    received: HashMap<(usize, usize), u64>,
    aborted: Vec<bool>,
}

/// A communicator whose ranks are threads.
pub(crate) struct Threads {
    size: usize,
    seed: u64,
    state: Mutex<State>,
}

impl Threads {
    pub(crate) fn new(size: usize, seed: u64) -> Self {
        let state =
            State { joined: vec![false; size], aborted: vec![false; size], ..State::default() };
        Self { size, seed, state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic in a communicator")
    }

    fn run(&self, calls: &[Call], number: u64) {
        let inputs: Vec<*const c_void> =
            calls.iter().map(|call| call.input.0.cast_const()).collect();
        let seed = self.seed ^ (number << 20);
        // SAFETY: the callers vouch for memory of that many bytes. No thread accesses it until all
        // ranks have seen that the collective ran.
        let result = |rank| unsafe { calls[0].result(rank, &inputs, seed) };
        // Reads all inputs before writing an output, which may be the same memory.
        let results: Vec<Vec<u8>> = match calls[0].kind {
            Kind::ReduceScatter { .. } => (0..self.size).map(result).collect(),
            _ => vec![result(0); self.size],
        };
        for (call, result) in calls.iter().zip(&results) {
            // SAFETY: as above.
            unsafe { std::ptr::copy(result.as_ptr(), call.output.at(0), result.len()) };
        }
    }
}

impl Clique for Threads {
    fn size(&self) -> usize {
        self.size
    }

    fn join(&self, rank: usize) -> bool {
        !std::mem::replace(&mut self.state().joined[rank], true)
    }

    fn is_whole(&self) -> bool {
        self.state().joined.iter().all(|&joined| joined)
    }

    fn abort(&self, rank: usize) {
        let mut state = self.state();
        state.aborted[rank] = true;
        // The rank's memory may be gone.
        state.meetings.values_mut().filter(|m| !m.ran).for_each(|m| m.calls[rank] = None);
        for ((from, _), sent) in &mut state.sent {
            if *from == rank {
                sent.clear();
            }
        }
    }

    fn meet(&self, rank: usize, number: u64, call: &Call, misfit: &dyn Fn(String)) -> bool {
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
            meeting.fits = calls.iter().all(|other| other.fits(call));
            if meeting.fits {
                self.run(&calls, number);
                meeting.ran = true;
            } else {
                // Like NCCL's kernels, which may wait for data that never arrives.
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

    fn exchange(
        &self,
        rank: usize,
        messages: &[Message],
        begun: &mut [Option<u64>],
        ended: &mut [bool],
        misfit: &dyn Fn(String),
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
            // SAFETY: valid memory of that many bytes, which both sides have given to their
            // streams.
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
