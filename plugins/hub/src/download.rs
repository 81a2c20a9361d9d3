//! Downloads into the cache.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use fulgurite_error::{Error, Result};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::{Failure, FileHead, Wanted};
use crate::{Cache, Hub, Repository, Selection};

/// A step of a download, for a display of its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The files are known: how many are wanted, how many are in the cache.
    Listed {
        /// Files of the selection.
        files: usize,
        /// Those that are there already.
        present: usize,
    },
    /// A file begins.
    Begins {
        /// Its path in the repository.
        file: String,
        /// Its length.
        bytes: u64,
        /// Bytes that an interrupted download has left.
        received: u64,
    },
    /// This many more bytes of the file have come.
    Received(u64),
    /// A request failed and is made again.
    Retries(String),
    /// The file is complete.
    Ends,
}

impl Hub {
    /// Downloads what is missing of a repository at a branch, tag or commit, and returns the folder
    /// with its files. A download that was interrupted goes on where it ended. Several processes
    /// may download the same: each file is received by one.
    ///
    /// Lengths are checked, and contents by the hash that the server gives: SHA-256 of weights, and
    /// of other files Git's hash or SHA-1. The name of a branch or tag is written last, so by it
    /// [`Cache::find`] finds what was downloaded to the end.
    ///
    /// # Errors
    /// If the server cannot be reached after several attempts, refuses, or sends something else
    /// than it announced; or if the disk is full.
    pub fn download(
        &self,
        cache: &Cache,
        repository: &Repository,
        revision: &str,
        selection: &Selection,
        watch: &mut dyn FnMut(Event),
    ) -> Result<PathBuf> {
        let listing = self.retried(watch, |_| self.list(repository, revision))?;
        let commit = listing.sha.clone();
        if commit.len() != 40 || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(Error::other(format!(
                "{repository}: the server names {commit:?} as its commit"
            )));
        }
        let files = listing.files();
        if let Some(file) = files.iter().find(|file| !is_inside(file)) {
            return Err(Error::other(format!(
                "{repository}: {file:?} is no path within a repository"
            )));
        }
        let wanted = selection.of(&files, repository.is_dataset());
        if wanted.is_empty() {
            return Err(Error::Config(format!(
                "{repository}: none of its {} files is selected",
                files.len()
            )));
        }
        let folder = cache.of(repository);
        let snapshot = folder.join("snapshots").join(&commit);
        let missing: Vec<_> =
            wanted.iter().filter(|file| !snapshot.join(file).exists()).copied().collect();
        watch(Event::Listed { files: wanted.len(), present: wanted.len() - missing.len() });
        for file in missing {
            self.fetch(&folder, Wanted { repository, commit: &commit, file }, watch)?;
        }
        if revision != commit {
            write_ref(&folder, revision, &commit)?;
        }
        Ok(snapshot)
    }

    /// Calls `act` until it succeeds, fails for good, or has failed too often without bringing the
    /// download further.
    fn retried<R>(
        &self,
        watch: &mut dyn FnMut(Event),
        mut act: impl FnMut(&mut dyn FnMut(Event)) -> Result<R, Failure>,
    ) -> Result<R> {
        let mut pauses = self.pauses.iter();
        loop {
            let failure = match act(watch) {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            if failure.progress {
                pauses = self.pauses.iter();
            }
            match pauses.next() {
                Some(pause) if failure.transient => {
                    watch(Event::Retries(failure.error.to_string()));
                    std::thread::sleep(*pause);
                }
                _ => return Err(failure.error),
            }
        }
    }

    /// Brings a file into the cache, and links it into its snapshot.
    fn fetch(&self, folder: &Path, wanted: Wanted<'_>, watch: &mut dyn FnMut(Event)) -> Result<()> {
        let Wanted { commit, file, .. } = wanted;
        let head = self.retried(watch, |_| self.head(wanted))?;
        let blob = folder.join("blobs").join(&head.etag);
        make_parent(&blob)?;
        let part = folder.join("blobs").join(format!("{}.incomplete", head.etag));
        if !blob.exists() {
            let open =
                OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&part);
            let mut open = open.map_err(Error::io("opening the download", &part))?;
            // Until it is closed: another process waits here, and then finds the blob.
            open.lock().map_err(Error::io("locking the download", &part))?;
            if !blob.exists() {
                let received = length(&open, &part)?;
                watch(Event::Begins { file: file.to_owned(), bytes: head.bytes, received });
                self.retried(watch, |watch| self.receive(&mut open, &part, wanted, &head, watch))?;
                open.sync_all().map_err(Error::io("writing the download", &part))?;
                fs::rename(&part, &blob).map_err(Error::io("naming the download", &blob))?;
                watch(Event::Ends);
            } else {
                let _ = fs::remove_file(&part);
            }
        }
        link(&folder.join("snapshots").join(commit).join(file), file, &head.etag)
    }

    /// Receives what is missing of a file. If it is not as announced, it is emptied.
    fn receive(
        &self,
        part: &mut File,
        path: &Path,
        wanted: Wanted<'_>,
        head: &FileHead,
        watch: &mut dyn FnMut(Event),
    ) -> Result<(), Failure> {
        let Wanted { repository, file, .. } = wanted;
        let io = |error| Failure::lasting(Error::io("writing the download", path)(error));
        let mut received = length(part, path).map_err(Failure::lasting)?;
        if received > head.bytes {
            part.set_len(0).map_err(io)?;
            received = 0;
        }
        if received < head.bytes || head.bytes == 0 {
            let mut answer = self.open(wanted, received)?;
            let goes_on = answer.status().as_u16() == 206
                && answer
                    .headers()
                    .get("content-range")
                    .and_then(|range| range.to_str().ok())
                    .is_some_and(|range| {
                        range.strip_prefix(&format!("bytes {received}-")).is_some()
                    });
            if !goes_on {
                part.set_len(0).map_err(io)?;
                received = 0;
            }
            part.seek(std::io::SeekFrom::Start(received)).map_err(io)?;
            let start = received;
            let mut body = answer.body_mut().with_config().limit(u64::MAX).reader();
            let mut buffer = vec![0; 1 << 20];
            loop {
                let read = body.read(&mut buffer).map_err(|error| {
                    let error = Error::other(format!("{repository}: {file}: {error}"));
                    Failure { progress: received > start, ..Failure::transient(error) }
                })?;
                if read == 0 {
                    break;
                }
                part.write_all(&buffer[..read]).map_err(io)?;
                received += read as u64;
                watch(Event::Received(read as u64));
                if received > head.bytes {
                    break;
                }
            }
        }
        let wrong = |part: &File, what: String| {
            part.set_len(0).map_err(io)?;
            Err(Failure::transient(Error::other(format!("{repository}: {file}: {what}"))))
        };
        if received < head.bytes {
            // What has come stays, and the next attempt goes on from there.
            let message = format!("{repository}: {file}: {received} of {} bytes came", head.bytes);
            return Err(Failure::transient(Error::other(message)));
        }
        if received > head.bytes {
            return wrong(part, format!("more bytes came than the {} announced", head.bytes));
        }
        let is_hash = head.etag.bytes().all(|b| b.is_ascii_hexdigit());
        let expected = head.etag.to_ascii_lowercase();
        let (what, found) = match expected.len() {
            64 if is_hash => ("SHA-256", hash_of(Sha256::new(), part).map_err(io)?),
            // The Hub gives the hash that Git gives a file, and some mirrors the plain SHA-1.
            40 if is_hash && hash_of(Sha1::new(), part).map_err(io)? != expected => {
                ("Git hash", hash_of(git_blob(received), part).map_err(io)?)
            }
            _ => return Ok(()),
        };
        if found != expected {
            return wrong(part, format!("its {what} is {found}, not {expected}"));
        }
        Ok(())
    }
}

/// The beginning of Git's hash of a file with this many bytes.
fn git_blob(bytes: u64) -> Sha1 {
    Sha1::new().chain_update(format!("blob {bytes}\0"))
}

/// The hash, in hexadecimal digits, once the file's content is added.
fn hash_of(mut hash: impl Digest, file: &mut File) -> std::io::Result<String> {
    file.rewind()?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&buffer[..read]);
    }
}

fn length(file: &File, path: &Path) -> Result<u64> {
    Ok(file.metadata().map_err(Error::io("reading the download", path))?.len())
}

/// Whether a path stays within its folder.
fn is_inside(file: &str) -> bool {
    let path = Path::new(file);
    !file.is_empty()
        && !file.contains('\\')
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(Error::io("creating the folder", parent))
}

/// Links a file of a snapshot to its blob, relative to it: caches are moved.
fn link(at: &Path, file: &str, etag: &str) -> Result<()> {
    make_parent(at)?;
    let up = "../".repeat(2 + file.matches('/').count());
    let target = format!("{up}blobs/{etag}");
    match std::os::unix::fs::symlink(&target, at) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && at.exists() => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            // A link to a blob that is gone. Another process may mend it at the same time.
            let _ = fs::remove_file(at);
            match std::os::unix::fs::symlink(target, at) {
                Err(_) if at.exists() => Ok(()),
                linked => linked.map_err(Error::io("linking the file", at)),
            }
        }
        linked => linked.map_err(Error::io("linking the file", at)),
    }
}

/// Notes the commit of a branch or tag.
fn write_ref(folder: &Path, revision: &str, commit: &str) -> Result<()> {
    if !is_inside(revision) {
        return Err(Error::Config(format!("{revision:?} is no name of a revision")));
    }
    let path = folder.join("refs").join(revision);
    make_parent(&path)?;
    let parent = path.parent().unwrap_or(folder);
    let io = |error| Error::io("writing the revision", &path)(error);
    // A name of its own: threads, and containers that are process 1 each, write the same revision.
    // Readable as any file: users share a cache.
    let mode = fs::Permissions::from_mode(0o666);
    let mut part = tempfile::Builder::new()
        .prefix(".ref-")
        .permissions(mode)
        .tempfile_in(parent)
        .map_err(io)?;
    part.write_all(commit.as_bytes()).map_err(io)?;
    part.persist(&path).map(drop).map_err(|error| io(error.error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `echo hello | git hash-object --stdin`.
    #[test]
    fn small_files_have_gits_hash() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello\n").unwrap();
        let found = hash_of(git_blob(6), &mut file).unwrap();
        assert_eq!(found, "ce013625030ba8dba906f756967f9e9ca394464a");
    }
}
