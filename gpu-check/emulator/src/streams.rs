//! Streams and events: queues of work, and the order in which it runs.
//!
//! Work on one stream runs in order. Only events order streams among each other; apart from events,
//! [`Order`] decides which stream advances when. So a missing wait is found.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

/// A stream's or an event's handle.
pub(crate) type Handle = usize;

/// Work on a stream.
pub(crate) type Work<T> = Box<dyn FnOnce(&mut T) + Send>;
/// Work that may depend on other processes; done once it returns true.
pub(crate) type Poll = Box<dyn FnMut() -> bool + Send>;

enum Queued<T> {
    Work(Work<T>),
    Poll(Poll),
    Record(Handle, u64),
    Wait(Handle, u64),
}

/// When queued work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// As soon as it is queued.
    Eager,
    /// Only when a caller waits for it.
    Lazy,
    /// In random order with this seed.
    Random(u64),
}

impl Order {
    /// Parses `eager`, `lazy`, or a seed.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "eager" => Some(Self::Eager),
            "lazy" => Some(Self::Lazy),
            seed => seed.parse().ok().map(Self::Random),
        }
    }
}

#[derive(Default)]
struct Event {
    /// How often the event was recorded, and the last record that has run.
    recorded: u64,
    done: u64,
    at: Option<Instant>,
    has_times: bool,
}

/// All streams of a process. Each call passes the state that the work changes.
pub(crate) struct Streams<T> {
    queues: BTreeMap<Handle, VecDeque<Queued<T>>>,
    /// Streams that are not destroyed. Work on destroyed streams still runs.
    live: BTreeSet<Handle>,
    events: BTreeMap<Handle, Event>,
    next: Handle,
    order: Order,
    random: u64,
}

impl<T> Streams<T> {
    pub(crate) fn new(order: Order) -> Self {
        let random = match order {
            Order::Random(seed) => seed,
            _ => 0,
        };
        Self {
            queues: BTreeMap::new(),
            live: BTreeSet::new(),
            events: BTreeMap::new(),
            next: 0x1000,
            order,
            random,
        }
    }

    /// Adds a new stream.
    pub(crate) fn add_stream(&mut self, stream: Handle) {
        self.live.insert(stream);
    }

    pub(crate) fn has_stream(&self, stream: Handle) -> bool {
        self.live.contains(&stream)
    }

    pub(crate) fn destroy_stream(&mut self, stream: Handle) {
        self.live.remove(&stream);
    }

    pub(crate) fn new_event(&mut self, has_times: bool) -> Handle {
        self.next += 0x10;
        let event = self.next;
        self.events.insert(event, Event { has_times, ..Event::default() });
        event
    }

    pub(crate) fn has_event(&self, event: Handle) -> bool {
        self.events.contains_key(&event)
    }

    /// Queues work.
    pub(crate) fn push(&mut self, stream: Handle, work: Work<T>, state: &mut T) {
        self.queue(stream, Queued::Work(work), state);
    }

    /// Queues work that may depend on other processes.
    pub(crate) fn push_poll(&mut self, stream: Handle, poll: Poll, state: &mut T) {
        self.queue(stream, Queued::Poll(poll), state);
    }

    /// Queues a record of the event.
    pub(crate) fn record(&mut self, event: Handle, stream: Handle, state: &mut T) {
        let Some(known) = self.events.get_mut(&event) else { return };
        known.recorded += 1;
        let version = known.recorded;
        self.queue(stream, Queued::Record(event, version), state);
    }

    /// Makes later work on the stream wait for the event's last record.
    pub(crate) fn wait(&mut self, event: Handle, stream: Handle, state: &mut T) {
        let version = self.events.get(&event).map_or(0, |event| event.recorded);
        if version > 0 {
            self.queue(stream, Queued::Wait(event, version), state);
        }
    }

    fn queue(&mut self, stream: Handle, queued: Queued<T>, state: &mut T) {
        self.queues.entry(stream).or_default().push_back(queued);
        match self.order {
            Order::Eager => {
                self.finish(stream, state);
            }
            Order::Lazy => {}
            Order::Random(_) => {
                for _ in 0..self.draw(3) {
                    self.step(state);
                }
            }
        }
    }

    fn draw(&mut self, n: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % n
    }

    /// Runs one item of a random stream that is not blocked, if there is one.
    fn step(&mut self, state: &mut T) {
        let ready: Vec<Handle> = self
            .queues
            .iter()
            .filter(|(_, queue)| match queue.front() {
                Some(Queued::Wait(event, version)) => self.is_done(*event, *version),
                front => front.is_some(),
            })
            .map(|(stream, _)| *stream)
            .collect();
        if !ready.is_empty() {
            let stream = ready[self.draw(ready.len() as u64) as usize];
            self.carry_out_first(stream, state);
        }
    }

    fn is_done(&self, event: Handle, version: u64) -> bool {
        self.events.get(&event).is_none_or(|event| event.done >= version)
    }

    /// Runs the first item of a stream, and everything the item waits for. Returns false if a poll
    /// is not done yet.
    fn carry_out_first(&mut self, stream: Handle, state: &mut T) -> bool {
        let queue = self.queues.get_mut(&stream);
        let Some(first) = queue.and_then(VecDeque::pop_front) else { return true };
        let waiting = match first {
            Queued::Work(work) => {
                work(state);
                return true;
            }
            Queued::Record(event, version) => {
                if let Some(event) = self.events.get_mut(&event) {
                    event.done = event.done.max(version);
                    event.at = Some(Instant::now());
                }
                return true;
            }
            Queued::Wait(event, version) => {
                if self.finish_event(event, version, state) {
                    return true;
                }
                Queued::Wait(event, version)
            }
            Queued::Poll(mut poll) => {
                if poll() {
                    return true;
                }
                Queued::Poll(poll)
            }
        };
        self.queues.entry(stream).or_default().push_front(waiting);
        false
    }

    /// Runs everything on a stream; returns false if a poll is not done yet.
    pub(crate) fn finish(&mut self, stream: Handle, state: &mut T) -> bool {
        while !self.is_idle(stream) {
            if !self.carry_out_first(stream, state) {
                return false;
            }
        }
        true
    }

    /// Runs pending polls and all work before them, as far as possible now.
    pub(crate) fn finish_polls(&mut self, state: &mut T) {
        let streams: Vec<Handle> = self.queues.keys().copied().collect();
        for stream in streams {
            while self.has_poll(stream) && self.carry_out_first(stream, state) {}
        }
    }

    fn has_poll(&self, stream: Handle) -> bool {
        let is_poll = |queued: &Queued<T>| matches!(queued, Queued::Poll(_));
        self.queues.get(&stream).is_some_and(|queue| queue.iter().any(is_poll))
    }

    fn is_idle(&self, stream: Handle) -> bool {
        self.queues.get(&stream).is_none_or(VecDeque::is_empty)
    }

    /// Runs everything on all streams; returns false if a poll is not done yet.
    pub(crate) fn finish_all(&mut self, state: &mut T) -> bool {
        let streams: Vec<Handle> = self.queues.keys().copied().collect();
        let mut all = true;
        for stream in streams {
            all &= self.finish(stream, state);
        }
        all
    }

    /// Runs everything up to the event's last record; returns false if a poll is not done yet.
    pub(crate) fn synchronize(&mut self, event: Handle, state: &mut T) -> bool {
        let version = self.events.get(&event).map_or(0, |event| event.recorded);
        self.finish_event(event, version, state)
    }

    fn finish_event(&mut self, event: Handle, version: u64, state: &mut T) -> bool {
        while !self.is_done(event, version) {
            let is_it = |queued: &Queued<T>| matches!(queued, Queued::Record(e, v) if *e == event && *v <= version);
            let on = self.queues.iter().find(|(_, queue)| queue.iter().any(is_it));
            // No queue holds the record: the stream that waits is the one that recorded the event,
            // so the wait is over.
            let Some((&stream, _)) = on else { return true };
            if !self.carry_out_first(stream, state) {
                return false;
            }
        }
        true
    }

    /// Whether the event's last record has run; runs nothing.
    pub(crate) fn is_done_now(&self, event: Handle) -> bool {
        self.events.get(&event).is_none_or(|event| event.done == event.recorded)
    }

    /// Whether the event's last record has run. Repeated queries advance the streams until it has.
    pub(crate) fn query(&mut self, event: Handle, state: &mut T) -> bool {
        let version = self.events.get(&event).map_or(0, |event| event.recorded);
        if !self.is_done(event, version) {
            match self.order {
                Order::Random(_) => self.step(state),
                _ => {
                    self.finish_event(event, version, state);
                }
            }
        }
        self.is_done(event, version)
    }

    /// Milliseconds from one event to another; `None` if one of them has no times or is not done.
    pub(crate) fn elapsed(&self, from: Handle, to: Handle) -> Option<f32> {
        let at = |event: Handle| {
            let event = self.events.get(&event).filter(|event| event.has_times)?;
            event.at.filter(|_| event.done == event.recorded)
        };
        let (from, to) = (at(from)?, at(to)?);
        let sign = if to < from { -1.0 } else { 1.0 };
        let apart = to.max(from).duration_since(to.min(from));
        Some(sign * apart.as_secs_f32() * 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(streams: &mut Streams<Vec<u32>>, stream: Handle, number: u32, log: &mut Vec<u32>) {
        streams.push(stream, Box::new(move |log: &mut Vec<u32>| log.push(number)), log);
    }

    #[test]
    fn polls_advance_alone_but_not_later_work() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicBool, Ordering};

        let (mut streams, mut log) = (Streams::new(Order::Lazy), Vec::new());
        let open = Arc::new(AtomicBool::new(false));
        let is_open = open.clone();
        push(&mut streams, 1, 10, &mut log);
        streams.push_poll(1, Box::new(move || is_open.load(Ordering::SeqCst)), &mut log);
        push(&mut streams, 1, 20, &mut log);
        push(&mut streams, 2, 30, &mut log);
        streams.finish_polls(&mut log);
        assert_eq!(log, [10]);
        open.store(true, Ordering::SeqCst);
        streams.finish_polls(&mut log);
        assert_eq!(log, [10]);
        assert!(streams.finish(1, &mut log));
        assert_eq!(log, [10, 20]);
    }

    #[test]
    fn events_order_streams() {
        let orders = [Order::Eager, Order::Lazy].into_iter().chain((0..100).map(Order::Random));
        let mut seen = std::collections::BTreeSet::new();
        for order in orders {
            let (mut streams, mut log) = (Streams::new(order), Vec::new());
            let (a, b) = (0x10, 0x20);
            let event = streams.new_event(false);
            push(&mut streams, a, 1, &mut log);
            streams.record(event, a, &mut log);
            push(&mut streams, a, 2, &mut log);
            push(&mut streams, b, 3, &mut log);
            streams.wait(event, b, &mut log);
            push(&mut streams, b, 4, &mut log);
            if order == Order::Lazy {
                assert!(log.is_empty());
            }
            streams.finish(b, &mut log);
            let at = |n| log.iter().position(|&m| m == n);
            assert!(at(3) < at(4) && at(1) < at(4) && at(1).is_some(), "{order:?}: {log:?}");
            streams.finish_all(&mut log);
            assert_eq!(log.len(), 4);
            seen.insert(log);
        }
        assert!(seen.len() > 3, "{seen:?}");
    }
}
