//! Every mesh loads the checkpoints of every other mesh: model and optimizer to the bit, and the
//! next step is equal to a step without interruption.

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite_checkpoint_local as _;
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

/// A mesh: ranks, strategy, plan.
type Mesh = (usize, &'static str, Variant);

const PLAIN: Variant = Variant::ALL[0];
const PARTS: Variant = Variant::ALL[3];

const MESHES: [Mesh; 16] = [
    (1, r#"{"type": "single_device"}"#, PLAIN),
    (1, r#"{"type": "ddp"}"#, PLAIN),
    (1, r#"{"type": "fsdp"}"#, PLAIN),
    (2, r#"{"type": "ddp"}"#, PLAIN),
    (2, r#"{"type": "fsdp"}"#, PLAIN),
    (2, r#"{"type": "tp", "tensor_parallel_size": 2}"#, PARTS),
    (
        2,
        r#"{"type": "model_parallel", "context_parallel_size": 2, "tensor_parallel_size": 1}"#,
        PLAIN,
    ),
    (3, r#"{"type": "ddp"}"#, PLAIN),
    (3, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "ddp"}"#, PLAIN),
    (4, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#, PLAIN),
    (4, r#"{"type": "tp", "tensor_parallel_size": 4}"#, PLAIN),
    (4, r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#, PARTS),
    (
        4,
        r#"{"type": "model_parallel", "context_parallel_size": 4, "tensor_parallel_size": 1}"#,
        PLAIN,
    ),
    (
        4,
        r#"{"type": "model_parallel", "context_parallel_size": 2, "tensor_parallel_size": 2}"#,
        PARTS,
    ),
];

/// Steps before the save.
const STEPS: u64 = 3;

type Tensors = BTreeMap<String, Vec<f32>>;

/// The state of a run: weights, optimizer state, and loss and norm of the next step.
#[derive(Debug, PartialEq)]
struct Standing {
    weights: Tensors,
    optimizer: Tensors,
    next: (f64, f64),
}

fn standing(training: &mut DecoderTraining) -> fulgurite_core::Result<Standing> {
    let (weights, optimizer) = (training.weights()?, training.optimizer_state()?);
    Ok(Standing { weights, optimizer, next: training.step()? })
}

/// Trains, saves, and continues.
fn save((ranks, config, variant): Mesh, path: &Path) -> Standing {
    let mut all = run_ranks(ranks, |world| {
        let mut training = DecoderTraining::new(world, config, variant, 1)?;
        for _ in 0..STEPS {
            training.step()?;
        }
        training.save(path)?;
        standing(&mut training)
    })
    .unwrap_or_else(|error| panic!("saving on {config}: {error}"));
    all.swap_remove(0)
}

fn load((ranks, config, variant): Mesh, path: &Path) -> Standing {
    let mut all = run_ranks(ranks, |world| {
        let mut training = DecoderTraining::new(world, config, variant, 1)?;
        training.load(path)?;
        standing(&mut training)
    })
    .unwrap_or_else(|error| panic!("loading on {config}: {error}"));
    all.swap_remove(0)
}

/// Checks that all meshes load the checkpoints of the meshes in `saving`.
fn check(saving: &[Mesh]) {
    for &source in saving {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("saved");
        let saved = save(source, &path);
        assert!(
            saved.optimizer.len() > 40 && saved.optimizer.values().flatten().any(|x| *x != 0.0)
        );
        for target in MESHES {
            let loaded = load(target, &path);
            let what =
                format!("from {} ranks of {} to {} of {}", source.0, source.1, target.0, target.1);
            assert_eq!(loaded.weights, saved.weights, "{what}");
            assert_eq!(loaded.optimizer, saved.optimizer, "{what}");
            if target == source {
                assert_eq!(loaded.next, saved.next, "{what}");
            }
            for (a, b) in [(loaded.next.0, saved.next.0), (loaded.next.1, saved.next.1)] {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} and {b}");
            }
        }
    }
}

#[test]
fn every_mesh_loads_what_up_to_three_ranks_saved() {
    check(&MESHES[..9]);
}

#[test]
fn every_mesh_loads_what_four_ranks_saved() {
    check(&MESHES[9..]);
}
