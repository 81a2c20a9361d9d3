//! Special files in a checkpoint: reading never waits for a pipe or reads a device to its end.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use fulgurite_core::checkpoint::tools::{self, AnyCheckpoint};
use fulgurite_core::checkpoint::{DistributedCheckpoint, SafetensorsSource, TorchSource, open};
use fulgurite_test_support::checkpoints::{SEED, io, save_all, shown};
use rustix::fs::{CWD, FileType, Mode, mknodat};

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Returns the errors of `f` after the file was replaced by a pipe, and by a device.
fn errors<T>(root: &Path, path: &Path, f: impl Fn() -> fulgurite_core::Result<T>) -> Vec<String> {
    let shown = |result: fulgurite_core::Result<T>| match result {
        Ok(_) => panic!("{} is taken for a file", path.display()),
        Err(error) => shown(error, root),
    };
    fs::remove_file(path).unwrap();
    pipe(path);
    let waited = shown(f());
    fs::remove_file(path).unwrap();
    symlink("/dev/zero", path).unwrap();
    let endless = shown(f());
    fs::remove_file(path).unwrap();
    vec![waited, endless]
}

#[test]
fn special_manifests_and_shards_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let manifest = |name: &str| {
        save_all(root, name, [1, 2, 1], 1, SEED);
        root.join(name).join("manifest.json")
    };
    let mut all = Vec::new();
    let path = manifest("a");
    all.extend(errors(root, &path, || DistributedCheckpoint::open(root.join("a"))));
    let path = manifest("b");
    all.extend(errors(root, &path, || DistributedCheckpoint::open_with(&io(root), "b")));
    let path = manifest("c");
    all.extend(errors(root, &path, || AnyCheckpoint::open(root.join("c"))));
    let path = manifest("d");
    all.extend(errors(root, &path, || open(root.join("d"))));
    let path = manifest("e");
    let shard = path.with_file_name("model").join("shard-00001-model-00001-of-00001.safetensors");
    all.extend(errors(root, &shard, || DistributedCheckpoint::open(root.join("e"))));
    insta::assert_snapshot!(all.join("\n"), @r#"
opening ROOT/a/manifest.json: it is a named pipe; only regular files are read
opening ROOT/a/manifest.json: it is a device; only regular files are read
opening ROOT/b/manifest.json: it is a named pipe; only regular files are read
opening ROOT/b/manifest.json: it is a device; only regular files are read
opening ROOT/c/manifest.json: it is a named pipe; only regular files are read
opening ROOT/c/manifest.json: it is a device; only regular files are read
opening ROOT/d/manifest.json: it is a named pipe; only regular files are read
opening ROOT/d/manifest.json: it is a device; only regular files are read
checkpoint ROOT/e/model/shard-00001-model-00001-of-00001.safetensors: this shard is missing; it holds parts of 6 tensors, such as `embed.weight`
checkpoint ROOT/e/model/shard-00001-model-00001-of-00001.safetensors: this shard is missing; it holds parts of 6 tensors, such as `embed.weight`
"#);
}

#[test]
fn special_weight_files_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let write = |path: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "x").unwrap();
        path
    };
    let mut all = Vec::new();
    let index = "model.safetensors.index.json";
    let path = write(&format!("hf/{index}"));
    all.extend(errors(root, &path, || SafetensorsSource::open(root.join("hf").join(index))));
    let path = write("single/model.safetensors");
    all.extend(errors(root, &path, || open(&path)));
    let path = write("torch/x.pt");
    all.extend(errors(root, &path, || TorchSource::open(&path)));
    let path = write("unknown/x");
    all.extend(errors(root, &path, || open(&path)));
    insta::assert_snapshot!(all.join("\n"), @r#"
opening ROOT/hf/model.safetensors.index.json: it is a named pipe; only regular files are read
opening ROOT/hf/model.safetensors.index.json: it is a device; only regular files are read
opening ROOT/single/model.safetensors: it is a named pipe; only regular files are read
opening ROOT/single/model.safetensors: it is a device; only regular files are read
opening ROOT/torch/x.pt: it is a named pipe; only regular files are read
opening ROOT/torch/x.pt: it is a device; only regular files are read
checkpoint ROOT/unknown/x: there are no weights here: expected model.safetensors, model.safetensors.index.json with its shards, or a .safetensors file
checkpoint ROOT/unknown/x: there are no weights here: expected model.safetensors, model.safetensors.index.json with its shards, or a .safetensors file
"#);
}

#[test]
fn oversized_files_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_all(root, "c", [1, 2, 1], 1, SEED);
    let grow = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path);
        file.unwrap().set_len(1 << 40).unwrap();
    };
    grow(&root.join("c/manifest.json"));
    let by_path = shown(DistributedCheckpoint::open(root.join("c")).unwrap_err(), root);
    let by_place = DistributedCheckpoint::open_with(&io(root), "c").unwrap_err();
    let inspected = AnyCheckpoint::open(root.join("c")).map(|c| tools::inspect(&c)).unwrap_err();
    fs::create_dir(root.join("hf")).unwrap();
    grow(&root.join("hf/model.safetensors.index.json"));
    let index = open(root.join("hf")).err().unwrap();
    let errors = [by_path, shown(by_place, root), shown(inspected, root), shown(index, root)];
    insta::assert_snapshot!(errors.join("\n"), @r#"
reading ROOT/c/manifest.json: it has 1099511627776 bytes; at most 1073741824 are read of a file of this kind
reading ROOT/c/manifest.json: it has 1099511627776 bytes; at most 1073741824 are read of a file of this kind
reading ROOT/c/manifest.json: it has 1099511627776 bytes; at most 1073741824 are read of a file of this kind
reading ROOT/hf/model.safetensors.index.json: it has 1099511627776 bytes; at most 268435456 are read of a file of this kind
"#);
}
