//! This process's MPI: its start, its thread, and its end.
#![allow(unsafe_code)] // Asks for a call at the end of the process.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fulgurite_engine::collective::GroupContext;
use fulgurite_error::{Error, Result, advice};
use fulgurite_launch::{Patience, Store};
use fulgurite_transports::network::POLL_INTERVAL;
use serde::{Deserialize, Serialize};

use crate::launcher;
use crate::library::{Facts, Fault, Library, Tested};
use crate::meeting::Meeting;

/// Interval between calls of MPI by its thread: shortly after an exchange, and later.
const SOON: Duration = Duration::from_millis(1);
const SELDOM: Duration = Duration::from_millis(20);
/// Number of calls at the short interval.
const SOON_TIMES: u32 = 50;

/// MPI in this process, as a rank of a job.
pub(crate) struct MpiProcess {
    pub(crate) library: Library,
    /// MPI rank and host, by global rank.
    peers: Vec<(usize, String)>,
    pub(crate) last_tag: usize,
    rank: usize,
    piece_bytes: usize,
    store: Arc<dyn Store>,
    timeout: Duration,
    /// Exchanges under way.
    exchanges: AtomicUsize,
    /// Exchanges so far.
    begun: AtomicUsize,
    /// Whether an exchange has failed. Its messages may still be under way.
    failed: AtomicBool,
    phase: Mutex<Phase>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    InUse,
    /// The process is ending, and no new exchange may begin.
    Ending,
    /// MPI is finalised, or will never be.
    Ended,
}

/// A rank's description of itself for the others.
#[derive(Clone, Serialize, Deserialize)]
struct Card {
    rank: usize,
    size: usize,
    host: String,
    version: String,
    launcher: String,
    piece_bytes: usize,
}

/// This process's MPI once it was asked for, or the reason why it could not be started.
static PROCESS: Mutex<Option<Result<Arc<MpiProcess>, String>>> = Mutex::new(None);

impl MpiProcess {
    /// Returns this process's MPI, and starts it at the first call. Collective: every rank of the
    /// job calls it.
    ///
    /// # Errors
    /// If MPI cannot be started, or its processes are not the ranks of the job.
    pub(crate) fn of_job(context: &GroupContext, piece_bytes: usize) -> Result<Arc<Self>> {
        let mut process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        match &*process {
            None => {}
            Some(Err(why)) => {
                return Err(Error::Launch(format!("MPI could not be started before: {why}")));
            }
            Some(Ok(process)) => return process.again(context, piece_bytes),
        }
        let started = start(context, piece_bytes);
        *process = Some(match &started {
            Ok(process) => Ok(process.clone()),
            Err(error) => Err(error.to_string()),
        });
        started
    }

    /// Returns this process's MPI, if it was started.
    pub(crate) fn current() -> Option<Arc<Self>> {
        match &*PROCESS.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(process)) => Some(process.clone()),
            _ => None,
        }
    }

    fn again(self: &Arc<Self>, context: &GroupContext, piece_bytes: usize) -> Result<Arc<Self>> {
        let (rank, size) = (self.rank, self.peers.len());
        if (rank, size) != (context.rank, context.world_size) {
            return Err(Error::Launch(format!(
                "this process uses MPI as rank {rank} of {size}, and cannot be rank {} of {} too",
                context.rank, context.world_size
            )));
        }
        if piece_bytes != self.piece_bytes {
            return Err(Error::Config(format!(
                "trainer.process_group.piece_bytes is {piece_bytes}, but was {} when this process started \
                 MPI; it must stay the same",
                self.piece_bytes
            )));
        }
        Ok(self.clone())
    }

    /// Returns the MPI rank of a global rank.
    pub(crate) fn mpi_rank(&self, rank: usize) -> usize {
        self.peers[rank].0
    }

    /// Returns the number of ranks of the job.
    pub(crate) fn size(&self) -> usize {
        self.peers.len()
    }

    /// Returns the host of a global rank.
    pub(crate) fn host(&self, rank: usize) -> Option<String> {
        self.peers.get(rank).map(|(_, host)| host.clone())
    }

    pub(crate) fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// Lets an exchange use MPI until the result is dropped. Returns `None` at the end of the
    /// process.
    pub(crate) fn begin(&self) -> Option<Exchanging<'_>> {
        self.exchanges.fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::Relaxed);
        let exchanging = Exchanging(self);
        (self.phase() == Phase::InUse).then_some(exchanging)
    }

    /// Notes that an exchange has failed.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    fn phase(&self) -> Phase {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        // A panic cannot leave the phase half written.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        *self.lock() = phase;
        self.changed.notify_all();
    }

    /// Whether this rank knows of no failure or running exchange.
    fn is_clean(&self) -> bool {
        let failed = self.failed.load(Ordering::SeqCst);
        !failed && self.exchanges.load(Ordering::SeqCst) == 0 && self.store.failure().is_none()
    }

    /// Calls MPI at intervals, on its thread, until the process ends.
    fn attend(&self) {
        let (mut known, mut times) = (0, 0);
        let mut phase = self.lock();
        while *phase == Phase::InUse {
            let wait = if times < SOON_TIMES { SOON } else { SELDOM };
            phase =
                self.changed.wait_timeout(phase, wait).unwrap_or_else(PoisonError::into_inner).0;
            let begun = self.begun.load(Ordering::Relaxed);
            times = if begun == known { times.saturating_add(1) } else { 0 };
            known = begun;
            // A running exchange tests MPI often enough.
            if *phase == Phase::InUse && self.exchanges.load(Ordering::Relaxed) == 0 {
                // The next exchange reports the error too.
                let _ = self.library.progress();
            }
        }
    }

    /// Finalises MPI, on its thread at the end of the process, if all ranks reach their end.
    fn end(&self) {
        match self.agree_to_end() {
            Ok(true) => {
                if let Err(fault) = self.library.finalize() {
                    tracing::debug!("MPI_Finalize: {}", fault.text);
                }
            }
            Ok(false) => tracing::debug!("MPI is not finalised, for a rank has failed"),
            Err(fault) => tracing::debug!("MPI is not finalised: {}", fault.text),
        }
        self.set(Phase::Ended);
    }

    fn agree_to_end(&self) -> Result<bool, Fault> {
        let mut requests = [self.library.barrier()?];
        let mut tested = Tested::default();
        let mut patience = Patience::new(self.timeout);
        loop {
            // Other ranks may still be busy.
            let mut slice = Duration::ZERO;
            while slice < POLL_INTERVAL {
                if let Some(done) = self.library.test(&mut requests, &mut tested)?.next() {
                    return done.fault.map_or(Ok(true), Err);
                }
                std::thread::sleep(SOON);
                slice += SOON;
            }
            if patience.slice().is_none() || !self.is_clean() {
                return Ok(false);
            }
        }
    }
}

/// Marks an exchange that uses MPI.
pub(crate) struct Exchanging<'a>(&'a MpiProcess);

impl Drop for Exchanging<'_> {
    fn drop(&mut self) {
        self.0.exchanges.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts MPI on its own thread, once all ranks are about to start it.
fn start(context: &GroupContext, piece_bytes: usize) -> Result<Arc<MpiProcess>> {
    let GroupContext { rank, world_size, store, timeout, .. } = context;
    let store = &**store;
    let wanted = || match store.failure() {
        Some((rank, message)) => Err(Error::PeerFailed { rank, message }),
        None => store.give_up().map_or(Ok(()), Err),
    };
    let ranks: Vec<usize> = (0..*world_size).collect();
    let (own, timeout) = (*rank, *timeout);
    let meeting = |key, purpose| Meeting {
        store,
        key,
        purpose,
        members: &ranks,
        own,
        timeout,
        wanted: &wanted,
    };
    let launcher = launcher::current();
    meeting("mpi/start", "to start MPI").agree(&launcher.is_some(), check_launched)?;

    let (tell, told) = mpsc::channel();
    let attended: Arc<OnceLock<Arc<MpiProcess>>> = Arc::default();
    let (begin, begun) = mpsc::channel();
    let thread = {
        let attended = attended.clone();
        move || {
            let started = Library::start();
            let in_use = started.is_ok();
            // The caller may have given up.
            if tell.send(started).is_err() || !in_use || begun.recv().is_err() {
                return;
            }
            if let Some(process) = attended.get() {
                process.attend();
                process.end();
            }
        }
    };
    std::thread::Builder::new()
        .name("mpi".to_owned())
        .spawn(thread)
        .map_err(|e| Error::Launch(format!("starting a thread for MPI: {e}{}", advice(&e))))?;
    let (library, facts) = wait_for_start(&told, timeout, &wanted)?;
    let Facts { rank: mpi_rank, size, last_tag, version, host, of_program } = facts;
    tracing::debug!("{version}: process {mpi_rank} of {size} on {host}");
    let card = Card {
        rank: mpi_rank,
        size,
        host,
        version,
        launcher: launcher
            .map_or_else(String::new, |(variable, who)| format!("{variable} is set, as by {who}")),
        piece_bytes,
    };
    let cards = meeting("mpi/world", "after starting MPI").agree(&card, check_world)?;

    library.return_errors(!of_program).map_err(failed)?;
    let (duplicate, request) = library.duplicate().map_err(failed)?;
    if let Err(error) = finish(&library, request, timeout, &wanted) {
        // MPI may still write to it.
        std::mem::forget(duplicate);
        return Err(error);
    }
    let library = library.with(&duplicate);
    library.return_errors(false).map_err(failed)?;
    let process = Arc::new(MpiProcess {
        library,
        peers: cards.into_iter().map(|card| (card.rank, card.host)).collect(),
        last_tag,
        rank: own,
        piece_bytes,
        store: context.store.clone(),
        timeout,
        exchanges: AtomicUsize::new(0),
        begun: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        phase: Mutex::new(Phase::InUse),
        changed: Condvar::new(),
    });
    if attended.set(process.clone()).is_ok() && begin.send(()).is_ok() && !of_program {
        end_with_process();
    }
    Ok(process)
}

/// Checks on rank 0, before MPI starts, that a launcher started every rank.
fn check_launched(launched: Vec<bool>) -> Result<(), String> {
    let without: Vec<usize> = (0..launched.len()).filter(|&rank| !launched[rank]).collect();
    let Some(first) = without.first() else { return Ok(()) };
    Err(format!(
        "process group `mpi`: {} of {} ranks (the first is rank {first}) were not started by a launcher of \
         MPI, as no variable of one is set (OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK). Start the program \
         with `mpirun -n {} PROGRAM`, or in SLURM with `srun --mpi=pmix` (`srun --mpi=list` says which \
         there are); or use trainer.process_group.type = \"shm\" on one host, \"tcp\" on several",
        without.len(),
        launched.len(),
        launched.len(),
    ))
}

/// Checks on rank 0, after MPI has started, that its processes are the job's ranks.
fn check_world(cards: Vec<Card>) -> Result<Vec<Card>, String> {
    let ranks = cards.len();
    for (rank, card) in cards.iter().enumerate() {
        let Card { size, version, launcher, .. } = card;
        if *size != ranks {
            let own = if *size == 1 {
                "it was started by the launcher of another MPI family, or by none"
            } else {
                "the launcher started another number of processes"
            };
            return Err(format!(
                "process group `mpi`: the job has {ranks} ranks, but for MPI ({version}) rank {rank} is \
                 one of {size}: {own} ({launcher}). Start the program with the `mpirun` that belongs to \
                 the MPI library it was built with, or with the `srun --mpi=…` that this library needs"
            ));
        }
        if let Some(other) = cards[..rank].iter().position(|other| other.rank == card.rank) {
            return Err(format!(
                "process group `mpi`: rank {other} and rank {rank} are both process {} of MPI: they \
                 belong to different launches",
                card.rank
            ));
        }
        if *version != cards[0].version {
            return Err(format!(
                "process group `mpi`: rank 0 on {} has {}, rank {rank} on {} has {version}; all must \
                 have the same MPI library",
                cards[0].host, cards[0].version, card.host
            ));
        }
        if card.piece_bytes != cards[0].piece_bytes {
            return Err(format!(
                "process group `mpi`: piece_bytes is {} on rank 0 and {} on rank {rank}; it must be the \
                 same on all",
                cards[0].piece_bytes, card.piece_bytes
            ));
        }
    }
    Ok(cards)
}

fn wait_for_start(
    told: &mpsc::Receiver<Result<(Library, Facts), String>>,
    timeout: Duration,
    wanted: &dyn Fn() -> Result<()>,
) -> Result<(Library, Facts)> {
    let mut patience = Patience::new(timeout);
    while let Some(slice) = patience.slice() {
        match told.recv_timeout(slice.min(POLL_INTERVAL)) {
            Ok(started) => {
                return started.map_err(|why| Error::Launch(format!("starting MPI: {why}")));
            }
            Err(RecvTimeoutError::Timeout) => wanted()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Launch("starting MPI: its thread has ended".to_owned()));
            }
        }
    }
    Err(Error::Launch(format!(
        "MPI_Init_thread has not returned for {} s: a process that `mpirun` has started may not have called \
         it, or the hosts do not reach each other",
        timeout.as_secs_f64()
    )))
}

/// Waits until a request is done.
fn finish(
    library: &Library,
    request: crate::library::Request,
    timeout: Duration,
    wanted: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let (mut requests, mut tested) = ([request], Tested::default());
    let mut patience = Patience::new(timeout);
    let mut asked = Instant::now();
    loop {
        if let Some(done) = library.test(&mut requests, &mut tested).map_err(failed)?.next() {
            return done.fault.map_or(Ok(()), |fault| Err(failed(fault)));
        }
        std::thread::sleep(Duration::from_micros(100));
        if asked.elapsed() < POLL_INTERVAL {
            continue;
        }
        asked = Instant::now();
        wanted()?;
        if patience.slice().is_none() {
            return Err(Error::Launch(format!(
                "the ranks do not reach each other by MPI: making a communicator took more than {} s",
                timeout.as_secs_f64()
            )));
        }
    }
}

fn failed(fault: Fault) -> Error {
    Error::Launch(format!("starting MPI: {}", fault.text))
}

// glibc passes the exit status to the function.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn end_with_process() {
    extern "C" fn at_exit(status: c_int, _: *mut std::ffi::c_void) {
        end_process(status == 0);
    }
    unsafe extern "C" {
        fn on_exit(
            function: extern "C" fn(c_int, *mut std::ffi::c_void),
            argument: *mut std::ffi::c_void,
        ) -> c_int;
    }
    // SAFETY: the function lives as long as the program, and does not unwind.
    unsafe { on_exit(at_exit, std::ptr::null_mut()) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn end_with_process() {
    extern "C" fn at_exit() {
        end_process(true);
    }
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: the function lives as long as the program, and does not unwind.
    unsafe { atexit(at_exit) };
}

/// Called when the process exits by itself. `well` means with status 0, as far as known.
fn end_process(well: bool) {
    // If the lock is held, MPI is being started.
    let Ok(guard) = PROCESS.try_lock() else { return };
    let Some(Ok(process)) = &*guard else { return };
    if !well || !process.is_clean() || process.phase() != Phase::InUse {
        return;
    }
    process.set(Phase::Ending);
    // In the barrier the thread gives up after the timeout. The rest is for MPI_Finalize.
    let limit = process.timeout.saturating_mul(2);
    let waiting = |phase: &mut Phase| *phase != Phase::Ended;
    let phase = process.lock();
    drop(process.changed.wait_timeout_while(phase, limit, waiting));
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn card(rank: usize, size: usize) -> Card {
        Card {
            rank,
            size,
            host: format!("node{rank}"),
            version: "Open MPI v4.1.4".to_owned(),
            launcher: "PMI_RANK is set, as by a PMI launcher".to_owned(),
            piece_bytes: 1000,
        }
    }

    fn refused(cards: Vec<Card>) -> String {
        check_world(cards).err().unwrap()
    }

    #[test]
    fn world_ranks_may_be_in_any_order() {
        assert!(check_world(vec![card(1, 3), card(2, 3), card(0, 3)]).is_ok());
    }

    #[test]
    fn mismatched_world_is_refused() {
        assert_says!(
            refused(vec![card(0, 1), card(0, 1)]),
            "process group `mpi`: the job has 2 ranks … rank 0 is one of 1 … another MPI family … `mpirun` …"
        );
        assert_says!(
            refused(vec![card(0, 4), card(1, 4)]),
            "process group `mpi`: the job has 2 ranks … rank 0 is one of 4 … another number of processes …"
        );
        assert_says!(refused(vec![card(0, 2), card(0, 2)]), "process group `mpi` … both process …");
        let other = Card { version: "MPICH Version: 4.0.2".to_owned(), ..card(1, 2) };
        assert_says!(refused(vec![card(0, 2), other]), "process group `mpi` … same MPI library");
        let other = Card { piece_bytes: 2000, ..card(1, 2) };
        assert_says!(refused(vec![card(0, 2), other]), "process group `mpi`: piece_bytes … same …");
        assert_says!(
            check_launched(vec![true, false, false]).unwrap_err(),
            "process group `mpi`: 2 of 3 ranks … not started … `mpirun -n 3 PROGRAM` …"
        );
    }
}
