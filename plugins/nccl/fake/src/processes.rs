//! Ranks that are processes of one host, and exchange data in a folder.
//!
//! A rank's part in collective 7 is the file `7.of.RANK`. Its message 3 to another rank is
//! `3.from.RANK.to.RANK`, which the receiver removes. Each file begins with a line that describes
//! its content.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use crate::clique::{Address, Call, Clique, Message};
use crate::reduce::size;

/// A communicator in this process, which is one of its ranks.
pub(crate) struct Processes {
    folder: PathBuf,
    size: usize,
    seed: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    aborted: bool,
    /// The last collective for which this rank has written its part.
    given: Option<u64>,
    /// A collective in which the ranks differ.
    misfit: Option<u64>,
    /// Messages so far, by peer.
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
}

impl Processes {
    pub(crate) fn new(folder: &Path, size: usize, seed: u64) -> std::io::Result<Self> {
        let folder = folder.join(seed.to_string());
        std::fs::create_dir_all(&folder)?;
        Ok(Self { folder, size, seed, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic in a communicator")
    }

    fn part(&self, number: u64, rank: usize) -> PathBuf {
        self.folder.join(format!("{number}.of.{rank}"))
    }

    fn message(&self, number: u64, from: usize, to: usize) -> PathBuf {
        self.folder.join(format!("{number}.from.{from}.to.{to}"))
    }

    fn joined(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("rank.{rank}"))
    }
}

/// Writes a file under another name, and renames it, so that readers only see it whole.
fn give(path: &Path, what: &str, memory: Address, bytes: usize) {
    let mut content = format!("{what}\n").into_bytes();
    if bytes > 0 {
        // SAFETY: valid memory of that many bytes, which the caller has given to its stream.
        content.extend_from_slice(unsafe { std::slice::from_raw_parts(memory.at(0), bytes) });
    }
    let mut begun = path.as_os_str().to_owned();
    begun.push(".begun");
    let given = std::fs::write(&begun, content).and_then(|()| std::fs::rename(&begun, path));
    given.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Reads the file without its first line, if the file exists. An error if the line is not `what`.
fn take(path: &Path, what: &str) -> Option<Result<Vec<u8>, String>> {
    let content = std::fs::read(path).ok()?;
    let line = content.split(|&byte| byte == b'\n').next().unwrap_or_default();
    if line == what.as_bytes() {
        return Some(Ok(content[line.len() + 1..].to_vec()));
    }
    let line = String::from_utf8_lossy(line);
    Some(Err(format!("{}: `{line}` is not `{what}`", path.display())))
}

impl Clique for Processes {
    fn size(&self) -> usize {
        self.size
    }

    fn join(&self, rank: usize) -> bool {
        std::fs::File::create_new(self.joined(rank)).is_ok()
    }

    fn is_whole(&self) -> bool {
        (0..self.size).all(|rank| self.joined(rank).exists())
    }

    fn abort(&self, _: usize) {
        self.state().aborted = true;
    }

    fn meet(&self, rank: usize, number: u64, call: &Call, misfit: &dyn Fn(String)) -> bool {
        let mut state = self.state();
        if state.aborted {
            return true;
        }
        let Call { kind, count, dtype, .. } = call;
        let what = format!("{kind:?} of {count}, dtype {dtype}");
        if state.given.is_none_or(|given| given < number) {
            give(&self.part(number, rank), &what, call.input, call.input_bytes(rank, self.size));
            state.given = Some(number);
        }
        if state.misfit == Some(number)
            || !(0..self.size).all(|rank| self.part(number, rank).exists())
        {
            return false;
        }
        let mut parts = Vec::new();
        for part in (0..self.size).filter_map(|rank| take(&self.part(number, rank), &what)) {
            match part {
                Ok(part) => parts.push(part),
                Err(error) => {
                    state.misfit = Some(number);
                    misfit(error);
                    return false;
                }
            }
        }
        let inputs: Vec<*const c_void> = parts.iter().map(|part| part.as_ptr().cast()).collect();
        // SAFETY: the files have the length of the inputs, and the caller vouches for the size of
        // the output.
        unsafe {
            let result = call.result(rank, &inputs, self.seed ^ (number << 20));
            std::ptr::copy(result.as_ptr(), call.output.at(0), result.len());
        }
        // All ranks are in this collective, so all have read the previous parts.
        if let Some(before) = number.checked_sub(1) {
            let _ = std::fs::remove_file(self.part(before, rank));
        }
        true
    }

    fn exchange(
        &self,
        rank: usize,
        messages: &[Message],
        begun: &mut [Option<u64>],
        ended: &mut [bool],
        misfit: &dyn Fn(String),
    ) -> bool {
        let state = &mut *self.state();
        if state.aborted {
            return true;
        }
        for (i, message) in messages.iter().enumerate() {
            let Message { memory, count, dtype, peer, sending } = *message;
            let (what, bytes) =
                (format!("{count}, dtype {dtype}"), count * size(dtype).unwrap_or(1));
            // Messages of a sender are received in order.
            let earlier =
                |(j, other): (usize, &Message)| !other.sending && other.peer == peer && !ended[j];
            if sending {
                let number = *begun[i].get_or_insert_with(|| {
                    let sent = state.sent.entry(peer).or_default();
                    give(&self.message(*sent, rank, peer), &what, memory, bytes);
                    *sent += 1;
                    *sent - 1
                });
                ended[i] = !self.message(number, rank, peer).exists();
            } else if !ended[i] && !messages[..i].iter().enumerate().any(earlier) {
                let received = state.received.entry(peer).or_default();
                let path = self.message(*received, peer, rank);
                match take(&path, &what) {
                    None => {}
                    Some(Err(error)) => misfit(error),
                    Some(Ok(content)) => {
                        // SAFETY: valid memory of that many bytes, which the caller has given to
                        // its stream.
                        unsafe {
                            std::ptr::copy(content.as_ptr(), memory.at(0), content.len());
                        }
                        let _ = std::fs::remove_file(path);
                        *received += 1;
                        ended[i] = true;
                    }
                }
            }
        }
        ended.iter().all(|&ended| ended)
    }
}
