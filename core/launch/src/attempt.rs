//! The attempt of its job that a process belongs to, and requeueing.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::process::PROCESS;
use super::signals::{describe, exit_code_of, explain_exit};
use crate::environment::{ClusterEnvironment, Requeue};
use fulgurite_error::print_message;
use fulgurite_store::Patience;

/// Time limit of the requeue command.
const REQUEUE_LIMIT: Duration = Duration::from_secs(60);

/// An attempt to run a job. Each restart of a job by its launcher or scheduler is another attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// Identifies the job, and is the same in all of its attempts. Only valid on rank 0; other
    /// ranks may have a different id
    /// ([`ClusterEnvironment::restart_id`](crate::environment::ClusterEnvironment::restart_id)).
    pub restart_id: String,
    /// Number of restarts so far: 0 in the first attempt.
    pub restart_count: u64,
}

/// The environment's values for this attempt.
pub(super) struct Known {
    attempt: Attempt,
    requeue: Option<Requeue>,
    rank: usize,
}

/// Returns this process's attempt; `None` before [`launch`](crate::launch()) or without a launcher.
pub fn attempt() -> Option<&'static Attempt> {
    PROCESS.attempt.get().map(|known| &known.attempt)
}

/// Records the environment's values for this attempt.
pub(super) fn remember(environment: &dyn ClusterEnvironment) {
    PROCESS.attempt.get_or_init(|| Known {
        attempt: Attempt {
            restart_id: environment.restart_id(),
            restart_count: environment.restart_count(),
        },
        requeue: environment.requeue(),
        rank: environment.global_rank(),
    });
}

/// Number of restarts so far.
pub(super) fn restart_count() -> u64 {
    attempt().map_or(0, |attempt| attempt.restart_count)
}

/// Returns the exit code of a rank that ends because of `signal`, on which the ranks agreed. If the
/// environment requeues the job for it, the code is 0, and rank 0 requeues the job here. Rank 0
/// calls it after the other ranks have ended.
pub(super) fn end_by(signal: i32) -> u8 {
    let interrupted = exit_code_of(signal);
    let Some(Known { requeue: Some(requeue), rank, .. }) = PROCESS.attempt.get() else {
        return interrupted;
    };
    if requeue.on.signal() != signal {
        return interrupted;
    }
    if *rank != 0 {
        return 0;
    }
    match run(requeue, REQUEUE_LIMIT) {
        Ok(()) => {
            print_message(&format!(
                "requeued after {} (`{}`)",
                describe(signal),
                requeue.command_line()
            ));
            0
        }
        Err(message) => {
            print_message(&format!(
                "error: the job is not put back into its queue: {message}. Start it again, with \
                 trainer.ckpt_path = \"last\""
            ));
            interrupted
        }
    }
}

impl Requeue {
    fn command_line(&self) -> String {
        [std::slice::from_ref(&self.program), &self.arguments].concat().join(" ")
    }
}

/// Runs the requeue command and kills it after `limit`: an unresponsive scheduler must not delay
/// the end of the job.
fn run(requeue: &Requeue, limit: Duration) -> Result<(), String> {
    let line = requeue.command_line();
    let fail = |error: std::io::Error| format!("`{line}` cannot be run: {error}");
    let mut command = Command::new(&requeue.program);
    command.args(&requeue.arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(fail)?;
    let mut patience = Patience::new(limit);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(fail)? {
            break status;
        }
        if patience.slice().is_none() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("`{line}` has not ended within {limit:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if status.success() {
        return Ok(());
    }
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // At most a pipe's content: the command's output was not read before.
        let _ = stderr.take(64 << 10).read_to_end(&mut said);
    }
    let said = String::from_utf8_lossy(&said);
    let said = said.trim();
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    Err(format!("`{line}` ended with {}{said}", explain_exit(status)))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::Interruption;

    fn shell(script: &str) -> Requeue {
        let arguments = vec!["-c".to_owned(), script.to_owned()];
        Requeue { on: Interruption::Preemption, program: "sh".to_owned(), arguments }
    }

    #[test]
    fn a_command_that_fails_says_how() {
        let run = |requeue: &Requeue| run(requeue, REQUEUE_LIMIT);
        assert_eq!(run(&shell("exit 0")), Ok(()));
        assert_says!(
            run(&shell("echo 'Invalid job id' >&2; exit 3")).unwrap_err(),
            "`sh -c echo 'Invalid job id' >&2; exit 3` … exit code 3: Invalid job id"
        );
        assert_says!(run(&shell("kill -9 $$")).unwrap_err(), "`sh -c kill -9 $$` … 9 (SIGKILL)");
        let absent = Requeue { program: "no-such-scontrol".to_owned(), ..shell("") };
        assert_says!(run(&absent).unwrap_err(), "`no-such-scontrol -c ` cannot be run … error 2)");
    }

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let error = run(&shell("exec sleep 1000"), Duration::from_millis(100)).unwrap_err();
        assert_says!(error, "`sh -c exec sleep 1000` has not ended within 100ms");
    }
}
