//! Asynchronous copies of gradients to the host under `cpu_offload`: when they start and when they
//! are awaited. A separate program, because the fake copies are global to the process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::function;
use fulgurite_core::execution::transfer::{self, HostCopies, HostCopy};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::Sgd;
use fulgurite_test_support::training::{gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const UNITS: usize = 4;
const WIDTH: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Happened {
    /// A copy of this many elements has started.
    Begun(usize),
    Waited,
    /// The gradient of a unit's input is complete.
    BackwardOf(usize),
    BackwardOver,
}

thread_local! {
    static LOG: RefCell<Vec<Happened>> = const { RefCell::new(Vec::new()) };
}

fn log(what: Happened) {
    LOG.with_borrow_mut(|log| log.push(what));
}

/// Fake device copies: the values arrive when they are awaited, and are garbage before.
struct Queued;

impl HostCopies for Queued {
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.force_contiguous()?)
    }

    fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.force_contiguous()?)
    }

    fn begin_to_host(&self, tensor: &Tensor) -> Result<HostCopy> {
        log(Happened::Begun(tensor.elem_count()));
        let source = tensor.clone();
        Ok(HostCopy::new(move || {
            log(Happened::Waited);
            Ok(source.force_contiguous()?)
        }))
    }
}

struct Model(Vec<Unit<Linear>>);

impl Model {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let unit = |i| b.unit(&format!("units.{i}"), |b| Linear::new(b, WIDTH, WIDTH));
        Ok(Self((0..UNITS).map(unit).collect::<Result<_>>()?))
    }

    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let mut x = x.clone();
        for (i, unit) in self.0.iter().enumerate() {
            let y = x.force_contiguous()?.detach();
            x = function(&[&x], y, move |_, grad| {
                log(Happened::BackwardOf(i));
                Ok(vec![Some(grad.clone())])
            })?;
            x = unit.forward(&x)?.tanh()?;
        }
        Ok(Loss::new(x.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

/// Returns the weights after three steps, and rank 0's log of the last step.
fn train(
    ranks: usize,
    config: &str,
    accumulate: usize,
) -> (BTreeMap<String, Vec<f32>>, Vec<Happened>) {
    let runs = run_ranks(ranks, |world| {
        let rank = world.rank();
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let optimizer = Sgd { lr: 0.01, ..Sgd::default() };
        let (model, mut optimizer) = fabric.setup(Model::new, &optimizer)?;
        let x = Tensor::arange(0f32, (2 * WIDTH) as f32, &Device::Cpu)?.reshape((2, WIDTH))?;
        let x = (x + rank as f64)?.sin()?;
        for _ in 0..3 {
            LOG.take();
            for micro in 0..accumulate {
                let _no_sync = fabric.no_backward_sync(micro + 1 < accumulate);
                fabric.backward(&model.loss(&x)?)?;
                log(Happened::BackwardOver);
            }
            fabric.step_totals(&[])?;
            fabric.clip_gradients_norm(&mut optimizer, 0.5)?;
            optimizer.step()?;
        }
        Ok((gather_weights(fabric.module_tree()?, &**fabric.world())?, LOG.take()))
    });
    runs.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

fn begun(log: &[Happened]) -> usize {
    log.iter().filter(|what| matches!(what, Happened::Begun(_))).count()
}

// checklist: torchtune: CPUOffloadPolicy
#[test]
fn gradients_are_copied_during_backward() {
    let offloaded = |config: &str| config.replacen('{', r#"{"cpu_offload": true, "#, 1);
    let fsdp = r#"{"type": "fsdp"}"#;
    let hsdp = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;
    let plain: Vec<_> = [(2, fsdp, 1), (2, fsdp, 2), (4, hsdp, 1)]
        .map(|(ranks, config, accumulate)| train(ranks, config, accumulate))
        .into();
    let copied: Vec<_> = [(2, fsdp, 1), (2, fsdp, 2), (4, hsdp, 1)]
        .map(|(ranks, config, accumulate)| train(ranks, &offloaded(config), accumulate))
        .into();
    // Without asynchronous copies, each copy waits for the device when it starts.
    assert!(copied.iter().all(|(_, log)| begun(log) == 0));
    transfer::set_host_copies(&Device::Cpu, Arc::new(Queued));
    let runs = [(2, fsdp, 1), (2, fsdp, 2), (4, hsdp, 1)];
    for (i, (ranks, config, accumulate)) in runs.into_iter().enumerate() {
        let (weights, log) = train(ranks, &offloaded(config), accumulate);
        assert_eq!(weights, plain[i].0, "{config}");
        assert_eq!(weights, copied[i].0, "{config}");
        assert_eq!(begun(&log), UNITS, "{config}: {log:?}");
        let begins: Vec<usize> = (0..log.len())
            .filter(|&at| matches!(log[at], Happened::Begun(n) if n == WIDTH * WIDTH / 2))
            .collect();
        let waits: Vec<usize> = (0..log.len()).filter(|&at| log[at] == Happened::Waited).collect();
        assert_eq!((begins.len(), waits.len()), (UNITS, UNITS), "{config}: {log:?}");
        let over = log.iter().rposition(|what| *what == Happened::BackwardOver).unwrap();
        assert!(waits[UNITS - 1] < over, "{config}: {log:?}");
        // All copies start before the first wait.
        assert!(begins[UNITS - 1] < waits[0], "{config}: {log:?}");
        // Before the first unit's backward: each reduction is awaited when the next unit's starts.
        let edge = log.iter().rposition(|what| *what == Happened::BackwardOf(1)).unwrap();
        let early = begins.iter().filter(|&&at| at < edge).count();
        let expected = if config == hsdp { 0 } else { UNITS - 2 };
        assert_eq!(early, expected, "{config}: {log:?}");
        assert!(waits[0] > edge, "{config}: {log:?}");
    }
    // A tensor already on the host is not copied.
    let x = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(transfer::begin_to_host(&x, "test").unwrap().wait().unwrap().dims(), [3]);
    assert_eq!(transfer::counts()["test"].to_host, 12);
}
