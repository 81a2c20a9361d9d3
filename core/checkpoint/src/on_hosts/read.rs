//! Reading a checkpoint in the memory of several hosts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::Hosts;
use super::found::OnHosts;
use super::serve::{Groups, Link, source, sources, start_serving};
use crate::{CheckpointIO, CheckpointReader, CheckpointWriter, Entry};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;

/// A checkpoint that all ranks read, each the byte ranges that it needs.
///
/// While it is open, a thread for each rank that lacks files of this host sends them. So every rank
/// [ends](Self::end) the reading at about the same time. Dropping it without that aborts the
/// reading of the other ranks.
pub struct HostsReader {
    view: Arc<View>,
    servers: Vec<JoinHandle<Result<()>>>,
    ended: bool,
}

impl OnHosts {
    /// Opens the checkpoint on all ranks of `world`, whose hosts are `hosts`. `open` opens a place
    /// of this host. Collective: ranks get process groups for the reading, if any host lacks a
    /// file.
    ///
    /// # Errors
    /// If a peer fails, this host's place cannot be opened, or no thread can be started.
    pub fn open(
        &self,
        world: &dyn ProcessGroup,
        hosts: &Hosts,
        open: impl FnOnce(&Path) -> Result<Arc<dyn CheckpointIO>>,
    ) -> Result<HostsReader> {
        let rank = world.rank();
        let own = self.roots[hosts.of(rank)].as_deref().map(open).transpose()?;
        let asks = |rank| !sources(hosts, self, rank).is_empty();
        let (mut links, mut servers, mut groups) = (BTreeMap::new(), Vec::new(), None);
        if (0..world.size()).any(asks) {
            let split = Groups::split(world)?;
            servers = start_serving(&split, hosts, self, own.as_ref())?;
            let asked = sources(hosts, self, rank).into_iter();
            links = asked.map(|server| (server, Arc::new(Link::new(&split, server)))).collect();
            groups = Some(split);
        }
        let place = |(index, (file, found)): (usize, (&String, _))| {
            let link = source(hosts, rank, found).and_then(|server| links.get(&server).cloned());
            (file.clone(), Place { index, bytes: found.bytes, link })
        };
        let files = self.files.iter().enumerate().map(place).collect();
        let links = links.into_values().collect();
        let failure = Arc::default();
        let view = View { name: self.name.clone(), own, files, links, groups, failure };
        Ok(HostsReader { view: Arc::new(view), servers, ended: false })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|found| found.bytes).sum()
    }
}

impl HostsReader {
    /// The checkpoint's files, for
    /// [`DistributedCheckpoint::open_with`](crate::DistributedCheckpoint).
    pub fn io(&self) -> Arc<dyn CheckpointIO> {
        self.view.clone()
    }

    /// The error of the group by which a read has failed, if one has. It says more than the error
    /// of the read.
    pub fn take_failure(&self) -> Option<Error> {
        self.view.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Ends this rank's reading, and waits until the ranks that it serves have ended theirs.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn end(mut self) -> Result<()> {
        for link in &self.view.links {
            link.end()?;
        }
        for server in self.servers.drain(..) {
            server.join().map_err(|_| Error::other("a thread that sends the state panicked"))??;
        }
        self.ended = true;
        Ok(())
    }
}

impl Drop for HostsReader {
    fn drop(&mut self) {
        if let (false, Some(groups)) = (self.ended, &self.view.groups) {
            groups.abort("a rank could not read the state");
        }
    }
}

/// Where this rank reads a file.
struct Place {
    /// Of all files.
    index: usize,
    bytes: u64,
    /// `None` if this host has the file.
    link: Option<Arc<Link>>,
}

/// The files of one checkpoint on all hosts, to be read.
struct View {
    name: String,
    /// This host's place.
    own: Option<Arc<dyn CheckpointIO>>,
    files: BTreeMap<String, Place>,
    links: Vec<Arc<Link>>,
    groups: Option<Groups>,
    failure: Arc<Mutex<Option<Error>>>,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in the memory of hosts", self.name)
    }
}

impl View {
    fn read_only<T>(&self, path: &str) -> Result<T> {
        Err(Error::checkpoint(
            self.location(path),
            "copies in the memory of hosts are only read here",
        ))
    }

    /// The path within the checkpoint.
    fn within<'a>(&self, path: &'a str) -> Option<&'a str> {
        let rest = path.strip_prefix(&self.name)?;
        if rest.is_empty() { Some("") } else { rest.strip_prefix('/') }
    }
}

impl CheckpointIO for View {
    fn location(&self, path: &str) -> PathBuf {
        Path::new("the hosts' memory").join(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        self.read_only(path)
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        let place = self.within(path).and_then(|file| self.files.get(file));
        let missing =
            || Error::io("opening", self.location(path))(std::io::ErrorKind::NotFound.into());
        let Place { index, bytes, link } = place.ok_or_else(missing)?;
        match (link, &self.own) {
            (Some(link), _) => {
                let (index, bytes, link) = (*index, *bytes, link.clone());
                Ok(Arc::new(RemoteFile { index, bytes, link, failure: self.failure.clone() }))
            }
            (None, Some(own)) => own.open(path),
            (None, None) => Err(missing()),
        }
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let Some(folder) = self.within(path) else { return Ok(Vec::new()) };
        let in_folder = |(file, place): (&String, &Place)| {
            let (above, name) = file.rsplit_once('/').unwrap_or(("", file));
            let name = name.to_owned();
            (above == folder).then_some(Entry { name, is_directory: false, bytes: place.bytes })
        };
        Ok(self.files.iter().filter_map(in_folder).collect())
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.read_only(path)
    }

    fn commit(&self, _staged: &str, name: &str) -> Result<()> {
        self.read_only(name)
    }
}

/// A file on another host.
struct RemoteFile {
    index: usize,
    bytes: u64,
    link: Arc<Link>,
    failure: Arc<Mutex<Option<Error>>>,
}

impl CheckpointReader for RemoteFile {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.bytes)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.link.read(self.index, buffer, offset).map_err(|error| {
            let message = error.to_string();
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            std::io::Error::other(message)
        })
    }
}
