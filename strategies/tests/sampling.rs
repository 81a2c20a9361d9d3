//! Which samples the ranks of a mesh see.

use std::collections::BTreeSet;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule, Split};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::DATA_PARALLEL;
use fulgurite_core::module::ModuleInit;
use fulgurite_core::parallel::ContextParallel;
use fulgurite_core::strategy::{BuildContext, StrategyConfig};
use fulgurite_strategies as _;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

/// Samples that are their own numbers.
struct Numbers;

#[derive(Clone, Serialize, Deserialize)]
struct NumbersConfig {
    shuffle: bool,
}

impl Default for NumbersConfig {
    fn default() -> Self {
        Self { shuffle: true }
    }
}

const SAMPLES: u64 = 26;
const BATCH: usize = 3;

impl DataModule for Numbers {
    type Config = NumbersConfig;
    type Batch = Vec<u64>;

    fn setup(_: &NumbersConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NumbersConfig) -> usize {
        BATCH
    }

    fn shuffle(config: &NumbersConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { SAMPLES } else { 0 }
    }

    fn batch(&self, _: Split, indices: &[u64], _: &Device) -> Result<Vec<u64>> {
        Ok(indices.to_vec())
    }

    fn shard_sequence(batch: Vec<u64>, _: &ContextParallel) -> Result<Vec<u64>> {
        Ok(batch)
    }
}

/// Each rank's place along `data_parallel` and its first micro-batches, from `skip` on.
fn samples(config: &str, shuffle: bool, skip: u64) -> Vec<(usize, Vec<Vec<u64>>)> {
    let ranks = run_ranks(8, |world| {
        let config: Box<dyn StrategyConfig> = serde_json::from_str(config).unwrap();
        let strategy = config.build(&BuildContext::default())?;
        let fabric = Fabric::new(world, strategy, ModuleInit::default(), 11)?;
        let mut loader = fabric.setup_data::<Numbers>(&NumbersConfig { shuffle })?;
        loader.skip_to(skip);
        let batches = loader.take(7).collect::<Result<_>>()?;
        Ok((fabric.device_mesh().local_rank(DATA_PARALLEL)?, batches))
    });
    ranks.unwrap()
}

/// Ranks that see different data, and the mesh.
const MESHES: [(usize, &str); 5] = [
    (2, r#"{"type": "model_parallel", "data_parallel_size": 2, "tensor_parallel_size": 4}"#),
    (
        2,
        r#"{"type": "model_parallel", "data_parallel_replicate_size": 2,
            "data_parallel_shard_size": 1, "context_parallel_size": 2, "tensor_parallel_size": 2}"#,
    ),
    (
        4,
        r#"{"type": "model_parallel", "data_parallel_replicate_size": 2,
            "data_parallel_shard_size": 2, "tensor_parallel_size": 2}"#,
    ),
    (1, r#"{"type": "model_parallel", "context_parallel_size": 4, "tensor_parallel_size": 2}"#),
    (8, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#),
];

#[test]
fn ranks_of_one_tensor_and_context_parallel_group_see_the_same_samples_and_others_different_ones() {
    for (replicas, config) in MESHES {
        for shuffle in [false, true] {
            let ranks = samples(config, shuffle, 0);
            let of = |place| &ranks.iter().find(|(p, _)| *p == place).expect("a rank").1;
            for (place, batches) in &ranks {
                assert_eq!(batches, of(*place), "{config}, shuffle {shuffle}");
            }
            // Seven micro-batches cross the end of an epoch on 2 replicas and more; within a step
            // of one epoch no sample is seen twice.
            for step in 0..7 {
                let all: Vec<u64> =
                    (0..replicas).flat_map(|place| of(place)[step].clone()).collect();
                let distinct: BTreeSet<u64> = all.iter().copied().collect();
                assert_eq!(all.len(), replicas * BATCH);
                let first = (step * replicas * BATCH) as u64;
                let crosses = first / SAMPLES != (first + all.len() as u64 - 1) / SAMPLES;
                assert!(crosses || distinct.len() == all.len(), "{config}, step {step}: {all:?}");
            }
            // An epoch sees every sample once, whoever sees it.
            let stream: Vec<u64> = (0..7)
                .flat_map(|step| (0..replicas).flat_map(move |place| of(place)[step].clone()))
                .take(SAMPLES as usize)
                .collect();
            if stream.len() == SAMPLES as usize {
                let distinct: BTreeSet<u64> = stream.into_iter().collect();
                assert_eq!(distinct.len(), SAMPLES as usize, "{config}, shuffle {shuffle}");
            }
        }
    }
}

#[test]
fn a_resumed_loader_goes_on_where_it_was() {
    for (_, config) in MESHES {
        let whole = samples(config, true, 0);
        for ((_, whole), (_, rest)) in whole.iter().zip(samples(config, true, 4)) {
            assert_eq!(whole[4..], rest[..3], "{config}");
        }
    }
}
