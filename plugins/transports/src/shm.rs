//! Ranks that are processes of one host.
//!
//! ```
//! use fulgurite_core::collective::ProcessGroupConfig;
//! # use fulgurite_transports::Shm;
//! let json = r#"{ "type": "shm", "chunk_bytes": 1048576 }"#;
//! let config: Box<dyn ProcessGroupConfig> = serde_json::from_str(json).unwrap();
//! # let _ = config;
//! ```

use std::sync::Arc;

use fulgurite_config::register_process_group;
use fulgurite_engine::collective::{GroupContext, GroupMemory, ProcessGroup, ProcessGroupConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::memory::RegionLayout;

/// `process_group.type = "shm"`: shared memory between the processes of one host.
///
/// The memory is an anonymous file (memfd). One rank makes it, and the others open it through
/// `/proc` by the path in the job's store. It must belong to this user and be sealed, so that it
/// cannot shrink under a mapping. The file has no name, so it is freed however the processes
/// end. Linux only.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Shm {
    /// Bytes that a rank transfers in one phase of a collective, 4 KiB to 1 GiB. The same on all
    /// ranks. A group takes up to three times as much memory for each rank. The default of 1 MiB
    /// keeps the chunks in the caches. Larger chunks are not faster.
    #[default(1 << 20)]
    pub chunk_bytes: usize,
}

register_process_group!(
    "shm",
    Shm,
    "shared memory between the processes of one host",
    "{ type = \"shm\", chunk_bytes = 1048576 }"
);

#[typetag::serde(name = "shm")]
impl ProcessGroupConfig for Shm {
    fn check(&self) -> Result<()> {
        if !(4 << 10..=1 << 30).contains(&self.chunk_bytes) {
            return Err(Error::Config(format!(
                "trainer.process_group.chunk_bytes is {}; it must be between 4096 (4 KiB) and 1073741824 \
                 (1 GiB)",
                self.chunk_bytes
            )));
        }
        Ok(())
    }

    fn memory(&self, ranks: usize) -> GroupMemory {
        if ranks < 2 {
            return GroupMemory::default();
        }
        let layout = RegionLayout::new(ranks, self.chunk_bytes);
        // Chunks of messages take memory once ranks send to each other, which no strategy here
        // does.
        GroupMemory { used: layout.p2p_chunks as u64, mapped: layout.len as u64 }
    }

    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        if context.local_world_size != context.world_size {
            return Err(Error::Config(format!(
                "process group `shm` connects the processes of one host, but of this job's {} \
                 processes {} are on this host. {ACROSS_HOSTS}",
                context.world_size, context.local_world_size,
            )));
        }
        connect(self, context)
    }
}

/// The last sentence of messages about jobs on several hosts.
const ACROSS_HOSTS: &str = "Across hosts set trainer.process_group = \"auto\", which uses `shm` only within them, or \
                            \"tcp\"";

#[cfg(not(target_os = "linux"))]
fn connect(_: &Shm, _: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
    Err(Error::Config(format!(
        "process group `shm` needs Linux (memfd and futex). {ACROSS_HOSTS}; for tests there are \
         threads"
    )))
}

/// Same signature as on Linux, where such memory exists.
#[cfg(not(target_os = "linux"))]
pub(crate) fn connect_ranks(
    shm: &Shm,
    context: &GroupContext,
    _: &str,
    _: Vec<usize>,
    _: usize,
) -> Result<Arc<dyn ProcessGroup>> {
    connect(shm, context)
}

#[cfg(target_os = "linux")]
use linux::connect;
#[cfg(target_os = "linux")]
pub(crate) use linux::connect_ranks;

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;
    use std::fs::{File, OpenOptions};
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::sync::{Arc, Mutex, OnceLock};
    use std::time::Duration;

    use candle_core::{DType, Tensor};
    use fulgurite_engine::collective::{GroupContext, ProcessGroup};
    use fulgurite_error::{Error, Result, advice};
    use fulgurite_launch::{Patience, Store};
    use memmap2::{MmapOptions, MmapRaw};
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::fs::{
        MemfdFlags, OFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
    };
    use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
    use rustix::time::Timespec;
    use serde::{Deserialize, Serialize};

    use super::{ACROSS_HOSTS, RegionLayout, Shm};
    use crate::engine::{
        self, Board, Identity, MappedRegion, MemoryOwner, Rendezvous, Settings, blame,
    };
    use crate::memory::{self, Region, SEALS, SharedMemoryHandle, nonce};
    use crate::network::Messenger;

    /// Makes the group of all ranks, which are on one host.
    pub(super) fn connect(config: &Shm, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        let ranks = (0..context.world_size).collect();
        connect_ranks(config, context, "world", ranks, context.rank)
    }

    /// Makes the group of some of the job's ranks, given by their global ranks: all ranks on this
    /// host. This rank is number `own` of them. `key` distinguishes the groups of different hosts.
    pub(crate) fn connect_ranks(
        config: &Shm,
        context: &GroupContext,
        key: &str,
        global_ranks: Vec<usize>,
        own: usize,
    ) -> Result<Arc<dyn ProcessGroup>> {
        memory::set_ranks(context.local_world_size);
        // A job may build several world groups. Every rank builds them in the same order.
        let counter = format!("process_group/shm/builds/{}", context.rank);
        let build = context.store.add(&counter, 1)?;
        let host = ProcessRendezvous {
            store: context.store.clone(),
            own_rank: context.rank,
            processes: Mutex::default(),
            memories: Mutex::default(),
            board: OnceLock::new(),
            messenger: match global_ranks.len() < context.world_size {
                true => Some(Messenger::new(context.store.clone())?),
                false => None,
            },
        };
        let identity = Identity {
            key: format!("process_group/shm/{key}{build}"),
            name: "world".to_owned(),
            rank: own,
            global_ranks,
        };
        let (timeout, chunk_bytes) = (context.timeout, config.chunk_bytes);
        engine::connect(Arc::new(host), identity, Settings { timeout, chunk_bytes, spins: None })
    }

    /// The leader's message to the other ranks of a group, through the store.
    #[derive(Serialize, Deserialize)]
    enum Announcement {
        /// The region is this file of this process, of this length, signed with this nonce.
        Region { pid: u32, fd: u32, len: usize, nonce: u64 },
        /// The region could not be made, with the error message.
        Failed(String),
    }

    /// The rendezvous of processes of one host.
    struct ProcessRendezvous {
        store: Arc<dyn Store>,
        /// This process's global rank.
        own_rank: usize,
        /// The pidfd of each process, by global rank.
        processes: Mutex<HashMap<usize, OwnedFd>>,
        /// The ranks' shared memory, mapped by this process, by global rank.
        memories: Mutex<HashMap<usize, Arc<MmapRaw>>>,
        board: OnceLock<Arc<Board>>,
        /// For ranks on other hosts, if any.
        messenger: Option<Messenger>,
    }

    impl ProcessRendezvous {
        fn create(&self, key: &str, layout: RegionLayout) -> Result<MappedRegion> {
            let made = make_region(layout).map_err(|e| format!("{e}{}", advice(&e)));
            let announcement = match &made {
                Ok((_, file, nonce)) => Announcement::Region {
                    pid: std::process::id(),
                    fd: file.as_raw_fd().cast_unsigned(),
                    len: layout.len,
                    nonce: *nonce,
                },
                Err(error) => Announcement::Failed(error.clone()),
            };
            let bytes = serde_json::to_vec(&announcement).map_err(Error::other)?;
            self.store.set(key, &bytes)?;
            let (region, file, _) = made.map_err(|e| no_memory(layout, &e))?;
            Ok(MappedRegion { region: Arc::new(region), file: Some(file) })
        }

        fn open(
            &self,
            key: &str,
            leader: usize,
            layout: RegionLayout,
            timeout: Duration,
        ) -> Result<MappedRegion> {
            let bytes = self.store.get(key, timeout).map_err(|error| match error {
                Error::Launch(why) => {
                    let board = self.board.get();
                    let waits = board.map(|board| blame::describe(&blame::chain(board, leader)));
                    let waits = waits.unwrap_or_default();
                    Error::Launch(format!("{why}; waited for rank {leader}{waits}"))
                }
                other => other,
            })?;
            let announcement = serde_json::from_slice(&bytes).map_err(|e| {
                Error::Launch(format!("the store's value of `{key}` is no shared memory: {e}"))
            })?;
            let (path, len, nonce) = match announcement {
                Announcement::Region { pid, fd, len, nonce } => (path_of(pid, fd), len, nonce),
                Announcement::Failed(message) => return Err(no_memory(layout, &message)),
            };
            if len != layout.len {
                return Err(Error::Config(format!(
                    "the ranks of a `shm` group have different sizes of shared memory ({len} and \
                     {} bytes): process_group.chunk_bytes must be the same on all",
                    layout.len
                )));
            }
            let mapping_error = |why: String| mapping_error("the first rank", &path, &why);
            let file = open_file(&path, len)
                .map_err(|why| self.late_failure().unwrap_or_else(|| mapping_error(why)))?;
            let region =
                Region::of_file(&file, layout).map_err(|e| mapping_error(e.to_string()))?;
            if !region.is_signed(nonce) {
                return Err(mapping_error("it is another file".to_owned()));
            }
            Ok(MappedRegion { region: Arc::new(region), file: None })
        }

        /// Returns the failure of the job, if one becomes known. A process that announced its
        /// memory may have been killed meanwhile, and the store learns of it a moment later.
        fn late_failure(&self) -> Option<Error> {
            let mut patience = Patience::new(DEATH_KNOWN);
            while let Some(slice) = patience.slice() {
                if let Some((rank, message)) = self.store.failure() {
                    return Some(Error::PeerFailed { rank, message });
                }
                std::thread::sleep(slice.min(Duration::from_millis(10)));
            }
            None
        }

        /// Returns the shared memory of another rank, mapped by the first call.
        fn memory(&self, owner: &MemoryOwner) -> Result<Arc<MmapRaw>> {
            let mut memories = self.memories.lock().expect("no panic while mapping");
            if let Some(memory) = memories.get(&owner.global_rank) {
                return Ok(memory.clone());
            }
            let SharedMemoryHandle { fd, len, nonce } = owner.share;
            let path = path_of(owner.pid, fd);
            let rank = format!("rank {}", owner.global_rank);
            let mapping_error = |why: String| mapping_error(&rank, &path, &why);
            let file = open_file(&path, len).map_err(mapping_error)?;
            let map = MmapOptions::new().len(len).map_raw(&file);
            let map = map.map_err(|e| mapping_error(e.to_string()))?;
            memory::keep_from_dumps(&map);
            if memory::nonce_of(&map) != Some(nonce) {
                return Err(mapping_error("it is another file".to_owned()));
            }
            let map = Arc::new(map);
            memories.insert(owner.global_rank, map.clone());
            Ok(map)
        }
    }

    /// Returns the path of another process's open file.
    fn path_of(pid: u32, fd: u32) -> String {
        format!("/proc/{pid}/fd/{fd}")
    }

    /// Opens shared memory of another process, of `len` bytes.
    ///
    /// The path may lead to an unrelated file by now, as process ids and file descriptors are
    /// reused. If another process can shorten a mapped file, the next access ends this process. So
    /// the file must be sealed memory of this user.
    fn open_file(path: &str, len: usize) -> Result<File, String> {
        // Opening a pipe or a terminal could block.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(path);
        let file = file.map_err(|e| e.to_string())?;
        let metadata = file.metadata().map_err(|e| e.to_string())?;
        let (owner, own) = (metadata.uid(), geteuid().as_raw());
        if owner != own {
            return Err(format!("it belongs to user {owner}, this process to user {own}"));
        }
        let found = metadata.len();
        if found != len as u64 {
            return Err(format!("it has {found} bytes instead of {len}"));
        }
        // Only anonymous memory has seals.
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        sealed.then_some(file).ok_or_else(|| "it is no sealed memory".to_owned())
    }

    /// Time that the store may need to learn of the end of a process.
    const DEATH_KNOWN: Duration = Duration::from_secs(1);

    fn mapping_error(whose: &str, path: &str, why: &str) -> Error {
        Error::Launch(format!(
            "the shared memory of {whose} cannot be opened at {path} ({why}): the ranks are not on \
             one host, not in one PID namespace (containers), or not of one user. {ACROSS_HOSTS}"
        ))
    }

    /// Makes a region in an anonymous file that cannot be shrunk.
    fn make_region(layout: RegionLayout) -> std::io::Result<(Region, File, u64)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("fulgurite", flags)?);
        ftruncate(&file, layout.len as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let region = Region::of_file(&file, layout)?;
        let nonce = nonce();
        region.sign(nonce);
        Ok((region, file, nonce))
    }

    fn no_memory(layout: RegionLayout, error: &dyn std::fmt::Display) -> Error {
        Error::Launch(format!(
            "making {} bytes of shared memory: {error}; a smaller process_group.chunk_bytes needs \
             less",
            layout.len
        ))
    }

    impl Rendezvous for ProcessRendezvous {
        fn name(&self) -> &'static str {
            "shm"
        }

        fn region(
            &self,
            key: &str,
            leader: Option<usize>,
            layout: RegionLayout,
            timeout: Duration,
        ) -> Result<MappedRegion> {
            match leader {
                None => self.create(key, layout),
                Some(leader) => self.open(key, leader, layout, timeout),
            }
        }

        fn board(&self, first: &Arc<Region>, global_ranks: &[usize]) -> Arc<Board> {
            self.board.get_or_init(|| Board::new(first, global_ranks)).clone()
        }

        fn waits_for(&self, awaited: Option<usize>) {
            if let Some(messenger) = &self.messenger {
                messenger.record_wait(self.own_rank, awaited);
            }
        }

        fn must_meet(&self) -> bool {
            true
        }

        fn watch(&self, global_rank: usize, pid: u32) {
            let mut processes = self.processes.lock().expect("no panic while watching");
            if let Entry::Vacant(entry) = processes.entry(global_rank)
                && pid != std::process::id()
                && let Some(pid) = Pid::from_raw(pid as i32)
            {
                // If a sandbox forbids pidfds, the store and the timeout still end waits.
                match pidfd_open(pid, PidfdFlags::empty()) {
                    Ok(fd) => drop(entry.insert(fd)),
                    Err(e) => tracing::debug!("no pidfd of rank {global_rank}: {e}"),
                }
            }
        }

        fn is_gone(&self, global_rank: usize) -> bool {
            let processes = self.processes.lock().expect("no panic while watching");
            let Some(fd) = processes.get(&global_rank) else { return false };
            // A pidfd becomes readable when its process ends.
            let mut fds = [PollFd::new(fd, PollFlags::IN)];
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut fds, Some(&at_once)), Ok(1..))
        }

        fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>> {
            memory::empty_tensor(elements, dtype)
        }

        fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
            memory::offset_of(bytes).map(|offset| offset as u64)
        }

        fn share(&self) -> Option<SharedMemoryHandle> {
            memory::share()
        }

        fn reach(&self, owner: MemoryOwner, offset: u64, len: usize) -> Result<*mut u8> {
            let out_of_bounds = |total: usize| {
                Error::other(format!(
                    "rank {} told of {len} bytes at byte {offset} of its {total} bytes of shared \
                     memory",
                    owner.global_rank
                ))
            };
            let offset = usize::try_from(offset).map_err(|_| out_of_bounds(owner.share.len))?;
            if owner.global_rank == self.own_rank {
                return memory::at(offset, len).ok_or_else(|| out_of_bounds(owner.share.len));
            }
            let memory = self.memory(&owner)?;
            match offset.checked_add(len) {
                Some(end) if end <= memory.len() => Ok(memory.as_mut_ptr().wrapping_add(offset)),
                _ => Err(out_of_bounds(memory.len())),
            }
        }

        fn failure(&self) -> Option<(usize, String)> {
            self.store.failure()
        }

        fn gives_up(&self) -> bool {
            self.store.give_up().is_some()
        }
    }
}
