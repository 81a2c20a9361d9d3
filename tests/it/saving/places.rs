//! Checkpoint storage other than a directory.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fulgurite::core::checkpoint::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry,
};
use fulgurite::core::launch::Interruption;
use fulgurite::core::register_checkpoint_io;
use fulgurite::core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::harness::{PATIENCE, Scratch, course, resumed};

/// Checkpoints in memory, by root.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryConfig {}

#[typetag::serde(name = "test_memory")]
impl CheckpointIOConfig for MemoryConfig {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        let mut places = PLACES.lock().unwrap();
        let files = places.entry(root.to_owned()).or_default().clone();
        Ok(Arc::new(Memory { root: root.to_owned(), files }))
    }
}

register_checkpoint_io!("test_memory", MemoryConfig, "for this test", "\"test_memory\"");

type Files = Arc<Mutex<BTreeMap<String, Arc<Vec<u8>>>>>;

static PLACES: Mutex<BTreeMap<PathBuf, Files>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Memory {
    root: PathBuf,
    files: Files,
}

struct MemoryWriter {
    files: Files,
    path: String,
    bytes: Vec<u8>,
}

impl Write for MemoryWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl CheckpointWriter for MemoryWriter {
    fn finish(self: Box<Self>) -> Result<()> {
        let Self { files, path, bytes } = *self;
        files.lock().unwrap().insert(path, Arc::new(bytes));
        Ok(())
    }
}

struct MemoryReader(Arc<Vec<u8>>);

impl CheckpointReader for MemoryReader {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.len() as u64)
    }
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let offset = offset as usize;
        let bytes = self.0.get(offset..offset + buffer.len()).ok_or(ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

impl Memory {
    fn inside(&self, path: &str) -> Vec<String> {
        let files = self.files.lock().unwrap();
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        files.keys().filter_map(|file| file.strip_prefix(&prefix)).map(str::to_owned).collect()
    }
}

impl CheckpointIO for Memory {
    fn location(&self, path: &str) -> PathBuf {
        let root = Path::new("memory:").join(self.root.strip_prefix("/").unwrap_or(&self.root));
        if path.is_empty() { root } else { root.join(path) }
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        let files = self.files.clone();
        Ok(Box::new(MemoryWriter { files, path: path.to_owned(), bytes: Vec::new() }))
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        let found = self.files.lock().unwrap().get(path).cloned();
        let missing = || Error::Io {
            action: "opening",
            path: self.location(path),
            source: ErrorKind::NotFound.into(),
        };
        Ok(Arc::new(MemoryReader(found.ok_or_else(missing)?)))
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let mut entries = BTreeMap::new();
        for file in self.inside(path) {
            let (name, is_directory) = match file.split_once('/') {
                Some((directory, _)) => (directory.to_owned(), true),
                None => (file.clone(), false),
            };
            let full = if path.is_empty() { file } else { format!("{path}/{file}") };
            let bytes = if is_directory { 0 } else { self.open(&full)?.len().unwrap() };
            entries.insert(name.clone(), Entry { name, is_directory, bytes });
        }
        Ok(entries.into_values().collect())
    }

    fn remove(&self, path: &str) -> Result<()> {
        let inside = format!("{path}/");
        self.files.lock().unwrap().retain(|file, _| file != path && !file.starts_with(&inside));
        Ok(())
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.remove(name)?;
        let inside = self.inside(staged);
        let mut files = self.files.lock().unwrap();
        for file in inside {
            let bytes = files.remove(&format!("{staged}/{file}")).unwrap();
            files.insert(format!("{name}/{file}"), bytes);
        }
        Ok(())
    }
}

/// Storage that holds files back until the run ends.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteBehindConfig {}

#[typetag::serde(name = "test_write_behind")]
impl CheckpointIOConfig for WriteBehindConfig {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        let mut places = PLACES.lock().unwrap();
        let place = places.entry(root.to_owned()).or_default().clone();
        let pending = Arc::new(Mutex::new(place.lock().unwrap().clone()));
        let pending = Memory { root: root.to_owned(), files: pending };
        Ok(Arc::new(WriteBehind { place, pending }))
    }
}

register_checkpoint_io!("test_write_behind", WriteBehindConfig, "for this test");

#[derive(Debug)]
struct WriteBehind {
    place: Files,
    pending: Memory,
}

impl CheckpointIO for WriteBehind {
    fn location(&self, path: &str) -> PathBuf {
        self.pending.location(path)
    }
    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        self.pending.create(path)
    }
    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        self.pending.open(path)
    }
    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.pending.list(path)
    }
    fn remove(&self, path: &str) -> Result<()> {
        self.pending.remove(path)
    }
    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.pending.commit(staged, name)
    }
    fn teardown(&self) -> Result<()> {
        let root = &self.pending.root;
        *TEARDOWNS.lock().unwrap().entry(root.clone()).or_default() += 1;
        if root.ends_with("refuses") {
            return Err(Error::checkpoint(self.location(""), "it cannot be completed"));
        }
        *self.place.lock().unwrap() = self.pending.files.lock().unwrap().clone();
        Ok(())
    }
}

static TEARDOWNS: Mutex<BTreeMap<PathBuf, usize>> = Mutex::new(BTreeMap::new());

/// The checkpoints written to storage, and the number of completion requests.
fn written(scratch: &Scratch) -> (Vec<String>, usize) {
    let root = scratch.path("kept");
    let files = PLACES.lock().unwrap()[&root].clone();
    let names = Memory { root: root.clone(), files }.list("").unwrap();
    let names = names.into_iter().filter(|entry| entry.is_directory).map(|entry| entry.name);
    (names.collect(), TEARDOWNS.lock().unwrap()[&root])
}

#[test]
fn held_back_saves_are_written_at_the_end() {
    let fit = |more: &[&str]| {
        let scratch = Scratch::new();
        let keys = [
            "checkpoint.io=test_write_behind",
            "checkpoint.every_n_steps=2",
            "trainer.max_steps=5",
        ];
        let result = scratch.fit(&[&keys[..], more].concat()).1;
        (written(&scratch), result)
    };
    let names = |steps: &[u64]| -> Vec<String> {
        steps.iter().map(|step| format!("step-{step:08}")).collect()
    };
    for background in ["checkpoint.async_save=false", "checkpoint.async_save=true"] {
        let (written, result) = fit(&[background]);
        result.unwrap();
        assert_eq!(written, (names(&[2, 4, 5]), 1));

        // A run that fails when it saves after step 4.
        let monitor = ["trainer.val_check_interval=3", "checkpoint.monitor=none_such", background];
        let (written, result) = fit(&monitor);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("there is no metric `none_such`"), "{error}");
        assert_eq!(written, (names(&[2]), 1));

        PATIENCE.set(Some((2, Interruption::Termination)));
        let (written, result) = fit(&[background]);
        PATIENCE.set(None);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        assert_eq!(written, (names(&[2, 3]), 1));
    }

    // A failure then becomes the run's error, unless the run has one already.
    let scratch = Scratch::new();
    let dir = format!("checkpoint.dir={:?}", scratch.path("refuses"));
    let keys = ["checkpoint.io=test_write_behind", "trainer.max_steps=2", &dir];
    let error = scratch.fit(&keys).1.unwrap_err().to_string();
    assert!(error.ends_with("it cannot be completed"), "{error}");
    assert_eq!(TEARDOWNS.lock().unwrap()[&scratch.path("refuses")], 1);
    let error = scratch.fit(&[&keys[..], &["trainer.ckpt_path=none_such"]].concat()).1.unwrap_err();
    assert!(error.to_string().contains("there is no checkpoint here"), "{error}");
    assert_eq!(TEARDOWNS.lock().unwrap()[&scratch.path("refuses")], 2);
}

// checklist: Lightning: checkpoint_io not supported
#[test]
fn any_place_is_resumed_from() {
    let scratch = Scratch::new();
    // Log all steps, because a run always logs its last step.
    let logged = "trainer.log_every_n_steps=1";
    let keys = ["checkpoint.io=test_memory", "checkpoint.every_n_steps=2", logged];
    let fit = |more: &[&str]| scratch.succeed(&[&keys[..], more].concat());
    let last = ["trainer.ckpt_path=last"];
    let whole = course(&Scratch::new().succeed(&["trainer.max_steps=7", logged]));
    let mut events = fit(&[&last[..], &["trainer.max_steps=4"]].concat());
    assert_eq!(resumed(&events), None);
    events.extend(fit(&[&last[..], &["trainer.max_steps=7"]].concat()));
    assert_eq!(course(&events), whole);
    let (step, location) = resumed(&events).unwrap();
    assert_eq!(step, 4);
    assert!(location.starts_with("memory:") && location.ends_with("step-00000004"));
    assert!(!scratch.path("kept").exists());

    // By its name, and by its path in messages.
    let second = location.with_file_name("step-00000002");
    for path in [Path::new("step-00000002"), &second] {
        let path = format!("trainer.ckpt_path={path:?}");
        let more = fit(&[&path, "trainer.max_steps=7", "checkpoint.async_save=true"]);
        assert_eq!(course(&more), whole[2..]);
    }
    let path = format!("trainer.ckpt_path={:?}", scratch.path("nowhere"));
    let missing = scratch.fit(&[&keys[..], &[&path]].concat()).1.unwrap_err().to_string();
    assert!(missing.contains("nowhere: there is no checkpoint here"), "{missing}");
    let missing = scratch.fit(&[&keys[..], &["trainer.ckpt_path=step-00000099"]].concat());
    let missing = missing.1.unwrap_err().to_string();
    assert!(missing.contains("memory:"), "{missing}");

    // A local checkpoint, in a run that keeps its own in memory.
    let local = Scratch::new();
    local.succeed(&["trainer.max_steps=3"]);
    let path = format!("trainer.ckpt_path={:?}", local.path("kept/step-00000003"));
    let keys = ["trainer.max_steps=7", "checkpoint.overwrite=true"];
    assert_eq!(course(&fit(&[&[&*path], &keys[..]].concat())), whole[3..]);
}
