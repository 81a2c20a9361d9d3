//! Experts that ranks divide among each other, against one device.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{Counter, Record, all_gather_object};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::DP_CP;
use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit, Unit};
use fulgurite_core::nn::{
    CorrectionBias, Embedding, ExpertGroups, Linear, Loss, MixtureOfExperts,
    MixtureOfExpertsConfig, RouterConfig, RouterScore, SharedExpertConfig, cross_entropy,
    load_balancing_loss,
};
use fulgurite_core::optim::{OptimizerConfig, Sgd};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_test_support::training::{gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const VOCABULARY: usize = 11;
const WIDTH: usize = 6;
const EXPERTS: usize = 4;
const ROWS: usize = 24;
const STEPS: u64 = 5;
const ALONE: &str = r#"{"type": "single_device"}"#;

/// The rows of each rank in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    /// Different numbers for each rank.
    Uneven,
    /// The first rank has all of them.
    OfOneRank,
    /// All rows have the same token, so two experts of a layer have all of them.
    Equal,
    /// One row in all.
    One,
}

impl Rows {
    fn ids(self, step: u64) -> Vec<u32> {
        let stream = Stream::new(3, Purpose::Sample, "experts").child(step);
        let rows = if self == Self::One { 1 } else { ROWS };
        let draw = |i: usize| match self {
            Self::Equal => 4,
            _ => stream.word(i as u64) % VOCABULARY as u32,
        };
        (0..rows).map(draw).collect()
    }

    /// The rows of rank `rank` of `size`.
    fn of(self, rank: usize, size: usize) -> std::ops::Range<usize> {
        let rows = if self == Self::One { 1 } else { ROWS };
        let end = |ranks: usize| match self {
            Self::OfOneRank => rows * ranks.min(1),
            // 1 + 2 + … parts.
            _ => rows * ranks * (ranks + 1) / (size * (size + 1)),
        };
        end(rank)..end(rank + 1)
    }
}

struct Model {
    embed: Embedding,
    layers: Vec<Unit<MixtureOfExperts>>,
    head: Linear,
}

/// How experts are balanced.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Balance {
    None,
    Loss,
    Bias,
    Capacity,
}

impl Model {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Self::balanced(b, Balance::None)
    }

    fn balanced(b: &ModuleBuilder, balance: Balance) -> Result<Self> {
        b.synchronise_batches();
        let sizes = MixtureOfExpertsConfig::new([WIDTH, 10], EXPERTS, 2);
        let config = match balance {
            Balance::None | Balance::Loss => sizes,
            Balance::Capacity => MixtureOfExpertsConfig { capacity_factor: Some(0.5), ..sizes },
            Balance::Bias => MixtureOfExpertsConfig {
                router: RouterConfig {
                    score: RouterScore::Sigmoid,
                    groups: Some(ExpertGroups { count: 2, per_row: 1 }),
                    correction: Some(CorrectionBias { update_rate: 0.05 }),
                    ..RouterConfig::default()
                },
                shared: Some(SharedExpertConfig { intermediate_size: 6, gated: true }),
                ..sizes
            },
        };
        let layer = |i| b.unit(&format!("layers.{i}"), |b| MixtureOfExperts::new(b, &config));
        Ok(Self {
            embed: Embedding::new(&b.pp("embed"), VOCABULARY, WIDTH)?,
            layers: (0..2).map(layer).collect::<Result<_>>()?,
            head: Linear::new(&b.pp("head"), WIDTH, VOCABULARY)?,
        })
    }

    /// The logits of the head and of the routers.
    fn forward(&self, ids: &Tensor) -> Result<(Tensor, Vec<Tensor>)> {
        let mut x = self.embed.forward(ids)?;
        let mut routers = Vec::new();
        for layer in &self.layers {
            let (y, logits) = layer.call(&x, |layer, x| layer.forward_with_logits(x))?;
            x = (x + y)?;
            routers.push(logits);
        }
        Ok((self.head.forward(&x)?, routers))
    }
}

/// The outcome of a training on any ranks.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    /// The bits of the first step's logits, row by row, where products do not depend on the number
    /// of rows.
    logits: Vec<u32>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
    /// The bits of the correction biases after each step.
    biases: Vec<Vec<u32>>,
}

fn train(ranks: usize, config: &str, rows: Rows, balance: Balance) -> Result<Run> {
    let mut runs = run_ranks(ranks, |world| {
        let init = ModuleInit { compute_dtype: DType::F32, ..init(config)? };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 5)?;
        let optimizer = Sgd { lr: 0.3, momentum: 0.9, ..Sgd::default() };
        let (model, mut optimizer) =
            fabric.setup(|b| Model::balanced(b, balance), &optimizer as &dyn OptimizerConfig)?;
        let (rank, size) = {
            let ranks = fabric.device_mesh().group(DP_CP)?;
            (ranks.rank(), ranks.size())
        };
        let (mut losses, mut norms, mut first) = (Vec::new(), Vec::new(), Vec::new());
        let mut biases = Vec::new();
        for step in 0..STEPS {
            let ids = rows.ids(step);
            let own = rows.of(rank, size);
            let ids = Tensor::from_slice(&ids[own.clone()], own.len(), &Device::Cpu)?;
            // A rank without rows has one that does not count.
            let (ids, targets) = match own.len() {
                0 => (Tensor::new(&[0u32], &Device::Cpu)?, Tensor::new(&[-100i64], &Device::Cpu)?),
                _ => (ids.clone(), ids.to_dtype(DType::I64)?),
            };
            let _scope = fabric.forward_scope(true, step, own.start as u64);
            if step == 0 {
                let invariant = ForwardScope { batch_invariant: true, ..ForwardScope::current() };
                let _no_grad = no_grad();
                let (logits, _) = invariant.run(|| model.forward(&ids))?;
                first = logits.narrow(0, 0, own.len())?.flatten_all()?.to_vec1::<f32>()?;
            }
            let (logits, routers) = model.forward(&ids)?;
            let mut loss = cross_entropy(&logits, &targets)?;
            if balance == Balance::Loss {
                let balance = load_balancing_loss(&routers, 2, own.len() as f64)?;
                loss = Loss::new((loss.sum() + (balance * 0.1)?)?, loss.count());
            }
            fabric.backward(&loss)?;
            losses.push(fabric.step_totals(&[])?.mean());
            norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0)?);
            optimizer.step()?;
            let mut bits = Vec::new();
            for buffer in fabric.module_tree()?.buffers() {
                bits.extend(buffer.value()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits));
            }
            biases.push(bits);
        }
        let ranks = fabric.device_mesh().group(DP_CP)?;
        let bits: Vec<u32> = first.into_iter().map(f32::to_bits).collect();
        let logits = all_gather_object(&**ranks, &bits)?.concat();
        let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
        Ok(Run { logits, losses, norms, weights, biases })
    })?;
    assert!(runs.iter().all(|run| *run == runs[0]), "{config}: ranks differ: {runs:?}");
    Ok(runs.swap_remove(0))
}

fn assert_close(what: &str, found: &[f64], expected: &[f64]) {
    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs().max(1e-2);
    assert!(found.iter().zip(expected).all(close), "{what}: {found:?}, expected {expected:?}");
}

/// The meshes, with their numbers of ranks. Experts are divided over 2 and over 4 ranks.
fn meshes() -> Vec<(usize, String)> {
    [
        (2, r#""expert_parallel_size": 2"#),
        (4, r#""expert_parallel_size": 4"#),
        (4, r#""expert_parallel_size": 2"#),
        (4, r#""expert_parallel_size": 2, "data_parallel_replicate_size": 2"#),
        (4, r#""expert_parallel_size": 2, "reshard_after_forward": false, "prefetch": 2"#),
        (4, r#""expert_parallel_size": 4, "data_parallel_shard_size": 2, "context_parallel_size": 2"#),
        (4, r#""expert_parallel_size": 2, "tensor_parallel_size": 2, "parallelize": "none""#),
    ]
    .into_iter()
    .map(|(ranks, keys)| {
        let tensor = if keys.contains("tensor") { "" } else { r#", "tensor_parallel_size": 1"# };
        (ranks, format!(r#"{{"type": "model_parallel", {keys}{tensor}}}"#))
    })
    .collect()
}

#[test]
fn divided_experts_train_as_one_device() {
    for rows in [Rows::Uneven, Rows::OfOneRank, Rows::Equal, Rows::One] {
        let alone = train(1, ALONE, rows, Balance::None).unwrap();
        for (ranks, config) in meshes() {
            let what = format!("{config}, {rows:?}");
            let found = train(ranks, &config, rows, Balance::None).unwrap();
            assert_eq!(found.logits, alone.logits, "{what}");
            assert_close(&what, &found.losses, &alone.losses);
            assert_close(&what, &found.norms, &alone.norms);
            for (fqn, expected) in &alone.weights {
                let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                assert_close(
                    &format!("{what}: {fqn}"),
                    &wide(&found.weights[fqn]),
                    &wide(expected),
                );
            }
        }
    }
}

#[test]
fn balance_counts_the_rows_of_all_ranks() {
    let alone = train(1, ALONE, Rows::Uneven, Balance::Loss).unwrap();
    for (ranks, config) in meshes() {
        let found = train(ranks, &config, Rows::Uneven, Balance::Loss).unwrap();
        assert_close(&config, &found.losses, &alone.losses);
        assert_close(&config, &found.norms, &alone.norms);
    }
}

/// The bias follows from the loads of all ranks, to the bit, also where experts are not divided.
#[test]
fn loads_of_all_ranks_change_the_bias() {
    let alone = train(1, ALONE, Rows::Uneven, Balance::Bias).unwrap();
    let changed = |biases: &[u32]| biases.iter().any(|bits| f32::from_bits(*bits) != 0.0);
    assert!(alone.biases[0].len() == 2 * EXPERTS && changed(&alone.biases[0]));
    let whole = [
        (2, r#"{"type": "ddp"}"#),
        (3, r#"{"type": "fsdp"}"#),
        (2, r#"{"type": "fsdp", "activation_checkpointing": "full"}"#),
    ];
    let whole = whole.map(|(ranks, config)| (ranks, config.to_owned()));
    for (ranks, config) in meshes().into_iter().chain(whole) {
        let found = train(ranks, &config, Rows::Uneven, Balance::Bias).unwrap();
        assert_eq!(found.biases, alone.biases, "{config}");
        assert_close(&config, &found.losses, &alone.losses);
        assert_close(&config, &found.norms, &alone.norms);
    }
}

/// A frozen router keeps its bias, and evaluations count no rows.
#[test]
fn only_trained_routers_change_their_bias() {
    let init = ModuleInit { frozen: vec!["layers.0.gate".to_owned()], ..init(ALONE).unwrap() };
    run_ranks(1, |world| {
        let mut fabric = Fabric::new(world, strategy(ALONE)?, init.clone(), 5)?;
        let optimizer = Sgd { lr: 0.1, ..Sgd::default() };
        let build = |b: &ModuleBuilder| Model::balanced(b, Balance::Bias);
        let (model, mut optimizer) = fabric.setup(build, &optimizer as &dyn OptimizerConfig)?;
        let ids = Tensor::from_vec(Rows::Uneven.ids(0), ROWS, &Device::Cpu)?;
        {
            let _no_grad = no_grad();
            let _scope = fabric.forward_scope(false, 0, 0);
            model.forward(&ids)?;
        }
        assert_eq!(model.layers[0].module().load().take(), [0.0; EXPERTS]);
        let _scope = fabric.forward_scope(true, 0, 0);
        let loss = cross_entropy(&model.forward(&ids)?.0, &ids.to_dtype(DType::I64)?)?;
        let load = model.layers[0].module().load().take();
        assert_eq!(load.iter().sum::<f64>(), 2.0 * ROWS as f64);
        assert_eq!(model.layers[0].module().load().take(), [0.0; EXPERTS]);
        fabric.backward(&loss)?;
        optimizer.step()?;
        let tree = fabric.module_tree()?;
        let bias = |layer: usize| {
            let name = format!("layers.{layer}.gate.e_score_correction_bias");
            Ok::<_, fulgurite_core::Error>(tree.buffer(&name).unwrap().value()?.to_vec1::<f32>()?)
        };
        assert_eq!(bias(0)?, [0.0; EXPERTS]);
        assert!(bias(1)?.iter().any(|x| *x != 0.0));
        assert!(bias(1)?.iter().sum::<f32>().abs() < 1e-6);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_holds_its_experts_alone() {
    let config =
        r#"{"type": "model_parallel", "tensor_parallel_size": 1, "expert_parallel_size": 2}"#;
    run_ranks(4, |world| {
        let rank = world.rank();
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        fabric.setup_module(Model::new)?;
        let tree = fabric.module_tree()?;
        let gate = tree.parameter("layers.0.experts.gate_proj.weight").unwrap();
        // Ranks 0 and 2 have the experts 0 and 1. Each of the two holds one.
        assert_eq!(gate.compute_shape(), [2, 10, WIDTH]);
        let region = gate.local()?.region;
        assert_eq!((region.offsets[0], region.sizes[0]), ([0, 2, 1, 3][rank], 1));
        let router = tree.parameter("layers.0.gate.weight").unwrap();
        assert_eq!(
            (router.compute_shape(), router.local()?.region.sizes),
            (vec![4, WIDTH], vec![1, WIDTH])
        );
        Ok(())
    })
    .unwrap();
}

fn refusal(ranks: usize, keys: &str, build: fn(&ModuleBuilder) -> Result<()>) -> String {
    let config = format!(r#"{{"type": "model_parallel", "tensor_parallel_size": 1, {keys}}}"#);
    let result = run_ranks(ranks, |world| {
        let mut fabric = Fabric::new(world, strategy(&config)?, init(&config)?, 5)?;
        fabric.setup_module(build).map(drop)
    });
    result.unwrap_err().to_string()
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let model = |b: &ModuleBuilder| Model::new(b).map(drop);
    let error = refusal(2, r#""expert_parallel_size": 3"#, model);
    assert!(
        error.contains("`expert_parallel_size` = 3 must divide") && error.contains("1, 2"),
        "{error}"
    );
    let error = refusal(3, r#""expert_parallel_size": 3"#, model);
    assert!(error.contains("has 4 experts, which 3 ranks cannot divide"), "{error}");
    let error = refusal(2, r#""expert_parallel_size": 0"#, model);
    assert!(error.contains("`expert_parallel_size` = 0 must divide"), "{error}");
    let dense = |b: &ModuleBuilder| Linear::new(&b.pp("head"), 4, 4).map(drop);
    let error = refusal(2, r#""expert_parallel_size": 2, "allow_root_only": true"#, dense);
    assert!(error.contains("the model has no mixture of experts"), "{error}");
    let error = refusal(4, r#""expert_parallel_size": 2, "reshard_after_forward": 2"#, model);
    assert!(error.contains("neighbouring ranks, which have different experts"), "{error}");
    let error = refusal(2, r#""expert_parallel_size": 2, "ignored": ["experts"]"#, model);
    assert!(
        error.contains("`trainer.strategy.ignored` wants every rank to hold it whole"),
        "{error}"
    );
}

/// A forward sends rows and results, a backward weights, gradients of results and of rows, and of
/// weights; each of them for every choice that is not dropped.
#[test]
fn rows_travel_once_in_each_direction() {
    check_traffic(Rows::Uneven, Balance::None, 2 * ROWS);
    // Both experts take a quarter of the rows of each rank.
    check_traffic(Rows::Equal, Balance::Capacity, 2 * ROWS / 4);
}

#[track_caller]
fn check_traffic(rows: Rows, balance: Balance, choices: usize) {
    let config =
        r#"{"type": "model_parallel", "tensor_parallel_size": 1, "expert_parallel_size": 2}"#;
    let counted = run_ranks(2, |world| {
        let rank = world.rank();
        let counter = Counter::default();
        let mut fabric = Fabric::new(counter.watch(world), strategy(config)?, init(config)?, 5)?;
        let model = fabric.setup_module(|b| Model::balanced(b, balance))?;
        let own = rows.of(rank, 2);
        let ids = Tensor::from_slice(&rows.ids(0)[own.clone()], own.len(), &Device::Cpu)?;
        counter.reset();
        let _scope = fabric.forward_scope(true, 0, 0);
        let loss = cross_entropy(&model.forward(&ids)?.0, &ids.to_dtype(DType::I64)?)?;
        let forward = counter.get("expert_parallel", "all_to_all");
        fabric.backward(&loss)?;
        let gathers = counter.get("expert_parallel", "all_gather_into");
        Ok([forward, counter.get("expert_parallel", "all_to_all"), gathers])
    })
    .unwrap();
    let (layers, choices) = (2, choices as u64);
    let (row, numbers) = (4 * WIDTH as u64, 2 * 4 * (EXPERTS as u64 + 1));
    let sum = |of: usize| counted.iter().map(|of_rank| of_rank[of].bytes).sum::<u64>();
    assert!(counted.iter().all(|of_rank| of_rank[0].calls == 2 * layers));
    assert_eq!(sum(0), layers * 2 * choices * row);
    assert!(counted.iter().all(|of_rank| of_rank[1].calls == 6 * layers));
    assert_eq!(sum(1), layers * choices * (4 * row + 2 * 4));
    assert!(counted.iter().all(|of| of[2] == Record { calls: layers, bytes: layers * numbers }));
}

/// The logits' bits, loss and gradient norm of two sequences that ranks share.
fn train_sequences(ranks: usize, config: &str, rows: Rows) -> (Vec<u32>, [f64; 2]) {
    let mut runs = run_ranks(ranks, |world| {
        let init = ModuleInit { compute_dtype: DType::F32, ..init(config)? };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 5)?;
        let build = |b: &ModuleBuilder| Model::balanced(b, Balance::Capacity);
        let optimizer = Sgd { lr: 0.3, ..Sgd::default() };
        let (model, mut optimizer) = fabric.setup(build, &optimizer as &dyn OptimizerConfig)?;
        let ids = [0, 1].map(|step| rows.ids(step)[..16].to_vec()).to_vec();
        let context = fabric.context_parallel();
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let ids = context.as_ref().map_or(Ok(ids.clone()), |context| context.shard(&ids, 1))?;
        let _scope = fabric.forward_scope(true, 0, 0);
        let invariant = ForwardScope { batch_invariant: true, ..ForwardScope::current() };
        let logits = invariant.run(|| model.forward(&ids))?.0;
        let own = logits.detach();
        let whole = match &context {
            None => own,
            Some(context) => context.gather(&[&own])?.swap_remove(0),
        };
        let bits = whole.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect();
        fabric.backward(&cross_entropy(&logits, &ids.to_dtype(DType::I64)?)?)?;
        let loss = fabric.step_totals(&[])?.mean();
        Ok((bits, [loss, fabric.clip_gradients_norm(&mut optimizer, 1.0)?]))
    })
    .unwrap();
    assert!(runs.iter().all(|run| *run == runs[0]), "{config}: ranks differ: {runs:?}");
    runs.swap_remove(0)
}

/// With equal rows, two experts of a layer take the first quarter of each sequence: all rows of the
/// ranks that have the middle are dropped.
#[test]
fn capacities_are_of_whole_sequences() {
    for rows in [Rows::Equal, Rows::Uneven] {
        let alone = train_sequences(1, ALONE, rows);
        for (ranks, keys) in [
            (2, r#""context_parallel_size": 2"#),
            (4, r#""context_parallel_size": 4"#),
            (2, r#""context_parallel_size": 2, "expert_parallel_size": 2"#),
            (4, r#""context_parallel_size": 4, "expert_parallel_size": 2"#),
            (2, r#""context_parallel_size": 2, "activation_checkpointing": "full""#),
        ] {
            let config =
                format!(r#"{{"type": "model_parallel", "tensor_parallel_size": 1, {keys}}}"#);
            let found = train_sequences(ranks, &config, rows);
            assert_eq!(found.0, alone.0, "{keys}, {rows:?}");
            assert_close(keys, &found.1, &alone.1);
        }
    }
}
