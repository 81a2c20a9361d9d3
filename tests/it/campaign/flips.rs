//! Flipped bits and other damage of checkpoints: either `verify` finds the damage, or a load gives
//! identical values.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fastrand::Rng;
use fulgurite::core::checkpoint::tools::{self, AnyCheckpoint};
use fulgurite::core::checkpoint::{
    CheckpointIO as _, DistributedCheckpoint, FullOptions, Manifest, ModelConfig,
    TensorSource as _, last,
};
use fulgurite::core::shard::Region;
use fulgurite::core::strategy::BuildContext;
use fulgurite::core::{Error, Result};
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

use super::trials::trials;
use crate::saving::harness::Scratch;

/// Everything that a load reads from a checkpoint.
#[derive(PartialEq)]
struct Content {
    manifest: Manifest,
    tensors: Vec<(String, Vec<u8>)>,
}

fn load(directory: &Path) -> Result<Content> {
    let checkpoint = DistributedCheckpoint::open(directory)?;
    let mut tensors = Vec::new();
    for source in [checkpoint.model(), checkpoint.optimizer()] {
        for name in source.names() {
            let shape = source.info(name).ok_or_else(|| Error::other("no such tensor"))?.shape;
            let region = Region::full(&shape);
            let values = source.read(name, &region, DType::F32, &Device::Cpu)?.to_vec1::<f32>()?;
            let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
            tensors.push((name.to_owned(), bytes));
        }
    }
    Ok(Content { manifest: checkpoint.manifest().clone(), tensors })
}

/// The problem that `verify` finds, if any.
fn verify(directory: &Path) -> Option<String> {
    match AnyCheckpoint::open(directory) {
        Err(error) => Some(error.to_string()),
        Ok(checkpoint) => {
            let verified = tools::verify(&checkpoint, &mut |_| {});
            verified.damages.first().map(ToString::to_string)
        }
    }
}

/// A directory with checkpoints of a small training run, and their contents.
struct Place {
    kind: &'static str,
    root: PathBuf,
    /// The files, relative to the root.
    files: Vec<PathBuf>,
    contents: BTreeMap<PathBuf, Content>,
    last: String,
}

impl Place {
    fn new(kind: &'static str, root: PathBuf) -> Self {
        let mut files = Vec::new();
        find_files(&root, &root, &mut files);
        files.sort();
        let tops = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
        let contents = tops.filter(|path| path.is_dir());
        let contents: BTreeMap<_, _> =
            contents.map(|path| (path.clone(), load(&path).unwrap())).collect();
        assert!(contents.keys().all(|path| verify(path).is_none()) && !contents.is_empty());
        let last = last(&LocalDirectory::new(&root)).unwrap().unwrap().name;
        Self { kind, root, files, contents, last }
    }

    /// Describes the effect of some damage: how it was found, or why it is harmless.
    fn judge(&self, what: &str) -> String {
        let mut outcomes = Vec::new();
        for (directory, content) in &self.contents {
            let found = verify(directory);
            match (found, load(directory)) {
                (Some(_), Err(_)) => outcomes.push("found by verify, and by a load"),
                (Some(_), Ok(loaded)) => {
                    assert!(loaded == *content, "{what}: a load is not equal and no error");
                    outcomes.push("found by verify; a load is equal to the bit");
                }
                (None, loaded) => {
                    let same = loaded.is_ok_and(|loaded| loaded == *content);
                    assert!(same, "{what}: not found by verify, and a load is not equal");
                }
            }
        }
        // A resume must pick a saved checkpoint; without damage it picks the last one.
        let resumed = last(&LocalDirectory::new(&self.root)).unwrap().map(|found| found.name);
        if outcomes.is_empty() {
            assert_eq!(resumed.as_ref(), Some(&self.last), "{what}");
            return "not found by verify; a load is equal to the bit".to_owned();
        }
        outcomes.sort_unstable();
        outcomes.dedup();
        outcomes.join("; ")
    }
}

fn find_files(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            find_files(root, &path, files);
        } else {
            files.push(path.strip_prefix(root).unwrap().to_owned());
        }
    }
}

/// Distributed and full checkpoints of a run with validation, callbacks and retention (two of
/// each), a full checkpoint in several files, and shards of several ranks. The shards come from
/// three ranks with uneven cuts, and from a mesh with a tensor-parallel dimension.
fn places() -> (Vec<Place>, impl Sized) {
    let keys = ["trainer.max_steps=4", "checkpoint.every_n_steps=2", "checkpoint.keep_last=2"];
    let full = "trainer.strategy={type = 'model_parallel', tensor_parallel_size = 1, \
                save_distributed_checkpoint = false}";
    let (distributed, whole) = (Scratch::new(), Scratch::new());
    distributed.succeed(&keys);
    whole.succeed(&[&keys[..], &[full]].concat());
    let [files, uneven, mesh] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    save_files(files.path());
    save_shards(uneven.path(), 3, r#"{"type": "fsdp"}"#, Variant::ALL[0]);
    let two = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
    save_shards(mesh.path(), 4, two, Variant::ALL[3]);
    let places = vec![
        Place::new("distributed", distributed.path("kept")),
        Place::new("full", whole.path("kept")),
        Place::new("full in several files", files.path().to_owned()),
        Place::new("shards of 3 ranks", uneven.path().to_owned()),
        Place::new("shards of a mesh of 2 by 2", mesh.path().to_owned()),
    ];
    (places, (distributed, whole, [files, uneven, mesh]))
}

/// Saves a full checkpoint with every optional content.
fn save_files(root: &Path) {
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    let mut fabric = Fabric::single(strategy, 1).unwrap();
    let build = |b: &ModuleBuilder| {
        Ok((Linear::new(&b.pp("up"), 4, 6)?, Linear::with_bias(&b.pp("down"), 6, 4)?))
    };
    let ((up, down), mut optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
    for step in 1..=2u64 {
        let x = Tensor::full(step as f32 / 4.0, (2, 4), &Device::Cpu).unwrap();
        let y = down.forward(&up.forward(&x).unwrap()).unwrap();
        let loss = Loss::new(y.sqr().unwrap().sum_all().unwrap(), 2.0);
        fabric.backward(&loss).unwrap();
        optimizer.step().unwrap();
    }
    let options = FullOptions {
        max_shard_bytes: 100,
        config: Some(ModelConfig::Json(serde_json::json!({ "hidden_size": 4 }))),
        ..FullOptions::default()
    };
    let state = serde_json::json!({ "step": 2, "samples": 4 });
    fabric.save_full(root.join("full"), Some(&mut optimizer), &state, &options).unwrap();
    LocalDirectory::new(root).save("last", b"full\n").unwrap();
}

/// Saves two distributed checkpoints of a training run on several ranks.
fn save_shards(root: &Path, ranks: usize, strategy: &str, variant: Variant) {
    run_ranks(ranks, |world| {
        let mut training = DecoderTraining::new(world, strategy, variant, 1)?;
        for step in 1..=2 {
            training.step()?;
            training.save(&root.join(format!("step-{step}")))?;
        }
        Ok(())
    })
    .unwrap();
    LocalDirectory::new(root).save("last", b"step-2\n").unwrap();
}

/// The file's kind, as used in the counts.
fn kind_of(file: &Path) -> &'static str {
    let name = file.file_name().unwrap().to_str().unwrap();
    match name {
        "last" => "last",
        "manifest.json" | "fulgurite.json" => "manifest",
        "config.json" => "config.json",
        name if name.ends_with(".index.json") => "index",
        _ => "tensors",
    }
}

/// Counts outcomes.
#[derive(Default)]
struct Counts(BTreeMap<String, u64>);

impl Counts {
    fn add(&mut self, what: String) {
        *self.0.entry(what).or_default() += 1;
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        for (what, count) in &self.0 {
            eprintln!("{count:6} {what}");
        }
    }
}

#[test]
fn every_flipped_bit_is_found_or_harmless() {
    let (places, _directories) = places();
    let mut counts = Counts::default();
    trials(300, |trial| {
        let place = &places[trial.rng.usize(..places.len())];
        let file = &place.files[trial.rng.usize(..place.files.len())];
        let path = place.root.join(file);
        let original = fs::read(&path).unwrap();
        let (at, bit) = (trial.rng.usize(..original.len()), trial.rng.u8(..8));
        let mut bytes = original.clone();
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        let what = format!("{}, {}: bit {bit} of byte {at}", place.kind, file.display());
        let outcome = place.judge(&what);
        // Damage to files of a checkpoint is always found; only damage to `last` may be harmless.
        let harmless = outcome.starts_with("not found");
        assert!(!harmless || kind_of(file) == "last", "{what}: {outcome}");
        counts.add(format!("{}, {}: {outcome}", place.kind, kind_of(file)));
        fs::write(&path, original).unwrap();
    });
}

/// Damages one file, and returns a description of the damage.
fn mutate(place: &Place, rng: &mut Rng) -> String {
    let mut any = || place.files[rng.usize(..place.files.len())].clone();
    let (file, other) = (any(), any());
    let path = |file: &Path| place.root.join(file);
    let (bytes, others) = (fs::read(path(&file)).unwrap(), fs::read(path(&other)).unwrap());
    let len = bytes.len();
    let what = match rng.u8(..8) {
        0 => {
            fs::write(path(&file), &bytes[..rng.usize(..len)]).unwrap();
            "truncated"
        }
        1 => {
            fs::remove_file(path(&file)).unwrap();
            "deleted"
        }
        2 => {
            fs::write(path(&file), &others).unwrap();
            fs::write(path(&other), &bytes).unwrap();
            "swapped with another"
        }
        3 => {
            fs::write(path(&file), &others).unwrap();
            "overwritten by another"
        }
        4 => {
            let copy = path(&file).with_extension("copy");
            fs::write(copy, &bytes).unwrap();
            "copied beside itself"
        }
        5 => {
            let (from, to) = (rng.usize(..len), rng.usize(..=len));
            let mut bytes = bytes.clone();
            bytes[from.min(to)..from.max(to)].fill(0);
            fs::write(path(&file), bytes).unwrap();
            "zeros in a part"
        }
        6 => {
            fs::write(path(&file), [&bytes[..], &bytes[..rng.usize(1..=len)]].concat()).unwrap();
            "longer"
        }
        _ => {
            let (from, to) = (rng.usize(..len), rng.usize(..len));
            let (from, to) = (from.min(to), from.max(to));
            fs::write(path(&file), [&bytes[..from], &bytes[to..]].concat()).unwrap();
            "a part cut out"
        }
    };
    format!("{}, {}: {what}", place.kind, kind_of(&file))
}

#[test]
fn damaged_files_are_found_or_harmless() {
    let (places, _directories) = places();
    let mut counts = Counts::default();
    trials(150, |trial| {
        let place = &places[trial.rng.usize(..places.len())];
        let whole: Vec<_> = place.files.iter().map(|file| place.root.join(file)).collect();
        let whole: Vec<_> = whole.iter().map(|path| (path, fs::read(path).unwrap())).collect();
        let what = mutate(place, &mut trial.rng);
        let outcome = place.judge(&what);
        counts.add(format!("{what}: {outcome}"));
        let mut there = Vec::new();
        find_files(&place.root, &place.root, &mut there);
        for extra in there.iter().filter(|file| !place.files.contains(file)) {
            fs::remove_file(place.root.join(extra)).unwrap();
        }
        for (path, bytes) in whole {
            fs::write(path, bytes).unwrap();
        }
    });
}
