//! Adapters train as on one device on every mesh, and move between meshes and to PEFT's format.

use std::path::Path;
use std::sync::LazyLock;

use fulgurite_core::module::{AdapterBias, Adapters};
use fulgurite_test_support::training::{DecoderTraining, Run, Variant};
use fulgurite_transports::run_ranks;

pub(crate) const SINGLE: &str = r#"{"type": "single_device"}"#;

fn adapters() -> Adapters {
    Adapters {
        rank: 2,
        alpha: 3.0,
        dropout: 0.2,
        bias: AdapterBias::AdapterOnly,
        modules_to_save: vec!["post_norm".to_owned()],
        ..Adapters::new(["*_proj", "mlp.up", "mlp.down", "embedding"])
    }
}

pub(crate) fn mesh([replicate, shard, context, tensor]: [usize; 4]) -> String {
    format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
            "data_parallel_shard_size": {shard}, "context_parallel_size": {context},
            "tensor_parallel_size": {tensor}}}"#
    )
}

fn train(ranks: usize, config: &str, variant: Variant, accumulate: usize) -> Run {
    let what = format!("{config}, {variant:?}, {accumulate} micro-batches");
    let mut runs = run_ranks(ranks, |world| {
        DecoderTraining::with_adapters(world, config, variant, accumulate, adapters())?.run()
    })
    .unwrap_or_else(|error| panic!("{what}: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{what}: ranks differ");
    run
}

static ONE_DEVICE: LazyLock<Run> = LazyLock::new(|| train(1, SINGLE, Variant::default(), 1));

fn check(ranks: usize, config: &str, variant: Variant, accumulate: usize) {
    let what = format!("{config}, {variant:?}, {accumulate}");
    assert_as(&what, &train(ranks, config, variant, accumulate), &ONE_DEVICE);
}

/// Checks losses, norms and weights of a run against the run on one device.
pub(crate) fn assert_as(what: &str, run: &Run, single: &Run) {
    for (name, run, single) in
        [("loss", &run.losses, &single.losses), ("norm", &run.norms, &single.norms)]
    {
        for (i, (a, b)) in run.iter().zip(single).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: {name} of step {i}: {a} and {b}");
        }
    }
    for (fqn, weights) in &single.weights {
        for (i, (a, b)) in run.weights[fqn].iter().zip(weights).enumerate() {
            assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{what}: {fqn}[{i}]: {a}, {b}");
        }
    }
}

#[test]
fn the_adapters_are_trained_and_the_base_stays() {
    let start = run_ranks(1, |world| {
        DecoderTraining::with_adapters(world, SINGLE, Variant::default(), 1, adapters())?.weights()
    });
    let start = start.unwrap().swap_remove(0);
    let end = &ONE_DEVICE.weights;
    for (fqn, values) in &start {
        let trained = fqn.contains(".lora_")
            || fqn.contains("post_norm")
            || (fqn.ends_with(".bias") && (fqn.contains("_proj") || fqn.contains("mlp")));
        assert_eq!(end[fqn] != *values, trained, "{fqn}");
    }
}

#[test]
fn as_on_one_device_with_data_parallelism() {
    for ranks in 1..=4 {
        for strategy in ["ddp", "fsdp"] {
            check(ranks, &format!(r#"{{"type": "{strategy}"}}"#), Variant::default(), 1);
        }
    }
    let full = r#"{"type": "fsdp", "activation_checkpointing": "full"}"#;
    check(2, full, Variant::default(), 2);
    check(4, &mesh([2, 2, 1, 1]), Variant::default(), 2);
}

#[test]
fn as_on_one_device_with_tensor_parallelism() {
    for variant in Variant::ALL {
        check(2, &mesh([1, 1, 1, 2]), variant, 1);
        check(4, &mesh([1, 2, 1, 2]), variant, 2);
    }
    // More ranks than key and value heads.
    check(4, &mesh([1, 1, 1, 4]), Variant::ALL[3], 1);
    check(4, &mesh([1, 1, 2, 2]), Variant::ALL[1], 1);
}

/// Trains five steps on one mesh, saves everything and the adapter, and returns the losses of five
/// more steps.
fn save(config: &str, ranks: usize, dir: &Path) -> Vec<f64> {
    let losses = run_ranks(ranks, |world| {
        let mut training =
            DecoderTraining::with_adapters(world, config, Variant::default(), 1, adapters())?;
        for _ in 0..5 {
            training.step()?;
        }
        training.save(&dir.join("all"))?;
        training.fabric.checkpoints().save_adapter(dir.join("adapter"))?;
        (0..5).map(|_| Ok(training.step()?.0)).collect::<fulgurite_core::Result<Vec<f64>>>()
    });
    losses.unwrap().swap_remove(0)
}

#[test]
fn training_resumes_from_any_meshs_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let fsdp = r#"{"type": "fsdp"}"#;
    let expected = save(fsdp, 2, temp.path());
    let meshes =
        [(2, fsdp.to_owned(), 0.0), (4, mesh([1, 2, 1, 2]), 2e-5), (1, SINGLE.into(), 2e-5)];
    for (ranks, config, tolerance) in meshes {
        let losses = run_ranks(ranks, |world| {
            let mut training =
                DecoderTraining::with_adapters(world, &config, Variant::default(), 1, adapters())?;
            training.load(&temp.path().join("all"))?;
            (0..5).map(|_| Ok(training.step()?.0)).collect::<fulgurite_core::Result<Vec<f64>>>()
        });
        for (a, b) in losses.unwrap()[0].iter().zip(&expected) {
            assert!((a - b).abs() <= tolerance * b, "{config}: {a} and {b}");
        }
    }
}

#[test]
fn adapters_move_between_meshes_bitwise() {
    let temp = tempfile::tempdir().unwrap();
    save(&mesh([1, 2, 1, 2]), 4, temp.path());
    let adapter = temp.path().join("adapter");
    let resaved = temp.path().join("resaved");
    for (ranks, config) in [(3, r#"{"type": "fsdp"}"#.to_owned()), (2, mesh([1, 1, 1, 2]))] {
        run_ranks(ranks, |world| {
            let training =
                DecoderTraining::with_adapters(world, &config, Variant::default(), 1, adapters())?;
            training.fabric.checkpoints().load_adapter(&adapter)?;
            training.fabric.checkpoints().save_adapter(&resaved).map(drop)
        })
        .unwrap();
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
            match file.ends_with("json") {
                true => assert_eq!(read(&resaved), read(&adapter), "{config}"),
                false => {
                    let tensors = |dir: &Path| {
                        candle_core::safetensors::load(dir.join(file), &candle_core::Device::Cpu)
                            .unwrap()
                    };
                    let (new, old) = (tensors(&resaved), tensors(&adapter));
                    assert_eq!(new.len(), old.len());
                    for (name, tensor) in &old {
                        let values = |t: &candle_core::Tensor| {
                            t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                        };
                        assert_eq!(values(&new[name]), values(tensor), "{name}");
                    }
                }
            }
        }
    }
    let other = Adapters { rank: 3, ..adapters() };
    let error = run_ranks(1, |world| {
        let training =
            DecoderTraining::with_adapters(world, SINGLE, Variant::default(), 1, other.clone())?;
        training.fabric.checkpoints().load_adapter(&adapter)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("is an adapter of rank 2"), "{error}");
    let fewer = Adapters { exclude: vec!["q_proj".to_owned()], ..adapters() };
    let error = run_ranks(1, |world| {
        let training =
            DecoderTraining::with_adapters(world, SINGLE, Variant::default(), 1, fewer.clone())?;
        training.fabric.checkpoints().load_adapter(&adapter)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("for which the model has no adapter"), "{error}");
}
