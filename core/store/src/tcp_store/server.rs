//! The server: a thread that accepts, one for each request connection, two for each health
//! connection. All state is in the [`Table`].

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::protocol::{Greeting, Incoming, Purpose, Reader, Reply, Request, send};
use super::{ANSWER, HEARTBEAT, Identity, SILENT_HEARTBEATS, WITHOUT_A_WORD};
use crate::table::{Refusal, State, Table};
use crate::{Error, Result};

/// What follows if a rank's connection ends without a goodbye.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostRank {
    /// The rank failed.
    Failed,
    /// Nothing yet: the process that hosts this server is the ranks' parent, knows how the rank ended,
    /// and [reports](StoreServer::fail) it.
    ParentReports,
}

/// A number that no job reaches: memory is reserved for each rank.
const MAX_WORLD_SIZE: usize = 1 << 20;

/// Hosts a job's store. Dropping it ends the store for all clients.
pub struct StoreServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    table: Table,
    job_id: String,
    world_size: usize,
    on_lost: LostRank,
    /// Open connections, to shut them down when the server ends.
    connections: Mutex<HashMap<u64, TcpStream>>,
    next_connection: AtomicU64,
}

impl StoreServer {
    /// Listens on `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// [`Error::Launch`] if the port is taken, the address is not one of this host, or there are more
    /// than a million ranks.
    pub fn bind(
        address: SocketAddr,
        job_id: &str,
        world_size: usize,
        lost: LostRank,
    ) -> Result<Self> {
        if world_size > MAX_WORLD_SIZE {
            return Err(Error::Launch(format!(
                "a job of {world_size} ranks is more than the store serves ({MAX_WORLD_SIZE}). Check \
                 trainer.devices and trainer.num_nodes, or WORLD_SIZE"
            )));
        }
        let listener = TcpListener::bind(address).map_err(|e| bind_error(address, &e))?;
        let address = listener.local_addr().map_err(|e| bind_error(address, &e))?;
        let shared = Arc::new(Shared {
            table: Table::new(world_size),
            job_id: job_id.to_owned(),
            world_size,
            on_lost: lost,
            connections: Mutex::default(),
            next_connection: AtomicU64::new(0),
        });
        let for_thread = shared.clone();
        let acceptor = spawn("store-accept", move || accept(&listener, &for_thread))
            .map_err(|e| Error::Launch(format!("no thread for the store: {e}")))?;
        Ok(Self { shared, address, acceptor: Some(acceptor) })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records that `rank` failed and tells all ranks, if it is the job's first failure.
    pub fn fail(&self, rank: usize, message: &str) {
        self.shared.table.fail(rank, message);
    }

    /// All failures, one a rank, in the order they became known.
    pub fn failures(&self) -> Vec<(usize, String)> {
        self.shared.table.read().failures.clone()
    }

    /// Whether `rank` ever connected.
    pub fn has_joined(&self, rank: usize) -> bool {
        self.shared.table.read().members.get(rank).is_some_and(|member| member.joined)
    }

    /// Tells the clients whether the end of this process would be a failure (no, once it left).
    pub fn set_left(&self, left: bool) {
        self.shared.table.change(|state| state.host_left = left);
    }

    /// Waits until all ranks but `own` have left or are lost, or one failed. False if `timeout`
    /// passed before.
    pub fn wait_for_others(&self, own: usize, timeout: Duration) -> bool {
        let gone = |state: &State| {
            !state.failures.is_empty()
                || others(state, own).all(|member| member.left || member.lost)
        };
        self.shared.table.wait(timeout, |state| gone(state).then_some(())).is_some()
    }

    /// Waits until every rank but `own` that is still there knows of the job's failure.
    pub fn wait_until_told(&self, own: usize, timeout: Duration) -> bool {
        let told =
            |state: &State| others(state, own).all(|m| !m.joined || m.told || m.left || m.lost);
        self.shared.table.wait(timeout, |state| told(state).then_some(())).is_some()
    }
}

fn others(state: &State, own: usize) -> impl Iterator<Item = crate::table::Member> {
    state.members.iter().enumerate().filter(move |(rank, _)| *rank != own).map(|(_, m)| *m)
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.table.change(|state| state.closed = true);
        // `accept` has no timeout: a connection of our own wakes it.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        let woken = TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok();
        for stream in self.shared.connections().values() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if let (true, Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<u64, TcpStream>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
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
             MASTER_ADDR must name the host that rank 0 runs on"
        ),
        _ => format!("rank 0 cannot host the store on {address}: {error}"),
    })
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // Small stacks: a job of many ranks has many of these threads.
    std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(work)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let stream = listener.accept();
        if shared.table.read().closed {
            return;
        }
        let Ok((stream, _)) = stream else {
            // Out of file descriptors, or a connection that died in the queue.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let id = shared.next_connection.fetch_add(1, Ordering::Relaxed);
        let Ok(copy) = stream.try_clone() else { continue };
        shared.connections().insert(id, copy);
        let for_thread = shared.clone();
        let spawned = spawn("store-connection", move || {
            serve(&stream, &for_thread);
            // Also ends the copy's half, so that the client sees the end at once.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            for_thread.connections().remove(&id);
        });
        if spawned.is_err() {
            shared.connections().remove(&id);
        }
    }
}

fn serve(stream: &TcpStream, shared: &Arc<Shared>) {
    let ready = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(Some(HEARTBEAT)))
        .and_then(|()| stream.set_write_timeout(Some(ANSWER)));
    if ready.is_err() {
        return;
    }
    let deadline = Instant::now() + ANSWER;
    let (reader, greeting) = Reader::greeted(stream, deadline);
    let Incoming::Message(greeting) = greeting else { return };
    let admitted = greeting.and_then(|greeting| admit(greeting, shared));
    let reply = match &admitted {
        Ok(_) => Reply::Done,
        Err(why) => Reply::Refused(why.clone()),
    };
    let answered = send(stream, &reply).is_ok();
    match admitted {
        Ok((identity, Purpose::Requests)) if answered => requests(reader, shared, identity.rank),
        Ok((identity, Purpose::Health)) => {
            if answered {
                health(reader, shared, identity.rank);
            }
            rank_lost(shared, identity.rank);
        }
        _ => {}
    }
}

/// Whether the client is a rank of this job. A health connection makes it a member.
fn admit(greeting: Greeting, shared: &Shared) -> Result<(Identity, Purpose), String> {
    let Greeting { identity, purpose } = greeting;
    if identity.job_id != shared.job_id {
        return Err(format!(
            "it belongs to job `{}`, this process to job `{}`: two jobs share one address and \
             port; give one of them another MASTER_PORT",
            shared.job_id, identity.job_id
        ));
    }
    if identity.world_size != shared.world_size {
        return Err(format!(
            "it serves {} ranks, this process expects {}: all ranks must be started with the same \
             WORLD_SIZE",
            shared.world_size, identity.world_size
        ));
    }
    shared.table.change(|state| {
        let Some(member) = state.members.get_mut(identity.rank) else {
            return Err(format!(
                "rank {} is not below the world size {}",
                identity.rank, shared.world_size
            ));
        };
        if purpose == Purpose::Health {
            if member.joined {
                return Err(format!(
                    "another process is or was rank {}: every process of a job needs a RANK of \
                     its own",
                    identity.rank
                ));
            }
            member.joined = true;
        }
        Ok(())
    })?;
    Ok((identity, purpose))
}

fn requests(mut reader: Reader<&TcpStream>, shared: &Shared, rank: usize) {
    let table = &shared.table;
    loop {
        let request = match reader.next() {
            Incoming::Message(request) => request,
            Incoming::Idle => continue,
            Incoming::Closed | Incoming::Garbage => return,
        };
        let reply = match request {
            Request::Set { key, value } => {
                table.set(&key, &value);
                Reply::Done
            }
            Request::Get { key, timeout_ms } => {
                match table.get(&key, Duration::from_millis(timeout_ms)) {
                    Ok(value) => Reply::Value(value),
                    Err(refusal) => refusal.into(),
                }
            }
            Request::Add { key, amount } => match table.add(&key, amount) {
                Ok(number) => Reply::Number(number),
                Err(value) => Reply::Refused(value),
            },
            Request::Fail { message } => failed(table.fail(rank, &message)),
            Request::WaitForAll { timeout_ms } => {
                wait_for_all(table, Duration::from_millis(timeout_ms))
            }
            Request::Ping | Request::Left(_) | Request::Told => {
                Reply::Refused("that belongs on a health connection".into())
            }
        };
        if send(*reader.stream(), &reply).is_err() {
            return;
        }
    }
}

fn wait_for_all(table: &Table, timeout: Duration) -> Reply {
    let missing = |state: &State| -> Vec<usize> {
        let members = state.members.iter().enumerate();
        members.filter(|(_, member)| !member.joined).map(|(rank, _)| rank).collect()
    };
    // A failure comes first: a job that has one does not start, even if all its ranks have come.
    let outcome = table.wait(timeout, |state| match state.refusal() {
        Some(refusal) => Some(refusal.into()),
        None => missing(state).is_empty().then_some(Reply::Done),
    });
    outcome.unwrap_or_else(|| Reply::Missing(missing(&table.read())))
}

fn failed((rank, message): (usize, String)) -> Reply {
    Reply::Failed { rank, message }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Timeout => Self::Timeout,
            Refusal::Failed(failure) => failed(failure),
            Refusal::Closed => Self::Refused("the store is closing".into()),
        }
    }
}

/// Reads a rank's signs of life until they end.
fn health(mut reader: Reader<&TcpStream>, shared: &Arc<Shared>, rank: usize) {
    let stream = *reader.stream();
    let Ok(copy) = stream.try_clone() else { return };
    let for_thread = shared.clone();
    let Ok(notifier) = spawn("store-notify", move || send_notices(&copy, &for_thread, rank)) else {
        return;
    };
    let same_host = stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
    let mut silent = 0;
    while same_host || silent < SILENT_HEARTBEATS {
        let message = match reader.next() {
            Incoming::Message(message) => message,
            Incoming::Idle => {
                silent += 1;
                continue;
            }
            Incoming::Closed | Incoming::Garbage => break,
        };
        silent = 0;
        match message {
            Request::Ping => {}
            Request::Left(left) => update_member(shared, rank, |member| member.left = left),
            Request::Told => update_member(shared, rank, |member| member.told = true),
            _ => break,
        }
    }
    rank_lost(shared, rank);
    let _ = notifier.join();
}

fn update_member(shared: &Shared, rank: usize, change: impl FnOnce(&mut crate::table::Member)) {
    shared.table.change(|state| state.members.get_mut(rank).map(change));
}

/// The connection of `rank` has ended.
fn rank_lost(shared: &Shared, rank: usize) {
    shared.table.change(|state| {
        let closed = state.closed;
        let Some(member) = state.members.get_mut(rank) else { return };
        member.lost = true;
        // Once a failure is known, other ranks end because of it.
        let failed = !closed && !member.left && state.failures.is_empty();
        if failed && shared.on_lost == LostRank::Failed {
            state.failures.push((rank, WITHOUT_A_WORD.to_owned()));
        }
    });
}

/// Writes to a rank's health connection: the job's failure and the host's goodbye as soon as there is
/// one, and signs of life.
fn send_notices(stream: &TcpStream, shared: &Shared, rank: usize) {
    let (mut told_failure, mut told_left) = (false, false);
    loop {
        let news = shared.table.wait(HEARTBEAT, |state| {
            if state.closed || state.members.get(rank).is_none_or(|member| member.lost) {
                return Some(None);
            }
            if state.host_left != told_left {
                return Some(Some(Reply::HostLeft(state.host_left)));
            }
            let failure = state.failures.first().filter(|_| !told_failure)?;
            Some(Some(failed(failure.clone())))
        });
        let message = match news {
            Some(None) => return,
            Some(Some(message)) => message,
            None => Reply::Ping,
        };
        match message {
            Reply::HostLeft(left) => told_left = left,
            Reply::Failed { .. } => told_failure = true,
            _ => {}
        }
        if send(stream, &message).is_err() {
            return;
        }
    }
}
