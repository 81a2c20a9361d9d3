//! The record of a rank's last collectives, written if the run fails.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::pace::Pace;
use crate::fabric::host;
use crate::{Error, Result};
use fulgurite_engine::collective::flight::FlightRecorder;
use fulgurite_engine::collective::{ProcessGroup, RANKS_DIFFER, TIMED_OUT};
use fulgurite_launch::FailureWatch;

/// The directory of the ranks' records in a run's directory.
const DIR: &str = "flight";
/// Interval in which the watching thread looks whether the run is over, and the time that a rank
/// has to meet the job's failure by itself.
const INTERVAL: Duration = Duration::from_millis(500);

/// The record of a rank's last collectives.
///
/// A rank writes it if ranks were stuck: if one waited too long, or ranks made different calls. A
/// rank that is stuck in its own code does not hear of it, so its watching thread writes the record
/// once the job has failed.
pub(crate) struct Flight {
    shared: Arc<Shared>,
    pace: Option<Pace>,
}

/// What the watching thread has. Not the groups, which end with the session.
struct Shared {
    recorder: FlightRecorder,
    rank: usize,
    dir: PathBuf,
    written: Mutex<bool>,
    over: AtomicBool,
}

impl Flight {
    /// The record of a rank, to be written to the run's directory.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn new(
        recorder: FlightRecorder,
        rank: usize,
        run_dir: &Path,
        slow_rank_factor: Option<f64>,
    ) -> Result<Self> {
        let (dir, over) = (run_dir.join(DIR), AtomicBool::new(false));
        let shared = Arc::new(Shared { recorder, rank, dir, written: Mutex::default(), over });
        if let Some(job) = FailureWatch::new() {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name("flight record".to_owned())
                .spawn(move || shared.watch(&job))
                .map_err(|error| Error::other(format!("starting a thread: {error}")))?;
        }
        Ok(Self { shared, pace: slow_rank_factor.map(Pace::new) })
    }

    /// Compares the paces of the ranks after a logged step, if the configuration asks for it.
    /// Returns the slow ranks. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub(crate) fn compare_paces(
        &mut self,
        world: &dyn ProcessGroup,
        step: u64,
    ) -> Result<Vec<usize>> {
        let recorder = &self.shared.recorder;
        self.pace.as_mut().map_or(Ok(Vec::new()), |pace| pace.compare(recorder, world, step))
    }

    /// Writes the record after an error, if ranks were stuck. Returns its directory then.
    pub(crate) fn write_after(&self, error: &Error) -> Option<&Path> {
        self.shared.over.store(true, Ordering::SeqCst);
        match error {
            Error::PeerFailed { message, .. } | Error::Collective { message, .. }
                if were_stuck(message) =>
            {
                self.shared.write();
                Some(&self.shared.dir)
            }
            _ => None,
        }
    }
}

/// Whether a failure's message is about ranks that were stuck.
fn were_stuck(message: &str) -> bool {
    [TIMED_OUT, RANKS_DIFFER].iter().any(|text| message.contains(text))
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
    }
}

impl Shared {
    /// Writes the record if the job fails, and the rank does not hear of it.
    fn watch(&self, job: &FailureWatch) {
        let is_over = || self.over.load(Ordering::SeqCst);
        while !is_over() {
            let Some(failure) = job.wait(INTERVAL) else { continue };
            if failure.goes_on || !were_stuck(&failure.message) {
                return;
            }
            std::thread::sleep(INTERVAL);
            if !is_over() {
                self.write();
            }
            return;
        }
    }

    fn write(&self) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *written, true) {
            return;
        }
        if let Err(error) = self.try_to_write() {
            tracing::warn!("the record of the last collectives: {error}");
        }
    }

    fn try_to_write(&self) -> Result<()> {
        let rank = self.rank;
        fs::create_dir_all(&self.dir).map_err(Error::io("creating the directory", &self.dir))?;
        let (part, path) = (
            self.dir.join(format!("rank-{rank:05}.part")),
            self.dir.join(format!("rank-{rank:05}.jsonl")),
        );
        let file = File::create(&part).map_err(Error::io("creating", &part))?;
        self.recorder
            .write(&mut BufWriter::new(file), &host())
            .map_err(Error::io("writing", &part))?;
        fs::rename(&part, &path).map_err(Error::io("renaming", &part))
    }
}
