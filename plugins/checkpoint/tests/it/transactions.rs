//! A failed save leaves no partial checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::checkpoint::{
    CheckpointIO, CheckpointReader, CheckpointWriter, CommittedCheckpoint, DistributedCheckpoint,
    Entry, SaveMeta, ShardTensor, latest, load_into, replaced_name, save, staging_name, step_name,
};
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::shard::Region;
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{
    self, Mesh, SEED, bytes, io, meta, model, ranks, save_all, save_model, shown, without_digest,
};

const MESH: Mesh = [1, 2, 1];

fn names(root: &Path) -> Vec<String> {
    io(root).list("").unwrap().into_iter().map(|e| e.name).collect()
}

/// Returns the model's values in the checkpoint `name`, which must be whole.
fn content(root: &Path, name: &str) -> Vec<Vec<u8>> {
    let checkpoint = DistributedCheckpoint::open(root.join(name)).unwrap();
    checkpoint.verify().unwrap();
    let tree = model([1, 1, 1], 0, None, DType::F32);
    load_into(&checkpoint, &tree, true).unwrap();
    tree.parameters().iter().map(|p| bytes(&p.local().unwrap().values)).collect()
}

#[test]
fn latest_ignores_torn_checkpoints() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    assert_eq!(latest(&*io(&root.join("nowhere"))).unwrap(), None);
    assert_eq!(latest(&*io(root)).unwrap(), None);
    for step in [9, 100, 20] {
        save_all(root, &step_name(step), MESH, step, SEED);
    }
    save_all(root, "a-name-of-its-own", MESH, 50, SEED);
    // Saves that stopped before the manifest, after it, and with half a manifest.
    let whole = root.join(step_name(100));
    let copy = |name: &str, manifest: &[u8]| {
        let to = root.join(name);
        fs::create_dir_all(to.join("model")).unwrap();
        if !manifest.is_empty() {
            fs::write(to.join("manifest.json"), manifest).unwrap();
        }
        name.to_owned()
    };
    let manifest = without_digest(&fs::read_to_string(whole.join("manifest.json")).unwrap())
        .replace("\"step\": 100,", "\"step\": 900,");
    copy("step-00000500", b"");
    let staged = copy(&staging_name("step-00000900"), manifest.as_bytes());
    copy("step-00000901", &manifest.as_bytes()[..manifest.len() - 3]);
    copy(
        "step-00000902",
        b"{\"format\": \"something else\", \"format_version\": 1, \"step\": 902}",
    );
    fs::write(root.join("step-00000999"), "a file").unwrap();
    let expected = CommittedCheckpoint { step: 100, name: step_name(100), path: whole.clone() };
    assert_eq!(latest(&*io(root)).unwrap(), Some(expected.clone()));
    // The next save removes only the temporary directory.
    let before = names(root);
    save_all(root, &step_name(30), MESH, 30, SEED);
    let after = names(root);
    assert!(before.contains(&staged) && !after.contains(&staged));
    assert_eq!(after.len(), before.len());
    assert_eq!(latest(&*io(root)).unwrap(), Some(expected));
}

// checklist: Lightning: replacing what is there
#[test]
fn replaced_checkpoint_stays_until_commit() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_all(root, "last", MESH, 5, 1);
    // The state after a crash between the two renames.
    let aside = replaced_name("last");
    fs::rename(root.join("last"), root.join(&aside)).unwrap();
    assert_eq!(latest(&*io(root)).unwrap().unwrap().name, aside);
    save_all(root, "other", MESH, 4, 2);
    assert_eq!(latest(&*io(root)).unwrap().unwrap().name, aside);
    save_all(root, "last", MESH, 5, 3);
    assert_eq!(latest(&*io(root)).unwrap().unwrap().name, "last");
    assert!(names(root).contains(&aside));
    save_all(root, "other", MESH, 4, 2);
    assert_eq!(names(root), ["last", "other"]);
}

// checklist: Lightning: replacing what is there
#[test]
fn overwriting_replaces_the_whole_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "last", [1, 4, 1], 1, 1);
    let first = content(temp.path(), "last");
    save_all(temp.path(), "last", MESH, 2, 2);
    let second = content(temp.path(), "last");
    assert_ne!(first, second);
    assert_eq!(names(temp.path()), ["last"]);
    let shards = fs::read_dir(temp.path().join("last/model")).unwrap().count();
    assert_eq!(shards, 2, "shards of the old checkpoint were left");
    assert_eq!(latest(&*io(temp.path())).unwrap().unwrap().step, 2);
}

/// Passes all calls on, except the failing one. A plugin may be such a wrapper.
#[derive(Debug)]
pub(crate) struct Failing {
    pub(crate) inner: Arc<dyn CheckpointIO>,
    /// `create`, `write`, `finish`, `commit`, `die`; or `late`, which creates files late.
    pub(crate) what: &'static str,
    /// Part of the path of the failing call.
    pub(crate) path: &'static str,
}

impl Failing {
    fn fails(&self, what: &str, path: &str) -> bool {
        self.what == what && path.contains(self.path)
    }

    fn error() -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::StorageFull, "no space left on device")
    }
}

struct FailingWriter {
    inner: Box<dyn CheckpointWriter>,
    path: PathBuf,
    write: bool,
    finish: bool,
    written: usize,
}

impl std::io::Write for FailingWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The header is still written.
        self.written += 1;
        if self.write && self.written > 1 { Err(Failing::error()) } else { self.inner.write(bytes) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

impl CheckpointWriter for FailingWriter {
    fn finish(self: Box<Self>) -> Result<()> {
        if self.finish {
            Err(Error::io("syncing", self.path)(Failing::error()))
        } else {
            self.inner.finish()
        }
    }
}

impl CheckpointIO for Failing {
    fn location(&self, path: &str) -> PathBuf {
        self.inner.location(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        if self.fails("create", path) {
            return Err(Error::io("creating", self.location(path))(Failing::error()));
        }
        if self.fails("late", path) {
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        Ok(Box::new(FailingWriter {
            inner: self.inner.create(path)?,
            path: self.location(path),
            write: self.fails("write", path),
            finish: self.fails("finish", path),
            written: 0,
        }))
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
        match self.what {
            "commit" | "die" => Err(Error::io("renaming", self.location(name))(Failing::error())),
            _ => self.inner.commit(staged, name),
        }
    }
}

/// Saves with the failure on one rank, and returns each rank's error.
fn save_failing(root: &Path, on: usize, what: &'static str, path: &'static str) -> Vec<String> {
    let inner = io(root);
    let failing = Failing { inner: inner.clone(), what, path };
    let attempt = |group: &dyn ProcessGroup| {
        let io: &dyn CheckpointIO = if group.rank() == on { &failing } else { &*inner };
        save_model(io, group, "last", MESH, 2, 2)
    };
    ranks(2, attempt).into_iter().map(|saved| shown(saved.unwrap_err(), root)).collect()
}

// checklist: Lightning: save_checkpoint
#[test]
fn failure_on_one_rank_keeps_old_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_all(root, "last", MESH, 1, 1);
    let before = content(root, "last");
    let mut errors = Vec::new();
    for (on, what, path) in [
        (1, "create", "model/"),
        (1, "write", "optimizer/"),
        (0, "write", "model/"),
        (1, "finish", "model/"),
        (0, "finish", "manifest"),
        (0, "commit", ""),
    ] {
        errors.push(format!("rank {on}, {what}"));
        errors.extend(save_failing(root, on, what, path));
        assert_eq!(names(root), ["last"], "{what} on {on} left something");
        assert_eq!(content(root, "last"), before);
    }
    insta::assert_snapshot!(errors.join("\n"), @r#"
rank 1, create
rank 1 failed: creating ROOT/last.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: no space left on device
creating ROOT/last.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: no space left on device
rank 1, write
rank 1 failed: checkpoint ROOT/last.tmp-ID/optimizer/shard-00002-model-00001-of-00001.safetensors: writing tensor `state.embed.weight.exp_avg`: no space left on device
checkpoint ROOT/last.tmp-ID/optimizer/shard-00002-model-00001-of-00001.safetensors: writing tensor `state.embed.weight.exp_avg`: no space left on device
rank 0, write
checkpoint ROOT/last.tmp-ID/model/shard-00001-model-00001-of-00001.safetensors: writing tensor `embed.weight`: no space left on device
rank 0 failed: checkpoint ROOT/last.tmp-ID/model/shard-00001-model-00001-of-00001.safetensors: writing tensor `embed.weight`: no space left on device
rank 1, finish
rank 1 failed: syncing ROOT/last.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: no space left on device
syncing ROOT/last.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: no space left on device
rank 0, finish
syncing ROOT/last.tmp-ID/manifest.json: no space left on device
rank 0 failed: syncing ROOT/last.tmp-ID/manifest.json: no space left on device
rank 0, commit
renaming ROOT/last: no space left on device
rank 0 failed: renaming ROOT/last: no space left on device
"#);
    // If rank 0 dies before committing, the next save cleans up.
    save_failing(root, 0, "die", "");
    assert_eq!(names(root).len(), 2);
    assert_eq!(latest(&*io(root)).unwrap().unwrap().step, 1);
    assert_eq!(content(root, "last"), before);
    save_all(root, "last", MESH, 2, 2);
    assert_eq!(names(root), ["last"]);
    assert_ne!(content(root, "last"), before);
}

fn tensor(name: &str, rows: std::ops::Range<usize>, n: usize) -> ShardTensor {
    let values = Tensor::zeros(rows.len() * 2, DType::F32, &Device::Cpu).unwrap();
    let region = Region { offsets: vec![rows.start, 0], sizes: vec![rows.len(), 2] };
    ShardTensor { name: name.into(), values, region, shape: vec![n, 2] }
}

#[test]
fn misuse_is_refused_before_commit() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    fs::create_dir(root.join("mine")).unwrap();
    let io = io(root);
    let attempt = |name: &str, parts: &(dyn Fn(usize) -> Vec<ShardTensor> + Sync)| {
        let saved = ranks(2, |group| {
            save(&*io, group, name, &parts(group.rank()), &[], &SaveMeta::default())
        });
        let errors: Vec<_> = saved.into_iter().map(|s| shown(s.unwrap_err(), root)).collect();
        assert_eq!(names(root), ["mine"]);
        errors[0].clone()
    };
    let good = |rank: usize| vec![tensor("w", rank * 2..rank * 2 + 2, 4)];
    let mut errors = vec![attempt("a/b", &good), attempt("x.tmp-y", &good), attempt("mine", &good)];
    errors.push(attempt("c", &|_| vec![tensor("w", 0..2, 4)]));
    errors.push(attempt("c", &|rank| if rank == 0 { vec![tensor("w", 0..2, 4)] } else { vec![] }));
    errors.push(attempt("c", &|rank| vec![tensor("w", rank * 2..rank * 2 + 2, 4 + rank)]));
    errors
        .push(attempt("c", &|rank| if rank == 0 { [good(0), good(0)].concat() } else { good(1) }));
    errors.push(attempt("c", &|rank| {
        let mut tensors = good(rank);
        tensors[0].region.sizes[0] = 1;
        tensors
    }));
    errors.push(attempt("c", &|rank| {
        let tensors = good(rank);
        fulgurite_core::autograd::storage::release(&tensors[0].values).unwrap();
        tensors
    }));
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/a/b: a checkpoint's name is one path segment that does not start with a dot
checkpoint ROOT/x.tmp-y: a checkpoint's name must not contain `.tmp-` or `.old-`, which mark unfinished ones
checkpoint ROOT/mine: there is something here already that is no checkpoint; it is not overwritten. Move it away or save to another place
checkpoint ROOT/c: tensor `w` is stored twice in part: [0..2, 0..2] and [0..2, 0..2] overlap
checkpoint ROOT/c: tensor `w` is incomplete: 4 of its 8 elements are stored
checkpoint ROOT/c: tensor `w` has shape [4, 2] and dtype F32 on one rank, [5, 2] and F32 on another
saving tensor `w`: another one has the same name
saving tensor `w`: there are 4 values for the part [0..1, 0..2]
saving tensor `w`: its values are not in memory
"#);
}

#[test]
fn ranks_must_share_a_directory() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let saved = ranks(2, |group| {
        let root = if group.rank() == 0 { a.path() } else { b.path() };
        save_model(&*io(root), group, "c", MESH, 1, SEED)
    });
    let errors: Vec<_> = saved.into_iter().map(|s| shown(s.unwrap_err(), a.path())).collect();
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/c.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: rank 0 does not see this file as it was written by another rank; checkpoints need a directory that all ranks share
rank 0 failed: checkpoint ROOT/c.tmp-ID/model/shard-00002-model-00001-of-00001.safetensors: rank 0 does not see this file as it was written by another rank; checkpoints need a directory that all ranks share
"#);
    assert_eq!(names(a.path()), [""; 0]);
}

#[test]
fn released_values_and_foreign_state_are_refused() {
    let mesh = [1, 1, 1];
    let tree = model(mesh, 0, Some(SEED), DType::F32);
    let mut state = checkpoints::states(&tree, None);
    state[0].fqn = "elsewhere".into();
    let refused = |state: &[fulgurite_core::optim::StateTensor]| {
        fulgurite_core::checkpoint::optimizer_tensors(
            &tree,
            state,
            checkpoints::coordinate(mesh, 0),
        )
        .unwrap_err()
    };
    assert_says!(refused(&state), "parameter `elsewhere`: has state `exp_avg` … not in the model");
    state[0].fqn = "norm.weight".into();
    state[0].region.sizes[0] -= 1;
    assert_says!(refused(&state), "parameter `norm.weight`: has shape [5] … `exp_avg` … [7, 6] …");
    assert_eq!(meta(1, mesh, &tree).specs.len(), 6);
}
