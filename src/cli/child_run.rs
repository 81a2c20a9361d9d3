//! A run of this program that it starts itself, for a sweep or a search.

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

/// Set for such runs, to the process that started them.
const PARENT: &str = "FULGURITE_SWEEP_PROCESS";

/// If this process is such a run: asks the system to end it, as a user would, when its parent is killed.
pub(super) fn end_with_parent() {
    let parent = std::env::var(PARENT).ok().and_then(|pid| pid.parse::<i32>().ok());
    let Some(parent) = parent else { return };
    // A rank of the run is a child of the run.
    if getppid().is_some_and(|pid| pid.as_raw_nonzero().get() == parent) {
        // Where that is not possible, a parent that is killed leaves its run.
        #[cfg(target_os = "linux")]
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    }
    // It may have ended before the call above.
    if !is_running(parent) {
        let _ = kill_process(getpid(), Signal::TERM);
    }
}

/// Refuses an option that starts runs in a process that was started as a rank of a job.
///
/// # Errors
/// If this is such a process.
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

/// How often a run that says nothing is looked after.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `run` in a process of its own, and gives each line of its events, and the event, to `on_event`. What asks
/// this process to end, once [signals are noticed](fulgurite_core::launch::notice_signals), is passed on to the
/// run, and noted.
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
    // Else Ctrl-C would reach it twice, from the terminal and from here, and the second time ends it at once.
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
            // It may have ended by now.
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

/// How a run ended, in words.
pub(super) fn status_text(status: ExitStatus) -> String {
    match status.code() {
        Some(0) => "success".to_owned(),
        Some(code) => format!("failed ({code})"),
        None => status.to_string(),
    }
}
