//! The choice of checkpoints to keep.

use serde::{Deserialize, Serialize};

use crate::run::{CheckpointConfig, MonitorMode};

/// A checkpoint that a run keeps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RetainedCheckpoint {
    /// The optimizer step after which the checkpoint was saved.
    pub(crate) step: u64,
    /// The checkpoint's name in its location.
    pub(crate) name: String,
    /// The monitored metric when the checkpoint was saved; `None` if missing or not finite.
    pub(crate) score: Option<f64>,
}

/// The checkpoints that a run keeps.
///
/// They are the newest `checkpoint.keep_last` and the best `checkpoint.save_top_k`, and always the
/// newest and the one that the run resumed from. If neither key is set, all are kept.
///
/// The list holds the checkpoints that this run saved. It also holds those of the run that it
/// resumed from, if both use the same location. Other checkpoints are never removed.
#[derive(Debug, Clone)]
pub(crate) struct Retention {
    keep_last: Option<u64>,
    save_top_k: Option<i64>,
    mode: MonitorMode,
    /// Oldest first.
    kept: Vec<RetainedCheckpoint>,
    resumed_from: Option<String>,
}

impl Retention {
    /// Creates the retention of a configuration, for a run that has saved nothing.
    pub(crate) fn new(config: &CheckpointConfig) -> Self {
        let CheckpointConfig { keep_last, save_top_k, mode, .. } = *config;
        Self { keep_last, save_top_k, mode, kept: Vec::new(), resumed_from: None }
    }

    /// Takes over the earlier run's list from the checkpoint `name` that this run resumes from.
    pub(crate) fn resume(&mut self, name: &str, kept: Vec<RetainedCheckpoint>) {
        self.kept = kept;
        self.resumed_from = Some(name.to_owned());
    }

    /// Takes over the list of an earlier generation of this run.
    pub(crate) fn go_on(&mut self, kept: Vec<RetainedCheckpoint>, resumed_from: Option<String>) {
        (self.kept, self.resumed_from) = (kept, resumed_from);
    }

    /// Returns the name of the checkpoint that this run resumed from, if it lies in the same
    /// location.
    pub(crate) fn resumed_from(&self) -> Option<&str> {
        self.resumed_from.as_deref()
    }

    /// Adds a checkpoint that is about to be saved, as the newest.
    pub(crate) fn add(&mut self, step: u64, name: &str, score: Option<f64>) {
        self.kept.retain(|kept| kept.name != name);
        let score = score.filter(|score| score.is_finite());
        self.kept.push(RetainedCheckpoint { step, name: name.to_owned(), score });
    }

    /// Returns the kept checkpoints, oldest first. Every checkpoint saves this list for a resumed
    /// run.
    pub(crate) fn kept(&self) -> &[RetainedCheckpoint] {
        &self.kept
    }

    /// Drops the checkpoints that no rule keeps, and returns their names.
    ///
    /// The caller removes them after the commit of the newest.
    pub(crate) fn take_expired(&mut self) -> Vec<String> {
        let all = match (self.keep_last, self.save_top_k) {
            (None, None) => true,
            (_, top) => top.is_some_and(|k| k < 0),
        };
        if all {
            return Vec::new();
        }
        let newest = self.keep_last.unwrap_or(1).max(1) as usize;
        let best = self.best(self.save_top_k.unwrap_or(0) as usize);
        let first_new = self.kept.len().saturating_sub(newest);
        let (mut stay, mut go) = (Vec::new(), Vec::new());
        for (i, kept) in std::mem::take(&mut self.kept).into_iter().enumerate() {
            let stays = i >= first_new
                || best.contains(&i)
                || self.resumed_from.as_ref() == Some(&kept.name);
            if stays { stay.push(kept) } else { go.push(kept.name) }
        }
        self.kept = stay;
        go
    }

    /// Returns the name of the best checkpoint with a score.
    pub(crate) fn best_name(&self) -> Option<&str> {
        self.best(1).first().map(|&i| self.kept[i].name.as_str())
    }

    /// Returns the name of the newest checkpoint.
    pub(crate) fn last_name(&self) -> Option<&str> {
        self.kept.last().map(|kept| kept.name.as_str())
    }

    /// Returns the indices of the best `k` checkpoints with a score. Among equal scores the older
    /// is better.
    fn best(&self, k: usize) -> Vec<usize> {
        let mut scored: Vec<(f64, usize)> = self
            .kept
            .iter()
            .enumerate()
            .filter_map(|(i, kept)| kept.score.map(|score| (score, i)))
            .collect();
        scored.sort_by(|(a, _), (b, _)| match self.mode {
            MonitorMode::Min => a.total_cmp(b),
            MonitorMode::Max => b.total_cmp(a),
        });
        scored.into_iter().take(k).map(|(_, i)| i).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Saves after steps 1, 2, … with these scores, and returns the kept steps after each save.
    fn run(config: &CheckpointConfig, scores: &[f64]) -> Vec<Vec<u64>> {
        let mut retention = Retention::new(config);
        let steps = scores.iter().zip(1u64..);
        steps
            .map(|(score, step)| {
                retention.add(step, &format!("s{step}"), Some(*score));
                let before = retention.kept().len();
                let gone = retention.take_expired();
                assert_eq!(retention.kept().len() + gone.len(), before);
                retention.kept().iter().map(|kept| kept.step).collect()
            })
            .collect()
    }

    fn config(keep_last: Option<u64>, save_top_k: Option<i64>) -> CheckpointConfig {
        let monitor = Some("val_loss".to_owned());
        CheckpointConfig { keep_last, save_top_k, monitor, ..CheckpointConfig::default() }
    }

    #[test]
    fn only_the_newest_and_the_best_stay() {
        let scores = [3.0, 1.0, 2.0, 2.0, 5.0];
        let end = |config: &CheckpointConfig| run(config, &scores).pop().unwrap();
        assert_eq!(end(&config(None, None)), [1, 2, 3, 4, 5]);
        assert_eq!(end(&config(Some(2), None)), [4, 5]);
        assert_eq!(end(&config(None, Some(-1))), [1, 2, 3, 4, 5]);
        assert_eq!(end(&config(Some(2), Some(-1))), [1, 2, 3, 4, 5]);
        assert_eq!(end(&config(None, Some(0))), [5]);
        // Among equal scores the older is better.
        assert_eq!(end(&config(None, Some(2))), [2, 3, 5]);
        assert_eq!(end(&config(Some(2), Some(1))), [2, 4, 5]);
        let max = CheckpointConfig { mode: MonitorMode::Max, ..config(None, Some(2)) };
        assert_eq!(run(&max, &scores)[2..], [vec![1, 3], vec![1, 3, 4], vec![1, 5]]);
    }

    #[test]
    fn missing_scores_are_the_worst() {
        let scores = [f64::NAN, f64::NEG_INFINITY, 7.0, 8.0];
        assert_eq!(run(&config(None, Some(1)), &scores), [vec![1], vec![2], vec![3], vec![3, 4]]);
    }

    #[test]
    fn resumed_run_keeps_its_starting_checkpoint() {
        let config = config(Some(1), None);
        let kept = |step: u64| RetainedCheckpoint { step, name: format!("s{step}"), score: None };
        let mut retention = Retention::new(&config);
        retention.resume("s2", vec![kept(1), kept(2)]);
        retention.add(3, "s3", None);
        assert_eq!(retention.take_expired(), ["s1"]);
        retention.add(4, "s4", None);
        assert_eq!(retention.take_expired(), ["s3"]);
        assert_eq!(retention.kept(), [kept(2), kept(4)]);
        // Saved again, step 2 is the newest.
        retention.add(2, "s2", None);
        assert_eq!(retention.take_expired(), ["s4"]);
    }
}
