//! Resumes a restarted job from its own checkpoints.

use std::path::Path;

use crate::Result;
use crate::run::{CkptPath, TrainerConfig};
use crate::trainer::record::run_dir::RunDir;
use fulgurite_launch::attempt;

/// Returns the id that marks the runs of this job, if its launcher or scheduler has restarted it.
///
/// `None` if the configuration asks for the last or best checkpoint. All ranks agree on whether it
/// is `None`; the id itself matters only on rank 0.
pub(crate) fn restarted_job(config: &TrainerConfig) -> Option<&'static str> {
    let attempt = attempt().filter(|attempt| attempt.restart_count > 0)?;
    match config.ckpt_path {
        None | Some(CkptPath::Path(_)) => Some(&attempt.restart_id),
        Some(CkptPath::Last | CkptPath::Best) => None,
    }
}

/// Lists the trainings under `root` by earlier attempts of `job`, newest first.
///
/// Directories of other jobs are ignored, whatever checkpoints they have.
///
/// # Errors
/// If `root` cannot be listed.
pub(crate) fn runs_of_job(root: &Path, job: &str) -> Result<Vec<RunDir>> {
    if !root.is_dir() {
        return Ok(Vec::new());
    }
    let mut runs = RunDir::all(root)?;
    runs.retain(|run| run.job().is_some_and(|of_run| of_run.id == job));
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::*;
    use crate::trainer::Stage;
    use crate::trainer::record::run_dir::Job;

    #[test]
    fn runs_of_other_jobs_are_not_resumed() {
        let root = tempfile::tempdir().unwrap();
        let absent = root.path().join("absent");
        assert_eq!(runs_of_job(&absent, "slurm-7.0").unwrap(), []);
        let run = |job: Option<&str>| {
            let run = RunDir::create(root.path(), Stage::Fit, &Table::new()).unwrap();
            if let Some(id) = job {
                let job = Job { id: id.to_owned(), saved_before: Some(7) };
                RunDir::set_job(run.path(), &job).unwrap();
                assert_eq!(run.job(), Some(job));
            }
            run
        };
        let first = run(Some("slurm-7.0"));
        run(Some("slurm-70.0"));
        run(None);
        let second = run(Some("slurm-7.0"));
        assert_eq!(runs_of_job(root.path(), "slurm-7.0").unwrap(), [second, first]);
        assert_eq!(runs_of_job(root.path(), "slurm-8.0").unwrap(), []);
    }
}
