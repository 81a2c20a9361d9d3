//! Going on after the job was started again: `trainer.ckpt_path = "last"`, implied.

use std::path::Path;

use super::RunDir;
use crate::Result;
use crate::run::TrainerConfig;
use fulgurite_launch::attempt;

/// What the runs of this job are marked with, if its launcher or scheduler has started it again and the configuration
/// does not say which checkpoint to go on from. Whether it is `None` is the same on all ranks; the id counts on rank 0.
pub(super) fn restarted_job(config: &TrainerConfig) -> Option<&'static str> {
    let attempt = attempt().filter(|attempt| attempt.restart_count > 0)?;
    config.ckpt_path.is_none().then_some(&attempt.restart_id)
}

/// The runs under `root` that earlier attempts of `job` have begun to train, the newest first. Directories of other
/// jobs are not looked at, whatever checkpoints they have.
///
/// # Errors
/// If `root` cannot be listed.
pub(super) fn runs_of_job(root: &Path, job: &str) -> Result<Vec<RunDir>> {
    if !root.is_dir() {
        return Ok(Vec::new());
    }
    let mut runs = RunDir::all(root)?;
    runs.retain(|run| run.job().as_deref() == Some(job));
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::super::Stage;
    use super::*;

    #[test]
    fn runs_of_other_jobs_are_not_gone_on_with() {
        let root = tempfile::tempdir().unwrap();
        let absent = root.path().join("absent");
        assert_eq!(runs_of_job(&absent, "slurm-7.0").unwrap(), []);
        let run = |job: Option<&str>| {
            let run = RunDir::create(root.path(), Stage::Fit, &Table::new()).unwrap();
            job.map_or(Ok(()), |job| RunDir::set_job(run.path(), job)).unwrap();
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
