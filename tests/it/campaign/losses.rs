//! Ranks of elastic trainings, lost at random moments: during start, training, validation, saves,
//! changes of the generation, and at the end.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::trials::{Trial, trials};
use crate::program::{Job, Run, Running, Scratch, assert_close};

/// What struck trainings, and how they went on.
#[derive(Debug, Default)]
pub(super) struct Tally {
    strikes: BTreeMap<&'static str, usize>,
    generations: usize,
    /// Of generations with ranks that were in the one before.
    lost_s: Vec<f64>,
    repeated_steps: u64,
}

impl Tally {
    pub(super) fn count(&mut self, strike: &'static str) {
        *self.strikes.entry(strike).or_default() += 1;
    }

    /// Adds the generations that programs reported, and returns their number.
    pub(super) fn add<'a>(&mut self, runs: impl IntoIterator<Item = &'a Run>) -> usize {
        let begin = "{\"event\":\"generation\",";
        let lines = runs.into_iter().flat_map(|run| run.stdout.lines());
        let events = lines.filter(|line| line.starts_with(begin));
        let before = self.generations;
        for line in events {
            // A killed program may have written a part of its last line.
            let Ok(event) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            self.generations += 1;
            self.repeated_steps += event["repeated_steps"].as_u64().expect("a number of steps");
            self.lost_s.extend(event["lost_s"].as_f64().filter(|lost_s| *lost_s > 0.0));
        }
        self.generations - before
    }

    #[track_caller]
    pub(super) fn assert_gone_on(mut self) {
        self.lost_s.sort_by(f64::total_cmp);
        let of_hundred = |part: usize| self.lost_s.get(self.lost_s.len() * part / 100);
        eprintln!(
            "{:?}; {} generations, {} steps taken again; seconds lost: median {:?}, of 90 % {:?}, \
             most {:?}",
            self.strikes,
            self.generations,
            self.repeated_steps,
            of_hundred(50),
            of_hundred(90),
            self.lost_s.last()
        );
        assert!(self.generations > 0, "no trial lost a rank in time");
    }
}

/// Within this time after a strike, a training is mostly still on the way to its next generation.
pub(super) const SOON: Duration = Duration::from_millis(400);

/// The ranks of a training.
struct Layout {
    strategy: &'static str,
    devices: usize,
    /// Fewest ranks with which it goes on.
    least: usize,
}

impl Layout {
    fn choose(rng: &mut fastrand::Rng) -> Self {
        let (strategy, devices, least) = [
            ("ddp", rng.usize(2..7), 2),
            ("fsdp", rng.usize(2..7), 2),
            ("{ type = \"hsdp\", data_parallel_replicate_size = 2 }", 4, 4),
            ("{ type = \"model_parallel\", tensor_parallel_size = 2 }", 4, 4),
        ][rng.usize(..4)];
        Self { strategy, devices, least }
    }
}

/// Validations and saves in short intervals.
fn validating(job: Job<'_>) -> Job<'_> {
    job.set(&[
        "trainer.val_check_interval=7",
        "data.validation_fraction=0.2",
        "checkpoint.every_n_steps=9",
        "trainer.ema_decay=0.9",
    ])
}

/// Kills or stops a rank. Too late if the program has ended, or the rank is not there any more.
fn strike(running: &Running, rank: usize, rng: &mut fastrand::Rng, tally: &mut Tally) -> String {
    let (signal, name) = match rng.u32(..6) {
        0 => (Signal::STOP, "frozen ranks"),
        _ => (Signal::KILL, "killed ranks"),
    };
    let pid = running.find_rank(rank);
    let is_struck = pid.is_some_and(|pid| kill_process(pid, signal).is_ok());
    tally.count(if is_struck { name } else { "ranks that were not there" });
    format!("{rank} {signal:?} {is_struck}")
}

/// Kills and stops random ranks, one to three times. The run goes on to its end, with the losses of
/// an undisturbed run.
fn lose_some(trial: &mut Trial, tally: &mut Tally) {
    let rng = &mut trial.rng;
    let scratch = Scratch::with_tokens();
    let Layout { strategy, devices, least } = Layout::choose(rng);
    let job = scratch.small().on(strategy, devices, 2).set(&[
        "trainer.max_steps=80",
        "trainer.enable_plan=false",
        &format!("trainer.accumulate_grad_batches={}", rng.usize(1..3)),
    ]);
    let mut disturbed = job.clone().set(&[
        "trainer.elastic.enabled=true",
        &format!("trainer.elastic.replicas={}", rng.usize(..2)),
    ]);
    let replaces = rng.bool() || devices == least;
    let most = if replaces { rng.usize(1..4) } else { 1 };
    disturbed = disturbed.set(&[match replaces {
        true => "trainer.elastic.max_restarts=3",
        false => "trainer.elastic.max_restarts=0",
    }]);
    let (job, disturbed) = match rng.bool() {
        true => (validating(job), validating(disturbed)),
        false => (job, disturbed),
    };
    let expected = job.succeed().losses();
    let running = disturbed.start();
    let mut struck = Vec::new();
    for _ in 0..most {
        let wait = Duration::from_millis(rng.u64(10..700));
        std::thread::sleep(wait);
        let rank = rng.usize(..devices);
        struck.push((wait, strike(&running, rank, rng, tally)));
    }
    let run = running.wait();
    let text = format!("{struck:?}: {}\n{}{}", run.status, run.stdout, run.stderr);
    // A rank that is lost after another has left ends the run.
    if run.code() != Some(0) {
        let ended = run.stderr.contains("was killed by") && !run.stderr.contains("panicked");
        assert!(ended && run.stdout.contains("\"summary\""), "{text}");
        return;
    }
    assert!(!run.stderr.contains("error"), "{text}");
    eprintln!("{strategy} on {devices}: {struck:?}, {} times", tally.add([&run]));
    assert_close(&run.losses(), &expected, 1e-6);
}

/// Kills and stops random ranks until the last steps. The run has the losses of an undisturbed run
/// to the bit, as all of them are replaced.
fn storm(trial: &mut Trial, tally: &mut Tally) {
    const STEPS: u64 = 1500;
    let rng = &mut trial.rng;
    let scratch = Scratch::with_tokens();
    let Layout { strategy, devices, .. } = Layout::choose(rng);
    let job = scratch.small().on(strategy, devices, 2).set(&[
        &format!("trainer.max_steps={STEPS}"),
        "trainer.enable_plan=false",
        &format!("trainer.accumulate_grad_batches={}", rng.usize(1..3)),
    ]);
    let job = if rng.bool() { validating(job) } else { job };
    let expected = job.succeed().losses();
    let replicas = rng.usize(..2);
    let job = job.set(&[
        "trainer.elastic.enabled=true",
        "trainer.elastic.max_restarts=1000",
        &format!("trainer.elastic.replicas={replicas}"),
        // Without copies, a loss takes all steps since the last checkpoint again.
        if replicas == 0 { "checkpoint.every_n_steps=20" } else { "checkpoint.save_last=false" },
    ]);
    let running = job.start();
    // A loss before the first step is not yet one of an elastic run.
    running.reach(1);
    let (mut struck, mut last) = (0, None);
    let mut waited = Duration::MAX;
    // Without members the run has ended, too early.
    while running.last_step().is_none_or(|step| step + 50 < STEPS) && !running.members().is_empty()
    {
        // The last rank that was struck is often the one that joins now.
        let joins = last.filter(|_| rng.u32(..3) == 0);
        let rank = joins.unwrap_or_else(|| rng.usize(..devices));
        strike(&running, rank, rng, tally);
        if waited < SOON {
            tally.count("of these, soon after another");
        }
        if waited < SOON && last == Some(rank) {
            tally.count("of these, on the rank that joins");
        }
        (struck, last) = (struck + 1, Some(rank));
        waited = Duration::from_millis(if rng.bool() { rng.u64(..400) } else { rng.u64(..2500) });
        std::thread::sleep(waited);
    }
    let run = running.wait();
    let what = format!("{strategy} on {devices}, replicas {replicas}, {struck} strikes");
    assert_eq!(run.code(), Some(0), "{what}: {}\n{}", run.stdout, run.stderr);
    assert!(!run.stderr.contains("error"), "{what}: {}", run.stderr);
    eprintln!("{what}, {} times", tally.add([&run]));
    assert_eq!(run.losses(), expected, "{what}");
}

#[test]
fn random_losses_leave_the_training() {
    let mut tally = Tally::default();
    trials(8, |trial| lose_some(trial, &mut tally));
    tally.assert_gone_on();
}

#[test]
#[ignore = "takes half a minute a trial"]
fn storms_leave_the_training() {
    let mut tally = Tally::default();
    trials(1, |trial| storm(trial, &mut tally));
    tally.assert_gone_on();
}
