//! Slurm jobs that are requeued and resume.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;

use crate::program::{Job, Run, Scratch};

/// A `scontrol` in the folder `bin` that notes its arguments.
fn with_scontrol() -> Scratch {
    let scratch = Scratch::with_tokens();
    fs::create_dir(scratch.path().join("bin")).unwrap();
    let program = scratch.file("bin/scontrol", "#!/bin/sh\necho \"$@\" >> asked\n");
    fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
    scratch
}

/// Both tasks of job `id`, as `srun` starts them.
fn tasks<'a>(job: &Job<'a>, scratch: &Scratch, id: u32, restarts: u32) -> [Job<'a>; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let path = format!("{}:{}", scratch.path().join("bin").display(), env!("PATH"));
    [0, 1].map(|rank| {
        let job = job.clone().env("PATH", &path).env("FULGURITE_JOB_KEY", "0123456789abcdef");
        let job = job.env("MASTER_ADDR", "localhost").env("MASTER_PORT", port);
        let job = job.env("SLURM_JOB_ID", id).env("SLURM_STEP_ID", 0).env("SLURM_NTASKS", 2);
        let job = job.env("SLURM_PROCID", rank).env("SLURM_LOCALID", rank).env("SLURM_NODEID", 0);
        match restarts {
            0 => job,
            _ => job.env("SLURM_RESTART_COUNT", restarts),
        }
    })
}

fn run(tasks: &[Job<'_>; 2]) -> [Run; 2] {
    let one = tasks[1].start();
    [tasks[0].run(), one.wait()]
}

// checklist: Lightning: SLURMEnvironment: auto_requeue, requeue_signal
#[test]
fn requeued_job_resumes() {
    for place in [&[][..], &["checkpoint.dir=kept"]] {
        let scratch = with_scontrol();
        let job = scratch.small().on("ddp", 2, 3).set(place).set(&[
            "scheduler=constant",
            "data.shuffle=true",
            "model.dropout=0.1",
            "checkpoint.save_last=true",
        ]);
        // Checkpoints of another job under the same root are not resumed.
        if place.is_empty() {
            job.clone().set(&["trainer.max_steps=4"]).succeed();
        }

        let endless = job.clone().set(&["trainer.max_steps=1000000"]);
        let [zero, one] = tasks(&endless, &scratch, 77, 0).map(|task| task.start());
        zero.reach(5);
        one.signal(Signal::USR1);
        let (one, zero) = (one.wait(), zero.wait());
        assert_eq!((zero.code(), one.code()), (Some(0), Some(0)), "{}", zero.stderr);
        assert!(zero.stderr.contains("requeued after signal"), "{}", zero.stderr);
        assert_eq!(fs::read_to_string(scratch.path().join("asked")).unwrap(), "requeue 77\n");
        let step = zero.losses().len() as u64;
        assert_eq!(zero.events_of("checkpoint").last().expect("a checkpoint")["step"], step);

        let end = format!("trainer.max_steps={}", step + 3);
        let job = job.set(&[&end]);
        let [again, one] = run(&tasks(&job, &scratch, 77, 1));
        assert_eq!((again.code(), one.code()), (Some(0), Some(0)), "{}", again.stderr);
        assert_eq!(again.events_of("resume")[0]["step"], step);
        let mut both = zero.losses();
        both.extend(again.losses());
        let whole = job.clone().set(&["checkpoint.dir=whole"]).succeed();
        assert_eq!(both, whole.losses());

        // A job restarted before its first save has nothing to resume from.
        let [early, _] = run(&tasks(&job, &scratch, 78, 1));
        if place.is_empty() {
            assert_eq!(early.code(), Some(0), "{}", early.stderr);
            assert!(early.events_of("resume").is_empty());
            assert!(early.stderr.contains("the job slurm-78.0 was started again, but"));
        } else {
            assert_eq!(early.code(), Some(1));
            assert!(early.stderr.contains("has checkpoints of another run"), "{}", early.stderr);

            // A restarted job that began training but never saved has nothing to resume from
            // either.
            let over = job.clone().set(&["checkpoint.overwrite=true"]);
            run(&tasks(&over.clone().set(&["checkpoint.save_last=false"]), &scratch, 79, 0));
            let [over, _] = run(&tasks(&over, &scratch, 79, 1));
            assert!(over.events_of("resume").is_empty(), "{}", over.stderr);
            assert!(over.stderr.contains("the job slurm-79.0 was started again, but"));

            // Its own checkpoints take precedence over the one that it started from.
            let from = format!("trainer.ckpt_path=whole/step-{:08}", step + 3);
            let until = |more: u64| format!("trainer.max_steps={}", step + 3 + more);
            let keys = [from.as_str(), "checkpoint.dir=branch"];
            let branch = |more| job.clone().set(&keys).set(&[&until(more)]);
            run(&tasks(&branch(2), &scratch, 80, 0));
            let [branch, _] = run(&tasks(&branch(4), &scratch, 80, 1));
            assert_eq!(branch.events_of("resume")[0]["step"], step + 5, "{}", branch.stderr);
        }
    }
}

#[test]
fn option_disables_requeue() {
    let scratch = with_scontrol();
    let job = scratch.small().on("ddp", 2, 3).set(&[
        "trainer.max_steps=1000000",
        "trainer.environment={ type = \"slurm\", auto_requeue = false }",
    ]);
    let [zero, one] = tasks(&job, &scratch, 77, 0).map(|task| task.start());
    zero.reach(2);
    zero.signal(Signal::USR1);
    let (one, zero) = (one.wait(), zero.wait());
    assert_eq!((zero.code(), one.code()), (Some(138), Some(138)), "{}", zero.stderr);
    assert!(!scratch.path().join("asked").exists());
}
