//! Lock files, which keep several programs from using a directory at the same time.
//!
//! A lock is held by `flock`, so it ends with its process in any case. The file names the owner. On
//! file systems without `flock` only the file's content counts.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fulgurite_config::{Error, Result};
use fulgurite_engine::checkpoint_io::is_temporary;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// The lock of a whole directory.
const OF_PLACE: &str = ".lock";

/// Returns the lock file's name for `name`, an unfinished save, or for the directory itself (`""`).
pub(crate) fn file_name(name: &str) -> String {
    if name.is_empty() { OF_PLACE.to_owned() } else { format!(".{name}.lock") }
}

/// Whether this is the name of a lock file.
pub(crate) fn is_lock(name: &str) -> bool {
    name == OF_PLACE || locked_save(name).is_some()
}

/// Returns the unfinished save that a lock file of this name belongs to.
pub(crate) fn locked_save(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".lock").filter(|name| is_temporary(name))
}

/// Whether creating a file failed because nothing can be written there.
pub(crate) fn cannot_be_written(kind: ErrorKind) -> bool {
    use ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(kind, PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull)
}

/// A held lock. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct FileLock {
    path: PathBuf,
    file: File,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Removed before it is unlocked, so that a process with the old file open sees the
        // difference.
        if is_at(&self.file, &self.path)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!("removing the lock {}: {error}", self.path.display());
        }
    }
}

/// The result of [`FileLock::take`].
pub(crate) enum Attempt {
    Locked(FileLock),
    /// Another living process holds it.
    Held(Owner),
}

impl FileLock {
    /// Takes the lock in the file `path`, unless a living process holds it.
    pub(crate) fn take(path: &Path) -> Result<Attempt> {
        let failed = |action: &'static str| move |e| Error::io(action, path)(e);
        let mut beginning = 0;
        loop {
            let mut file = match open(path, true) {
                // The lock belongs to another user.
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return match held_by_another(path) {
                        Some(owner) => Ok(Attempt::Held(owner)),
                        None => Err(failed("opening the lock")(error)),
                    };
                }
                file => file.map_err(failed("opening the lock"))?,
            };
            match try_lock(&file).map_err(failed("locking"))? {
                Flock::Held => {
                    let owner = Owner::read(&mut file);
                    // Another process is only checking the lock, or holds it and has not written
                    // its name yet.
                    if !owner.as_ref().is_some_and(Owner::may_live) && beginning < 1000 {
                        beginning += 1;
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    return Ok(Attempt::Held(owner.unwrap_or_default()));
                }
                Flock::Unsupported => {
                    if let Some(owner) = Owner::read(&mut file).filter(Owner::may_live) {
                        return Ok(Attempt::Held(owner));
                    }
                }
                Flock::Locked => {}
            }
            // The last owner may have removed the file between the two calls.
            if !is_at(&file, path) {
                continue;
            }
            let write = |file: &mut File| {
                file.set_len(0)?;
                file.rewind()?;
                file.write_all(Owner::this().to_text().as_bytes())
            };
            write(&mut file).map_err(failed("writing the lock"))?;
            return Ok(Attempt::Locked(Self { path: path.to_owned(), file }));
        }
    }
}

/// Whether a living process holds the lock in the file `path`; `None` without such a file.
pub(crate) fn is_held(path: &Path) -> Result<Option<bool>> {
    let mut file = match open(path, false) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(Error::io("opening the lock", path))?,
    };
    Ok(Some(match try_lock(&file).map_err(Error::io("locking", path))? {
        Flock::Held => true,
        Flock::Locked => false,
        Flock::Unsupported => Owner::read(&mut file).is_some_and(|owner| owner.may_live()),
    }))
}

/// Whether the lock file `path` belongs to a process of this host that has ended.
///
/// The file's content must confirm it, since `flock` alone is local to each host on some file
/// systems.
pub(crate) fn is_abandoned(path: &Path) -> Result<bool> {
    let mut file = match open(path, false) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        file => file.map_err(Error::io("opening the lock", path))?,
    };
    let is_free = !matches!(try_lock(&file).map_err(Error::io("locking", path))?, Flock::Held);
    Ok(is_free && Owner::read(&mut file).is_some_and(|owner| !owner.may_live()))
}

/// Removes the lock file `path` if its process has ended.
pub(crate) fn remove_if_stale(path: &Path) -> Result<()> {
    match FileLock::take(path)? {
        // Dropping the lock removes its file.
        Attempt::Locked(lock) => drop(lock),
        Attempt::Held(_) => {}
    }
    Ok(())
}

fn open(path: &Path, create: bool) -> std::io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(false);
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::new(ErrorKind::InvalidInput, "it is no regular file; remove it"))
    }
}

/// Returns the owner of a held lock whose file this process may only read.
fn held_by_another(path: &Path) -> Option<Owner> {
    let mut file = fulgurite_engine::checkpoint_io::LocalFile::open(path).ok()?.into_file();
    match try_lock(&file).ok()? {
        Flock::Held => Owner::read(&mut file),
        Flock::Locked | Flock::Unsupported => None,
    }
}

enum Flock {
    Locked,
    Held,
    Unsupported,
}

fn try_lock(file: &File) -> std::io::Result<Flock> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Flock::Locked),
        Err(Errno::WOULDBLOCK) => Ok(Flock::Held),
        Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
            Ok(Flock::Unsupported)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the open file is still the file at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let open = file.metadata().map(identity).ok();
    open.is_some() && open == fs::symlink_metadata(path).map(identity).ok()
}

/// The process that holds a lock.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    host: String,
    pid: u32,
    /// Start time of the process in the system's count. It distinguishes the process from a later
    /// one with the same number.
    started: String,
    job: String,
    /// When the lock was taken, in seconds since 1970.
    since: u64,
}

impl Owner {
    fn this() -> Self {
        let pid = std::process::id();
        let job =
            ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"].iter().find_map(|v| std::env::var(v).ok());
        Self {
            host: this_host(),
            pid,
            started: started(pid).unwrap_or_default(),
            job: job.unwrap_or_default(),
            since: now(),
        }
    }

    /// Formats the content of the lock file: `key value` lines.
    fn to_text(&self) -> String {
        let Self { host, pid, started, job, since } = self;
        let line = |text: &str| text.replace(char::is_control, " ");
        format!(
            "host {}\npid {pid}\nstarted {started}\njob {}\nsince {since}\n",
            line(host),
            line(job)
        )
    }

    fn read(file: &mut File) -> Option<Self> {
        let mut text = String::new();
        file.rewind().ok()?;
        file.take(4096).read_to_string(&mut text).ok()?;
        let value = |key: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            lines.find(|(found, _)| *found == key).map(|(_, value)| value.to_owned())
        };
        Some(Self {
            host: value("host")?,
            pid: value("pid")?.parse().ok()?,
            started: value("started").unwrap_or_default(),
            job: value("job").unwrap_or_default(),
            since: value("since").and_then(|since| since.parse().ok()).unwrap_or_default(),
        })
    }

    /// Whether the process may still live. A process of another host may always live.
    fn may_live(&self) -> bool {
        self.host != this_host() || started(self.pid).is_some_and(|started| started == self.started)
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.pid == 0 {
            return f.write_str("a process that does not say who it is");
        }
        let escaped = |text: &str| text.escape_debug().to_string();
        write!(f, "process {} on {}", self.pid, escaped(&self.host))?;
        if !self.job.is_empty() {
            write!(f, ", of job {}", escaped(&self.job))?;
        }
        let minutes = now().saturating_sub(self.since) / 60;
        match (minutes / 60, minutes) {
            (_, 0) => Ok(()),
            (0, minutes) => write!(f, ", since {minutes} min"),
            (hours, _) => write!(f, ", since {hours} h"),
        }
    }
}

fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the start time of a living process; `None` if no process has this number.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may have spaces. The start time is the twentieth field
    // after it.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(path: &Path) -> Option<FileLock> {
        match FileLock::take(path).unwrap() {
            Attempt::Locked(lock) => Some(lock),
            Attempt::Held(_) => None,
        }
    }

    #[test]
    fn lock_is_exclusive_and_removes_its_file() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join(".lock");
        assert_eq!(is_held(&path).unwrap(), None);
        let lock = take(&path).unwrap();
        assert_eq!(is_held(&path).unwrap(), Some(true));
        let Attempt::Held(owner) = FileLock::take(&path).unwrap() else { panic!("two have it") };
        assert_eq!((owner.pid, owner.host.clone()), (std::process::id(), this_host()));
        assert!(owner.may_live());
        drop(lock);
        assert!(!path.exists());
        // A killed process left the file, but not a lock.
        fs::write(&path, Owner { pid: 1, ..Owner::this() }.to_text()).unwrap();
        assert_eq!(is_held(&path).unwrap(), Some(false));
        drop(take(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn concurrent_attempts_have_one_owner() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join(".lock");
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _ = is_held(&path).unwrap();
                        if let Some(lock) = take(&path) {
                            assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                            std::thread::yield_now();
                            inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
        assert!(!path.exists());
    }

    #[test]
    fn dead_owner_is_known_without_flock() {
        let this = Owner::this();
        assert!(this.may_live());
        assert!(!Owner { started: "1".to_owned(), ..Owner::this() }.may_live());
        assert!(Owner { host: "elsewhere".to_owned(), ..Owner::this() }.may_live());
        let shown = Owner {
            host: "a\u{1b}b".to_owned(),
            pid: 7,
            job: "42".to_owned(),
            since: now() - 185,
            ..Owner::default()
        };
        insta::assert_snapshot!(shown, @r"process 7 on a\u{1b}b, of job 42, since 3 min");
    }
}
