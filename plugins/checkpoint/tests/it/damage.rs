//! Errors about damaged checkpoints name file and tensor.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use fulgurite_core::checkpoint::{DistributedCheckpoint, TensorSource, load_into};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{SEED, model, save_all, shown, without_digest};
use proptest::prelude::*;

const SHARD: &str = "model/shard-00002-model-00001-of-00001.safetensors";

fn saved() -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 1], 1, SEED);
    temp
}

/// Returns the error of opening a checkpoint after `harm` was done to its directory.
fn opening(harm: impl FnOnce(&Path)) -> String {
    let temp = saved();
    harm(&temp.path().join("c"));
    shown(DistributedCheckpoint::open(temp.path().join("c")).unwrap_err(), temp.path())
}

/// Edits a manifest and removes its digest, which would hide other errors.
fn edit(path: &Path, from: &str, to: &str) {
    let text = without_digest(&fs::read_to_string(path).unwrap());
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn opening_names_missing_or_wrong_files() {
    let truncate = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 5).unwrap();
    };
    let manifest = |from: &'static str, to: &'static str| {
        opening(move |c: &Path| edit(&c.join("manifest.json"), from, to))
    };
    let errors = [
        opening(|c| fs::remove_file(c.join("manifest.json")).unwrap()),
        opening(|c| truncate(&c.join("manifest.json"))),
        manifest("\"format_version\": 2", "\"format_version\": 4"),
        manifest("fulgurite-distributed-checkpoint", "something"),
        opening(|c| fs::remove_file(c.join(SHARD)).unwrap()),
        opening(|c| truncate(&c.join(SHARD))),
        opening(|c| fs::write(c.join(SHARD), vec![0; 4096]).unwrap()),
        opening(|c| fs::remove_dir_all(c.join("optimizer")).unwrap()),
        manifest("\"model/shard-00001", "\"../shard-00001"),
        manifest("\"file\": \"model/shard-00001", "\"file\": \"model/shard-00007"),
        manifest("\"bytes\": [\n            ", "\"bytes\": [\n            1"),
        manifest("\"offsets\": [\n            0", "\"offsets\": [\n            1"),
        manifest("\"dtype\": \"F32\"", "\"dtype\": \"F8\""),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/c: there is no checkpoint here: it has no manifest.json. Name the directory of one step, such as `step-00000010`; one without a manifest was never completed
checkpoint ROOT/c/manifest.json: the manifest is damaged or incomplete: EOF while parsing a string at line 829 column 27
checkpoint ROOT/c/manifest.json: is of format version 4, written by Fulgurite 0.1.0; this is Fulgurite 0.1.0, which reads up to version 3. Use that version or a newer one
checkpoint ROOT/c/manifest.json: is no manifest of a checkpoint: its format is `something`
checkpoint ROOT/c/model/shard-00002-model-00001-of-00001.safetensors: this shard is missing; it holds parts of 4 tensors, such as `embed.weight`
checkpoint ROOT/c/model/shard-00002-model-00001-of-00001.safetensors: this shard is truncated: it has 779 bytes of 784; it holds parts of 4 tensors, such as `embed.weight`
checkpoint ROOT/c/model/shard-00002-model-00001-of-00001.safetensors: this shard is not what was saved: it has 4096 bytes instead of 784; it holds parts of 4 tensors, such as `embed.weight`
checkpoint ROOT/c/optimizer/shard-00001-model-00001-of-00001.safetensors: this shard is missing; it holds parts of 12 tensors, such as `state.embed.weight.exp_avg`
checkpoint ROOT/c/manifest.json: the manifest names a folder outside the checkpoint: `..`
checkpoint ROOT/c/manifest.json: the manifest is damaged: tensor `embed.weight` is in `model/shard-00007-model-00001-of-00001.safetensors`, which is not listed
checkpoint ROOT/c/manifest.json: the manifest is damaged: tensor `embed.weight` has a wrong byte range in `model/shard-00001-model-00001-of-00001.safetensors`: 1736..832
checkpoint ROOT/c/manifest.json: the manifest is damaged: tensor `embed.weight` is stored twice in part: [1..5, 0..6] and [4..7, 0..6] overlap
checkpoint ROOT/c/manifest.json: the manifest is damaged or incomplete: unknown variant `F8`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 52 column 19
"#);
}

#[test]
fn load_and_verify_find_a_flipped_bit() {
    let temp = saved();
    let root = temp.path();
    for (file, offset) in
        [(SHARD, 9), ("optimizer/shard-00001-model-00001-of-00001.safetensors", 1)]
    {
        let path = root.join("c").join(file);
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.len() - offset;
        bytes[at] ^= 4;
        fs::write(path, bytes).unwrap();
    }
    let open = || DistributedCheckpoint::open(root.join("c")).unwrap();
    let load = |checkpoint: &DistributedCheckpoint| {
        load_into(checkpoint, &model([1, 1, 1], 0, None, DType::F32), true)
    };
    assert_says!(shown(load(&open()).unwrap_err(), root), "checkpoint … `layers.0.conv` … damaged");
    load(&open().verify_on_load(false)).unwrap();
    insta::assert_snapshot!(shown(open().verify().unwrap_err(), root), @r#"
checkpoint ROOT/c: is damaged:
  ROOT/c/model/shard-00002-model-00001-of-00001.safetensors: tensor `layers.0.conv`: the bytes of [1..2, 0..3, 0..4] do not match their checksum; the file is damaged
  ROOT/c/optimizer/shard-00001-model-00001-of-00001.safetensors: tensor `state.scale.exp_avg_sq`: the bytes of [] do not match their checksum; the file is damaged
"#);
}

#[test]
fn file_shrunk_after_opening_is_reported() {
    let temp = saved();
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    fs::write(temp.path().join("c").join(SHARD), b"").unwrap();
    let read = |name: &str, shape: &[usize]| {
        let region = Region::full(shape);
        let error = checkpoint.read(name, &region, DType::F32, &Device::Cpu).unwrap_err();
        shown(error, temp.path())
    };
    let errors =
        [read("embed.weight", &[7, 6]), read("embed.weight", &[8, 6]), read("nothing", &[1])];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/c/model/shard-00002-model-00001-of-00001.safetensors: tensor `embed.weight`: reading [4..7, 0..6]: the file ends before; it is truncated
checkpoint ROOT/c: tensor `embed.weight`: [0..8, 0..6] is not a part of a tensor of shape [7, 6]
checkpoint ROOT/c: tensor `nothing`: there is none of this name
"#);
    let verified = shown(checkpoint.verify().unwrap_err(), temp.path());
    assert!(
        verified.contains("tensor `embed.weight`: the file ends before; it is truncated"),
        "{verified}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// No change of a manifest or a shard's header makes the reader panic.
    #[test]
    fn no_damage_panics(
        in_manifest: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        keep in prop::option::weighted(0.3, any::<prop::sample::Index>()),
    ) {
        thread_local! {
            static SAVED: tempfile::TempDir = saved();
        }
        let root = SAVED.with(|temp| temp.path().join("c"));
        let path = root.join(if in_manifest { "manifest.json" } else { SHARD });
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        for (index, byte) in changes {
            // Parsers see only headers; checksums cover the data.
            let reach = if in_manifest { bad.len() } else { bad.len().min(600) };
            bad[index.index(reach)] = byte;
        }
        if let Some(keep) = keep {
            bad.truncate(keep.index(bad.len()));
        }
        fs::write(&path, &bad).unwrap();
        if let Ok(checkpoint) = DistributedCheckpoint::open(&root) {
            let _ = load_into(&checkpoint, &model([1, 1, 1], 0, None, DType::F32), true);
            let _ = checkpoint.verify();
        }
        if let Ok(plain) = fulgurite_core::checkpoint::SafetensorsSource::open(root.join("model")) {
            let _ = load_into(&plain, &model([1, 1, 1], 0, None, DType::F32), false);
        }
        fs::write(&path, good).unwrap();
    }
}
