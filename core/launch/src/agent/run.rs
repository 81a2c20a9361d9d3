//! [`run`]: the life of an agent.

use std::net::{IpAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGTERM;

use super::board::{Board, keys, read};
use super::coordinator::coordinate;
use super::endpoint::Meeting;
use super::logs;
use super::options::{AgentOptions, Endpoint, listed};
use super::plan::{Attempt, End, Generation, Losses, Member};
use super::ranks::{Ranks, Start};
use super::seats::{self, TermStore};
use crate::job_memory::JobMemory;
use crate::orphans::Orphans;
use crate::signals::{self, SecondSignal};
use crate::{Error, Result};
use fulgurite_error::{advice, counted, print_message};
use fulgurite_store::{Patience, Store};

/// Interval between checks on ranks, signals and other agents.
const POLL: Duration = Duration::from_millis(20);
const LEAVES: &str = "asked to leave: the job goes on without this node if it can; a second SIGTERM ends it on all nodes";
const INTERRUPTED: &str =
    "interrupted: the ranks finish their step; interrupt again to end them at once";
/// How long the hosting agent waits until the others know about the end of the job.
const FAREWELL: Duration = Duration::from_secs(5);

/// Runs one node's part of a job. Returns its exit code once the job is over: 0, the failed rank's
/// exit code, or 128 + the signal by which the job was asked to end. Prints the reason.
///
/// # Errors
/// - [`Error::Launch`] if the options contradict each other or another agent's options, if the
///   agents do not meet in time, or if a rank cannot be started.
pub fn run(options: &AgentOptions) -> Result<i32> {
    check(options)?;
    raise_file_limit();
    signals::handle(SecondSignal::Ignore)?;
    let agent = seats::random()?;
    let meeting = Meeting::join(options, agent)?;
    if options.devices == 0 && !meeting.seats.has_own() {
        return Err(Error::Launch(
            "an agent with --nproc-per-node 0 coordinates the job, so it must host the rendezvous; start it on \
             a host that --rdzv-endpoint names, before the others"
                .to_owned(),
        ));
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let coordinator_failed = Arc::new(OnceLock::new());
    if meeting.seats.has_own() {
        let (seats, options, own) = (meeting.seats.clone(), options.clone(), (agent, host.clone()));
        let (address, secret) = (meeting.address.clone(), meeting.secret.clone());
        let connected = meeting.connected.clone();
        let failed = coordinator_failed.clone();
        let run = move || {
            let coordinate = || coordinate(seats, connected, (&address, &secret), options, own);
            let why = match catch_unwind(AssertUnwindSafe(coordinate)) {
                Ok(end) => end.err().map(|error| error.to_string()),
                Err(_) => Some("its thread panicked".to_owned()),
            };
            drop(why.map(|why| failed.set(why)));
        };
        std::thread::Builder::new()
            .name("coordinator".to_owned())
            .spawn(run)
            .map_err(|e| Error::Launch(format!("starting a thread: {e}{}", advice(&e))))?;
    }
    if options.devices == 0 {
        print_message(match options.endpoints.len() {
            1 => "this agent coordinates the job, and starts no ranks",
            _ => "this agent is one of those that may coordinate the job, and starts no ranks",
        });
    }
    match meeting.wait_for_coordinator(options) {
        Err(Error::Interrupted) => {
            return signals::take().map(say_interrupted).ok_or(Error::Interrupted);
        }
        met => met?,
    }
    let member = Member {
        host,
        devices: options.devices,
        node_rank: options.node_rank,
        nodes: (options.nodes.least, options.nodes.most),
        max_restarts: options.max_restarts,
    };
    let board = Board::new(meeting.seats.clone(), agent, member)?;
    let (coordinator_failed, orphans) = (&*coordinator_failed, Orphans::adopt());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let started = now.map_or(0.0, |since| since.as_secs_f64());
    let _memory = (options.devices > 0).then(|| JobMemory::new(started));
    let (meeting, board, said) = (&meeting, &board, Arc::default());
    let this = Agent { options, meeting, board, agent, coordinator_failed, orphans, started, said };
    let code = this.run()?;
    match meeting.seats.own_term().and_then(|term| meeting.seats.store_of(term)) {
        None => board.say_bye(FAREWELL),
        Some(store) if board.seen().over.is_some() => wait_for_byes(&store, agent),
        Some(_) => {}
    }
    meeting.seats.end();
    Ok(code)
}

/// Says that this agent was asked to end before it had ranks, and returns its exit code.
fn say_interrupted(signal: i32) -> i32 {
    print_message("interrupted");
    128 + signal
}

/// On the coordinator's agent: waits until all other agents, including waiting ones, know about the
/// end of the job.
fn wait_for_byes(store: &TermStore, own: u64) {
    let come = store.add(keys::AGENTS, 0).unwrap_or_default().unsigned_abs();
    let mut patience = Patience::new(FAREWELL);
    let said = |number: u64| {
        let comer = read::<(u64, Member)>(store, &keys::comer(number));
        let agent = comer.map_or(own, |(agent, _)| agent);
        agent == own || read::<bool>(store, &keys::bye(agent)).is_some()
    };
    while !(0..come).all(said) && patience.slice().is_some() {
        std::thread::sleep(POLL);
    }
}

/// Raises the limit of open files: the coordinator has several connections of each rank of a large
/// elastic job.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Without it, a failure to open more says which limit to raise.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn check(options: &AgentOptions) -> Result<()> {
    if options.endpoints.len().is_multiple_of(2) && !options.endpoints.is_empty() {
        return Err(Error::Launch(format!(
            "--rdzv-endpoint names {} hosts; it should be one, or an odd number of them such as 3: the job goes on \
             while more than half of them are there, and of 2 the loss of either would end it",
            options.endpoints.len()
        )));
    }
    let repeats = |(at, endpoint): (usize, &Endpoint)| options.endpoints[..at].contains(endpoint);
    if let Some((_, twice)) = options.endpoints.iter().enumerate().find(|it| repeats(*it)) {
        return Err(Error::Launch(format!("--rdzv-endpoint names {twice} twice")));
    }
    if options.devices == 0 && options.endpoints.is_empty() {
        return Err(Error::Launch(
            "--nproc-per-node must be 1 or more, or 0 on a host that only coordinates the job: the one that \
             --rdzv-endpoint names"
                .to_owned(),
        ));
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
    /// When this agent started, in seconds since 1970.
    started: f64,
    /// Whether a failure to write the ranks' output was reported.
    said: Arc<AtomicBool>,
}

impl Agent<'_> {
    fn run(&self) -> Result<i32> {
        let (mut before, mut told_to_wait, mut printed) = (0, self.coordinates_only(), None);
        let mut interrupted = None::<(u64, i32)>;
        let mut had_ranks = false;
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
            self.check_contact()?;
            if let Some(signal) = signals::take() {
                let coordinates = self.coordinates_only() && !self.is_to_leave(signal);
                match seen.attempt.as_ref().filter(|_| coordinates) {
                    None => {
                        return Ok(say_interrupted(signal));
                    }
                    Some(attempt)
                        if interrupted
                            .is_some_and(|(_, before)| !signals::is_advance_notice(before)) =>
                    {
                        self.board.tell_kill(attempt.number);
                    }
                    Some(attempt) => {
                        print_message(INTERRUPTED);
                        self.board.tell_interrupt(attempt.number, signal);
                        interrupted = Some((attempt.number, signal));
                    }
                }
            }
            // The signal may have come after the decision to go on, or to start again.
            if let (Some((told, signal)), Some(attempt)) = (&mut interrupted, &seen.attempt)
                && *told < attempt.number
            {
                self.board.tell_interrupt(attempt.number, *signal);
                *told = attempt.number;
            }
            match seen.attempt {
                Some(attempt) if attempt.number > before => {
                    before = attempt.number;
                    match attempt.place(self.agent) {
                        Some(place) => {
                            had_ranks = true;
                            let (last, end) = self.attempt(attempt, place, &mut printed)?;
                            before = last;
                            let Some(end) = end else {
                                print_message("this node has left the job, which goes on");
                                return Ok(128 + SIGTERM);
                            };
                            self.board.tell_end(last, self.agent, end);
                        }
                        None if told_to_wait => {}
                        None => {
                            told_to_wait = true;
                            print_message(match had_ranks {
                                true => "the job goes on without the ranks of this node",
                                false => {
                                    "the job runs on other nodes; this one waits until it is taken in"
                                }
                            });
                        }
                    }
                }
                _ => std::thread::sleep(POLL),
            }
        }
    }

    /// Whether a signal asks this node to leave, and not the job to end. The only host of the
    /// rendezvous cannot leave.
    fn is_to_leave(&self, signal: i32) -> bool {
        let can_leave = !self.meeting.seats.has_own() || self.options.endpoints.len() > 1;
        signal == SIGTERM && self.options.leave_on_sigterm && can_leave
    }

    /// Whether this agent starts no ranks.
    fn coordinates_only(&self) -> bool {
        self.options.devices == 0
    }

    /// Checks that the job has a coordinator, and that it works.
    ///
    /// # Errors
    /// If there was no sign of life of it for too long, or the one on this agent has failed.
    fn check_contact(&self) -> Result<()> {
        if let Some(why) = self.coordinator_failed.get() {
            return Err(Error::Launch(format!("the job cannot be coordinated any more: {why}")));
        }
        let (silent, keep_alive) = (self.meeting.seats.silent_for(), self.options.keep_alive);
        let unreached = self.board.silent_for();
        match &*self.options.endpoints {
            [endpoint] if silent.max(unreached) > keep_alive => Err(Error::Launch(format!(
                "the rendezvous at {endpoint} has not answered for {keep_alive:?}: its host is down, or cut off, \
                 or its agent was killed"
            ))),
            // Another coordinator may come until then, which goes on without this agent after that.
            [_, _, ..] if silent > 2 * keep_alive => Err(Error::Launch(format!(
                "nobody has coordinated the job for {:?}: more than half of the hosts of --rdzv-endpoint {} are \
                 down, or cut off from here, or their agents were killed",
                2 * keep_alive,
                listed(&self.options.endpoints)
            ))),
            [_, _, ..] if unreached > 2 * keep_alive => Err(Error::Launch(format!(
                "the agent that coordinates the job has not answered for {:?}: others reach it, but this host \
                 does not",
                2 * keep_alive
            ))),
            _ => Ok(()),
        }
    }

    /// Runs this node's ranks of an attempt, and of the generations in which an elastic job goes
    /// on. Returns the number of the last attempt, and its end; none if this node has left the
    /// job.
    ///
    /// # Errors
    /// If the other agents are unreachable; the ranks are ended.
    fn attempt(
        &self,
        mut attempt: Attempt,
        place: usize,
        printed: &mut Option<String>,
    ) -> Result<(u64, Option<End>)> {
        let address = match &attempt.generation {
            // Its ranks meet at the store alone.
            Some(_) => attempt.store.clone(),
            None => match self.address(&attempt, place)? {
                Ok(address) => address,
                Err(end) => return Ok((attempt.number, Some(end))),
            },
        };
        if let (Some(dir), false) = (&self.options.log_dir, self.options.tee) {
            let dir = logs::directory(dir, &attempt);
            print_message(&format!("the output of the ranks is in {}/", dir.display()));
        }
        let started = match is_left_behind(&attempt, place) {
            false => Ranks::start(&self.start(&attempt, place, &address), &self.orphans),
            true => Err(Error::Launch("its ranks have ended, which were to go on".to_owned())),
        };
        let mut ranks = match started {
            Ok(ranks) => ranks,
            Err(error) => {
                let end = self.failed_start(&attempt, place, &error, printed);
                return Ok((attempt.number, Some(end)));
            }
        };
        let (mut told, mut told_losses) = (None, Losses::default());
        let mut told_going_on = None;
        loop {
            if let Some(end) = ranks.poll() {
                if let End::Failed { message, .. } = &end {
                    *printed = Some(message.clone());
                }
                return Ok((attempt.number, Some(end)));
            }
            if let (Some(failed), None) = (ranks.failed(), &told) {
                told = Some(failed.clone());
                self.board.tell_failing(attempt.number, self.agent, failed.clone());
            }
            if let Some(going_on) = ranks.going_on().cloned() {
                let telling = (attempt.number, going_on.work.is_some());
                if told_going_on != Some(telling) {
                    told_going_on = Some(telling);
                    self.board.tell_going_on(attempt.number, self.agent, going_on);
                }
                let losses = ranks.losses();
                if losses != told_losses {
                    self.board.tell_losses(attempt.number, self.agent, losses.clone());
                    told_losses = losses;
                }
            }
            match self.handle_signals(&mut ranks) {
                Some(Asked::Once(signal)) => self.board.tell_interrupt(attempt.number, signal),
                Some(Asked::Again) => self.board.tell_kill(attempt.number),
                None => {}
            }
            let seen = self.board.seen();
            if let Some(next) = seen.attempt.as_ref().filter(|next| follows(next, &attempt))
                && !ranks.is_ending()
            {
                let Some(place) = next.place(self.agent) else {
                    ranks.kill();
                    let end = (!ranks.leaves()).then_some(End::Stopped);
                    return Ok((attempt.number, end));
                };
                let start = self.start(next, place, &next.store);
                if let Err(error) = ranks.go_on(&start) {
                    ranks.kill();
                    let end = self.failed_start(next, place, &error, printed);
                    return Ok((next.number, Some(end)));
                }
                attempt = next.clone();
                told_losses = Losses::default();
                // The signal may have come after the decision to go on.
                if let Some(signal) = ranks.interrupted() {
                    self.board.tell_interrupt(attempt.number, signal);
                }
            } else {
                let current = seen.attempt.as_ref().is_some_and(|now| now.number == attempt.number);
                if let (Some(signal), true) = (seen.interrupt, current) {
                    ranks.interrupt(signal);
                }
                if seen.kill && current {
                    ranks.end_at_once();
                }
                if let (Some(stop), true) = (&seen.stop, current) {
                    if !ranks.is_ending() && !stop.is_done {
                        print_message(&format!("error: {}", stop.message));
                        *printed = Some(stop.message.clone());
                    }
                    ranks.stop_after(stop);
                } else if seen.over.is_some() || !current {
                    ranks.stop();
                }
            }
            if let Err(error) = self.check_contact() {
                ranks.kill();
                return Err(error);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Forwards this agent's signals to the ranks, unless they ask the node to leave.
    fn handle_signals(&self, ranks: &mut Ranks) -> Option<Asked> {
        let signal = signals::take()?;
        let before = ranks.interrupted();
        if before.is_some() && signals::is_advance_notice(signal) {
            return None;
        }
        if before.is_some_and(|before| !signals::is_advance_notice(before)) {
            ranks.end_at_once();
            return Some(Asked::Again);
        }
        if self.is_to_leave(signal) && ranks.leave() {
            print_message(LEAVES);
            return None;
        }
        let cannot_leave = signal == SIGTERM && before.is_none() && !ranks.leaves();
        if cannot_leave && self.options.leave_on_sigterm {
            let why = match self.is_to_leave(signal) {
                true => "the job is not elastic, or has just begun",
                false => "no other host has the rendezvous",
            };
            print_message(&format!("this node cannot leave, because {why}: the job ends"));
        }
        print_message(INTERRUPTED);
        ranks.interrupt(signal);
        Some(Asked::Once(signal))
    }

    /// What this node's ranks are started with.
    fn start<'a>(
        &'a self,
        attempt: &'a Attempt,
        place: usize,
        address: &'a (String, u16),
    ) -> Start<'a> {
        let (options, secret) = (self.options, &*self.meeting.secret);
        Start { options, attempt, place, address, secret, started: self.started, said: &self.said }
    }

    /// Reports that this node's ranks cannot be started.
    fn failed_start(
        &self,
        attempt: &Attempt,
        place: usize,
        error: &Error,
        printed: &mut Option<String>,
    ) -> End {
        let host = &attempt.nodes[place].host;
        let message = format!("node {place} ({host}): {error}");
        print_message(&format!("error: {message}"));
        *printed = Some(message.clone());
        End::Failed { message, code: 1 }
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
                _ => self.check_contact()?,
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Whether an attempt keeps ranks of `present`.
fn follows(attempt: &Attempt, present: &Attempt) -> bool {
    attempt.generation.is_some() && attempt.number == present.number + 1
}

/// Whether ranks of this node were to go on in an attempt whose ranks it has yet to start.
fn is_left_behind(attempt: &Attempt, place: usize) -> bool {
    let node = &attempt.nodes[place];
    let ranks = node.first_rank..node.first_rank + node.devices;
    let kept = |generation: &Generation| generation.members[ranks].iter().any(Option::is_some);
    attempt.generation.as_ref().is_some_and(kept)
}

/// Requests made by signals.
enum Asked {
    /// End the job, because of this signal.
    Once(i32),
    /// End the job at once.
    Again,
}
