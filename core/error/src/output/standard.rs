//! [`Outlet`]: standard output and standard error without waiting.

use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::counted;

use super::queue::{CAPACITY, Full, GapLine, Queue, RESERVE};

/// How long a flush waits for a reader that takes nothing, and in all.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));
/// The same after a failure, which others wait to hear of.
const BRIEF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(1));

/// Where output goes.
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

/// Standard error, written by a thread of its own. Writing to it never waits; each call of
/// [`write_all`](Write::write_all) brings whole lines.
pub fn stderr() -> Outlet {
    Outlet::new(Standard::Error)
}

/// Standard output, written by a thread of its own; as [`stderr`].
pub fn stdout() -> Outlet {
    Outlet::new(Standard::Output)
}

/// Waits until all output so far is written, as long as the readers take something every five seconds, and half a
/// minute at most. For the end of a process or of a run.
pub fn flush() {
    flush_within(PATIENCE);
}

/// As [`flush()`], for a second at most: where others wait for this process to end.
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

/// One of the standard streams, through the queue that all parts of this process share. See the
/// [module](super).
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

    /// Sets the line, with its end, that says how many lines are missing in its place.
    #[must_use]
    pub fn with_gap_line(self, gap_line: fn(u64) -> String) -> Self {
        Self { gap_line, ..self }
    }

    /// Has a write return the failure of one before it, such as a full disk. By default the lines that could not be
    /// written are counted like those without room.
    #[must_use]
    pub fn reporting_failures(self) -> Self {
        Self { reports_failures: true, ..self }
    }

    /// Has a write wait for room, as long as the reader takes something every `idle`. For a thread that only copies.
    #[must_use]
    pub fn waiting(self, idle: Duration) -> Self {
        Self { waits: Some(idle), ..self }
    }

    /// Writes an error or another message of a few lines: there is room for it where there is none for others.
    pub fn write_message(&self, text: &str) {
        self.put(text.as_bytes(), CAPACITY + RESERVE);
    }

    /// Draws something that is out of date soon, such as a progress bar: at once or not at all.
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
    /// [`ErrorKind::BrokenPipe`] if the reader has gone; with [`reporting_failures`](Outlet::reporting_failures) the
    /// failure of an earlier write.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush()?;
        match self.put(bytes, CAPACITY) {
            true => Ok(bytes.len()),
            false => Err(ErrorKind::BrokenPipe.into()),
        }
    }

    /// Writes nothing, for it would wait: [`flush()`] does.
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
