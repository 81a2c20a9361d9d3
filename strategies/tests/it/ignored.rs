//! Parameters excluded from data parallelism, under every strategy.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::collective::{Counter, ProcessGroup, ReduceOp};
use fulgurite_core::mesh::DP_CP;
use fulgurite_core::parameter::Parameter;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Training, Variant};
use fulgurite_transports::run_ranks;

const SINGLE: (usize, &str) = (1, r#"{"type": "single_device"}"#);

/// Ignores the first layer's MLP, and the last norm, which no unit gathers.
fn strategies() -> Vec<(usize, String)> {
    [
        (2, r#""type": "ddp""#),
        (4, r#""type": "fsdp""#),
        (2, r#""type": "fsdp", "accumulation_sync": "reduce_scatter""#),
        (4, r#""type": "hsdp", "data_parallel_replicate_size": 2"#),
        (4, r#""type": "fsdp_tp", "tensor_parallel_size": 2"#),
    ]
    .map(|(ranks, config)| {
        (ranks, format!(r#"{{{config}, "ignored": ["layers.0.mlp", ".norm"]}}"#))
    })
    .into()
}

fn is_ignored(parameter: &Parameter) -> bool {
    parameter.fqn().starts_with("layers.0.mlp.") || parameter.fqn() == "norm.weight"
}

fn training(
    world: Arc<dyn ProcessGroup>,
    config: &str,
    frozen: &[&str],
) -> Result<DecoderTraining> {
    DecoderTraining::with_frozen(world, config, Variant::default(), 2, frozen)
}

/// A step in which the program sums the ignored gradients itself.
fn step(training: &mut DecoderTraining) -> Result<(f64, f64)> {
    for micro in 0..2 {
        training.micro_step(micro, micro == 1)?;
    }
    let fabric = &training.fabric;
    for parameter in fabric.module_tree()?.parameters().iter().filter(|p| is_ignored(p)) {
        if let Some(grad) = parameter.local_grad() {
            fabric.collectives(DP_CP)?.all_reduce(&grad, ReduceOp::Sum)?;
        }
    }
    let loss = fabric.step_totals(&[])?.mean();
    let norm = training.fabric.clip_gradients_norm(&mut training.optimizer, 0.5)?;
    training.optimizer.step()?;
    training.step += 1;
    Ok((loss, norm))
}

type Trained = (Vec<(f64, f64)>, BTreeMap<String, Vec<f32>>);

fn three_steps((ranks, config): (usize, &str), frozen: &[&str]) -> Trained {
    let trained = run_ranks(ranks, |world| {
        let mut training = training(world, config, frozen)?;
        let steps = (0..3).map(|_| step(&mut training)).collect::<Result<_>>()?;
        Ok((steps, training.weights()?))
    });
    trained.unwrap().swap_remove(0)
}

/// Steps, norms and weights equal one device's if the program sums the ignored gradients, or if
/// ignored parameters are frozen.
// checklist: PyTorch: ignored modules and parameters
#[test]
fn ignored_parameters_match_one_device() {
    for frozen in [&[][..], &[".norm.weight", "layers.0.mlp.*.weight"]] {
        let (expected, weights) = three_steps(SINGLE, frozen);
        for (ranks, config) in strategies() {
            let (steps, found) = three_steps((ranks, &config), frozen);
            for ((loss, norm), (a, b)) in steps.iter().zip(&expected) {
                assert!((loss - a).abs() < 1e-5 && (norm - b).abs() < 1e-4, "{config}: {steps:?}");
            }
            for (fqn, values) in &found {
                let far = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-5;
                assert!(!values.iter().zip(&weights[fqn]).any(far), "{config}: `{fqn}`");
            }
        }
    }
}

/// A rank holds them whole, with its own gradients, and they are neither gathered nor reduced.
// checklist: PyTorch: ignored modules and parameters
#[test]
fn ignored_parameters_are_whole_and_local() {
    for config in [r#""type": "ddp""#, r#""type": "fsdp""#] {
        let config = format!(r#"{{{config}, "ignored": ["layers.1", ".norm.weight"]}}"#);
        let counted = run_ranks(3, |world| {
            let counter = Counter::default();
            let world = counter.watch(world);
            let mut training = Training::new(world, &config, DType::F32, 1)?;
            training.step()?;
            counter.reset();
            training.step()?;
            let tree = training.fabric.module_tree()?;
            for parameter in tree.parameters() {
                // A parameter of one row is whole on the rank that has it.
                if parameter.global_shape()[0] == 1 {
                    continue;
                }
                let whole = parameter.local()?.values.elem_count() == parameter.elem_count();
                let ignored =
                    parameter.fqn().starts_with("layers.1.") || parameter.fqn() == "norm.weight";
                assert_eq!(
                    whole,
                    ignored || config.contains("ddp"),
                    "{config}: `{}`",
                    parameter.fqn()
                );
            }
            let bytes = |op| {
                let tally = counter.snapshot().into_iter().filter(|((_, other), _)| *other == op);
                tally.map(|(_, record)| record.bytes).sum::<u64>()
            };
            let tree = tree.clone();
            Ok((bytes("all_gather_into"), bytes("reduce_scatter"), bytes("all_reduce"), tree))
        });
        let (gathered, scattered, reduced, tree) = counted.unwrap().swap_remove(0);
        let of = |takes: &dyn Fn(&Parameter, Option<usize>) -> bool| {
            let all = tree.parameters().iter().zip(tree.owners());
            let managed =
                all.filter(|(p, _)| !p.fqn().starts_with("layers.1.") && p.fqn() != "norm.weight");
            managed
                .filter(|(p, owner)| takes(p, **owner))
                .map(|(p, _)| 4 * p.elem_count() as u64)
                .sum::<u64>()
        };
        let gradients = of(&|parameter, _| parameter.requires_grad());
        let units = of(&|_, owner| owner.is_some());
        // The totals of the loss, and the norm.
        let scalars = 16 + 8;
        match config.contains("ddp") {
            true => assert_eq!((gathered, scattered, reduced), (0, 0, gradients + scalars)),
            // A unit is gathered in forward and in backward, the root once.
            false => {
                let gathers = 2 * units + of(&|_, owner| owner.is_none());
                assert_eq!((gathered, scattered, reduced), (gathers, gradients, scalars));
            }
        }
    }
}

/// If a rank's own gradients were not summed, the values differ, and no checkpoint can hold them.
/// Untrained parameters are equal, and are saved and loaded on any mesh.
// checklist: PyTorch: ignored modules and parameters
#[test]
fn ignored_parameters_are_saved_if_ranks_agree() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (_, config) = &strategies()[1];
    let error = run_ranks(4, |world| {
        let mut training = training(world, config, &[])?;
        training.step()?;
        training.save(&directory.join("apart"))
    });
    assert_says!(error.unwrap_err(), "parameter `layers.0.mlp.gate_proj.weight` … rank 1 differ …");
    assert!(!directory.join("apart").exists());

    let weights = run_ranks(4, |world| {
        let mut training = training(world, config, &[])?;
        step(&mut training)?;
        training.save(&directory.join("alike"))?;
        training.weights()
    });
    let weights = weights.unwrap().swap_remove(0);
    for (ranks, config) in strategies().iter().map(|(n, c)| (*n, c.as_str())).chain([SINGLE]) {
        let loaded = run_ranks(ranks, |world| {
            let mut training = training(world, config, &[])?;
            training.load(&directory.join("alike"))?;
            training.weights()
        });
        assert_eq!(loaded.unwrap()[0], weights, "{config}");
    }
}

#[test]
fn a_pattern_that_names_nothing_is_an_error() {
    let config = r#"{"type": "fsdp", "ignored": ["norm", "layers.0.mpl"]}"#;
    let error = run_ranks(1, |world| training(world, config, &[]).map(drop)).unwrap_err();
    assert_says!(error, "`trainer.strategy.ignored`: no parameter matches `layers.0.mpl` …");
}
