//! The samples that the ranks of a mesh see.

use std::collections::BTreeSet;

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule, Split, Workers};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::DATA_PARALLEL;
use fulgurite_core::module::{ForwardScope, ModuleInit};
use fulgurite_core::nn::Loss;
use fulgurite_core::parallel::ContextParallel;
use fulgurite_core::strategy::{BuildContext, StrategyConfig};
use fulgurite_strategies as _;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

/// Samples that are their own indices.
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

/// Runs `f` with a Fabric on each of 8 ranks.
fn on_ranks<T: Send>(config: &str, f: impl Fn(Fabric) -> Result<T> + Sync) -> Vec<T> {
    let ranks = run_ranks(8, |world| {
        let config: Box<dyn StrategyConfig> = serde_json::from_str(config).unwrap();
        let strategy = config.build(&BuildContext::default())?;
        f(Fabric::new(world, strategy, ModuleInit::default(), 11)?)
    });
    ranks.unwrap()
}

/// Each rank's position along `data_parallel` and its first micro-batches, from `skip` on.
fn samples(config: &str, shuffle: bool, skip: u64) -> Vec<(usize, Vec<Vec<u64>>)> {
    on_ranks(config, |fabric| {
        let mut loader = fabric.setup_data::<Numbers>(&NumbersConfig { shuffle })?;
        loader.skip_to(skip);
        let batches =
            loader.take(7).map(|batch| Ok(batch?.into_parts().0)).collect::<Result<_>>()?;
        Ok((fabric.device_mesh().local_rank(DATA_PARALLEL)?, batches))
    })
}

/// The number of ranks with different data, and the mesh.
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

// checklist: Lightning: distributed_sampler_kwargs
#[test]
fn only_data_parallel_ranks_see_other_samples() {
    for (replicas, config) in MESHES {
        for shuffle in [false, true] {
            let ranks = samples(config, shuffle, 0);
            let of = |place| &ranks.iter().find(|(p, _)| *p == place).expect("a rank").1;
            for (place, batches) in &ranks {
                assert_eq!(batches, of(*place), "{config}, shuffle {shuffle}");
            }
            // Seven micro-batches cross the end of an epoch on 2 or more replicas; within a step of
            // one epoch no sample is seen twice.
            for step in 0..7 {
                let all: Vec<u64> =
                    (0..replicas).flat_map(|place| of(place)[step].clone()).collect();
                let distinct: BTreeSet<u64> = all.iter().copied().collect();
                assert_eq!(all.len(), replicas * BATCH);
                let first = (step * replicas * BATCH) as u64;
                let crosses = first / SAMPLES != (first + all.len() as u64 - 1) / SAMPLES;
                assert!(crosses || distinct.len() == all.len(), "{config}, step {step}: {all:?}");
            }
            // An epoch covers every sample once.
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
fn a_resumed_loader_continues() {
    for (_, config) in MESHES {
        let whole = samples(config, true, 0);
        for ((_, whole), (_, rest)) in whole.iter().zip(samples(config, true, 4)) {
            assert_eq!(whole[4..], rest[..3], "{config}");
        }
    }
}

#[test]
fn workers_change_no_batch_and_no_scope() {
    for (_, config) in MESHES {
        on_ranks(config, |fabric| {
            let loader = || fabric.setup_data::<Numbers>(&NumbersConfig::default());
            let workers = Workers { num_workers: 3, prefetch_factor: 2 };
            let (mut here, mut ahead) = (loader()?, loader()?.with_workers(workers));
            for skip in [0, 5, 2] {
                here.skip_to(skip);
                ahead.skip_to(skip);
                for (here, ahead) in here.by_ref().zip(ahead.by_ref()).take(9) {
                    let (here, ahead) = (here?, ahead?);
                    assert_eq!(
                        here.forward(|batch| (batch.clone(), seen())),
                        ahead.forward(|batch| (batch.clone(), seen()))
                    );
                }
            }
            Ok(())
        });
    }
}

/// The forward scope that layers see: whether it trains, its step and first sample, and the size of
/// the group that shares a sequence.
fn seen() -> (bool, u64, u64, Option<usize>) {
    let scope = ForwardScope::current();
    (scope.training, scope.step, scope.first_sample, scope.context.map(|context| context.size()))
}

#[test]
fn a_batch_has_its_own_scope_on_any_thread() {
    let (_, config) = MESHES[1];
    let evaluation = (false, 0, 0, None);
    let ranks = on_ranks(config, |fabric| {
        let mut loader = fabric.setup_data::<Numbers>(&NumbersConfig::default())?;
        let (first, mut loader) = std::thread::scope(|threads| {
            let prefetch = move || (loader.next().expect("an endless stream"), loader);
            threads.spawn(prefetch).join().expect("does not panic")
        });
        let (first, second) = (first?, loader.next().expect("an endless stream")?);
        assert_eq!(seen(), evaluation, "taking a batch enters nothing");
        let nested = second.forward(|_| [seen(), first.forward(|_| seen()), seen()]);
        let elsewhere = std::thread::scope(|threads| {
            threads.spawn(|| first.forward(|_| seen())).join().expect("does not panic")
        });
        assert_eq!(seen(), evaluation);
        Ok((fabric.device_mesh().local_rank(DATA_PARALLEL)?, nested, elsewhere))
    });
    for (place, [outer, inner, outer_again], elsewhere) in ranks {
        let at = |step| (true, step, (place * BATCH) as u64, Some(2));
        assert_eq!([outer, inner, outer_again], [at(2), at(1), at(2)]);
        assert_eq!(elsewhere, at(1));
    }
}

#[test]
fn loaders_dropped_in_any_order_leave_no_scope() {
    let (_, config) = MESHES[0];
    on_ranks(config, |fabric| {
        let loader = || fabric.setup_data::<Numbers>(&NumbersConfig::default());
        let (mut first, mut second) = (loader()?, loader()?);
        let batches = [first.next(), second.next()];
        drop(first);
        drop(second);
        drop(batches);
        assert_eq!(seen(), (false, 0, 0, None));
        Ok(())
    });
}

#[test]
fn a_loss_outside_its_batchs_scope_is_refused() {
    let (_, config) = MESHES[3];
    let errors = on_ranks(config, |fabric| {
        let batch = fabric.setup_data::<Numbers>(&NumbersConfig::default())?.next();
        let batch = batch.expect("an endless stream")?;
        let loss =
            || Ok::<_, fulgurite_core::Error>(Loss::new(Tensor::new(1f32, &Device::Cpu)?, 1.0));
        let error = |loss: &Loss| fabric.backward(loss).unwrap_err().to_string();
        Ok((error(&loss()?), error(&batch.forward(|_| loss())?)))
    });
    for (outside, inside) in errors {
        assert_says!(outside, "4 ranks … outside of any forward …");
        assert_says!(inside, "no model … set up … `Fabric::setup` …");
    }
}
