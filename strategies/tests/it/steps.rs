//! Allowed sequences in a step: backwards with and without synchronisation, in any order, over
//! graphs that differ between ranks. The reference is one rank that does everything.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{ProcessGroup, ReduceOp};
use fulgurite_core::fabric::{Fabric, UnusedParameters};
use fulgurite_core::nn::Loss;
use fulgurite_core::optim::AdamW;
use fulgurite_core::run::ClipAlgorithm;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{ROUTE, Run, Toy, Training, gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const SINGLE: &str = r#"{"type": "single_device"}"#;
const CONFIGS: &[&str] = &[
    r#"{"type": "ddp"}"#,
    r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0}"#,
    r#"{"type": "fsdp"}"#,
    r#"{"type": "fsdp", "reshard_after_forward": false}"#,
    r#"{"type": "fsdp", "prefetch": 0}"#,
    r#"{"type": "fsdp", "prefetch": 2}"#,
    r#"{"type": "ddp", "activation_checkpointing": "full"}"#,
    r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0, "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "reshard_after_forward": false, "activation_checkpointing": "selective"}"#,
    r#"{"type": "fsdp", "prefetch": 2, "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "activation_checkpointing": {"type": "full", "offload": "disk"}}"#,
];
/// Micro-batches that each rank has in a step.
const MICRO: usize = 2;

/// Runs four steps. `step` gets this rank's parts of the global batch.
fn train(
    world: Arc<dyn ProcessGroup>,
    config: &str,
    step: impl Fn(&Fabric, &Toy, &[usize]) -> Result<()>,
) -> Result<Run> {
    let (rank, size) = (world.rank(), world.size());
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
    let (toy, optimizer) = fabric.setup(Toy::new, &AdamW { eps: 1e-4, ..AdamW::default() })?;
    let mut optimizer = optimizer.with_unused_parameters(UnusedParameters::Zero);
    // One rank does the work of RANKS ranks.
    let ranks = if size == 1 { 0..RANKS } else { rank..rank + 1 };
    let parts: Vec<usize> =
        ranks.flat_map(|rank| (0..MICRO).map(move |m| rank * MICRO + m)).collect();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        step(&fabric, &toy, &parts)?;
        losses.push(fabric.step_totals(&[])?.mean());
        norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0)?);
        optimizer.step()?;
    }
    let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
    Ok(Run { losses, norms, weights, averages: std::collections::BTreeMap::new() })
}

const RANKS: usize = 3;

fn assert_same(what: &str, run: &Run, reference: &Run) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    for i in 0..reference.losses.len() {
        let (a, b) = (run.losses[i], reference.losses[i]);
        assert!(close(a, b), "{what}: loss of step {i}: {a} and {b}");
        let (a, b) = (run.norms[i], reference.norms[i]);
        assert!(close(a, b), "{what}: norm of step {i}: {a} and {b}");
    }
    for (fqn, weights) in &reference.weights {
        for (i, (&a, &b)) in run.weights[fqn].iter().zip(weights).enumerate() {
            assert!(close(a.into(), b.into()), "{what}: {fqn}[{i}]: {a} and {b}");
        }
    }
}

/// Checks that `step` on three ranks gives the same as `reference` on one.
fn check(
    reference: impl Fn(&Fabric, &Toy, &[usize]) -> Result<()> + Sync,
    step: impl Fn(&Fabric, &Toy, &[usize]) -> Result<()> + Sync,
) {
    let reference =
        run_ranks(1, |world| train(world, SINGLE, &reference)).expect("the reference trains");
    for config in CONFIGS {
        let runs = run_ranks(RANKS, |world| train(world, config, &step))
            .unwrap_or_else(|error| panic!("{config}: {error}"));
        for run in &runs {
            assert_same(config, run, &reference[0]);
        }
    }
}

fn plain(fabric: &Fabric, toy: &Toy, parts: &[usize]) -> Result<()> {
    parts.iter().try_for_each(|&part| fabric.backward(&toy.loss(part, ROUTE)?))
}

/// Only some ranks use some parameters, so ranks finish units in different orders. All layers have
/// the same shapes, so the transport would not notice a mix-up.
#[test]
fn synchronised_backwards_with_unused_weights() {
    check(plain, plain);
}

#[test]
fn only_the_last_backward_synchronised() {
    check(plain, |fabric, toy, parts| {
        for (i, &part) in parts.iter().enumerate() {
            let _no_sync = fabric.no_backward_sync(i + 1 < parts.len());
            fabric.backward(&toy.loss(part, ROUTE)?)?;
        }
        Ok(())
    });
}

#[test]
fn synchronised_unsynchronised_synchronised() {
    let twice = |fabric: &Fabric, toy: &Toy, parts: &[usize]| {
        plain(fabric, toy, parts)?;
        plain(fabric, toy, parts)
    };
    check(twice, |fabric, toy, parts| {
        for (i, &part) in [parts, parts].concat().iter().enumerate() {
            let _no_sync = fabric.no_backward_sync(i == 1 || i == 2);
            fabric.backward(&toy.loss(part, ROUTE)?)?;
        }
        Ok(())
    });
}

#[test]
fn forwards_first_then_backwards_in_any_order() {
    for reverse in [false, true] {
        check(plain, |fabric, toy, parts| {
            let mut losses: Vec<Loss> =
                parts.iter().map(|&part| toy.loss(part, ROUTE)).collect::<Result<_>>()?;
            if reverse {
                losses.reverse();
            }
            losses.iter().try_for_each(|loss| fabric.backward(loss))
        });
    }
}

#[test]
fn one_graph_twice() {
    let twice = |fabric: &Fabric, toy: &Toy, parts: &[usize]| {
        parts.iter().try_for_each(|&part| {
            let loss = toy.loss(part, ROUTE)?;
            fabric.backward(&loss)?;
            fabric.backward(&loss)
        })
    };
    check(twice, twice);
}

fn joined(losses: [&Loss; 2]) -> Result<Loss> {
    let [a, b] = losses;
    Ok(Loss::new((a.sum() + b.sum())?, a.count() + b.count()))
}

/// Checks that `step` on three ranks gives the same as on one, or an error: that the loss joins
/// incompatible graphs or, if ranks fail at different places, that their collectives differ.
fn check_or_error(
    step: impl Fn(&Fabric, &Toy, &[usize]) -> Result<()> + Sync,
) -> Vec<&'static str> {
    let reference = run_ranks(1, |world| train(world, SINGLE, &step)).expect("one rank trains");
    let mut trained = Vec::new();
    for config in CONFIGS {
        match run_ranks(RANKS, |world| train(world, config, &step)) {
            Ok(runs) => {
                runs.iter().for_each(|run| assert_same(config, run, &reference[0]));
                trained.push(*config);
            }
            Err(error) => {
                let error = error.to_string();
                let known = ["joins the graph of a forward", "the ranks differ in collective"];
                assert!(known.iter().any(|text| error.contains(text)), "{config}: {error}");
            }
        }
    }
    trained
}

/// Only the newer forward's uses are counted for the second backward.
#[test]
fn an_older_forward_joined_with_a_newer_one() {
    let trained = check_or_error(|fabric: &Fabric, toy: &Toy, parts: &[usize]| {
        parts.chunks(MICRO).try_for_each(|own| {
            let [first, older] = [toy.loss(own[0], ROUTE)?, toy.loss(own[1], ROUTE)?];
            fabric.backward(&first)?;
            let newer = toy.loss(own[0], ROUTE)?;
            fabric.backward(&joined([&older, &newer])?)
        })
    });
    for config in CONFIGS.iter().filter(|config| !config.contains("activation_checkpointing")) {
        assert!(trained.contains(config), "{config}");
    }
}

#[test]
fn a_graph_that_was_used_joined_with_a_newer_one() {
    check_or_error(|fabric: &Fabric, toy: &Toy, parts: &[usize]| {
        parts.chunks(MICRO).try_for_each(|own| {
            let used = toy.loss(own[0], ROUTE)?;
            fabric.backward(&used)?;
            let newer = toy.loss(own[1], ROUTE)?;
            fabric.backward(&joined([&used, &newer])?)
        })
    });
}

// checklist: PyTorch: _FSDPState, look-ups by module
#[test]
fn units_called_twice_never_or_reordered() {
    for route in [&[0, 1, 0, 2, 2][..], &[0, 2], &[2, 0, 1], &[1, 1]] {
        let routed = |fabric: &Fabric, toy: &Toy, parts: &[usize]| {
            parts.iter().try_for_each(|&part| fabric.backward(&toy.loss(part, route)?))
        };
        check(routed, routed);
    }
}

#[test]
fn forwards_without_a_backward_in_between() {
    check(plain, |fabric, toy, parts| {
        for &part in parts {
            drop(toy.loss(part, ROUTE)?); // recorded, and thrown away
            let loss = toy.loss(part, ROUTE)?;
            let guard = no_grad();
            assert!(!toy.loss(part, &[2, 1])?.sum().track_op());
            drop(guard);
            fabric.backward(&loss)?;
        }
        Ok(())
    });
}

#[test]
fn early_totals_include_later_losses() {
    check(plain, |fabric, toy, parts| {
        plain(fabric, toy, &parts[..1])?;
        fabric.step_totals(&[])?;
        plain(fabric, toy, &parts[1..])
    });
}

/// Lightning switches synchronisation off by a flag that a disabled guard leaves behind.
// checklist: Lightning: no_backward_sync, whose exit set the wrong value
#[test]
fn a_disabled_guard_leaves_nothing_behind() {
    check(plain, |fabric, toy, parts| {
        drop(fabric.no_backward_sync(true));
        drop(fabric.no_backward_sync(false));
        plain(fabric, toy, parts)
    });
}

/// Values returned by a Fabric hold no lock: any call can follow while they are alive.
#[test]
fn returned_values_block_no_call() {
    for config in CONFIGS {
        run_ranks(2, |world| {
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
            let (toy, mut optimizer) = fabric.setup(Toy::new, &AdamW::default())?;
            let mesh = fabric.device_mesh();
            let tree = fabric.module_tree()?;
            let (strategy, world) = (fabric.strategy()?, fabric.world());
            let scope = fabric.forward_scope(true, 0, 0);
            let context = (fabric.context_parallel(), fabric.data_context()?);
            let no_sync = fabric.no_backward_sync(true);
            fabric.backward(&toy.loss(0, ROUTE)?)?;
            let sync = fabric.no_backward_sync(false);
            fabric.backward(&toy.loss(1, ROUTE)?)?;
            let totals = fabric.step_totals(&[])?;
            fabric.gradients()?.audit(UnusedParameters::Zero)?;
            let norm = fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
            assert_eq!(norm, optimizer.gradient_norm()?);
            optimizer.step()?;
            fabric.checkpoints().finish_load()?;
            fabric.all_reduce(&Tensor::ones(1, DType::F32, &Device::Cpu)?, ReduceOp::Sum)?;
            fabric.barrier()?;
            drop((mesh, tree, strategy, world, scope, context, no_sync, sync));
            assert_eq!(totals.count, 10.0); // 2 and 3 items on each of two ranks
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    }
}

/// A nested call, here from the backward of an operation, is an error instead of a deadlock.
#[test]
fn a_call_from_within_a_backward_is_refused() {
    use fulgurite_core::autograd::function;
    let mut fabric = Fabric::single(strategy(SINGLE).unwrap(), 3).unwrap();
    let toy = fabric.setup_module(Toy::new).unwrap();
    let loss = toy.loss(0, ROUTE).unwrap();
    let count = loss.count();
    let fabric = Arc::new(fabric);
    let inside = fabric.clone();
    let sum = function(&[loss.sum()], loss.sum().detach(), move |_, grad| {
        let mesh = inside.device_mesh();
        assert_eq!(mesh.rank(), 0);
        inside.strategy()?;
        Ok(vec![Some(grad.clone())])
    });
    let error = fabric.backward(&Loss::new(sum.unwrap(), count)).unwrap_err();
    assert_says!(error, "the strategy is at work … within another one … second thread …");
}

#[test]
fn steps_ending_unsynchronised_are_refused() {
    for config in CONFIGS {
        let errors = run_ranks(2, |world| {
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
            let (toy, mut optimizer) = fabric.setup(Toy::new, &AdamW::default())?;
            let _no_sync = fabric.no_backward_sync(true);
            drop(fabric.no_backward_sync(false));
            fabric.backward(&toy.loss(0, ROUTE)?)?;
            let before = gather_weights(fabric.module_tree()?, &**fabric.world())?;
            let error = optimizer.step().expect_err("nothing was synchronised").to_string();
            assert_eq!(gather_weights(fabric.module_tree()?, &**fabric.world())?, before);
            Ok(error)
        })
        .unwrap();
        assert_says!(errors[1], "the optimizer cannot step … under `no_backward_sync` …");
    }
}

#[test]
fn refused_deferred_step_leaves_nothing_behind() {
    for config in CONFIGS {
        let weights = |refused: bool| {
            run_ranks(2, |world| {
                let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
                let (toy, optimizer) = fabric.setup(Toy::new, &AdamW::default())?;
                let mut optimizer = optimizer.with_unused_parameters(UnusedParameters::Zero);
                for step in 0..2 {
                    {
                        let _no_sync = fabric.no_backward_sync(true);
                        fabric.backward(&toy.loss(step, ROUTE)?)?;
                    }
                    if refused {
                        let clip = Some((1e-3, ClipAlgorithm::Norm));
                        optimizer.clip_and_step(clip).expect_err("nothing was synchronised");
                    }
                    fabric.backward(&toy.loss(step, ROUTE)?)?;
                    let pending = optimizer.clip_and_step(None)?;
                    optimizer.read(pending)?;
                }
                gather_weights(fabric.module_tree()?, &**fabric.world())
            })
            .unwrap()
        };
        assert_eq!(weights(true), weights(false), "{config}");
    }
}

/// Two synchronised backwards of the transformer, against one.
#[test]
fn two_synchronised_backwards_are_as_one() {
    for config in [CONFIGS[0], CONFIGS[1], CONFIGS[2], CONFIGS[3]] {
        let run = |all: bool| {
            run_ranks(3, |world| {
                let mut training = Training::new(world, config, DType::F32, 2)?;
                (0..5)
                    .map(|_| {
                        training.micro_step(0, all)?;
                        training.micro_step(1, true)?;
                        training.finish_step()
                    })
                    .collect::<Result<Vec<_>>>()
            })
            .unwrap()
        };
        for (one, two) in run(false)[0].iter().zip(&run(true)[0]) {
            assert!((one.0 - two.0).abs() < 1e-5 * one.0, "{config}: losses {one:?} {two:?}");
            assert!((one.1 - two.1).abs() < 1e-5 * one.1, "{config}: norms {one:?} {two:?}");
        }
    }
}
