//! The server of the store.
//!
//! One thread accepts connections. Each request connection has one thread, and each health
//! connection has two. All state is in the [`Table`].

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connections::Connections;
use super::handshake::{self, Accepted, Denial, Greeting, Purpose};
use super::job_key::JobKey;
use super::protocol::{Incoming, Reader, Reply, Request, send};
use super::{DIED, HANDSHAKE_TIMEOUT, HEARTBEAT, REPLY_TIMEOUT, SILENT_HEARTBEATS};
use crate::table::{State, Table, WaitError};
use crate::{Error, Patience, Result};
use fulgurite_error::{advice, is_exhausted};

/// The meaning of a connection that ends before its rank announced that it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostRankPolicy {
    /// The rank failed.
    Failed,
    /// Nothing yet. The process that hosts this server is the parent of the ranks, and
    /// [reports](StoreServer::fail) how the rank ended.
    ParentReports,
}

/// Time that the server waits for descriptors, threads or memory for a connection.
const EXHAUSTED_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest world size, far above any job's, since memory is reserved for each rank.
const MAX_WORLD_SIZE: usize = 1 << 20;

/// Hosts a job's store. Dropping it closes the store for all clients.
pub struct StoreServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    table: Table,
    key: JobKey,
    world_size: usize,
    on_lost: LostRankPolicy,
    connections: Mutex<Connections>,
}

impl StoreServer {
    /// Listens on `address`; port 0 takes a free one. Serves clients that have `key`.
    ///
    /// # Errors
    /// [`Error::Launch`] if the port is taken, the address does not belong to this host, or there
    /// are more than a million ranks.
    pub fn bind(
        address: SocketAddr,
        key: JobKey,
        world_size: usize,
        lost: LostRankPolicy,
    ) -> Result<Self> {
        Self::bind_with_values(address, key, world_size, lost, &[])
    }

    /// As [`StoreServer::bind`], with keys that are set before the first client is served.
    ///
    /// # Errors
    /// As [`StoreServer::bind`]; also if the values are too large for a store.
    pub fn bind_with_values(
        address: SocketAddr,
        key: JobKey,
        world_size: usize,
        lost: LostRankPolicy,
        values: &[(&str, &[u8])],
    ) -> Result<Self> {
        if world_size > MAX_WORLD_SIZE {
            return Err(Error::Launch(format!(
                "a job of {world_size} ranks is more than the store serves ({MAX_WORLD_SIZE}). Check \
                 trainer.devices and trainer.num_nodes, or WORLD_SIZE"
            )));
        }
        let table = Table::new(world_size);
        for (name, value) in values {
            table.set(name, value.to_vec()).map_err(Error::Launch)?;
        }
        let listener = TcpListener::bind(address).map_err(|e| bind_error(address, &e))?;
        let address = listener.local_addr().map_err(|e| bind_error(address, &e))?;
        let shared = Arc::new(Shared {
            table,
            key,
            world_size,
            on_lost: lost,
            connections: Mutex::new(Connections::new(world_size)),
        });
        let shared_for_thread = shared.clone();
        let acceptor = spawn("store-accept", move || accept(&listener, &shared_for_thread))
            .map_err(|e| Error::Launch(format!("no thread for the store: {e}{}", advice(&e))))?;
        Ok(Self { shared, address, acceptor: Some(acceptor) })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records that `rank` failed, and notifies all ranks if it is the job's first failure.
    pub fn fail(&self, rank: usize, message: &str) {
        self.shared.table.fail(rank, message);
    }

    /// Returns all failures, one for each failed rank, in the order of their reports.
    pub fn failures(&self) -> Vec<(usize, String)> {
        self.shared.table.read().failures.clone()
    }

    /// Returns the first failure that a rank has noticed of another rank.
    pub fn noticed(&self) -> Option<(usize, String)> {
        self.shared.table.read().noticed.first().cloned()
    }

    /// Returns the reason if this process cannot serve the job any more. The job has failed then.
    pub fn broken(&self) -> Option<String> {
        self.shared.table.read().broken.clone()
    }

    /// The value of a key, if it is set.
    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        self.shared.table.get(key, Duration::ZERO).ok()
    }

    /// Whether `rank` ever connected.
    pub fn has_joined(&self, rank: usize) -> bool {
        self.shared.table.read().members.get(rank).is_some_and(|member| member.joined)
    }

    /// Whether `rank` has announced that it leaves.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.table.read().members.get(rank).is_some_and(|member| member.left)
    }

    /// For how long `rank` has been without a connection; `None` if it has one, or never had.
    pub fn lost_for(&self, rank: usize) -> Option<Duration> {
        Some(self.shared.table.read().members.get(rank)?.lost?.elapsed())
    }

    /// Tells the clients that this process leaves, so that its end is not a failure.
    ///
    /// `false` takes the announcement back.
    pub fn set_left(&self, left: bool) {
        self.shared.table.change(|state| state.host_left = left);
    }

    /// Waits until all ranks except `own` have left or are lost, or one has failed.
    ///
    /// Returns false after `timeout`.
    pub fn wait_for_others(&self, own: usize, timeout: Duration) -> bool {
        let gone = |state: &State| {
            !state.failures.is_empty()
                || others(state, own).all(|member| member.left || member.lost.is_some())
        };
        self.shared.table.wait(timeout, |state| gone(state).then_some(())).is_some()
    }

    /// Waits until all connected ranks except `own` have confirmed the notice of the job's failure.
    ///
    /// Returns false after `timeout`.
    pub fn wait_until_notified(&self, own: usize, timeout: Duration) -> bool {
        let notified = |state: &State| {
            others(state, own).all(|m| !m.joined || m.notified || m.left || m.lost.is_some())
        };
        self.shared.table.wait(timeout, |state| notified(state).then_some(())).is_some()
    }
}

fn others(state: &State, own: usize) -> impl Iterator<Item = crate::table::Member> {
    state.members.iter().enumerate().filter(move |(rank, _)| *rank != own).map(|(_, m)| *m)
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.table.change(|state| state.closed = true);
        // `accept` waits without a timeout; a connection from here wakes it.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        let woken = TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok();
        self.shared.connections().close_all();
        if let (true, Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this process cannot serve the job's ranks any more, which ends the job.
    fn break_down(&self, error: &io::Error) {
        let why = format!("the job's store takes no more connections: {error}{}", advice(error));
        self.table.change(|state| {
            if state.broken.is_none() && state.failures.is_empty() {
                state.failures.push((0, why.clone()));
                state.broken = Some(why);
            }
        });
    }
}

fn bind_error(address: SocketAddr, error: &io::Error) -> Error {
    Error::Launch(match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "rank 0 cannot host the store on {address}: the port is taken, perhaps by another job \
             on this host. Choose a free MASTER_PORT"
        ),
        io::ErrorKind::AddrNotAvailable => format!(
            "rank 0 cannot host the store on {address}: that is no address of this host. \
             MASTER_ADDR must name the host that rank 0 runs on; if other hosts reach it under an \
             address that is not its own, set FULGURITE_STORE_ADDRESS to one that is"
        ),
        _ => format!("rank 0 cannot host the store on {address}: {error}{}", advice(error)),
    })
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // Small stacks: a job of many ranks has many of these threads.
    std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(work)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut exhausted: Option<Patience> = None;
    loop {
        let stream = listener.accept();
        if shared.table.read().closed {
            return;
        }
        let Err(error) = stream.and_then(|(stream, _)| start_serving(stream, shared)) else {
            exhausted = None;
            continue;
        };
        // Other errors mean that a connection died in the queue.
        if is_exhausted(&error) {
            let patience = exhausted.get_or_insert_with(|| Patience::new(EXHAUSTED_TIMEOUT));
            if patience.slice().is_none() {
                shared.break_down(&error);
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Serves a connection on its own thread.
fn start_serving(stream: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let id = shared.connections().insert(stream.try_clone()?);
    let shared_for_thread = shared.clone();
    let spawned = spawn("store-connection", move || {
        serve(stream, id, &shared_for_thread);
        // The copy in `connections` would keep the connection open.
        shared_for_thread.connections().close(id);
    });
    if spawned.is_err() {
        shared.connections().close(id);
    }
    spawned.map(drop)
}

fn serve(stream: TcpStream, id: u64, shared: &Arc<Shared>) {
    let ready = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(Some(Patience::SLICE)))
        .and_then(|()| stream.set_write_timeout(Some(REPLY_TIMEOUT)));
    if ready.is_err() {
        return;
    }
    let mut patience = Patience::new(HANDSHAKE_TIMEOUT);
    let admit = |greeting: &Greeting| admit(greeting, id, shared);
    let accepted = handshake::accept(stream, &shared.key, &mut patience, admit);
    let Some(Accepted { reader, greeting, told }) = accepted else { return };
    let Greeting { rank, purpose, .. } = greeting;
    let told = told && reader.stream().set_read_timeout(Some(HEARTBEAT)).is_ok();
    match purpose {
        Purpose::Requests if told => requests(reader, shared),
        Purpose::Requests => {}
        Purpose::Health => {
            if told {
                health(reader, shared, rank);
            } else {
                connection_ended(shared, rank);
            }
        }
    }
}

/// Checks that a client with the job's key fits the job. A health connection makes the rank a
/// member.
fn admit(greeting: &Greeting, id: u64, shared: &Shared) -> Result<(), Denial> {
    let Greeting { rank, world_size, purpose } = *greeting;
    if world_size != shared.world_size {
        return Err(Denial::Refused(format!(
            "it serves {} ranks, this process expects {world_size}: all ranks must be started with \
             the same WORLD_SIZE",
            shared.world_size
        )));
    }
    if rank >= world_size {
        let why = format!("rank {rank} is not below the world size {world_size}");
        return Err(Denial::Refused(why));
    }
    shared.connections().admit(id, rank)?;
    if purpose == Purpose::Requests {
        return Ok(());
    }
    shared.table.change(|state| {
        let member = &mut state.members[rank];
        match (member.joined, member.confirmed) {
            (false, _) => {
                member.joined = true;
                Ok(())
            }
            // Its earlier connection may have ended before the rank knew of its admission, and the
            // server has not seen the end yet. If it is another process, the next attempt tells.
            (true, false) => Err(Denial::TryAgain),
            (true, true) => Err(Denial::Refused(format!(
                "another process is or was rank {rank}: every process of a job needs a RANK of its \
                 own"
            ))),
        }
    })
}

fn requests(mut reader: Reader<TcpStream>, shared: &Shared) {
    let table = &shared.table;
    loop {
        let request = match reader.next() {
            Incoming::Message(request) => request,
            Incoming::Idle => continue,
            Incoming::Closed | Incoming::Malformed => return,
        };
        let reply = match request {
            Request::Set { key, value } => {
                table.set(&key, value).map_or_else(Reply::Refused, |()| Reply::Done)
            }
            Request::Get { key, timeout_ms } => {
                match table.get(&key, Duration::from_millis(timeout_ms)) {
                    Ok(value) => Reply::Value(value),
                    Err(wait_error) => wait_error.into(),
                }
            }
            Request::Add { key, amount } => match table.add(&key, amount) {
                Ok(number) => Reply::Number(number),
                Err(value) => Reply::Refused(value),
            },
            Request::CompareSet { key, expected, value } => table
                .compare_set(&key, expected.as_deref(), value)
                .map_or_else(Reply::Refused, Reply::Compared),
            Request::WaitForAll { timeout_ms } => {
                wait_for_all(table, Duration::from_millis(timeout_ms))
            }
            Request::Ping
            | Request::Left(_)
            | Request::FailureReceived
            | Request::Fail { .. }
            | Request::Noticed { .. } => {
                Reply::Refused("that belongs on a health connection".into())
            }
        };
        if send(reader.stream(), &reply).is_err() {
            return;
        }
    }
}

fn wait_for_all(table: &Table, timeout: Duration) -> Reply {
    let missing = |state: &State| -> Vec<usize> {
        let members = state.members.iter().enumerate();
        members.filter(|(_, member)| !member.joined).map(|(rank, _)| rank).collect()
    };
    // A failure comes first: a job with a failure does not start, even if all ranks have joined.
    let outcome = table.wait(timeout, |state| match state.wait_error() {
        Some(wait_error) => Some(wait_error.into()),
        None => missing(state).is_empty().then_some(Reply::Done),
    });
    outcome.unwrap_or_else(|| Reply::Missing(missing(&table.read())))
}

fn failure_reply((rank, message): (usize, String)) -> Reply {
    Reply::Failed { rank, message }
}

impl From<WaitError> for Reply {
    fn from(wait_error: WaitError) -> Self {
        match wait_error {
            WaitError::Timeout => Self::Timeout,
            WaitError::Failed(failure) => failure_reply(failure),
            WaitError::Closed => Self::Refused("the store is closing".into()),
        }
    }
}

/// Reads a rank's health connection until it ends.
fn health(mut reader: Reader<TcpStream>, shared: &Arc<Shared>, rank: usize) {
    let same_host = reader.stream().peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
    let (mut silent, mut notifier) = (0, None);
    while same_host || silent < SILENT_HEARTBEATS {
        let message = match reader.next() {
            Incoming::Message(message) => message,
            Incoming::Idle => {
                silent += 1;
                continue;
            }
            Incoming::Closed | Incoming::Malformed => break,
        };
        silent = 0;
        if notifier.is_none() {
            update_member(shared, rank, |member| member.confirmed = true);
            match start_notifier(reader.stream(), shared, rank) {
                Ok(started) => notifier = Some(started),
                // A rank of the job cannot be served, so the job cannot go on.
                Err(error) => {
                    shared.break_down(&error);
                    break;
                }
            }
        }
        match message {
            Request::Ping => {}
            Request::Left(left) => update_member(shared, rank, |member| member.left = left),
            Request::FailureReceived => {
                update_member(shared, rank, |member| member.notified = true)
            }
            Request::Fail { message } => {
                shared.table.fail(rank, &message);
                // An error shows in the next read too.
                let _ = send(reader.stream(), &Reply::Recorded);
            }
            Request::Noticed { rank, message } => {
                shared.table.change(|state| {
                    if state.noticed.len() < state.members.len() {
                        state.noticed.push((rank, message));
                    }
                });
            }
            _ => break,
        }
    }
    connection_ended(shared, rank);
    let _ = notifier.map(JoinHandle::join);
}

fn start_notifier(
    stream: &TcpStream,
    shared: &Arc<Shared>,
    rank: usize,
) -> io::Result<JoinHandle<()>> {
    let (copy, shared) = (stream.try_clone()?, shared.clone());
    spawn("store-notify", move || send_notices(&copy, &shared, rank))
}

fn update_member(shared: &Shared, rank: usize, change: impl FnOnce(&mut crate::table::Member)) {
    shared.table.change(|state| state.members.get_mut(rank).map(change));
}

/// Records that the health connection of `rank` has ended.
///
/// The rank is lost if it knew of its admission; else it may connect again.
fn connection_ended(shared: &Shared, rank: usize) {
    shared.table.change(|state| {
        let closed = state.closed;
        let Some(member) = state.members.get_mut(rank) else { return };
        if !member.confirmed {
            member.joined = false;
            return;
        }
        member.lost = Some(Instant::now());
        // After a first failure, other ranks end because of it.
        let failed = !closed && !member.left && state.failures.is_empty();
        if failed && shared.on_lost == LostRankPolicy::Failed {
            state.failures.push((rank, DIED.to_owned()));
        }
    });
}

/// Writes to a rank's health connection.
///
/// It sends heartbeats, the job's failure as soon as there is one, and whether the hosting process
/// leaves.
fn send_notices(stream: &TcpStream, shared: &Shared, rank: usize) {
    let (mut sent_failure, mut sent_host_left) = (false, false);
    loop {
        let notice = shared.table.wait(HEARTBEAT, |state| {
            if state.closed || state.members.get(rank).is_none_or(|member| member.lost.is_some()) {
                return Some(None);
            }
            if state.host_left != sent_host_left {
                return Some(Some(Reply::HostLeft(state.host_left)));
            }
            let failure = state.failures.first().filter(|_| !sent_failure)?;
            Some(Some(failure_reply(failure.clone())))
        });
        let message = match notice {
            Some(None) => return,
            Some(Some(message)) => message,
            None => Reply::Ping,
        };
        match message {
            Reply::HostLeft(left) => sent_host_left = left,
            Reply::Failed { .. } => sent_failure = true,
            _ => {}
        }
        if send(stream, &message).is_err() {
            return;
        }
    }
}
