//! Each rank's client of the store.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::handshake::{self, Greeting, HandshakeError, Purpose};
use super::protocol::{Incoming, Reader, Reply, Request, send};
use super::{ClientIdentity, DIED, HANDSHAKE_TIMEOUT, HEARTBEAT, REPLY_TIMEOUT, SILENT_HEARTBEATS};
use crate::Store;
use crate::table::{Failure, WaitError, cut, deadline};
use crate::{Error, Patience, Result};
use fulgurite_error::{advice, is_exhausted};

/// A rank's client of the job's [`Store`].
///
/// Threads may share it: each request under way has its own connection. Dropping it announces that
/// the rank leaves; the job goes on without the rank.
pub struct TcpStore {
    server: Server,
    /// Connections without a request under way.
    idle: Mutex<Vec<Reader<TcpStream>>>,
    health: Arc<Health>,
    give_up: GiveUp,
}

/// Returns the message for the other ranks if this process must stop waiting.
///
/// It must stop if it was asked to end before training has begun.
type GiveUp = fn() -> Option<String>;

/// The host of a store, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreHost {
    /// Rank 0 of the job.
    RankZero,
    /// The supervisor, which is not a rank.
    Supervisor,
    /// One of the agents that start the ranks on several nodes; the clients are agents, or ranks of
    /// an elastic job.
    Agent,
}

/// Options of a [`TcpStore`] besides the server's address and the client's rank.
#[derive(Debug, Clone, Copy)]
pub struct ClientOptions {
    /// The host of the server.
    pub host: StoreHost,
    /// Called repeatedly during a wait. It returns a text if this process must stop waiting, since
    /// it was asked to end before training has begun. The text is reported as this rank's failure,
    /// so that other ranks do not wait for it. The wait ends with [`Error::Interrupted`].
    pub give_up: fn() -> Option<String>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { host: StoreHost::RankZero, give_up: || None }
    }
}

/// The server's address, and the identity of the client.
#[derive(Clone)]
struct Server {
    host: String,
    port: u16,
    identity: ClientIdentity,
    hosted_by: StoreHost,
}

/// The health connection and its messages.
struct Health {
    /// For writing; the watching thread has the reader.
    stream: TcpStream,
    failure: Mutex<Option<Failure>>,
    changed: Condvar,
    /// Whether the server has confirmed this rank's reported failure.
    recorded: AtomicBool,
    host: StoreHost,
    rank: usize,
    host_left: AtomicBool,
    /// Whether the connection has ended.
    has_ended: AtomicBool,
    lost_host: AtomicBool,
    closing: AtomicBool,
}

impl TcpStore {
    /// Connects to the server at `host:port`.
    ///
    /// Retries until `timeout`, since the server may start later than its clients.
    ///
    /// # Errors
    /// [`Error::Launch`] if no server answers in time. It fails at once if the server is not a
    /// store, belongs to another job or build, or already has a process of this rank.
    pub fn connect(
        host: &str,
        port: u16,
        identity: ClientIdentity,
        timeout: Duration,
    ) -> Result<Self> {
        Self::connect_with(host, port, identity, timeout, ClientOptions::default())
    }

    /// Connects as [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and [`Error::Interrupted`] if this process must stop waiting.
    pub fn connect_with(
        host: &str,
        port: u16,
        identity: ClientIdentity,
        timeout: Duration,
        options: ClientOptions,
    ) -> Result<Self> {
        let server = Server { host: host.to_owned(), port, identity, hosted_by: options.host };
        let over = || (options.give_up)().is_some();
        let reader = match server.open_before(Purpose::Health, deadline(timeout), over) {
            Ok(reader) => reader,
            Err(HandshakeError::Retry(_)) if over() => return Err(Error::Interrupted),
            Err(HandshakeError::Retry(why)) => {
                let advice = match options.host {
                    StoreHost::Agent => {
                        "The agent on that host hosts it: check that it runs, and that other hosts may reach the \
                         port"
                    }
                    StoreHost::RankZero | StoreHost::Supervisor => {
                        "Rank 0 hosts it: check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name its host and \
                         a port that other hosts may reach"
                    }
                };
                return Err(server
                    .error(&format!("no store answered within {timeout:?} ({why}). {advice}")));
            }
            Err(error) => return Err(server.error(&error.describe())),
        };
        let stream = reader.stream().try_clone();
        let health = Arc::new(Health {
            stream: stream.map_err(|e| server.error(&format!("{e}{}", advice(&e))))?,
            failure: Mutex::default(),
            changed: Condvar::new(),
            recorded: AtomicBool::new(false),
            host: options.host,
            rank: server.identity.rank,
            host_left: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            lost_host: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let shared_for_thread = health.clone();
        std::thread::Builder::new()
            .name("store-health".into())
            .stack_size(256 << 10)
            .spawn(move || shared_for_thread.watch(reader))
            .map_err(|e| {
                server.error(&format!("no thread to watch its health: {e}{}", advice(&e)))
            })?;
        Ok(Self { server, idle: Mutex::default(), health, give_up: options.give_up })
    }

    /// Waits until all ranks have connected. Every rank calls it.
    ///
    /// # Errors
    /// After `timeout`, naming the missing ranks; or as soon as a rank fails.
    pub fn wait_for_all(&self, timeout: Duration) -> Result<()> {
        let request = Request::WaitForAll { timeout_ms: millis(timeout) };
        match self.request(&request, timeout.saturating_add(REPLY_TIMEOUT))? {
            Reply::Done => Ok(()),
            Reply::Missing(ranks) => {
                let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                Err(Error::Launch(format!(
                    "after {timeout:?} these of {} ranks have not come: {}. Check that they were \
                     started and what they say",
                    self.server.identity.world_size,
                    ranks.join(", ")
                )))
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Tells the server that this rank leaves, so that its end is not a failure.
    ///
    /// `false` takes the announcement back.
    pub fn set_left(&self, left: bool) {
        // An error means that the server has ended.
        let _ = send(&self.health.stream, &Request::Left(left));
    }

    /// Waits up to `timeout` until the job's failure is known, and returns it.
    pub fn wait_for_failure(&self, timeout: Duration) -> Option<Failure> {
        self.health.wait(timeout, |failure| failure.is_some());
        self.failure()
    }

    /// Sets the job's failure on this client alone, unless it knows one already: a failure that
    /// this process has learned in another way.
    pub fn set_failure(&self, rank: usize, message: &str) {
        self.health.set_failure((rank, message.to_owned()));
    }

    /// Whether the connection to the server broke, although its host had not left.
    pub fn has_lost_host(&self) -> bool {
        self.health.lost_host.load(Ordering::SeqCst)
    }

    /// Reports that this rank has noticed the failure of `rank`. The failed rank's own report takes
    /// precedence.
    pub fn report_noticed(&self, rank: usize, message: &str) {
        let message = cut(message, MAX_MESSAGE).to_owned();
        // An error means that the server has ended.
        let _ = send(&self.health.stream, &Request::Noticed { rank, message });
    }

    fn request(&self, request: &Request, within: Duration) -> Result<Reply> {
        let waits = matches!(request, Request::Get { .. } | Request::WaitForAll { .. });
        if waits && let Some(error) = self.give_up() {
            return Err(error);
        }
        let mut patience = Patience::new(within);
        let deadline = deadline(within);
        let idle = self.idle().pop();
        let mut reader = match idle {
            Some(reader) => reader,
            // Another server may have the address now, which does not know this client.
            None if self.health.has_ended.load(Ordering::SeqCst) => {
                return Err(self.broken("it closed the connection"));
            }
            None => {
                let opening = deadline.min(Instant::now() + REPLY_TIMEOUT);
                let over =
                    || self.failure().is_some() || self.health.host_left.load(Ordering::Relaxed);
                let opened = self.server.open_before(Purpose::Requests, opening, over);
                opened.map_err(|error| self.broken(&error.describe()))?
            }
        };
        let asked = reader
            .stream()
            .set_read_timeout(Some(REQUEST_POLL))
            .and_then(|()| send(reader.stream(), request));
        if let Err(e) = asked {
            return Err(self.broken(&e.to_string()));
        }
        let reply = loop {
            match reader.next() {
                Incoming::Message(reply) => break reply,
                // Without an answer, the health connection notices that the server's host has died.
                Incoming::Idle => {
                    if let Some((rank, message)) = self.failure() {
                        return Err(Error::PeerFailed { rank, message });
                    }
                    if waits && let Some(error) = self.give_up() {
                        return Err(error);
                    }
                    if patience.slice().is_none() {
                        return Err(self.broken(&format!("no answer within {within:?}")));
                    }
                }
                Incoming::Closed => return Err(self.broken("it closed the connection")),
                Incoming::Malformed => return Err(self.broken("its answer makes no sense")),
            }
        };
        self.idle().push(reader);
        if let Reply::Failed { rank, message } = &reply {
            self.health.set_failure((*rank, message.clone()));
        }
        Ok(reply)
    }

    /// Returns the error of an unanswered request: the failure that caused it, if it becomes known
    /// within a second.
    fn broken(&self, why: &str) -> Error {
        match self.wait_for_failure(Duration::from_secs(1)) {
            Some((rank, message)) => Error::PeerFailed { rank, message },
            None if self.health.host_left.load(Ordering::Relaxed) => {
                self.server.error("rank 0, which hosted the store, has finished")
            }
            None => self.server.error(why),
        }
    }

    fn unexpected(&self, reply: Reply) -> Error {
        match reply {
            Reply::Failed { rank, message } => Error::PeerFailed { rank, message },
            Reply::Refused(why) => self.server.error(&why),
            other => self.server.error(&format!("an unexpected answer: {other:?}")),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Reader<TcpStream>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.set_left(true);
        }
        self.health.closing.store(true, Ordering::Relaxed);
        let _ = self.health.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Request::Set { key: key.to_owned(), value: value.to_owned() };
        match self.request(&request, REPLY_TIMEOUT)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let request = Request::Get { key: key.to_owned(), timeout_ms: millis(timeout) };
        match self.request(&request, timeout.saturating_add(REPLY_TIMEOUT))? {
            Reply::Value(value) => Ok(value),
            Reply::Timeout => Err(WaitError::Timeout.into_error(key, timeout)),
            other => Err(self.unexpected(other)),
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        match self.request(&Request::Add { key: key.to_owned(), amount }, REPLY_TIMEOUT)? {
            Reply::Number(number) => Ok(number),
            Reply::Refused(why) => Err(Error::Launch(why)),
            other => Err(self.unexpected(other)),
        }
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool> {
        let expected = expected.map(<[u8]>::to_owned);
        let request =
            Request::CompareSet { key: key.to_owned(), expected, value: value.to_owned() };
        match self.request(&request, REPLY_TIMEOUT)? {
            Reply::Compared(was) => Ok(was),
            other => Err(self.unexpected(other)),
        }
    }

    fn report_failure(&self, message: &str) -> Result<()> {
        // The existing connection is used, since a failed process may be unable to open another
        // one.
        let request = Request::Fail { message: cut(message, MAX_MESSAGE).to_owned() };
        send(&self.health.stream, &request).map_err(|e| self.server.error(&e.to_string()))?;
        // A short wait, since this process is about to end.
        let recorded = || self.health.recorded.load(Ordering::SeqCst);
        self.health.wait(RECORD_TIMEOUT, |_| recorded());
        if recorded() { Ok(()) } else { Err(self.server.error("it does not answer")) }
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.health.failure().clone()
    }

    fn give_up(&self) -> Option<Error> {
        let why = (self.give_up)()?;
        // An error means that the server has ended, and the job with it.
        let _ = self.report_failure(&why);
        Some(Error::Interrupted)
    }
}

/// Time that a failed rank waits until the server has recorded the failure. The server may be
/// frozen.
const RECORD_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which a waiting client checks whether to go on waiting.
const REQUEST_POLL: Duration = Duration::from_millis(200);
/// Longest failure message: a frame of a health connection must fit into the socket's buffer.
const MAX_MESSAGE: usize = 16 << 10;
/// The failures of a rank that loses the store of its supervisor or of an agent.
const BROKEN: &str = "its connection to the job's store, which the supervisor hosts, broke";
const BROKEN_TO_AGENT: &str = "its connection to a store of the agents broke";

impl Server {
    fn error(&self, why: &str) -> Error {
        let Self { host, port, identity, hosted_by } = self;
        Error::Launch(match hosted_by {
            StoreHost::Agent => format!("store at {host}:{port}: {why}"),
            StoreHost::RankZero | StoreHost::Supervisor => {
                format!("rank {}, store at {host}:{port}: {why}", identity.rank)
            }
        })
    }

    /// [Opens](Self::open) a connection, with retries until `deadline` or until the job is `over`.
    ///
    /// The server may not be ready yet, or busy with strangers.
    fn open_before(
        &self,
        purpose: Purpose,
        deadline: Instant,
        over: impl Fn() -> bool,
    ) -> Result<Reader<TcpStream>, HandshakeError> {
        let mut pause = Duration::from_millis(10);
        loop {
            let begun = Instant::now();
            // The last attempt gets a second in any case: time in which this process was stopped
            // does not count.
            let within = deadline.saturating_duration_since(begun).max(Duration::from_secs(1));
            match self.open(purpose, begun + within) {
                Err(HandshakeError::Retry(why)) if over() || begun >= deadline => {
                    return Err(HandshakeError::Retry(why));
                }
                Err(HandshakeError::Retry(_)) => {}
                done => return done,
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Opens a connection, once.
    fn open(
        &self,
        purpose: Purpose,
        deadline: Instant,
    ) -> Result<Reader<TcpStream>, HandshakeError> {
        let Self { host, port, identity, .. } = self;
        let retry = |why: String| HandshakeError::Retry(why);
        // Resolved in each retry: a host's name may become known only after the host has started.
        let addresses = (host.as_str(), *port)
            .to_socket_addrs()
            .map_err(|e| retry(format!("the name `{host}` has no address: {e}")))?;
        let mut stream = Err(retry("the name has no address".into()));
        for address in addresses {
            let rest = deadline.saturating_duration_since(Instant::now());
            let timeout = rest.clamp(Duration::from_millis(1), HANDSHAKE_TIMEOUT);
            stream = TcpStream::connect_timeout(&address, timeout).map_err(|e| {
                // The server was not contacted.
                match is_exhausted(&e) && e.kind() != io::ErrorKind::WouldBlock {
                    true => HandshakeError::Exhausted(format!("{e}{}", advice(&e))),
                    false => retry(e.to_string()),
                }
            });
            if stream.is_ok() {
                break;
            }
        }
        let stream = stream?;
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(Patience::SLICE)))
            .and_then(|()| stream.set_write_timeout(Some(REPLY_TIMEOUT)))
            .map_err(|e| retry(e.to_string()))?;
        let ClientIdentity { key, rank, world_size } = identity;
        let greeting = Greeting { rank: *rank, world_size: *world_size, purpose };
        let rest = deadline.saturating_duration_since(Instant::now());
        let mut patience = Patience::new(rest.min(HANDSHAKE_TIMEOUT));
        let reader = handshake::connect(stream, key, &greeting, &mut patience)?;
        let ready = reader.stream().set_read_timeout(Some(HEARTBEAT));
        ready.map_err(|e| retry(e.to_string()))?;
        Ok(reader)
    }
}

impl Health {
    fn failure(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the failure, unless one is set already.
    fn set_failure(&self, failure: Failure) {
        self.failure().get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Waits up to `timeout` until `over` is true after a change.
    fn wait(&self, timeout: Duration, over: impl Fn(&Option<Failure>) -> bool) {
        let mut patience = Patience::new(timeout);
        let mut failure = self.failure();
        while !over(&failure)
            && let Some(slice) = patience.slice()
        {
            let waited = self.changed.wait_timeout(failure, slice);
            failure = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reads the health connection and sends heartbeats over it until it ends.
    fn watch(&self, mut reader: Reader<TcpStream>) {
        let same_host = self.stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
        let mut silent = 0;
        let mut sent = Instant::now();
        // The server learns from the first message that this rank knows of its admission. An error
        // shows in the next read too.
        let _ = send(&self.stream, &Request::Ping);
        while same_host || silent < SILENT_HEARTBEATS {
            let message = match reader.next() {
                Incoming::Message(message) => Some(message),
                Incoming::Idle => None,
                Incoming::Closed | Incoming::Malformed => break,
            };
            silent = if message.is_some() { 0 } else { silent + 1 };
            match message {
                Some(Reply::Failed { rank, message }) => {
                    self.set_failure((rank, message));
                    let _ = send(&self.stream, &Request::FailureReceived);
                }
                Some(Reply::HostLeft(left)) => self.host_left.store(left, Ordering::Relaxed),
                Some(Reply::Recorded) => {
                    let _failure = self.failure();
                    self.recorded.store(true, Ordering::SeqCst);
                    self.changed.notify_all();
                }
                _ => {}
            }
            if sent.elapsed() >= HEARTBEAT {
                sent = Instant::now();
                // An error shows in the next read too.
                let _ = send(&self.stream, &Request::Ping);
            }
        }
        self.has_ended.store(true, Ordering::SeqCst);
        if !self.closing.load(Ordering::Relaxed) && !self.host_left.load(Ordering::Relaxed) {
            self.lost_host.store(true, Ordering::SeqCst);
            self.set_failure(match self.host {
                StoreHost::RankZero => (0, format!("{DIED}; it hosted the job's store")),
                StoreHost::Supervisor => (self.rank, BROKEN.to_owned()),
                StoreHost::Agent => (self.rank, BROKEN_TO_AGENT.to_owned()),
            });
        }
    }
}

/// Whole milliseconds, rounded up so that a short timeout does not become 0.
fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
impl TcpStore {
    /// Whether the hosting process has announced that it leaves.
    pub(super) fn health_says_host_left(&self) -> bool {
        self.health.host_left.load(Ordering::Relaxed)
    }
}
