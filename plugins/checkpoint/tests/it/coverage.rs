//! Every byte of a checkpoint is covered by a checksum: of a chunk, of a header or companion, or by
//! the manifest's digest.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use fulgurite_core::checkpoint::tools::{self, AnyCheckpoint, ConvertOptions, ConvertTarget};
use fulgurite_core::checkpoint::{
    DistributedCheckpoint, FullCheckpoint, FullOptions, ModelConfig, TensorSource, TorchSource,
    latest, open, save_full,
};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{
    SEED, coordinate, io, meta, model, ranks, save_all, shown, states, without_digest,
};

/// Saves a full checkpoint `full` in several files, with all optional content.
fn save_whole(root: &Path) -> PathBuf {
    let config = serde_json::json!({ "hidden_size": 6, "rope_theta": 10000.0 });
    let options = FullOptions {
        max_shard_bytes: 300,
        config: Some(ModelConfig::Json(config)),
        ..FullOptions::default()
    };
    let mesh = [1, 1, 1];
    let tree = model(mesh, 0, Some(SEED), DType::F32);
    let (states, meta) = (states(&tree, Some(SEED)), meta(3, mesh, &tree));
    let place = io(root);
    let save = |group: &dyn fulgurite_core::collective::ProcessGroup| {
        let tree = model(mesh, 0, Some(SEED), DType::F32);
        save_full(&*place, group, "full", &tree, coordinate(mesh, 0), &states, &options, &meta)
    };
    ranks(1, save).remove(0).unwrap()
}

fn flip(path: &Path, at: usize, bit: u8) -> Vec<u8> {
    let original = fs::read(path).unwrap();
    let mut bytes = original.clone();
    bytes[at] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
    original
}

#[test]
fn flipped_manifest_bits_are_found() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 1], 7, SEED);
    let distributed = temp.path().join("c");
    let full = save_whole(temp.path());
    for (directory, file) in [(&distributed, "manifest.json"), (&full, "fulgurite.json")] {
        let path = directory.join(file);
        let len = fs::metadata(&path).unwrap().len() as usize;
        // Flips some bits, and every bit of the beginning and the end, which hold versions and
        // digest.
        let every_bit = |at: usize| at < 120 || at + 40 > len;
        let bits = |at: usize| match (every_bit(at), at % 31) {
            (true, _) => 0..8,
            (false, 0) => at % 8..at % 8 + 1,
            (false, _) => 0..0,
        };
        for (at, bit) in (0..len).flat_map(|at| bits(at).map(move |bit| (at, bit as u8))) {
            let original = flip(&path, at, bit);
            let opened = AnyCheckpoint::open(directory);
            assert!(opened.is_err(), "{file}: bit {bit} of byte {at} is not missed");
            fs::write(&path, original).unwrap();
        }
        AnyCheckpoint::open(directory).unwrap();
    }
}

#[test]
fn changed_manifest_is_refused_and_not_newest() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_all(root, "older", [1, 2, 1], 6, SEED);
    save_all(root, "c", [1, 2, 1], 7, SEED);
    let path = root.join("c/manifest.json");
    let original = fs::read_to_string(&path).unwrap();
    let with = |from: &str, to: &str| {
        assert!(original.contains(from));
        fs::write(&path, original.replacen(from, to, 1)).unwrap();
        assert_eq!(latest(&*io(root)).unwrap().unwrap().name, "older");
        shown(DistributedCheckpoint::open(root.join("c")).unwrap_err(), root)
    };
    let errors = [
        with("\"step\": 7", "\"step\": 9"),
        with("\"digest\"", "\"digist\""),
        with("\"format_version\": 3", "\"format_version\": 2"),
        with("\n  \"step\"", "\n   \"step\""),
        with("\"state.embed", "\"state_embed"),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/c/manifest.json: the manifest is damaged, or was changed after it was saved: it does not match its digest
checkpoint ROOT/c/manifest.json: the manifest is damaged: it has no digest, as format version 3 has
checkpoint ROOT/c/manifest.json: the manifest is damaged, or was changed after it was saved: it does not match its digest
checkpoint ROOT/c/manifest.json: the manifest is damaged, or was changed after it was saved: it does not match its digest
checkpoint ROOT/c/manifest.json: the manifest is damaged, or was changed after it was saved: it does not match its digest
"#);
}

#[test]
fn manifests_without_digest_load_with_warning() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_all(root, "c", [1, 2, 1], 7, SEED);
    let path = root.join("c/manifest.json");
    let new = DistributedCheckpoint::open(root.join("c")).unwrap();
    assert_eq!(new.warning(), None);
    fs::write(&path, without_digest(&fs::read_to_string(&path).unwrap())).unwrap();
    let old = DistributedCheckpoint::open(root.join("c")).unwrap();
    old.verify().unwrap();
    assert_eq!(old.manifest().model, new.manifest().model);
    assert_says!(old.warning().unwrap(), "its manifest … version 2, which has no digest …");
    let verified = tools::verify(&AnyCheckpoint::open(root.join("c")).unwrap(), &mut |_| {});
    assert_eq!((verified.warning, verified.damages.len()), (old.warning(), 0));
}

/// Returns the damages that `verify` finds after a bit of a file was flipped.
fn found(directory: &Path, file: &str, at: usize) -> String {
    let original = flip(&directory.join(file), at, 0);
    let verified = tools::verify(&AnyCheckpoint::open(directory).unwrap(), &mut |_| {});
    // The library's own `verify` finds them too.
    open(directory).unwrap();
    let by_library = match directory.join("fulgurite.json").exists() {
        true => FullCheckpoint::open(directory).unwrap().verify(),
        false => DistributedCheckpoint::open(directory).unwrap().verify(),
    };
    by_library.unwrap_err();
    fs::write(directory.join(file), original).unwrap();
    let damages = verified.damages.iter().map(ToString::to_string);
    damages.collect::<Vec<_>>().join("\n").replace(directory.to_str().unwrap(), "DIR")
}

/// The safetensors files directly in a directory, in order.
fn files_of_tensors(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let names = entries.map(|name| name.into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.ends_with(".safetensors")).collect();
    names.sort();
    names
}

#[test]
fn headers_and_companions_are_covered() {
    let temp = tempfile::tempdir().unwrap();
    let full = save_whole(temp.path());
    let first = files_of_tensors(&full).remove(0);
    let header = fs::read(full.join(&first)).unwrap();
    // The first byte of the value that other libraries read as the format.
    let format = header.windows(4).position(|bytes| bytes == b"\"pt\"").unwrap() + 1;
    save_all(temp.path(), "c", [1, 2, 1], 7, SEED);
    let shard = "model/shard-00001-model-00001-of-00001.safetensors";
    let errors = [
        found(&full, &first, format),
        found(&full, "model.safetensors.index.json", 40),
        found(&full, "config.json", 20),
        found(&temp.path().join("c"), shard, 20),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
DIR/model-00001-of-00003.safetensors: its header does not match its checksum
DIR/model.safetensors.index.json: does not match its checksum; it was damaged, or changed after the save
DIR/config.json: does not match its checksum; it was damaged, or changed after the save
DIR/model/shard-00001-model-00001-of-00001.safetensors: has a damaged header: missing field `dtype` at line 1 column 320
"#);
    // A changed file is not passed on under a new checksum.
    flip(&full.join("config.json"), 20, 0);
    let input = AnyCheckpoint::open(&full).unwrap();
    let options = ConvertOptions::new(ConvertTarget::Full);
    let error = tools::convert(&input, &*io(temp.path()), "copy", &options, &mut |_| {});
    assert_says!(shown(error.unwrap_err(), temp.path()), "… ROOT/full/config.json … checksum …");
}

#[test]
fn missing_full_manifest_is_noticed() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let full = save_whole(root);
    let input = AnyCheckpoint::open(&full).unwrap();
    let options = ConvertOptions::new(ConvertTarget::HuggingFace);
    tools::convert(&input, &*io(root), "plain", &options, &mut |_| {}).unwrap();
    let verify = |name: &str| {
        let checkpoint = AnyCheckpoint::open(root.join(name)).unwrap();
        let verified = tools::verify(&checkpoint, &mut |_| {});
        let warning = open(root.join(name)).unwrap().warning();
        let damages = verified.damages.iter().map(|damage| damage.to_string());
        let damages = damages.map(|damage| damage.replace(root.to_str().unwrap(), "ROOT"));
        (damages.collect::<Vec<_>>(), warning)
    };
    assert_eq!(verify("plain"), (vec![], None));
    assert_eq!(verify("full"), (vec![], None));
    fs::remove_file(full.join("fulgurite.json")).unwrap();
    let (damages, warning) = verify("full");
    assert_says!(damages.join("\n"), "ROOT/full/fulgurite.json: is missing … full checkpoint …");
    assert_says!(warning.unwrap(), "it was … full checkpoint … fulgurite.json is missing …");
    // They still load as weights.
    let weights = open(&full).unwrap();
    weights.read("scale", &Region::full(&[]), DType::F32, &Device::Cpu).unwrap();
}

#[test]
fn torch_records_are_checked_by_crc() {
    let original = include_bytes!("../fixtures/lightning.ckpt");
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("x.ckpt");
    let read = |bytes: &[u8]| -> Result<Vec<Vec<u8>>, String> {
        fs::write(&path, bytes).unwrap();
        let source = TorchSource::open(&path).map_err(|e| shown(e, temp.path()))?;
        let names: Vec<String> = source.names().into_iter().map(str::to_owned).collect();
        let read = |name: &String| {
            let info = source.info(name).unwrap();
            let region = Region::full(&info.shape);
            let values = source.read(name, &region, DType::F64, &Device::Cpu);
            let values = values.map_err(|e| shown(e, temp.path()))?;
            let bits = |v: f64| v.to_bits().to_le_bytes();
            Ok(values.to_vec1::<f64>().unwrap().into_iter().flat_map(bits).collect())
        };
        names.iter().map(read).collect()
    };
    let expected = read(original).unwrap();
    let (mut found, mut harmless) = (0, 0);
    for at in 0..original.len() {
        let mut bytes = original.to_vec();
        bytes[at] ^= 1 << (at % 8);
        match read(&bytes) {
            Err(_) => found += 1,
            Ok(values) => {
                assert_eq!(values, expected, "byte {at} changes values and is not found");
                harmless += 1;
            }
        }
    }
    assert!(found > 0 && harmless > 0, "{found} {harmless}");
    // Damages the values of the first tensor, and the pickle.
    let at = |what: &[u8]| original.windows(what.len()).position(|w| w == what).unwrap();
    let message = |at: usize| {
        let mut bytes = original.to_vec();
        bytes[at] ^= 1;
        read(&bytes).unwrap_err()
    };
    let values: Vec<u8> = [1f32, 2.0, 3.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let errors = [message(at(&values)), message(at(b"state_dict"))];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/x.ckpt: tensor `model.up.weight`: the bytes of [0..3, 0..2] do not match their checksum; the file is damaged
checkpoint ROOT/x.ckpt: is damaged: its pickle does not match its CRC-32
"#);
}
