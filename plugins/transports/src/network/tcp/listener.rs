//! The thread that accepts connections of other ranks.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fulgurite_core::{Error, Result, advice};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::contact::Contact;

/// Limit for connections that have not identified themselves. More wait to be accepted.
const MAX_STRANGERS: usize = 64;
/// Interval at which the thread checks whether it is still needed.
const POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Accepted connections that are not in use yet, by group and rank.
pub(super) struct Listener {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    taken: Mutex<HashMap<(String, usize), TcpStream>>,
    /// Signalled when a connection is accepted.
    came: Condvar,
    strangers: AtomicUsize,
    over: AtomicBool,
}

impl Listener {
    pub(super) fn new(listener: TcpListener, contact: Contact) -> Result<Self> {
        let fail =
            |what: &str, e: std::io::Error| Error::Launch(format!("{what}: {e}{}", advice(&e)));
        listener.set_nonblocking(true).map_err(|e| fail("listening", e))?;
        let state = Arc::new(State::default());
        std::thread::Builder::new()
            .name("tcp-listener".to_owned())
            .spawn({
                let state = state.clone();
                move || accept(&listener, &contact, &state)
            })
            .map_err(|e| fail("starting a thread", e))?;
        Ok(Self { state })
    }

    /// Returns a rank's connection for a group, if it arrives within `wait`.
    pub(super) fn take(&self, key: &str, rank: usize, wait: Duration) -> Option<TcpStream> {
        let wanted = (key.to_owned(), rank);
        let taken = self.state.taken.lock().expect("no panic while taking a connection");
        let missing = |taken: &mut HashMap<_, _>| !taken.contains_key(&wanted);
        let waited = self.state.came.wait_timeout_while(taken, wait, missing);
        let (mut taken, _) = waited.expect("no panic while taking a connection");
        taken.remove(&wanted)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Relaxed);
    }
}

fn accept(listener: &TcpListener, contact: &Contact, state: &Arc<State>) {
    while !state.over.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        let ready = matches!(poll(&mut fds, Some(&POLL)), Ok(1..));
        if !ready || state.strangers.load(Ordering::Relaxed) >= MAX_STRANGERS {
            if ready {
                std::thread::sleep(Duration::from_millis(10));
            }
            continue;
        }
        let (mut stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                // Without a free file descriptor, the listener is ready again at once.
                if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) {
                    tracing::warn!("a connection cannot be accepted: {error}{}", advice(&error));
                    std::thread::sleep(Duration::from_millis(500));
                }
                continue;
            }
        };
        state.strangers.fetch_add(1, Ordering::Relaxed);
        let greet = {
            let (contact, state) = (contact.clone(), state.clone());
            move || {
                match contact.answer(&mut stream) {
                    Ok((rank, key)) => {
                        let mut taken = state.taken.lock().expect("no panic while taking one");
                        taken.insert((key, rank), stream);
                        state.came.notify_all();
                    }
                    Err(error) => tracing::warn!("a connection from {from} is refused: {error}"),
                }
                state.strangers.fetch_sub(1, Ordering::Relaxed);
            }
        };
        if std::thread::Builder::new().name("tcp-greeting".to_owned()).spawn(greet).is_err() {
            state.strangers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
