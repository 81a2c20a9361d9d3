//! A full checkpoint holds the ranks' values, whatever the strategy.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::checkpoint::tools::{AnyCheckpoint, DiffOptions, diff};
use fulgurite_core::checkpoint::{
    FullCheckpoint, FullOptions, GatherOptions, TensorSource, gather_cpu_state_dict,
    gather_full_optimizer_state, load_into, load_optimizer,
};
use fulgurite_core::shard::Region;
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

const STRATEGIES: [(usize, &str); 8] = [
    (1, r#"{"type": "single_device"}"#),
    (2, r#"{"type": "ddp"}"#),
    (3, r#"{"type": "ddp"}"#),
    (4, r#"{"type": "fsdp"}"#),
    (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}"#),
    (2, r#"{"type": "tp", "tensor_parallel_size": 2}"#),
    (4, r#"{"type": "tp", "tensor_parallel_size": 4}"#),
    (4, r#"{"type": "fsdp_tp", "data_parallel_shard_size": 2, "tensor_parallel_size": 2}"#),
];

/// Trains for some steps on the ranks, saves a full checkpoint, and returns the values that rank 0
/// gathered: the weights and all of the optimizer's state.
fn save(
    ranks: usize,
    config: &str,
    steps: usize,
    path: &Path,
) -> (BTreeMap<String, Vec<f32>>, BTreeMap<String, Vec<f32>>) {
    let saved = run_ranks(ranks, |world| {
        let mut training = DecoderTraining::new(world.clone(), config, Variant::default(), 1)?;
        for _ in 0..steps {
            training.step()?;
        }
        let options = FullOptions { max_shard_bytes: 2000, ..FullOptions::default() };
        let optimizer = &mut training.optimizer;
        let saved = training.fabric.save_full(path, Some(optimizer), &"mine", &options)?;
        assert_eq!(saved, path);
        let tree = training.fabric.module_tree()?;
        let mesh = training.fabric.device_mesh();
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let states = training.optimizer.state_tensors()?;
        let all = GatherOptions::default();
        let states = gather_full_optimizer_state(tree, &states, coordinate, &*world, &all)?;
        let gathered = gather_cpu_state_dict(tree, coordinate, &*world, &all)?;
        let flat = |tensors: BTreeMap<String, candle_core::Tensor>| -> Result<BTreeMap<_, _>> {
            let flat = |(name, t): (String, candle_core::Tensor)| {
                Ok((name, t.flatten_all()?.to_vec1::<f32>()?))
            };
            tensors.into_iter().map(flat).collect()
        };
        let (gathered, states) = (flat(gathered)?, flat(states)?);
        let weights = training.weights()?;
        assert_eq!(gathered.is_empty(), world.rank() > 0);
        assert_eq!(states.is_empty(), world.rank() > 0);
        assert!(world.rank() > 0 || gathered == weights, "{config}");
        Ok((weights, states))
    });
    saved.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

fn values(source: &dyn TensorSource) -> BTreeMap<String, Vec<f32>> {
    let read = |name: &str| {
        let region = Region::full(&source.info(name).unwrap().shape);
        let values = source.read(name, &region, DType::F32, &Device::Cpu).unwrap();
        (name.to_owned(), values.to_vec1().unwrap())
    };
    source.names().into_iter().map(read).collect()
}

// checklist: torchtune: gather_cpu_state_dict
// checklist: Lightning: save_checkpoint
// checklist: composer: get_full_state_dict
#[test]
fn every_strategy_loads_full_checkpoints() {
    let temp = tempfile::tempdir().unwrap();
    for (i, (ranks, config)) in STRATEGIES.iter().enumerate() {
        let path = temp.path().join(format!("full-{i}"));
        let (weights, states) = save(*ranks, config, 2, &path);
        let full = FullCheckpoint::open(&path).unwrap();
        full.verify().unwrap();
        assert_eq!(values(full.model()), weights, "{config}");
        assert_eq!(values(full.optimizer()), states, "{config}");
        assert!(!weights.contains_key("lm_head.weight") && !states.is_empty());
        assert_eq!((full.manifest().step, &full.state()["user"]), (2, &"mine".into()));
        assert_eq!(full.manifest().world_size, *ranks);
        // Into the next strategy of the list.
        let (ranks, config) = STRATEGIES[(i + 1) % STRATEGIES.len()];
        let loaded = run_ranks(ranks, |world| {
            let mut training = DecoderTraining::new(world, config, Variant::default(), 1)?;
            let tree = training.fabric.module_tree()?;
            load_into(full.model(), tree, true)?;
            let states = training.optimizer.state_tensors()?;
            load_optimizer(full.optimizer(), tree, &states, true)?;
            training.fabric.checkpoints().finish_load()?;
            let again = training.fabric.save_full(
                temp.path().join("again"),
                Some(&mut training.optimizer),
                &(),
                &FullOptions::default(),
            )?;
            Ok((training.weights()?, again))
        });
        let loaded = loaded.unwrap_or_else(|error| panic!("{config}: {error}"));
        assert!(loaded.iter().all(|(loaded, _)| *loaded == weights), "{config}");
        let (a, b) = (AnyCheckpoint::open(&path).unwrap(), AnyCheckpoint::open(&loaded[0].1));
        let same = diff(&a, &b.unwrap(), &DiffOptions::default(), &mut |_| {}).unwrap();
        assert!(same.differences.is_empty(), "{config}: {same:?}");
        assert_eq!(same.same, weights.len() + states.len());
    }
}

#[test]
fn full_and_distributed_checkpoints_are_equal() {
    let temp = tempfile::tempdir().unwrap();
    let config = STRATEGIES[7].1;
    run_ranks(4, |world| {
        let mut training = DecoderTraining::new(world, config, Variant::ALL[3], 1)?;
        training.step()?;
        training.fabric.save(temp.path().join("sharded"), &mut training.optimizer, &())?;
        let optimizer = &mut training.optimizer;
        let options = FullOptions::default();
        training.fabric.save_full(temp.path().join("full"), Some(optimizer), &(), &options)
    })
    .unwrap();
    let open = |name: &str| AnyCheckpoint::open(temp.path().join(name)).unwrap();
    let (a, b) = (open("sharded"), open("full"));
    let comparison = diff(&a, &b, &DiffOptions::default(), &mut |_| {}).unwrap();
    assert!(comparison.differences.is_empty(), "{comparison:?}");
    assert_eq!(comparison.same, a.model().names().len() + a.optimizer().unwrap().len());
    assert_eq!(a.manifest().unwrap().state, b.manifest().unwrap().state);
}
