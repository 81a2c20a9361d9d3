//! NCCL, loaded at run time: its functions, with errors as values.
#![allow(unsafe_code)] // A C library.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::collective::ReduceOp;
use fulgurite_core::{Error, Result};

/// The oldest supported version, whose `ncclConfig_t` ends with `splitShare`:
/// `NCCL_VERSION(2, 18, 0)`.
const OLDEST: c_int = 21_800;
/// The first version with names of communicators: `NCCL_VERSION(2, 27, 0)`.
const NAMES: c_int = 22_700;
/// The first version in which ranks that are threads do not write into each other's tensors:
/// `NCCL_VERSION(2, 24, 0)`. Older versions do, which memory of a pool does not allow
/// (`prims_simple.h`, `NCCL_DIRECT_WRITE`).
const THREADS: c_int = 22_400;
/// The default library, found by the rules of the dynamic loader.
const NAME: &str = "libnccl.so.2";

/// A communicator of NCCL.
pub(crate) type Handle = *mut c_void;

/// `ncclUniqueId`: the id that the ranks of a communicator share.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclConfig_t` of NCCL 2.27. Later versions append members, and give them their defaults by
/// `size` and `version`. Versions from 2.18 on begin with the same members, up to `split_share`,
/// and read only `size` bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// A configuration for NCCL version `nccl`: all calls are non-blocking. Versions without names
    /// ignore `name`.
    fn non_blocking(name: &CStr, nccl: c_int) -> Self {
        let (size, version) = match nccl {
            NAMES.. => (std::mem::size_of::<Self>(), NAMES),
            // Up to `split_share`, with its padding. 2.17 is the last version that gave
            // members a meaning.
            _ => (std::mem::offset_of!(Self, comm_name), 21_700),
        };
        // `traffic_class`, new in 2.26, lies in the padding of earlier versions.
        Self {
            size,
            // NCCL_API_MAGIC
            magic: 0xcafe_beef,
            version: version.cast_unsigned(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: name.as_ptr(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

/// `ncclResult_t`.
pub(crate) const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// The state of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// All calls are on their streams.
    Done,
    /// Some calls are not launched yet; no other call is allowed.
    UnderWay,
}

/// An error of NCCL.
#[derive(Debug, Clone)]
pub(crate) struct Fault(String);

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

type Stream = *mut c_void;
type Get<T> = unsafe extern "C" fn(*mut T) -> c_int;
type OfComm = unsafe extern "C" fn(Handle) -> c_int;
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;

macro_rules! functions {
    ($($field:ident: $symbol:literal as $type:ty;)*) => {
        /// NCCL's functions. For the communicators of one rank, only one thread may call them at a
        /// time.
        pub(crate) struct Library {
            $($field: $type,)*
            version: c_int,
            path: String,
            /// Never unloaded: NCCL has its own threads, and failed communicators are leaked.
            _library: ManuallyDrop<libloading::Library>,
        }

        impl Library {
            /// # Safety
            /// The library is NCCL, or has functions of the same names and types.
            unsafe fn of(library: libloading::Library, path: String) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: as the caller promises.
                    $($field: unsafe { *library.get::<$type>($symbol)? },)*
                    version: 0,
                    path,
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

functions! {
    get_version: b"ncclGetVersion\0" as Get<c_int>;
    get_unique_id: b"ncclGetUniqueId\0" as Get<UniqueId>;
    comm_init: b"ncclCommInitRankConfig\0" as unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_async_error: b"ncclCommGetAsyncError\0" as unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
    comm_abort: b"ncclCommAbort\0" as OfComm;
    comm_finalize: b"ncclCommFinalize\0" as OfComm;
    comm_destroy: b"ncclCommDestroy\0" as OfComm;
    group_start: b"ncclGroupStart\0" as unsafe extern "C" fn() -> c_int;
    group_end: b"ncclGroupEnd\0" as unsafe extern "C" fn() -> c_int;
    all_reduce: b"ncclAllReduce\0" as Reduce;
    reduce_scatter: b"ncclReduceScatter\0" as Reduce;
    all_gather: b"ncclAllGather\0" as unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> c_int;
    broadcast: b"ncclBroadcast\0" as Reduce;
    send: b"ncclSend\0" as unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    recv: b"ncclRecv\0" as unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    error_string: b"ncclGetErrorString\0" as unsafe extern "C" fn(c_int) -> *const c_char;
    last_error: b"ncclGetLastError\0" as unsafe extern "C" fn(Handle) -> *const c_char;
}

/// A call on a communicator. Counts are NCCL's, in elements; with several parts, of one part.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call {
    AllReduce { op: ReduceOp },
    AllGather,
    ReduceScatter { op: ReduceOp },
    Broadcast { root: usize },
    Send { peer: usize },
    Recv { peer: usize },
}

/// The memory of a [`Call`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) input: *mut c_void,
    pub(crate) output: *mut c_void,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

impl Library {
    /// Loads NCCL: the library at `path`, else `libnccl.so.2`.
    pub(crate) fn open(path: Option<&Path>) -> Result<Arc<Self>> {
        let path = path.unwrap_or(Path::new(NAME));
        let name = path.display().to_string();
        let missing = |error: libloading::Error| {
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            Error::Config(format!(
                "trainer.process_group.type is \"nccl\", but NCCL cannot be loaded: {reason}. Install NCCL 2.18 or \
                 newer, set trainer.process_group.library to its `libnccl.so.2`, or set trainer.process_group = \"auto\""
            ))
        };
        // SAFETY: NCCL's initialisers may run anywhere. The user vouches that the file is NCCL.
        let library = unsafe { libloading::Library::new(path) }.map_err(missing)?;
        // SAFETY: as above.
        let mut library = unsafe { Self::of(library, name.clone()) }.map_err(missing)?;
        let mut version = 0;
        // SAFETY: a valid pointer to the result.
        let code = unsafe { (library.get_version)(&mut version) };
        if code != SUCCESS || version < OLDEST {
            return Err(Error::Config(format!(
                "trainer.process_group.type is \"nccl\", but `{name}` is NCCL {}; 2.18 or newer is needed. Set \
                 trainer.process_group.library to a newer one, or trainer.process_group = \"auto\"",
                version_text(version)
            )));
        }
        library.version = version;
        Ok(Arc::new(library))
    }

    /// `NCCL 2.27.3 (libnccl.so.2)`.
    pub(crate) fn description(&self) -> String {
        format!("NCCL {} ({})", version_text(self.version), self.path)
    }

    /// Whether ranks may be threads of one process, if `NCCL_P2P_DIRECT_DISABLE` is not set.
    pub(crate) fn allows_threads(&self) -> bool {
        self.version >= THREADS
    }

    fn fault(&self, call: &str, code: c_int, comm: Handle) -> Fault {
        // SAFETY: both functions take any argument, and return texts that live as long as the
        // library.
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: as above.
        let what = text(unsafe { (self.error_string)(code) });
        // SAFETY: as above; NCCL ignores the communicator.
        let last = text(unsafe { (self.last_error)(comm) });
        let last = if last.is_empty() { last } else { format!(" ({last})") };
        Fault(format!("{call}: {what}{last}"))
    }

    fn check(&self, call: &str, code: c_int, comm: Handle) -> Result<Progress, Fault> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::UnderWay),
            code => Err(self.fault(call, code, comm)),
        }
    }

    /// Makes a new id, which all ranks of a communicator share.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, Fault> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: a valid pointer to the result.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut()).map(|_| id)
    }

    /// Begins to make a communicator, which is ready when its [`progress`](Self::progress) is
    /// `Done`. The name must outlive the communicator.
    pub(crate) fn init(
        &self,
        name: &CStr,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Handle, Fault> {
        let mut handle = std::ptr::null_mut();
        let mut config = Config::non_blocking(name, self.version);
        let (size, rank) = (size as c_int, rank as c_int);
        // SAFETY: valid pointers to the results, and a configuration laid out as its size and
        // version say.
        let code = unsafe { (self.comm_init)(&mut handle, size, id, rank, &mut config) };
        self.check("ncclCommInitRankConfig", code, handle).map(|_| handle)
    }

    /// Returns a communicator's state.
    ///
    /// # Safety
    /// The communicator has been neither destroyed nor aborted.
    pub(crate) unsafe fn progress(&self, comm: Handle) -> Result<Progress, Fault> {
        let mut state = SUCCESS;
        // SAFETY: as the caller promises; a valid pointer to the result.
        let code = unsafe { (self.comm_async_error)(comm, &mut state) };
        self.check("ncclCommGetAsyncError", code, comm)?;
        self.check("a communicator", state, comm)
    }

    /// Begins calls as one group. They are on their streams when the [`progress`](Self::progress)
    /// of all their communicators is `Done`.
    ///
    /// # Safety
    /// The communicators are valid and have no calls under way. The memory is valid on the streams
    /// until the calls have run.
    pub(crate) unsafe fn group(
        &self,
        calls: &[(Handle, Stream, Call, Operands)],
    ) -> Result<Progress, Fault> {
        let none = std::ptr::null_mut();
        // SAFETY: no argument.
        let started = unsafe { (self.group_start)() };
        self.check("ncclGroupStart", started, none)?;
        let mut called = Ok(Progress::Done);
        for &(comm, stream, call, operands) in calls {
            // SAFETY: as the caller promises.
            called = unsafe { self.call(comm, stream, call, operands) };
            if called.is_err() {
                break;
            }
        }
        // A started group must end.
        // SAFETY: no argument.
        let ended = unsafe { (self.group_end)() };
        let ended = self.check("ncclGroupEnd", ended, calls.first().map_or(none, |call| call.0));
        called.and(ended)
    }

    /// # Safety
    /// As [`group`](Self::group).
    unsafe fn call(
        &self,
        comm: Handle,
        stream: Stream,
        call: Call,
        operands: Operands,
    ) -> Result<Progress, Fault> {
        let Operands { input, output, count, dtype: candle } = operands;
        let Some(dtype) = dtype(candle) else {
            return Err(Fault(format!("NCCL has no dtype {}", candle.as_str())));
        };
        // SAFETY: as the caller promises.
        let (name, code) = unsafe {
            match call {
                Call::AllReduce { op } => (
                    "ncclAllReduce",
                    (self.all_reduce)(input, output, count, dtype, reduction(op), comm, stream),
                ),
                Call::ReduceScatter { op } => (
                    "ncclReduceScatter",
                    (self.reduce_scatter)(input, output, count, dtype, reduction(op), comm, stream),
                ),
                Call::AllGather => {
                    ("ncclAllGather", (self.all_gather)(input, output, count, dtype, comm, stream))
                }
                Call::Broadcast { root } => (
                    "ncclBroadcast",
                    (self.broadcast)(input, output, count, dtype, root as c_int, comm, stream),
                ),
                Call::Send { peer } => {
                    ("ncclSend", (self.send)(input, count, dtype, peer as c_int, comm, stream))
                }
                Call::Recv { peer } => {
                    ("ncclRecv", (self.recv)(output, count, dtype, peer as c_int, comm, stream))
                }
            }
        };
        self.check(name, code, comm)
    }

    /// Aborts a communicator's calls on this rank. The communicator must not be used afterwards.
    ///
    /// # Safety
    /// As [`progress`](Self::progress).
    pub(crate) unsafe fn abort(&self, comm: Handle) -> Result<(), Fault> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.comm_abort)(comm) };
        self.check("ncclCommAbort", code, std::ptr::null_mut()).map(drop)
    }

    /// Begins to finalize a communicator whose calls have run.
    ///
    /// # Safety
    /// As [`progress`](Self::progress).
    pub(crate) unsafe fn finalize(&self, comm: Handle) -> Result<Progress, Fault> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.comm_finalize)(comm) };
        self.check("ncclCommFinalize", code, comm)
    }

    /// Frees a finalized communicator.
    ///
    /// # Safety
    /// As [`progress`](Self::progress). The communicator must not be used afterwards.
    pub(crate) unsafe fn destroy(&self, comm: Handle) -> Result<(), Fault> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.comm_destroy)(comm) };
        self.check("ncclCommDestroy", code, std::ptr::null_mut()).map(drop)
    }
}

/// Formats `NCCL_VERSION`, such as `2.27.3`.
fn version_text(version: c_int) -> String {
    match version {
        0..10_000 => format!("{}.{}.{}", version / 1000, version / 100 % 10, version % 100),
        _ => format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
    }
}

/// `ncclRedOp_t`.
fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
    }
}

/// `ncclDataType_t`.
fn dtype(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_formatted() {
        let texts = [2_708, 22_703, 23_203].map(version_text);
        assert_eq!(texts, ["2.7.8", "2.27.3", "2.32.3"]);
    }

    /// Looks up all functions in a real NCCL, and calls the ones that need no GPU.
    #[test]
    #[ignore = "needs NCCL: its path in NCCL_LIBRARY"]
    fn nccl_has_the_functions() {
        let path = std::env::var("NCCL_LIBRARY").unwrap();
        let library = Library::open(Some(Path::new(&path))).unwrap();
        println!("{}", library.description());
        let fault = library.fault("ncclAllReduce", 6, std::ptr::null_mut());
        assert!(fault.to_string().starts_with("ncclAllReduce: remote process exited"), "{fault}");
        // A refused communicator is refused for the lack of a GPU, not for its configuration.
        if let Err(fault) = library.init(c"world", UniqueId([0; 128]), 0, 1) {
            assert!(fault.to_string().to_lowercase().contains("cuda"), "{fault}");
        }
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn config_layout_matches_nccl_2_27() {
        use std::mem::{offset_of, size_of};
        let offsets = [
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
            offset_of!(Config, net_name),
            offset_of!(Config, traffic_class),
            offset_of!(Config, comm_name),
            offset_of!(Config, collnet_enable),
            offset_of!(Config, nvls_ctas),
        ];
        // From the `nccl.h` of 2.27.3, by a C compiler.
        assert_eq!((offsets, size_of::<Config>()), ([8, 12, 16, 32, 44, 48, 56, 68], 72));
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn older_versions_get_their_configuration() {
        let of = |nccl| {
            let config = Config::non_blocking(c"world", nccl);
            (config.size, config.version, config.blocking, config.split_share)
        };
        // `sizeof(ncclConfig_t)` is 48 from 2.18 to 2.26, by their `nccl.h`.
        let older = (48, 21_700, 0, UNDEFINED);
        assert_eq!([of(21_801), of(22_105), of(22_605)], [older; 3]);
        let newer = (72, 22_700, 0, UNDEFINED);
        assert_eq!([of(22_700), of(23_203)], [newer; 2]);
    }
}
