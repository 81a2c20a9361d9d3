//! Programs that are killed repeatedly while they save.
//!
//! `FULGURITE_CRASH_ROUNDS` sets the number of rounds (20), `FULGURITE_CRASH_SEED` the moments.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::program::Scratch;
use fulgurite::core::checkpoint::{
    CheckpointIO, DistributedCheckpoint, LAST, is_temporary, last, latest,
};
use fulgurite_checkpoint_local::LocalDirectory;
use rustix::process::{Signal, kill_process};

/// Small random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // Knuth's multiplier; the upper bits are the best ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % sides
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Checks that everything in the directory that looks like a checkpoint is complete. Returns the
/// step of the last one, and their number.
fn verify(place: &Path) -> (u64, usize) {
    let io = LocalDirectory::new(place);
    let mut steps = Vec::new();
    for entry in io.list("").unwrap() {
        if is_temporary(&entry.name) || entry.name == LAST {
            continue;
        }
        let checkpoint = DistributedCheckpoint::open(place.join(&entry.name)).unwrap();
        checkpoint.verify().unwrap();
        steps.push(checkpoint.manifest().step);
    }
    let newest = steps.iter().copied().max();
    assert_eq!(latest(&io).unwrap().map(|c| c.step), newest);
    let last = last(&io).unwrap().expect("a checkpoint").step;
    // The kill may have come between the commit and the pointer.
    assert!(Some(last) == newest || Some(last + 1) == newest, "{last} of {steps:?}");
    (last, steps.len())
}

#[test]
fn no_crash_tears_a_checkpoint() {
    let rounds = number("FULGURITE_CRASH_ROUNDS", 20);
    let mut dice = Dice(number("FULGURITE_CRASH_SEED", 7));
    let scratch = Scratch::with_tokens();
    let place = scratch.path().join("kept");
    let job = scratch.small().on("fsdp", 2, 3).set(&[
        "scheduler=constant",
        "data.shuffle=true",
        "model.dropout=0.1",
        "trainer.loggers=[]",
        "trainer.enable_progress_bar=false",
    ]);
    let saving = job.clone().set(&[
        "trainer.ckpt_path=last",
        "checkpoint.dir=kept",
        "checkpoint.every_n_steps=1",
        "checkpoint.keep_last=2",
    ]);
    let mut losses: BTreeMap<u64, f64> = BTreeMap::new();
    let mut at = 0;
    for round in 0..rounds {
        let background = format!("checkpoint.async_save={}", round % 2 == 0);
        let endless = saving.clone().set(&[&background, "trainer.max_steps=1000000"]);
        let running = endless.start();
        // A moment within a step, or within the save after it.
        running.reach(at + 1 + dice.roll(3));
        let moment = Instant::now() + Duration::from_micros(dice.roll(40_000));
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        // Kill one rank, or the supervisor and with it all ranks.
        match dice.roll(3) {
            2 => running.signal(Signal::KILL),
            rank => kill_process(running.rank(rank as usize), Signal::KILL).unwrap(),
        }
        running.until_gone();
        let run = running.wait();
        for (step, loss) in run.losses_so_far() {
            let before = losses.insert(step, loss);
            assert!(before.is_none_or(|before| before == loss), "step {step} in round {round}");
        }
        let (last, count) = verify(&place);
        // Two kept, the one that the run resumed from, and one about to be removed.
        assert!(count <= 4, "{count} checkpoints after round {round}");
        at = last;
    }
    let end = at.max(losses.keys().copied().max().unwrap()) + 2;
    let end = format!("trainer.max_steps={end}");
    let run = saving.set(&[&end]).succeed();
    losses.extend(run.losses());
    assert_eq!(run.losses().into_keys().next(), Some(at + 1));
    // No torn file remains.
    let left = LocalDirectory::new(&place).list("").unwrap();
    assert!(left.iter().all(|entry| !is_temporary(&entry.name)), "{left:?}");
    assert_eq!(verify(&place).1, 3, "two and the one that it resumed from");

    let whole = job.set(&[&end]).succeed();
    for (step, loss) in losses {
        assert_eq!(whole.losses()[&step], loss, "step {step}");
    }
}
