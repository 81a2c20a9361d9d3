//! File systems that are full or read-only. They are mounted for the program alone; where the
//! system does not allow such mounts, the tests say so and pass.

use std::fs;
use std::path::Path;

use crate::program::{Job, Scratch, can_mount};
use fulgurite::core::checkpoint::is_temporary;
use fulgurite::core::checkpoint::tools::{AnyCheckpoint, verify};

const FULL: &str =
    "{ type = \"model_parallel\", tensor_parallel_size = 1, save_distributed_checkpoint = false }";

fn saving<'a>(scratch: &'a Scratch, strategy: &str) -> Job<'a> {
    let endless = ["trainer.max_steps=1000", "scheduler=constant", "checkpoint.dir=kept"];
    scratch.small().on(strategy, 2, 3).set(&endless).set(&["checkpoint.every_n_steps=1"])
}

/// The step of the newest checkpoint in `place`; all checkpoints must be complete.
fn newest(place: &Path) -> u64 {
    let entries =
        fs::read_dir(place).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let names: Vec<_> = entries.filter(|name| name.starts_with("step-")).collect();
    for name in &names {
        let checkpoint = AnyCheckpoint::open(place.join(name)).unwrap();
        assert!(verify(&checkpoint, &mut |_| {}).damages.is_empty(), "{name}");
    }
    names.iter().map(|name| name["step-".len()..].parse().unwrap()).max().unwrap()
}

/// Asserts that a run resumes from the directory's checkpoint.
fn resumes(job: Job, place: &str, step: u64) {
    let path = format!("trainer.ckpt_path={place}/step-{step:08}");
    let until = format!("trainer.max_steps={}", step + 1);
    let run = job.set(&[&path, &until, "checkpoint.dir=other"]).succeed();
    assert_eq!(run.losses().into_keys().collect::<Vec<_>>(), [step + 1]);
}

#[test]
fn full_disk_keeps_earlier_saves() {
    if !can_mount() {
        return;
    }
    for (strategy, background) in [("fsdp", false), ("fsdp", true), (FULL, false)] {
        let scratch = Scratch::with_tokens();
        fs::create_dir(scratch.path().join("kept")).unwrap();
        let background = format!("checkpoint.async_save={background}");
        let job = saving(&scratch, strategy);
        let stderr = job
            .clone()
            .set(&[&background, "checkpoint.keep_last=1000"])
            .mounting(
                "mount -t tmpfs -o size=1m none kept; code=0; \"$@\" || code=$?; \
                 cp -r kept copy; exit $code",
            )
            .fail();
        let first = stderr.lines().find(|line| line.starts_with("error")).unwrap_or(&stderr);
        assert!(first.contains(": writing kept/step-"), "{stderr}");
        assert!(first.contains("No space left on device"), "{stderr}");
        let copy = scratch.path().join("copy");
        let step = newest(&copy);
        assert!(step > 1, "{stderr}");
        let left: Vec<_> = fs::read_dir(&copy)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| is_temporary(name))
            .collect();
        assert!(left.is_empty(), "{left:?}");
        resumes(job, "copy", step);
    }
}

#[test]
fn run_goes_on_until_the_disk_has_space() {
    if !can_mount() {
        return;
    }
    for (strategy, background) in [("fsdp", false), ("fsdp", true), (FULL, false)] {
        let scratch = Scratch::with_tokens();
        fs::create_dir(scratch.path().join("kept")).unwrap();
        let background = format!("checkpoint.async_save={background}");
        let keys = ["checkpoint.max_failed_saves=1000", "checkpoint.keep_last=2", &background];
        let running = saving(&scratch, strategy)
            .set(&keys)
            .set(&["trainer.max_steps=300"])
            .mounting(
                "mount -t tmpfs -o size=1m none kept; head -c 1M /dev/zero > kept/fill; \
                 (until [ -e make-space ]; do sleep 0.02; done; rm kept/fill) & \
                 code=0; \"$@\" || code=$?; cp -r kept copy; exit $code",
            )
            .start();
        running.until("a failed save", |this| (this.count_of("save_failed") > 0).then_some(()));
        scratch.file("make-space", "");
        let run = running.wait();
        assert_eq!(run.code(), Some(0), "{}", run.stderr);
        assert!(run.stderr.contains("a save failed: writing"), "{}", run.stderr);
        assert!(run.stderr.contains("No space left on device"), "{}", run.stderr);
        let copy = scratch.path().join("copy");
        assert_eq!(newest(&copy), 300);
        assert_eq!(fs::read_dir(&copy).unwrap().count(), 3, "two checkpoints and `last`");
    }
}

#[test]
fn read_only_place_keeps_earlier_saves() {
    if !can_mount() {
        return;
    }
    for strategy in ["fsdp", FULL] {
        let scratch = Scratch::with_tokens();
        let job = saving(&scratch, strategy);
        job.clone().set(&["trainer.max_steps=2"]).succeed();
        let kept = scratch.path().join("kept");
        assert_eq!(newest(&kept), 2);
        let stderr = job
            .clone()
            .set(&["trainer.ckpt_path=last"])
            .mounting("mount --bind kept kept; mount -o remount,bind,ro kept; \"$@\"")
            .fail();
        let first = stderr.lines().find(|line| line.starts_with("error")).unwrap_or(&stderr);
        assert!(first.contains("checkpoint kept/step-00000003"), "{stderr}");
        assert!(first.contains("creating it after step 3"), "{stderr}");
        assert!(first.contains("Read-only file system"), "{stderr}");
        assert_eq!(newest(&kept), 2);
        resumes(job, "kept", 2);
    }
}

#[test]
fn logs_on_a_full_disk_do_not_end_a_job() {
    if !can_mount() {
        return;
    }
    for tee in [&[][..], &["--tee"]] {
        let scratch = Scratch::with_tokens();
        fs::create_dir(scratch.path().join("logs")).unwrap();
        let args = [&["--nproc-per-node", "2", "--log-dir", "logs"], tee].concat();
        let steps = "trainer.max_steps=400";
        let job = scratch.small().set(&["trainer.devices=auto", "trainer.strategy=ddp", steps]);
        let run = job
            .under_agent(&args)
            .mounting("mount -t tmpfs -o size=16k,nr_inodes=20 none logs; \"$@\"")
            .run();
        assert!(run.status.success(), "{}", run.stderr);
        let warning = "warning: output of ranks cannot be written to logs/";
        assert_eq!(run.stderr.matches(warning).count(), 1, "{}", run.stderr);
        assert!(run.stderr.contains("No space left on device"), "{}", run.stderr);
    }
}
