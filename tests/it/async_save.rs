//! Saves in the background: ranks as threads, with slow or broken storage.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use fulgurite::core::autograd::storage;
use fulgurite::core::checkpoint::{
    AsyncSaver, CheckpointIO, CheckpointReader, CheckpointWriter, DistributedCheckpoint, Entry,
    LAST, SaveMeta, SaveRequest, SavedCheckpoint, ShardTensor, TensorSource, last, step_name,
};
use fulgurite::core::collective::{ProcessGroup, Solo};
use fulgurite::core::shard::Region;
use fulgurite::core::{Error, Result};
use fulgurite::prelude::*;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_transports::run_ranks;

/// A directory whose writes wait for a gate, and fail on demand. It notes its operations.
#[derive(Debug)]
struct Gated {
    inner: LocalDirectory,
    open: Mutex<bool>,
    opened: Condvar,
    fail: Mutex<bool>,
    notes: Mutex<Vec<String>>,
}

impl Gated {
    fn new(root: &Path) -> Arc<Self> {
        Arc::new(Self {
            inner: LocalDirectory::new(root).with_sync(false),
            open: Mutex::new(true),
            opened: Condvar::new(),
            fail: Mutex::new(false),
            notes: Mutex::default(),
        })
    }

    /// Blocks writes until the guard is dropped. The guard also opens the gate after a failed
    /// assertion; otherwise the saver would wait for its thread forever.
    fn close(self: &Arc<Self>) -> Closed {
        self.set_open(false);
        Closed(self.clone())
    }

    fn set_open(&self, open: bool) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = open;
        self.opened.notify_all();
    }

    fn set_fail(&self, fail: bool) {
        *self.fail.lock().unwrap() = fail;
    }

    fn note(&self, note: String) {
        self.notes.lock().unwrap().push(note);
    }
}

/// Opens the gate when dropped. Create it after the saver, so that it is dropped first.
struct Closed(Arc<Gated>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.set_open(true);
    }
}

impl CheckpointIO for Gated {
    fn location(&self, path: &str) -> PathBuf {
        self.inner.location(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        let open = self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap();
        drop(open);
        if *self.fail.lock().unwrap() && path.starts_with("step") {
            return Err(Error::other("the disk is full"));
        }
        self.inner.create(path)
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        self.inner.open(path)
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.inner.list(path)
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.note(format!("remove {path}"));
        self.inner.remove(path)
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.note(format!("commit {name}"));
        self.inner.commit(staged, name)
    }

    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        self.note(format!("replace {path}"));
        self.inner.replace(path, bytes)
    }
}

/// Eight values, of which this rank holds its shard.
struct Weights {
    values: Tensor,
    rank: usize,
    size: usize,
}

impl Weights {
    fn new(group: &dyn ProcessGroup) -> Self {
        let (rank, size) = (group.rank(), group.size());
        let values = Tensor::zeros(8 / size, DType::F32, &Device::Cpu).unwrap();
        Self { values, rank, size }
    }

    /// Stands for a step: sets all values.
    fn set(&self, value: f32) {
        storage::with_host_mut(&self.values, |x: &mut [f32]| x.fill(value)).unwrap();
    }

    fn request(&self, step: u64, remove: &[&str]) -> SaveRequest {
        let n = 8 / self.size;
        let part = ShardTensor {
            name: "weight".to_owned(),
            values: self.values.clone(),
            region: Region { offsets: vec![self.rank * n], sizes: vec![n] },
            shape: vec![8],
        };
        SaveRequest {
            name: step_name(step),
            model: vec![part],
            optimizer: Vec::new(),
            meta: SaveMeta { step, ..SaveMeta::default() },
            update_last: true,
            remove: remove.iter().map(|&name| name.to_owned()).collect(),
        }
    }
}

fn stored(root: &Path, step: u64) -> Vec<f32> {
    let checkpoint = DistributedCheckpoint::open(root.join(step_name(step))).unwrap();
    let whole = checkpoint.read("weight", &Region::full(&[8]), DType::F32, &Device::Cpu);
    whole.unwrap().to_vec1().unwrap()
}

fn names(root: &Path) -> Vec<String> {
    let entries = LocalDirectory::new(root).list("").unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

#[test]
fn training_continues_during_a_save() {
    let dir = tempfile::tempdir().unwrap();
    let ios = [Gated::new(dir.path()), Gated::new(dir.path())];
    run_ranks(2, |world| {
        let io = ios[world.rank()].clone();
        let weights = Weights::new(&*world);
        let mut saver = AsyncSaver::new(io.clone(), &*world)?;
        assert_eq!(saver.wait()?, None);
        let gate = io.close();
        weights.set(1.0);
        assert_eq!(saver.start(weights.request(1, &[]))?, None);
        // Later steps run their own collectives while nothing can be written.
        for step in 2..5u8 {
            weights.set(step.into());
            world.barrier()?.wait()?;
        }
        assert!(saver.is_running());
        assert!(!dir.path().join(step_name(1)).exists());
        drop(gate);
        let path = dir.path().join(step_name(1));
        // The next save waits for this one.
        let earlier = saver.start(weights.request(4, &[]))?.expect("the first one");
        assert_eq!((earlier.step, &earlier.path), (1, &path));
        weights.set(9.0);
        assert!(matches!(saver.wait()?, Some(SavedCheckpoint { step: 4, .. })));
        assert!(!saver.is_running());
        assert_eq!(saver.wait()?, None);
        Ok(())
    })
    .unwrap();
    assert_eq!(stored(dir.path(), 1), [1.0; 8]);
    assert_eq!(stored(dir.path(), 4), [4.0; 8]);
}

#[test]
fn rank_0_decides_about_finished_saves() {
    let dir = tempfile::tempdir().unwrap();
    let io = LocalDirectory::new(dir.path()).with_sync(false);
    run_ranks(2, |world| {
        let weights = Weights::new(&*world);
        for step in 1..3 {
            let mut request = weights.request(step, &[]);
            if world.rank() == 0 {
                request.remove = vec![step_name(step - 1)];
            } else {
                (request.update_last, request.remove) = (false, Vec::new());
            }
            request.run(&io, &*world)?;
            // All ranks finish together, whatever their requests were.
            world.barrier()?.wait()?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(names(dir.path()), [LAST.to_owned(), step_name(2)]);
}

#[test]
fn old_checkpoints_are_removed_after_commit() {
    let dir = tempfile::tempdir().unwrap();
    let io = Gated::new(dir.path());
    let world = Solo::new("world", 0);
    let weights = Weights::new(&world);
    let mut saver = AsyncSaver::new(io.clone(), &world).unwrap();
    saver.start(weights.request(1, &[])).unwrap();
    saver.wait().unwrap();
    io.notes.lock().unwrap().clear();
    // The old checkpoint is removed by the second save, not earlier; the one being saved is kept.
    let gate = io.close();
    saver.start(weights.request(2, &["step-00000001", "step-00000002"])).unwrap();
    assert!(io.notes.lock().unwrap().is_empty());
    drop(gate);
    saver.wait().unwrap();
    let notes = io.notes.lock().unwrap().join("\n");
    insta::assert_snapshot!(notes, @r"
    commit step-00000002
    replace last
    remove step-00000001
    ");
    assert_eq!(names(dir.path()), [LAST, "step-00000002"]);
    assert_eq!(last(&*io).unwrap().unwrap().step, 2);

    // A failed save removes nothing.
    io.set_fail(true);
    saver.start(weights.request(3, &["step-00000002"])).unwrap();
    saver.wait().unwrap_err();
    assert_eq!(names(dir.path()), [LAST, "step-00000002"]);
    assert_eq!(last(&*io).unwrap().unwrap().step, 2);
}

#[test]
fn error_of_one_rank_reaches_all() {
    let dir = tempfile::tempdir().unwrap();
    let ios = [Gated::new(dir.path()), Gated::new(dir.path())];
    let errors = run_ranks(2, |world| {
        let io = ios[world.rank()].clone();
        let weights = Weights::new(&*world);
        let mut saver = AsyncSaver::new(io.clone(), &*world)?;
        io.set_fail(world.rank() == 1);
        saver.start(weights.request(1, &[]))?;
        // The next save reports the error and does not start.
        let first = saver.start(weights.request(2, &[])).unwrap_err();
        assert!(!saver.is_running());
        saver.start(weights.request(3, &[]))?;
        let second = saver.wait().unwrap_err();
        // A rank that cannot copy its shard does not leave the others waiting.
        io.set_fail(false);
        if world.rank() == 1 {
            storage::release(&weights.values)?;
        }
        saver.start(weights.request(4, &[]))?;
        let third = saver.wait().unwrap_err();
        Ok([first, second, third].map(|error| error.to_string()))
    })
    .unwrap();
    insta::assert_snapshot!(errors.concat().join("\n"), @r"
    rank 1 failed: the disk is full
    rank 1 failed: the disk is full
    rank 1 failed: saving tensor `weight`: its values are not in memory
    the disk is full
    the disk is full
    saving tensor `weight`: its values are not in memory
    ");
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn dropped_saver_completes_its_save() {
    for panics in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let io = Gated::new(dir.path());
        let world = Solo::new("world", 0);
        let run = || {
            let weights = Weights::new(&world);
            let mut saver = AsyncSaver::new(io.clone(), &world).unwrap();
            let gate = io.close();
            weights.set(3.0);
            saver.start(weights.request(1, &[])).unwrap();
            assert!(saver.is_running());
            let opener = std::thread::spawn(move || drop(gate));
            if panics {
                std::panic::resume_unwind(Box::new("a step panics"));
            }
            drop(saver);
            opener.join().unwrap();
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert_eq!(result.is_err(), panics);
        assert_eq!(stored(dir.path(), 1), [3.0; 8]);
        assert_eq!(names(dir.path()), [LAST, "step-00000001"]);
    }
}

#[test]
fn dangling_pointer_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let io = Gated::new(dir.path());
    let world = Solo::new("world", 0);
    assert_eq!(last(&*io).unwrap(), None);
    let weights = Weights::new(&world);
    for step in [5, 7, 3] {
        weights.request(step, &[]).run(&*io, &world).unwrap();
    }
    let found = || last(&*io).unwrap().unwrap().step;
    assert_eq!(found(), 3, "the one that was saved last");
    let contents: [&[u8]; 5] =
        [b"", b"step-00000003", b"step-00000004\n", b"../x\n", b"\xff\xfe\n"];
    for torn in contents {
        io.save(LAST, torn).unwrap();
        assert_eq!(found(), 7, "{torn:?}");
    }
    io.remove(LAST).unwrap();
    assert_eq!(found(), 7);
    io.save("last/file", b"").unwrap();
    assert_eq!(found(), 7);
    io.remove(LAST).unwrap();
    // A checkpoint without a manifest does not count.
    io.save(LAST, b"step-00000005\n").unwrap();
    assert_eq!(found(), 5);
    io.remove("step-00000005/manifest.json").unwrap();
    assert_eq!(found(), 7);
}
