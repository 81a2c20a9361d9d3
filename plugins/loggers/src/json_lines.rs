//! Events as JSON lines, for programs that monitor a run.

use std::io::{ErrorKind, Write};

use fulgurite_error::output::{self, Outlet};
use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Event, EventSink, RunStatus};

/// Writes each event as one JSON object per line, and flushes: `--output json`.
///
/// ```
/// use fulgurite_core::trainer::{Event, EventSink};
/// use fulgurite_loggers::JsonLines;
///
/// let mut sink = JsonLines::stdout();
/// sink.event(&Event::Checkpoint { step: 20, path: "step-20".into(), blocked_s: 0.5 })?;
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// A broken pipe is not an error: the run continues without output. The run does not wait for a
/// slow reader of standard output: a queue of 4 MiB holds the events. Events that do not fit are
/// dropped, and `{"event":"left_out","lines":12}` takes their place. At the end of the run the
/// queue is written, as long as the reader reads something every five seconds. After a full disk
/// the next event is an error.
pub struct JsonLines {
    /// `None` after a broken pipe.
    writer: Option<Box<dyn Write + Send>>,
}

impl JsonLines {
    /// Writes to standard output.
    pub fn stdout() -> Self {
        Self::new(Self::outlet().reporting_failures())
    }

    /// Standard output for whole lines of JSON. Reports dropped lines as an event.
    pub fn outlet() -> Outlet {
        let left_out = |lines| format!("{{\"event\":\"left_out\",\"lines\":{lines}}}\n");
        output::stdout().with_gap_line(left_out)
    }

    /// Writes to any writer; the run waits for it.
    pub fn new(writer: impl Write + Send + 'static) -> Self {
        Self { writer: Some(Box::new(writer)) }
    }
}

impl EventSink for JsonLines {
    fn event(&mut self, event: &Event) -> Result<()> {
        let mut line = serde_json::to_string(event).map_err(Error::other)?;
        line.push('\n');
        self.write(line.as_bytes())
    }

    fn finish(&mut self, status: RunStatus) -> Result<()> {
        match status {
            RunStatus::Failed => output::flush_briefly(),
            RunStatus::Success | RunStatus::Interrupted => output::flush(),
        }
        // The last event's write may have failed after it returned.
        self.write(b"")
    }
}

impl JsonLines {
    fn write(&mut self, line: &[u8]) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        match writer.write_all(line).and_then(|()| writer.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.writer = None;
                Ok(())
            }
            result => result.map_err(Error::io("writing an event to", "stdout")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use fulgurite_test_message::assert_says;

    use super::*;

    /// Fails with this error from the second write on, and counts writes.
    struct Failing(ErrorKind, Arc<Mutex<usize>>);

    impl Write for Failing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut writes = self.1.lock().unwrap();
            *writes += 1;
            if *writes > 1 { Err(self.0.into()) } else { Ok(bytes.len()) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_reader_ends_the_stream_quietly() {
        let writes = Arc::default();
        let mut sink = JsonLines::new(Failing(ErrorKind::BrokenPipe, Arc::clone(&writes)));
        let event = Event::Checkpoint { step: 1, path: "p".into(), blocked_s: 0.5 };
        for _ in 0..4 {
            sink.event(&event).unwrap();
        }
        assert_eq!(*writes.lock().unwrap(), 2, "nothing is written after the pipe broke");
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut sink = JsonLines::new(Failing(ErrorKind::StorageFull, Arc::default()));
        let event = Event::Checkpoint { step: 1, path: "p".into(), blocked_s: 0.5 };
        sink.event(&event).unwrap();
        assert_says!(sink.event(&event).unwrap_err(), "writing … to stdout: no storage space");
    }
}
