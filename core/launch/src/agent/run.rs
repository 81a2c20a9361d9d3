//! [`run`]: the life of an agent.

use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::board::{Board, Seen, keys, read, write};
use super::coordinator::Coordinator;
use super::endpoint::Meeting;
use super::logs;
use super::options::AgentOptions;
use super::plan::{Attempt, End, Member};
use super::ranks::Ranks;
use crate::orphans::Orphans;
use crate::signals::{self, SecondSignal};
use crate::{Error, Result};
use fulgurite_error::{advice, counted, print_message};
use fulgurite_store::{Patience, Store};

/// Interval between checks on ranks, signals and other agents.
const POLL: Duration = Duration::from_millis(20);
/// How long the hosting agent waits until the others know about the end of the job.
const FAREWELL: Duration = Duration::from_secs(5);

/// Runs one node's part of a job. Returns its exit code once the job is over: 0, the failed rank's
/// exit code, or 128 + the signal by which the job was asked to end. Prints the reason.
///
/// # Errors
/// - [`Error::Launch`] if the options contradict each other or another agent's options, if the
///   agents do not meet in time, or if a rank cannot be started.
/// - [`Error::Interrupted`] if this process is asked to end while agents meet.
pub fn run(options: &AgentOptions) -> Result<i32> {
    check(options)?;
    signals::handle(SecondSignal::Ignore)?;
    let meeting = Meeting::join(options)?;
    let agent = meeting.store.add(keys::AGENTS, 1)?.unsigned_abs() - 1;
    let member = Member {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        devices: options.devices,
        node_rank: options.node_rank,
        nodes: (options.nodes.least, options.nodes.most),
        max_restarts: options.max_restarts,
    };
    write(&*meeting.store, &keys::member(agent), &member)?;
    let coordinator_failed = Arc::new(OnceLock::new());
    if meeting.hosts {
        let mut coordinator = Coordinator::new(meeting.store.clone(), options.clone());
        let failed = coordinator_failed.clone();
        let run = move || drop(coordinator.run().map_err(|error| failed.set(error.to_string())));
        std::thread::Builder::new()
            .name("coordinator".to_owned())
            .spawn(run)
            .map_err(|e| Error::Launch(format!("starting a thread: {e}{}", advice(&e))))?;
    }
    let board = Board::new(Arc::clone(&meeting.store), agent)?;
    let (coordinator_failed, orphans) = (&*coordinator_failed, Orphans::adopt());
    let this =
        Agent { options, meeting: &meeting, board: &board, agent, coordinator_failed, orphans };
    let code = this.run()?;
    match meeting.hosts {
        false => board.say_bye(agent, FAREWELL),
        true => wait_for_byes(&*meeting.store, agent),
    }
    Ok(code)
}

/// On the agent that hosts the store: waits until all other agents, including waiting ones, know
/// about the end of the job.
fn wait_for_byes(store: &dyn Store, own: u64) {
    let come = store.add(keys::AGENTS, 0).unwrap_or_default().unsigned_abs();
    let mut patience = Patience::new(FAREWELL);
    let said = |agent: u64| agent == own || read::<bool>(store, &keys::bye(agent)).is_some();
    while !(0..come).all(said) && patience.slice().is_some() {
        std::thread::sleep(POLL);
    }
}

fn check(options: &AgentOptions) -> Result<()> {
    if options.devices == 0 {
        return Err(Error::Launch("--nproc-per-node must be 1 or more".to_owned()));
    }
    if let Some(id) = &options.id
        && (id.is_empty() || id.len() > 128 || !id.chars().all(is_plain) || id.starts_with('.'))
    {
        return Err(Error::Launch(format!(
            "--rdzv-id is `{id}`; it names a folder of logs, so it should be of 1 to 128 letters, digits, and the \
             signs - _ . : (no . in front)"
        )));
    }
    match options.node_rank {
        Some(rank) if rank >= options.nodes.most => Err(Error::Launch(format!(
            "--node-rank is {rank}; of {} the ranks are 0 to {}",
            counted(options.nodes.most, "node"),
            options.nodes.most - 1
        ))),
        _ => Ok(()),
    }
}

/// Whether an id may contain the character.
fn is_plain(character: char) -> bool {
    character.is_alphanumeric() || "-_.:".contains(character)
}

struct Agent<'a> {
    options: &'a AgentOptions,
    meeting: &'a Meeting,
    board: &'a Board,
    agent: u64,
    /// The reason why the coordinator on this agent cannot continue.
    coordinator_failed: &'a OnceLock<String>,
    orphans: Orphans,
}

impl Agent<'_> {
    fn run(&self) -> Result<i32> {
        let (mut before, mut told_to_wait, mut printed) = (0, false, None);
        loop {
            let seen = self.board.seen();
            if let Some(over) = seen.over {
                if let Some(message) = over.message
                    && printed.as_ref() != Some(&message)
                {
                    print_message(&format!("error: the job has failed: {message}"));
                }
                return Ok(over.code);
            }
            if let Some(why) = seen.refused {
                return Err(Error::Launch(why));
            }
            self.check_contact(&seen)?;
            if let Some(signal) = signals::take() {
                print_message("interrupted");
                return Ok(128 + signal);
            }
            match seen.attempt {
                Some(attempt) if attempt.number > before => {
                    before = attempt.number;
                    match attempt.place(self.agent) {
                        Some(place) => {
                            let end = self.attempt(&attempt, place, &mut printed)?;
                            self.board.tell_end(attempt.number, self.agent, end);
                        }
                        None if told_to_wait => {}
                        None => {
                            told_to_wait = true;
                            print_message(
                                "the job runs on other nodes; this one is taken in when it starts again",
                            );
                        }
                    }
                }
                _ => std::thread::sleep(POLL),
            }
        }
    }

    /// Checks that the store answers and the coordinator works.
    ///
    /// # Errors
    /// If the store has not answered for too long, or the coordinator has failed.
    fn check_contact(&self, seen: &Seen) -> Result<()> {
        if let Some(why) = self.coordinator_failed.get() {
            return Err(Error::Launch(format!("the job cannot be coordinated any more: {why}")));
        }
        let silent = seen.heard.elapsed();
        match (&self.options.endpoint, silent > self.options.keep_alive) {
            (Some(endpoint), true) => Err(Error::Launch(format!(
                "the rendezvous at {endpoint} has not answered for {:?}: its host is down, or cut off, or \
                 its agent was killed",
                self.options.keep_alive
            ))),
            _ => Ok(()),
        }
    }

    /// Runs this node's ranks of an attempt.
    ///
    /// # Errors
    /// If the other agents are unreachable; the ranks are ended.
    fn attempt(
        &self,
        attempt: &Attempt,
        place: usize,
        printed: &mut Option<String>,
    ) -> Result<End> {
        let address = match self.address(attempt, place)? {
            Ok(address) => address,
            Err(end) => return Ok(end),
        };
        if let (Some(dir), false) = (&self.options.log_dir, self.options.tee) {
            let dir = logs::directory(dir, attempt);
            print_message(&format!("the output of the ranks is in {}/", dir.display()));
        }
        let secret = &self.meeting.secret;
        let started = Ranks::start(self.options, attempt, place, &address, secret, &self.orphans);
        let mut ranks = match started {
            Ok(ranks) => ranks,
            Err(error) => {
                let host = &attempt.nodes[place].host;
                let message = format!("node {place} ({host}): {error}");
                print_message(&format!("error: {message}"));
                *printed = Some(message.clone());
                return Ok(End::Failed { message, code: 1 });
            }
        };
        let mut told = None;
        loop {
            if let Some(end) = ranks.poll() {
                if let End::Failed { message, .. } = &end {
                    *printed = Some(message.clone());
                }
                return Ok(end);
            }
            if let (Some(failed), None) = (ranks.failed(), &told) {
                told = Some(failed.clone());
                self.board.tell_failing(attempt.number, self.agent, failed.clone());
            }
            match handle_signals(&mut ranks) {
                Some(Asked::Once(signal)) => self.board.tell_interrupt(attempt.number, signal),
                Some(Asked::Again) => self.board.tell_kill(attempt.number),
                None => {}
            }
            let seen = self.board.seen();
            let current = seen.attempt.as_ref().is_some_and(|now| now.number == attempt.number);
            if let (Some(signal), true) = (seen.interrupt, current) {
                ranks.interrupt(signal);
            }
            if seen.kill && current {
                ranks.end_at_once();
            }
            if seen.over.is_some() || !current || seen.stop.is_some() {
                if let (Some(message), true) = (&seen.stop, current)
                    && !ranks.is_ending()
                {
                    print_message(&format!("error: {message}"));
                    *printed = Some(message.clone());
                }
                ranks.stop();
            }
            if let Err(error) = self.check_contact(&seen) {
                ranks.kill();
                return Err(error);
            }
            std::thread::sleep(POLL);
        }
    }

    /// The address at which the ranks of an attempt meet: the first agent publishes it, the others
    /// wait for it. Returns the attempt's end if it is over before.
    fn address(
        &self,
        attempt: &Attempt,
        place: usize,
    ) -> Result<std::result::Result<(String, u16), End>> {
        if place == 0 {
            let ip: IpAddr = self.meeting.address.parse().map_err(Error::other)?;
            let listener = TcpListener::bind((ip, 0)).and_then(|listener| listener.local_addr());
            let address = listener.map_err(|e| {
                Error::Launch(format!("there is no free port at {ip}: {e}{}", advice(&e)))
            })?;
            let address = (self.meeting.address.clone(), address.port());
            self.board.tell_address(attempt.number, address.clone());
            return Ok(Ok(address));
        }
        let began = Instant::now();
        loop {
            let seen = self.board.seen();
            let current = seen.attempt.as_ref().is_some_and(|now| now.number == attempt.number);
            if let Some(signal) = signals::take() {
                self.board.tell_interrupt(attempt.number, signal);
                return Ok(Err(End::Interrupted(signal)));
            }
            match seen.address {
                Some(address) if current => return Ok(Ok(address)),
                _ if seen.over.is_some() || seen.stop.is_some() || !current => {
                    return Ok(Err(End::Stopped));
                }
                _ if began.elapsed() > self.options.join_timeout => return Ok(Err(End::Stopped)),
                _ => self.check_contact(&seen)?,
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Requests made by signals.
enum Asked {
    /// End the job, because of this signal.
    Once(i32),
    /// End the job at once.
    Again,
}

/// Forwards this agent's signals to the ranks.
fn handle_signals(ranks: &mut Ranks) -> Option<Asked> {
    let signal = signals::take()?;
    let before = ranks.interrupted();
    if before.is_some() && signals::is_advance_notice(signal) {
        return None;
    }
    if before.is_some_and(|before| !signals::is_advance_notice(before)) {
        ranks.end_at_once();
        return Some(Asked::Again);
    }
    print_message("interrupted: the ranks finish their step; interrupt again to end them at once");
    ranks.interrupt(signal);
    Some(Asked::Once(signal))
}
