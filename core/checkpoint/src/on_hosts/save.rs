//! Saving a checkpoint to the memory of several hosts.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Hosts;
use crate::manifest::MANIFEST;
use crate::save::{Written, check_visible, combine, remove_unfinished, write};
use crate::{CheckpointIO, CheckpointReader, CheckpointWriter, Manifest, SaveRequest};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::checkpoint_io::{invalid_name, staging_name};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object, broadcast_object};

/// Bytes that are sent at a time.
pub(super) const PIECE: usize = 4 << 20;

/// Writes the distributed checkpoint `name` to `io`, which is another place on each host, and
/// returns its path on this host.
///
/// Each rank writes its files to its host, and sends exactly their bytes to the rank of the next
/// host that writes them there too. Ranks without a `request` hold no part; the metadata is that of
/// the first rank with one.
///
/// The checkpoint appears on each host in one step, and on no host before all files are complete on
/// all hosts. Afterwards all other checkpoints are removed from `io`, once all hosts have the new
/// one. So if ranks are lost meanwhile, the new checkpoint or the one before is whole on all hosts.
/// Collective.
///
/// # Errors
/// On every rank, if it fails on any: [`Error::PeerFailed`] on ranks that did not fail. Also if
/// `ready` is an error on any rank, or no rank has a request.
pub fn save_on_hosts(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    hosts: &Hosts,
    name: &str,
    request: Option<&SaveRequest>,
    ready: Result<()>,
) -> Result<PathBuf> {
    let staged = broadcast_object(group, &staging_name(name), 0)?;
    let save = Save { io, group, hosts, name, staged: &staged };
    let saved = save.stage(request, ready).and_then(|()| save.commit());
    if saved.is_err()
        && hosts.leads(group.rank())
        && let Err(error) = io.remove(&staged)
    {
        tracing::warn!("the next save will remove what this one leaves: {error}");
    }
    saved.map(|()| io.location(name))
}

struct Save<'a> {
    io: &'a dyn CheckpointIO,
    group: &'a dyn ProcessGroup,
    hosts: &'a Hosts,
    name: &'a str,
    staged: &'a str,
}

impl Save<'_> {
    /// Runs `f` on the first rank of each host.
    fn on_leader(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.hosts.leads(self.group.rank()) { f() } else { Ok(()) }
    }

    /// Completes the files on all hosts, under a temporary name.
    fn stage(&self, request: Option<&SaveRequest>, ready: Result<()>) -> Result<()> {
        let Self { io, group, name, staged, .. } = *self;
        let prepare = || match invalid_name(name) {
            Some(complaint) => Err(Error::checkpoint(io.location(name), complaint)),
            None => remove_unfinished(io).map(drop),
        };
        let prepared = ready.and_then(|()| self.on_leader(prepare)).map(|()| request.is_some());
        let has_part = agreed(group, prepared)?;
        let writers: Vec<usize> = (0..group.size()).filter(|rank| has_part[*rank]).collect();
        let Some(&first) = writers.first() else {
            return Err(Error::checkpoint(io.location(name), "no rank has a part to save"));
        };
        let written = match (request, writers.binary_search(&group.rank())) {
            (Some(SaveRequest { model, optimizer, meta, .. }), Ok(index)) => {
                write(io, index, staged, model, optimizer, meta).map(Some)
            }
            _ => Ok(None),
        };
        let written = agreed(group, written)?;
        // The first rank of a host looks for the files that all its ranks have written.
        agreed(group, self.exchange(&written)?)?;
        let mut manifest = Err(String::new());
        if let (true, Some(request)) = (group.rank() == first, request) {
            let parts: Vec<Written> = written.iter().flatten().cloned().collect();
            manifest = combine(io, name, &request.meta, parts)
                .and_then(|mut manifest| manifest.encode(&io.location(name)))
                .and_then(|bytes| String::from_utf8(bytes).map_err(Error::other))
                .map_err(|error| error.to_string());
        }
        let manifest = broadcast_object(group, &manifest, first)?;
        let manifest = manifest.map_err(|message| match group.rank() == first {
            true => Error::checkpoint(io.location(name), message),
            false => Error::PeerFailed { rank: group.global_ranks()[first], message },
        })?;
        let staged_manifest = || {
            let path = format!("{staged}/{MANIFEST}");
            let found = Manifest::parse(manifest.as_bytes(), &io.location(&path))?;
            let here = self.hosts.files_on(self.hosts.of(group.rank()));
            let files = here.iter().flat_map(|rank| written[*rank].iter());
            let files: Vec<&String> = files.flat_map(|written| written.files.keys()).collect();
            check_visible(io, staged, &found, |file| files.contains(&file))?;
            io.save(&path, manifest.as_bytes())
        };
        agreed(group, self.on_leader(staged_manifest)).map(drop)
    }

    /// Makes the checkpoint appear on all hosts, and then removes all others.
    fn commit(&self) -> Result<()> {
        let Self { io, group, name, staged, .. } = *self;
        agreed(group, self.on_leader(|| io.commit(staged, name)))?;
        self.on_leader(|| {
            let there = io.list("").unwrap_or_else(|error| {
                tracing::warn!("old copies stay: {error}");
                Vec::new()
            });
            for old in there.iter().filter(|entry| entry.is_directory && entry.name != name) {
                if let Err(error) = io.remove(&old.name) {
                    tracing::warn!("an old copy stays: {error}");
                }
            }
            Ok(())
        })
    }

    /// Sends this rank's files to its keeper, and writes those that it keeps. An error of the files
    /// comes after all messages.
    fn exchange(&self, written: &[Option<Written>]) -> Result<Result<()>> {
        let Self { io, group, hosts, staged, .. } = *self;
        let rank = group.rank();
        let pieces = |rank: usize| written[rank].as_ref().map_or_else(Vec::new, pieces);
        let mut outgoing = match hosts.keeper(rank) {
            Some(keeper) => Some(Outgoing::new(keeper, pieces(rank))?),
            None => None,
        };
        let incoming = hosts.kept_by(rank).into_iter();
        let mut incoming = incoming
            .map(|source| Incoming::new(source, pieces(source)))
            .collect::<Result<Vec<_>>>()?;
        let mut outcome = Ok(());
        let rounds = incoming.iter().map(|from| from.pieces.len());
        let rounds = rounds.chain(outgoing.iter().map(|to| to.pieces.len())).max().unwrap_or(0);
        for round in 0..rounds {
            let mut works = Vec::new();
            if let Some(to) = &mut outgoing
                && let Some(piece) = to.pieces.get(round).cloned()
            {
                let buffer = to.buffer.narrow(0, 0, piece.len)?;
                if outcome.is_ok() {
                    outcome = to.read(io, staged, &piece, &buffer);
                }
                works.push(group.send(&buffer, to.keeper)?);
            }
            for from in &incoming {
                if let Some(piece) = from.pieces.get(round) {
                    works.push(group.recv(&from.buffer.narrow(0, 0, piece.len)?, from.source)?);
                }
            }
            for work in works {
                work.wait()?;
            }
            for from in &mut incoming {
                if outcome.is_ok() {
                    outcome = from.write(io, staged, round);
                }
            }
        }
        Ok(outcome)
    }
}

/// Gathers the results of all ranks. If one is an error, all ranks get one.
pub(super) fn agreed<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    own: Result<T>,
) -> Result<Vec<T>> {
    let (own, error) = match own {
        Ok(value) => (Ok(value), None),
        Err(error) => (Err(error.to_string()), Some(error)),
    };
    let all: Vec<Result<T, String>> = all_gather_object(group, &own)?;
    if let Some(error) = error {
        return Err(error);
    }
    let failed = |(rank, message)| Error::PeerFailed { rank: group.global_ranks()[rank], message };
    let all = all.into_iter().enumerate();
    all.map(|(rank, one)| one.map_err(|message| failed((rank, message)))).collect()
}

/// A range of a file that is sent as one message.
#[derive(Debug, Clone, PartialEq)]
struct Piece {
    file: Arc<str>,
    offset: u64,
    len: usize,
    /// Whether the file ends with it.
    is_last: bool,
}

/// The messages with the files of one rank, in their order.
fn pieces(written: &Written) -> Vec<Piece> {
    let lengths: BTreeMap<&String, u64> =
        written.files.iter().map(|(file, (len, _))| (file, *len)).collect();
    let of_file = |(file, len): (&String, u64)| {
        let file: Arc<str> = file.as_str().into();
        (0..len).step_by(PIECE).map(move |offset| {
            let rest = len - offset;
            let is_last = rest <= PIECE as u64;
            Piece { file: file.clone(), offset, len: rest.min(PIECE as u64) as usize, is_last }
        })
    };
    lengths.into_iter().flat_map(of_file).collect()
}

fn buffer(pieces: &[Piece]) -> Result<Tensor> {
    let longest = pieces.iter().map(|piece| piece.len).max().unwrap_or(0);
    Ok(Tensor::zeros(longest, DType::U8, &Device::Cpu)?)
}

/// The files that this rank sends.
struct Outgoing {
    keeper: usize,
    pieces: Vec<Piece>,
    buffer: Tensor,
    open: Option<(Arc<str>, Arc<dyn CheckpointReader>)>,
}

impl Outgoing {
    fn new(keeper: usize, pieces: Vec<Piece>) -> Result<Self> {
        Ok(Self { keeper, buffer: buffer(&pieces)?, pieces, open: None })
    }

    fn read(
        &mut self,
        io: &dyn CheckpointIO,
        staged: &str,
        piece: &Piece,
        buffer: &Tensor,
    ) -> Result<()> {
        let path = format!("{staged}/{}", piece.file);
        let reader = match &self.open {
            Some((file, reader)) if *file == piece.file => reader.clone(),
            _ => {
                let reader = io.open(&path)?;
                self.open = Some((piece.file.clone(), reader.clone()));
                reader
            }
        };
        storage::with_bytes_mut(buffer, |bytes| reader.read_exact_at(bytes, piece.offset))?
            .map_err(Error::io("reading", io.location(&path)))
    }
}

/// The files that this rank receives from one other rank.
struct Incoming {
    source: usize,
    pieces: Vec<Piece>,
    buffer: Tensor,
    open: Option<Box<dyn CheckpointWriter>>,
}

impl Incoming {
    fn new(source: usize, pieces: Vec<Piece>) -> Result<Self> {
        Ok(Self { source, buffer: buffer(&pieces)?, pieces, open: None })
    }

    /// Writes the message of this round, if there was one.
    fn write(&mut self, io: &dyn CheckpointIO, staged: &str, round: usize) -> Result<()> {
        let Some(piece) = self.pieces.get(round) else { return Ok(()) };
        let path = format!("{staged}/{}", piece.file);
        let mut writer = match self.open.take() {
            Some(writer) => writer,
            None => io.create(&path)?,
        };
        let buffer = self.buffer.narrow(0, 0, piece.len)?;
        storage::with_bytes(&buffer, |bytes| writer.write_all(bytes))?
            .map_err(Error::io("writing", io.location(&path)))?;
        match piece.is_last {
            true => writer.finish(),
            false => {
                self.open = Some(writer);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_file_once() {
        let digest = crate::FileDigest::of(b"");
        let long = 2 * PIECE as u64 + 5;
        let files = [("a", long), ("b", PIECE as u64)];
        let files = files.map(|(file, len)| (file.to_owned(), (len, digest)));
        let written = Written { files: files.into(), model: Vec::new(), optimizer: Vec::new() };
        let found: Vec<_> = pieces(&written)
            .into_iter()
            .map(|piece| (piece.file.to_string(), piece.offset, piece.len, piece.is_last))
            .collect();
        let (a, b) = ("a".to_owned(), "b".to_owned());
        let piece = PIECE as u64;
        assert_eq!(
            found,
            [
                (a.clone(), 0, PIECE, false),
                (a.clone(), piece, PIECE, false),
                (a, 2 * piece, 5, true),
                (b, 0, PIECE, true),
            ]
        );
    }
}
