//! The reward that a program computes.

use std::io::{Read, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{RewardConfig, RewardFunction, RewardedAnswer};

/// Rewards answers with the numbers that a program prints:
/// `{ type = "program", command = ["python3", "score.py"] }`.
///
/// The program starts once for the answers of each micro-batch, on each data-parallel rank. On
/// standard input it gets a JSON object a line: the row's columns, and `completion`, the answer,
/// and `complete`, whether the answer ended by itself. On standard output it prints a number a
/// line, in the order of the answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct ProgramReward {
    /// The program and its arguments. It is started without a shell.
    pub command: Vec<String>,
    /// The longest time for the answers of a micro-batch, in seconds.
    #[serde(default = "default_timeout_secs")]
    pub timeout_secs: f64,
}

fn default_timeout_secs() -> f64 {
    60.0
}

#[typetag::serde(name = "program")]
impl RewardConfig for ProgramReward {
    fn build(&self) -> Result<Box<dyn RewardFunction>> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(Error::Config(
                "`command`: is empty; name a program, as [\"python3\", \"score.py\"]".to_owned(),
            ));
        }
        if !(self.timeout_secs > 0.0 && self.timeout_secs <= 1e6) {
            return Err(Error::Config(format!(
                "`timeout_secs`: must be above 0 and at most 1000000, found {}",
                self.timeout_secs
            )));
        }
        Ok(Box::new(self.clone()))
    }
}

fulgurite_config::register_plugin!(
    "reward",
    "program",
    "Rewards answers with the numbers that a program prints",
    "{ type = \"program\", command = [\"python3\", \"score.py\"] }",
    ProgramReward
);

/// The end of a failed program's errors that messages show, in bytes.
const SHOWN_ERRORS: usize = 2000;

impl ProgramReward {
    fn failed(&self, what: impl std::fmt::Display) -> Error {
        Error::other(format!("the reward program `{}` {what}", self.command.join(" ")))
    }

    /// Runs the program with `input`, and returns what it prints.
    fn run(&self, input: Vec<u8>) -> Result<String> {
        let mut child = Command::new(&self.command[0])
            .args(&self.command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| self.failed(format_args!("does not start: {error}")))?;
        let mut stdin = child.stdin.take();
        // A program may stop reading before the end.
        thread::spawn(move || stdin.as_mut().map(|stdin| stdin.write_all(&input)));
        let output = read_all(child.stdout.take());
        let errors = read_all(child.stderr.take());
        let timeout = Duration::from_secs_f64(self.timeout_secs);
        let deadline = Instant::now() + timeout;
        let output = output.recv_timeout(timeout).ok();
        let status = match &output {
            None => None,
            Some(_) => status_until(&mut child, deadline).map_err(|error| self.failed(error))?,
        };
        let (Some(output), Some(status)) = (output, status) else {
            end(&mut child);
            return Err(self.failed(format_args!(
                "did not end within {} seconds (`timeout_secs`)",
                self.timeout_secs
            )));
        };
        if !status.success() {
            let errors = errors.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
            let from = errors.len().saturating_sub(SHOWN_ERRORS);
            let errors = String::from_utf8_lossy(&errors[from..]);
            return Err(self.failed(format_args!("failed ({status}):\n{}", errors.trim_end())));
        }
        String::from_utf8(output).map_err(|_| self.failed("printed bytes that are no UTF-8"))
    }
}

/// Waits for the program's end, which usually follows the end of its output at once.
fn status_until(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            status => return Ok(status),
        }
    }
}

/// Kills the program, and collects its status.
fn end(child: &mut Child) {
    // Both fail only if the program has ended.
    let _ = child.kill();
    let _ = child.wait();
}

/// Reads to the end on a thread of its own.
fn read_all(from: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // An unreadable end is an end: the number of scores is checked.
            let _ = from.read_to_end(&mut bytes);
        }
        // Nobody waits after a timeout.
        let _ = sender.send(bytes);
    });
    receiver
}

impl RewardFunction for ProgramReward {
    fn score(&self, answers: &[RewardedAnswer]) -> Result<Vec<f64>> {
        let mut input = Vec::new();
        for answer in answers {
            let mut line = answer.columns.clone();
            line.insert("completion".to_owned(), answer.text.into());
            line.insert("complete".to_owned(), answer.is_complete.into());
            input.extend_from_slice(json!(line).to_string().as_bytes());
            input.push(b'\n');
        }
        let output = self.run(input)?;
        let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
        if lines.len() != answers.len() {
            return Err(self.failed(format_args!(
                "printed {} lines for {} answers; it must print a number for each",
                lines.len(),
                answers.len()
            )));
        }
        let number = |(i, line): (usize, &&str)| {
            line.trim().parse().map_err(|_| {
                self.failed(format_args!("printed {line:?} as line {}: expected a number", i + 1))
            })
        };
        lines.iter().enumerate().map(number).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    fn scores(script: &str, timeout_secs: f64) -> Result<Vec<f64>> {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        let columns = Map::from_iter([("answer".to_owned(), json!(4))]);
        let answers = ["a", "bcd"].map(|text| RewardedAnswer {
            columns: &columns,
            text,
            is_complete: text == "a",
        });
        ProgramReward { command, timeout_secs }.score(&answers)
    }

    #[test]
    fn program_gets_rows_and_prints_scores() {
        let found = scores("while read line; do echo ${#line}; done", 60.0).unwrap();
        let lines = [
            r#"{"answer":4,"complete":true,"completion":"a"}"#,
            r#"{"answer":4,"complete":false,"completion":"bcd"}"#,
        ];
        assert_eq!(found, lines.map(|line| line.len() as f64));
    }

    #[test]
    fn programs_that_fail_are_explained() {
        let message = |script: &str, secs| scores(script, secs).unwrap_err().to_string();
        assert!(message("echo 1", 60.0).contains("printed 1 lines for 2 answers"));
        assert!(message("echo 1; echo good", 60.0).contains("\"good\" as line 2"));
        assert!(message("echo oops >&2; exit 3", 60.0).ends_with("exit status: 3):\noops"));
        // The program goes on long after the test, unless it is killed.
        assert!(message("exec sleep 1000", 0.05).contains("within 0.05 seconds"));
        let closed = "echo 1; echo 2; exec >&- 2>&- sleep 1000";
        assert!(message(closed, 0.3).contains("did not end within 0.3 seconds"));
        let missing =
            ProgramReward { command: vec!["no-such-program".to_owned()], timeout_secs: 1.0 };
        let error = missing.score(&[]).unwrap_err().to_string();
        assert!(
            error.starts_with("the reward program `no-such-program` does not start"),
            "{error}"
        );
    }
}
