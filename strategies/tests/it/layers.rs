//! Every layer of the table, and image and encoder layers, under every strategy, and cut over
//! tensor-parallel ranks.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, ModuleTree, Unit};
use fulgurite_core::nn::layer_table::{LAYERS, LayerRow, TableLayer};
use fulgurite_core::nn::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, GroupNorm, Loss, MultiHeadAttention,
    MultiHeadAttentionConfig,
};
use fulgurite_core::optim::Sgd;
use fulgurite_core::parallel::{Colwise, Layout, Plan, Rowwise};
use fulgurite_core::parameter::{Init, Parameter};
use fulgurite_core::plan;
use fulgurite_test_support::training::{checkpointed, gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

struct Encoder {
    stem: Unit<(Conv2d, GroupNorm, Conv1d)>,
    attn: Unit<MultiHeadAttention>,
    cross: Unit<MultiHeadAttention>,
}

impl Encoder {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let stem = |b: &ModuleBuilder| {
            let config =
                Conv2dConfig { stride: [2; 2], padding: [1; 2], ..Conv2dConfig::default() };
            let line = Conv1dConfig { groups: 2, ..Conv1dConfig::default() };
            Ok((
                Conv2d::new(&b.pp("conv"), 2, 8, [3, 3], config)?,
                GroupNorm::new(&b.pp("norm"), 2, 8, 1e-5)?,
                Conv1d::new(&b.pp("line"), 8, 8, 2, line)?,
            ))
        };
        let config =
            MultiHeadAttentionConfig { num_kv_heads: 2, ..MultiHeadAttentionConfig::new(8, 4) };
        Ok(Self {
            stem: b.unit("stem", stem)?,
            attn: b.unit("attn", |b| MultiHeadAttention::new(b, &config))?,
            cross: b.unit("cross", |b| MultiHeadAttention::new(b, &config))?,
        })
    }

    fn loss(&self, images: &Tensor) -> Result<Loss> {
        let patches = self.stem.call(images, |(conv, norm, line), x| {
            let x = norm.forward(&conv.forward(x)?)?.flatten_from(2)?;
            Ok(line.forward(&x)?.transpose(1, 2)?.contiguous()?)
        })?;
        let memory = self.attn.forward(&patches)?;
        let (batch, time, _) = patches.dims3()?;
        let seen: Vec<u8> = (0..batch * time).map(|i| u8::from(i % time != 2)).collect();
        let seen = Tensor::from_vec(seen, (batch, time), images.device())?;
        let y = self.cross.call(&(patches, memory, seen), |attn, (x, memory, seen)| {
            attn.attend(x, memory, Some(seen))
        })?;
        Ok(Loss::new((y - 1.0)?.sqr()?.sum_all()?, batch as f64))
    }
}

/// The losses of three steps, and the weights after them.
fn train(ranks: usize, replicas: usize, config: &str) -> (Vec<f64>, BTreeMap<String, Vec<f32>>) {
    let mut runs = run_ranks(ranks, |world| {
        let samples = 4 / replicas;
        let first = world.rank() * replicas / ranks * samples;
        let mut strategy = strategy(config)?;
        if replicas < ranks {
            let plan = attention_plan();
            strategy.set_parallelize(Box::new(
                move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
                    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
                },
            ))?;
        }
        let mut fabric = Fabric::new(world, strategy, init(config)?, 5)?;
        let (model, mut optimizer) =
            fabric.setup(Encoder::new, &Sgd { lr: 0.01, ..Sgd::default() })?;
        let images = Tensor::arange(0f32, 288.0, &Device::Cpu)?.reshape((4, 2, 6, 6))?.sin()?;
        let images = images.narrow(0, first, samples)?;
        let mut losses = Vec::new();
        for step in 0..3 {
            let _scope = fabric.forward_scope(true, step, first as u64);
            fabric.backward(&model.loss(&images)?)?;
            losses.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        Ok((losses, gather_weights(fabric.module_tree()?, &**fabric.world())?))
    });
    runs.as_mut().expect("trains").swap_remove(0)
}

fn attention_plan() -> Plan {
    let colwise = Colwise { output: Layout::LAST, ..Colwise::default() };
    plan! {
        "attn.q_proj" => colwise,
        "attn.k_proj" => colwise,
        "attn.v_proj" => colwise,
        "attn.o_proj" => Rowwise { input: Layout::LAST, ..Rowwise::default() },
    }
}

#[test]
fn train_as_on_one_device() {
    let (losses, weights) = train(1, 1, r#"{"type": "single_device"}"#);
    assert!(losses[2] < 0.95 * losses[0], "{losses:?}");
    let tensor_parallel = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
    for (ranks, replicas, config) in [
        (2, 2, r#"{"type": "ddp"}"#),
        (2, 2, r#"{"type": "fsdp"}"#),
        (2, 1, tensor_parallel),
        (4, 2, tensor_parallel),
    ] {
        for mode in ["none", "full"] {
            let (got, got_weights) = train(ranks, replicas, &checkpointed(config, mode));
            for (got, want) in got.iter().zip(&losses) {
                assert!(
                    (got - want).abs() < 1e-5 * want,
                    "{ranks}, {config}, {mode}: {got}, {want}"
                );
            }
            for (fqn, weights) in &weights {
                for (a, b) in got_weights[fqn].iter().zip(weights) {
                    assert!((a - b).abs() < 1e-5, "{ranks}, {config}, {mode}, {fqn}: {a} and {b}");
                }
            }
        }
    }
}

/// A layer of the table. The scale gives a layer without parameters something to train.
struct OneLayer {
    unit: Unit<(TableLayer, Parameter)>,
}

impl OneLayer {
    fn new(b: &ModuleBuilder, row: &LayerRow) -> Result<Self> {
        let build = |b: &ModuleBuilder| {
            Ok((row.build(&b.pp("layer"))?, b.parameter("scale", [1], Init::ONES)?))
        };
        Ok(Self { unit: b.unit("block", build)? })
    }

    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let y = self.unit.call(x, |(layer, scale), x| {
            // In f32, because candle would sum the scale's gradient in half precision.
            let y = layer.forward(x)?.to_dtype(DType::F32)?;
            Ok(y.broadcast_mul(&scale.tensor()?.to_dtype(DType::F32)?)?)
        })?;
        let squares = (y.to_dtype(DType::F32)? - 0.5)?.sqr()?.sum_all()?;
        Ok(Loss::new(squares, x.dim(0)? as f64))
    }
}

/// How a layer of the table is trained.
#[derive(Debug, Clone, Copy)]
struct Setting {
    ranks: usize,
    replicas: usize,
    config: &'static str,
    /// The dtypes of parameters and of computation.
    precision: [DType; 2],
    plan: usize,
}

const ALONE: Setting = Setting {
    ranks: 1,
    replicas: 1,
    config: r#"{"type": "single_device"}"#,
    precision: [DType::F32; 2],
    plan: 0,
};

/// The losses of three steps.
fn train_layer(row: &'static LayerRow, setting: Setting) -> Vec<f64> {
    let Setting { ranks, replicas, config, precision: [dtype, compute_dtype], plan } = setting;
    let runs = run_ranks(ranks, |world| {
        let samples = row.shape[0] / replicas;
        let first = world.rank() * replicas / ranks * samples;
        let mut strategy = strategy(config)?;
        if replicas < ranks {
            let mut whole = Plan::new();
            for (path, style) in row.plans[plan] {
                let path = format!("block.layer.{path}");
                whole = whole.with(path.trim_end_matches('.'), *style);
            }
            strategy.set_parallelize(Box::new(
                move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
                    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &whole)
                },
            ))?;
        }
        let init = ModuleInit { dtype, compute_dtype, sync_batchnorm: true, ..init(config)? };
        let mut fabric = Fabric::new(world, strategy, init, 5)?;
        let sgd = Sgd { lr: 0.0005, ..Sgd::default() };
        let (model, mut optimizer) = fabric.setup(|b| OneLayer::new(b, row), &sgd)?;
        let elements: usize = row.shape.iter().product();
        let x = match row.ids(&Device::Cpu)? {
            Some(ids) => ids,
            None => Tensor::arange(0f32, elements as f32, &Device::Cpu)?.sin()?,
        };
        let x = x.reshape(row.shape)?.narrow(0, first, samples)?;
        let mut losses = Vec::new();
        for step in 0..3 {
            let _scope = fabric.forward_scope(true, step, first as u64);
            fabric.backward(&model.loss(&x)?)?;
            losses.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        Ok(losses)
    });
    runs.unwrap_or_else(|error| panic!("{row:?}, {setting:?}: {error}")).swap_remove(0)
}

fn assert_follows(row: &'static LayerRow, setting: Setting, alone: &[f64], tolerance: f64) {
    for (got, want) in train_layer(row, setting).iter().zip(alone) {
        let name = (row.layer, &row.docs);
        assert!((got - want).abs() <= tolerance * want, "{name:?}, {setting:?}: {got}, {want}");
    }
}

#[test]
fn every_layer_trains_as_on_one_device() {
    for row in LAYERS {
        let alone = train_layer(row, ALONE);
        assert!(alone[2] < alone[0], "{row:?}: {alone:?}");
        let two = Setting { ranks: 2, replicas: 2, ..ALONE };
        let fsdp = r#"{"type": "fsdp"}"#;
        let recomputed = r#"{"type": "fsdp", "activation_checkpointing": "full"}"#;
        for config in [r#"{"type": "ddp"}"#, fsdp, recomputed] {
            assert_follows(row, Setting { config, ..two }, &alone, 1e-5);
        }
        for precision in [[DType::F32, DType::BF16], [DType::BF16; 2]] {
            assert_follows(row, Setting { precision, ..ALONE }, &alone, 3e-2);
            assert_follows(row, Setting { precision, config: fsdp, ..two }, &alone, 3e-2);
        }
    }
}

#[test]
fn every_plan_of_a_layer_trains_as_one_device() {
    for row in LAYERS {
        let alone = train_layer(row, ALONE);
        let config = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
        for plan in 0..row.plans.len() {
            assert_follows(row, Setting { ranks: 2, config, plan, ..ALONE }, &alone, 1e-5);
        }
    }
}
