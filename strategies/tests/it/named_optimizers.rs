//! Optimizers besides AdamW and SGD: the same bits and checkpoints on every mesh, and the
//! communication of those that compute with whole tensors.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::collective::{Counter, Record};
use fulgurite_core::module::{Adapters, ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::nn::{Embedding, Linear};
use fulgurite_core::optim::{
    Adafactor, Adagrad, Adam, AdjustLr, GradScale, Lion, Muon, MuonAdamW, OptimizerConfig, RmsProp,
    ScheduleFreeAdamW, StateDtype, UpdateRanks,
};
use fulgurite_core::parameter::Parameter;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

/// A mesh: ranks, strategy, plan.
type Mesh = (usize, &'static str, Variant);

const PLAIN: Variant = Variant::ALL[0];
const PARTS: Variant = Variant::ALL[3];

const ONE: Mesh = (1, r#"{"type": "single_device"}"#, PLAIN);
const FSDP_2: Mesh = (2, r#"{"type": "fsdp"}"#, PLAIN);
const DDP_2: Mesh = (2, r#"{"type": "ddp"}"#, PLAIN);
const FSDP_TP: Mesh = (4, r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#, PARTS);
const MESHES: [Mesh; 11] = [
    ONE,
    (1, r#"{"type": "fsdp"}"#, PLAIN),
    DDP_2,
    (4, r#"{"type": "ddp"}"#, PLAIN),
    FSDP_2,
    (3, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#, PLAIN),
    (2, r#"{"type": "tp", "tensor_parallel_size": 2}"#, PARTS),
    (4, r#"{"type": "tp", "tensor_parallel_size": 4}"#, PLAIN),
    FSDP_TP,
];

fn muon() -> Muon {
    let no_decay = vec!["*norm*".to_owned(), "bias".to_owned()];
    let adamw = MuonAdamW { lr: 3e-3, weight_decay: 0.1, ..MuonAdamW::default() };
    Muon { lr: 0.02, no_decay, adamw, ..Muon::default() }
}

fn adafactor() -> Adafactor {
    Adafactor { lr: 0.05, weight_decay: 0.1, ..Adafactor::default() }
}

/// Runs `f` with a decoder in training on every rank of a mesh, and returns rank 0's result.
fn on<T: Send>(
    (ranks, config, variant): Mesh,
    optimizer: &dyn OptimizerConfig,
    f: impl Fn(&mut DecoderTraining) -> Result<T> + Sync,
) -> T {
    let all = run_ranks(ranks, |world| {
        let training = DecoderTraining::with_optimizer(world, config, variant, 1, &[], optimizer);
        f(&mut training?)
    });
    all.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

type Tensors = BTreeMap<String, Vec<f32>>;

/// Gives every parameter the gradient of a step, the same on every mesh.
fn set_gradients(tree: &ModuleTree, step: u64) -> Result<()> {
    for parameter in tree.trainable() {
        let region = parameter.local()?.region;
        let stream = Stream::new(1, Purpose::Sample, parameter.fqn()).child(step);
        let place = |outer: usize| stream.normal(outer as u64) as f32;
        let runs = region.runs(parameter.global_shape());
        let gradient: Vec<f32> =
            runs.iter().flat_map(|run| (run.outer..run.outer + run.len).map(place)).collect();
        let n = gradient.len();
        parameter.set_local_grad(Some(Tensor::from_vec(gradient, n, &Device::Cpu)?));
    }
    Ok(())
}

#[test]
fn updates_are_bitwise_equal_on_every_mesh() {
    let centered = RmsProp { centered: true, momentum: 0.9, lr: 1e-3, ..RmsProp::default() };
    let bf16 = StateDtype::Bf16;
    let optimizers: [&dyn OptimizerConfig; 9] = [
        &ScheduleFreeAdamW { warmup_steps: 2, weight_decay: 0.1, ..Default::default() },
        &Adam { weight_decay: 0.1, ..Adam::default() },
        &Lion { weight_decay: 0.1, state_dtype: bf16, ..Lion::default() },
        &centered,
        &Adagrad { initial_accumulator_value: 0.1, ..Adagrad::default() },
        &adafactor(),
        &muon(),
        &Muon { state_dtype: bf16, adjust_lr_fn: AdjustLr::MatchRmsAdamw, ..muon() },
        &Muon { matrices: vec!["embedding".into()], exclude: vec!["mlp".into()], ..muon() },
    ];
    for config in optimizers {
        let updated = |mesh| -> (Tensors, Tensors) {
            on(mesh, config, |training| {
                // Steps of the optimizer only: reduced gradients differ in the last bits.
                let tree = training.fabric.module_tree()?;
                let mut optimizer = config.build(tree.parameters())?;
                optimizer.set_ranks(&UpdateRanks::new(training.fabric.device_mesh())?)?;
                optimizer.set_seed(7);
                for step in 1..=3 {
                    set_gradients(tree, step)?;
                    if step == 2 {
                        let up = tree.trainable().find(|p| p.fqn().contains("up_proj"));
                        up.unwrap().set_local_grad(None);
                    }
                    optimizer.step(&GradScale { factor: 0.5, clip_value: Some(1.0) })?;
                }
                // Checkpoints have these weights.
                optimizer.set_training(false)?;
                let state = training.gather(optimizer.state_tensors()?)?;
                Ok((training.weights()?, state))
            })
        };
        let one = updated(ONE);
        assert!(one.1.len() > 20 && one.1.values().flatten().any(|x| *x != 0.0));
        for mesh in &MESHES[1..] {
            let other = updated(*mesh);
            assert!(other == one, "{config:?} on {} ranks of {}", mesh.0, mesh.1);
        }
    }
}

#[test]
fn losses_equal_one_device() {
    for config in [&muon() as &dyn OptimizerConfig, &adafactor()] {
        let losses = |mesh| {
            on(mesh, config, |training| {
                (0..6).map(|_| Ok(training.step()?.0)).collect::<Result<Vec<f64>>>()
            })
        };
        let one = losses(ONE);
        assert!(one[5] < one[0], "{one:?}");
        for mesh in &MESHES[1..] {
            for (found, expected) in losses(*mesh).iter().zip(&one) {
                assert!((found / expected - 1.0).abs() < 1e-4, "{mesh:?}: {found} {expected}");
            }
        }
    }
}

/// State, loss and norm of the next step, then state and weights after it.
type Standing = (Tensors, (f64, f64), Tensors, Tensors);

fn standing(training: &mut DecoderTraining) -> Result<Standing> {
    let state = training.optimizer_state()?;
    let next = training.step()?;
    Ok((state, next, training.optimizer_state()?, training.weights()?))
}

#[test]
fn every_mesh_loads_checkpoints() {
    let rmsprop = RmsProp { centered: true, momentum: 0.9, lr: 1e-3, ..RmsProp::default() };
    let free = ScheduleFreeAdamW::default();
    let optimizers: [&dyn OptimizerConfig; 6] =
        [&muon(), &adafactor(), &Lion::default(), &rmsprop, &Adagrad::default(), &free];
    for config in optimizers {
        let save = |mesh, path: &Path| {
            on(mesh, config, |training| {
                for _ in 0..3 {
                    training.step()?;
                }
                training.save(path)?;
                standing(training)
            })
        };
        let load = |mesh, path: &Path| {
            on(mesh, config, |training| {
                training.load(path)?;
                standing(training)
            })
        };
        for source in [ONE, FSDP_TP] {
            let scratch = tempfile::tempdir().unwrap();
            let path = scratch.path().join("saved");
            let saved = save(source, &path);
            for target in [ONE, DDP_2, FSDP_2, FSDP_TP] {
                let loaded = load(target, &path);
                assert!(loaded.0 == saved.0, "{config:?} from {source:?} to {target:?}");
                // To the bit, on the mesh that saved it.
                assert!(target != source || loaded == saved, "{config:?} on {source:?}");
            }
        }
    }
}

/// Rank 0's calls of the optimizer's step alone, and the model.
fn calls(
    (ranks, config, variant): Mesh,
    optimizer: &dyn OptimizerConfig,
) -> (Vec<Record>, ModuleTree) {
    let mut all = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let training = DecoderTraining::with_optimizer(world, config, variant, 1, &[], optimizer)?;
        let tree = training.fabric.module_tree()?.clone();
        let mut optimizer = optimizer.build(tree.parameters())?;
        optimizer.set_ranks(&UpdateRanks::new(training.fabric.device_mesh())?)?;
        set_gradients(&tree, 1)?;
        counter.reset();
        optimizer.step(&GradScale::default())?;
        let total: u64 = counter.snapshot().values().map(|record| record.calls).sum();
        let ops = ["all_to_all", "all_gather_into", "all_reduce"];
        let records = ops.map(|op| counter.get("world", op)).to_vec();
        assert_eq!(total, records.iter().map(|record| record.calls).sum::<u64>());
        Ok((records, tree))
    })
    .unwrap();
    assert!(all.iter().all(|(records, _)| *records == all[0].0), "{config}: ranks differ");
    all.swap_remove(0)
}

fn is_hidden_matrix(parameter: &&Parameter) -> bool {
    parameter.global_shape().len() == 2 && !parameter.is_embedding_or_head()
}

/// Matrices by falling cost, as many in a round as ranks.
fn rounds(tree: &ModuleTree, ranks: usize) -> Vec<Vec<[usize; 2]>> {
    let shape = |p: &Parameter| [p.global_shape()[0], p.global_shape()[1]];
    let mut shapes: Vec<_> = tree.trainable().filter(is_hidden_matrix).map(shape).collect();
    let cost = |[rows, columns]: &[usize; 2]| {
        let (short, long) = (rows.min(columns), rows.max(columns));
        5 * short * short * (2 * long + short) + short * long
    };
    shapes.sort_by_key(|shape| std::cmp::Reverse(cost(shape)));
    let mut owned = vec![(0, Vec::new()); ranks];
    for shape in shapes {
        let least = owned.iter_mut().min_by_key(|(total, _)| *total).unwrap();
        least.0 += cost(&shape);
        least.1.push(shape);
    }
    let most = owned.iter().map(|(_, own)| own.len()).max().unwrap();
    let round = |i: usize| owned.iter().filter_map(|(_, own)| own.get(i).copied()).collect();
    (0..most).map(round).collect()
}

#[test]
fn muon_sends_each_matrix_there_and_back() {
    for ranks in [2, 4] {
        let (records, tree) = calls((ranks, r#"{"type": "fsdp"}"#, PLAIN), &muon());
        let rounds = rounds(&tree, ranks);
        // Parts have the size of the round's largest.
        let part = |[rows, columns]: &[usize; 2]| rows.div_ceil(ranks) * columns;
        let largest = |round: &Vec<[usize; 2]>| round.iter().map(part).max().unwrap();
        let elements: usize = rounds.iter().map(|round| 2 * ranks * largest(round)).sum();
        let expected = Record { calls: 2 * rounds.len() as u64, bytes: 4 * elements as u64 };
        assert_eq!(records, [expected, Record::default(), Record::default()], "fsdp, {ranks}");

        // Every rank has every momentum: updates are gathered only.
        let (records, _) = calls((ranks, r#"{"type": "ddp"}"#, PLAIN), &muon());
        let elements: usize = rounds.iter().flatten().map(|[rows, columns]| rows * columns).sum();
        let expected = Record { calls: rounds.len() as u64, bytes: 4 * elements as u64 };
        assert_eq!(records, [Record::default(), expected, Record::default()], "ddp, {ranks}");
    }
    let (records, _) = calls((1, r#"{"type": "fsdp"}"#, PLAIN), &muon());
    assert_eq!(records, [Record::default(); 3], "a rank alone");
}

#[test]
fn adafactor_reduces_rows_and_columns() {
    for (mesh, name) in [(FSDP_2, "fsdp"), (DDP_2, "ddp"), (FSDP_TP, "fsdp_tp")] {
        let (records, tree) = calls(mesh, &adafactor());
        let sums = |parameter: &Parameter| match *parameter.global_shape() {
            // Rows of values and gradient, and columns; then rows of the update.
            [rows, columns] => 2 * rows + columns + rows,
            _ => 2,
        };
        let sums: usize = tree.trainable().map(sums).sum();
        // The largest term and the sum of each, in eight bytes.
        let expected = Record { calls: 4, bytes: 16 * sums as u64 };
        assert_eq!(records, [Record::default(), Record::default(), expected], "{name}");
    }
    let (records, _) = calls((1, r#"{"type": "fsdp"}"#, PLAIN), &adafactor());
    assert_eq!(records, [Record::default(); 3], "a rank alone");
}

#[test]
fn embeddings_and_heads_are_recognised() {
    let b = ModuleBuilder::new(ModuleInit::default());
    Embedding::new(&b.pp("tokens"), 6, 4).unwrap();
    let hidden = Linear::new(&b.pp("layers.0.up"), 4, 4).unwrap();
    for head in ["out", "model.lm_head", "score_norm"] {
        Linear::with_bias(&b.pp(head), 4, 6).unwrap();
    }
    Linear::tied(&b.pp("tied"), hidden.weight()).unwrap();
    b.edge_to_loss(&["out"]);
    let tree = b.finish().unwrap();
    let found: Vec<_> = tree.parameters().iter().filter(|p| p.is_embedding_or_head()).collect();
    let names: Vec<&str> = found.iter().map(|p| p.fqn()).collect();
    let heads = ["out.weight", "out.bias", "model.lm_head.weight", "model.lm_head.bias"];
    assert_eq!(names, [&["tokens.weight"][..], &heads].concat());
}

/// An adapter's matrices go to AdamW, unless they are named.
#[test]
fn muon_updates_named_adapters() {
    let adapters = Adapters::new(["q_proj"]);
    run_ranks(2, |world| {
        let init = ModuleInit { adapters: Some(adapters.clone()), ..ModuleInit::default() };
        let config = FSDP_2.1;
        let training = DecoderTraining::with_init(world, config, PLAIN, 1, init)?;
        let parameters = training.fabric.module_tree()?.parameters();
        let error = muon().build(parameters).err().unwrap().to_string();
        assert!(error.contains("the model trains no matrix of a hidden layer"), "{error}");
        let named = Muon { matrices: vec!["lora_A".into(), "lora_B".into()], ..muon() };
        let states = named.build(parameters)?.state_tensors()?;
        assert!(states.iter().all(|state| state.name == "momentum_buffer"));
        assert_eq!(states.len(), 6);
        Ok(())
    })
    .unwrap();
}

#[test]
fn shards_without_ranks_are_refused() {
    let refused = |config: &dyn OptimizerConfig| {
        on(FSDP_2, config, |training| {
            let tree = training.fabric.module_tree()?;
            let mut optimizer = config.build(tree.parameters())?;
            set_gradients(tree, 1)?;
            Ok(optimizer.step(&GradScale::default()).unwrap_err().to_string())
        })
    };
    assert_says!(refused(&muon()), "parameter `layers.0.self_attn.q_proj.weight` … not given …");
    assert_says!(refused(&adafactor()), "parameter `embedding.weight` … part of it … not given …");
}
