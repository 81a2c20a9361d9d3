//! `fit --find-batch-size`: short runs with growing batches, to find the largest batch that fits.

use std::fmt::Write as _;
use std::time::Instant;

use fulgurite_core::launch::{HostMemory, agree_on, notice_signals};
use fulgurite_core::trainer::ItemRate;
use fulgurite_core::{Error, Result};
use fulgurite_error::{print_message, printable};
use serde_json::{Value, json};
use toml::Table;

use super::args::{Output, RunRequest};
use super::{child_run, say, say_json};

/// Share of the initially free memory that a run may take: some of that memory may be used later.
const SHARE: f64 = 0.8;

/// Steps of a run.
const STEPS: u64 = 3;

/// Maximum number of doublings.
const MAX_DOUBLINGS: u32 = 25;

/// A run that took longer than this is the last one.
const PATIENCE_SECS: f64 = 120.0;

const MIB: f64 = 1_048_576.0;

/// Runs a few steps with batches of 1, 2, 4, … samples on each rank, as long as the next batch
/// should fit into the host's memory, judged by the last two runs. Then runs the largest batch that
/// should fit. Prints the figures of each run and the largest batch.
///
/// # Errors
/// If this is a rank of a job, the run with one sample fails, or the key does not exist.
pub(super) fn run(
    request: &RunRequest,
    key: &str,
    defaults: &Table,
    check: &dyn Fn(&RunRequest, Table) -> Result<()>,
) -> Result<()> {
    child_run::refuse_in_job("--find-batch-size")?;
    let logs = tempfile::tempdir().map_err(|error| {
        Error::other(format!("--find-batch-size: a directory for the logs of its runs: {error}"))
    })?;
    // A resumed run might have no steps left, so start fresh.
    let resolved = request.layers(defaults.clone())?.resolve();
    let ckpt_path = resolved.get("trainer").and_then(|trainer| trainer.get("ckpt_path")?.as_str());
    let anew = match ckpt_path {
        None => Vec::new(),
        Some("last") => vec![
            "checkpoint.io=local".to_owned(),
            format!("checkpoint.dir={:?}", logs.path().join("checkpoints")),
        ],
        Some(_) => vec!["checkpoint.weights_only=true".to_owned()],
    };
    // A step may take several batches; a trial run is limited in batches.
    let trainer = |name: &str| {
        let value = resolved.get("trainer").and_then(|trainer| trainer.get(name)?.as_integer());
        value.and_then(|value| u64::try_from(value).ok())
    };
    let accumulate = trainer("accumulate_grad_batches").unwrap_or(1).max(1);
    let of_step = trainer("global_batch_size");
    let batches = |size: u64| of_step.map_or(accumulate, |samples| (samples / size).max(1));
    let with_size = |size: u64| {
        let mut run = RunRequest { find_batch_size: None, ..request.clone() };
        run.set.extend([
            format!("{key}={size}"),
            format!("trainer.fast_dev_run={}", STEPS * batches(size)),
            "trainer.enable_progress_bar=false".to_owned(),
            format!("trainer.default_root_dir={:?}", logs.path()),
        ]);
        run.set.extend(anew.iter().cloned());
        run
    };
    check(&with_size(1), defaults.clone()).map_err(|error| {
        let error = error.to_string();
        let advice = match error.contains(&format!("unknown key `{key}`")) {
            true => ". Name the key of the number of samples in a batch: --find-batch-size=KEY",
            false => "",
        };
        Error::Config(format!("--find-batch-size: {error}{advice}"))
    })?;
    let Some(memory) = HostMemory::now() else {
        let message = "--find-batch-size: this host does not say how much memory is free";
        return Err(Error::Config(message.to_owned()));
    };
    notice_signals()?;
    let limit_mib = memory.available as f64 * SHARE / MIB;
    print_message(&format!(
        "a run may take {limit_mib:.0} MiB, {:.0} % of what is free",
        SHARE * 100.0
    ));
    print_message(Trial::HEADER);
    let search = search(limit_mib, &mut |size| {
        let trial = Trial::run(&with_size(size), size)?;
        print_message(&trial.line());
        Ok(trial)
    })?;
    if request.output == Output::Json {
        say_json(search.to_json(key, limit_mib));
    } else {
        say(&printable(&search.text(key, limit_mib)));
    }
    Ok(())
}

/// A run with one batch size.
#[derive(Debug, Clone, Default)]
struct Trial {
    size: u64,
    /// How the run failed, if it did.
    failed: Option<String>,
    /// Peak memory of all ranks together.
    peak_mib: f64,
    step_secs: f64,
    /// From the start of the process to its end.
    run_secs: f64,
    items_per_sec: f64,
    /// Share of the data that one step takes.
    epochs_a_step: f64,
}

impl Trial {
    const HEADER: &str = "batch size   peak MiB   s a step    items/s";

    /// # Errors
    /// [`Error::Interrupted`] if this process was asked to end; the request was passed on to the
    /// run.
    fn run(run: &RunRequest, size: u64) -> Result<Self> {
        let mut trial = Self { size, ..Self::default() };
        let started = Instant::now();
        let mut interrupted = None;
        let status = child_run::run(run, &mut interrupted, &mut |_, event| trial.read(event))?;
        if let Some(why) = interrupted {
            agree_on(why);
            return Err(Error::Interrupted);
        }
        trial.run_secs = started.elapsed().as_secs_f64();
        trial.failed = (!status.success()).then(|| child_run::status_text(status));
        Ok(trial)
    }

    fn read(&mut self, event: &Value) {
        let number = |name: &str| event[name].as_f64().unwrap_or(f64::NAN);
        match event["event"].as_str() {
            Some("step") if event["step"] == 1 => self.epochs_a_step = number("epoch"),
            Some("summary") => {
                let peaks = event["peak_rss_mib"].as_array().into_iter().flatten();
                self.peak_mib = peaks.filter_map(Value::as_f64).sum();
                self.step_secs = number("step_s_median");
                let rate = serde_json::from_value(event.clone());
                self.items_per_sec = rate.map_or(f64::NAN, |rate: ItemRate| rate.per_s);
            }
            _ => {}
        }
    }

    fn line(&self) -> String {
        match &self.failed {
            Some(why) => format!("{:>10}   {why}", self.size),
            None => format!(
                "{:>10} {:>10.0} {:>10.4} {:>10.1}",
                self.size, self.peak_mib, self.step_secs, self.items_per_sec
            ),
        }
    }
}

/// The reason for ending the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// A larger batch would not fit.
    Memory,
    /// A step would take more than all of the data.
    Data,
    /// The last run took long.
    Time,
    /// The last run failed.
    Failure,
    /// The maximum number of runs was reached.
    Trials,
}

/// The result of a search.
#[derive(Debug)]
struct Search {
    /// The successful runs, by size.
    trials: Vec<Trial>,
    end: End,
}

/// Searches sizes; `try_size` runs one.
fn search(limit_mib: f64, try_size: &mut dyn FnMut(u64) -> Result<Trial>) -> Result<Search> {
    let mut trials: Vec<Trial> = Vec::new();
    let end = loop {
        let doubled = trials.last().map_or(1, |last| last.size * 2);
        if trials.len() > MAX_DOUBLINGS as usize {
            break End::Trials;
        }
        if trials.last().is_some_and(|last| last.epochs_a_step >= 1.0) {
            break End::Data;
        }
        if trials.last().is_some_and(|last| last.run_secs > PATIENCE_SECS) {
            break End::Time;
        }
        if expected(&trials, doubled) > limit_mib {
            break End::Memory;
        }
        let trial = try_size(doubled)?;
        match (&trial.failed, trials.is_empty()) {
            (Some(why), true) => {
                return Err(Error::other(format!(
                    "--find-batch-size: the run with one sample {why}; what it says is above"
                )));
            }
            (Some(_), false) => break End::Failure,
            (None, _) => trials.push(trial),
        }
    };
    if end == End::Memory
        && let Some(between) = largest_below(&trials, limit_mib)
    {
        let trial = try_size(between)?;
        if trial.failed.is_none() && trial.peak_mib <= limit_mib {
            trials.push(trial);
        }
    }
    // A step larger than the data would repeat samples.
    trials.retain(|trial| {
        trial.peak_mib <= limit_mib && (trial.size == 1 || trial.epochs_a_step <= 1.0)
    });
    Ok(Search { trials, end })
}

/// Expected MiB, extrapolated linearly from the last two sizes.
fn expected(trials: &[Trial], size: u64) -> f64 {
    match trials {
        [.., a, b] => b.peak_mib + mib_a_sample(a, b) * (size - b.size) as f64,
        [one] => one.peak_mib,
        [] => 0.0,
    }
}

fn mib_a_sample(a: &Trial, b: &Trial) -> f64 {
    ((b.peak_mib - a.peak_mib) / (b.size - a.size) as f64).max(0.0)
}

/// The largest size that should fit, if it is at least a tenth above the last and below its double.
fn largest_below(trials: &[Trial], limit_mib: f64) -> Option<u64> {
    let [.., a, b] = trials else { return None };
    let more = ((limit_mib - b.peak_mib) / mib_a_sample(a, b)).floor();
    let size = b.size + (more.max(0.0) as u64).min(b.size - 1);
    (size * 10 >= b.size * 11).then_some(size)
}

impl Search {
    fn largest(&self) -> Option<&Trial> {
        self.trials.last()
    }

    fn fastest(&self) -> Option<&Trial> {
        self.trials.iter().max_by(|a, b| a.items_per_sec.total_cmp(&b.items_per_sec))
    }

    fn text(&self, key: &str, limit_mib: f64) -> String {
        let Some(largest) = self.largest() else {
            return format!("not even one sample fits into {limit_mib:.0} MiB\n");
        };
        let why = match self.end {
            End::Memory => format!("a larger one would not fit into {limit_mib:.0} MiB"),
            End::Data => "twice as many are more than the training data".to_owned(),
            End::Time => {
                format!("its {STEPS} steps took {:.0} s; no larger one was tried", largest.run_secs)
            }
            End::Failure => "the run with twice as many failed".to_owned(),
            End::Trials => "no larger one was tried".to_owned(),
        };
        let size = largest.size;
        let mut text = format!("the largest batch: --set {key}={size} ({why})\n");
        if let Some(fastest) = self.fastest().filter(|fastest| fastest.size != size) {
            let gain = 100.0 * (fastest.items_per_sec / largest.items_per_sec - 1.0);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "the most items a second: --set {key}={} ({gain:.0} % more)",
                fastest.size
            );
        }
        text
    }

    fn to_json(&self, key: &str, limit_mib: f64) -> Value {
        let trial = |trial: &Trial| {
            json!({
                "batch_size": trial.size, "peak_rss_mib": trial.peak_mib, "step_s_median": trial.step_secs,
                "items_per_s": trial.items_per_sec,
            })
        };
        json!({
            "event": "batch_size", "key": key, "limit_mib": limit_mib,
            "largest": self.largest().map(|trial| trial.size),
            "fastest": self.fastest().map(|trial| trial.size),
            "runs": self.trials.iter().map(trial).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    /// Searches with runs that take 100 MiB plus `mib_a_sample` per sample, on `samples` samples.
    fn sizes(limit_mib: f64, mib_a_sample: f64, samples: f64) -> (Vec<u64>, Search) {
        let mut tried = Vec::new();
        let search = search(limit_mib, &mut |size| {
            tried.push(size);
            Ok(Trial {
                size,
                peak_mib: 100.0 + mib_a_sample * size as f64,
                items_per_sec: 100.0 - size as f64,
                epochs_a_step: size as f64 / samples,
                ..Trial::default()
            })
        });
        (tried, search.unwrap())
    }

    #[test]
    fn finds_the_largest_batch_that_fits() {
        let (tried, found) = sizes(200.0, 3.0, 1e9);
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 33][..6], "33 is hardly more");
        assert_eq!((found.largest().unwrap().size, found.end), (32, End::Memory));
        let (tried, found) = sizes(200.0, 2.0, 1e9);
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 50]);
        assert_eq!(found.largest().unwrap().size, 50);
        insta::assert_snapshot!(found.text("data.batch_size", 200.0), @"
        the largest batch: --set data.batch_size=50 (a larger one would not fit into 200 MiB)
        the most items a second: --set data.batch_size=1 (98 % more)
        ");
    }

    #[test]
    fn step_is_bounded_by_the_data() {
        let (tried, found) = sizes(1e9, 1.0, 20.0);
        assert_eq!(tried, [1, 2, 4, 8, 16, 32]);
        assert_eq!((found.largest().unwrap().size, found.end), (16, End::Data));
        let (tried, found) = sizes(1e12, 0.0, f64::INFINITY);
        assert_eq!((tried.len(), found.end), (26, End::Trials));
    }

    #[test]
    fn failed_run_bounds_the_size() {
        let run = |from: u64| {
            search(1e9, &mut |size| {
                let failed = (size >= from).then(|| "failed (1)".to_owned());
                Ok(Trial { size, failed, peak_mib: size as f64, ..Trial::default() })
            })
        };
        let found = run(5).unwrap();
        assert_eq!((found.largest().unwrap().size, found.end), (4, End::Failure));
        assert_says!(run(1).unwrap_err(), "--find-batch-size … one sample failed (1) …");
        let none = sizes(50.0, 1.0, 1e9).1;
        assert_says!(none.text("data.batch_size", 50.0), "not even one sample fits into 50 MiB");
    }
}
