//! Ranks that are threads, with their own copy of the library.
#![allow(unsafe_code)] // Functions of the library.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use candle_core::DType;
use fulgurite_core::Result;
use fulgurite_core::collective::{ProcessGroup, Store};
use fulgurite_core::launch::LocalStore;
use fulgurite_nccl::{Parts, connect};
use fulgurite_nccl_fake::streams::Machine;
use fulgurite_transports::run_ranks_with;

use crate::host_memory::HostMemory;

/// The library in NCCL's place, which cargo puts beside this program.
pub(crate) fn built() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap();
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let found = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = found.filter(|path| {
        name(path).starts_with("libfulgurite_nccl_fake") && name(path).ends_with(".so")
    });
    found.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).expect("the library")
}

/// A copy of the library, which shares no state with other copies.
pub(crate) struct Nccl {
    _folder: tempfile::TempDir,
    pub(crate) path: PathBuf,
    library: libloading::Library,
}

impl Nccl {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnccl.so.2");
        std::fs::copy(built(), &path).unwrap();
        // SAFETY: the library runs no initialisers of its own.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        Self { _folder: folder, path, library }
    }

    fn count(&self, name: &[u8]) -> u64 {
        // SAFETY: the function has this type.
        unsafe { self.library.get::<extern "C" fn() -> u64>(name).unwrap()() }
    }

    /// Number of wrong uses of NCCL.
    pub(crate) fn violations(&self) -> u64 {
        self.count(b"fakeNcclViolations\0")
    }

    pub(crate) fn aborts(&self) -> u64 {
        self.count(b"fakeNcclAborts\0")
    }

    pub(crate) fn live(&self) -> u64 {
        self.count(b"fakeNcclLive\0")
    }

    pub(crate) fn allow_alone(&self) {
        // SAFETY: the function has this type.
        unsafe { self.library.get::<extern "C" fn()>(b"fakeNcclAllowAlone\0").unwrap()() };
    }

    pub(crate) fn set_version(&self, version: i32) {
        // SAFETY: the function has this type.
        unsafe {
            self.library.get::<extern "C" fn(i32)>(b"fakeNcclSetVersion\0").unwrap()(version)
        };
    }

    pub(crate) fn fail(&self, rank: i32, after: u64, result: i32) {
        type Fail = extern "C" fn(i32, u64, i32);
        // SAFETY: the function has this type.
        unsafe { self.library.get::<Fail>(b"fakeNcclFail\0").unwrap()(rank, after, result) };
    }
}

/// A job whose ranks are threads.
pub(crate) struct Job {
    pub(crate) nccl: Nccl,
    pub(crate) machine: Arc<Machine>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) timeout: Duration,
    /// Dtypes on the device; all of them if `None`.
    pub(crate) dtypes: Option<Vec<DType>>,
    /// Number of copy batches given to the streams of all ranks.
    pub(crate) batches: Arc<AtomicU64>,
}

impl Job {
    pub(crate) fn new(seed: u64) -> Self {
        let timeout = Duration::from_secs(60);
        let store = Arc::new(LocalStore::new());
        let (nccl, machine) = (Nccl::new(), Machine::new(seed));
        Self { nccl, machine, store, timeout, dtypes: None, batches: Arc::default() }
    }

    pub(crate) fn parts(&self, host: Arc<dyn ProcessGroup>) -> Parts {
        Parts {
            host,
            library: Some(self.nccl.path.clone()),
            streams: HostMemory::new(&self.machine, self.dtypes.clone(), &self.batches),
            store: self.store.clone(),
            timeout: self.timeout,
        }
    }

    /// Runs `f` on each rank.
    pub(crate) fn run<T: Send>(
        &self,
        ranks: usize,
        f: impl Fn(Arc<dyn ProcessGroup>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        run_ranks_with(ranks, self.timeout, |host| f(connect(self.parts(host))?))
    }

    /// Asserts that NCCL was used correctly, and that all communicators have ended.
    pub(crate) fn check(&self) {
        // Threads that launched a rank's collectives may release them slightly later than the rank.
        let end = Instant::now() + Duration::from_secs(10);
        while self.nccl.live() > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((self.nccl.violations(), self.nccl.live(), self.nccl.aborts()), (0, 0, 0));
    }
}
