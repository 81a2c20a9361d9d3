//! Independent replicas: compared with a DiLoCo simulation on one process; their communication and
//! checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::checkpoint::{
    DistributedCheckpoint, GatherOptions, TensorMap, TensorSource as _,
};
use fulgurite_core::collective::{Counter, ProcessGroup, Record, Solo, all_gather_object};
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::mesh::{DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD};
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, Unit};
use fulgurite_core::nn::{BatchNorm, BatchNormConfig, Linear, Loss};
use fulgurite_core::optim::{Adafactor, AdamW, Muon, OptimizerConfig, Sgd};
use fulgurite_core::strategy::{BuildContext, StrategyConfig};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::strategy;
use fulgurite_transports::run_ranks;

/// Rows of a replica's batch.
const ROWS: usize = 5;
const WIDTH: usize = 6;

struct Network {
    blocks: Vec<Unit<Linear>>,
    head: Linear,
    norm: Option<BatchNorm>,
}

impl Network {
    fn new(b: &ModuleBuilder, norm: Option<BatchNormConfig>) -> Result<Self> {
        let block = |b: &ModuleBuilder| Linear::with_bias(b, WIDTH, WIDTH);
        Ok(Self {
            blocks: (0..2).map(|i| b.unit(&format!("blocks.{i}"), block)).collect::<Result<_>>()?,
            head: Linear::with_bias(&b.pp("head"), WIDTH, 3)?,
            norm: norm.map(|config| BatchNorm::with(&b.pp("norm"), WIDTH, config)).transpose()?,
        })
    }

    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let mut h = x.clone();
        for block in &self.blocks {
            h = block.call(&h, |block, h| Ok(block.forward(h)?.tanh()?))?;
        }
        if let Some(norm) = &self.norm {
            h = norm.forward(&h)?;
        }
        let target = x.narrow(1, 0, 3)?;
        Ok(Loss::new((self.head.forward(&h)? - target)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

/// A replica's batch in a step.
fn batch(step: u64, replica: usize) -> Result<Tensor> {
    let value =
        |i: usize| ((i as u64 * 37 + step * 11 + replica as u64 * 29) % 101) as f32 * 0.02 - 0.8;
    let values: Vec<f32> = (0..ROWS * WIDTH).map(value).collect();
    Ok(Tensor::from_vec(values, (ROWS, WIDTH), &Device::Cpu)?)
}

struct Training {
    fabric: Fabric,
    model: Network,
    optimizer: FabricOptimizer,
    step: u64,
    /// This rank's replica, and its rows of the replica's batch.
    replica: usize,
    rows: [usize; 2],
}

impl Training {
    fn new(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        optimizer: &dyn OptimizerConfig,
    ) -> Result<Self> {
        Self::with_norm(world, config, optimizer, None)
    }

    fn with_norm(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        optimizer: &dyn OptimizerConfig,
        norm: Option<BatchNormConfig>,
    ) -> Result<Self> {
        let init = ModuleInit { frozen: vec!["blocks.1.bias".to_owned()], ..ModuleInit::default() };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 7)?;
        let (model, optimizer) = fabric.setup(|b| Network::new(b, norm), optimizer)?;
        let mesh = fabric.device_mesh();
        let replica = mesh.coordinate(DATA_PARALLEL_REPLICATE);
        // Unequal parts: 5 rows over 2 ranks are 2 and 3.
        let (rank, ranks) = (mesh.coordinate(DATA_PARALLEL_SHARD), mesh.size(DATA_PARALLEL_SHARD)?);
        let [first, end] = [rank * ROWS / ranks, (rank + 1) * ROWS / ranks];
        let rows = [first, end - first];
        Ok(Self { fabric, model, optimizer, step: 0, replica, rows })
    }

    /// Takes a step, in two micro-batches without batch norms. Returns the loss of all replicas
    /// before it, and the gradient norm.
    fn step(&mut self) -> Result<(f64, f64)> {
        let x = batch(self.step, self.replica)?.narrow(0, self.rows[0], self.rows[1])?;
        let parts = match self.model.norm {
            None => vec![[0, 1], [1, self.rows[1] - 1]],
            Some(_) => vec![[0, self.rows[1]]],
        };
        for (micro, rows) in parts.iter().enumerate() {
            let _no_sync = self.fabric.no_backward_sync(micro + 1 < parts.len());
            let _scope = self.fabric.forward_scope(true, self.step, 0);
            self.fabric.backward(&self.model.loss(&x.narrow(0, rows[0], rows[1])?)?)?;
        }
        let loss = self.fabric.step_totals(&[])?.mean();
        let norm = self.optimizer.gradient_norm()?;
        self.optimizer.step()?;
        self.step += 1;
        Ok((loss, norm))
    }

    fn steps(&mut self, n: u64) -> Result<Vec<(f64, f64)>> {
        (0..n).map(|_| self.step()).collect()
    }

    /// The whole parameters, on rank 0; synchronises the replicas.
    fn weights(&self) -> Result<Values> {
        let whole = self.fabric.full_state().model_state_dict(&GatherOptions::default())?;
        whole.into_iter().map(|(fqn, t)| Ok((fqn, numbers(&t)?))).collect()
    }

    /// This rank's parts of the parameters, unsynchronised.
    fn local(&self) -> Result<Vec<Vec<f32>>> {
        let parameters = self.fabric.module_tree()?.parameters().iter();
        parameters.map(|p| numbers(&p.local()?.values)).collect()
    }

    fn save(&mut self, path: &Path) -> Result<()> {
        let step = self.step;
        self.fabric.save(path, &mut self.optimizer, &step).map(drop)
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        self.step = self.fabric.load(path, Some(&mut self.optimizer))?;
        Ok(())
    }
}

type Values = BTreeMap<String, Vec<f32>>;

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_vec1()?)
}

/// Rank 0's result of a training on this many ranks.
fn on<T: Send>(
    ranks: usize,
    config: &str,
    optimizer: &(dyn OptimizerConfig + Sync),
    run: impl Fn(Training) -> Result<T> + Sync,
) -> T {
    let mut all = run_ranks(ranks, |world| run(Training::new(world, config, optimizer)?))
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    all.swap_remove(0)
}

fn adamw() -> AdamW {
    AdamW { lr: 0.02, weight_decay: 0.1, ..AdamW::default() }
}

/// `diloco` with this many ranks per replica.
fn diloco(shards: usize, options: &str) -> String {
    format!(r#"{{"type": "diloco", "data_parallel_shard_size": {shards}, {options}}}"#)
}

const AVERAGE: &str = r#""outer": {"lr": 1.0, "momentum": 0.0}"#;

fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs().max(1e-2), "{what}, {i}: {a} and {b}");
    }
}

fn assert_same_weights(what: &str, got: &Values, want: &Values, tolerance: f64) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{what}");
    let wide = |values: &Vec<f32>| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    for (fqn, values) in got {
        assert_close(&format!("{what}: {fqn}"), &wide(values), &wide(&want[fqn]), tolerance);
    }
}

fn losses(steps: &[(f64, f64)]) -> Vec<f64> {
    steps.iter().map(|(loss, _)| *loss).collect()
}

/// Simulates DiLoCo with `replicas` single-process runs. Returns the losses, and the weights after
/// a last synchronisation.
fn simulate(
    replicas: usize,
    [steps, sync_every]: [u64; 2],
    [lr, momentum]: [f64; 2],
    nesterov: bool,
) -> (Vec<f64>, Values) {
    let simulation = || -> Result<_> {
        let mut all = Vec::new();
        for replica in 0..replicas {
            let world: Arc<dyn ProcessGroup> = Arc::new(Solo::new("world", 0));
            let mut one = Training::new(world, r#"{"type": "single_device"}"#, &adamw())?;
            one.replica = replica;
            all.push(one);
        }
        let mut synced = all[0].weights()?;
        let shapes: BTreeMap<String, Vec<usize>> = {
            let parameters = all[0].fabric.module_tree()?.parameters();
            parameters.iter().map(|p| (p.fqn().to_owned(), p.global_shape().to_vec())).collect()
        };
        let mut buffers: BTreeMap<String, Vec<f64>> =
            synced.iter().map(|(fqn, values)| (fqn.clone(), vec![0.0; values.len()])).collect();
        let mut losses = Vec::new();
        for step in 1..=steps {
            let own = all.iter_mut().map(|one| Ok(one.step()?.0)).collect::<Result<Vec<f64>>>()?;
            losses.push(own.iter().sum::<f64>() / replicas as f64);
            if step % sync_every != 0 && step != steps {
                continue;
            }
            let local = all.iter().map(Training::weights).collect::<Result<Vec<_>>>()?;
            for (fqn, values) in &mut synced {
                for (i, value) in values.iter_mut().enumerate() {
                    let wide = f64::from(*value);
                    let sum: f64 = local.iter().map(|of| wide - f64::from(of[fqn][i])).sum();
                    let grad = sum / replicas as f64;
                    let buffer = &mut buffers.get_mut(fqn).unwrap()[i];
                    *buffer = *buffer * momentum + grad;
                    let direction = if nesterov { grad + momentum * *buffer } else { *buffer };
                    *value = (wide - lr * direction) as f32;
                }
            }
            let tensor = |(fqn, values): (&String, &Vec<f32>)| {
                let shape = shapes[fqn].as_slice();
                Ok((fqn.clone(), Tensor::from_vec(values.clone(), shape, &Device::Cpu)?))
            };
            let tensors = synced.iter().map(tensor).collect::<Result<BTreeMap<_, _>>>()?;
            let source = TensorMap::from(tensors);
            for one in &all {
                one.fabric.full_state().load_model_state_dict(&source, true)?;
            }
        }
        Ok((losses, synced))
    };
    simulation().unwrap()
}

#[test]
fn it_trains_as_the_simulation_does() {
    let outers = [([0.7, 0.9], true), ([0.5, 0.8], false), ([1.0, 0.0], false)];
    for ([lr, momentum], nesterov) in outers {
        // The last synchronisation, at the end, comes after 2 steps.
        let (want, weights) = simulate(2, [11, 3], [lr, momentum], nesterov);
        assert!(want[10] < 0.8 * want[0], "{want:?}");
        let outer = format!(
            r#""sync_every": 3, "outer": {{"lr": {lr}, "momentum": {momentum}, "nesterov": {nesterov}}}"#
        );
        for (ranks, shards) in [(2, 1), (4, 2)] {
            let config = diloco(shards, &outer);
            let (steps, got) = on(ranks, &config, &adamw(), |mut training| {
                Ok((training.steps(11)?, training.weights()?))
            });
            assert_close(&config, &losses(&steps), &want, 2e-5);
            assert_same_weights(&config, &got, &weights, 1e-4);
        }
    }
}

#[test]
fn one_replica_takes_outer_steps_too() {
    let (want, weights) = simulate(1, [7, 2], [0.7, 0.9], true);
    for (ranks, shards) in [(1, 1), (2, 2)] {
        let config = diloco(shards, r#""sync_every": 2"#);
        let (steps, got) = on(ranks, &config, &adamw(), |mut training| {
            Ok((training.steps(7)?, training.weights()?))
        });
        assert_close(&config, &losses(&steps), &want, 2e-5);
        assert_same_weights(&config, &got, &weights, 1e-4);
    }
}

#[test]
fn averaged_sgd_steps_equal_averaged_gradients() {
    let sgd = Sgd { lr: 0.1, ..Sgd::default() };
    let meshes = [
        (2, 1, r#"{"type": "ddp"}"#),
        (3, 1, r#"{"type": "ddp"}"#),
        (4, 2, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#),
    ];
    for (ranks, shards, other) in meshes {
        let run = |mut training: Training| Ok((training.steps(8)?, training.weights()?));
        let (want, weights) = on(ranks, other, &sgd, run);
        let config = diloco(shards, &format!(r#""sync_every": 1, {AVERAGE}"#));
        let (got, averaged) = on(ranks, &config, &sgd, run);
        assert_close(&config, &losses(&got), &losses(&want), 1e-6);
        assert_same_weights(&config, &averaged, &weights, 1e-5);
    }
}

#[test]
fn warm_up_steps_equal_one_training() {
    let meshes = [
        (2, 1, r#"{"type": "ddp"}"#),
        (4, 2, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#),
    ];
    for (ranks, shards, other) in meshes {
        let want = on(ranks, other, &adamw(), |mut training| training.steps(6));
        let config = diloco(shards, r#""sync_every": 2, "warmup_steps": 4"#);
        let got = on(ranks, &config, &adamw(), |mut training| training.steps(6));
        // The fifth step starts from the weights after four steps, but its norm comes from
        // independent replicas.
        assert_eq!(got[..4], want[..4], "{config}");
        assert_eq!(got[4].0, want[4].0, "{config}");
        assert_ne!(got[4].1, want[4].1, "{config}");
        assert_ne!(got[5].0, want[5].0, "{config}");
    }
}

#[test]
fn replicas_differ_only_between_synchronisations() {
    let config = diloco(1, r#""sync_every": 3, "warmup_steps": 2"#);
    let same = on(2, &config, &adamw(), |mut training| {
        let mut same = Vec::new();
        for _ in 0..9 {
            training.step()?;
            let all = all_gather_object(&**training.fabric.world(), &training.local()?)?;
            same.push(all[0] == all[1]);
        }
        Ok(same)
    });
    assert_eq!(same, [true, true, false, false, true, false, false, true, false]);
}

/// Rank 0's sent data in each step, by group and collective.
fn tallies(
    ranks: usize,
    config: &str,
    steps: usize,
) -> Vec<BTreeMap<(String, &'static str), Record>> {
    let mut all = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mut training = Training::new(world, config, &adamw())?;
        let mut tallies = Vec::new();
        for _ in 0..steps {
            counter.reset();
            training.step()?;
            tallies.push(counter.snapshot());
        }
        Ok(tallies)
    })
    .unwrap();
    all.swap_remove(0)
}

#[test]
fn replicas_send_nothing_between_syncs() {
    // Two blocks of 6 · 6 + 6 and a head of 3 · 6 + 3, minus a frozen bias.
    let trained = 2 * 42 + 21 - 6;
    for (ranks, shards) in [(2, 1), (4, 2)] {
        let steps = tallies(ranks, &diloco(shards, r#""sync_every": 3, "warmup_steps": 1"#), 7);
        // On the first of two shards the head's 3 rows are 2, and the blocks' 6 rows are 3.
        let elements = if shards == 1 { trained } else { 3 * 6 + 3 + 3 * 6 + 2 * 6 + 2 };
        // Loss and count over all ranks; these are the replicas if each has one rank.
        let numbers = Record { calls: 1, bytes: 16 };
        let totals = "dp_cp";
        for (i, tally) in steps.iter().enumerate() {
            let sent = |group: &str| {
                let records = tally.iter().filter(|((of, _), _)| of == group);
                let records = records.map(|(_, record)| *record);
                records.fold(Record::default(), |a, b| Record {
                    calls: a.calls + b.calls,
                    bytes: a.bytes + b.bytes,
                })
            };
            let mut replicate = sent("data_parallel_replicate");
            if shards == 1 {
                replicate.calls -= numbers.calls;
                replicate.bytes -= numbers.bytes;
            } else {
                assert_eq!(sent(totals), numbers, "step {i}: {tally:?}");
            }
            match i {
                // Gradients, during the warm-up.
                0 => assert_eq!(replicate.bytes, 4 * elements),
                3 | 6 => {
                    assert_eq!(replicate, Record { calls: 1, bytes: 4 * elements }, "step {i}")
                }
                _ => assert_eq!(replicate, Record::default(), "step {i}: {tally:?}"),
            }
            // The gradient norm; in the first step also the audit of gradients.
            if i > 0 {
                assert_eq!(sent("world"), Record { calls: 1, bytes: 8 }, "step {i}: {tally:?}");
            }
        }
    }
}

/// Saves after `steps`, continues for 5, and repeats these from the checkpoint on another mesh.
fn resumed(
    steps: u64,
    [ranks, other_ranks]: [usize; 2],
    [config, other]: [&str; 2],
) -> [(Vec<(f64, f64)>, Values); 2] {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("saved");
    let uninterrupted = on(ranks, config, &adamw(), |mut training| {
        training.steps(steps)?;
        training.save(&path)?;
        Ok((training.steps(5)?, training.weights()?))
    });
    let resumed = on(other_ranks, other, &adamw(), |mut training| {
        training.load(&path)?;
        // A save before the first step changes nothing.
        training.save(&path)?;
        Ok((training.steps(5)?, training.weights()?))
    });
    [uninterrupted, resumed]
}

#[test]
fn a_training_resumes_to_the_bit() {
    // In the warm-up, after one independent step, at a synchronisation, and between two.
    for (ranks, shards) in [(2, 1), (3, 1), (4, 2)] {
        let config = diloco(shards, r#""sync_every": 3, "warmup_steps": 2"#);
        for steps in [1, 3, 5, 6] {
            let [uninterrupted, resumed] = resumed(steps, [ranks; 2], [&config; 2]);
            assert_eq!(uninterrupted, resumed, "{config}, after {steps} steps");
        }
    }
}

#[test]
fn a_training_resumes_on_other_shards() {
    let [one, two] = [1, 2].map(|shards| diloco(shards, r#""sync_every": 3"#));
    for steps in [3, 4] {
        for (ranks, configs) in [([2, 4], [&*one, &*two]), ([4, 2], [&*two, &*one])] {
            let [want, got] = resumed(steps, ranks, configs);
            assert_close("losses", &losses(&got.0), &losses(&want.0), 2e-5);
            assert_same_weights("weights", &got.1, &want.1, 1e-4);
        }
    }
}

#[test]
fn other_replica_counts_resume_the_same_values() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("saved");
    let config = diloco(1, r#""sync_every": 3"#);
    let saved = on(2, &config, &adamw(), |mut training| {
        training.steps(4)?;
        training.save(&path)?;
        training.weights()
    });
    for ranks in [1, 3] {
        let (weights, steps) = on(ranks, &config, &adamw(), |mut training| {
            training.load(&path)?;
            Ok((training.weights()?, training.steps(7)?))
        });
        assert_eq!(weights, saved, "{ranks}");
        assert!(steps.iter().all(|(loss, norm)| loss.is_finite() && *norm > 0.0), "{steps:?}");
    }
}

#[test]
fn checkpoints_load_across_strategies() {
    let mine = diloco(1, r#""sync_every": 2"#);
    for (from, to) in [(&*mine, r#"{"type": "fsdp"}"#), (r#"{"type": "ddp"}"#, &*mine)] {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("saved");
        let saved = on(2, from, &adamw(), |mut training| {
            training.steps(4)?;
            training.save(&path)?;
            training.weights()
        });
        let (weights, steps) = on(2, to, &adamw(), |mut training| {
            training.load(&path)?;
            Ok((training.weights()?, training.steps(3)?))
        });
        assert_eq!(weights, saved, "{to}");
        assert!(steps.iter().all(|(loss, _)| loss.is_finite()), "{to}: {steps:?}");
    }
}

#[test]
fn parameters_in_bf16_have_outer_state_in_f32() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("saved");
    let config = diloco(1, r#""sync_every": 2, "outer": {"lr": 0.3, "momentum": 0.9}"#);
    let run = |world: Arc<dyn ProcessGroup>| -> Result<Training> {
        let init = ModuleInit { dtype: candle_core::DType::BF16, ..ModuleInit::default() };
        let mut fabric = Fabric::new(world, strategy(&config)?, init, 7)?;
        let (model, optimizer) = fabric.setup(|b| Network::new(b, None), &adamw())?;
        let replica = fabric.device_mesh().coordinate(DATA_PARALLEL_REPLICATE);
        Ok(Training { fabric, model, optimizer, step: 0, replica, rows: [0, ROWS] })
    };
    let went_on = run_ranks(2, |world| {
        let mut training = run(world)?;
        training.steps(5)?;
        training.save(&path)?;
        training.steps(5)
    })
    .unwrap();
    let resumed = run_ranks(2, |world| {
        let mut training = run(world)?;
        training.load(&path)?;
        training.steps(5)
    })
    .unwrap();
    assert_eq!(went_on, resumed);
    assert!(went_on[0][4].0.is_finite());
    let saved = DistributedCheckpoint::open(&path).unwrap();
    let states = saved.optimizer();
    let outer = states.names().into_iter().filter(|name| name.ends_with("strategy_outer_momentum"));
    let dtypes: Vec<_> =
        outer.map(|name| format!("{:?}", states.info(name).unwrap().dtype)).collect();
    assert!(!dtypes.is_empty() && dtypes.iter().all(|dtype| dtype == "F32"), "{dtypes:?}");
}

#[test]
fn buffers_are_synchronised_with_the_parameters() {
    let norm = BatchNormConfig { synchronised: Some(false), ..BatchNormConfig::default() };
    let config = diloco(2, r#""sync_every": 2"#);
    let all = run_ranks(4, |world| {
        let mut training = Training::with_norm(world, &config, &adamw(), Some(norm))?;
        let mut means = Vec::new();
        for step in 0..5 {
            training.step()?;
            if step == 4 {
                training.fabric.full_state().model_state_dict(&GatherOptions::default())?;
            }
            let buffers = training.fabric.module_tree()?.buffers();
            let mean = buffers.iter().find(|b| b.fqn().ends_with("running_mean")).unwrap();
            means.push(numbers(&mean.value()?)?);
        }
        Ok(means)
    })
    .unwrap();
    let by_step = (0..5).map(|step| all.iter().map(|means| &means[step]).collect::<Vec<_>>());
    for (step, means) in by_step.enumerate() {
        // Ranks of one replica are equal after every step.
        assert_eq!([means[0], means[2]], [means[1], means[3]], "{step}");
        assert_eq!(means[0] == means[2], [1, 3, 4].contains(&step), "{step}");
    }
}

/// The error message of a configuration on this many ranks.
fn refused(ranks: usize, options: &str) -> String {
    let config: Box<dyn StrategyConfig> =
        match serde_json::from_str(&format!(r#"{{"type": "diloco", {options}}}"#)) {
            Ok(config) => config,
            Err(error) => return error.to_string(),
        };
    match config.build(&BuildContext::new(ranks)) {
        Ok(strategy) => panic!("{options}: {} was built", strategy.name()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn options_out_of_range() {
    assert_says!(refused(2, r#""sync_every": 0"#), "`trainer.strategy.sync_every` = 0 … least 1 …");
    assert_says!(refused(2, r#""outer": {"lr": 0.0}"#), "`trainer.strategy.outer.lr` = 0 … than 0");
    assert_says!(
        refused(2, r#""outer": {"momentum": 1.0}"#),
        "`trainer.strategy.outer.momentum` = 1 … from 0 on and less than 1"
    );
    assert_says!(refused(2, r#""outer": {"beta": 1.0}"#), "unknown field `beta` … `momentum` …");
    assert_says!(refused(4, r#""data_parallel_shard_size": 3"#), "device mesh … divide … (4) …");
    assert_says!(
        refused(4, r#""data_parallel_shard_size": 2, "data_parallel_replicate_size": 3"#),
        "device mesh … `data_parallel_replicate_size=3` … (6) should equal … (4) …"
    );
}

#[test]
fn synchronised_batch_norms_are_refused() {
    let norm = BatchNormConfig { synchronised: Some(true), ..BatchNormConfig::default() };
    let config = diloco(1, r#""sync_every": 2"#);
    let refused = run_ranks(2, |world| -> Result<()> {
        Training::with_norm(world, &config, &adamw(), Some(norm)).map(drop)
    });
    assert_says!(refused.unwrap_err(), "strategy `diloco` … of all ranks … `synchronised` …");
}

/// An optimizer of whole tensors communicates within its replica only.
#[test]
fn whole_tensor_optimizers_stay_in_their_replica() {
    let muon = Muon { lr: 0.05, ..Muon::default() };
    let adafactor = Adafactor { lr: 0.05, ..Adafactor::default() };
    let optimizers: [&(dyn OptimizerConfig + Sync); 2] = [&muon, &adafactor];
    for optimizer in optimizers {
        let trained = |shards: usize| {
            let config = diloco(shards, &format!(r#""sync_every": 3, {AVERAGE}"#));
            on(2 * shards, &config, optimizer, |mut training| {
                let steps = training.steps(7)?;
                Ok((losses(&steps), training.weights()?))
            })
        };
        let (one, two) = (trained(1), trained(2));
        assert_close("losses", &two.0, &one.0, 1e-4);
        assert_same_weights("weights", &two.1, &one.1, 1e-3);
    }
}
