//! A cache of compiled kernels in files.

use std::env;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use fulgurite_error::Result;
use fulgurite_error::files::read_regular;
use twox_hash::XxHash3_64;

/// A folder of compiled kernels. Failures to read or write it are ignored; the kernel is compiled
/// again.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// The largest file that is read back.
const MOST_BYTES: u64 = 64 << 20;

impl Cache {
    /// The cache in `fulgurite/kernels` of the user's cache directory: `XDG_CACHE_HOME`, or
    /// `.cache` in the home directory. Without either, nothing is cached.
    pub fn of_user() -> Self {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = cache.or_else(|| set("HOME").map(|home| home.join(".cache")));
        Self { folder: cache.map(|cache| cache.join("fulgurite").join("kernels")) }
    }

    /// A cache in a folder, which is created when needed.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// Returns the bytes of `make`, from the cache if a complete file is there. They must depend on
    /// `key` alone. Several processes may use one cache at the same time.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn bytes(
        &self,
        name: &str,
        key: &str,
        make: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let file = format!("{name}-{:032x}", hash(key.as_bytes()));
        let path = self.folder.as_ref().map(|folder| folder.join(file));
        if let Some(path) = &path
            && let Ok(mut kept) = read_regular(path, MOST_BYTES)
            && let Some(end) = kept.iter().position(|&byte| byte == b'\n')
            && kept[..end] == *first_line(&kept[end + 1..]).as_bytes()
        {
            return Ok(kept.split_off(end + 1));
        }
        let bytes = make()?;
        if let Some(path) = path {
            let _ = keep(&path, &bytes); // made again next time
        }
        Ok(bytes)
    }
}

/// A 128-bit hash, from two 64-bit hashes.
fn hash(bytes: &[u8]) -> u128 {
    let [low, high] = [0, 1].map(|seed| XxHash3_64::oneshot_with_seed(seed, bytes));
    u128::from(high) << 64 | u128::from(low)
}

/// The first line of a file: a hash that detects truncated or changed files.
fn first_line(bytes: &[u8]) -> String {
    format!("// fulgurite {:032x}", hash(bytes))
}

/// Writes a temporary file and renames it, so other processes never see a partial file.
fn keep(path: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let written = path.with_extension(format!("{}-{count}.new", process::id()));
    let result = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&written)
        .and_then(|mut file| {
            writeln!(file, "{}", first_line(bytes))?;
            file.write_all(bytes)
        })
        .and_then(|()| fs::rename(&written, path));
    if result.is_err() {
        let _ = fs::remove_file(&written);
    }
    result
}
