//! [`ObjectStoreIO`].

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use fulgurite_checkpoint::{CheckpointIO, CheckpointReader, CheckpointWriter, Entry, MANIFEST};
use fulgurite_error::files::check_len;
use fulgurite_error::{Error, Result};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    ListResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
};
use url::Url;

use crate::driver::Driver;
use crate::layout::{
    MAX_POINTER, POINTER, Pointer, is_version, parse_temporary_name, split, temporary_name,
};
use crate::reader::ObjectReader;
use crate::writer::ObjectWriter;

/// Checkpoint storage in an object store.
///
/// Requests are retried with growing pauses, as configured in the store. The methods block, and may
/// be called from any thread.
#[derive(Debug)]
pub struct ObjectStoreIO {
    driver: Arc<Driver>,
    store: Arc<dyn ObjectStore>,
    /// The URL of the root, for messages.
    url: String,
    prefix: Path,
    part: usize,
    concurrency: usize,
    /// For each checkpoint, the version that files in its folders are read from.
    versions: Mutex<BTreeMap<String, String>>,
}

/// A checkpoint's pointer that was read.
struct FoundPointer {
    version: String,
    put: UpdateVersion,
}

impl ObjectStoreIO {
    /// Opens the location `url` of `store`. The URL's path is the prefix of all objects.
    ///
    /// # Errors
    /// If `url` is not a URL, or the thread cannot be started.
    pub fn new(store: Arc<dyn ObjectStore>, url: &str) -> Result<Self> {
        let parsed = Url::parse(url)
            .map_err(|e| Error::other(format!("the object store's URL `{url}` is wrong: {e}")))?;
        let prefix = Path::from_url_path(parsed.path())
            .map_err(|e| Error::other(format!("the object store's URL `{url}` is wrong: {e}")))?;
        Self::at(store, url, prefix)
    }

    pub(crate) fn at(store: Arc<dyn ObjectStore>, url: &str, prefix: Path) -> Result<Self> {
        Ok(Self {
            driver: Arc::new(Driver::start()?),
            store,
            url: url.trim_end_matches('/').to_owned(),
            prefix,
            part: 16 << 20,
            concurrency: 4,
            versions: Mutex::default(),
        })
    }

    /// Sets the size of parts for uploads and reads, and the number of simultaneous transfers.
    ///
    /// Both are at least one. By default 4 parts of 16 MiB.
    #[must_use]
    pub fn with_parts(self, bytes: usize, concurrency: usize) -> Self {
        Self { part: bytes.max(1), concurrency: concurrency.max(1), ..self }
    }

    fn failed(&self, what: &'static str, path: &str) -> impl FnOnce(object_store::Error) -> Error {
        let failed = Error::io(what, self.location(path));
        |error| failed(error.into())
    }

    /// Returns the path of an object or a folder of objects.
    fn object(&self, path: &str) -> Result<Path> {
        let mut object = self.prefix.clone();
        for segment in path.split('/').filter(|s| !s.is_empty()) {
            let invalid = |e: object_store::path::Error| {
                Error::io("naming", self.location(path))(std::io::Error::new(
                    std::io::ErrorKind::InvalidInput,
                    e,
                ))
            };
            let parsed = Path::parse(segment).map_err(invalid)?;
            object = Path::from_iter(object.parts().chain(parsed.parts()));
        }
        Ok(object)
    }

    /// Reads the pointer to the committed version of a checkpoint.
    fn pointer(&self, name: &str) -> Result<Option<FoundPointer>> {
        let path = format!("{name}/{POINTER}");
        let (store, object) = (self.store.clone(), self.object(&path)?);
        let found = self.driver.run(async move {
            let found = match store.get(&object).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                found => found?,
            };
            let put = UpdateVersion {
                e_tag: found.meta.e_tag.clone(),
                version: found.meta.version.clone(),
            };
            let len = found.meta.size;
            check_len(len, MAX_POINTER).map_err(|error| object_store::Error::Generic {
                store: "object store",
                source: error.into(),
            })?;
            Ok(Some((found.bytes().await?, put)))
        });
        let found = match found.map_err(self.failed("reading", &path))? {
            None => None,
            Some((bytes, put)) => {
                let pointer = Pointer::parse(&bytes)
                    .map_err(|message| Error::checkpoint(self.location(&path), message))?;
                Some(FoundPointer { version: pointer.version, put })
            }
        };
        let mut versions = self.versions.lock().expect("no panic while it is held");
        match &found {
            Some(found) => versions.insert(name.to_owned(), found.version.clone()),
            None => versions.remove(name),
        };
        Ok(found)
    }

    /// Maps `path` to the object in the version of a save, in the committed version, or at the
    /// root.
    ///
    /// With `fresh` it reads the pointer to the committed version; otherwise it uses the last one
    /// read.
    fn resolve(&self, path: &str, fresh: bool) -> Result<Path> {
        let (head, rest) = split(path);
        if let Some((name, version)) = parse_temporary_name(head) {
            return self.object(&format!("{name}/{version}/{rest}"));
        }
        let known = self.versions.lock().expect("no panic while it is held").get(head).cloned();
        let version = match known {
            Some(version) if !fresh => Some(version),
            _ => self.pointer(head)?.map(|found| found.version),
        };
        match version {
            Some(version) => self.object(&format!("{head}/{version}/{rest}")),
            None => self.object(&format!("{head}/{rest}")),
        }
    }

    /// Maps the path of a file. A file at the root does not belong to a checkpoint. Files directly
    /// in a checkpoint's folder, such as the manifest, are read from the version that is committed
    /// now.
    fn file(&self, path: &str) -> Result<Path> {
        let (head, rest) = split(path);
        if rest.is_empty() { self.object(head) } else { self.resolve(path, !rest.contains('/')) }
    }

    fn children(&self, folder: Path, path: &str) -> Result<ListResult> {
        let store = self.store.clone();
        let listed = self.driver.run(async move { store.list_with_delimiter(Some(&folder)).await });
        listed.map_err(self.failed("listing", path))
    }

    /// Whether a folder has objects; a local store lists empty folders.
    fn has_objects(&self, folder: Path, path: &str) -> Result<bool> {
        let store = self.store.clone();
        let first = self.driver.run(async move {
            store.list(Some(&folder)).try_next().await.map(|first| first.is_some())
        });
        first.map_err(self.failed("listing", path))
    }

    /// Lists the checkpoints, unfinished saves and files at the root.
    fn list_root(&self) -> Result<Vec<Entry>> {
        let root = self.children(self.prefix.clone(), "")?;
        let mut entries = files(&root);
        for folder in &root.common_prefixes {
            let Some(name) = folder.filename() else { continue };
            let inside = self.children(folder.clone(), name)?;
            let is_pointer = |path: &Path| path.filename() == Some(POINTER);
            let has_pointer = inside.objects.iter().any(|object| is_pointer(&object.location));
            let committed =
                if has_pointer { self.pointer(name)?.map(|found| found.version) } else { None };
            let mut is_checkpoint = committed.is_some()
                || inside.objects.iter().any(|object| !is_pointer(&object.location));
            for version in inside.common_prefixes.iter().filter_map(Path::filename) {
                if !is_version(version) {
                    is_checkpoint = is_checkpoint
                        || self.has_objects(self.object(&format!("{name}/{version}"))?, name)?;
                } else if committed.as_deref() != Some(version)
                    && self.has_objects(self.object(&format!("{name}/{version}"))?, name)?
                {
                    entries.push(directory(temporary_name(name, version)));
                }
            }
            if is_checkpoint {
                entries.push(directory(name.to_owned()));
            }
        }
        Ok(entries)
    }

    /// Deletes the objects in a folder, unless `keep` accepts them. The objects that mark the
    /// folder as a checkpoint are deleted first.
    fn delete(
        &self,
        folder: Path,
        path: &str,
        keep: impl Fn(&Path) -> bool + Send + 'static,
    ) -> Result<()> {
        let store = self.store.clone();
        let deleted = self.driver.run(async move {
            let listed = store.list(Some(&folder)).map_ok(|object| object.location);
            let mut found: Vec<Path> = listed.try_collect().await?;
            found.retain(|path| !keep(path));
            let makes_it = |path: &Path| matches!(path.filename(), Some(MANIFEST | POINTER));
            let (first, then): (Vec<_>, Vec<_>) = found.into_iter().partition(makes_it);
            for batch in [first, then] {
                let batch = futures_util::stream::iter(batch.into_iter().map(Ok)).boxed();
                let mut deleted = store.delete_stream(batch);
                while let Some(result) = deleted.next().await {
                    gone(result.map(drop))?;
                }
            }
            Ok(())
        });
        deleted.map_err(self.failed("removing", path))
    }

    /// Deletes an object. Returns whether it existed.
    fn delete_object(&self, object: Path, path: &str) -> Result<bool> {
        let store = self.store.clone();
        let deleted = self.driver.run(async move {
            // A folder is not an object, but a local store tries to delete it.
            match store.head(&object).await {
                Ok(_) => gone(store.delete(&object).await).map(|()| true),
                missing => gone(missing.map(drop)).map(|()| false),
            }
        });
        deleted.map_err(self.failed("removing", path))
    }

    /// Makes `version` the committed version of the checkpoint `name`. Fails if the pointer has
    /// changed since `before` was read.
    fn put_pointer(&self, name: &str, version: &str, before: Option<FoundPointer>) -> Result<()> {
        let path = format!("{name}/{POINTER}");
        let object = self.object(&path)?;
        let bytes = Pointer::new(version).to_bytes();
        let mode = before.map_or(PutMode::Create, |found| PutMode::Update(found.put));
        let put = |mode: PutMode| {
            let (store, object) = (self.store.clone(), object.clone());
            let payload = PutPayload::from(bytes.clone());
            self.driver.run(async move {
                store.put_opts(&object, payload, PutOptions::from(mode)).await.map(drop)
            })
        };
        let result = match put(mode) {
            Err(
                object_store::Error::NotImplemented { .. }
                | object_store::Error::NotSupported { .. },
            ) => put(PutMode::Overwrite),
            result => result,
        };
        let Err(error) = result else { return Ok(()) };
        // If the answer to a successful request was lost, its retry fails.
        if self.pointer(name)?.is_some_and(|found| found.version == version) {
            return Ok(());
        }
        match error {
            object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. } => {
                let message = "another save has committed a checkpoint of this name at the same time. \
                               Only one run may save to a place";
                Err(Error::checkpoint(self.location(name), message))
            }
            error => Err(self.failed("committing", name)(error)),
        }
    }
}

/// Ignores the error if the deleted object does not exist.
fn gone(result: object_store::Result<()>) -> object_store::Result<()> {
    match result {
        Err(object_store::Error::NotFound { .. }) => Ok(()),
        result => result,
    }
}

fn directory(name: String) -> Entry {
    Entry { name, is_directory: true, bytes: 0 }
}

fn files(listed: &ListResult) -> Vec<Entry> {
    let entry = |object: &object_store::ObjectMeta| {
        let name = object.location.filename()?.to_owned();
        Some(Entry { name, is_directory: false, bytes: object.size })
    };
    listed.objects.iter().filter_map(entry).collect()
}

impl CheckpointIO for ObjectStoreIO {
    fn location(&self, path: &str) -> PathBuf {
        let path = path.trim_matches('/');
        if path.is_empty() {
            self.url.clone().into()
        } else {
            format!("{}/{path}", self.url).into()
        }
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        Ok(Box::new(ObjectWriter {
            driver: self.driver.clone(),
            store: self.store.clone(),
            path: self.file(path)?,
            location: self.location(path),
            part: self.part,
            concurrency: self.concurrency,
            buffer: Vec::new(),
            upload: None,
            under_way: VecDeque::new(),
        }))
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        let object = self.file(path)?;
        let (store, head) = (self.store.clone(), object.clone());
        let meta = self.driver.run(async move { store.head(&head).await });
        Ok(Arc::new(ObjectReader {
            driver: self.driver.clone(),
            store: self.store.clone(),
            path: object,
            len: meta.map_err(self.failed("opening", path))?.size,
            part: self.part,
            concurrency: self.concurrency,
        }))
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let (head, _) = split(path);
        let mut entries = if head.is_empty() {
            self.list_root()?
        } else {
            let listed = self.children(self.resolve(path, false)?, path)?;
            let folders = listed.common_prefixes.iter().filter_map(Path::filename);
            let mut entries: Vec<Entry> = folders.map(|name| directory(name.to_owned())).collect();
            entries.append(&mut files(&listed));
            entries
        };
        entries.sort();
        Ok(entries)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let (head, rest) = split(path);
        if !rest.is_empty() {
            let object = self.resolve(path, false)?;
            if self.delete_object(object.clone(), path)? {
                return Ok(());
            }
            return self.delete(object, path, |_| false);
        }
        if let Some((name, version)) = parse_temporary_name(head) {
            if self.pointer(name)?.is_some_and(|found| found.version == version) {
                // The commit seemed to fail because its answer was lost.
                tracing::warn!("{} was committed; it stays", self.location(name).display());
                return Ok(());
            }
            return self.delete(self.object(&format!("{name}/{version}"))?, path, |_| false);
        }
        if self.delete_object(self.object(head)?, path)? {
            return Ok(());
        }
        self.delete_object(self.object(&format!("{head}/{POINTER}"))?, path)?;
        self.versions.lock().expect("no panic while it is held").remove(head);
        self.delete(self.object(head)?, path, |_| false)
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        let version = match parse_temporary_name(staged) {
            Some((base, version)) if base == name => version,
            _ => {
                let message = format!("`{staged}` is no unfinished save of `{name}`");
                return Err(Error::checkpoint(self.location(name), message));
            }
        };
        let before = self.pointer(name)?;
        let replaced = before.as_ref().map(|found| found.version.clone());
        self.put_pointer(name, version, before)?;
        let mut versions = self.versions.lock().expect("no panic while it is held");
        versions.insert(name.to_owned(), version.to_owned());
        drop(versions);
        // Other versions are unfinished saves, which the next save removes.
        let folder = self.object(name)?;
        let inside = folder.clone();
        let keep = move |path: &Path| {
            let mut parts = path.prefix_match(&inside).into_iter().flatten();
            let first = parts.next();
            first.is_some_and(|first| match (first.as_ref(), parts.next()) {
                (first, None) => first == POINTER,
                (first, _) => is_version(first) && Some(first) != replaced.as_deref(),
            })
        };
        if let Err(error) = self.delete(folder, name, keep) {
            tracing::warn!("the next save will remove what this one has replaced: {error}");
        }
        Ok(())
    }
}
