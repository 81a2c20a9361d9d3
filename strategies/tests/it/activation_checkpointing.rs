//! Activation checkpointing: the same gradients from less memory, and errors that name the cause.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::Solo;
use fulgurite_core::execution::ExecutionContext;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::{
    ActivationCheckpointing, ActivationOffload, CandleModule, Module, ModuleBuilder, ModuleInit,
    ModuleTree, Unit,
};
use fulgurite_core::nn::{Dropout, Embedding, Linear, Loss, RmsNorm, functional};
use fulgurite_core::parameter::{Init, Parameter};
use fulgurite_core::run::TrainerConfig;
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{ALL_OFFLOADED, OFFLOADED, checkpointed, init, strategy};

const SINGLE: &str = r#"{"type": "single_device"}"#;
const WIDTH: usize = 6;

struct Block {
    norm: RmsNorm,
    up: Linear,
    dropout: Dropout,
    down: Linear,
    /// Used as a plain tensor.
    shift: Parameter,
}

impl Block {
    /// A block whose last layer shares another layer's weight.
    fn new(b: &ModuleBuilder, shared: Option<&Parameter>) -> Result<Self> {
        let down = b.pp("down");
        Ok(Self {
            norm: RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?,
            up: Linear::with_bias(&b.pp("up"), WIDTH, 9)?,
            dropout: Dropout::new(&b.pp("dropout"), 0.3)?,
            down: match shared {
                Some(weight) => Linear::tied(&down, weight)?,
                None => Linear::new(&down, 9, WIDTH)?,
            },
            shift: b.parameter("shift", [WIDTH], Init::Normal { mean: 0.0, std: 0.1 })?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let hidden = functional::gelu(&self.up.forward(&self.norm.forward(x)?)?)?;
        let y = self.down.forward(&self.dropout.forward(&hidden)?)?.broadcast_mul(mask)?;
        Ok((x + y.broadcast_add(&self.shift.tensor()?)?)?)
    }
}

/// A unit on token ids, two units that share a weight (the second runs twice), a candle_nn unit,
/// and a head.
struct Model {
    embedding: Unit<Embedding>,
    blocks: Vec<Unit<Block>>,
    foreign: Unit<CandleModule<candle_nn::Linear>>,
    head: Linear,
}

impl Model {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let first = b.unit("blocks.0", |b| Block::new(b, None))?;
        let shared = first.module().down.weight().clone();
        let second = b.unit("blocks.1", |b| Block::new(b, Some(&shared)))?;
        let foreign = |b: &ModuleBuilder| {
            Ok(CandleModule(candle_nn::linear(WIDTH, WIDTH, b.var_builder().pp("linear"))?))
        };
        Ok(Self {
            embedding: b.unit("embedding", |b| Embedding::new(b, 5, WIDTH))?,
            blocks: vec![first, second],
            foreign: b.unit("foreign", foreign)?,
            head: Linear::new(&b.pp("head"), WIDTH, 2)?,
        })
    }

    fn loss(&self) -> Result<Loss> {
        let ids = Tensor::new(&[[0u32, 3, 1], [4, 4, 2]], &Device::Cpu)?;
        let mut x = self.embedding.forward(&ids)?;
        for (i, block) in [0, 1, 1].into_iter().enumerate() {
            // Each call has its own mask.
            let mask: Vec<f32> =
                (0..3).map(|t| if t == i { 0.0 } else { 1.0 + t as f32 }).collect();
            let mask = Tensor::from_vec(mask, (1, 3, 1), &Device::Cpu)?;
            x = self.blocks[block].call(&x, move |block, x| block.forward(x, &mask))?;
        }
        let x = self.foreign.forward(&x)?;
        Ok(Loss::new(self.head.forward(&x)?.sqr()?.sum_all()?, 6.0))
    }
}

/// The loss and gradients of one backward.
fn gradients(config: &str, frozen: &[&str]) -> Result<(f64, BTreeMap<String, Vec<f32>>)> {
    let frozen = frozen.iter().map(|&pattern| pattern.to_owned()).collect();
    let init = ModuleInit { frozen, ..init(config)? };
    let mut fabric = Fabric::new(Arc::new(Solo::new("world", 0)), strategy(config)?, init, 5)?;
    let model = fabric.setup_module(Model::new)?;
    let loss = {
        let _scope = fabric.forward_scope(true, 3, 0);
        model.loss()?
    };
    // Backward may run outside of the forward's scope.
    fabric.backward(&loss)?;
    let tree = fabric.module_tree()?;
    let gradients = tree.trainable().map(|p| {
        let gradient = p.local_grad().expect("every parameter is in the graph");
        Ok((p.fqn().to_owned(), gradient.to_vec1()?))
    });
    let gradients = gradients.collect::<Result<_>>()?;
    Ok((loss.sum_value()?, gradients))
}

// checklist: composer: activation checkpointing
#[test]
fn gradients_have_the_same_bits() {
    let rest = ["blocks.*.*", "blocks.*.*.*", "foreign.*.*"];
    for frozen in [&[][..], &["embedding.weight"], &["blocks.0.*.*", "blocks.0.shift"], &rest] {
        let plain = gradients(SINGLE, frozen).unwrap();
        let dropped = plain.1.values().flatten().filter(|g| **g == 0.0).count();
        assert!(plain.1.values().flatten().count() > 3 * dropped, "{frozen:?}: {plain:?}");
        for config in [SINGLE, r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
            for mode in ["full", "selective", OFFLOADED, ALL_OFFLOADED] {
                let again = gradients(&checkpointed(config, mode), frozen).unwrap();
                assert_eq!(again, plain, "{config}, {mode}, frozen: {frozen:?}");
            }
        }
    }
}

/// The losses of a model whose units return views: the end of their result, its transposed middle,
/// and a parameter, which FSDP frees after the unit.
fn loss_of_views(config: &str, training: bool) -> Result<(f64, Vec<Vec<f32>>)> {
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
    let (end, table) = fabric.setup_module(|b| {
        let table = |b: &ModuleBuilder| b.parameter("table", [7, 4], Init::Const(0.5));
        Ok((b.unit("end", |b| Linear::new(b, 4, 4))?, b.unit("table", table)?))
    })?;
    let x = Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((6, 4))?;
    let forward = || -> Result<Tensor> {
        let y = end.call(&x, |layer, x| Ok(layer.forward(x)?.narrow(0, 4, 2)?))?;
        let turned = end.call(&y, |layer, x| {
            Ok(layer.forward(&x.broadcast_as((3, 2, 4))?.contiguous()?)?.get(1)?.t()?)
        })?;
        let rows = table.call(&x, |table, _| Ok(table.tensor()?.narrow(0, 5, 2)?))?;
        Ok((y.sqr()? + turned.t()?.sqr()?)?.mul(&(rows + 1.0)?)?.sum_all()?)
    };
    let validation = (!training).then(no_grad);
    let sum = forward()?;
    drop(validation);
    let loss = Loss::new(sum, 1.0);
    if training {
        fabric.backward(&loss)?;
    }
    let tree = fabric.module_tree()?;
    let gradients = tree.trainable().filter_map(|p| Some(p.local_grad()?.to_vec1()));
    Ok((loss.sum_value()?, gradients.collect::<candle_core::Result<_>>()?))
}

#[test]
fn units_may_give_views() {
    let plain = loss_of_views(SINGLE, true).unwrap();
    assert!(plain.0 > 0.0 && plain.1.len() == 2, "{plain:?}");
    for config in [SINGLE, r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
        assert_eq!(loss_of_views(config, false).unwrap().0, plain.0, "{config}, validation");
        for mode in ["none", "full", OFFLOADED, ALL_OFFLOADED] {
            let views = loss_of_views(&checkpointed(config, mode), true).unwrap();
            assert_eq!(views, plain, "{config}, {mode}");
        }
    }
}

/// The loss of a model in which units and the model itself use outputs of units again.
fn loss_of_skips(config: &str) -> Result<(f64, Vec<Vec<f32>>)> {
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
    let units = fabric.setup_module(layers)?;
    let x = Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((2, 4))?;
    let first = units[0].forward(&x)?;
    let second = units[1].forward(&first)?;
    let third = (units[2].forward(&first)? + units[3].forward(&(&second * 0.5)?)?)?;
    let sum = units[4].forward(&((third + &first)? * &second)?)?.sqr()?.sum_all()?;
    drop((first, second));
    let loss = Loss::new(sum, 1.0);
    fabric.backward(&loss)?;
    let tree = fabric.module_tree()?;
    let gradients = tree.trainable().filter_map(|p| Some(p.local_grad()?.to_vec1()));
    Ok((loss.sum_value()?, gradients.collect::<candle_core::Result<_>>()?))
}

// checklist: composer: activation offload
#[test]
fn offloaded_outputs_can_be_reused() {
    let (loss, gradients) = loss_of_skips(SINGLE).unwrap();
    assert!(loss > 0.0 && gradients.len() == 5, "{gradients:?}");
    for config in [SINGLE, r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
        for mode in ["full", "selective", OFFLOADED, ALL_OFFLOADED] {
            let again = loss_of_skips(&checkpointed(config, mode)).unwrap();
            assert_eq!(again.0, loss, "{config}, {mode}");
            // Three gradients of one tensor are added in another order.
            for (again, plain) in again.1.iter().flatten().zip(gradients.iter().flatten()) {
                assert!((again - plain).abs() <= 1e-6 * plain.abs(), "{config}, {mode}");
            }
        }
    }
}

/// One linear layer in a unit, in a model with full checkpointing.
fn one_unit() -> Result<(Fabric, Unit<Linear>)> {
    let config = checkpointed(r#"{"type": "ddp"}"#, "full");
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(&config)?, init(&config)?, 5)?;
    let unit = fabric.setup_module(|b| b.unit("block", |b| Linear::new(b, 4, 4)))?;
    Ok((fabric, unit))
}

fn ones(width: usize) -> Result<Tensor> {
    Ok(Tensor::ones((2, width), DType::F32, &Device::Cpu)?)
}

/// The error of a unit that computes `first` in its forward and `later` in its recomputation.
fn error_of(
    first: fn(&Linear, &Tensor) -> Result<Tensor>,
    later: fn(&Linear, &Tensor) -> Result<Tensor>,
) -> Error {
    let (fabric, unit) = one_unit().unwrap();
    let calls = AtomicUsize::new(0);
    let y =
        unit.call(&ones(4).unwrap(), move |layer, x| match calls.fetch_add(1, Ordering::Relaxed) {
            0 => first(layer, x),
            _ => later(layer, x),
        });
    fabric.backward(&Loss::new(y.unwrap().sum_all().unwrap(), 1.0)).unwrap_err()
}

#[test]
fn recomputation_errors_name_their_origin() {
    let forward: fn(&Linear, &Tensor) -> Result<Tensor> = |layer, x| layer.forward(x);
    let error = error_of(forward, |_, _| Err(Error::other("the moon was wrong")));
    assert_says!(error, "module `block`: the moon was wrong");
    let error = error_of(forward, |layer, x| layer.forward(&x.narrow(0, 0, 1)?));
    assert_says!(error, "module `block`: gave [1, 4] … computed again … [2, 4] in F32 …");
    let error = error_of(forward, |layer, x| Ok(x.matmul(&layer.forward(x)?)?));
    assert!(matches!(&error, Error::Module { path, .. } if path == "block"), "{error:?}");
    let error = error_of(forward, |layer, x| layer.forward(&layer.forward(x)?));
    assert_says!(error, "parameter `block.weight`: got a gradient after its last one …");
    // An error about another rank stays unchanged.
    let peer = |_: &Linear, _: &Tensor| {
        Err(Error::PeerFailed { rank: 3, message: "out of memory".to_owned() })
    };
    assert!(matches!(error_of(forward, peer), Error::PeerFailed { rank: 3, .. }));
}

/// The loss and gradients of a unit that computes its block on another thread.
fn on_another_thread(mode: &str) -> Result<(f64, Vec<Vec<f32>>)> {
    let config = checkpointed(SINGLE, mode);
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(&config)?, init(&config)?, 5)?;
    let unit = fabric.setup_module(|b| b.unit("block", |b| Block::new(b, None)))?;
    let forward = |block: &Block, x: &Tensor| {
        let context = ExecutionContext::current();
        let mask = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        let forward = || context.run(|| block.forward(x, &mask));
        std::thread::scope(|threads| threads.spawn(forward).join().expect("does not panic"))
    };
    {
        let _no_grad = no_grad();
        assert!(!unit.call(&ones(WIDTH)?, forward)?.track_op(), "inside of no_grad");
    }
    let sum = {
        let _scope = fabric.forward_scope(true, 3, 0);
        unit.call(&ones(WIDTH)?, forward)?.sqr()?.sum_all()?
    };
    let loss = Loss::new(sum, 1.0);
    fabric.backward(&loss)?;
    let tree = fabric.module_tree()?;
    let gradients = tree.trainable().map(|p| {
        Ok(p.local_grad().expect("every parameter is in the graph").flatten_all()?.to_vec1()?)
    });
    Ok((loss.sum_value()?, gradients.collect::<Result<_>>()?))
}

#[test]
fn other_threads_get_the_callers_context() {
    let plain = on_another_thread("none").unwrap();
    assert!(plain.1.iter().all(|gradient| gradient.iter().any(|g| *g != 0.0)), "{plain:?}");
    for mode in ["full", ALL_OFFLOADED] {
        assert_eq!(on_another_thread(mode).unwrap(), plain, "{mode}");
    }
}

/// A unit whose closure captures the output of an earlier layer.
struct Captured {
    before: Linear,
    foreign: CandleModule<candle_nn::Linear>,
    unit: Unit<Linear>,
}

impl Captured {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            before: Linear::new(&b.pp("before"), 4, 4)?,
            foreign: CandleModule(candle_nn::linear_no_bias(4, 4, b.var_builder().pp("foreign"))?),
            unit: b.unit("block", |b| Linear::new(b, 4, 4))?,
        })
    }
}

#[test]
fn captured_tensors_with_gradients_are_refused() {
    let backward = |mode: &str, foreign: bool, detached: bool| {
        let config = checkpointed(SINGLE, mode);
        let world = Arc::new(Solo::new("world", 0));
        let mut fabric = Fabric::new(world, strategy(&config)?, init(&config)?, 5)?;
        let model = fabric.setup_module(Captured::new)?;
        let x = ones(4)?;
        let other = if foreign { model.foreign.forward(&x)? } else { model.before.forward(&x)? };
        let other = if detached { other.detach() } else { other };
        let y = model.unit.call(&x, move |layer, x| Ok((layer.forward(x)? * &other)?))?;
        fabric.backward(&Loss::new(y.sum_all()?, 1.0))
    };
    for foreign in [false, true] {
        backward("none", foreign, false).unwrap();
        backward("full", foreign, true).unwrap();
        backward(ALL_OFFLOADED, foreign, true).unwrap();
        assert_eq!(
            backward(ALL_OFFLOADED, foreign, false).unwrap_err().to_string(),
            backward("full", foreign, false).unwrap_err().to_string()
        );
    }
    assert_says!(backward("full", false, false).unwrap_err(), "module `block` … outside of it …");
    assert_says!(backward("full", true, false).unwrap_err(), "… `foreign.weight` … did not use …");
}

#[test]
fn without_a_backward_nothing_runs_twice() {
    let (fabric, unit) = one_unit().unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let forward = || {
        let runs = runs.clone();
        unit.call(&ones(4)?, move |layer, x| {
            runs.fetch_add(1, Ordering::Relaxed);
            layer.forward(x)
        })
    };
    {
        let _no_grad = no_grad();
        assert!(!forward().unwrap().track_op());
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let y = forward().unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 2);
    fabric.backward(&Loss::new(y.sum_all().unwrap(), 1.0)).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 3);
}

/// Offloaded activations are freed after their backward, like the activations of PyTorch's graphs.
#[test]
fn offloaded_activations_have_one_backward() {
    let config = checkpointed(SINGLE, ALL_OFFLOADED);
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric =
        Fabric::new(world, strategy(&config).unwrap(), init(&config).unwrap(), 5).unwrap();
    let unit = fabric.setup_module(|b| b.unit("block", |b| Linear::new(b, 4, 4))).unwrap();
    let y = unit.forward(&ones(4).unwrap()).unwrap();
    let loss = Loss::new(y.sum_all().unwrap(), 1.0);
    fabric.backward(&loss).unwrap();
    assert_says!(fabric.backward(&loss).unwrap_err(), "module `block` … offloaded, and free …");
}

/// Paths of the checkpointed units.
fn chosen(tree: &ModuleTree) -> Vec<&str> {
    tree.units().iter().filter(|u| u.activation_checkpointing()).map(|u| u.path()).collect()
}

fn layers(b: &ModuleBuilder) -> Result<Vec<Unit<Linear>>> {
    let mut units: Vec<_> = (0..4)
        .map(|i| b.unit(&format!("layers.{i}"), |b| Linear::new(b, 4, 4)))
        .collect::<Result<_>>()?;
    units.push(b.unit("head", |b| Linear::new(b, 4, 4))?);
    Ok(units)
}

/// Sets up [`layers`] in a Fabric with this configuration.
fn configured(checkpointing: ActivationCheckpointing) -> Result<ModuleTree> {
    let config =
        TrainerConfig { activation_checkpointing: checkpointing, ..TrainerConfig::default() };
    let mut fabric = Fabric::with_world(Arc::new(Solo::new("world", 0)), &config, 1, None)?;
    fabric.setup_module(layers)?;
    fabric.module_tree().cloned()
}

#[test]
fn a_configuration_chooses_units() {
    let units = |patterns: &[&str]| patterns.iter().map(|&p| p.to_owned()).collect();
    let full = ActivationCheckpointing::full();
    let selective = ActivationCheckpointing::selective;
    for (checkpointing, expected) in [
        (ActivationCheckpointing::default(), &[][..]),
        (full.clone(), &["layers.0", "layers.1", "layers.2", "layers.3", "head"]),
        (ActivationCheckpointing { units: units(&["head", "*.0"]), ..full }, &["layers.0", "head"]),
        (ActivationCheckpointing { every: None, ..selective(1) }, &["layers.1", "layers.3"]),
        (selective(3), &["layers.2"]),
        (
            ActivationCheckpointing { units: units(&["*.1", "*.2", "*.3"]), ..selective(2) },
            &["layers.2"],
        ),
    ] {
        assert_eq!(chosen(&configured(checkpointing).unwrap()), expected);
    }
}

#[test]
fn empty_choices_are_refused() {
    let error = |checkpointing| configured(checkpointing).unwrap_err();
    let full = ActivationCheckpointing::full();
    let units = vec!["layers.*".to_owned(), "blocks.*".to_owned()];
    assert_says!(
        error(ActivationCheckpointing { units: units.clone(), ..full.clone() }),
        "`trainer.activation_checkpointing`: no unit matches `blocks.*` … layers.0 …"
    );
    assert_says!(
        error(ActivationCheckpointing::selective(6)),
        "`trainer.activation_checkpointing`: every = 6 takes none … layers.0 …"
    );
    assert_says!(
        error(ActivationCheckpointing::selective(0)),
        "`trainer.activation_checkpointing`: `every` … at least 1, found 0 …"
    );
    assert_says!(
        error(ActivationCheckpointing { every: Some(2), ..full.clone() }),
        r#"`trainer.activation_checkpointing`: `every` … `type = "selective"` … is "full""#
    );
    assert_says!(
        error(ActivationCheckpointing { units, ..ActivationCheckpointing::default() }),
        r#"`trainer.activation_checkpointing`: `units` … type is "none"; choose "full" …"#
    );
    let offload = |to| ActivationCheckpointing { offload: Some(to), ..full.clone() };
    assert_says!(
        error(offload(ActivationOffload::Host)),
        r#"`trainer.activation_checkpointing`: offload = "host" … there already … "disk" …"#
    );
    let selective = ActivationCheckpointing::selective(2);
    let offload = Some(ActivationOffload::Disk);
    assert_says!(
        error(ActivationCheckpointing { offload, ..selective }),
        r#"`trainer.activation_checkpointing`: `offload` … type is "selective" … "full" …"#
    );
    let b =
        ModuleBuilder::new(ModuleInit { activation_checkpointing: full, ..ModuleInit::default() });
    Linear::new(&b.pp("only"), 2, 2).unwrap();
    assert_says!(b.finish().unwrap_err(), "`trainer.activation_checkpointing` … it has none …");
}

// checklist: composer: activation checkpointing
#[test]
fn a_parallelize_function_chooses_units() {
    let config = checkpointed(r#"{"type": "fsdp"}"#, "selective");
    let mut strategy = strategy(&config).unwrap();
    let parallelize = |tree: &mut ModuleTree, _: &DeviceMesh| {
        tree.units_matching("layers.*")
            .try_for_each(|unit| unit.set_activation_checkpointing(unit.path() != "layers.1"))
    };
    strategy.set_parallelize(Box::new(parallelize)).unwrap();
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy, init(&config).unwrap(), 1).unwrap();
    fabric.setup_module(layers).unwrap();
    let tree = fabric.module_tree().unwrap();
    assert_eq!(chosen(tree), ["layers.0", "layers.2", "layers.3"]);
    // A closure over the units' properties may also choose.
    tree.apply_activation_checkpointing(|unit| {
        unit.kind() == "Linear" && !unit.path().starts_with("layers.")
    })
    .unwrap();
    assert_eq!(chosen(tree), ["head"]);
    tree.apply_activation_checkpointing(|unit| unit.kind() == "Conv2d").unwrap();
    assert!(chosen(tree).is_empty());
}
