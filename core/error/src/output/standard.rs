//! [`Outlet`]: non-blocking standard output and standard error.

use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::counted;

use super::queue::{CAPACITY, Full, GapLine, Queue, RESERVE};

/// Limits of a flush: the time without progress of the reader, and the total time.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));
/// Limits after a failure that other processes wait for.
const BRIEF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(1));

/// The destination of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standard {
    Output,
    Error,
}

static QUEUES: [OnceLock<Arc<Queue>>; 2] = [const { OnceLock::new() }; 2];

impl Standard {
    fn queue(self) -> &'static Queue {
        let name = match self {
            Self::Output => "stdout",
            Self::Error => "stderr",
        };
        QUEUES[self as usize].get_or_init(|| Queue::start(name, move || self))
    }
}

/// Writes without the locks of [`std::io`]: a `println!` that waits for a reader holds one.
impl Write for Standard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match self {
            Self::Output => rustix::io::write(io::stdout(), bytes),
            Self::Error => rustix::io::write(io::stderr(), bytes),
        };
        Ok(written?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error, written by its own thread. Writing to it never waits; each call of
/// [`write_all`](Write::write_all) should write whole lines.
pub fn stderr() -> Outlet {
    Outlet::new(Standard::Error)
}

/// Standard output, written by its own thread; as [`stderr`].
pub fn stdout() -> Outlet {
    Outlet::new(Standard::Output)
}

/// Waits until all output so far is written, at the end of a process or run.
///
/// It waits as long as the readers are active every five seconds, and half a minute at most.
pub fn flush() {
    flush_within(PATIENCE);
}

/// Flushes as [`flush()`], for at most a second: for when other processes wait for this one to end.
pub fn flush_briefly() {
    flush_within(BRIEF);
}

fn flush_within((idle, limit): (Duration, Duration)) {
    let end = Instant::now() + limit;
    // Errors first.
    for of in [Standard::Error, Standard::Output] {
        if let Some(queue) = QUEUES[of as usize].get() {
            queue.flush(idle, end);
        }
    }
}

/// A standard stream, through the queue that all parts of this process share.
///
/// See the [module](super).
#[derive(Debug, Clone)]
pub struct Outlet {
    of: Standard,
    gap_line: GapLine,
    reports_failures: bool,
    waits: Option<Duration>,
}

impl Outlet {
    fn new(of: Standard) -> Self {
        let gap_line = |count| format!("warning: {} left out here\n", counted(count, "line"));
        Self { of, gap_line, reports_failures: false, waits: None }
    }

    /// Sets the line, with its line end, that gives the number of missing lines in their place.
    #[must_use]
    pub fn with_gap_line(self, gap_line: fn(u64) -> String) -> Self {
        Self { gap_line, ..self }
    }

    /// Makes a write return the failure of an earlier write, such as a full disk.
    ///
    /// By default the failed lines are counted as dropped lines.
    #[must_use]
    pub fn reporting_failures(self) -> Self {
        Self { reports_failures: true, ..self }
    }

    /// Makes a write wait for room, as long as the reader is active every `idle`.
    ///
    /// It is for a thread that only copies.
    #[must_use]
    pub fn waiting(self, idle: Duration) -> Self {
        Self { waits: Some(idle), ..self }
    }

    /// Writes an error or another short message, which may use the reserved room.
    pub fn write_message(&self, text: &str) {
        self.put(text.as_bytes(), CAPACITY + RESERVE);
    }

    /// Draws output that is soon outdated, such as a progress bar: at once or not at all.
    pub fn draw(&self, text: &str) {
        let queue = self.of.queue();
        queue.put_if_prompt(text.as_bytes());
        self.write_if_direct(queue);
    }

    fn put(&self, bytes: &[u8], room: usize) -> bool {
        let queue = self.of.queue();
        let full = self.waits.map_or(Full::LeaveOut, Full::Wait);
        let kept = queue.put(bytes, room, self.gap_line, &full);
        self.write_if_direct(queue);
        kept
    }

    fn write_if_direct(&self, queue: &Queue) {
        if queue.is_direct() {
            queue.write_now(&mut self.of.clone());
        }
    }
}

impl Write for Outlet {
    /// Takes all bytes, which should be whole lines.
    ///
    /// # Errors
    /// [`ErrorKind::BrokenPipe`] if the reader has gone; with
    /// [`reporting_failures`](Outlet::reporting_failures) the failure of an earlier write.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush()?;
        match self.put(bytes, CAPACITY) {
            true => Ok(bytes.len()),
            false => Err(ErrorKind::BrokenPipe.into()),
        }
    }

    /// Returns without waiting for the queue; [`flush()`] waits.
    ///
    /// # Errors
    /// As [`write`](Write::write), with [`reporting_failures`](Outlet::reporting_failures).
    fn flush(&mut self) -> io::Result<()> {
        match self.reports_failures.then(|| self.of.queue().take_failure()).flatten() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}
