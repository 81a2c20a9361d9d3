//! [`Queue`]: a bounded queue of output, and the thread that writes it.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Capacity in bytes.
pub(super) const CAPACITY: usize = 4 << 20;
/// Additional bytes for messages: errors find room when progress lines do not.
pub(super) const RESERVE: usize = 256 << 10;
/// Output that is only useful immediately is dropped if more bytes than this are waiting.
const PROMPT: usize = 64 << 10;
/// Bytes of one write. A pipe takes them as a whole, and each write shows that the reader is
/// active.
const CHUNK: usize = 4096;
/// Pause before a write is retried on a non-blocking stream.
const BUSY: Duration = Duration::from_millis(10);

/// Formats the line about this many dropped lines.
pub(super) type GapLine = fn(u64) -> String;

/// Pieces of output on their way to a writer.
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<Piece>,
    /// Bytes of all pieces, including the one that is being written.
    bytes: usize,
    /// Number of written chunks. It grows as long as the reader is active.
    written: u64,
    /// The reader has gone, so nothing is kept any more.
    gone: bool,
    /// A failed write, until it is reported.
    failure: Option<(ErrorKind, String)>,
    /// Number of written chunks when a flush, or a writer, gave up. Nobody waits again until it has
    /// grown.
    given_up_at: [Option<u64>; 2],
    /// No thread could be started: callers write their pieces themselves.
    direct: bool,
}

enum Piece {
    Text(Vec<u8>, GapLine),
    /// Missing lines at this place.
    Gap(u64, GapLine),
}

/// The kinds of waiting for a reader.
#[derive(Debug, Clone, Copy)]
enum Waiter {
    Flush,
    Writer,
}

/// The treatment of a piece that finds the queue full.
pub(super) enum Full {
    /// Drops the piece, and counts it.
    LeaveOut,
    /// Waits as long as the reader is active at least this often; then drops the piece.
    Wait(Duration),
}

impl Queue {
    /// Starts the thread, which writes to the writer that `open` returns.
    ///
    /// If the system refuses a thread, callers write their pieces themselves.
    pub(super) fn start<W: Write>(name: &str, open: impl Fn() -> W + Send + 'static) -> Arc<Self> {
        let queue = Arc::new(Self { state: Mutex::new(State::default()), changed: Condvar::new() });
        let shared = queue.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(128 << 10);
        if thread.spawn(move || shared.run(&mut open())).is_err() {
            queue.lock().direct = true;
        }
        queue
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a piece, as long as `room` bytes of the queue suffice. Returns false if the reader has
    /// gone.
    pub(super) fn put(&self, bytes: &[u8], room: usize, gap: GapLine, full: &Full) -> bool {
        let mut state = self.lock();
        if let Full::Wait(idle) = full {
            let mut last = (state.written, Instant::now());
            while state.bytes + bytes.len() > room && state.bytes > 0 && !state.gone {
                if state.written != last.0 {
                    last = (state.written, Instant::now());
                }
                let left = idle.saturating_sub(last.1.elapsed());
                if left.is_zero() || state.has_given_up(Waiter::Writer) {
                    state.give_up(Waiter::Writer);
                    break;
                }
                state = self.wait(state, left);
            }
        }
        if state.gone {
            return false;
        }
        if state.bytes + bytes.len() > room && state.bytes > 0 {
            state.leave_out(lines(bytes), gap);
        } else {
            state.push(Piece::Text(bytes.to_vec(), gap));
        }
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Adds a piece if it will be written soon; else drops it.
    pub(super) fn put_if_prompt(&self, bytes: &[u8]) {
        let is_prompt = self.lock().bytes < PROMPT;
        if is_prompt {
            self.put(bytes, CAPACITY, |_| String::new(), &Full::LeaveOut);
        }
    }

    /// Whether the queue lacks a thread.
    pub(super) fn is_direct(&self) -> bool {
        self.lock().direct
    }

    /// Writes all pieces, if the queue lacks a thread.
    pub(super) fn write_now(&self, to: &mut impl Write) {
        let mut lost = None;
        while let Some(piece) = { self.lock().pieces.pop_front() } {
            self.write_piece(piece, &mut lost, to);
        }
    }

    /// Returns the failure of an earlier piece, once.
    pub(super) fn take_failure(&self) -> Option<io::Error> {
        let (kind, text) = self.lock().failure.take()?;
        Some(io::Error::new(kind, text))
    }

    /// Waits until everything is written, as long as the reader is active every `idle`, and until
    /// `end` at most.
    pub(super) fn flush(&self, idle: Duration, end: Instant) {
        let mut state = self.lock();
        let mut last = (state.written, Instant::now());
        while state.bytes > 0 {
            if state.written != last.0 {
                last = (state.written, Instant::now());
            }
            let now = Instant::now();
            let left = idle.saturating_sub(now - last.1).min(end.saturating_duration_since(now));
            if left.is_zero() || state.has_given_up(Waiter::Flush) {
                return state.give_up(Waiter::Flush);
            }
            state = self.wait(state, left);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Writes pieces as they arrive.
    fn run(&self, to: &mut impl Write) {
        let mut lost = None;
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                drop(state);
                self.write_piece(piece, &mut lost, to);
                state = self.lock();
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Writes a piece. `lost` has the lines before it that could not be written.
    fn write_piece(&self, piece: Piece, lost: &mut Option<(u64, GapLine)>, to: &mut impl Write) {
        let size = piece.size();
        let (bytes, gap, left_out) = match piece {
            Piece::Text(bytes, gap) => (bytes, gap, 0),
            Piece::Gap(count, gap) => (Vec::new(), gap, count),
        };
        let missing = left_out + lost.take().map_or(0, |(count, _)| count);
        let note = if missing > 0 { gap(missing) } else { String::new() };
        // If the note cannot be written, the piece is lost with it.
        let result = match self.write_chunks(note.as_bytes(), to) {
            Ok(()) => self.write_chunks(&bytes, to).map_err(|error| (lines(&bytes), error)),
            Err(error) => Err((missing + lines(&bytes), error)),
        };
        let mut state = self.lock();
        state.bytes -= size;
        if let Err((count, error)) = result {
            match error.kind() {
                // The reader has ended, or the terminal was closed.
                ErrorKind::BrokenPipe => state.end(),
                _ if is_gone(&error) => state.end(),
                kind => {
                    *lost = Some((count, gap));
                    state.failure.get_or_insert_with(|| (kind, error.to_string()));
                }
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn write_chunks(&self, bytes: &[u8], to: &mut impl Write) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match to.write(&rest[..rest.len().min(CHUNK)]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    rest = &rest[n..];
                    self.lock().written += 1;
                    self.changed.notify_all();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process that shares the pipe has made it non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(BUSY),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Piece {
    /// Returns the piece's size in the queue: its bytes, or 1 for the line about a gap.
    fn size(&self) -> usize {
        match self {
            Self::Text(bytes, _) => bytes.len(),
            Self::Gap(..) => 1,
        }
    }
}

impl State {
    /// Whether this kind of waiter has given up, without a write since.
    fn has_given_up(&self, waiter: Waiter) -> bool {
        self.given_up_at[waiter as usize] == Some(self.written)
    }

    fn give_up(&mut self, waiter: Waiter) {
        self.given_up_at[waiter as usize] = Some(self.written);
    }

    fn leave_out(&mut self, lines: u64, gap: GapLine) {
        match self.pieces.back_mut() {
            Some(Piece::Gap(count, _)) => *count += lines,
            _ => self.push(Piece::Gap(lines, gap)),
        }
    }

    fn push(&mut self, piece: Piece) {
        self.bytes += piece.size();
        self.pieces.push_back(piece);
    }

    fn end(&mut self) {
        self.gone = true;
        self.pieces.clear();
        self.bytes = 0;
    }
}

/// Whether a write's error means that the terminal is gone, or that the stream was closed.
fn is_gone(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let gone = [Errno::IO.raw_os_error(), Errno::BADF.raw_os_error()];
    error.raw_os_error().is_some_and(|code| gone.contains(&code))
}

/// Returns the number of lines of a piece, including an unfinished one.
fn lines(bytes: &[u8]) -> u64 {
    let whole = bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
    whole + u64::from(bytes.last().is_some_and(|&last| last != b'\n'))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A reader that is blocked until its gate is dropped.
    struct Gated {
        gate: Option<Receiver<()>>,
        read: Arc<Mutex<Vec<u8>>>,
        /// Failures of the next writes.
        failures: VecDeque<i32>,
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some(gate) = self.gate.take() {
                let _ = gate.recv();
            }
            if let Some(code) = self.failures.pop_front() {
                return Err(io::Error::from_raw_os_error(code));
            }
            self.read.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns a queue whose reader is blocked until the sender is dropped, and the reader's text.
    fn gated(failures: &[i32]) -> (Arc<Queue>, Sender<()>, Arc<Mutex<Vec<u8>>>) {
        let (hold, gate) = channel();
        let read = Arc::<Mutex<Vec<u8>>>::default();
        let gated = Mutex::new(Some(Gated {
            gate: Some(gate),
            read: read.clone(),
            failures: failures.iter().copied().collect(),
        }));
        let queue = Queue::start("test", move || gated.lock().unwrap().take().unwrap());
        (queue, hold, read)
    }

    fn gap(count: u64) -> String {
        format!("({count} missing)\n")
    }

    fn put(queue: &Queue, text: &str, room: usize) -> bool {
        queue.put(text.as_bytes(), room, gap, &Full::LeaveOut)
    }

    fn all_read(queue: &Queue, read: &Mutex<Vec<u8>>) -> String {
        queue.flush(LONG, Instant::now() + LONG);
        String::from_utf8(read.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn dropped_lines_are_counted_in_place() {
        let (queue, hold, read) = gated(&[]);
        for line in ["one\n", "two\n", "three\n", "four\n", "five\nsix\n"] {
            assert!(put(&queue, line, 10));
        }
        assert!(put(&queue, "an error\n", 40));
        drop(hold);
        assert_eq!(all_read(&queue, &read), "one\ntwo\n(4 missing)\nan error\n");
        // The queue has room again.
        assert!(put(&queue, "seven\n", 10));
        assert!(all_read(&queue, &read).ends_with("an error\nseven\n"));
    }

    #[test]
    fn line_longer_than_the_queue_is_written() {
        let (queue, hold, read) = gated(&[]);
        let long = "x".repeat(3 * CHUNK);
        assert!(put(&queue, &long, 10));
        drop(hold);
        assert_eq!(all_read(&queue, &read), long);
    }

    #[test]
    fn stalled_reader_is_not_waited_for() {
        let (queue, hold, read) = gated(&[]);
        assert!(put(&queue, "one\n", 10));
        let idle = Duration::from_millis(5);
        // The second wait gives up at once, even with a long limit.
        for idle in [idle, LONG] {
            queue.flush(idle, Instant::now() + LONG);
            assert!(queue.put(b"two and more\n", 10, gap, &Full::Wait(idle)));
        }
        assert_eq!(*read.lock().unwrap(), b"");
        drop(hold);
        // No flush waits for a reader whose awakening the queue has not noticed yet.
        let (expected, end) = (b"one\n(2 missing)\n", Instant::now() + LONG);
        while read.lock().unwrap().len() < expected.len() && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(*read.lock().unwrap(), expected);
    }

    #[test]
    fn waiting_writer_loses_no_lines() {
        let (queue, hold, read) = gated(&[]);
        let lines: Vec<String> = (0..200).map(|i| format!("line {i}\n")).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for line in &lines {
                    queue.put(line.as_bytes(), 20, gap, &Full::Wait(LONG));
                }
            });
            drop(hold);
        });
        assert_eq!(all_read(&queue, &read), lines.concat());
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_counted() {
        const NO_SPACE: i32 = 28;
        let (queue, hold, read) = gated(&[NO_SPACE, NO_SPACE]);
        drop(hold);
        for line in ["one\n", "two\n", "three\n"] {
            assert!(put(&queue, line, CAPACITY));
            all_read(&queue, &read);
        }
        assert_eq!(all_read(&queue, &read), "(2 missing)\nthree\n");
        assert_eq!(queue.take_failure().unwrap().kind(), ErrorKind::StorageFull);
        assert!(queue.take_failure().is_none());
    }

    #[test]
    fn gone_reader_is_not_written_to() {
        for gone in [32, 5] {
            let (queue, hold, read) = gated(&[gone]);
            drop(hold);
            put(&queue, "one\n", CAPACITY);
            all_read(&queue, &read);
            assert!(!put(&queue, "two\n", CAPACITY));
            assert_eq!(all_read(&queue, &read), "");
        }
    }
}
