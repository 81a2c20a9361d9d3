//! Process groups whose ranks can leave a step together.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;

use candle_core::{Device, Tensor};

use super::{Collective, End, Intercepted, Interceptor, Label, ProcessGroup, ReduceOp, Work};
use crate::execution::read;
use crate::{Error, Result};

/// Lets the ranks of a job leave a step that one of them cannot finish, and try it again.
///
/// A rank that runs out of memory within a step must not just begin the step anew: others wait for it in
/// collectives that it will not start. In the groups that [`watch`](Self::watch) returns, each collective of
/// several ranks is therefore preceded by a question: goes everybody on? A rank that
/// [abandons](Self::abandon) the step answers once in each of its groups that it does not, which every rank hears
/// at its next collective; that fails, and the rank answers the same in its other groups. So in each group all ranks
/// have started the same collectives when they [`resume`](Self::resume).
///
/// (Composer's automatic micro-batches put such a question before the collectives of FSDP.)
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
    /// The rank that has abandoned the step; of several, the last.
    by: Option<usize>,
    /// In the order in which they were made, which is that of all their ranks.
    lines: Vec<Weak<Line>>,
}

impl Abandonment {
    /// For the groups of this rank.
    pub fn new(rank: usize) -> Self {
        Self(Arc::new(Shared { rank, heard: Mutex::default() }))
    }

    /// The group, with the question before each collective; and so the groups that are split from it. Those of one
    /// rank stay as they are. `send` and `recv` are not asked about: a step that uses them cannot be
    /// abandoned. All ranks of a group must watch it. Not collective.
    ///
    /// # Errors
    /// If the system has no thread for it.
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

    /// Abandons the step, unless another rank has. Not collective: the others hear of it at their next
    /// collective. Every rank must then [`resume`](Self::resume).
    pub fn abandon(&self) {
        self.0.hear(self.0.rank);
    }

    /// Whether this rank knows that the step is abandoned.
    pub fn is_abandoned(&self) -> bool {
        self.0.heard().by.is_some()
    }

    /// Waits until collectives may be started again, and returns the global rank that abandoned the step; of several,
    /// one. What was started before is over by then. Collective over all groups, after
    /// [`is_abandoned`](Self::is_abandoned).
    ///
    /// # Errors
    /// If a peer fails, or does not abandon the step within a group's timeout.
    pub fn resume(&self) -> Result<usize> {
        let lines: Vec<_> = self.0.heard().lines.iter().filter_map(Weak::upgrade).collect();
        for line in &lines {
            line.until_over()?;
            // Groups run collectives in order. So after the barrier the collectives that the step dropped are complete: on
            // a device, for all work queued from now on. Only then may the memory that they write be freed.
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

    /// Notes which rank abandons the step, and says so in all groups.
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

/// The collectives of one group, which start one after the other.
struct Line {
    group: Arc<dyn ProcessGroup>,
    shared: Arc<Shared>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Whether a thread asks, or starts a collective.
    busy: bool,
    /// Whether the ranks of the group have agreed to abandon the step.
    over: bool,
    /// Whether a question got no answer.
    failed: bool,
    closed: bool,
}

enum Job {
    /// A collective that overlaps, what it is for, and who waits for it.
    Start(Collective, Option<Arc<Label>>, Sender<Result<Work>>),
    /// The step is abandoned: the others must hear it.
    Ask,
}

impl Line {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while it is held")
    }

    /// What the group's thread does.
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
                    // Nobody waits for a `Work` that was dropped.
                    let _ = waiting.send(self.start(collective, true));
                }
                Job::Ask => {
                    // The rank that asks has an error already.
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

    /// Starts a collective, if every rank goes on.
    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        self.ask()?;
        self.group.start(collective, overlap)
    }

    /// Asks the ranks of the group whether all go on.
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

    /// The rank that abandons the step, if any does.
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

    /// Waits until the group's ranks have agreed to abandon the step, and nothing is left to do.
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

/// Asks before each collective.
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
        // Without another thread, since the caller waits at once.
        let work = self.line.start(collective, false);
        self.line.end_turn();
        work
    }

    /// Starts nothing: the question must be answered before the group can say whether it can.
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
        // One that waits for a peer ends with the group's timeout.
        if let (false, Some(worker)) = (busy, self.worker.take())
            && worker.join().is_err()
        {
            tracing::error!("the thread of the group {} panicked", self.line.group.name());
        }
    }
}
