//! A run of this program as a child process, for a sweep or a search.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use fulgurite_core::environment::{self, Variables};
use fulgurite_core::launch::{Interruption, is_running, take_interruption};
use fulgurite_core::{Error, Result};
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};
use serde_json::Value;

use super::args::RunRequest;

/// Set for child runs: the process id of the parent.
const PARENT: &str = "FULGURITE_SWEEP_PROCESS";

/// In a child run, asks the system to end this process as a user would, once its parent is killed.
pub(super) fn end_with_parent() {
    let parent = std::env::var(PARENT).ok().and_then(|pid| pid.parse::<i32>().ok());
    let Some(parent) = parent else { return };
    // A rank of the run is not a direct child of the parent.
    if getppid().is_some_and(|pid| pid.as_raw_nonzero().get() == parent) {
        // On other systems, a killed parent leaves its run behind.
        #[cfg(target_os = "linux")]
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    }
    // The parent may have ended before the call above.
    if !is_running(parent) {
        let _ = kill_process(getpid(), Signal::TERM);
    }
}

/// Refuses an option that starts runs if this process is a rank of a job.
///
/// # Errors
/// If this process is a rank of a job.
pub(super) fn refuse_in_job(option: &str) -> Result<()> {
    let variables = Variables::current();
    let found = environment::detect(&variables)?;
    let found = found.map(|found| found.build(&variables)).transpose()?;
    match found.filter(|found| found.creates_processes_externally()) {
        None => Ok(()),
        Some(found) => Err(Error::Config(format!(
            "{option}: this process was started as a rank of a job (environment `{}`), and {option} starts its \
             runs itself, one after the other. Start each run with the launcher, or {option} without it",
            found.name()
        ))),
    }
}

/// Poll interval for signals and a silent run.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `run` in its own process, and passes each line of its events, raw and parsed, to
/// `on_event`. Once [signals are noticed](fulgurite_core::launch::notice_signals), a signal that
/// asks this process to end is passed on to the run and stored in `interrupted`.
///
/// # Errors
/// If the process cannot be started.
pub(super) fn run(
    run: &RunRequest,
    interrupted: &mut Option<Interruption>,
    on_event: &mut dyn FnMut(&str, &Value),
) -> Result<ExitStatus> {
    let program = std::env::current_exe().map_err(Error::io("finding", "this program"))?;
    let mut command = Command::new(&program);
    command.arg(run.action.name());
    for file in &run.config {
        command.arg("--config").arg(file);
    }
    for assignment in &run.set {
        command.arg("--set").arg(assignment);
    }
    command.args(["--output", "json"]);
    command.env(PARENT, std::process::id().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    // Its own group: Ctrl-C would otherwise arrive twice, from the terminal and from here, and the
    // second signal ends the run at once.
    command.process_group(0);
    let mut child = command.spawn().map_err(Error::io("starting", &program))?;
    let status = attend(&mut child, interrupted, |line| {
        let event = serde_json::from_str(&line).unwrap_or(Value::Null);
        on_event(&line, &event);
    });
    status.map_err(Error::io("waiting for", &program))
}

/// Reads the lines of a run until it has ended, and passes signals on to it.
fn attend(
    child: &mut Child,
    interrupted: &mut Option<Interruption>,
    mut read: impl FnMut(String),
) -> std::io::Result<ExitStatus> {
    let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        stdout.lines().map_while(std::io::Result::ok).try_for_each(|line| sender.send(line))
    });
    loop {
        if let (Some(why), Some(pid)) =
            (take_interruption(), Pid::from_raw(child.id().cast_signed()))
        {
            *interrupted = (*interrupted).max(Some(why));
            // The run may have ended by now.
            let _ = kill_process(
                pid,
                match why {
                    Interruption::Termination => Signal::TERM,
                    Interruption::Preemption => Signal::USR1,
                    Interruption::HangUp => Signal::HUP,
                    Interruption::CtrlC => Signal::INT,
                },
            );
        }
        match lines.recv_timeout(LOOK) {
            Ok(line) => read(line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match child.try_wait()? {
                Some(status) => return Ok(status),
                None => std::thread::sleep(LOOK),
            },
        }
    }
}

/// Describes the end of a run.
pub(super) fn status_text(status: ExitStatus) -> String {
    match status.code() {
        Some(0) => "success".to_owned(),
        Some(code) => format!("failed ({code})"),
        None => status.to_string(),
    }
}
