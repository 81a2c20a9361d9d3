//! Byte ranges of files on other hosts: who asks whom, and the messages.
//!
//! A request is three integers: a file's index, an offset, and a length of at most [`PIECE`] bytes.
//! The answer is the bytes. A negative index ends the requests of a rank. If a file cannot be read,
//! the groups are aborted: the other ranks wait for its bytes. Two ranks may ask each other, so
//! requests and answers have a group each.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use candle_core::{DType, Device, Tensor};

use super::Hosts;
use super::found::{Found, OnHosts};
use super::save::PIECE;
use crate::{CheckpointIO, CheckpointReader};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{ProcessGroup, Work};

/// Requests whose answers are awaited together.
const DEPTH: usize = 2;
/// Stack of a thread that serves one rank.
const STACK: usize = 512 << 10;

/// The rank that `rank` asks for a file that its host lacks; `None` if its host has the file.
pub(super) fn source(hosts: &Hosts, rank: usize, found: &Found) -> Option<usize> {
    if found.hosts.contains(&hosts.of(rank)) {
        return None;
    }
    // The ranks of a host ask different hosts, and different ranks of a host.
    let host = found.hosts[rank % found.hosts.len()];
    let servers = hosts.ranks(host);
    Some(servers[rank % servers.len()])
}

/// The ranks that `rank` asks for files.
pub(super) fn sources(hosts: &Hosts, checkpoint: &OnHosts, rank: usize) -> Vec<usize> {
    let mut all: Vec<usize> =
        checkpoint.files.values().filter_map(|found| source(hosts, rank, found)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The process groups of the messages.
#[derive(Clone)]
pub(super) struct Groups {
    requests: Arc<dyn ProcessGroup>,
    answers: Arc<dyn ProcessGroup>,
}

impl Groups {
    /// Collective.
    pub(super) fn split(world: &dyn ProcessGroup) -> Result<Self> {
        let all: Vec<usize> = (0..world.size()).collect();
        let split = |name| world.split(std::slice::from_ref(&all), name);
        Ok(Self { requests: split("recovery")?, answers: split("recovered")? })
    }

    pub(super) fn abort(&self, reason: &str) {
        self.requests.abort(reason);
        self.answers.abort(reason);
    }
}

fn request(index: i64, offset: i64, len: i64) -> Result<Tensor> {
    Ok(Tensor::from_vec(vec![index, offset, len], 3, &Device::Cpu)?)
}

/// Answers the requests of one rank, until it sends no more.
fn serve(groups: &Groups, client: usize, io: &dyn CheckpointIO, paths: &[String]) -> Result<()> {
    let asked = request(0, 0, 0)?;
    let buffer = Tensor::zeros(PIECE, DType::U8, &Device::Cpu)?;
    let mut open: BTreeMap<usize, Arc<dyn CheckpointReader>> = BTreeMap::new();
    loop {
        groups.requests.recv(&asked, client)?.wait()?;
        let numbers = storage::with_host(&asked, <[i64]>::to_vec)?;
        let [index, offset, len] = numbers[..] else { return Ok(()) };
        let Ok(index) = usize::try_from(index) else { return Ok(()) };
        let (Some(path), Ok(offset), Ok(len)) =
            (paths.get(index), u64::try_from(offset), usize::try_from(len))
        else {
            return Err(Error::other("a rank asks for bytes that are in no file"));
        };
        let reader = match open.get(&index) {
            Some(reader) => reader.clone(),
            None => open.entry(index).or_insert(io.open(path)?).clone(),
        };
        let answer = buffer.narrow(0, 0, len.min(PIECE))?;
        storage::with_bytes_mut(&answer, |bytes| reader.read_exact_at(bytes, offset))?
            .map_err(Error::io("reading", io.location(path)))?;
        groups.answers.send(&answer, client)?.wait()?;
    }
}

/// Starts a thread for each rank that asks this one.
pub(super) fn start_serving(
    groups: &Groups,
    hosts: &Hosts,
    checkpoint: &OnHosts,
    io: Option<&Arc<dyn CheckpointIO>>,
) -> Result<Vec<JoinHandle<Result<()>>>> {
    let (own, size) = (groups.requests.rank(), groups.requests.size());
    let clients = (0..size).filter(|rank| sources(hosts, checkpoint, *rank).contains(&own));
    let Some(io) = io else { return Ok(Vec::new()) };
    let paths: Arc<Vec<String>> = Arc::new(
        checkpoint.files.keys().map(|file| format!("{}/{file}", checkpoint.name)).collect(),
    );
    let start = |client| {
        let (groups, io, paths) = (groups.clone(), io.clone(), paths.clone());
        let run = move || {
            let served = serve(&groups, client, &*io, &paths);
            if let Err(error) = &served {
                groups.abort(&error.to_string());
            }
            served
        };
        std::thread::Builder::new()
            .name(format!("serve-{client}"))
            .stack_size(STACK)
            .spawn(run)
            .map_err(Error::io("starting a thread that sends the state", Path::new("")))
    };
    clients.map(start).collect()
}

/// Requests of this rank to one other rank.
pub(super) struct Link {
    groups: Groups,
    server: usize,
    /// Buffers for answers.
    buffers: Mutex<Vec<Tensor>>,
}

impl Link {
    pub(super) fn new(groups: &Groups, server: usize) -> Self {
        Self { groups: groups.clone(), server, buffers: Mutex::default() }
    }

    /// Reads a range of the file with this index.
    pub(super) fn read(&self, index: usize, bytes: &mut [u8], offset: u64) -> Result<()> {
        // The answers come in the order of the requests, so one thread asks at a time.
        let mut buffers = self.buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut waiting = VecDeque::new();
        let mut at = offset;
        for piece in bytes.chunks_mut(PIECE) {
            if waiting.len() == DEPTH {
                finish(waiting.pop_front(), &mut buffers)?;
            }
            let buffer = match buffers.pop() {
                Some(buffer) => buffer,
                None => Tensor::zeros(PIECE, DType::U8, &Device::Cpu)?,
            };
            let asked = request(index as i64, at as i64, piece.len() as i64)?;
            let sent = self.groups.requests.send(&asked, self.server)?;
            let answer = buffer.narrow(0, 0, piece.len())?;
            let received = self.groups.answers.recv(&answer, self.server)?;
            at += piece.len() as u64;
            waiting.push_back(Asked { works: [sent, received], buffer, answer, piece });
        }
        while !waiting.is_empty() {
            finish(waiting.pop_front(), &mut buffers)?;
        }
        Ok(())
    }

    /// Tells the server that no more requests come.
    pub(super) fn end(&self) -> Result<()> {
        self.groups.requests.send(&request(-1, 0, 0)?, self.server)?.wait()
    }
}

/// A request whose answer is under way.
struct Asked<'a> {
    works: [Work; 2],
    buffer: Tensor,
    /// The part of the buffer that receives the answer.
    answer: Tensor,
    /// Where the bytes belong.
    piece: &'a mut [u8],
}

/// Waits for the answer to a request, and copies its bytes.
fn finish(asked: Option<Asked<'_>>, buffers: &mut Vec<Tensor>) -> Result<()> {
    let Some(Asked { works, buffer, answer, piece }) = asked else { return Ok(()) };
    for work in works {
        work.wait()?;
    }
    storage::with_bytes(&answer, |found| piece.copy_from_slice(found))?;
    buffers.push(buffer);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> Hosts {
        Hosts::new(&["a", "a", "b", "c", "c", "c"].map(str::to_owned))
    }

    #[test]
    fn own_host_comes_first() {
        let found = |hosts: &[usize]| Found { bytes: 1, hosts: hosts.to_vec() };
        assert_eq!(source(&hosts(), 0, &found(&[1, 0])), None);
        assert_eq!(source(&hosts(), 0, &found(&[1])), Some(2));
        let asked: Vec<_> = (3..6).map(|rank| source(&hosts(), rank, &found(&[0, 1]))).collect();
        assert_eq!(asked, [Some(2), Some(0), Some(2)]);
    }

    #[test]
    fn host_without_files_asks_several() {
        let file = |name: &str, hosts: &[usize]| {
            (name.to_owned(), Found { bytes: 1, hosts: hosts.to_vec() })
        };
        let files = [file("x", &[0]), file("y", &[1]), file("z", &[0, 1])].into();
        let roots = vec![None; 3];
        let checkpoint = OnHosts { name: "a".to_owned(), roots, files };
        assert_eq!(sources(&hosts(), &checkpoint, 4), [0, 2]);
        assert_eq!(sources(&hosts(), &checkpoint, 1), [2]);
    }
}
