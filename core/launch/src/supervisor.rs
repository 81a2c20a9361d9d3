//! The parent of the ranks of one host: starts them, waits for them, and sees to it that they end
//! together.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::failure::{PEER_FAILED_EXIT_CODE, say};
use super::handover::Handover;
use super::launcher::threads_a_rank;
use super::rank::Place;
use super::signals::{self, Second};
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_store::{LostRank, StoreServer};

/// The number of threads of rayon, and of candle with it.
pub(super) const THREADS: &str = "RAYON_NUM_THREADS";
/// How often the ranks are looked after.
const LOOK: Duration = Duration::from_millis(15);
/// How long ranks have to stop by themselves once one has failed.
const GRACE: Duration = Duration::from_secs(2);
/// How long they have after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// Runs this program again as `devices` ranks and ends the process as they end.
///
/// # Errors
/// Returns only if the ranks cannot be started; then none is left.
pub(super) fn supervise(devices: usize, started: f64, variables: &Variables) -> Result<Infallible> {
    signals::handle(Second::IsIgnored)?;
    let job_id = format!("{}-{started:.6}", std::process::id());
    let address = (Ipv4Addr::LOCALHOST, 0).into();
    let server = StoreServer::bind(address, &job_id, devices, LostRank::ParentTells)?;
    let mut ranks =
        Ranks { ranks: Vec::new(), server, failed: None, interrupted: None, killed: false };
    for rank in 0..devices {
        let place = Place {
            rank,
            world_size: devices,
            local_rank: rank,
            local_world_size: devices,
            node_rank: 0,
        };
        let handover = Handover {
            supervisor: std::process::id().cast_signed(),
            job_id: job_id.clone(),
            started,
            place,
            port: ranks.server.address().port(),
        };
        match start(&handover, variables) {
            Ok(process) => ranks.ranks.push(Rank { process, end: None, sentence: None }),
            Err(error) => {
                ranks.signal_all(Signal::KILL);
                ranks.ranks.iter_mut().for_each(|rank| drop(rank.process.wait()));
                return Err(error);
            }
        }
    }
    let code = ranks.run();
    drop(ranks);
    std::process::exit(code)
}

fn start(handover: &Handover, variables: &Variables) -> Result<Child> {
    let Place { rank, world_size, .. } = handover.place;
    let fail = |what: &str, e: std::io::Error| {
        Error::Launch(format!("cannot start rank {rank} of {world_size}: {what}: {e}"))
    };
    let program = std::env::current_exe().map_err(|e| fail("finding this program's file", e))?;
    let mut command = Command::new(&program);
    command.args(std::env::args_os().skip(1));
    handover.set(&mut command);
    if !variables.is_set(THREADS) {
        command.env(THREADS, threads_a_rank(world_size).to_string());
    }
    // One reader at most.
    if rank > 0 {
        command.stdin(Stdio::null());
    }
    command.spawn().map_err(|e| fail(&format!("running {}", program.display()), e))
}

struct Ranks {
    ranks: Vec<Rank>,
    server: StoreServer,
    /// The job's failure, since it was printed.
    failed: Option<Failed>,
    /// The first signal that asked for an end.
    interrupted: Option<i32>,
    /// A second one came.
    killed: bool,
}

struct Rank {
    process: Child,
    end: Option<ExitStatus>,
    /// What this process saw of the rank's end, if it was a bad one: `was killed by signal 9`.
    sentence: Option<String>,
}

struct Failed {
    rank: usize,
    since: Instant,
    /// How often the others were told to go.
    told: u8,
}

impl Ranks {
    /// Waits until all ranks have ended; the exit code.
    fn run(&mut self) -> i32 {
        loop {
            self.heed_signals();
            for rank in 0..self.ranks.len() {
                self.look_after(rank);
            }
            self.announce();
            if self.ranks.iter().all(|rank| rank.end.is_some()) {
                break;
            }
            self.press();
            std::thread::sleep(LOOK);
        }
        self.announce_others();
        self.exit_code()
    }

    fn heed_signals(&mut self) {
        let Some(signal) = signals::take() else { return };
        let before = self.interrupted;
        if before.is_some() && signals::is_notice(signal) {
            return;
        }
        if before.is_some_and(|before| !signals::is_notice(before)) {
            self.killed = true;
            self.signal_all(Signal::KILL);
            return;
        }
        self.interrupted = Some(signal);
        say("interrupted: the ranks finish their step; interrupt again to end them at once");
        // A terminal signals all processes, `kill` just this one. Ranks don't mind twice.
        self.signal_all(signals::to_pass_on(signal));
    }

    /// Notes the end of a rank, and tells the others if it was a bad one.
    fn look_after(&mut self, rank: usize) {
        let failure_known = !self.server.failures().is_empty();
        let joined = self.server.has_joined(rank);
        let this = &mut self.ranks[rank];
        if this.end.is_some() {
            return;
        }
        let end = match this.process.try_wait() {
            Ok(None) => return,
            Ok(Some(end)) => end,
            // Somebody else took its exit status (SIGCHLD ignored); it has ended for sure.
            Err(_) => ExitStatus::from_raw(1 << 8),
        };
        this.end = Some(end);
        if self.killed {
            return;
        }
        let asked_to_end = self.interrupted.is_some();
        let sentence = match (end.code(), end.signal()) {
            // The other ranks are waiting for it.
            (Some(0), _) if !joined => "ended before it had launched".to_owned(),
            (Some(0), _) => return,
            (Some(code), _) if is_interruption(code) => return,
            (Some(code), _) if code == i32::from(PEER_FAILED_EXIT_CODE) && failure_known => return,
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) if asked_to_end && signals::asks_to_end(signal) => return,
            (None, Some(signal)) => format!("was killed by {}", signals::describe(signal)),
            (None, None) => format!("ended: {end}"),
        };
        // What the rank itself reported says more, and stays. After a first failure, the end of
        // others is its consequence.
        if !failure_known {
            self.server.fail(rank, &format!("it {sentence}"));
            this.sentence = Some(sentence);
        }
    }

    /// Prints the job's first failure, once.
    fn announce(&mut self) {
        if self.failed.is_some() {
            return;
        }
        let Some((rank, message)) = self.server.failures().into_iter().next() else { return };
        match self.ranks.get(rank).and_then(|rank| rank.sentence.as_ref()) {
            Some(sentence) => say(&format!("error: rank {rank} {sentence}")),
            None => say(&format!("error: rank {rank} failed: {message}")),
        }
        self.failed = Some(Failed { rank, since: Instant::now(), told: 0 });
    }

    /// Prints what other ranks reported besides, unless it is the same.
    fn announce_others(&self) {
        let mut said = Vec::new();
        for (rank, message) in self.server.failures() {
            if !said.is_empty() && !said.contains(&message) {
                say(&format!("error: rank {rank} failed too: {message}"));
            }
            said.push(message);
        }
    }

    /// Ends ranks that do not end by themselves after a failure.
    fn press(&mut self) {
        let Some(failed) = &mut self.failed else { return };
        let (elapsed, told) = (failed.since.elapsed(), failed.told);
        if told == 0 && elapsed >= GRACE {
            failed.told = 1;
            self.signal_all(Signal::TERM);
        } else if told == 1 && elapsed >= GRACE + TERM_GRACE {
            failed.told = 2;
            self.signal_all(Signal::KILL);
        }
    }

    /// Signals the ranks that have not ended. Their process ids are still theirs: nobody else
    /// waits for them.
    fn signal_all(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.end.is_none()) {
            let _ = kill_process(Pid::from_child(&rank.process), signal);
        }
    }

    fn exit_code(&self) -> i32 {
        if let Some(signal) = self.interrupted {
            return 128 + signal;
        }
        let code = |end: ExitStatus| end.code().or(end.signal().map(|signal| 128 + signal));
        let codes = || self.ranks.iter().map(|rank| rank.end.and_then(code).unwrap_or(1));
        match &self.failed {
            // A rank that reported a failure and then ended well, or only when pressed.
            Some(Failed { rank, told, .. }) => match codes().nth(*rank) {
                Some(code) if code != 0 && *told == 0 => code,
                _ => 1,
            },
            // Each rank was interrupted for itself.
            None => codes().find(|code| *code != 0).unwrap_or(0),
        }
    }
}

/// Whether a rank's exit code says that it was asked to end.
fn is_interruption(code: i32) -> bool {
    signals::asks_to_end(code - 128)
}
