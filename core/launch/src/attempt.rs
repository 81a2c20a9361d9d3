//! Which attempt of its job a process belongs to, and what follows it.

use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::signals::{describe, exit_code_of, explain_exit};
use crate::environment::{ClusterEnvironment, Requeue};
use fulgurite_error::print_message;

/// An attempt to run a job. A launcher or a scheduler that starts a job again after it has lost ranks makes
/// another one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// What tells the job from others, and is the same in all of its attempts; other ranks than 0 may have another
    /// ([`ClusterEnvironment::restart_id`](crate::environment::ClusterEnvironment::restart_id)).
    pub restart_id: String,
    /// How often the job was started again before: 0 in the first attempt.
    pub restart_count: u64,
}

struct Known {
    attempt: Attempt,
    requeue: Option<Requeue>,
    rank: usize,
}

static KNOWN: OnceLock<Known> = OnceLock::new();

/// The attempt that this process belongs to; `None` before [`launch`](crate::launch()), and if no launcher has
/// started it.
pub fn attempt() -> Option<&'static Attempt> {
    KNOWN.get().map(|known| &known.attempt)
}

/// Keeps what an environment says of this attempt.
pub(super) fn remember(environment: &dyn ClusterEnvironment) {
    KNOWN.get_or_init(|| Known {
        attempt: Attempt {
            restart_id: environment.restart_id(),
            restart_count: environment.restart_count(),
        },
        requeue: environment.requeue(),
        rank: environment.global_rank(),
    });
}

/// How often the job was started again before.
pub(super) fn restart_count() -> u64 {
    attempt().map_or(0, |attempt| attempt.restart_count)
}

/// The exit code of a rank that ends because of `signal`, which the ranks agreed on: 0 if the job is put back into
/// its queue for it, which rank 0 does here. The other ranks have ended.
pub(super) fn end_by(signal: i32) -> u8 {
    let interrupted = exit_code_of(signal);
    let Some(Known { requeue: Some(requeue), rank, .. }) = KNOWN.get() else { return interrupted };
    if requeue.on.signal() != signal {
        return interrupted;
    }
    if *rank != 0 {
        return 0;
    }
    match run(requeue) {
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

fn run(requeue: &Requeue) -> Result<(), String> {
    let line = requeue.command_line();
    let output = Command::new(&requeue.program)
        .args(&requeue.arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("`{line}` cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    Err(format!("`{line}` ended with {}{said}", explain_exit(output.status)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Interruption;

    fn shell(script: &str) -> Requeue {
        let arguments = vec!["-c".to_owned(), script.to_owned()];
        Requeue { on: Interruption::Preemption, program: "sh".to_owned(), arguments }
    }

    #[test]
    fn a_command_that_fails_says_how() {
        assert_eq!(run(&shell("exit 0")), Ok(()));
        insta::assert_snapshot!(run(&shell("echo 'Invalid job id' >&2; exit 3")).unwrap_err(), @"`sh -c echo 'Invalid job id' >&2; exit 3` ended with exit code 3: Invalid job id");
        insta::assert_snapshot!(run(&shell("kill -9 $$")).unwrap_err(), @"`sh -c kill -9 $$` ended with signal 9 (SIGKILL)");
        let absent = Requeue { program: "no-such-scontrol".to_owned(), ..shell("") };
        insta::assert_snapshot!(run(&absent).unwrap_err(), @"`no-such-scontrol -c ` cannot be run: No such file or directory (os error 2)");
    }
}
