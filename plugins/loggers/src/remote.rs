//! Servers that receive logged values over HTTP.
//!
//! Training never waits for a server: a bounded [`Queue`] holds the logged values, and a thread
//! sends them in batches. Only the end of a run waits, and not for long.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fulgurite_error::{Error, Result, quoted};
use fulgurite_trainer::trainer::RunStatus;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use ureq::Agent;

/// Maximum number of characters shown of a server's answer.
const MAX_SAID: usize = 300;
/// Maximum number of waiting items; further items are dropped.
const CAPACITY: usize = 20_000;

/// The reaction to a server that cannot be reached for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// A warning; the values that could not be sent are missing on the server.
    #[default]
    Warn,
    /// The run ends.
    Error,
}

/// Timeouts and retries for a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Timeout for the answer to one request.
    pub(crate) request: Duration,
    /// Pause between attempts; doubles after each attempt.
    pub(crate) pause: Duration,
    /// Attempts per request.
    pub(crate) attempts: u32,
    /// Timeout for sending the rest at the end of a run.
    pub(crate) end: Duration,
    /// Time at the end of a run during which failed calls are retried.
    pub(crate) retry_at_end: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            pause: Duration::from_secs(1),
            attempts: 4,
            end: Duration::from_secs(30),
            retry_at_end: Duration::from_secs(1),
        }
    }
}

/// The reason why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    /// The server's error code, such as `RESOURCE_DOES_NOT_EXIST`; `None` if it did not answer.
    pub(crate) code: Option<String>,
    /// Whether a retry may succeed.
    pub(crate) transient: bool,
    /// Number of items that the server has taken nevertheless: of a transient failure the first
    /// ones.
    pub(crate) taken: usize,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::other(failure.message)
    }
}

/// A logger's setting with the address of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AddressKey {
    /// For messages: `mlflow's`.
    pub(crate) of: &'static str,
    pub(crate) key: &'static str,
    pub(crate) example: &'static str,
    /// What to do instead of a password in the address.
    pub(crate) credentials: &'static str,
}

/// Makes a client for the server at `uri`. Sends nothing.
///
/// # Errors
/// If this is no address of a server, or has a password.
pub(crate) fn agent(uri: &str, key: AddressKey, timeout: Duration) -> Result<Agent> {
    let AddressKey { of, key, example, credentials } = key;
    let authority = uri.split_once("://").map_or(uri, |(_, rest)| rest).split('/').next();
    if authority.is_some_and(|authority| authority.contains('@')) {
        return Err(Error::Config(format!(
            "`trainer.loggers`: {of} `{key}` has a user or a password, which would be saved with the run; leave \
             them out, and {credentials}"
        )));
    }
    let wrong =
        |what: &str| Err(Error::Config(format!("`trainer.loggers`: {of} `{key}` {uri:?}: {what}")));
    match uri.split_once("://") {
        Some(("http", host)) if !host.is_empty() => {}
        Some(("https", _)) if cfg!(feature = "https") => {}
        Some(("https", _)) => {
            return wrong(
                "this program was built without HTTPS; build it with the feature `https` of \
                 `fulgurite`",
            );
        }
        _ => return wrong(&format!("expected the address of a server, such as {example}")),
    }
    let config = Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        // A redirect's answer is not the server's, and other servers must not get the
        // credentials.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent("fulgurite");
    Ok(config.build().into())
}

/// What a server answered.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) text: String,
    /// Where a redirect leads.
    location: Option<String>,
}

impl Answer {
    /// Reads an answer.
    pub(crate) fn of(
        sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
        failed: impl Fn(&dyn fmt::Display) -> Failure,
    ) -> Result<Self, Failure> {
        let mut answer = sent.map_err(|error| failed(&error))?;
        let status = answer.status().as_u16();
        let text = answer.body_mut().read_to_string().map_err(|error| failed(&error))?;
        let location = answer.headers().get("location");
        let location = location.map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
        Ok(Self { status, text, location })
    }

    /// What the server said, for a message. `key` names the server's address in the configuration.
    pub(crate) fn said(&self, message: Option<&str>, key: &str) -> String {
        match (self.status, &self.location) {
            (300..400, Some(to)) => {
                let to = quoted(to, MAX_SAID);
                format!("it leads to {to}; `{key}` must name the server itself")
            }
            _ => quoted(message.unwrap_or(&self.text), MAX_SAID),
        }
    }

    /// Whether the same call may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        self.status >= 500 || self.status == 429
    }
}

/// A server that receives logged values.
pub(crate) trait Receiving: Send + 'static {
    type Item: Send;

    /// The server's name, for messages.
    const NAME: &'static str;

    /// Most items of a [`send`](Self::send).
    const MAX_ITEMS: usize;

    /// Sends items. It is called again after a transient failure, without those that were taken.
    ///
    /// # Errors
    /// If the server does not take them.
    fn send(&self, items: &[Self::Item]) -> Result<(), Failure>;

    /// Ends the run on the server, at this time in milliseconds since 1970.
    ///
    /// # Errors
    /// If the server does not take it.
    fn end(&self, status: RunStatus, time: u64) -> Result<(), Failure>;
}

enum Message<T> {
    Item(T),
    End(RunStatus, u64),
}

/// A bounded queue, emptied by its own thread. Only the end of a run waits for it, and not for
/// long.
pub(crate) struct Queue<R: Receiving> {
    sender: Option<SyncSender<Message<R::Item>>>,
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
    fn fail(&self, failure: &dyn fmt::Display) {
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

impl<R: Receiving> Queue<R> {
    /// Starts the sending thread.
    pub(crate) fn start(server: R, on_error: OnError, patience: Patience) -> Result<Self> {
        let (sender, items) = sync_channel(CAPACITY);
        let (finished, done) = sync_channel(1);
        let shared = Arc::<Shared>::default();
        let worker = Worker { server, patience, shared: shared.clone() };
        std::thread::Builder::new()
            .name(R::NAME.to_lowercase())
            .spawn(move || {
                worker.run(&items);
                // The receiver may be gone.
                let _ = finished.send(());
            })
            .map_err(|error| {
                Error::other(format!("starting the thread for {}: {error}", R::NAME))
            })?;
        Ok(Self { sender: Some(sender), done, shared, on_error, patience })
    }

    /// Enqueues an item without waiting.
    ///
    /// # Errors
    /// If an earlier item could not be sent and failures end the run.
    pub(crate) fn put(&self, item: R::Item) -> Result<()> {
        self.check()?;
        let Some(sender) = &self.sender else { return Ok(()) };
        self.shared.logged.fetch_add(1, Ordering::Relaxed);
        match sender.try_send(Message::Item(item)) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => {
                let name = R::NAME;
                self.shared.fail(&format!("{name} takes less than is logged: values are left out"));
                self.check()
            }
            Err(TrySendError::Disconnected(_)) => {
                self.shared.fail(&format!("the thread for {} has ended", R::NAME));
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
    pub(crate) fn finish(&mut self, status: RunStatus) -> Result<()> {
        let Some(sender) = self.sender.take() else { return Ok(()) };
        let until = Instant::now() + self.patience.end;
        self.shared.end(Instant::now() + self.patience.retry_at_end);
        let mut end = Message::End(status, milliseconds());
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
        let name = R::NAME;
        if self.done.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            let waited = self.patience.end.as_secs_f64();
            self.shared
                .fail(&format!("{name} has not taken everything within {waited} s of the end"));
        }
        let (missing, logged) = self.missing();
        if missing > 0 {
            tracing::warn!("{name} lacks {missing} of {logged} values that were logged");
        }
        self.check()
    }

    /// Returns how many values the server has not received, and how many were logged.
    pub(crate) fn missing(&self) -> (u64, u64) {
        let taken = self.shared.taken.load(Ordering::Relaxed);
        let logged = self.shared.logged.load(Ordering::Relaxed);
        (logged - taken, logged)
    }
}

/// The sending thread's state.
struct Worker<R> {
    server: R,
    patience: Patience,
    shared: Arc<Shared>,
}

impl<R: Receiving> Worker<R> {
    fn run(&self, messages: &Receiver<Message<R::Item>>) {
        // Everything logged since the last call goes into the next call.
        while let Ok(first) = messages.recv() {
            let mut items = Vec::new();
            let mut end = None;
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    Message::Item(item) => items.push(item),
                    Message::End(status, time) => end = Some((status, time)),
                }
                let is_full = items.len() >= R::MAX_ITEMS || end.is_some();
                next = if is_full { None } else { messages.try_recv().ok() };
            }
            if !items.is_empty() {
                let mut taken = 0;
                let sent = self.attempt(|| {
                    let sent = self.server.send(&items[taken..]);
                    taken = sent.as_ref().map_or_else(|it| taken + it.taken, |()| items.len());
                    sent
                });
                self.shared.taken.fetch_add(taken as u64, Ordering::Relaxed);
                if let Err(failure) = sent {
                    self.shared.fail(&failure);
                }
            }
            if let Some((status, time)) = end {
                if let Err(failure) = self.attempt(|| self.server.end(status, time)) {
                    self.shared.fail(&failure);
                }
                return;
            }
        }
    }

    /// Makes a call and retries transient failures. After a loss there is only one attempt, so that
    /// the queue empties although the server does not respond.
    fn attempt(&self, mut call: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
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

/// Milliseconds since 1970.
pub(crate) fn milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Encodes a number in JSON; non-finite values as in the JSON of Protocol Buffers.
pub(crate) fn number(value: f64) -> Value {
    match value {
        value if value.is_nan() => json!("NaN"),
        f64::INFINITY => json!("Infinity"),
        f64::NEG_INFINITY => json!("-Infinity"),
        value => json!(value),
    }
}
