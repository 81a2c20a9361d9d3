//! What a rank keeps of a training when its generation ends.

use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::trainer::record::event::Event;
use crate::trainer::record::log_table::SavedStates;
use crate::trainer::record::recorder::Reports;
use crate::trainer::saving::save::held_state;
use crate::trainer::session::{Session, SessionSetup};
use crate::{Error, Result};
use fulgurite_checkpoint::SaveRequest;
use fulgurite_engine::mesh::{DATA_PARALLEL_REPLICATE, DeviceMesh};
use fulgurite_launch::{job_memories, job_memory, note_work, noted_work};

/// What a rank keeps of a training when its generation ends.
#[derive(Default)]
pub(crate) struct Kept {
    session: Option<Session>,
    run: Option<RunSoFar>,
    /// The report of the last step before the present generation.
    last_step: Option<Event>,
    reports: Option<Reports>,
    lost_at: Option<Instant>,
    /// Steps done when the last generation ended, on any rank.
    pub(super) steps_done: u64,
}

/// The settings of a run that stay in all of its generations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunSoFar {
    pub(crate) run_dir: PathBuf,
    /// Number of ranks for whose batches a step has samples.
    pub(crate) step_ranks: usize,
    /// When the run began, in microseconds since 1970.
    pub(crate) begun_at: u64,
}

/// The file with the [`RunSoFar`] of a job, for new processes that find no other rank.
const RUN_FILE: &str = "run.json";

impl RunSoFar {
    pub(crate) fn of(session: &Session) -> Self {
        let SessionSetup { run_dir, step_ranks, begun_at, .. } = &session.setup;
        Self { run_dir: run_dir.clone(), step_ranks: *step_ranks, begun_at: *begun_at }
    }

    /// Removes what an earlier attempt of the job has noted on this host. Called on one rank of it.
    pub(crate) fn forget() {
        for dir in job_memories() {
            // Mostly there is nothing.
            let _ = std::fs::remove_file(dir.join(RUN_FILE));
        }
    }

    /// Notes the run in the host's memory, and with the agents. Called on rank 0.
    pub(crate) fn note(&self) -> Result<()> {
        let text = serde_json::to_string(self).map_err(Error::other)?;
        note_work(&text)?;
        let Some(place) = job_memory(0) else { return Ok(()) };
        let path = place.join(RUN_FILE);
        std::fs::write(&path, text).map_err(Error::io("noting the run", path))
    }

    /// Returns the noted run of this job.
    pub(super) fn noted() -> Option<Self> {
        let mut texts =
            job_memories().into_iter().flat_map(|dir| std::fs::read(dir.join(RUN_FILE)));
        let of_host = texts.find_map(|text| serde_json::from_slice(&text).ok());
        of_host.or_else(|| serde_json::from_str(&noted_work()?).ok())
    }
}

/// A rank's knowledge of the run at the start of a generation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) run: Option<RunSoFar>,
    pub(super) held: Option<Held>,
    /// The report of this rank's last step. The rank that was to report it may be lost.
    pub(super) last_step: Option<Event>,
    /// Steps that this rank has done, whether or not it still holds the state after them.
    pub(super) steps_done: u64,
}

/// The state that a rank holds, as a part of its replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) step: u64,
    /// The rank's coordinates in its replica.
    pub(super) place: Vec<usize>,
    /// Number of ranks in a replica.
    pub(super) replica_size: usize,
    pub(super) bytes: u64,
    /// Values logged in the present epoch.
    pub(super) epoch: Option<SavedStates>,
}

impl Kept {
    /// Keeps the session of a generation that has ended.
    pub(crate) fn keep(&mut self, mut session: Session) {
        self.run = Some(RunSoFar::of(&session));
        // The copy under way may replace the one before.
        if let Some(copies) = session.copies.take() {
            copies.end();
        }
        self.session = Some(session);
    }

    /// Notes that a rank may be lost, before this one waits for the next generation.
    pub(crate) fn note_loss(&mut self) {
        self.lost_at.get_or_insert_with(Instant::now);
    }

    /// Returns when this rank met the loss that the others go on after; `None` on a new process.
    pub(crate) fn lost_at(&self) -> Option<Instant> {
        self.lost_at
    }

    /// Notes that the ranks have gone on after a loss.
    pub(crate) fn end_loss(&mut self) {
        self.lost_at = None;
    }

    /// Takes the reports of the last session on this process, if there was one.
    pub(crate) fn take_reports(&mut self) -> Option<Reports> {
        self.reports.take()
    }

    /// Returns what this rank offers. Not collective.
    pub(super) fn offer(&mut self) -> Offer {
        let held = match &mut self.session {
            None => None,
            Some(session) => match held(session) {
                Ok(held) => held,
                Err(error) => {
                    tracing::info!("this rank's state cannot be used after the loss: {error}");
                    None
                }
            },
        };
        let step = self.session.as_ref().map_or(0, |session| session.progress.step());
        self.steps_done = self.steps_done.max(step);
        // A generation may end before its first step.
        let of_session = self.session.as_ref().and_then(|session| session.recorder.last_step());
        let last_step = of_session.or(self.last_step.as_ref());
        Offer {
            run: self.run.clone(),
            held,
            last_step: last_step.cloned(),
            steps_done: self.steps_done,
        }
    }

    /// Returns this rank's part of a checkpoint of the state that it holds. `epoch` has the logged
    /// values of all ranks.
    pub(super) fn request(&mut self, name: &str, epoch: Vec<SavedStates>) -> Result<SaveRequest> {
        let session = self.session.as_mut();
        let session = session.ok_or_else(|| Error::other("this rank holds no state"))?;
        held_state(session, name, epoch)
    }

    /// Sets the settings of the run, and the report of its last step.
    pub(super) fn set_run(&mut self, run: &RunSoFar, last_step: Option<&Event>) {
        (self.run, self.last_step) = (Some(run.clone()), last_step.cloned());
    }

    /// Ends the session, whose state is saved. Its reports go on.
    pub(super) fn end_session(&mut self) {
        let Some(mut session) = self.session.take() else { return };
        session.runner.stop_loading(true);
        session.runner.stop_loading(false);
        self.reports = Some(session.recorder.hand_over());
    }
}

/// Returns what this rank holds; `None` if its state is not that after a whole step. Not
/// collective.
fn held(session: &mut Session) -> Result<Option<Held>> {
    let is_read_late = session.recorder.is_pending() && !session.setup.device().is_cpu();
    if session.optimizers.is_none() || !session.has_state || is_read_late {
        return Ok(None);
    }
    session.take_back_step()?;
    session.read_pending_step()?;
    let step = session.progress.step();
    let Ok(request) = held_state(session, "", Vec::new()) else { return Ok(None) };
    let bytes = request.bytes();
    let (place, replica_size) = place_in_replica(session.setup.fabric.device_mesh());
    let epoch = session.recorder.own_epoch_states().transpose()?;
    Ok(Some(Held { step, place, replica_size, bytes, epoch }))
}

/// Returns this rank's coordinates in its replica, and the number of ranks in a replica.
pub(crate) fn place_in_replica(mesh: &DeviceMesh) -> (Vec<usize>, usize) {
    let (names, sizes) = (mesh.layout().names(), mesh.layout().sizes());
    let dims = names.iter().zip(sizes).filter(|(name, _)| *name != DATA_PARALLEL_REPLICATE);
    let (place, sizes): (Vec<usize>, Vec<usize>) =
        dims.map(|(name, size)| (mesh.coordinate(name), *size)).unzip();
    (place, sizes.iter().product())
}
