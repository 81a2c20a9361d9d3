//! A checkpoint from one mesh loads on another mesh, bit for bit.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::checkpoint::{
    self, DistributedCheckpoint, Manifest, SafetensorsSource, ShardTensor, TensorSource, load_into,
    load_optimizer, save,
};
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::parameter::Init;
use fulgurite_core::shard::{Cut, Placement, Region, ShardSpec};
use fulgurite_test_support::checkpoints::{
    self, Mesh, SEED, bytes, coordinate, io, meta, model, ranks, save_all, set_up, shown, states,
    values, without_digest, world_size,
};
use proptest::prelude::*;

const MESHES: [Mesh; 7] =
    [[1, 1, 1], [1, 2, 1], [1, 4, 1], [3, 1, 1], [2, 2, 1], [1, 2, 2], [2, 1, 4]];

// checklist: torchtune: load_from_full_optimizer_state_dict
#[test]
fn any_mesh_loads_any_mesh() {
    let temp = tempfile::tempdir().unwrap();
    for from in MESHES {
        save_all(temp.path(), "step-00000003", from, 3, SEED);
        let checkpoint = DistributedCheckpoint::open(temp.path().join("step-00000003")).unwrap();
        checkpoint.verify().unwrap();
        for to in MESHES {
            for rank in 0..world_size(to) {
                let tree = model(to, rank, None, DType::F32);
                let report = load_into(&checkpoint, &tree, true).unwrap();
                assert!(report.is_empty());
                for parameter in tree.parameters() {
                    let local = parameter.local().unwrap();
                    let (fqn, shape) = (parameter.fqn(), parameter.global_shape());
                    let expected = values(Some(SEED), fqn, shape, &local.region, DType::F32);
                    assert_eq!(bytes(&local.values), bytes(&expected), "{fqn}: {from:?} to {to:?}");
                }
                let state = states(&tree, None);
                load_optimizer(checkpoint.optimizer(), &tree, &state, true).unwrap();
                for (loaded, expected) in state.iter().zip(states(&tree, Some(SEED))) {
                    assert_eq!(bytes(&loaded.values), bytes(&expected.values), "{}", loaded.fqn);
                }
            }
        }
    }
}

#[test]
fn each_element_is_written_once() {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let mesh = [1, 4, 1];
    let full = Tensor::arange(0f32, 2.0, &Device::Cpu).unwrap();
    for saved in ranks(4, |group| {
        // Two rows over four ranks: the last two hold nothing.
        let spec = ShardSpec::new(vec![2]).with_cut(Cut::new(
            "data_parallel_shard",
            4,
            Placement::Shard(0),
        ));
        let region = spec.region(coordinate(mesh, group.rank()));
        let values = full.narrow(0, region.offsets[0], region.sizes[0]).unwrap();
        let tensor = ShardTensor { name: "w".into(), values, region, shape: vec![2] };
        let empty = ShardTensor {
            name: "none".into(),
            values: full.narrow(0, 0, 0).unwrap(),
            region: Region::full(&[0, 3]),
            shape: vec![0, 3],
        };
        save(&*io, group, "c", &[tensor, empty], &[], &checkpoint::SaveMeta::default())
    }) {
        saved.unwrap();
    }
    let listed =
        |path: &str| io.list(path).unwrap().into_iter().map(|e| e.name).collect::<Vec<_>>();
    assert_eq!(listed("c"), ["manifest.json", "model"]);
    let name = |i: usize| format!("shard-{i:05}-model-00001-of-00001.safetensors");
    assert_eq!(listed("c/model"), [name(1), name(2)]);
    let opened = DistributedCheckpoint::open_with(&io, "c").unwrap();
    assert_eq!(opened.names(), ["none", "w"]);
    assert_eq!(opened.info("none").unwrap().shape, [0, 3]);
    let read = |name: &str, shape: &[usize]| {
        opened.read(name, &Region::full(shape), DType::F32, &Device::Cpu).unwrap()
    };
    assert_eq!(read("w", &[2]).to_vec1::<f32>().unwrap(), [0.0, 1.0]);
    assert_eq!(read("none", &[0, 3]).elem_count(), 0);
}

#[test]
fn replicas_share_the_writing() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [3, 1, 1], 1, SEED);
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    let manifest = checkpoint.manifest();
    assert_eq!(manifest.files.len(), 6);
    assert_eq!(manifest.world_size, 3);
    let chunks = &manifest.model["embed.weight"].chunks;
    let rows: Vec<_> = chunks.iter().map(|c| (c.region.offsets[0], c.region.sizes[0])).collect();
    assert_eq!(rows, [(0, 3), (3, 3), (6, 1)]);
}

/// In format version 1 a tensor's chunks were called boxes.
#[test]
fn format_version_1_loads() {
    let old = include_bytes!("../fixtures/manifest-v1.json");
    let manifest = Manifest::parse(old, Path::new("manifest-v1.json")).unwrap();
    let chunks = &manifest.model["up.weight"].chunks;
    let parts: Vec<_> = chunks.iter().map(|c| (&c.region.offsets[..], c.bytes, c.xxh3)).collect();
    assert_eq!(
        parts,
        [(&[0, 0][..], (136, 152), 0xdead_beef), (&[2, 0][..], (136, 144), u64::MAX)]
    );

    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 1], 3, SEED);
    let path = temp.path().join("c/manifest.json");
    let new = std::fs::read_to_string(&path).unwrap();
    assert!(!new.contains("boxes"));
    let old = without_digest(&new).replace("\"chunks\"", "\"boxes\"");
    std::fs::write(&path, old.replace("\"format_version\": 2", "\"format_version\": 1")).unwrap();
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    assert_eq!(checkpoint.manifest().format_version, 1);
    checkpoint.verify().unwrap();
    let written = Manifest::parse(new.as_bytes(), &path).unwrap();
    assert_eq!(checkpoint.manifest().model, written.model);
    assert_eq!(checkpoint.manifest().optimizer, written.optimizer);
}

#[test]
fn state_and_config_round_trip() {
    let temp = tempfile::tempdir().unwrap();
    let mesh = [1, 2, 1];
    save_all(temp.path(), "c", mesh, 12, SEED);
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    let manifest = checkpoint.manifest();
    let expected = meta(12, mesh, &model(mesh, 0, None, DType::F32));
    assert_eq!(manifest.state, expected.state);
    assert_eq!(
        manifest.state["trainer"]["lr"].as_f64().unwrap().to_bits(),
        (0.1f64 + 0.2).to_bits()
    );
    assert_eq!((&manifest.config, &manifest.mesh), (&expected.config, &expected.mesh));
    assert_eq!((manifest.step, &manifest.specs), (12, &expected.specs));
}

#[test]
fn dtypes_are_converted() {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let mesh = [1, 1, 1];
    for stored in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let tree = model(mesh, 0, Some(SEED), stored);
        let tensors = checkpoint::model_tensors(&tree, coordinate(mesh, 0)).unwrap();
        for saved in ranks(1, |group| save(&*io, group, "c", &tensors, &[], &meta(1, mesh, &tree)))
        {
            saved.unwrap();
        }
        let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
        for wanted in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let loaded = model(mesh, 0, None, wanted);
            load_into(&checkpoint, &loaded, true).unwrap();
            for (a, b) in tree.parameters().iter().zip(loaded.parameters()) {
                let expected = a.local().unwrap().values.to_dtype(wanted).unwrap();
                assert_eq!(
                    bytes(&b.local().unwrap().values),
                    bytes(&expected),
                    "{stored:?} {wanted:?}"
                );
            }
        }
    }
}

// checklist: Lightning: load_checkpoint: formats are detected
#[test]
fn shards_open_as_plain_safetensors() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 2], 1, SEED);
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    let plain = SafetensorsSource::open(temp.path().join("c/model")).unwrap();
    assert_eq!(plain.names(), checkpoint.names());
    for name in checkpoint.names() {
        let info = checkpoint.info(name).unwrap();
        assert_eq!(plain.info(name), Some(info.clone()));
        let region = Region::full(&info.shape);
        let read =
            |s: &dyn TensorSource| bytes(&s.read(name, &region, DType::F32, &Device::Cpu).unwrap());
        assert_eq!(read(&plain), read(&checkpoint));
    }
    // The reference implementation of the format accepts every shard.
    for entry in std::fs::read_dir(temp.path().join("c/model")).unwrap() {
        let file = std::fs::read(entry.unwrap().path()).unwrap();
        let parsed = safetensors::SafeTensors::deserialize(&file).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header % 8, 0);
        let info = &metadata.metadata().as_ref().unwrap()["DCP_SHARDING_INFO"];
        let info: serde_json::Value = serde_json::from_str(info).unwrap();
        for (name, tensor) in parsed.tensors() {
            let offsets = serde_json::from_value(info[&name]["saved_offsets"].clone()).unwrap();
            let region = Region { offsets, sizes: tensor.shape().to_vec() };
            let shape = checkpoint.info(&name).unwrap().shape;
            let expected = values(Some(SEED), &name, &shape, &region, DType::F32);
            assert_eq!(tensor.data(), bytes(&expected), "{name}");
        }
    }
}

// checklist: PyTorch: _get_param_to_fqns
#[test]
fn tied_parameters_load_under_any_name() {
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let init = Init::Normal { mean: 0.0, std: 1.0 };
    let build = |first: &str, alias: Option<&str>| {
        let b = ModuleBuilder::new(ModuleInit::default());
        let weight = b.parameter(first, [4, 3], init).unwrap();
        if let Some(alias) = alias {
            b.tie(alias, &weight).unwrap();
        }
        b.finish().unwrap()
    };
    let mesh = [1, 1, 1];
    let tied = || build("embed", Some("head"));
    for saved_as in ["embed", "head"] {
        let saved = set_up(build(saved_as, None), mesh, 0, Some(SEED));
        let (model, optimizer) = checkpoints::tensors(&saved, mesh, 0, SEED);
        let done =
            ranks(1, |group| save(&*io, group, "c", &model, &optimizer, &meta(1, mesh, &saved)));
        done.into_iter().for_each(|saved| drop(saved.unwrap()));
        let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
        let tree = set_up(tied(), mesh, 0, None);
        checkpoint::check_compatible(&checkpoint, &tree).unwrap();
        assert!(load_into(&checkpoint, &tree, true).unwrap().is_empty());
        let values = |tree: &fulgurite_core::module::ModuleTree| {
            bytes(&tree.parameters()[0].local().unwrap().values)
        };
        assert_eq!(values(&tree), values(&saved));
        let state = states(&tree, None);
        assert!(load_optimizer(checkpoint.optimizer(), &tree, &state, true).unwrap().is_empty());
        assert_eq!(bytes(&state[0].values), bytes(&states(&saved, Some(SEED))[0].values));
    }
}

// checklist: torchtune: load_from_full_model_state_dict
// checklist: Lightning: strictness, left-overs
#[test]
fn non_strict_loads_fitting_tensors() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 1], 1, SEED);
    let checkpoint = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    let b = ModuleBuilder::new(ModuleInit::default());
    b.pp("norm").parameter("weight", [5], Init::ZEROS).unwrap();
    b.pp("layers.0").parameter("up", [6, 11], Init::ZEROS).unwrap();
    b.pp("adapter").parameter("weight", [2], Init::ZEROS).unwrap();
    let tree = set_up(b.finish().unwrap(), [1, 1, 1], 0, None);
    let strict = load_into(&checkpoint, &tree, true).unwrap_err();
    assert_eq!(
        checkpoint::check_compatible(&checkpoint, &tree).unwrap_err().to_string(),
        strict.to_string()
    );
    insta::assert_snapshot!(shown(strict, temp.path()), @r#"
    checkpoint ROOT/c: does not fit this model:
      missing, the model has it and the checkpoint does not (1):
        adapter.weight
      unexpected, the checkpoint has it and the model does not (4):
        embed.weight
        layers.0.conv
        row.weight
        scale
      of another shape (1):
        layers.0.up: [6, 11] in the model, [6, 10] in the checkpoint
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
    let norm = tree.parameter("norm.weight").unwrap().local().unwrap();
    assert!(bytes(&norm.values).iter().all(|b| *b == 0), "strict loading changed something");
    let report = load_into(&checkpoint, &tree, false).unwrap();
    assert_eq!(report, checkpoint::compare(&checkpoint, &tree));
    assert_eq!(report.missing, ["adapter.weight"]);
    assert_eq!(report.unexpected, ["embed.weight", "layers.0.conv", "row.weight", "scale"]);
    assert_eq!(report.mismatched[0].name, "layers.0.up");
    let expected = values(Some(SEED), "norm.weight", &[5], &norm.region, DType::F32);
    assert_eq!(bytes(&norm.values), bytes(&expected));
    let state = states(&tree, None);
    let error = load_optimizer(checkpoint.optimizer(), &tree, &state, true).unwrap_err();
    assert!(error.to_string().contains("does not fit this optimizer"), "{error}");
    assert!(error.to_string().contains("state.adapter.weight.exp_avg_sq"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_region_reads_from_any_sharding(
        shape in prop::collection::vec(1usize..9, 0..4),
        cuts in prop::collection::vec((1usize..4, 0usize..4), 0..3),
        window in prop::collection::vec((0usize..9, 1usize..9), 3),
    ) {
        let mut spec = ShardSpec::new(shape.clone());
        let mut world = 1;
        for (i, (size, dim)) in cuts.iter().enumerate() {
            let placement = if *dim < shape.len() { Placement::Shard(*dim) } else { Placement::Replicate };
            spec = spec.with_cut(Cut::new(format!("{i}"), *size, placement));
            world *= size;
        }
        let n: usize = shape.iter().product();
        let full: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let temp = tempfile::tempdir().unwrap();
        let io = io(temp.path());
        let take = |region: &Region| -> Vec<f32> {
            region.runs(&shape).iter().flat_map(|r| &full[r.outer..r.outer + r.len]).copied().collect()
        };
        for saved in ranks(world, |group| {
            let at = |dim: &str| {
                let i: usize = dim.parse().unwrap();
                let inner: usize = cuts[i + 1..].iter().map(|c| c.0).product();
                group.rank() / inner % cuts[i].0
            };
            let region = spec.owned_region(at);
            let part = if region.is_empty() { vec![] } else { take(&region) };
            let values = Tensor::from_vec(part.clone(), part.len(), &Device::Cpu).unwrap();
            let tensor = ShardTensor { name: "w".into(), values, region, shape: shape.clone() };
            save(&*io, group, "c", &[tensor], &[], &checkpoint::SaveMeta::default())
        }) {
            saved.unwrap();
        }
        let offsets: Vec<_> = shape.iter().zip(&window).map(|(n, (o, _))| o % n).collect();
        let sizes = shape.iter().zip(&window).zip(&offsets).map(|((n, (_, s)), o)| (*s).min(n - o)).collect();
        let wanted = Region { offsets, sizes };
        let source = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
        source.verify().unwrap();
        for region in [wanted, Region::full(&shape)] {
            let read = source.read("w", &region, DType::F32, &Device::Cpu).unwrap();
            prop_assert_eq!(read.to_vec1::<f32>().unwrap(), take(&region));
        }
    }
}

#[test]
fn wide_rows_are_read_run_by_run() {
    // Rows are longer than the range that is read with its neighbours, and columns leave gaps.
    let temp = tempfile::tempdir().unwrap();
    let io = io(temp.path());
    let (rows, columns) = (5, 40_000);
    let full = Tensor::arange(0u32, (rows * columns) as u32, &Device::Cpu).unwrap();
    let tensor = ShardTensor {
        name: "w".into(),
        values: full.clone(),
        region: Region::full(&[rows, columns]),
        shape: vec![rows, columns],
    };
    let done = ranks(1, |group| {
        save(&*io, group, "c", std::slice::from_ref(&tensor), &[], &checkpoint::SaveMeta::default())
    });
    done.into_iter().for_each(|saved| drop(saved.unwrap()));
    let source = DistributedCheckpoint::open(temp.path().join("c")).unwrap();
    for (start, len) in [(0, 17_000), (11, 39_500), (39_000, 1_000), (1, 39_999)] {
        let region = Region { offsets: vec![1, start], sizes: vec![3, len] };
        let read = source.read("w", &region, DType::U32, &Device::Cpu).unwrap();
        let expected = full.reshape((rows, columns)).unwrap().narrow(0, 1, 3).unwrap();
        let expected = expected.narrow(1, start, len).unwrap().flatten_all().unwrap();
        assert_eq!(read.to_vec1::<u32>().unwrap(), expected.to_vec1::<u32>().unwrap());
    }
}
