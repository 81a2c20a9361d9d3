//! Process groups whose ranks can abandon a step together.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;

use candle_core::{Device, Tensor};

use super::{Collective, End, Intercepted, Interceptor, Label, ProcessGroup, ReduceOp, Work};
use crate::{Error, Result};
use fulgurite_tensor::execution::read;

/// Lets the ranks of a job abandon a step that one of them cannot finish, and try it again.
///
/// A rank that runs out of memory within a step must not simply begin the step again: other ranks
/// wait for it in collectives that it will not start. So in the groups returned by
/// [`watch`](Self::watch), the ranks vote before each collective of several ranks whether to go on.
/// A rank that [abandons](Self::abandon) the step votes no, once in each of its groups. Every other
/// rank learns this at its next collective, which fails, and then votes no in its other groups.
/// When the ranks [`resume`](Self::resume), all ranks of each group have started the same
/// collectives.
///
/// (Composer's automatic micro-batches vote in the same way before FSDP's collectives.)
///
/// ```
/// use std::sync::Arc;
/// use fulgurite_core::collective::{Abandonment, Solo};
///
/// let steps = Abandonment::new(0);
/// let world = steps.watch(Arc::new(Solo::new("world", 0)))?;
/// steps.abandon();
/// assert_eq!(steps.resume()?, 0); // rank 0 did
/// assert!(!steps.is_abandoned());
/// # drop(world);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Abandonment(Arc<Shared>);

struct Shared {
    /// This process's rank.
    rank: usize,
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    /// The rank that abandoned the step; of several known, the highest.
    by: Option<usize>,
    /// In order of creation, which is the same on all their ranks.
    lines: Vec<Weak<Line>>,
}

impl Abandonment {
    /// Makes the handle for all groups of this rank.
    pub fn new(rank: usize) -> Self {
        Self(Arc::new(Shared { rank, heard: Mutex::default() }))
    }

    /// Returns the group with a vote before each collective. Groups split from it vote too. Groups
    /// of one rank stay as they are. `send` and `recv` do not vote: a step that uses them cannot be
    /// abandoned. All ranks of a group must watch it. Not collective.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn watch(&self, group: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        if group.size() == 1 {
            return Ok(group);
        }
        let line = Arc::new(Line {
            group,
            shared: self.0.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let at_work = line.clone();
        let worker = std::thread::Builder::new()
            .name(format!("ask-{}", line.group.name()))
            .spawn(move || at_work.work())
            .map_err(|error| line.group.error("watch", error))?;
        self.0.heard().lines.push(Arc::downgrade(&line));
        let group = line.group.clone();
        let asking = Asking { line, abandonment: self.clone(), worker: Some(worker) };
        Ok(Arc::new(Intercepted::new(group, asking)))
    }

    /// Abandons the step, unless another rank already has. Not collective: other ranks learn of it
    /// at their next collective. Every rank must then call [`resume`](Self::resume).
    pub fn abandon(&self) {
        self.0.hear(self.0.rank);
    }

    /// Whether this rank knows that the step was abandoned.
    pub fn is_abandoned(&self) -> bool {
        self.0.heard().by.is_some()
    }

    /// Waits until collectives may start again, and returns the global rank that abandoned the
    /// step; of several, one. All earlier collectives are over by then. Collective over all groups,
    /// after [`is_abandoned`](Self::is_abandoned).
    ///
    /// # Errors
    /// If a peer fails, or does not abandon the step within a group's timeout.
    pub fn resume(&self) -> Result<usize> {
        let lines: Vec<_> = self.0.heard().lines.iter().filter_map(Weak::upgrade).collect();
        for line in &lines {
            line.until_over()?;
            // A group runs its collectives in order. So after the barrier the step's dropped
            // collectives are complete: on a device, for all work queued from now on. Only then may
            // the memory they write be freed.
            line.group.run(Collective::Barrier)?;
        }
        let by = {
            let mut heard = self.0.heard();
            heard.lines.retain(|line| line.strong_count() > 0);
            heard.by.take()
        };
        lines.iter().for_each(|line| line.state().over = false);
        by.ok_or_else(|| Error::other("no step was abandoned, so none can be resumed"))
    }
}

impl Shared {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().expect("no panic while noting")
    }

    /// Records which rank abandons the step, and tells all groups.
    fn hear(&self, by: usize) {
        let lines = {
            let mut heard = self.heard();
            let is_news = heard.by.is_none();
            heard.by = heard.by.max(Some(by));
            if is_news { heard.lines.clone() } else { Vec::new() }
        };
        for line in lines.iter().filter_map(Weak::upgrade) {
            line.state().jobs.push_back(Job::Ask);
            line.changed.notify_all();
        }
    }
}

/// One group's collectives and votes, which start one after the other.
struct Line {
    group: Arc<dyn ProcessGroup>,
    shared: Arc<Shared>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Whether a thread is voting or starting a collective.
    busy: bool,
    /// Whether the ranks of the group have agreed to abandon the step.
    over: bool,
    /// Whether a vote failed.
    failed: bool,
    closed: bool,
}

enum Job {
    /// An overlapping collective, its label, and the channel for its `Work`.
    Start(Collective, Option<Arc<Label>>, Sender<Result<Work>>),
    /// Tells the other ranks that the step is abandoned.
    Ask,
}

impl Line {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while it is held")
    }

    /// The loop of the group's thread.
    fn work(&self) {
        loop {
            let job = {
                let wait =
                    |state: &mut State| state.busy || (state.jobs.is_empty() && !state.closed);
                let mut state =
                    self.changed.wait_while(self.state(), wait).expect("no panic while it is held");
                let Some(job) = state.jobs.pop_front() else { return };
                state.busy = true;
                job
            };
            match job {
                Job::Start(collective, label, waiting) => {
                    let _label = label.map(|label| Label::enter(label.0.clone()));
                    // The send fails if the caller dropped its `Work`.
                    let _ = waiting.send(self.start(collective, true));
                }
                Job::Ask => {
                    // This rank has an error already.
                    let _ = self.ask();
                }
            }
            self.end_turn();
        }
    }

    fn end_turn(&self) {
        self.state().busy = false;
        self.changed.notify_all();
    }

    /// Starts a collective, if every rank votes to go on.
    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        self.ask()?;
        self.group.start(collective, overlap)
    }

    /// Votes with the ranks of the group whether all go on.
    ///
    /// # Errors
    /// If one does not, or the group fails.
    fn ask(&self) -> Result<()> {
        if self.state().over {
            return Err(self.abandoned());
        }
        match self.exchange() {
            Ok(None) => Ok(()),
            Ok(Some(by)) => {
                self.state().over = true;
                self.shared.hear(by);
                Err(self.abandoned())
            }
            Err(error) => {
                self.state().failed = true;
                Err(error)
            }
        }
    }

    /// Votes, and returns the rank that abandons the step, if any.
    fn exchange(&self) -> Result<Option<usize>> {
        let own = self.shared.heard().by.map_or(0, |rank| rank as i64 + 1);
        let answers = Tensor::new(&[own], &Device::Cpu)?;
        self.group.run(Collective::all_reduce(&answers, ReduceOp::Max))?;
        let answer = read::host::<i64>(&answers)?[0];
        Ok(usize::try_from(answer - 1).ok())
    }

    fn abandoned(&self) -> Error {
        let by = self.shared.heard().by.unwrap_or(self.shared.rank);
        self.group.error("start", format!("rank {by} has abandoned the step"))
    }

    /// Waits until the group's ranks have agreed to abandon the step and all jobs are done.
    fn until_over(&self) -> Result<()> {
        let wait = |state: &mut State| {
            !state.failed && (!state.over || state.busy || !state.jobs.is_empty())
        };
        let state = self.changed.wait_while(self.state(), wait).expect("no panic while it is held");
        match state.failed {
            false => Ok(()),
            true => {
                let message = "the ranks could not agree to abandon the step";
                Err(self.group.error("resume", message))
            }
        }
    }
}

/// Votes before each collective.
struct Asking {
    line: Arc<Line>,
    abandonment: Abandonment,
    worker: Option<JoinHandle<()>>,
}

impl Interceptor for Asking {
    fn start(
        &self,
        _: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        {
            let mut state = self.line.state();
            if overlap || state.busy || !state.jobs.is_empty() {
                let (waiting, started) = channel();
                state.jobs.push_back(Job::Start(collective, Label::current(), waiting));
                self.line.changed.notify_all();
                let gone = || Error::other("the thread that starts collectives has ended");
                return Ok(Work::pending(move || started.recv().map_err(|_| gone())??.wait()));
            }
            state.busy = true;
        }
        // Runs on this thread, since the caller waits at once.
        let work = self.line.start(collective, false);
        self.line.end_turn();
        work
    }

    /// Starts nothing: the ranks must vote before the group can tell whether it can.
    fn start_after(
        &self,
        _: &Arc<dyn ProcessGroup>,
        _: &Arc<dyn End>,
        _: Collective,
    ) -> Result<Option<Work>> {
        Ok(None)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        self.abandonment.watch(part)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let busy = {
            let mut state = self.line.state();
            state.closed = true;
            state.busy
        };
        self.line.changed.notify_all();
        // A worker waiting for a peer ends with the group's timeout.
        if let (false, Some(worker)) = (busy, self.worker.take())
            && worker.join().is_err()
        {
            tracing::error!("the thread of the group {} panicked", self.line.group.name());
        }
    }
}
