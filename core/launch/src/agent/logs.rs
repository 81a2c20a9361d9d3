//! The destinations of the ranks' output.
//!
//! The agent reads the output of ranks through pipes if it goes to files or is shown with a prefix.
//! So a rank notices neither a full disk nor a terminal that does not read.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::options::AgentOptions;
use super::plan::Attempt;
use crate::{Error, Result};
use fulgurite_error::output::{Outlet, stderr, stdout};
use fulgurite_error::{advice, print_message};

/// Maximum length of a line on the terminal; longer lines are split.
const MAX_LINE: usize = 64 << 10;
/// Ends a part of a split line.
const GOES_ON: &[u8] = b" [the line goes on]\n";
/// How long to wait for a terminal that does not read, before lines are dropped.
const IDLE: Duration = Duration::from_secs(1);

/// The output of one rank.
pub(super) struct Output {
    /// Its log files and their directory: stdout, stderr.
    files: Option<([LogFile; 2], PathBuf)>,
    /// The prefix of its lines on the terminal.
    prefix: Option<String>,
}

impl Output {
    /// Creates a rank's log files in `log_dir/NAME/attempt_N/RANK/`, with the
    /// [name](Attempt::log_name) of the job's logs. All outputs that share `said` report a write
    /// failure only once.
    pub(super) fn new(
        options: &AgentOptions,
        attempt: &Attempt,
        rank: usize,
        said: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let files = match &options.log_dir {
            None => None,
            Some(dir) => {
                let dir = directory(dir, attempt).join(rank.to_string());
                std::fs::create_dir_all(&dir).map_err(Error::io("making", &dir))?;
                let create = |name: &str| LogFile::create(dir.join(name), said.clone());
                Some(([create("stdout.log")?, create("stderr.log")?], dir))
            }
        };
        let prefix = options.tee.then(|| format!("[rank{rank}]: "));
        Ok(Self { files, prefix })
    }

    /// Sets the output of a process before its start.
    pub(super) fn set(&self, command: &mut Command) {
        if self.files.is_some() || self.prefix.is_some() {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
    }

    /// The stderr file, if stderr is not also shown.
    pub(super) fn hidden(&self) -> Option<PathBuf> {
        let (_, dir) = self.files.as_ref().filter(|_| self.prefix.is_none())?;
        Some(dir.join("stderr.log"))
    }

    /// Copies a process's output until it ends.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(super) fn copy(self, child: &mut Child) -> io::Result<Vec<JoinHandle<()>>> {
        let Self { files, prefix } = self;
        let [out, err] = files.map_or([None, None], |(files, _)| files.map(Some));
        let terminal = |outlet: Outlet| prefix.clone().map(|prefix| Lines::new(prefix, outlet));
        let mut threads = Vec::new();
        if let Some(from) = child.stdout.take() {
            threads.push(copy(from, out, terminal(stdout()))?);
        }
        if let Some(from) = child.stderr.take() {
            threads.push(copy(from, err, terminal(stderr()))?);
        }
        Ok(threads)
    }
}

/// The directory with the logs of an attempt's ranks.
pub(super) fn directory(dir: &Path, attempt: &Attempt) -> PathBuf {
    dir.join(&attempt.log_name).join(format!("attempt_{}", attempt.number - 1))
}

/// Copies everything unchanged to a file, and line by line to the terminal.
fn copy(
    mut from: impl Read + Send + 'static,
    mut file: Option<LogFile>,
    mut terminal: Option<Lines>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("output".to_owned()).stack_size(256 << 10).spawn(move || {
        let mut buffer = vec![0; MAX_LINE];
        loop {
            match from.read(&mut buffer) {
                Ok(n @ 1..) => {
                    if let Some(file) = &mut file {
                        file.write(&buffer[..n]);
                    }
                    if let Some(terminal) = &mut terminal {
                        terminal.take(&buffer[..n]);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
            }
        }
        if let Some(terminal) = &mut terminal {
            terminal.end();
        }
    })
}

/// The terminal, for the lines of one rank.
struct Lines<W = Outlet> {
    prefix: String,
    /// The prefix and the unfinished line.
    line: Vec<u8>,
    to: W,
}

impl Lines {
    fn new(prefix: String, outlet: Outlet) -> Self {
        Self { line: prefix.clone().into_bytes(), prefix, to: outlet.waiting(IDLE) }
    }
}

impl<W: Write> Lines<W> {
    fn take(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let mut rest = part;
            while self.prefix.len() + MAX_LINE < self.line.len() + rest.len() {
                let (first, more) = rest.split_at(self.prefix.len() + MAX_LINE - self.line.len());
                self.line.extend(first);
                self.show(GOES_ON);
                rest = more;
            }
            self.line.extend(rest);
            if rest.ends_with(b"\n") {
                self.show(b"");
            }
        }
    }

    /// Shows an unfinished last line.
    fn end(&mut self) {
        if self.line.len() > self.prefix.len() {
            self.show(b"\n");
        }
    }

    fn show(&mut self, end: &[u8]) {
        self.line.extend(end);
        // A terminal that is gone must not end the training.
        let _ = self.to.write_all(&self.line);
        self.line.truncate(self.prefix.len());
    }
}

/// A file of a rank's output.
struct LogFile<W = File> {
    to: W,
    path: PathBuf,
    /// Bytes lost since the last successful write.
    missing: usize,
    /// Whether a write failure was already reported.
    said: Arc<AtomicBool>,
}

impl LogFile {
    fn create(path: PathBuf, said: Arc<AtomicBool>) -> Result<Self> {
        let to = File::create(&path).map_err(Error::io("making", &path))?;
        Ok(Self { to, path, missing: 0, said })
    }
}

impl<W: Write> LogFile<W> {
    /// Writes, or counts the bytes that cannot be written. A full disk must not end the training.
    fn write(&mut self, bytes: &[u8]) {
        if self.missing > 0 {
            let note = format!("\n[{} bytes of output are missing here]\n", self.missing);
            if self.to.write_all(note.as_bytes()).is_err() {
                self.missing += bytes.len();
                return;
            }
            self.missing = 0;
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.to.write(rest) {
                Ok(n @ 1..) => rest = &rest[n..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) => return self.fail(rest.len(), &ErrorKind::WriteZero.into()),
                Err(error) => return self.fail(rest.len(), &error),
            }
        }
    }

    fn fail(&mut self, missing: usize, error: &io::Error) {
        self.missing += missing;
        if !self.said.swap(true, Ordering::Relaxed) {
            print_message(&format!(
                "warning: output of ranks cannot be written to {}: {error}{}. The job goes on; what is missing is \
                 counted there, once it can be written again",
                self.path.display(),
                advice(error)
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_is_shown_in_parts() {
        let prefix = "[rank0]: ".to_owned();
        let line = prefix.clone().into_bytes();
        let mut lines = Lines { prefix, line, to: Vec::new() };
        let long = vec![b'x'; MAX_LINE];
        for chunk in [b"one\ntw" as &[u8], b"o\n", &long, &long, b"y\n\nend"] {
            lines.take(chunk);
            assert!(lines.line.capacity() < 4 * MAX_LINE, "no more is kept");
        }
        lines.end();
        lines.end();
        let shown = String::from_utf8(lines.to).unwrap();
        let long = String::from_utf8(long).unwrap();
        let expected = format!(
            "[rank0]: one\n[rank0]: two\n[rank0]: {long} [the line goes on]\n\
             [rank0]: {long} [the line goes on]\n[rank0]: y\n[rank0]: \n[rank0]: end\n"
        );
        assert!(shown == expected, "{}", shown.replace(&long, "xx"));
    }

    /// A disk with this many bytes of room.
    struct Disk(usize, Vec<u8>);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fits = bytes.len().min(self.0);
            self.0 -= fits;
            self.1.extend(&bytes[..fits]);
            if fits == 0 { Err(ErrorKind::StorageFull.into()) } else { Ok(fits) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bytes_lost_on_a_full_disk_are_counted() {
        let said = Arc::<AtomicBool>::default();
        let to = Disk(10, Vec::new());
        let mut log = LogFile { to, path: "stdout.log".into(), missing: 0, said: said.clone() };
        log.write(b"one\n");
        assert!(!said.load(Ordering::Relaxed));
        log.write(b"two three\n");
        log.write(b"four\n");
        assert!(said.load(Ordering::Relaxed));
        log.to.0 = 100;
        log.write(b"five\n");
        let written = String::from_utf8(log.to.1).unwrap();
        assert_eq!(written, "one\ntwo th\n[9 bytes of output are missing here]\nfive\n");
    }
}
