//! Kills, signals and frozen ranks at random moments, from the program's `exec` to its end: during
//! start, training, saves, validation, shutdown, and resumes after an earlier kill.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use fastrand::Rng;
use fulgurite::core::checkpoint::tools::{AnyCheckpoint, verify};
use fulgurite::core::checkpoint::{CheckpointIO as _, LAST, is_temporary};
use fulgurite_checkpoint_local::LocalDirectory;
use rustix::process::{Signal, kill_process, kill_process_group};

use super::trials::{Trial, trials};
use crate::program::{Job, Run, Running, Scratch, left_in_shared_memory};

/// Steps of an undisturbed run.
const STEPS: u64 = 24;
/// Steps of the longest resumed run.
const LONGEST: u64 = 60;
/// `trainer.timeout_secs` of a job with a frozen rank.
const FROZEN_TIMEOUT: u64 = 2;
/// Time limit for a job, to detect hangs.
const OVER: Duration = Duration::from_secs(10);

/// A disturbance of a job.
#[derive(Debug, Clone, Copy)]
enum Strike {
    KillRank(usize),
    KillSupervisor,
    Signal(Signal, To),
    /// Two signals to the supervisor in a row.
    Twice(Signal, Signal),
    Freeze(usize),
    /// The whole job is stopped for longer than its timeout, then continued.
    Suspend,
}

/// The receiver of a signal.
#[derive(Debug, Clone, Copy)]
enum To {
    Supervisor,
    Rank(usize),
    /// All processes, as from a terminal.
    Everybody,
}

impl Strike {
    fn random(rng: &mut Rng, devices: usize) -> Self {
        let rank = rng.usize(..devices);
        let mut signal = || [Signal::INT, Signal::TERM, Signal::USR1][rng.usize(..3)];
        let (first, second) = (signal(), signal());
        if devices == 1 {
            // A job on one device has no supervisor.
            return match rng.u32(..3) {
                0 => Self::KillSupervisor,
                1 => Self::Signal(first, To::Supervisor),
                _ => Self::Signal(first, To::Everybody),
            };
        }
        match rng.u32(..20) {
            0..6 => Self::KillRank(rank),
            6..9 => Self::KillSupervisor,
            9 => Self::Freeze(rank),
            10 => Self::Suspend,
            11 => Self::Twice(first, second),
            _ => {
                let to = [To::Supervisor, To::Rank(rank), To::Everybody][rng.usize(..3)];
                Self::Signal(first, to)
            }
        }
    }

    /// Carries out the strike; reports whether a target process existed.
    fn strike(self, running: &Running) -> Struck {
        let rank = |rank, signal| match running.rank_if_any(rank) {
            Some(pid) => kill_process(pid, signal).is_ok(),
            None => false,
        };
        let supervisor = |signal| kill_process(running.pid(), signal).is_ok();
        let alive = match self {
            Self::KillRank(r) => rank(r, Signal::KILL),
            Self::KillSupervisor => supervisor(Signal::KILL),
            Self::Freeze(r) => rank(r, Signal::STOP),
            Self::Suspend => {
                let all = |signal| kill_process_group(running.pid(), signal).is_ok();
                let stopped = all(Signal::STOP);
                std::thread::sleep(Duration::from_millis(1000 * FROZEN_TIMEOUT + 500));
                stopped && all(Signal::CONT)
            }
            Self::Signal(signal, To::Rank(r)) => rank(r, signal),
            Self::Signal(signal, To::Supervisor) => supervisor(signal),
            Self::Signal(signal, To::Everybody) => {
                kill_process_group(running.pid(), signal).is_ok()
            }
            Self::Twice(first, second) => {
                let alive = supervisor(first);
                std::thread::sleep(Duration::from_millis(20));
                supervisor(second);
                alive
            }
        };
        Struck { alive, at: Instant::now() }
    }

    /// Checks how the job ended. A strike that came too late leaves a completed run.
    fn check(self, run: &Run, struck: Struck) {
        let errors: Vec<_> = run.stderr.lines().filter(|line| line.contains("error")).collect();
        let text = format!("{self:?}: {}\n{}{}", run.status, run.stdout, run.stderr);
        if run.code() == Some(0) {
            assert!(run.stdout.contains("\"summary\"") && errors.is_empty(), "{text}");
            return;
        }
        assert!(struck.alive, "{text}");
        assert!(!run.stderr.contains("panicked"), "{text}");
        match self {
            Self::KillRank(rank) => {
                let expected = format!("error: rank {rank} was killed by signal 9 (SIGKILL)");
                assert_eq!((run.code(), errors), (Some(137), vec![&*expected]), "{text}");
            }
            Self::KillSupervisor => assert_eq!(run.signal(), Some(9), "{text}"),
            Self::Suspend => panic!("{text}"),
            Self::Signal(signal, _) => {
                // The program may not have installed its handlers yet.
                let code = run.code().or(run.signal().map(|signal| 128 + signal));
                assert_eq!((code, errors), (Some(128 + signal.as_raw()), vec![]), "{text}");
            }
            Self::Twice(first, second) => {
                let code = run.code().or(run.signal().map(|signal| 128 + signal)).unwrap();
                let either = [first, second].map(|signal| 128 + signal.as_raw());
                assert!(either.contains(&code) && errors.is_empty(), "{text}");
            }
            Self::Freeze(rank) => {
                assert_eq!(run.code(), Some(1), "{text}");
                // Another rank may fail at the same moment.
                assert!(errors[1..].iter().all(|error| error.contains("failed too")), "{text}");
                let (rank, error) = (rank.to_string(), errors[0]);
                let (_, missing) = error
                    .split_once("waited for rank ")
                    .or_else(|| error.split_once("have not come: "))
                    .unwrap_or_else(|| panic!("{text}"));
                let last = missing.rsplit_once("which waits for rank ");
                let (blamed, _) = match last {
                    Some((_, last)) => last.split_once(", which waits for nobody").unwrap(),
                    None => missing.split_once([' ', '.']).unwrap_or((missing, "")),
                };
                assert_eq!(blamed, rank, "{text}");
            }
        }
    }
}

/// Record of a strike.
#[derive(Clone, Copy)]
struct Struck {
    /// Whether a target process existed.
    alive: bool,
    at: Instant,
}

/// A delay after the program's start; half of the delays hit the start-up.
fn moment(rng: &mut Rng) -> Duration {
    let limit = if rng.bool() { 60_000 } else { 450_000 };
    Duration::from_micros(rng.u64(..limit))
}

/// Starts the job, strikes, waits for its end, and checks that nothing remains.
fn struck(job: &Job, scratch: &Scratch, strike: Strike, moment: Duration, hits: &mut Hits) -> Run {
    let running = job.start();
    let until = Instant::now() + moment;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200).min(until - Instant::now()));
    }
    let struck = strike.strike(&running);
    running.until_gone();
    let took = struck.at.elapsed();
    let frozen = match strike {
        Strike::Freeze(_) => Duration::from_secs(FROZEN_TIMEOUT),
        _ => Duration::ZERO,
    };
    let run = running.wait();
    assert!(took < OVER + frozen, "{strike:?}: over after {took:?}:\n{}", run.stderr);
    let left: Vec<_> = fs::read_dir(scratch.temporary()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{strike:?}: {left:?}");
    assert_eq!(left_in_shared_memory(), [""; 0], "{strike:?}");
    strike.check(&run, struck);
    let phase = match (run.code(), run.losses_so_far().len()) {
        (Some(0), _) => "too late, or gone on",
        (_, 0) => "before the first step",
        _ => "after the first step",
    };
    let kind = match strike {
        Strike::KillRank(_) => "rank killed",
        Strike::KillSupervisor => "first process killed",
        Strike::Signal(..) => "signal",
        Strike::Twice(..) => "two signals",
        Strike::Freeze(_) => "rank frozen",
        Strike::Suspend => "job suspended",
    };
    *hits.entry((kind, phase)).or_default() += 1;
    run
}

/// Number of strikes by kind and by phase of the job.
type Hits = BTreeMap<(&'static str, &'static str), u32>;

/// Verifies all checkpoints, and returns the step of the newest one.
fn newest(scratch: &Scratch) -> u64 {
    let place = scratch.path().join("kept");
    if !place.exists() {
        return 0;
    }
    let entries = LocalDirectory::new(&place).list("").unwrap();
    let kept = entries.iter().filter(|entry| !is_temporary(&entry.name) && entry.name != LAST);
    let step = |name: &str| {
        let checkpoint = AnyCheckpoint::open(place.join(name)).unwrap();
        let damages = verify(&checkpoint, &mut |_| {}).damages;
        assert!(damages.is_empty(), "{name}: {damages:?}");
        name["step-".len()..].parse().unwrap()
    };
    kept.map(|entry| step(&entry.name)).max().unwrap_or(0)
}

/// Asserts that the losses equal the losses of an undisturbed run, bit by bit.
fn assert_equal_to_the_bit(found: &BTreeMap<u64, f64>, whole: &BTreeMap<u64, f64>) {
    for (step, loss) in found {
        assert_eq!(loss.to_bits(), whole[step].to_bits(), "step {step}");
    }
}

/// The losses of undisturbed runs by strategy and number of ranks.
type Whole = BTreeMap<(&'static str, usize), BTreeMap<u64, f64>>;

fn training<'a>(scratch: &'a Scratch, strategy: &str, devices: usize) -> Job<'a> {
    scratch.small().on(strategy, devices, 1).set(&[
        "scheduler=constant",
        "data.shuffle=true",
        "data.validation_fraction=0.2",
        "trainer.val_check_interval=3",
        "model.num_key_value_heads=2",
        "model.vocab_size=54",
        "model.intermediate_size=38",
        "model.dropout=0.1",
        "trainer.loggers=[]",
        "trainer.enable_progress_bar=false",
        "trainer.accumulate_grad_batches=2",
    ])
}

fn kill_once(trial: &mut Trial, whole: &mut Whole, hits: &mut Hits) {
    let rng = &mut trial.rng;
    const MESH: &str = "{ type = \"model_parallel\", tensor_parallel_size = 2 }";
    const STAGES: &str = "{ type = \"model_parallel\", pipeline_parallel_size = 2 }";
    let jobs = [
        ("fsdp", 2),
        ("ddp", 2),
        ("fsdp", 3),
        (MESH, 4),
        (STAGES, 2),
        (STAGES, 4),
        ("single_device", 1),
    ];
    let (strategy, devices) = jobs[rng.usize(..jobs.len())];
    let scratch = Scratch::with_tokens();
    let job = training(&scratch, strategy, devices);
    let whole = whole.entry((strategy, devices)).or_insert_with(|| {
        let until = format!("trainer.max_steps={LONGEST}");
        job.clone().set(&[&until]).succeed().losses()
    });
    let saving = job.set(&[
        "trainer.ckpt_path=last",
        "checkpoint.dir=kept",
        "checkpoint.save_last=true",
        "checkpoint.keep_last=2",
        &format!("checkpoint.every_n_steps={}", 1 + rng.u32(..3)),
        &format!("checkpoint.async_save={}", rng.bool()),
    ]);
    // The second strike hits the resume.
    for _ in 0..1 + rng.u32(..2) {
        let strike = Strike::random(rng, devices);
        let timeout = match strike {
            Strike::Freeze(_) | Strike::Suspend => FROZEN_TIMEOUT,
            // Longer than any job may take to end.
            _ => 600,
        };
        let steps = newest(&scratch) + STEPS;
        let job = saving.clone().set(&[
            &format!("trainer.timeout_secs={timeout}"),
            &format!("trainer.max_steps={steps}"),
        ]);
        let run = struck(&job, &scratch, strike, moment(rng), hits);
        assert_equal_to_the_bit(&run.losses_so_far(), whole);
    }
    let from = newest(&scratch);
    let until = format!("trainer.max_steps={}", from + 2);
    let resumed = saving.set(&[&until]).succeed().losses();
    let steps: Vec<_> = resumed.keys().copied().collect();
    assert_eq!(steps, [from + 1, from + 2], "trial {}", trial.seed);
    assert_equal_to_the_bit(&resumed, whole);
}

#[test]
fn ended_job_leaves_nothing_behind() {
    let mut whole = Whole::new();
    let mut hits = Hits::new();
    trials(6, |trial| kill_once(trial, &mut whole, &mut hits));
    for ((kind, phase), count) in hits {
        eprintln!("{kind}, {phase}: {count}");
    }
}
