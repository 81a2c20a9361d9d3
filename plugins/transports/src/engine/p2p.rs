//! Messages between two ranks.
//!
//! A rank's messages make progress concurrently, unless a collective is between them in its queue.
//! So all ranks of a ring may start their send before their receive. Messages of one pair in one
//! direction keep their order.
#![allow(unsafe_code)] // Reads and writes chunks of messages; the channels' counters make it sound.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulgurite_engine::autograd::storage::{with_bytes, with_bytes_mut};
use fulgurite_engine::collective::check;

use super::plan::{Buffer, dtype_code};
use super::queue::{Completion, P2pTask};
use super::wait::{Failure, Shared};
use super::worker::Worker;
use crate::memory::{P2P_CHUNKS, notify};

/// A message under way.
struct Message {
    sending: bool,
    peer: usize,
    buffer: Buffer,
    total: usize,
    /// Bytes transferred so far.
    offset: usize,
    /// Whether all chunks were transferred. An empty message has one chunk.
    complete: bool,
    done: Arc<Completion>,
}

impl Worker {
    /// Runs this message and all following ones in the queue, up to the next collective.
    pub(crate) fn run_p2p(&mut self, task: P2pTask, done: Arc<Completion>) {
        let mut messages = vec![];
        self.admit(&mut messages, task, done);
        while !messages.is_empty() {
            // Both lists are outside of `guarded`, so that every message gets a result even after a
            // failure or panic.
            let mut admitted = vec![];
            let result = self.guarded(|worker| worker.progress(&mut messages, &mut admitted));
            if let Err(failure) = result {
                messages.drain(..).for_each(|message| message.done.set(Err(failure.clone())));
            }
            for (task, done) in admitted {
                self.admit(&mut messages, task, done);
            }
        }
    }

    fn admit(&mut self, messages: &mut Vec<Message>, task: P2pTask, done: Arc<Completion>) {
        let P2pTask { sending, peer, tensor } = task;
        let total = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let buffer = self.guarded(|_| {
            Ok(if sending { Buffer::read(&tensor)? } else { Buffer::written(&tensor)? })
        });
        match buffer {
            Ok(buffer) => messages.push(Message {
                sending,
                peer,
                buffer,
                total,
                offset: 0,
                complete: false,
                done,
            }),
            Err(failure) => done.set(Err(failure)),
        }
    }

    /// Transfers chunks of every message as far as possible. Without progress, waits for some, or
    /// for another message to start.
    fn progress(
        &mut self,
        messages: &mut Vec<Message>,
        admitted: &mut Vec<(P2pTask, Arc<Completion>)>,
    ) -> Result<(), Failure> {
        let shared = &*self.shared;
        let peers: Vec<usize> = messages.iter().map(|m| m.peer).collect();
        let describe = || {
            let list: Vec<String> =
                peers.iter().map(|&p| shared.identity.global_ranks[p].to_string()).collect();
            format!("in messages to or from rank {}", list.join(", "))
        };
        let mut outcome = Ok(false);
        shared.wait_until(
            self.spins,
            || {
                while let Some(message) = shared.queue.next_p2p() {
                    admitted.push(message);
                }
                outcome = step_all(shared, messages);
                !admitted.is_empty() || !matches!(outcome, Ok(false))
            },
            || {
                let mut missing = peers.clone();
                missing.sort_unstable();
                missing.dedup();
                missing
            },
            describe,
        )?;
        outcome?;
        let mut i = 0;
        while i < messages.len() {
            if messages[i].complete {
                let result = messages[i].buffer.finish().map_err(Failure::from);
                let Message { buffer, done, .. } = messages.remove(i);
                // Release the tensor before telling the caller of the end.
                drop(buffer);
                done.set(result);
            } else {
                i += 1;
            }
        }
        Ok(())
    }
}

/// Transfers chunks of every message that is the first on its channel. Returns whether any message
/// made progress.
fn step_all(shared: &Shared, messages: &mut [Message]) -> Result<bool, Failure> {
    let mut moved = false;
    let mut busy: Vec<(bool, usize)> = vec![];
    for message in messages.iter_mut().filter(|m| !m.complete) {
        let channel = (message.sending, message.peer);
        if busy.contains(&channel) {
            continue;
        }
        while step(shared, message)? {
            moved = true;
            if message.complete {
                break;
            }
        }
        if !message.complete {
            busy.push(channel);
        }
    }
    Ok(moved)
}

/// Sends a chunk if there is room, or receives a chunk if one has arrived.
fn step(shared: &Shared, message: &mut Message) -> Result<bool, Failure> {
    let (region, me, peer) = (&shared.region, shared.identity.rank, message.peer);
    let (src, dst) = if message.sending { (me, peer) } else { (peer, me) };
    let channel = region.channel(src, dst);
    let sent = channel.sent.0.load(Ordering::Acquire);
    let received = channel.received.0.load(Ordering::Acquire);
    // The other side writes one of the two counters.
    let under_way = sent.wrapping_sub(received);
    if under_way > P2P_CHUNKS as u64 {
        return Err(Failure::Group(format!(
            "the shared memory is damaged: of the chunks between rank {} and this one {sent} were sent \
             and {received} received",
            shared.identity.global_ranks[peer]
        )));
    }
    let len = region.layout().p2p_chunk.min(message.total - message.offset);
    let range = message.offset..message.offset + len;
    let host = &message.buffer.host;
    if message.sending {
        if under_way == P2P_CHUNKS as u64 {
            return Ok(false);
        }
        let index = sent as usize % P2P_CHUNKS;
        let head = &channel.heads[index];
        head.total.store(message.total as u64, Ordering::Relaxed);
        head.offset.store(message.offset as u64, Ordering::Relaxed);
        head.dtype.store(dtype_code(host.dtype()), Ordering::Relaxed);
        if len > 0 {
            // SAFETY: this rank is the source. Fewer than P2P_CHUNKS chunks are unreceived, so the
            // previous chunk in this place has been received.
            let chunk = unsafe { region.p2p_chunk_mut(src, dst, index, len) };
            with_bytes(host, |bytes| chunk.copy_from_slice(&bytes[range]))?;
        }
        channel.sent.0.store(sent + 1, Ordering::SeqCst);
    } else {
        if under_way == 0 {
            return Ok(false);
        }
        let index = received as usize % P2P_CHUNKS;
        let head = &channel.heads[index];
        let found = (
            head.total.load(Ordering::Relaxed),
            head.offset.load(Ordering::Relaxed),
            head.dtype.load(Ordering::Relaxed),
        );
        let expected = (message.total as u64, message.offset as u64, dtype_code(host.dtype()));
        if found != expected {
            let sent = check::DTYPES.get((found.2 as usize).wrapping_sub(1));
            return Err(Failure::Group(format!(
                "rank {} sent {} bytes of {}, and this rank receives {} bytes of {}; send and recv \
                 must match in pairs, in order",
                shared.identity.global_ranks[peer],
                found.0,
                sent.map_or("unknown dtype", |dtype| dtype.as_str()),
                message.total,
                host.dtype().as_str(),
            )));
        }
        if len > 0 {
            // SAFETY: this rank is the destination, and the chunk was sent and not yet received.
            let chunk = unsafe { region.p2p_chunk(src, dst, index, len) };
            with_bytes_mut(host, |bytes| bytes[range].copy_from_slice(chunk))?;
        }
        channel.received.0.store(received + 1, Ordering::SeqCst);
    }
    notify(region.record(peer));
    message.offset += len;
    message.complete = message.offset == message.total;
    Ok(true)
}
