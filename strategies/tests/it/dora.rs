//! Adapters with magnitudes (DoRA) train as on one device on every mesh. They start as the model
//! next to them, wherever it is loaded from, and move between meshes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

use fulgurite_core::collective::{Counter, Record};
use fulgurite_core::module::Adapters;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Run, Variant};
use fulgurite_transports::run_ranks;

use crate::adapters::{SINGLE, assert_as, mesh};

const FSDP: &str = r#"{"type": "fsdp"}"#;
/// Width and blocks of the decoder.
const WIDTH: u64 = 8;
const BLOCKS: u64 = 3;

fn adapters() -> Adapters {
    let targets = ["*_proj", "mlp.up", "mlp.down"];
    Adapters { rank: 2, alpha: 3.0, dropout: 0.2, dora: true, ..Adapters::new(targets) }
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

/// The norms of the rows of the adapted weights, by the names of their magnitudes.
fn row_norms(weights: &BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let norms = |(fqn, magnitude): (&String, &Vec<f32>)| {
        let layer = fqn.strip_suffix(".lora_magnitude_vector")?;
        let weight = &weights[&format!("{layer}.weight")];
        let rows = weight.chunks(weight.len() / magnitude.len());
        let norm = |row: &[f32]| row.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt() as f32;
        Some((fqn.clone(), rows.map(norm).collect()))
    };
    weights.iter().filter_map(norms).collect()
}

fn assert_norms(what: &str, weights: &BTreeMap<String, Vec<f32>>, are: bool) {
    let norms = row_norms(weights);
    assert!(!norms.is_empty());
    for (fqn, norms) in norms {
        let same = weights[&fqn].iter().zip(&norms).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs());
        assert_eq!(same, are, "{what}: {fqn}: {:?} and {norms:?}", weights[&fqn]);
    }
}

#[test]
fn training_starts_from_the_model_as_it_is() {
    let plain = run_ranks(1, |world| {
        let mut adapters = adapters();
        adapters.dora = false;
        DecoderTraining::with_adapters(world, SINGLE, Variant::default(), 1, adapters)?.step()
    });
    let (expected, _) = plain.unwrap()[0];
    let ddp = r#"{"type": "ddp"}"#;
    let meshes = [(1, SINGLE.to_owned()), (3, ddp.to_owned()), (3, FSDP.to_owned())];
    let cut = [mesh([1, 2, 1, 2]), mesh([1, 1, 1, 4]), mesh([2, 2, 1, 1])].map(|mesh| (4, mesh));
    for (ranks, config) in meshes.into_iter().chain(cut) {
        let runs = run_ranks(ranks, |world| {
            let mut training =
                DecoderTraining::with_adapters(world, &config, Variant::default(), 1, adapters())?;
            Ok((training.weights()?, training.step()?.0))
        });
        let (weights, loss) = runs.unwrap().swap_remove(0);
        assert_norms(&config, &weights, true);
        assert!((loss - expected).abs() <= 1e-6 * expected, "{config}: {loss}, {expected}");
    }
    assert_norms("trained", &ONE_DEVICE.weights, false);
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
    let expected = save(FSDP, 2, temp.path());
    let meshes =
        [(2, FSDP.to_owned(), 0.0), (4, mesh([1, 2, 1, 2]), 2e-5), (1, SINGLE.into(), 2e-5)];
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

/// Magnitudes follow the base until training, a checkpoint or an adapter sets them.
#[test]
fn a_base_loads_before_or_after_an_adapter() {
    let temp = tempfile::tempdir().unwrap();
    save(FSDP, 2, temp.path());
    let (base, adapter) = (temp.path().join("base"), temp.path().join("adapter"));
    run_ranks(1, |world| {
        let frozen: &[&str] = &[];
        let mut training =
            DecoderTraining::with_frozen(world, SINGLE, Variant::default(), 1, frozen)?;
        for _ in 0..3 {
            training.step()?;
        }
        training.save(&base)
    })
    .unwrap();
    for (ranks, config) in [(1, SINGLE.to_owned()), (3, FSDP.to_owned()), (4, mesh([1, 2, 1, 2]))] {
        let start = |before: bool, after: bool, steps: usize| {
            let runs = run_ranks(ranks, |world| {
                let mut training = DecoderTraining::with_adapters(
                    world,
                    &config,
                    Variant::default(),
                    1,
                    adapters(),
                )?;
                for _ in 0..steps {
                    training.step()?;
                }
                if before {
                    training.fabric.checkpoints().load_adapter(&adapter)?;
                }
                let start = training.weights()?;
                training.fabric.load_raw(&base, true)?;
                let loaded = training.weights()?;
                if after {
                    training.fabric.checkpoints().load_adapter(&adapter)?;
                }
                Ok((start, loaded, training.weights()?, training.step()?.0))
            });
            runs.unwrap().swap_remove(0)
        };
        let (fresh, loaded, ..) = start(false, false, 0);
        assert_norms(&config, &loaded, true);
        for fqn in row_norms(&fresh).keys() {
            assert_ne!(fresh[fqn], loaded[fqn], "{fqn}");
        }
        let (_, _, one, loss) = start(true, false, 0);
        let (_, _, other, same_loss) = start(false, true, 0);
        assert_norms(&config, &one, false);
        assert_eq!(one, other, "{config}");
        assert_eq!(loss, same_loss);
        let (trained, loaded, ..) = start(false, false, 1);
        for fqn in row_norms(&trained).keys() {
            assert_eq!(trained[fqn], loaded[fqn], "{fqn} was trained");
        }
    }
}

#[test]
fn an_adapter_alone_moves_between_meshes() {
    let temp = tempfile::tempdir().unwrap();
    save(&mesh([1, 2, 1, 2]), 4, temp.path());
    let (adapter, resaved) = (temp.path().join("adapter"), temp.path().join("resaved"));
    for (ranks, config) in [(3, FSDP.to_owned()), (2, mesh([1, 1, 1, 2]))] {
        run_ranks(ranks, |world| {
            let training =
                DecoderTraining::with_adapters(world, &config, Variant::default(), 1, adapters())?;
            training.fabric.checkpoints().load_adapter(&adapter)?;
            training.fabric.checkpoints().save_adapter(&resaved).map(drop)
        })
        .unwrap();
        let config = |dir: &Path| std::fs::read_to_string(dir.join("adapter_config.json")).unwrap();
        assert_eq!(config(&resaved), config(&adapter));
        assert!(config(&adapter).contains(r#""use_dora": true"#));
        let tensors = |dir: &Path| {
            let file = dir.join("adapter_model.safetensors");
            let tensors = candle_core::safetensors::load(file, &candle_core::Device::Cpu).unwrap();
            let values =
                |t: candle_core::Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            tensors.into_iter().map(|(name, t)| (name, values(t))).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(tensors(&resaved), tensors(&adapter));
        assert!(tensors(&adapter).keys().any(|name| {
            name.starts_with("base_model.model.") && name.ends_with(".q_proj.lora_magnitude_vector")
        }));
    }
    for dora in [true, false] {
        let error = run_ranks(1, |world| {
            let mut other = adapters();
            other.dora = !dora;
            let (single, of) = (SINGLE, Variant::default());
            let ours = DecoderTraining::with_adapters(world.clone(), single, of, 1, other)?;
            let dir = temp.path().join("other");
            ours.fabric.checkpoints().save_adapter(&dir)?;
            let mut own = adapters();
            own.dora = dora;
            let theirs = DecoderTraining::with_adapters(world, single, of, 1, own)?;
            theirs.fabric.checkpoints().load_adapter(&dir)
        });
        let error = error.unwrap_err().to_string();
        let error = error.rsplit_once("other: ").map_or(error.as_str(), |(_, message)| message);
        match dora {
            true => {
                assert_says!(error, "has no magnitudes … `trainer.adapters.dora = false` …")
            }
            false => {
                assert_says!(error, "has magnitudes … `trainer.adapters.dora = true` …")
            }
        }
    }
}

/// Ranks with a part of the inputs sum the squares of each row once per forward, and gradients of
/// the magnitudes together with the gradients of `B`.
#[test]
fn rowwise_layers_sum_their_squared_norms() {
    let reductions = |dora: bool| {
        let mut records = run_ranks(2, |world| {
            let counter = Counter::default();
            let world = counter.watch(world);
            let adapters = Adapters { dora, ..adapters() };
            let config = mesh([1, 1, 1, 2]);
            let mut training =
                DecoderTraining::with_adapters(world, &config, Variant::default(), 1, adapters)?;
            training.step()?;
            counter.reset();
            training.step()?;
            Ok(counter.snapshot())
        })
        .unwrap();
        let mut record = records.swap_remove(0);
        (record.remove(&("tensor_parallel".to_owned(), "all_reduce")).unwrap(), record)
    };
    let ((with, others), (without, same)) = (reductions(true), reductions(false));
    assert_eq!(others, same);
    // The output projections of attention and MLP.
    let rows = 2 * BLOCKS;
    let norms = Record { calls: rows, bytes: 4 * rows * WIDTH };
    let gradients = 4 * rows * WIDTH;
    assert_eq!(with.calls, without.calls + norms.calls);
    assert_eq!(with.bytes, without.bytes + norms.bytes + gradients);
}
