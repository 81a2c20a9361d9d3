//! Full checkpoints: other programs read the values that the ranks had.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::checkpoint::{
    self, CheckpointIO, CheckpointReader, CheckpointWriter, Entry, FullCheckpoint, FullOptions,
    GatherOptions, ModelConfig, SafetensorsSource, TensorSource, gather_cpu_state_dict,
    gather_full_optimizer_state, load_into, load_optimizer, optimizer_key, save_full, staging_name,
};
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::parameter::{Init, LocalShard};
use fulgurite_core::shard::{Cut, Placement, Region};
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{
    self, Mesh, SEED, bytes, coordinate, io, meta, model, ranks, save_all, shown, states, values,
    world_size,
};
use proptest::prelude::*;

const MESHES: [Mesh; 7] =
    [[1, 1, 1], [1, 2, 1], [1, 4, 1], [3, 1, 1], [2, 2, 1], [1, 2, 2], [2, 1, 4]];

/// Saves model and optimizer of [`SEED`] from this rank.
fn save_rank(
    io: &dyn CheckpointIO,
    group: &dyn ProcessGroup,
    mesh: Mesh,
    options: &FullOptions,
) -> Result<std::path::PathBuf> {
    let tree = model(mesh, group.rank(), Some(SEED), DType::F32);
    let states = states(&tree, Some(SEED));
    let coordinate = coordinate(mesh, group.rank());
    let meta = meta(3, mesh, &tree);
    save_full(io, group, "full", &tree, coordinate, &states, options, &meta)
}

fn save(root: &Path, mesh: Mesh, options: &FullOptions) -> FullCheckpoint {
    let io = io(root);
    for saved in ranks(world_size(mesh), |group| save_rank(&*io, group, mesh, options)) {
        assert_eq!(saved.unwrap(), root.join("full"));
    }
    FullCheckpoint::open(root.join("full")).unwrap()
}

/// Returns the names and contents of the checkpoint's files, and the names of its directories.
fn files(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(root.join("full")).unwrap().map(|entry| entry.unwrap());
    let name = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
    let content = |entry: &fs::DirEntry| match entry.path() {
        path if path.is_dir() => Vec::new(),
        path => fs::read(path).unwrap(),
    };
    entries.map(|entry| (name(&entry), content(&entry))).collect()
}

fn whole(seed: u64, name: &str, shape: &[usize], dtype: DType) -> Tensor {
    values(Some(seed), name, shape, &Region::full(shape), dtype)
}

#[test]
fn every_mesh_writes_the_same_files() {
    let temp = tempfile::tempdir().unwrap();
    let mut expected: Option<BTreeMap<String, Vec<u8>>> = None;
    for mesh in MESHES {
        let full = save(temp.path(), mesh, &FullOptions::default());
        full.verify().unwrap();
        let manifest = full.manifest();
        assert_eq!((manifest.step, manifest.world_size), (3, world_size(mesh)));
        assert_eq!(manifest.mesh, meta(3, mesh, &model(mesh, 0, None, DType::F32)).mesh);
        assert_eq!(full.state()["trainer"]["step"], 3);
        assert_eq!(manifest.config["seed"], SEED);
        let mut files = files(temp.path());
        files.remove("fulgurite.json").unwrap();
        assert_eq!(
            files.keys().collect::<Vec<_>>(),
            ["model.safetensors", "optimizer.safetensors"]
        );
        assert_eq!(expected.get_or_insert_with(|| files.clone()), &files, "{mesh:?}");
    }
    // The reference implementation reads them. A tied parameter is saved once.
    let files = expected.unwrap();
    let parsed = safetensors::SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    let mut names = parsed.names();
    names.sort();
    let all =
        ["embed.weight", "layers.0.conv", "layers.0.up", "norm.weight", "row.weight", "scale"];
    assert_eq!(names, all);
    for (name, tensor) in parsed.tensors() {
        let expected = whole(SEED, &name, tensor.shape(), DType::F32);
        assert_eq!(tensor.data(), bytes(&expected), "{name}");
    }
    let (_, metadata) =
        safetensors::SafeTensors::read_metadata(&files["model.safetensors"]).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let parsed = safetensors::SafeTensors::deserialize(&files["optimizer.safetensors"]).unwrap();
    assert_eq!(parsed.len(), 2 * all.len());
    for name in all {
        for state in ["exp_avg", "exp_avg_sq"] {
            let tensor = parsed.tensor(&optimizer_key(name, state)).unwrap();
            let seed = format!("{name}/{state}");
            assert_eq!(tensor.data(), bytes(&whole(SEED, &seed, tensor.shape(), DType::F32)));
        }
    }
}

#[test]
fn every_mesh_loads_it() {
    let temp = tempfile::tempdir().unwrap();
    let full = save(temp.path(), [1, 2, 2], &FullOptions::default());
    let any = checkpoint::open(temp.path().join("full")).unwrap();
    let plain = SafetensorsSource::open(temp.path().join("full")).unwrap();
    let with_io = FullCheckpoint::open_with(&io(temp.path()), "full").unwrap();
    assert_eq!(with_io.manifest(), full.manifest());
    for mesh in MESHES {
        for rank in 0..world_size(mesh) {
            for source in [&full as &dyn TensorSource, &*any, &plain, &with_io] {
                let tree = model(mesh, rank, None, DType::F32);
                assert!(load_into(source, &tree, true).unwrap().is_empty());
                for parameter in tree.parameters() {
                    let local = parameter.local().unwrap();
                    let (fqn, shape) = (parameter.fqn(), parameter.global_shape());
                    let expected = values(Some(SEED), fqn, shape, &local.region, DType::F32);
                    assert_eq!(bytes(&local.values), bytes(&expected), "{fqn} on {mesh:?}");
                }
            }
            let tree = model(mesh, rank, None, DType::F32);
            let state = states(&tree, None);
            load_optimizer(full.optimizer(), &tree, &state, true).unwrap();
            for (loaded, expected) in state.iter().zip(states(&tree, Some(SEED))) {
                assert_eq!(bytes(&loaded.values), bytes(&expected.values), "{}", loaded.fqn);
            }
        }
    }
}

#[test]
fn large_models_are_split_with_an_index() {
    let temp = tempfile::tempdir().unwrap();
    let options = FullOptions { max_shard_bytes: 200, ..FullOptions::default() };
    let full = save(temp.path(), [1, 2, 2], &options);
    let files = files(temp.path());
    let of = |stem: &str| {
        files.keys().filter(|n| n.starts_with(stem)).cloned().collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(of("model"), @r#"
model-00001-of-00003.safetensors
model-00002-of-00003.safetensors
model-00003-of-00003.safetensors
model.safetensors.index.json
"#);
    let index = String::from_utf8(files["model.safetensors.index.json"].clone()).unwrap();
    insta::assert_snapshot!(index, @r#"
{
  "metadata": {
    "total_size": 544
  },
  "weight_map": {
    "embed.weight": "model-00001-of-00003.safetensors",
    "layers.0.conv": "model-00003-of-00003.safetensors",
    "layers.0.up": "model-00002-of-00003.safetensors",
    "norm.weight": "model-00001-of-00003.safetensors",
    "row.weight": "model-00003-of-00003.safetensors",
    "scale": "model-00003-of-00003.safetensors"
  }
}
"#);
    assert!(files.contains_key("optimizer.safetensors.index.json"));
    for (name, content) in files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let parsed = safetensors::SafeTensors::deserialize(content).unwrap();
        let held: usize = parsed.tensors().iter().map(|(_, t)| t.data().len()).sum();
        assert!(held <= 200 || parsed.len() == 1, "{name} holds {held} bytes");
    }
    full.verify().unwrap();
    let plain = SafetensorsSource::open(temp.path().join("full")).unwrap();
    assert_eq!(plain.names(), full.names());
    for name in full.names() {
        let shape = full.info(name).unwrap().shape;
        let read = plain.read(name, &Region::full(&shape), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(bytes(&read), bytes(&whole(SEED, name, &shape, DType::F32)), "{name}");
    }
}

#[test]
fn only_the_model_dtype_is_converted() {
    let temp = tempfile::tempdir().unwrap();
    let gather = GatherOptions { dtype: Some(DType::BF16), ..GatherOptions::default() };
    let options = FullOptions { gather, ..FullOptions::default() };
    let full = save(temp.path(), [2, 2, 1], &options);
    for name in full.names() {
        let info = full.info(name).unwrap();
        assert_eq!(info.dtype, safetensors::Dtype::BF16);
        let read = full.read(name, &Region::full(&info.shape), DType::BF16, &Device::Cpu).unwrap();
        let expected = whole(SEED, name, &info.shape, DType::F32).to_dtype(DType::BF16).unwrap();
        assert_eq!(bytes(&read), bytes(&expected), "{name}");
    }
    for name in full.optimizer().names() {
        assert_eq!(full.optimizer().info(name).unwrap().dtype, safetensors::Dtype::F32);
    }
}

#[test]
fn config_json_is_passed_through() {
    let temp = tempfile::tempdir().unwrap();
    let config = serde_json::json!({ "model_type": "llama", "hidden_size": 6 });
    let options = FullOptions { config: Some(config.clone().into()), ..FullOptions::default() };
    save(temp.path(), [1, 2, 1], &options);
    let written: serde_json::Value =
        serde_json::from_slice(&files(temp.path())["config.json"]).unwrap();
    assert_eq!(written, config);
    let file = temp.path().join("given.json");
    fs::write(&file, "{\"as\":   \"it is\"}").unwrap();
    let options =
        FullOptions { config: Some(ModelConfig::File(file.clone())), ..FullOptions::default() };
    save(temp.path(), [1, 2, 1], &options);
    assert_eq!(files(temp.path())["config.json"], b"{\"as\":   \"it is\"}");
    // Rank 0's mistake is an error on all ranks, and the existing checkpoint stays.
    fs::write(&file, "{\"as\":").unwrap();
    let io = io(temp.path());
    for saved in ranks(2, |group| save_rank(&*io, group, [1, 2, 1], &options)) {
        let error = saved.unwrap_err().to_string();
        assert!(error.contains("given.json: is not JSON"), "{error}");
    }
    assert_eq!(files(temp.path())["config.json"], b"{\"as\":   \"it is\"}");
}

// checklist: torchtune: gather_cpu_state_dict
#[test]
fn filtered_tensors_are_not_gathered() {
    let mesh = [1, 2, 2];
    let gathered = ranks(4, |group| {
        let tree = model(mesh, group.rank(), Some(SEED), DType::F32);
        let coordinate = coordinate(mesh, group.rank());
        let options = GatherOptions::default().with_filter(|fqn| fqn.starts_with("layers."));
        let model = gather_cpu_state_dict(&tree, coordinate, group, &options).unwrap();
        let states = states(&tree, Some(SEED));
        let states =
            gather_full_optimizer_state(&tree, &states, coordinate, group, &options).unwrap();
        (model, states)
    });
    for (model, states) in &gathered[1..] {
        assert!(model.is_empty() && states.is_empty());
    }
    let (model, states) = &gathered[0];
    assert_eq!(model.keys().collect::<Vec<_>>(), ["layers.0.conv", "layers.0.up"]);
    for (name, tensor) in model {
        assert_eq!(bytes(tensor), bytes(&whole(SEED, name, tensor.dims(), DType::F32)));
    }
    assert_eq!(model["layers.0.conv"].dims(), [2, 3, 4]);
    assert_eq!(states.len(), 4);
    let state = &states["state.layers.0.up.exp_avg_sq"];
    assert_eq!(bytes(state), bytes(&whole(SEED, "layers.0.up/exp_avg_sq", &[6, 10], DType::F32)));
}

#[test]
fn trainable_only_skips_frozen_parameters() {
    let gathered = ranks(2, |group| {
        let init = ModuleInit { frozen: vec!["base.*".to_owned()], ..ModuleInit::default() };
        let b = ModuleBuilder::new(init);
        b.pp("base").parameter("weight", [4, 2], Init::ONES).unwrap();
        b.pp("lora").parameter("a", [3, 2], Init::ONES).unwrap();
        let mesh = [1, 2, 1];
        let tree = checkpoints::set_up(b.finish().unwrap(), mesh, group.rank(), Some(SEED));
        let options = GatherOptions { trainable_only: true, ..GatherOptions::default() };
        gather_cpu_state_dict(&tree, coordinate(mesh, group.rank()), group, &options).unwrap()
    });
    assert_eq!(gathered[0].keys().collect::<Vec<_>>(), ["lora.a"]);
}

#[test]
fn disagreement_is_an_error_on_all_ranks() {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let mesh = [1, 2, 1];
    let with = |filter: fn(usize, &str) -> bool| {
        let errors = ranks(2, |group| {
            let rank = group.rank();
            let gather = GatherOptions::default().with_filter(move |fqn| filter(rank, fqn));
            let options = FullOptions { gather, ..FullOptions::default() };
            save_rank(&*io, group, mesh, &options).unwrap_err()
        });
        assert!(io.list("").unwrap().is_empty(), "something is left");
        shown(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"), temp.path())
    };
    insta::assert_snapshot!(with(|rank, fqn| rank == 0 || fqn != "scale"), @r#"
gathering tensors: ranks 0 and 1 list different names, shapes or dtypes. All ranks must have the same model and give the same options; a filter must say the same of a name on all of them
gathering tensors: ranks 0 and 1 list different names, shapes or dtypes. All ranks must have the same model and give the same options; a filter must say the same of a name on all of them
"#);
    insta::assert_snapshot!(with(|_, _| false), @r#"
checkpoint ROOT/full: there is nothing to save: the options leave out every parameter
checkpoint ROOT/full: there is nothing to save: the options leave out every parameter
"#);
}

#[test]
fn only_checkpoints_are_replaced() {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let stale = [staging_name("full"), staging_name("other")];
    for name in &stale {
        fs::create_dir_all(temp.path().join(name)).unwrap();
    }
    let mesh = [1, 2, 1];
    save(temp.path(), mesh, &FullOptions::default());
    save(temp.path(), mesh, &FullOptions::default());
    // A save that may be under way is left alone.
    let left: Vec<_> = io.list("").unwrap().into_iter().map(|e| e.name).collect();
    assert_eq!(left, ["full".to_owned(), stale[1].clone()]);
    // Either kind replaces the other, without leftovers.
    save_all(temp.path(), "full", mesh, 1, SEED);
    let distributed: Vec<_> = files(temp.path()).into_keys().collect();
    assert_eq!(distributed, ["manifest.json", "model", "optimizer"]);
    save(temp.path(), mesh, &FullOptions::default()).verify().unwrap();
    let full: Vec<_> = files(temp.path()).into_keys().collect();
    assert_eq!(full, ["fulgurite.json", "model.safetensors", "optimizer.safetensors"]);
    // A directory that is not a checkpoint stays.
    let full = temp.path().join("full");
    fs::remove_file(full.join("fulgurite.json")).unwrap();
    for saved in ranks(2, |group| save_rank(&*io, group, mesh, &FullOptions::default())) {
        let error = saved.unwrap_err().to_string();
        assert!(error.contains("no checkpoint; it is not overwritten"), "{error}");
    }
    assert!(full.join("model.safetensors").is_file());
}

/// Storage whose files fail after some bytes.
#[derive(Debug)]
struct Full(std::sync::Arc<dyn CheckpointIO>, usize);

struct FullWriter(Box<dyn CheckpointWriter>, usize);

impl std::io::Write for FullWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > self.1 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.1 -= bytes.len();
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl CheckpointWriter for FullWriter {
    fn finish(self: Box<Self>) -> Result<()> {
        self.0.finish()
    }
}

impl CheckpointIO for Full {
    fn location(&self, path: &str) -> std::path::PathBuf {
        self.0.location(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        Ok(Box::new(FullWriter(self.0.create(path)?, self.1)))
    }

    fn open(&self, path: &str) -> Result<std::sync::Arc<dyn CheckpointReader>> {
        self.0.open(path)
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.0.list(path)
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.0.remove(path)
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.0.commit(staged, name)
    }
}

#[test]
fn full_disk_keeps_the_old_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let mesh = [1, 2, 2];
    save(temp.path(), mesh, &FullOptions::default());
    let before = files(temp.path());
    let place = Full(io(temp.path()), 700);
    let errors =
        ranks(4, |group| save_rank(&place, group, mesh, &FullOptions::default()).unwrap_err());
    assert!(errors[1..].iter().all(|e| matches!(e, Error::PeerFailed { rank: 0, .. })));
    assert_says!(shown(&errors[0], temp.path()), "checkpoint … `layers.0.up`: no storage space");
    assert_eq!(files(temp.path()), before);
    assert_eq!(io(temp.path()).list("").unwrap().len(), 1);
}

#[test]
fn damage_is_found() {
    let temp = tempfile::tempdir().unwrap();
    save(temp.path(), [1, 1, 1], &FullOptions::default());
    let file = temp.path().join("full/optimizer.safetensors");
    let mut content = fs::read(&file).unwrap();
    let last = content.len() - 1;
    content[last] ^= 1;
    fs::write(&file, &content).unwrap();
    let full = FullCheckpoint::open(temp.path().join("full")).unwrap();
    insta::assert_snapshot!(shown(full.verify().unwrap_err(), temp.path()), @r#"
checkpoint ROOT/full: is damaged:
  ROOT/full/optimizer.safetensors: tensor `state.scale.exp_avg_sq`: the bytes of [] do not match their checksum; the file is damaged
"#);
    content.truncate(last);
    fs::write(&file, &content).unwrap();
    let error = FullCheckpoint::open(temp.path().join("full")).unwrap_err();
    assert_says!(shown(error, temp.path()), "… ROOT/full/optimizer.safetensors … truncated …");
    let error = FullCheckpoint::open(temp.path()).unwrap_err();
    assert_says!(shown(error, temp.path()), "checkpoint ROOT … no full … no fulgurite.json …");
    let newer = fs::read_to_string(temp.path().join("full/fulgurite.json")).unwrap();
    let newer = newer.replace("\"format_version\": 3,", "\"format_version\": 9,");
    fs::write(temp.path().join("full/fulgurite.json"), newer).unwrap();
    let error = FullCheckpoint::open(temp.path().join("full")).unwrap_err();
    assert!(error.to_string().contains("is of format version 9"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_sharding_gathers_to_the_whole(
        shape in prop::collection::vec(1usize..9, 0..4),
        cuts in prop::collection::vec((1usize..4, 0usize..4), 0..3),
    ) {
        let n: usize = shape.iter().product();
        let world: usize = cuts.iter().map(|cut| cut.0).product();
        let gathered = ranks(world, |group| {
            let at = |dim: &str| {
                let i: usize = dim.parse().unwrap();
                let inner: usize = cuts[i + 1..].iter().map(|c| c.0).product();
                group.rank() / inner % cuts[i].0
            };
            let b = ModuleBuilder::new(ModuleInit::default());
            b.parameter("w", shape.clone(), Init::ZEROS).unwrap();
            let mut tree = b.finish().unwrap();
            let parameter = tree.slots().remove(0);
            let mut spec = parameter.spec();
            for (i, (size, dim)) in cuts.iter().enumerate() {
                let place = |d: usize| {
                    if d < shape.len() { Placement::Shard(d) } else { Placement::Replicate }
                };
                spec = spec.with_cut(Cut::new(format!("{i}"), *size, place(*dim)));
            }
            let region = spec.region(at);
            let runs = region.runs(&shape);
            let values = runs.iter().flat_map(|run| run.outer..run.outer + run.len);
            let values = Tensor::from_iter(values.map(|i| i as f32), &Device::Cpu).unwrap();
            parameter.set_spec(spec);
            parameter.set_local(LocalShard { values, region });
            let options = GatherOptions { dtype: Some(DType::F64), ..GatherOptions::default() };
            gather_cpu_state_dict(&tree, at, group, &options).unwrap()
        });
        let whole = &gathered[0]["w"];
        prop_assert_eq!(whole.dims(), shape);
        let expected: Vec<f64> = (0..n).map(|i| i as f64).collect();
        prop_assert_eq!(whole.flatten_all().unwrap().to_vec1::<f64>().unwrap(), expected);
        prop_assert!(gathered[1..].iter().all(BTreeMap::is_empty));
    }
}
