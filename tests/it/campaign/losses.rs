//! Ranks of elastic trainings, lost at random moments: during start, training, validation, saves,
//! changes of the generation, and at the end.

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::trials::trials;
use crate::program::{Scratch, assert_close};

/// Kills and stops random ranks, one to three times a run. Every run goes on to its end, with the
/// losses of an undisturbed run.
#[test]
fn random_losses_leave_the_training() {
    let mut generations = 0;
    trials(8, |trial| {
        let rng = &mut trial.rng;
        let scratch = Scratch::with_tokens();
        let (strategy, devices) = [
            ("ddp", rng.usize(2..5)),
            ("fsdp", rng.usize(2..5)),
            ("{ type = \"hsdp\", data_parallel_replicate_size = 2 }", 4),
        ][rng.usize(..3)];
        let job = scratch.small().on(strategy, devices, 2).set(&[
            "trainer.max_steps=80",
            "trainer.enable_plan=false",
            &format!("trainer.accumulate_grad_batches={}", rng.usize(1..3)),
        ]);
        let mut disturbed = job.clone().set(&[
            "trainer.elastic.enabled=true",
            &format!("trainer.elastic.replicas={}", rng.usize(..2)),
        ]);
        // The step without which nothing is left to divide: two ranks of replicas of shards.
        let least = if strategy.contains("hsdp") { 4 } else { 2 };
        let replaces = rng.bool() || devices == least;
        let most = if replaces { rng.usize(1..4) } else { 1 };
        disturbed = disturbed.set(&[match replaces {
            true => "trainer.elastic.max_restarts=3",
            false => "trainer.elastic.max_restarts=0",
        }]);
        let validates = [
            "trainer.val_check_interval=7",
            "data.validation_fraction=0.2",
            "checkpoint.every_n_steps=9",
            "trainer.ema_decay=0.9",
        ];
        let (job, disturbed) = match rng.bool() {
            true => (job.set(&validates), disturbed.set(&validates)),
            false => (job, disturbed),
        };
        let expected = job.succeed().losses();
        let running = disturbed.start();
        let mut struck = Vec::new();
        for _ in 0..most {
            let wait = Duration::from_millis(rng.u64(10..700));
            std::thread::sleep(wait);
            let rank = rng.usize(..devices);
            let signal = if rng.u32(..6) == 0 { Signal::STOP } else { Signal::KILL };
            // Too late if the program has ended, or the rank is not there any more.
            let pid = running.find_rank(rank);
            let alive = pid.is_some_and(|pid| kill_process(pid, signal).is_ok());
            struck.push((wait, rank, signal, alive));
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
        let begun = run.events_of("generation").len();
        generations += begun;
        eprintln!("{strategy} on {devices}: {struck:?}, {begun} times");
        assert_close(&run.losses(), &expected, 1e-6);
    });
    assert!(generations > 0, "no trial lost a rank in time");
}
