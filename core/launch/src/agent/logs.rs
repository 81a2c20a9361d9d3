//! Where the output of ranks goes.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use super::options::AgentOptions;
use super::plan::Attempt;
use crate::{Error, Result};

/// The output of one rank.
pub(super) struct Output {
    /// Its files, and where they are: stdout, stderr.
    files: Option<([File; 2], PathBuf)>,
    /// The prefix of its lines on the terminal.
    prefix: Option<String>,
}

impl Output {
    /// The files of a rank are in `log_dir/NAME/attempt_N/RANK/`, with the [name](Attempt::log_name) of the job's logs.
    pub(super) fn new(options: &AgentOptions, attempt: &Attempt, rank: usize) -> Result<Self> {
        let files = match &options.log_dir {
            None => None,
            Some(dir) => {
                let dir = directory(dir, attempt).join(rank.to_string());
                std::fs::create_dir_all(&dir).map_err(Error::io("making", &dir))?;
                let create = |name: &str| {
                    let path = dir.join(name);
                    File::create(&path).map_err(Error::io("making", path))
                };
                Some(([create("stdout.log")?, create("stderr.log")?], dir))
            }
        };
        let prefix = options.tee.then(|| format!("[rank{rank}]: "));
        Ok(Self { files, prefix })
    }

    /// Sets the output of a process that is to be started.
    pub(super) fn set(&self, command: &mut Command) -> Result<()> {
        match (&self.prefix, &self.files) {
            (Some(_), _) => {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            (None, Some(([stdout, stderr], _))) => {
                let copy = |file: &File| {
                    file.try_clone().map_err(|e| Error::Launch(format!("a rank's log: {e}")))
                };
                command.stdout(copy(stdout)?).stderr(copy(stderr)?);
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// The file with stderr, if it is not shown too.
    pub(super) fn hidden(&self) -> Option<PathBuf> {
        let (_, dir) = self.files.as_ref().filter(|_| self.prefix.is_none())?;
        Some(dir.join("stderr.log"))
    }

    /// Copies what a process writes, until it has ended.
    pub(super) fn copy(self, child: &mut Child) -> Vec<JoinHandle<()>> {
        let Some(prefix) = self.prefix else { return Vec::new() };
        let [stdout, stderr] = self.files.map_or([None, None], |(files, _)| files.map(Some));
        let mut threads = Vec::new();
        if let Some(from) = child.stdout.take() {
            threads.push(tee(from, stdout, prefix.clone(), std::io::stdout()));
        }
        if let Some(from) = child.stderr.take() {
            threads.push(tee(from, stderr, prefix, std::io::stderr()));
        }
        threads
    }
}

/// Where the logs of an attempt are, of all its ranks.
pub(super) fn directory(dir: &Path, attempt: &Attempt) -> PathBuf {
    dir.join(&attempt.log_name).join(format!("attempt_{}", attempt.number - 1))
}

/// Copies lines to a file as they are, and to the terminal with a prefix.
fn tee(
    from: impl Read + Send + 'static,
    mut file: Option<File>,
    prefix: String,
    mut terminal: impl Write + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
            // Output that cannot be written must not end a training.
            if let Some(file) = &mut file {
                let _ = file.write_all(&line);
            }
            let _ = terminal.write_all(&[prefix.as_bytes(), &line].concat());
            line.clear();
        }
    })
}
