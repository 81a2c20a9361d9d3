//! Buffers and batch norms under every strategy: training and checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::ModuleT as _;
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::checkpoint::{FullOptions, gather_cpu_state_dict};
use fulgurite_core::collective::{Counter, ProcessGroup, all_gather_object};
use fulgurite_core::fabric::{Fabric, FabricOptimizer, SyncBuffers};
use fulgurite_core::mesh::{DATA_PARALLEL, DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{
    ForwardScope, Module as _, ModuleBuilder, ModuleInit, ModuleTree, Unit,
};
use fulgurite_core::nn::{BatchNorm, BatchNormConfig, Conv2d, Conv2dConfig, Linear, Loss};
use fulgurite_core::optim::{AdamW, WeightAverage};
use fulgurite_core::parallel::{Colwise, Layout, Plan};
use fulgurite_core::parameter::{BufferOptions, Init};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{checkpointed, gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

/// Tensors by name, flattened.
type Values = BTreeMap<String, Vec<f32>>;

const SINGLE: &str = r#"{"type": "single_device"}"#;
const DDP: &str = r#"{"type": "ddp"}"#;
const FSDP: &str = r#"{"type": "fsdp"}"#;
const HSDP: &str = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;
const FSDP_TP: &str = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;

/// The model's kind of batch norm.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Own,
    Synchronised,
    Candle,
}

enum Norm {
    Own(BatchNorm),
    Candle(candle_nn::BatchNorm),
}

impl Norm {
    fn new(b: &ModuleBuilder, channels: usize, kind: Kind) -> Result<Self> {
        let synchronised = Some(kind == Kind::Synchronised);
        Ok(match kind {
            Kind::Candle => Self::Candle(candle_nn::batch_norm(channels, 1e-5, b.var_builder())?),
            _ => Self::Own(BatchNorm::with(
                b,
                channels,
                BatchNormConfig { synchronised, ..BatchNormConfig::default() },
            )?),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Own(norm) => norm.forward(x),
            Self::Candle(norm) => Ok(norm.forward_t(x, ForwardScope::current().training)?),
        }
    }
}

struct Network {
    stem: Unit<(Conv2d, Norm)>,
    middle: Unit<(Linear, Norm)>,
    head: Linear,
}

impl Network {
    fn new(b: &ModuleBuilder, kind: Kind) -> Result<Self> {
        // A bias before a norm would only get rounding noise as its gradient.
        let config = Conv2dConfig { stride: [2; 2], bias: false, ..Conv2dConfig::default() };
        b.buffer("positions", [3], Tensor::new(&[1f32, 2., 3.], b.device())?, {
            BufferOptions::default().not_persistent()
        })?;
        Ok(Self {
            stem: b.unit("stem", |b| {
                let conv = Conv2d::new(&b.pp("conv"), 1, 4, [3, 3], config)?;
                Ok((conv, Norm::new(&b.pp("norm"), 4, kind)?))
            })?,
            middle: b.unit("middle", |b| {
                let up = Linear::new(&b.pp("up"), 4, 6)?;
                Ok((up, Norm::new(&b.pp("norm"), 6, kind)?))
            })?,
            head: Linear::with_bias(&b.pp("head"), 6, 4)?,
        })
    }

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let x = self.stem.call(images, |(conv, norm), x| {
            Ok(norm.forward(&conv.forward(x)?)?.relu()?.flatten_from(2)?.mean(2)?)
        })?;
        let x = self.middle.call(&x, |(up, norm), x| norm.forward(&up.forward(x)?))?;
        self.head.forward(&x.relu()?)
    }

    fn loss(&self, images: &Tensor) -> Result<Loss> {
        let y = self.forward(images)?;
        Ok(Loss::new((y - 1.0)?.sqr()?.sum_all()?, images.dim(0)? as f64))
    }
}

/// Samples `first..first + n` of a step's 12.
fn images(step: u64, first: usize, n: usize) -> Result<Tensor> {
    let value =
        |i: usize| ((i as u64 * 37 + step * 11) % 101) as f32 * 0.02 + (i / 49) as f32 * 0.1;
    let values: Vec<f32> = (0..12 * 49).map(value).collect();
    Ok(Tensor::from_vec(values, (12, 1, 7, 7), &Device::Cpu)?.narrow(0, first, n)?)
}

struct Training {
    fabric: Fabric,
    model: Network,
    optimizer: FabricOptimizer,
    step: u64,
}

impl Training {
    fn new(world: Arc<dyn ProcessGroup>, config: &str, kind: Kind) -> Result<Self> {
        let mut strategy = strategy(config)?;
        if config.contains("_tp") {
            strategy.set_parallelize(Box::new(|tree: &mut ModuleTree, mesh: &DeviceMesh| {
                let plan = Plan::new()
                    .with("head", Colwise { output: Layout::Replicate, ..Colwise::default() });
                tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
            }))?;
        }
        let mut fabric = Fabric::new(world, strategy, init(config)?, 7)?;
        let optimizer = AdamW { lr: 0.01, ..AdamW::default() };
        let (model, optimizer) = fabric.setup(|b| Network::new(b, kind), &optimizer)?;
        Ok(Self { fabric, model, optimizer, step: 0 })
    }

    /// Takes a step; ranks have unequal parts of the batch.
    fn step(&mut self) -> Result<f64> {
        let mesh = self.fabric.device_mesh();
        let (rank, size) = (mesh.local_rank(DATA_PARALLEL)?, mesh.size(DATA_PARALLEL)?);
        let bounds = |rank: usize| if rank == size { 12 } else { rank * 12 / size + rank.min(1) };
        let (first, end) = (bounds(rank), bounds(rank + 1));
        let _scope = self.fabric.forward_scope(true, self.step, first as u64);
        self.fabric.backward(&self.model.loss(&images(self.step, first, end - first)?)?)?;
        let loss = self.fabric.step_totals(&[])?.mean();
        self.optimizer.step()?;
        self.step += 1;
        Ok(loss)
    }

    /// Every parameter and buffer, checked to be bitwise equal on all ranks.
    fn values(&self) -> Result<Values> {
        let (tree, world) = (self.fabric.module_tree()?, &**self.fabric.world());
        let mut values = gather_weights(tree, world)?;
        for buffer in tree.buffers() {
            let own: Vec<f32> = numbers(&buffer.value()?)?;
            let bits: Vec<u32> = own.iter().map(|x| x.to_bits()).collect();
            for (rank, other) in all_gather_object(world, &bits)?.iter().enumerate() {
                assert_eq!(*other, bits, "{} on rank {rank}", buffer.fqn());
            }
            values.insert(buffer.fqn().to_owned(), own);
        }
        Ok(values)
    }

    /// Returns the outputs of an evaluation.
    fn evaluate(&self) -> Result<Vec<f32>> {
        let _scope = self.fabric.forward_scope(false, self.step, 0);
        let _no_grad = fulgurite_core::autograd::no_grad();
        numbers(&self.model.forward(&images(50, 0, 4)?)?)
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f64>,
    values: Values,
    evaluation: Vec<f32>,
}

fn train(ranks: usize, config: &str, kind: Kind) -> Outcome {
    let mut runs = run_ranks(ranks, |world| {
        let mut training = Training::new(world, config, kind)?;
        let losses = (0..5).map(|_| training.step()).collect::<Result<_>>()?;
        Ok(Outcome { losses, values: training.values()?, evaluation: training.evaluate()? })
    })
    .unwrap_or_else(|error| panic!("{config}, {kind:?}: {error}"));
    runs.swap_remove(0)
}

fn assert_close(what: &str, got: &Outcome, want: &Outcome) {
    let close = |a: f64, b: f64| (a - b).abs() <= 2e-4 * b.abs().max(1.0);
    for (a, b) in got.losses.iter().zip(&want.losses) {
        assert!(close(*a, *b), "{what}: losses {:?} and {:?}", got.losses, want.losses);
    }
    assert!(got.values.keys().eq(want.values.keys()));
    for (fqn, want) in &want.values {
        for (a, b) in got.values[fqn].iter().zip(want) {
            assert!(close((*a).into(), (*b).into()), "{what}, {fqn}: {a} and {b}");
        }
    }
}

const MESHES: [(usize, &str); 8] =
    [(2, DDP), (3, DDP), (4, DDP), (2, FSDP), (3, FSDP), (4, HSDP), (2, FSDP_TP), (4, FSDP_TP)];

#[test]
fn synchronised_batch_norms_match_one_device() {
    let single = train(1, SINGLE, Kind::Own);
    assert!(single.losses[4] < 0.9 * single.losses[0], "{:?}", single.losses);
    assert_eq!(single.values["stem.norm.num_batches_tracked"], [5.0]);
    assert_ne!(single.values["stem.norm.running_mean"], [0.0; 4]);
    for (ranks, config) in MESHES {
        let plain = train(ranks, config, Kind::Synchronised);
        assert_close(&format!("{ranks} ranks, {config}"), &plain, &single);
        let again = train(ranks, &checkpointed(config, "full"), Kind::Synchronised);
        assert_eq!(again, plain, "{ranks} ranks, {config}: computed again");
    }
}

/// Every strategy has the bits of DDP; recomputation by a checkpointed unit updates statistics only
/// once.
#[test]
fn local_batch_norms_match_ddp() {
    for kind in [Kind::Own, Kind::Candle] {
        for ranks in [1, 2, 4] {
            let ddp = train(ranks, DDP, kind);
            for config in [DDP, FSDP] {
                for mode in ["none", "full"] {
                    let got = train(ranks, &checkpointed(config, mode), kind);
                    assert_eq!(got, ddp, "{kind:?}, {ranks} ranks, {config}, {mode}");
                }
            }
        }
    }
    let (own, candle) = (train(1, SINGLE, Kind::Own), train(1, SINGLE, Kind::Candle));
    for (fqn, want) in &candle.values {
        for (a, b) in own.values[fqn].iter().zip(want) {
            assert!((a - b).abs() <= 1e-3, "{fqn}: {a} and {b}");
        }
    }
}

// checklist: composer: buffers are broadcast from rank 0
#[test]
fn buffers_are_synchronised_as_configured() {
    let run = |how: SyncBuffers| {
        run_ranks(2, move |world| {
            let mut training = Training::new(world.clone(), DDP, Kind::Own)?;
            training.fabric.set_sync_buffers(how);
            training.step()?;
            let mean = training.fabric.module_tree()?.buffer("stem.norm.running_mean");
            let batches = training.fabric.module_tree()?.buffer("stem.norm.num_batches_tracked");
            let batches = numbers(&batches.expect("is one").value()?)?;
            assert_eq!(batches, [1.0]);
            numbers(&mean.expect("is one").value()?)
        })
        .unwrap()
    };
    let own = run(SyncBuffers::None);
    assert_ne!(own[0], own[1]);
    let broadcast = run(SyncBuffers::Broadcast);
    assert_eq!((&broadcast[0], &broadcast[1]), (&own[0], &own[0]));
    let mean: Vec<f32> = own[0]
        .iter()
        .zip(&own[1])
        .map(|(a, b)| ((f64::from(*a) + f64::from(*b)) / 2.0) as f32)
        .collect();
    assert_eq!(run(SyncBuffers::Mean), [mean.clone(), mean]);
}

#[test]
fn buffers_take_at_most_one_collective_a_step() {
    let calls = |with_buffers: bool| {
        run_ranks(2, move |world| {
            let counter = Counter::default();
            let counting = counter.watch(world);
            let mut fabric = Fabric::new(counting, strategy(DDP)?, ModuleInit::default(), 1)?;
            let (model, mut optimizer) = fabric.setup(
                |b| {
                    if with_buffers {
                        for i in 0..5 {
                            let options = BufferOptions::dtype(DType::I64);
                            b.buffer(&format!("b{i}"), [i], Init::ZEROS, options)?;
                        }
                    }
                    Linear::new(&b.pp("l"), 2, 2)
                },
                &AdamW::default(),
            )?;
            let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
            let mut step = || -> Result<()> {
                fabric.backward(&Loss::new(model.forward(&x)?.sum_all()?, 1.0))?;
                optimizer.step().map(drop)
            };
            let calls = || counter.snapshot().values().map(|record| record.calls).sum::<u64>();
            step()?;
            let before = calls();
            step()?;
            Ok(calls() - before)
        })
        .unwrap()[0]
    };
    assert_eq!(calls(true), calls(false) + 1);
}

/// A checkpoint of any mesh loads on any other mesh, with the same outputs.
// checklist: Lightning: _named_parameters_and_buffers_to_load
#[test]
fn buffers_are_saved_and_loaded_on_any_mesh() {
    let directory = tempfile::tempdir().unwrap();
    let go_on = |training: &mut Training| -> Result<(Values, Vec<f32>, f64)> {
        Ok((training.values()?, training.evaluate()?, training.step()?))
    };
    for kind in [Kind::Synchronised, Kind::Candle] {
        for (saving, (ranks, config)) in
            [(1, SINGLE), (3, DDP), (4, HSDP), (4, FSDP_TP)].into_iter().enumerate()
        {
            let path = directory.path().join(format!("{kind:?}-{saving}"));
            let full = directory.path().join(format!("{kind:?}-{saving}-full"));
            let path: &Path = &path;
            let saved = run_ranks(ranks, |world| {
                let mut training = Training::new(world, config, kind)?;
                training.step()?;
                training.step()?;
                training.fabric.save(path, &mut training.optimizer, &training.step)?;
                training.fabric.save_full(&full, None, &0u64, &FullOptions::default())?;
                go_on(&mut training)
            })
            .unwrap_or_else(|error| panic!("saving on {config}: {error}"));
            for (ranks, config) in [(1, SINGLE), (2, DDP), (2, FSDP), (4, FSDP_TP)] {
                for path in [path, &full] {
                    let loaded = run_ranks(ranks, |world| {
                        let mut training = Training::new(world, config, kind)?;
                        if path == full {
                            training.fabric.load_raw(path, true)?;
                            training.step = 2;
                        } else {
                            training.step =
                                training.fabric.load(path, Some(&mut training.optimizer))?;
                        }
                        go_on(&mut training)
                    })
                    .unwrap_or_else(|error| panic!("loading on {config}: {error}"));
                    assert_eq!(loaded[0].0, saved[0].0, "{kind:?}, {config}");
                    for (a, b) in loaded[0].1.iter().zip(&saved[0].1) {
                        assert!((a - b).abs() < 1e-5, "{a} and {b}");
                    }
                    // Statistics per rank's own batch give the other kind another loss.
                    if kind == Kind::Synchronised {
                        let (a, b) = (loaded[0].2, saved[0].2);
                        assert!((a - b).abs() <= 2e-4 * b.abs().max(1.0), "{config}: {a} and {b}");
                    }
                }
            }
        }
    }
}

// checklist: Lightning: _named_parameters_and_buffers_to_load
#[test]
fn mismatched_buffers_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let (with, without) = (directory.path().join("with"), directory.path().join("without"));
    let build = |norm: bool, path: &Path, load: bool| {
        run_ranks(2, |world| {
            let mut fabric = Fabric::new(world, strategy(DDP)?, ModuleInit::default(), 1)?;
            fabric.setup_module(|b| {
                let config = BatchNormConfig { affine: false, ..BatchNormConfig::default() };
                let norm = norm.then(|| BatchNorm::with(&b.pp("norm"), 2, config)).transpose()?;
                b.buffer("angles", [2], Init::ONES, BufferOptions::default().not_persistent())?;
                Ok((Linear::new(&b.pp("l"), 2, 2)?, norm))
            })?;
            if load {
                return fabric.load_raw(path, true).map(|_| Vec::new());
            }
            fabric.save_full(path, None, &(), &FullOptions::default())?;
            let tree = fabric.module_tree()?;
            let mesh = fabric.device_mesh().clone();
            let options = Default::default();
            let world = fabric.world().clone();
            let all = gather_cpu_state_dict(tree, |dim| mesh.coordinate(dim), &*world, &options)?;
            Ok(all
                .iter()
                .map(|(name, x)| format!("{name} {:?} {:?}", x.dims(), x.dtype()))
                .collect())
        })
    };
    let saved = build(true, &with, false).unwrap();
    insta::assert_snapshot!(saved[0].join("\n"), @r#"
    l.weight [2, 2] F32
    norm.num_batches_tracked [] I64
    norm.running_mean [2] F32
    norm.running_var [2] F32
    "#);
    build(false, &without, false).unwrap();
    let error = |norm, path| {
        let message = build(norm, path, true).unwrap_err().to_string();
        message.replace(&directory.path().display().to_string(), "")
    };
    insta::assert_snapshot!(error(true, &without), @r#"
    checkpoint /without: does not fit this model:
      missing, the model has it and the checkpoint does not (3):
        norm.running_mean
        norm.running_var
        norm.num_batches_tracked
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
    insta::assert_snapshot!(error(false, &with), @r#"
    checkpoint /with: does not fit this model:
      unexpected, the checkpoint has it and the model does not (3):
        norm.num_batches_tracked
        norm.running_mean
        norm.running_var
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
}

/// Like torch's `AveragedModel` with `use_buffers=False`: the buffers come from the model.
#[test]
fn weight_averages_use_the_models_buffers() {
    run_ranks(2, |world| {
        let mut training = Training::new(world, FSDP, Kind::Own)?;
        let mut average =
            WeightAverage::exponential(training.fabric.module_tree()?.parameters(), 0.9)?;
        for _ in 0..2 {
            training.step()?;
            average.update()?;
        }
        let before = training.values()?;
        average.swap()?;
        let averaged = training.values()?;
        assert_ne!(averaged["stem.norm.weight"], before["stem.norm.weight"]);
        assert_eq!(averaged["stem.norm.running_var"], before["stem.norm.running_var"]);
        average.swap()
    })
    .unwrap();
}

#[test]
fn buffer_names_and_shapes_are_checked() {
    let b = ModuleBuilder::new(ModuleInit::default());
    let options = BufferOptions::default();
    b.buffer("mean", [2], Init::ZEROS, options).unwrap();
    b.parameter("weight", [2], Init::ZEROS).unwrap();
    assert_says!(
        b.buffer("mean", [2], Init::ZEROS, options).unwrap_err(),
        "parameter `mean`: is declared twice … `ModuleBuilder::tie` …"
    );
    assert_says!(
        b.buffer("weight", [2], Init::ZEROS, options).unwrap_err(),
        "parameter `weight`: is declared twice … `ModuleBuilder::tie` …"
    );
    assert_says!(
        b.parameter("mean", [2], Init::ZEROS).unwrap_err(),
        "parameter `mean`: is declared twice … `ModuleBuilder::tie` …"
    );
    let values = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    assert_says!(
        b.buffer("table", [2], values, options).unwrap_err(),
        "buffer `table` … shape [2] … values of shape [3]"
    );
    let buffer = b.buffer("unset", [2], Init::ZEROS, options).unwrap();
    assert_says!(buffer.value().unwrap_err(), "buffer `unset`: has no values … before the model …");
    assert_says!(
        buffer.set(&Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap()).unwrap_err(),
        "buffer `unset` … shape [2] … set to values of [3]"
    );
    let bias = b.buffer("bias", [2], Init::ZEROS, options.not_set_in_forward()).unwrap();
    assert_says!(
        bias.set(&Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap()).unwrap_err(),
        "buffer `bias`: is set … declared with `not_set_in_forward` … `overwrite`"
    );
}

#[test]
fn pipelines_take_buffers_that_forwards_leave() {
    let set_up = |options: BufferOptions| {
        run_ranks(2, |world| {
            let pipeline = r#"{"type": "model_parallel", "pipeline_parallel_size": 2}"#;
            let mut fabric = Fabric::new(world, strategy(pipeline)?, ModuleInit::default(), 1)?;
            fabric.setup_module(|b| {
                let layer = |i| b.unit(&format!("layers.{i}"), |b| Linear::new(b, 2, 2));
                let layers = (0..2).map(layer).collect::<Result<Vec<_>>>()?;
                b.stages(&[] as &[&str], &layers);
                Ok((b.buffer("table", [2], Init::ONES, options)?, layers))
            })?;
            Ok(())
        })
    };
    set_up(BufferOptions::default().not_set_in_forward()).unwrap();
    set_up(BufferOptions::default().not_persistent()).unwrap();
    let message = set_up(BufferOptions::default()).unwrap_err().to_string();
    assert!(message.contains("forwards may set the buffer `table`"), "{message}");
}
