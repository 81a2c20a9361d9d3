//! cuDNN, loaded at run time: its functions, with errors as values.
#![allow(unsafe_code)] // A C library.

use std::env;
use std::error::Error as _;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::constants::SUCCESS;

/// The oldest supported version, `CUDNN_VERSION` of 9.21. It has attention as one operation with a
/// mask and statistics.
const OLDEST: usize = 92_100;
/// The library name for the dynamic loader.
const NAME: &str = "libcudnn.so.9";

/// `cudnnBackendDescriptor_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct RawDescriptor(pub(super) *mut c_void);

/// `cudnnHandle_t`: cuDNN on one device, for one thread at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Handle(*mut c_void);

// SAFETY: any thread may use a handle; the user ensures that only one thread does at a time.
unsafe impl Send for Handle {}

/// An error of cuDNN: the call, the name of the status, and cuDNN's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    call: String,
    name: String,
    reason: String,
}

impl Fault {
    /// An error without a status.
    pub(super) fn without_status(call: String, name: &str, reason: String) -> Self {
        Self { call, name: name.to_owned(), reason }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.name)?;
        match self.reason.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", self.reason),
        }
    }
}

macro_rules! functions {
    ($($field:ident: $symbol:literal as $type:ty;)*) => {
        /// cuDNN's functions. Never unloaded, because cuDNN has its own threads and kernels.
        pub struct Library {
            $(pub(super) $field: $type,)*
            version: usize,
            path: PathBuf,
            _library: ManuallyDrop<libloading::Library>,
        }

        impl Library {
            /// # Safety
            /// The library is cuDNN 9, or has functions of the same names and types.
            unsafe fn of(library: libloading::Library, path: PathBuf) -> Result<Self, libloading::Error> {
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
    get_version: b"cudnnGetVersion\0" as unsafe extern "C" fn() -> usize;
    get_cudart_version: b"cudnnGetCudartVersion\0" as unsafe extern "C" fn() -> usize;
    error_string: b"cudnnGetErrorString\0" as unsafe extern "C" fn(c_int) -> *const c_char;
    last_error: b"cudnnGetLastErrorString\0" as unsafe extern "C" fn(*mut c_char, usize);
    create: b"cudnnCreate\0" as unsafe extern "C" fn(*mut Handle) -> c_int;
    set_stream: b"cudnnSetStream\0" as unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
    create_descriptor: b"cudnnBackendCreateDescriptor\0" as unsafe extern "C" fn(c_int, *mut RawDescriptor) -> c_int;
    destroy_descriptor: b"cudnnBackendDestroyDescriptor\0" as unsafe extern "C" fn(RawDescriptor) -> c_int;
    finalize: b"cudnnBackendFinalize\0" as unsafe extern "C" fn(RawDescriptor) -> c_int;
    set_attribute: b"cudnnBackendSetAttribute\0" as unsafe extern "C" fn(RawDescriptor, c_int, c_int, i64, *const c_void) -> c_int;
    get_attribute: b"cudnnBackendGetAttribute\0" as unsafe extern "C" fn(RawDescriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;
    execute: b"cudnnBackendExecute\0" as unsafe extern "C" fn(Handle, RawDescriptor, RawDescriptor) -> c_int;
}

impl Library {
    /// Returns cuDNN, which the first call looks up. The dynamic loader looks for `libcudnn.so.9`
    /// first. Then the folders of Python's wheels are tried: beside the CUDA wheels that
    /// `LD_LIBRARY_PATH` names, and in the environment of `VIRTUAL_ENV` or `CONDA_PREFIX`.
    ///
    /// # Errors
    /// If cuDNN is not found or is older than 9.21. The message names the places that were tried.
    pub fn get() -> Result<&'static Self, &'static str> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        let load = || Self::open(&candidates(|name| env::var_os(name)));
        LOADED.get_or_init(load).as_ref().map_err(String::as_str)
    }

    /// Loads the first of these files that exists.
    fn open(candidates: &[PathBuf]) -> Result<Self, String> {
        let mut tried = Vec::new();
        for path in candidates {
            // SAFETY: cuDNN's initialisers may run anywhere. The user's environment says which file
            // is cuDNN.
            let opened = unsafe { libloading::Library::new(path) };
            // SAFETY: as above.
            match opened.and_then(|library| unsafe { Self::of(library, path.clone()) }) {
                Ok(library) => return library.checked(),
                Err(error) => {
                    let reason =
                        error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    tried.push(reason);
                }
            }
        }
        Err(format!("cuDNN cannot be loaded: {}", tried.join("; ")))
    }

    /// Returns the library with its version, if that version is new enough.
    fn checked(mut self) -> Result<Self, String> {
        // SAFETY: the function has no arguments.
        self.version = unsafe { (self.get_version)() };
        match self.version {
            OLDEST.. => Ok(self),
            _ => Err(format!("{} is too old, 9.21 or newer is needed", self.description())),
        }
    }

    /// Returns a description, such as `cuDNN 9.26.0 (libcudnn.so.9)`.
    pub fn description(&self) -> String {
        let (major, minor, patch) =
            (self.version / 10_000, self.version / 100 % 100, self.version % 100);
        format!("cuDNN {major}.{minor}.{patch} ({})", self.path.display())
    }

    /// Returns the major version of CUDA that cuDNN was built for, such as 13.
    pub fn cuda_major(&self) -> usize {
        // SAFETY: the function has no arguments.
        unsafe { (self.get_cudart_version)() / 1000 }
    }

    /// Makes a handle for the device of this thread's context. Its work is queued on `stream`.
    ///
    /// # Safety
    /// The thread's context must be current, and `stream` must be a stream of that context that
    /// outlives the handle.
    ///
    /// # Errors
    /// If cuDNN reports an error.
    pub unsafe fn handle(&self, stream: *mut c_void) -> Result<Handle, Fault> {
        let mut handle = Handle(std::ptr::null_mut());
        // SAFETY: a pointer to a local variable, which cuDNN writes.
        self.check("cudnnCreate", unsafe { (self.create)(&raw mut handle) })?;
        // SAFETY: a handle that was made; the caller's stream.
        self.check("cudnnSetStream", unsafe { (self.set_stream)(handle, stream) })?;
        Ok(handle)
    }

    /// Converts a status to a result.
    pub(super) fn check(&self, call: impl fmt::Display, status: c_int) -> Result<(), Fault> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function accepts any status; the text is static.
        let name = unsafe { (self.error_string)(status) };
        let name = match name.is_null() {
            true => format!("status {status}"),
            // SAFETY: cuDNN never frees the text.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        };
        Err(Fault { call: call.to_string(), name, reason: self.reason() })
    }

    /// Returns the first reason in cuDNN's message on this thread's last error. Later reasons
    /// repeat it up the call stack.
    pub(super) fn reason(&self) -> String {
        let mut message = [0_u8; 4096];
        // SAFETY: the buffer has as many bytes as the call says.
        unsafe { (self.last_error)(message.as_mut_ptr().cast(), message.len()) };
        let text = CStr::from_bytes_until_nul(&message).map_or("".into(), CStr::to_string_lossy);
        let reasons = text.lines().filter_map(|line| line.split_once("Reason: "));
        reasons.map(|(_, reason)| reason).next().unwrap_or(&text).trim().to_owned()
    }
}

/// Returns the files that may be cuDNN, best first. `variable` reads an environment variable.
fn candidates(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let in_wheel = |packages: &Path| packages.join("cudnn").join("lib").join(NAME);
    let mut all = vec![PathBuf::from(NAME)];
    let mut add = |path: PathBuf| {
        if path.is_file() && !all.contains(&path) {
            all.push(path);
        }
    };
    let folders = variable("LD_LIBRARY_PATH").unwrap_or_default();
    for folder in env::split_paths(&folders) {
        let is_wheels = |path: &&Path| path.file_name().is_some_and(|name| name == "nvidia");
        if let Some(packages) = folder.ancestors().find(is_wheels) {
            add(in_wheel(packages));
        }
    }
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = variable(root).filter(|root| !root.is_empty()) else { continue };
        let lib = Path::new(&root).join("lib");
        add(lib.join(NAME));
        let Ok(entries) = lib.read_dir() else { continue };
        let pythons = entries.filter_map(Result::ok).map(|entry| entry.path());
        let mut pythons: Vec<PathBuf> = pythons.collect();
        pythons.sort();
        for python in pythons {
            add(in_wheel(&python.join("site-packages").join("nvidia")));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn wheels_are_found() {
        let root = tempfile::tempdir().unwrap();
        let wheel = |packages: &str| {
            let folder = root.path().join(packages).join("nvidia/cudnn/lib");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(NAME), "").unwrap();
            folder.join(NAME)
        };
        let beside = wheel("a/site-packages");
        let in_venv = wheel("venv/lib/python3.11/site-packages");
        let found = candidates(|name| match name {
            "LD_LIBRARY_PATH" => {
                let cuda = root.path().join("a/site-packages/nvidia/cu13/lib");
                Some(env::join_paths([Path::new("/opt"), &cuda]).unwrap())
            }
            "VIRTUAL_ENV" => Some(root.path().join("venv").into()),
            _ => None,
        });
        assert_eq!(found, [PathBuf::from(NAME), beside, in_venv]);
        assert_eq!(candidates(|_| None), [PathBuf::from(NAME)]);
    }

    #[test]
    fn a_missing_library_names_its_places() {
        let error = Library::open(&["/nowhere/libcudnn.so.9".into()]).err().unwrap();
        assert!(error.contains("cannot be loaded") && error.contains("/nowhere"), "{error}");
    }
}
