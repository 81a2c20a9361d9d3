//! Saves that fail while the run goes on: `checkpoint.max_failed_saves`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fulgurite::core::checkpoint::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry, step_name,
};
use fulgurite::core::register_checkpoint_io;
use fulgurite::core::trainer::Event;
use fulgurite::core::{Error, Result};
use fulgurite_checkpoint_local::LocalDirectory;
use serde::{Deserialize, Serialize};

use super::harness::{Scratch, course, saved};

/// A directory that refuses some checkpoints, as if it were full.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FullConfig {
    #[serde(default)]
    steps: Vec<u64>,
    #[serde(default)]
    names: Vec<String>,
    /// Which writes of the pointer to the last checkpoint fail, counted from 1.
    #[serde(default)]
    pointers: Vec<usize>,
}

#[typetag::serde(name = "test_full")]
impl CheckpointIOConfig for FullConfig {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        let of_steps = self.steps.iter().map(|step| step_name(*step));
        let refused = of_steps.chain(self.names.iter().cloned()).collect();
        let (pointers, written) = (self.pointers.clone(), AtomicUsize::new(0));
        Ok(Arc::new(Full { inner: LocalDirectory::new(root), refused, pointers, written }))
    }
}

register_checkpoint_io!("test_full", FullConfig, "for this test");

#[derive(Debug)]
struct Full {
    inner: LocalDirectory,
    refused: Vec<String>,
    pointers: Vec<usize>,
    written: AtomicUsize,
}

impl CheckpointIO for Full {
    fn location(&self, path: &str) -> PathBuf {
        self.inner.location(path)
    }
    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        match self.refused.iter().any(|name| path.starts_with(name)) {
            true => Err(Error::io("creating", self.location(path))(ErrorKind::StorageFull.into())),
            false => self.inner.create(path),
        }
    }
    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        self.inner.open(path)
    }
    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.inner.list(path)
    }
    fn remove(&self, path: &str) -> Result<()> {
        self.inner.remove(path)
    }
    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed) + 1;
        match self.pointers.contains(&number) {
            true => Err(Error::io("replacing", self.location(path))(ErrorKind::StorageFull.into())),
            false => self.inner.replace(path, bytes),
        }
    }
    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.inner.commit(staged, name)
    }
}

/// Trains twelve steps, and saves every second one.
fn fit(scratch: &Scratch, refused: &str, more: &[&str]) -> (Vec<Event>, Result<()>) {
    let io = format!("checkpoint.io={{ type = \"test_full\", steps = {refused} }}");
    let keys = ["trainer.max_steps=12", "checkpoint.every_n_steps=2", &io];
    scratch.fit(&[&keys, more].concat())
}

fn failed(events: &[Event]) -> Vec<u64> {
    let step = |event: &Event| match event {
        Event::SaveFailed { step, .. } => Some(*step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

fn undisturbed() -> Vec<String> {
    course(&Scratch::new().succeed(&["trainer.max_steps=12"]))
}

#[test]
fn failed_saves_do_not_end_training() {
    let undisturbed = undisturbed();
    for background in [false, true] {
        let scratch = Scratch::new();
        let background = format!("checkpoint.async_save={background}");
        let keys = ["checkpoint.max_failed_saves=2", "checkpoint.keep_last=2", &background];
        let (events, result) = fit(&scratch, "[4, 6]", &keys);
        result.unwrap();
        assert_eq!((saved(&events), failed(&events).len()), (vec![2, 8, 10, 12], 2));
        assert_eq!(course(&events), undisturbed);
        assert_eq!(scratch.kept(), ["last", "step-00000010", "step-00000012"]);
    }
}

#[test]
fn failed_saves_remove_no_checkpoint() {
    let scratch = Scratch::new();
    let keys = ["checkpoint.max_failed_saves=2", "checkpoint.keep_last=1"];
    let (events, result) = fit(&scratch, "[4, 6, 8]", &keys);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("creating") && error.contains("step-00000008"), "{error}");
    assert_eq!((saved(&events), failed(&events)), (vec![2], vec![4, 6]));
    assert_eq!(scratch.kept(), ["last", "step-00000002"]);
}

#[test]
fn failed_saves_count_in_a_row() {
    let scratch = Scratch::new();
    let (events, result) = fit(&scratch, "[2, 6, 10]", &["checkpoint.max_failed_saves=1"]);
    result.unwrap();
    assert_eq!((saved(&events), failed(&events)), (vec![4, 8, 12], vec![2, 6, 10]));
}

#[test]
fn failed_saves_of_callbacks_end_the_run() {
    for background in [false, true] {
        let scratch = Scratch::new();
        let background = format!("checkpoint.async_save={background}");
        let keys = [
            "trainer.max_steps=8",
            "checkpoint.every_n_steps=3",
            "checkpoint.max_failed_saves=9",
            "trainer.callbacks=[{ type = \"model_checkpoint\", every_n_steps = 2, filename = \"own-{step}\" }]",
            "checkpoint.io={ type = \"test_full\", names = [\"own-step=4\"] }",
            &background,
        ];
        let (events, result) = scratch.fit(&keys);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("own-step=4"), "{error}");
        assert_eq!((saved(&events), failed(&events)), (vec![2, 3], vec![]));
        assert_eq!(scratch.kept(), ["last", "own-step=2", "step-00000003"]);
    }
}

/// The pointer to the last checkpoint is written after the commit.
#[test]
fn committed_checkpoints_are_kept_after_an_error() {
    let scratch = Scratch::new();
    let keys = [
        "trainer.max_steps=12",
        "checkpoint.every_n_steps=2",
        "checkpoint.keep_last=1",
        "checkpoint.max_failed_saves=1",
        "checkpoint.io={ type = \"test_full\", pointers = [3] }",
    ];
    let (events, result) = scratch.fit(&keys);
    result.unwrap();
    assert_eq!((saved(&events), failed(&events)), (vec![2, 4, 8, 10, 12], vec![6]));
    assert_eq!(scratch.kept(), ["last", "step-00000012"]);
}

#[test]
fn run_ends_with_the_error_of_its_last_save() {
    let undisturbed = undisturbed();
    for background in [false, true] {
        let scratch = Scratch::new();
        let background = format!("checkpoint.async_save={background}");
        let keys = ["checkpoint.max_failed_saves=9", &background];
        let (events, result) = fit(&scratch, "[10, 12]", &keys);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("step-00000012"), "{error}");
        assert_eq!(course(&events), undisturbed);
        assert_eq!(saved(&events), [2, 4, 6, 8]);
    }
}
