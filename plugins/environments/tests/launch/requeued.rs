//! Requeued Slurm jobs, with a `scontrol` that records its calls.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use rustix::process::Signal;

use crate::run::Run;
use crate::started::{JOB_KEY, free_port, wait};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("requeued::a_preempted_job_is_requeued", a_preempted_job_is_requeued),
    (
        "requeued::an_element_of_an_array_is_requeued_alone",
        an_element_of_an_array_is_requeued_alone,
    ),
    ("requeued::a_job_of_one_task_is_requeued", a_job_of_one_task_is_requeued),
    ("requeued::a_job_that_starts_is_requeued", a_job_that_starts_is_requeued),
    ("requeued::another_signal_ends_a_job", another_signal_ends_a_job),
    ("requeued::a_requeue_that_fails_is_an_error", a_requeue_that_fails_is_an_error),
];

/// A directory with a `scontrol`.
struct Scontrol {
    dir: tempfile::TempDir,
    path: String,
}

impl Scontrol {
    fn new(ends: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("scontrol");
        let script = "#!/bin/sh\necho \"$@\" >> \"$(dirname \"$0\")/asked\"\n";
        std::fs::write(&program, format!("{script}{ends}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        Self { dir, path }
    }

    fn asked(&self) -> String {
        let file: PathBuf = self.dir.path().join("asked");
        std::fs::read_to_string(file).unwrap_or_default()
    }

    /// A task of job 77.
    fn task(&self, part: &str, rank: &str, tasks: &str, port: &str, more: &[(&str, &str)]) -> Run {
        let variables = [
            (JOB_KEY, "0123456789abcdef0123456789abcdef"),
            ("PATH", &*self.path),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_NTASKS", tasks),
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("SLURM_NODEID", "0"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", port),
        ];
        Run::start(part, &[&variables[..], more].concat())
    }

    /// Starts two tasks and sends them `signal` once they run.
    fn two(&self, part: &str, signal: Signal, more: &[(&str, &str)]) -> [(i32, String); 2] {
        let port = free_port();
        let one = self.task(part, "1", "2", &port, more);
        let runs = [self.task(part, "0", "2", &port, more), one];
        for run in &runs {
            run.ranks(1);
        }
        for run in &runs {
            run.signal(signal);
        }
        wait(runs).map(|ended| (ended.code, ended.stderr))
    }
}

// checklist: Lightning: SLURMEnvironment: auto_requeue, requeue_signal
fn a_preempted_job_is_requeued() {
    let scontrol = Scontrol::new("exit 0");
    let [zero, one] = scontrol.two("interrupt", Signal::USR1, &[]);
    insta::assert_snapshot!(zero.1, @"
    interrupted
    requeued after signal 10 (SIGUSR1) (`scontrol requeue 77`)
    ");
    assert_eq!((zero.0, one), (0, (0, String::new())));
    assert_eq!(scontrol.asked(), "requeue 77\n");
}

fn an_element_of_an_array_is_requeued_alone() {
    let scontrol = Scontrol::new("exit 0");
    let element = [("SLURM_ARRAY_JOB_ID", "77"), ("SLURM_ARRAY_TASK_ID", "3")];
    let [zero, one] = scontrol.two("interrupt", Signal::USR1, &element);
    assert_eq!((zero.0, one.0), (0, 0));
    assert_eq!(scontrol.asked(), "requeue 77_3\n");
}

fn a_job_of_one_task_is_requeued() {
    let scontrol = Scontrol::new("exit 0");
    let run = scontrol.task("agrees", "0", "1", "1", &[("SLURM_RESTART_COUNT", "4")]);
    assert_eq!(run.ranks(1)[0]["restart_count"], 4);
    run.signal(Signal::USR1);
    assert_eq!(run.wait().code, 0);
    assert_eq!(scontrol.asked(), "requeue 77\n");
}

fn a_job_that_starts_is_requeued() {
    let scontrol = Scontrol::new("exit 0");
    let [zero, one] = scontrol.two("starts", Signal::USR1, &[]);
    assert_eq!((zero.0, one.0), (0, 0));
    assert_eq!(scontrol.asked(), "requeue 77\n");
}

fn another_signal_ends_a_job() {
    let scontrol = Scontrol::new("exit 0");
    let [zero, one] = scontrol.two("interrupt", Signal::TERM, &[]);
    assert_eq!((zero.1.as_str(), zero.0, one.0), ("interrupted\n", 143, 143));
    assert_eq!(scontrol.asked(), "");
}

fn a_requeue_that_fails_is_an_error() {
    let scontrol = Scontrol::new("echo 'Job requeue disabled' >&2; exit 1");
    let [zero, one] = scontrol.two("interrupt", Signal::USR1, &[]);
    insta::assert_snapshot!(zero.1, @r#"
    interrupted
    error: the job is not put back into its queue: `scontrol requeue 77` ended with exit code 1: Job requeue disabled. Start it again, with trainer.ckpt_path = "last"
    "#);
    assert_eq!((zero.0, one.0), (138, 0));
}
