//! Runs a step in its own process, with a time limit.

use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fulgurite_error::{Error, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::findings::Findings;

/// Outcome of a step.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) secs: f64,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
pub(crate) enum Outcome {
    /// The step completed.
    Found(Findings),
    /// The step failed or crashed: how, and the end of its output.
    Failed(String),
    /// The step was ended at its time limit; holds its output.
    TimedOut(String),
}

/// Bytes of a failed step's output that are kept.
const KEPT: usize = 4000;
/// Poll interval for the process.
const POLL: Duration = Duration::from_millis(20);

/// Runs a step whose last line on standard output is [`Findings`] as JSON.
///
/// # Errors
/// If the process cannot be started.
pub(crate) fn run(mut command: Command, limit: Duration) -> Result<Ended> {
    let program = PathBuf::from(command.get_program());
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A process group, so that the step's ranks are ended too.
        .process_group(0)
        .spawn()
        .map_err(Error::io("starting", &program))?;
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    let status = loop {
        let status = child.try_wait().map_err(Error::io("waiting for", &program))?;
        if status.is_some() || started.elapsed() > limit {
            break status;
        }
        std::thread::sleep(POLL);
    };
    end(&mut child);
    let (said, complained) = (text(stdout), text(stderr));
    let outcome = match status {
        None => Outcome::TimedOut(tail(&complained)),
        Some(status) if status.success() => {
            let last = said.lines().last().unwrap_or_default();
            match serde_json::from_str(last) {
                Ok(findings) => Outcome::Found(findings),
                Err(error) => {
                    Outcome::Failed(format!("its last line is not a result ({error}): {last}"))
                }
            }
        }
        Some(status) => Outcome::Failed(format!("{status}\n{}", tail(&complained))),
    };
    Ok(Ended { secs: started.elapsed().as_secs_f64(), outcome })
}

/// Kills the step and its process group; processes outside the group may survive.
fn end(child: &mut Child) {
    // The group may already be gone.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    let _ = child.wait();
}

fn read(from: Option<impl Read + Send + 'static>) -> Option<JoinHandle<Vec<u8>>> {
    let mut from = from?;
    Some(std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // After a read error, keep the bytes read so far.
        let _ = from.read_to_end(&mut bytes);
        bytes
    }))
}

fn text(reader: Option<JoinHandle<Vec<u8>>>) -> String {
    let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn tail(text: &str) -> String {
    let text = text.trim_end();
    let from = (text.len().saturating_sub(KEPT)..).find(|&at| text.is_char_boundary(at));
    text[from.unwrap_or_default()..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Outcome {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit).unwrap().outcome
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn last_line_holds_the_findings() {
        let found =
            sh(r#"echo hello; echo '{"wrong":["x"],"figures":{"a":1.5},"facts":{}}'"#, LONG);
        let Outcome::Found(found) = found else { panic!("{found:?}") };
        assert_eq!((found.wrong, found.figures["a"]), (vec!["x".to_owned()], 1.5));
        assert!(matches!(sh("echo hello", LONG), Outcome::Failed(why) if why.contains("hello")));
    }

    #[test]
    fn errors_and_crashes_include_output() {
        let failed = |script| match sh(script, LONG) {
            Outcome::Failed(why) => why,
            other => panic!("{other:?}"),
        };
        let why = failed("echo the GPU is gone >&2; exit 3");
        assert!(why.contains("exit status: 3") && why.contains("the GPU is gone"), "{why}");
        assert!(failed("kill -SEGV $$").contains("signal: 11"));
    }

    #[test]
    fn hung_step_ends_with_its_children() {
        // The shell's child holds the other end of both pipes: unless it is ended too, this would
        // hang.
        let outcome = sh("echo waiting >&2; sleep 1000 & wait", Duration::from_millis(200));
        assert!(matches!(&outcome, Outcome::TimedOut(said) if said == "waiting"), "{outcome:?}");
    }
}
