//! The queue of logged values for the server.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use fulgurite_error::{Error, Result};
use serde_json::{Value, json};

use super::client::{Client, Failure};
use super::{OnError, Patience};

/// A value to be logged.
#[derive(Debug)]
pub(super) enum Item {
    Metric {
        key: String,
        value: f64,
        timestamp: u64,
        step: u64,
    },
    Param {
        key: String,
        value: String,
    },
    Tag {
        key: String,
        value: String,
    },
    /// The end of the run.
    End {
        status: &'static str,
        time: u64,
    },
}

/// Maximum number of waiting items; further items are dropped.
const CAPACITY: usize = 20_000;
/// MLflow's limits for one call.
const MAX_METRICS: usize = 1000;
const MAX_OTHERS: usize = 100;

/// A bounded queue, emptied by its own thread. Only the end of a run waits for it, and not for
/// long.
pub(super) struct Queue {
    sender: Option<SyncSender<Item>>,
    done: Receiver<()>,
    shared: Arc<Shared>,
    on_error: OnError,
    patience: Patience,
}

#[derive(Default)]
struct Shared {
    /// Items to be sent, and items that the server has received.
    logged: AtomicU64,
    taken: AtomicU64,
    /// The first failure.
    failure: Mutex<Option<String>>,
    /// Deadline for retries, set at the end of the run.
    end: Mutex<Option<Instant>>,
    ends: Condvar,
}

impl Shared {
    fn fail(&self, failure: &dyn std::fmt::Display) {
        let mut first = self.failure.lock().expect("no panic while noting");
        if first.is_none() {
            *first = Some(failure.to_string());
            tracing::warn!("{failure}");
        }
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().expect("no panic while noting").clone()
    }

    /// Marks the run as ended: calls are retried until `end`.
    fn end(&self, end: Instant) {
        *self.end.lock().expect("no panic while noting") = Some(end);
        self.ends.notify_all();
    }

    /// Waits before a retry. Returns false if there is not enough time left.
    fn pause(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut end = self.end.lock().expect("no panic while noting");
        loop {
            let now = Instant::now();
            if end.is_some_and(|end| end <= now) {
                return false;
            }
            let until = end.map_or(until, |end| end.min(until));
            if until <= now {
                return true;
            }
            end = self.ends.wait_timeout(end, until - now).expect("no panic while noting").0;
        }
    }
}

impl Queue {
    /// Starts the sending thread.
    pub(super) fn start(
        client: Client,
        run_id: String,
        on_error: OnError,
        patience: Patience,
    ) -> Result<Self> {
        let (sender, items) = sync_channel(CAPACITY);
        let (finished, done) = sync_channel(1);
        let shared = Arc::<Shared>::default();
        let worker = Worker { client, run_id, patience, shared: shared.clone() };
        std::thread::Builder::new()
            .name("mlflow".to_owned())
            .spawn(move || {
                worker.run(&items);
                // The receiver may be gone.
                let _ = finished.send(());
            })
            .map_err(|error| Error::other(format!("starting the thread of mlflow: {error}")))?;
        Ok(Self { sender: Some(sender), done, shared, on_error, patience })
    }

    /// Enqueues an item without waiting.
    ///
    /// # Errors
    /// If an earlier item could not be sent and failures end the run.
    pub(super) fn put(&self, item: Item) -> Result<()> {
        self.check()?;
        let Some(sender) = &self.sender else { return Ok(()) };
        self.shared.logged.fetch_add(1, Ordering::Relaxed);
        match sender.try_send(item) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => {
                self.shared.fail(&"MLflow takes less than is logged: values are left out");
                self.check()
            }
            Err(TrySendError::Disconnected(_)) => {
                self.shared.fail(&"the thread of mlflow has ended");
                self.check()
            }
        }
    }

    fn check(&self) -> Result<()> {
        match (self.on_error, self.shared.failure()) {
            (OnError::Error, Some(failure)) => Err(Error::other(failure)),
            _ => Ok(()),
        }
    }

    /// Ends the run on the server. Waits until the server has received everything, but not for
    /// long.
    ///
    /// # Errors
    /// If something could not be sent and failures are errors.
    pub(super) fn finish(&mut self, status: &'static str, time: u64) -> Result<()> {
        let Some(sender) = self.sender.take() else { return Ok(()) };
        let until = Instant::now() + self.patience.end;
        self.shared.end(Instant::now() + self.patience.retry_at_end);
        let mut end = Item::End { status, time };
        // The queue may be full.
        while let Err(TrySendError::Full(back)) = sender.try_send(end) {
            end = back;
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(self.patience.pause.min(Duration::from_millis(20)));
        }
        drop(sender);
        let left = until.saturating_duration_since(Instant::now());
        if self.done.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            let waited = self.patience.end.as_secs_f64();
            self.shared
                .fail(&format!("MLflow has not taken everything within {waited} s of the end"));
        }
        let (missing, logged) = self.missing();
        if missing > 0 {
            tracing::warn!("MLflow lacks {missing} of {logged} values that were logged");
        }
        self.check()
    }

    /// Returns how many values the server has not received, and how many were logged.
    pub(super) fn missing(&self) -> (u64, u64) {
        let taken = self.shared.taken.load(Ordering::Relaxed);
        let logged = self.shared.logged.load(Ordering::Relaxed);
        (logged - taken, logged)
    }
}

/// The sending thread's state.
struct Worker {
    client: Client,
    run_id: String,
    patience: Patience,
    shared: Arc<Shared>,
}

/// The content of one call.
#[derive(Default)]
struct Batch {
    metrics: Vec<Value>,
    params: Vec<Value>,
    tags: Vec<Value>,
}

impl Batch {
    fn len(&self) -> usize {
        self.metrics.len() + self.params.len() + self.tags.len()
    }

    fn is_full(&self) -> bool {
        self.len() >= MAX_METRICS
            || self.params.len() >= MAX_OTHERS
            || self.tags.len() >= MAX_OTHERS
    }
}

impl Worker {
    fn run(&self, items: &Receiver<Item>) {
        // Everything logged since the last call goes into the next call.
        while let Ok(first) = items.recv() {
            let mut batch = Batch::default();
            let mut end = None;
            let mut next = Some(first);
            while let Some(item) = next {
                match item {
                    Item::Metric { key, value, timestamp, step } => {
                        batch.metrics.push(json!({
                            "key": key, "value": number(value), "timestamp": timestamp, "step": step,
                        }));
                    }
                    Item::Param { key, value } => {
                        batch.params.push(json!({ "key": key, "value": value }));
                    }
                    Item::Tag { key, value } => {
                        batch.tags.push(json!({ "key": key, "value": value }))
                    }
                    Item::End { status, time } => end = Some((status, time)),
                }
                next = if batch.is_full() || end.is_some() { None } else { items.try_recv().ok() };
            }
            self.send(&batch);
            if let Some((status, time)) = end {
                let ended = self.attempt(|| self.client.end_run(&self.run_id, status, time));
                if let Err(failure) = ended {
                    self.shared.fail(&failure);
                }
                return;
            }
        }
    }

    fn send(&self, batch: &Batch) {
        if batch.len() == 0 {
            return;
        }
        let body = json!({
            "run_id": self.run_id,
            "metrics": batch.metrics, "params": batch.params, "tags": batch.tags,
        });
        match self.attempt(|| self.client.log_batch(&body)) {
            Ok(()) => {
                self.shared.taken.fetch_add(batch.len() as u64, Ordering::Relaxed);
            }
            Err(failure) => self.shared.fail(&failure),
        }
    }

    /// Makes a call and retries transient failures. After a loss there is only one attempt, so that
    /// the queue empties although the server does not respond.
    fn attempt(&self, call: impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
        let mut pause = self.patience.pause;
        let attempts = if self.shared.failure().is_some() { 1 } else { self.patience.attempts };
        for _ in 1..attempts {
            match call() {
                Err(failure) if failure.transient => {
                    tracing::debug!("{failure}; trying again in {pause:?}");
                    if !self.shared.pause(pause) {
                        return Err(failure);
                    }
                    pause *= 2;
                }
                done => return done,
            }
        }
        call()
    }
}

/// Encodes a number in JSON; non-finite values as in the JSON of Protocol Buffers.
fn number(value: f64) -> Value {
    match value {
        value if value.is_nan() => json!("NaN"),
        f64::INFINITY => json!("Infinity"),
        f64::NEG_INFINITY => json!("-Infinity"),
        value => json!(value),
    }
}
