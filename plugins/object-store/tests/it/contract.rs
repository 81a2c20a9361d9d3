//! The contract of every checkpoint storage.
//!
//! It is checked for the local directory, and for object stores in a directory, in memory, and in a
//! store with the worst allowed behaviour.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::checkpoint::{
    CheckpointIO, CheckpointReader, CheckpointWriter, DistributedCheckpoint, Entry, latest,
    load_into, staging_name, step_name,
};
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::{Error, Result};
use fulgurite_object_store::ObjectStoreIO;
use fulgurite_object_store::object_store::local::LocalFileSystem;
use fulgurite_object_store::object_store::memory::InMemory;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{self, Mesh, bytes, io, model, ranks, save_model, shown};

const MESH: Mesh = [1, 2, 1];

/// Returns the storages, each with a directory that must outlive it.
fn places() -> Vec<(&'static str, Arc<dyn CheckpointIO>, tempfile::TempDir)> {
    let temp = || tempfile::tempdir().unwrap();
    let (a, b, c) = (temp(), temp(), temp());
    let local = Arc::new(LocalFileSystem::new_with_prefix(b.path()).unwrap());
    let local = ObjectStoreIO::new(local, "file:///runs/one").unwrap().with_parts(100, 3);
    let memory = ObjectStoreIO::new(Arc::new(InMemory::new()), "memory:///runs").unwrap();
    vec![
        ("directory", io(&a.path().join("deep/root")), a),
        ("local store", Arc::new(local), b),
        ("memory", Arc::new(memory.with_parts(64, 2)), c),
    ]
}

fn names(io: &dyn CheckpointIO) -> Vec<String> {
    io.list("").unwrap().into_iter().map(|e| e.name).collect()
}

fn save_all(io: &dyn CheckpointIO, name: &str, mesh: Mesh, step: u64, seed: u64) {
    for saved in
        ranks(checkpoints::world_size(mesh), |group| save_model(io, group, name, mesh, step, seed))
    {
        assert_eq!(saved.unwrap(), io.location(name));
    }
}

/// Returns the model's values in the checkpoint `name`, which must be whole.
fn content(io: &Arc<dyn CheckpointIO>, name: &str) -> Vec<Vec<u8>> {
    let checkpoint = DistributedCheckpoint::open_with(io, name).unwrap();
    checkpoint.verify().unwrap();
    let tree = model([1, 1, 1], 0, None, DType::F32);
    load_into(&checkpoint, &tree, true).unwrap();
    tree.parameters().iter().map(|p| bytes(&p.local().unwrap().values)).collect()
}

#[test]
fn bytes_are_saved_and_removed() {
    for (place, io, _temp) in places() {
        assert_eq!(io.list("").unwrap(), [], "{place}");
        assert_eq!(io.list("nothing/here").unwrap(), []);
        io.save("a/b/c", b"hello").unwrap();
        io.save("a/x", b"").unwrap();
        io.save("last", b"a pointer").unwrap();
        io.save("last", b"another").unwrap();
        assert_eq!(io.load("a/b/c").unwrap(), b"hello");
        assert_eq!(io.load("a/x").unwrap(), b"");
        assert_eq!(io.load("last").unwrap(), b"another");
        let entry =
            |name: &str, is_directory, bytes| Entry { name: name.into(), is_directory, bytes };
        assert_eq!(io.list("").unwrap(), [entry("a", true, 0), entry("last", false, 7)]);
        assert_eq!(io.list("a").unwrap(), [entry("b", true, 0), entry("x", false, 0)]);
        assert_eq!(io.list("a/b/").unwrap(), [entry("c", false, 5)]);
        let mut two = [0; 2];
        let reader = io.open("a/b/c").unwrap();
        assert_eq!(reader.len().unwrap(), 5);
        reader.read_exact_at(&mut two, 3).unwrap();
        assert_eq!(&two, b"lo");
        reader.read_exact_at(&mut [], 5).unwrap();
        for offset in [4, 1000] {
            let beyond = reader.read_exact_at(&mut two, offset).unwrap_err();
            assert_eq!(beyond.kind(), ErrorKind::UnexpectedEof, "{place}");
        }
        io.remove("a/b/c").unwrap();
        io.remove("a").unwrap();
        io.remove("a").unwrap();
        io.remove("last").unwrap();
        assert_eq!(names(&*io), [""; 0], "{place}");
        for path in ["a/x", "last", "a/b/c"] {
            let error = io.load(path).unwrap_err();
            assert!(
                matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound),
                "{place}: {error}"
            );
        }
        io.teardown().unwrap();
    }
}

#[test]
fn large_files_transfer_in_parts() {
    let long: Vec<u8> = (0..10_007u32).flat_map(u32::to_le_bytes).collect();
    for (place, io, _temp) in places() {
        for len in [0, 1, 63, 64, 65, 100, 128, 40_028] {
            let mut writer = io.create("x.tmp-0123456789abcdef/large").unwrap();
            for piece in long[..len].chunks(77) {
                writer.write_all(piece).unwrap();
            }
            writer.flush().unwrap();
            writer.finish().unwrap();
            assert_eq!(io.load("x.tmp-0123456789abcdef/large").unwrap(), &long[..len], "{place}");
        }
        let mut middle = vec![0; 1000];
        let reader = io.open("x.tmp-0123456789abcdef/large").unwrap();
        reader.read_exact_at(&mut middle, 501).unwrap();
        assert_eq!(middle, &long[501..1501]);
        // An abandoned file does not appear.
        let mut writer = io.create("x.tmp-0123456789abcdef/given up").unwrap();
        writer.write_all(&long).unwrap();
        drop(writer);
        if place != "directory" {
            let left: Vec<_> =
                io.list("x.tmp-0123456789abcdef").unwrap().into_iter().map(|e| e.name).collect();
            assert_eq!(left, ["large"], "{place}");
        }
    }
}

#[test]
fn commit_replaces_in_one_step() {
    for (place, io, _temp) in places() {
        let stage = |content: &[u8]| {
            let staged = staging_name("last");
            io.save(&format!("{staged}/manifest.json"), content).unwrap();
            io.save(&format!("{staged}/model/x"), content).unwrap();
            staged
        };
        let first = stage(b"one");
        assert_eq!(names(&*io), std::slice::from_ref(&first), "{place}");
        io.commit(&first, "last").unwrap();
        assert_eq!(names(&*io), ["last"]);
        let second = stage(b"two");
        assert_eq!(io.load("last/model/x").unwrap(), b"one");
        assert_eq!(
            names(&*io).into_iter().collect::<BTreeSet<_>>(),
            BTreeSet::from(["last".to_owned(), second.clone()])
        );
        io.commit(&second, "last").unwrap();
        assert_eq!(io.load("last/manifest.json").unwrap(), b"two");
        assert_eq!(io.load("last/model/x").unwrap(), b"two");
        assert_eq!(names(&*io), ["last"], "{place}");
        io.remove("last").unwrap();
        assert_eq!(names(&*io), [""; 0], "{place}");
        assert!(io.load("last/model/x").is_err());
    }
}

#[test]
fn checkpoints_round_trip_across_meshes() {
    for (place, io, _temp) in places() {
        assert_eq!(latest(&*io).unwrap(), None);
        for step in [9, 100, 20] {
            save_all(&*io, &step_name(step), MESH, step, step);
        }
        let newest = latest(&*io).unwrap().unwrap();
        assert_eq!((newest.step, newest.name), (100, step_name(100)), "{place}");
        save_all(&*io, "last", [1, 4, 1], 1, 1);
        let first = content(&io, "last");
        // The next save removes the remains of an interrupted save.
        io.save(&format!("{}/model/x", staging_name("last")), b"half").unwrap();
        save_all(&*io, "last", MESH, 2, 2);
        assert_ne!(first, content(&io, "last"));
        assert_eq!(
            names(&*io),
            ["last", "step-00000009", "step-00000020", "step-00000100"],
            "{place}"
        );
        let shards = io.list("last/model").unwrap().len();
        assert_eq!(shards, 2, "shards of the old checkpoint were left");
        for mesh in [[1, 1, 1], [1, 3, 1], [2, 1, 2]] {
            let checkpoint = DistributedCheckpoint::open_with(&io, "last").unwrap();
            for rank in 0..checkpoints::world_size(mesh) {
                let tree = model(mesh, rank, None, DType::F32);
                load_into(&checkpoint, &tree, true).unwrap();
                let expected = model(mesh, rank, Some(2), DType::F32);
                for (a, b) in tree.parameters().iter().zip(expected.parameters()) {
                    assert_eq!(
                        bytes(&a.local().unwrap().values),
                        bytes(&b.local().unwrap().values)
                    );
                }
            }
        }
    }
}

/// Passes all calls on, except the failing one.
#[derive(Debug)]
struct Failing {
    inner: Arc<dyn CheckpointIO>,
    /// `create`, `finish`, `commit`, `lost` (the commit is done, its answer is lost), `die`.
    what: &'static str,
    path: &'static str,
}

struct FailingWriter(Box<dyn CheckpointWriter>, bool);

impl std::io::Write for FailingWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl CheckpointWriter for FailingWriter {
    fn finish(self: Box<Self>) -> Result<()> {
        if self.1 { Err(Error::other("slow down")) } else { self.0.finish() }
    }
}

impl CheckpointIO for Failing {
    fn location(&self, path: &str) -> PathBuf {
        self.inner.location(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        let concerned = path.contains(self.path);
        if self.what == "create" && concerned {
            return Err(Error::other("access denied"));
        }
        let fails = self.what == "finish" && concerned;
        Ok(Box::new(FailingWriter(self.inner.create(path)?, fails)))
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        self.inner.open(path)
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.inner.list(path)
    }

    fn remove(&self, path: &str) -> Result<()> {
        if self.what == "die" { Ok(()) } else { self.inner.remove(path) }
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        if self.what == "lost" {
            self.inner.commit(staged, name)?;
        }
        match self.what {
            "commit" | "die" | "lost" => Err(Error::other("no answer")),
            _ => self.inner.commit(staged, name),
        }
    }
}

fn save_failing(inner: &Arc<dyn CheckpointIO>, on: usize, what: &'static str, path: &'static str) {
    let failing = Failing { inner: inner.clone(), what, path };
    let attempt = |group: &dyn ProcessGroup| {
        let io: &dyn CheckpointIO = if group.rank() == on { &failing } else { &**inner };
        save_model(io, group, "last", MESH, 2, 2)
    };
    for saved in ranks(2, attempt) {
        saved.unwrap_err();
    }
}

#[test]
fn failure_on_one_rank_keeps_old_checkpoint() {
    for (place, io, _temp) in places() {
        save_all(&*io, "last", MESH, 1, 1);
        let before = content(&io, "last");
        for (on, what, path) in [
            (1, "create", "model/"),
            (1, "finish", "optimizer/"),
            (0, "finish", "model/"),
            (0, "finish", "manifest"),
            (0, "commit", ""),
        ] {
            save_failing(&io, on, what, path);
            assert_eq!(names(&*io), ["last"], "{place}: {what} on {on} left something");
            assert_eq!(content(&io, "last"), before);
        }
        save_failing(&io, 0, "die", "");
        assert_eq!(names(&*io).len(), 2, "{place}");
        assert_eq!(latest(&*io).unwrap().unwrap().step, 1);
        assert_eq!(content(&io, "last"), before);
        save_all(&*io, "last", MESH, 2, 2);
        assert_eq!(names(&*io), ["last"], "{place}");
        assert_ne!(content(&io, "last"), before);
    }
}

/// In object stores a commit writes an object that names the save.
#[test]
fn commit_with_lost_answer_counts() {
    for (place, io, _temp) in places().into_iter().skip(1) {
        save_all(&*io, "last", MESH, 1, 1);
        save_failing(&io, 0, "lost", "");
        assert_eq!(names(&*io), ["last"], "{place}");
        assert_eq!(latest(&*io).unwrap().unwrap().step, 2);
        content(&io, "last");
    }
}

#[test]
fn reader_never_mixes_two_checkpoints() {
    let store = Arc::new(InMemory::new());
    let place = || ObjectStoreIO::new(store.clone(), "memory:///runs").unwrap();
    let (writer, reader): (_, Arc<dyn CheckpointIO>) = (place(), Arc::new(place()));
    save_all(&writer, "last", MESH, 1, 1);
    let open = DistributedCheckpoint::open_with(&reader, "last").unwrap();
    save_all(&writer, "last", MESH, 2, 2);
    // The shards were not open yet. The old ones are gone, and the new ones are not read instead.
    let tree = model([1, 1, 1], 0, None, DType::F32);
    let error = load_into(&open, &tree, true).unwrap_err();
    let text = shown(error, &PathBuf::from("nowhere"));
    assert!(text.contains("memory:///runs/last/model/shard-0000"), "{text}");
    assert!(text.contains("not found"), "{text}");
    content(&reader, "last");
}

#[test]
fn one_of_two_concurrent_saves_fails() {
    let store = Arc::new(InMemory::new());
    let io = ObjectStoreIO::new(store.clone(), "memory:///runs").unwrap();
    let stage = || {
        let staged = staging_name("last");
        io.save(&format!("{staged}/manifest.json"), b"x").unwrap();
        staged
    };
    let other = ObjectStoreIO::new(store, "memory:///runs").unwrap();
    let (a, b) = (stage(), stage());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| io.commit(&a, "last"));
        let second = scope.spawn(|| other.commit(&b, "last"));
        let done = [first.join().unwrap(), second.join().unwrap()];
        for error in done.iter().filter_map(|d| d.as_ref().err()) {
            let text = error.to_string();
            assert!(text.contains("another save has committed"), "{text}");
        }
        assert!(done.iter().any(std::result::Result::is_ok));
    });
    assert_eq!(io.load("last/manifest.json").unwrap(), b"x");
    let error = io.commit("other.tmp-0123456789abcdef", "last").unwrap_err();
    assert_says!(error, "checkpoint memory:///runs/last: `other.tmp-0123456789abcdef` is no …");
}
