//! [`Connections`].

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};

use super::handshake::Denial;

/// Maximum number of connections in their handshake, in a job of few ranks.
const MIN_HALF_OPEN: usize = 64;
/// Maximum number for any number of ranks, which all connect at once.
const MAX_HALF_OPEN: usize = 4096;
/// Maximum number of connections of a rank: one for each request under way, with room to spare.
const MAX_OF_RANK: usize = 256;

/// The open connections of a server.
///
/// Connections without a proof of the job's key are limited: the oldest is closed for the next one.
/// A rank's handshake is short; it either succeeds or is retried. A stranger's open connection
/// stays in its handshake and is closed.
#[derive(Debug)]
pub(super) struct Connections {
    open: BTreeMap<u64, Connection>,
    max_half_open: usize,
    next_id: u64,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// The connection's rank, after its handshake.
    rank: Option<usize>,
}

impl Connections {
    pub(super) fn new(world_size: usize) -> Self {
        let max_half_open = world_size.clamp(MIN_HALF_OPEN, MAX_HALF_OPEN);
        Self { open: BTreeMap::new(), max_half_open, next_id: 0 }
    }

    /// Keeps `stream` to close it later; returns its id.
    pub(super) fn insert(&mut self, stream: TcpStream) -> u64 {
        let half_open = || self.open.iter().filter(|(_, connection)| connection.rank.is_none());
        if half_open().count() >= self.max_half_open
            && let Some((&oldest, _)) = half_open().next()
        {
            self.close(oldest);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.open.insert(id, Connection { stream, rank: None });
        id
    }

    /// Records that a connection belongs to `rank`.
    ///
    /// # Errors
    /// If the connection was closed for another one meanwhile, or the rank has too many.
    pub(super) fn admit(&mut self, id: u64, rank: usize) -> Result<(), Denial> {
        let own = self.open.values().filter(|connection| connection.rank == Some(rank)).count();
        if own >= MAX_OF_RANK {
            return Err(Denial::Refused(format!("rank {rank} has {own} connections already")));
        }
        let connection = self.open.get_mut(&id).ok_or(Denial::TryAgain)?;
        connection.rank = Some(rank);
        Ok(())
    }

    /// Closes a connection.
    pub(super) fn close(&mut self, id: u64) {
        if let Some(connection) = self.open.remove(&id) {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes all connections.
    pub(super) fn close_all(&self) {
        for connection in self.open.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn evicted_connection_is_not_admitted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connections = Connections::new(2);
        let (pushed_out, kept) = (connections.insert(stream()), connections.insert(stream()));
        assert_eq!(connections.admit(kept, 0), Ok(()));
        for _ in 0..MIN_HALF_OPEN {
            connections.insert(stream());
        }
        assert_eq!(connections.admit(pushed_out, 1), Err(Denial::TryAgain));
        assert_eq!(connections.admit(kept, 0), Ok(()), "who has proved the key keeps the place");
    }
}
