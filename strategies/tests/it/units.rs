//! Units with several input and output tensors, closures that borrow, and mistakes in units.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::Solo;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{
    Activations, CandleModule, Module, ModuleBuilder, ModuleInit, Unit, pattern_names,
};
use fulgurite_core::nn::{Linear, Loss, RmsNorm};
use fulgurite_core::optim::Sgd;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{
    ALL_OFFLOADED, OFFLOADED, checkpointed, gather_weights, init, strategy,
};
use fulgurite_transports::run_ranks;

const SINGLE: &str = r#"{"type": "single_device"}"#;
const WIDTH: usize = 4;

/// The values passed from block to block.
#[derive(Clone)]
struct State {
    hidden: Tensor,
    memory: Option<Tensor>,
    ids: Tensor,
    depth: usize,
}

impl Activations for State {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            hidden: self.hidden.map_tensors(f)?,
            memory: self.memory.map_tensors(f)?,
            ids: self.ids.map_tensors(f)?,
            depth: self.depth,
        })
    }
}

/// Two layers; one computes an output that may stay unused.
struct Block {
    up: Linear,
    gate: Linear,
    foreign: CandleModule<candle_nn::Linear>,
}

impl Block {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            up: Linear::with_bias(&b.pp("up"), WIDTH, WIDTH)?,
            gate: Linear::new(&b.pp("gate"), WIDTH, WIDTH)?,
            foreign: CandleModule(candle_nn::linear(WIDTH, WIDTH, b.var_builder().pp("foreign"))?),
        })
    }

    fn forward(&self, state: &State, scale: &Tensor) -> Result<State> {
        let picked = state.hidden.index_select(&state.ids, 1)?;
        let hidden = self.up.forward(&picked)?.tanh()?.broadcast_mul(scale)?;
        let gate = self.gate.forward(&state.hidden)?;
        let memory = match &state.memory {
            None => self.foreign.forward(&gate)?,
            Some(memory) => (self.foreign.forward(memory)? * gate)?,
        };
        let hidden = (hidden + &state.hidden)?;
        Ok(State { hidden, memory: Some(memory), ids: state.ids.clone(), depth: state.depth + 1 })
    }
}

struct Model {
    blocks: Vec<Unit<Block>>,
    pair: Unit<Linear>,
}

impl Model {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let block = |i| b.unit(&format!("blocks.{i}"), Block::new);
        Ok(Self {
            blocks: (0..3).map(block).collect::<Result<_>>()?,
            pair: b.unit("pair", |b| Linear::new(b, WIDTH, WIDTH))?,
        })
    }

    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let ids = Tensor::new(&[2u32, 0, 1, 3], x.device())?;
        let mut state = State { hidden: x.clone(), memory: None, ids, depth: 0 };
        for (i, block) in self.blocks.iter().enumerate() {
            let scale = Tensor::new(&[1.0 + i as f32], x.device())?;
            state = block.call(&state, move |block, state| block.forward(state, &scale))?;
        }
        assert_eq!((state.depth, state.ids.to_vec1::<u32>()?), (3, vec![2, 0, 1, 3]));
        let memory = state.memory.expect("every block gives one");
        // More tensors than a candle operation takes; the second returned tensor is unused.
        let halves = [state.hidden.narrow(1, 0, 2)?, state.hidden.narrow(1, 2, 2)?];
        let given = (memory, halves, x.clone(), vec![(x * 2.0)?, (x * 3.0)?]);
        let (y, _, z) = self.pair.call(&given, |layer, (memory, [a, b], x, more)| {
            let y = layer.forward(&Tensor::cat(&[a, b], 1)?)?;
            let unused = layer.forward(x)?;
            Ok((y, unused, ((memory * &more[0])? + &more[1])?))
        })?;
        let sum = (y * z)?.sqr()?.sum_all()?;
        Ok(Loss::new(sum, x.dim(0)? as f64))
    }
}

/// Losses and weights of three steps; each rank has its part of four samples.
fn train(ranks: usize, config: &str) -> (Vec<f64>, BTreeMap<String, Vec<f32>>) {
    let mut runs = run_ranks(ranks, |world| {
        let (rank, samples) = (world.rank(), 4 / ranks);
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let (model, mut optimizer) =
            fabric.setup(Model::new, &Sgd { lr: 2e-4, ..Sgd::default() })?;
        let x = Tensor::arange(0f32, 16.0, &Device::Cpu)?.reshape((4, 4))?;
        let x = (x.narrow(0, rank * samples, samples)?.sin()? + 0.5)?;
        let mut losses = Vec::new();
        for _ in 0..3 {
            fabric.backward(&model.loss(&x)?)?;
            losses.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        let _no_grad = no_grad();
        losses.push(model.loss(&x)?.sum_value()?);
        Ok((losses, gather_weights(fabric.module_tree()?, &**fabric.world())?))
    });
    runs.as_mut().expect("trains").swap_remove(0)
}

#[test]
fn units_with_several_tensors_match_one_device() {
    let (losses, weights) = train(1, SINGLE);
    assert!(losses[2] < 0.98 * losses[0], "{losses:?}");
    for config in [SINGLE, r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
        for mode in ["none", "full", OFFLOADED, ALL_OFFLOADED] {
            let ranks = if config == SINGLE { 1 } else { 2 };
            let (got, got_weights) = train(ranks, &checkpointed(config, mode));
            for step in 0..3 {
                let error = (got[step] - losses[step]).abs();
                assert!(error < 1e-5 * losses[step], "{config}, {mode}: {got:?}, {losses:?}");
            }
            assert_eq!(got_weights.len(), weights.len());
            for (fqn, weights) in &weights {
                for (a, b) in got_weights[fqn].iter().zip(weights) {
                    assert!((a - b).abs() < 1e-5, "{config}, {mode}, {fqn}: {a} and {b}");
                }
            }
        }
    }
}

fn linear_unit(config: &str) -> Result<(Fabric, Unit<Linear>)> {
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
    let unit = fabric.setup_module(|b| b.unit("block", |b| Linear::new(b, 4, 4)))?;
    Ok((fabric, unit))
}

fn ones(width: usize) -> Result<Tensor> {
    Ok(Tensor::ones((2, width), DType::F32, &Device::Cpu)?)
}

#[test]
fn closures_that_borrow_are_called_at_once() {
    let (fabric, unit) = linear_unit(r#"{"type": "fsdp"}"#).unwrap();
    let (mask, mut seen) = (ones(4).unwrap(), Vec::new());
    let y = unit.call_scoped(&ones(4).unwrap(), |layer, x| {
        seen.push(x.dims().to_vec());
        Ok((layer.forward(x)? * &mask)?)
    });
    fabric.backward(&Loss::new(y.unwrap().sum_all().unwrap(), 1.0)).unwrap();
    assert_eq!(seen, [[2, 4]]);
    let (_fabric, unit) = linear_unit(&checkpointed(SINGLE, "full")).unwrap();
    let forward = || unit.call_scoped(&ones(4)?, |layer, x| Ok((layer.forward(x)? * &mask)?));
    assert_says!(forward().unwrap_err(), "module `block` … `call_scoped` cannot … `Unit::call` …");
    let _no_grad = no_grad();
    forward().unwrap();
}

#[test]
fn shape_mismatches_name_their_place() {
    let (fabric, unit) = linear_unit(SINGLE).unwrap();
    assert_says!(unit.forward(&ones(3).unwrap()).unwrap_err(), "module `block` … of 4, got [2, 3]");
    let line = line!() + 1;
    let error = unit.call(&ones(4).unwrap(), |_, x| Ok((x + ones(3)?)?)).unwrap_err().to_string();
    // The place comes last, after candle's backtrace if there is one.
    let want = "module `block`: shape mismatch in add, lhs: [2, 4], rhs: [2, 3]";
    assert!(error.starts_with(want) && error.ends_with(&format!("units.rs:{line})")), "{error}");
    // In the backward of an operation for which candle has no backward.
    let cut = |y: &Tensor| {
        fulgurite_core::autograd::function(&[y], ones(4)?, |_, grad| {
            Ok(vec![Some((grad + ones(3)?)?)])
        })
    };
    let (checkpointed_fabric, again) = linear_unit(&checkpointed(SINGLE, "full")).unwrap();
    let y = again.call(&ones(4).unwrap(), move |layer, x| cut(&layer.forward(x)?)).unwrap();
    let error = checkpointed_fabric.backward(&Loss::new(y.sum_all().unwrap(), 1.0)).unwrap_err();
    assert!(error.to_string().starts_with("module `block`: shape mismatch in add"), "{error}");
    drop(fabric);
}

#[test]
fn variables_outside_of_the_model_are_refused() {
    let scale = Var::ones(4, DType::F32, &Device::Cpu).unwrap();
    let scaled = |config: &str, scale: Tensor, inside: bool| {
        let (fabric, unit) = linear_unit(config)?;
        let captured = scale.clone();
        let y = unit.call(&ones(4)?, move |layer, x| {
            let y = layer.forward(x)?;
            if inside { Ok(y.broadcast_mul(&captured)?) } else { Ok(y) }
        })?;
        let y = if inside { y } else { y.broadcast_mul(&scale)? };
        fabric.backward(&Loss::new(y.sum_all()?, 1.0))
    };
    for mode in ["none", "full"] {
        let config = checkpointed(r#"{"type": "fsdp"}"#, mode);
        for inside in [false, true] {
            scaled(&config, scale.as_detached_tensor(), inside).unwrap();
            let error = scaled(&config, scale.as_tensor().clone(), inside).unwrap_err().to_string();
            assert!(
                error.contains("1 candle variable outside of the model's parameters"),
                "{error}"
            );
        }
    }
    assert_says!(
        scaled(SINGLE, scale.as_tensor().clone(), false).unwrap_err(),
        "a gradient reached 1 candle variable … shape [4] … `ModuleBuilder::parameter` …"
    );
}

/// A function over a model visits its layers by path, each with its kind and its unit.
// checklist: PyTorch: _apply_to_modules
#[test]
fn modules_are_listed_with_kinds_and_units() {
    let b = ModuleBuilder::new(ModuleInit::default());
    Linear::new(&b.pp("lm_head"), 4, 8).unwrap();
    for i in 0..2 {
        let block = |b: &ModuleBuilder| {
            RmsNorm::new(&b.pp("norm"), 4, 1e-6)?;
            Linear::new(&b.pp("mlp.up"), 4, 4)
        };
        b.unit(&format!("layers.{i}"), block).unwrap();
    }
    let tree = b.finish().unwrap();
    let listed = |within: &str| -> Vec<(String, &str, Option<usize>)> {
        let all = tree.modules().iter().filter(|(path, _)| pattern_names(within, path));
        all.map(|(path, info)| (path.clone(), info.kind, info.unit)).collect()
    };
    let expected = [("layers.0.mlp.up", 0), ("layers.1.mlp.up", 1)];
    assert_eq!(
        listed("layers.*.mlp.up"),
        expected.map(|(p, unit)| (p.to_owned(), "Linear", Some(unit)))
    );
    assert_eq!(listed("lm_head"), [("lm_head".to_owned(), "Linear", None)]);
    assert_eq!(tree.modules().len(), 5);
    assert_eq!(tree.modules()["layers.1.norm"].kind, "RmsNorm");
}
