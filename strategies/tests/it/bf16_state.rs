//! Optimizer state in bf16: equal on every mesh, saved in checkpoints, and as good for training.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::checkpoint::{DistributedCheckpoint, TensorSource as _};
use fulgurite_core::optim::{AdamW, GradScale, OptimizerConfig, Sgd, StateDtype};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;
use half::bf16;

/// A mesh: ranks, strategy, plan.
type Mesh = (usize, &'static str, Variant);

const PLAIN: Variant = Variant::ALL[0];
const PARTS: Variant = Variant::ALL[3];

const ONE: Mesh = (1, r#"{"type": "single_device"}"#, PLAIN);
const MESHES: [Mesh; 10] = [
    ONE,
    (1, r#"{"type": "fsdp"}"#, PLAIN),
    (2, r#"{"type": "ddp"}"#, PLAIN),
    (2, r#"{"type": "fsdp"}"#, PLAIN),
    (3, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "fsdp"}"#, PLAIN),
    (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#, PLAIN),
    (2, r#"{"type": "tp", "tensor_parallel_size": 2}"#, PARTS),
    (4, r#"{"type": "tp", "tensor_parallel_size": 4}"#, PLAIN),
    (4, r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#, PARTS),
];

fn adamw(state_dtype: StateDtype) -> AdamW {
    AdamW { state_dtype, ..DecoderTraining::adamw() }
}

/// Runs `f` with a decoder in training on every rank of a mesh, and returns rank 0's result.
fn on<T: Send>(
    (ranks, config, variant): Mesh,
    optimizer: &dyn OptimizerConfig,
    f: impl Fn(&mut DecoderTraining) -> Result<T> + Sync,
) -> T {
    let all = run_ranks(ranks, |world| {
        let frozen = &[];
        let training =
            DecoderTraining::with_optimizer(world, config, variant, 1, frozen, optimizer);
        f(&mut training?)
    });
    all.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

type Tensors = BTreeMap<String, Vec<f32>>;

/// From the same gradients, every mesh rounds the state of an element alike.
#[test]
fn updates_are_bitwise_equal_on_every_mesh() {
    let sgd = Sgd { momentum: 0.9, state_dtype: StateDtype::Bf16, ..Sgd::default() };
    let optimizers: [&dyn OptimizerConfig; 2] = [&adamw(StateDtype::Bf16), &sgd];
    for config in optimizers {
        let updated = |mesh| -> (Tensors, Tensors) {
            on(mesh, config, |training| {
                // Steps of the optimizer only: reduced gradients differ in the last bits.
                let tree = training.fabric.module_tree()?;
                let mut optimizer = config.build(tree.parameters())?;
                optimizer.set_seed(7);
                for step in 1..=3 {
                    for parameter in tree.trainable() {
                        let region = parameter.local()?.region;
                        let stream = Stream::new(1, Purpose::Sample, parameter.fqn()).child(step);
                        let place = |outer: usize| stream.normal(outer as u64) as f32;
                        let runs = region.runs(parameter.global_shape());
                        let gradient: Vec<f32> = runs
                            .iter()
                            .flat_map(|run| (run.outer..run.outer + run.len).map(place))
                            .collect();
                        let n = gradient.len();
                        let gradient = Tensor::from_vec(gradient, n, &Device::Cpu)?;
                        parameter.set_local_grad(Some(gradient));
                    }
                    optimizer.step(&GradScale::default())?;
                }
                let state = training.gather(optimizer.state_tensors()?)?;
                Ok((training.weights()?, state))
            })
        };
        let one = updated(ONE);
        assert!(one.1.len() > 20 && one.1.values().flatten().any(|x| *x != 0.0));
        for mesh in &MESHES[1..] {
            let other = updated(*mesh);
            assert!(other == one, "{config:?} on {} ranks of {}", mesh.0, mesh.1);
        }
    }
}

/// State, loss and norm of the next step, then state and weights after it.
type Standing = (Tensors, (f64, f64), Tensors, Tensors);

fn standing(training: &mut DecoderTraining) -> Result<Standing> {
    let state = training.optimizer_state()?;
    let next = training.step()?;
    Ok((state, next, training.optimizer_state()?, training.weights()?))
}

fn save(mesh: Mesh, dtype: StateDtype, path: &Path) -> Standing {
    on(mesh, &adamw(dtype), |training| {
        for _ in 0..3 {
            training.step()?;
        }
        training.save(path)?;
        standing(training)
    })
}

fn load(mesh: Mesh, dtype: StateDtype, path: &Path) -> Standing {
    on(mesh, &adamw(dtype), |training| {
        training.load(path)?;
        standing(training)
    })
}

#[test]
fn every_mesh_loads_checkpoints_in_bf16() {
    for source in [MESHES[0], MESHES[4], MESHES[9]] {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("saved");
        let saved = save(source, StateDtype::Bf16, &path);
        assert!(saved.0.values().flatten().all(|x| bf16::from_f32(*x).to_f32() == *x));
        let checkpoint = DistributedCheckpoint::open(&path).unwrap();
        let stored = checkpoint.optimizer();
        assert_eq!(stored.len(), saved.0.len());
        for name in stored.names() {
            assert_eq!(stored.info(name).unwrap().dtype, safetensors::Dtype::BF16, "{name}");
        }
        for target in MESHES {
            let loaded = load(target, StateDtype::Bf16, &path);
            assert!(loaded.0 == saved.0, "from {source:?} to {target:?}");
            if target == source {
                // To the bit: stochastic rounding continues where it stopped.
                assert!(loaded == saved, "{source:?} does not go on as it was");
            }
        }
    }
}

#[test]
fn state_of_the_other_dtype_is_converted() {
    let scratch = tempfile::tempdir().unwrap();
    let (two, three) = (MESHES[3], MESHES[4]);
    let path = scratch.path().join("f32");
    let saved = save(two, StateDtype::F32, &path).0;
    let loaded = load(three, StateDtype::Bf16, &path).0;
    let nearest = |all: &Vec<f32>| all.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let nearest: Tensors = saved.iter().map(|(name, all)| (name.clone(), nearest(all))).collect();
    assert!(loaded == nearest && loaded != saved);

    let path = scratch.path().join("bf16");
    let saved = save(two, StateDtype::Bf16, &path).0;
    assert!(load(three, StateDtype::F32, &path).0 == saved);
}

/// The mean loss of the last ten of 60 steps differs by less than half a percent.
#[test]
fn it_trains_as_f32_state_does() {
    let mean_of_last = |dtype| {
        on(MESHES[3], &adamw(dtype), |training| {
            let losses = (0..60).map(|_| Ok(training.step()?.0)).collect::<Result<Vec<f64>>>()?;
            assert_eq!(
                training.optimizer.state_tensors()?[0].values.dtype() == DType::BF16,
                dtype == StateDtype::Bf16
            );
            Ok((losses[0], losses[50..].iter().sum::<f64>() / 10.0))
        })
    };
    let (f32, bf16) = (mean_of_last(StateDtype::F32), mean_of_last(StateDtype::Bf16));
    assert_eq!(f32.0, bf16.0);
    assert!(f32.1 < 0.8 * f32.0, "{f32:?}");
    assert!((bf16.1 / f32.1 - 1.0).abs() < 0.005, "{bf16:?}, with f32 {f32:?}");
    assert_ne!(f32.1, bf16.1);
}
