//! Mistakes are reported on every rank, before any change.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{Difference, ProcessGroup, first_difference};
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::Sgd;
use fulgurite_core::parameter::{BufferOptions, Init};
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{gather_weights, strategy};
use fulgurite_transports::run_ranks;

const DDP: &str = r#"{"type": "ddp"}"#;
const FSDP: &str = r#"{"type": "fsdp"}"#;

fn two_units(b: &ModuleBuilder) -> Result<Vec<Unit<Linear>>> {
    (0..2).map(|i| b.unit(&format!("layers.{i}"), |b| Linear::new(b, 3, 3))).collect()
}

/// The error message of a failed setup.
fn refused<M>(
    ranks: usize,
    config: &str,
    build: impl Fn(usize, &ModuleBuilder) -> Result<M> + Sync,
) -> String {
    run_ranks(ranks, |world| {
        let rank = world.rank();
        let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 1)?;
        fabric.setup_module(|b| build(rank, b)).map(drop)
    })
    .expect_err("this cannot be set up")
    .to_string()
}

// checklist: torchtune: shard_model
#[test]
fn fsdp_without_units() {
    let message = refused(2, FSDP, |_, b| Linear::new(&b.pp("only"), 3, 3));
    assert_says!(message, "no layer modules were sharded … no units … `ModuleBuilder::unit` …");
    // Unless it is allowed.
    let config = r#"{"type": "fsdp", "allow_root_only": true}"#;
    run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 1)?;
        let model = fabric.setup_module(|b| Linear::new(&b.pp("only"), 3, 1))?;
        let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
        fabric.backward(&Loss::new(model.forward(&x)?.sum_all()?, 1.0))
    })
    .unwrap();
}

// checklist: torchtune: shard_model
#[test]
fn conditions_that_match_nothing() {
    let config = r#"{"type": "fsdp", "shard_conditions": ["layers", "model.*"]}"#;
    assert_says!(
        refused(2, config, |_, b| two_units(b)),
        "`trainer.strategy.shard_conditions`: `model.*` matches no unit … layers.0, layers.1"
    );
}

mod a_function {
    use fulgurite_core::strategy::{ParallelizeConfig, ParallelizeFn};
    use fulgurite_core::{Result, mesh::DeviceMesh, module::ModuleTree};
    use serde::{Deserialize, Serialize};

    /// Shards the first layer.
    #[derive(Debug, Clone, Serialize, Deserialize)]
    pub(crate) struct First {}

    #[typetag::serde(name = "first")]
    impl ParallelizeConfig for First {
        fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
            Ok(Box::new(|tree: &mut ModuleTree, _: &DeviceMesh| {
                tree.fully_shard_matching("layers.0")
            }))
        }
    }

    fulgurite_core::register_parallelize!("first", First, "the first layer only");
}

#[test]
fn two_ways_to_choose_units() {
    let config =
        r#"{"type": "fsdp", "parallelize": {"type": "first"}, "shard_conditions": ["layers.0"]}"#;
    assert_says!(
        strategy(config).err().expect("one is enough"),
        "`trainer.strategy` has both `parallelize` and `shard_conditions` … keep one"
    );
    // A parallelize function that is the only choice.
    let config = r#"{"type": "fsdp", "parallelize": {"type": "first"}}"#;
    run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 1)?;
        let layers = fabric.setup_module(two_units)?;
        assert!(layers[0].module().weight().value().is_err());
        assert!(layers[1].module().weight().value().is_ok(), "it belongs to the root");
        Ok(())
    })
    .unwrap();
}

#[test]
fn single_device_on_two_ranks() {
    let config = r#"{"type": "single_device"}"#;
    assert_says!(refused(2, config, |_, b| two_units(b)), "device mesh … one rank … size is 2 …");
}

// checklist: composer: ranks that start from different models
#[test]
fn ranks_with_different_models() {
    for config in [DDP, FSDP] {
        let message = refused(3, config, |rank, b| {
            b.unit("layer", |b| Linear::new(b, 3, if rank == 2 { 5 } else { 4 }))
        });
        assert_says!(message, "… different models … `layer.weight` [4, 3] … [5, 3] … rank 2 …");
        let message = refused(2, config, |rank, b| {
            let first = b.unit("layer", |b| Linear::new(b, 3, 4))?;
            let extra = (rank == 1).then(|| Linear::new(&b.pp("extra"), 3, 4)).transpose()?;
            Ok((first, extra))
        });
        assert_says!(message, "… different models … unit `layer` … `extra.weight` … rank 1 …");
        let message = refused(2, config, |rank, b| {
            let b = if rank == 1 { b.frozen() } else { b.clone() };
            b.unit("layer", |b| Linear::new(b, 3, 4))
        });
        assert_says!(message, "… different models … `layer.weight` … frozen on rank 1 …");
    }
}

/// The error message of setting up a `Linear` if each rank has these circumstances.
fn refused_with(
    config: &str,
    ranks: usize,
    of: impl Fn(usize) -> (ModuleInit, u64) + Sync,
) -> String {
    run_ranks(ranks, |world| {
        let (init, seed) = of(world.rank());
        let mut fabric = Fabric::new(world, strategy(config)?, init, seed)?;
        fabric.setup_module(|b| b.unit("layer", |b| Linear::new(b, 3, 4))).map(drop)
    })
    .expect_err("this cannot be set up")
    .to_string()
}

// checklist: composer: ranks that start from different models
#[test]
fn ranks_with_different_models_dtypes_and_values() {
    for config in [DDP, FSDP] {
        let of = |rank: usize| {
            let dtype = if rank == 1 { DType::F64 } else { DType::F32 };
            (ModuleInit { dtype, ..ModuleInit::default() }, 1)
        };
        assert_says!(refused_with(config, 2, of), "… `layer.weight` … F64 computing in F32 …");
        let of = |rank: usize| {
            let compute_dtype = if rank == 1 { DType::BF16 } else { DType::F32 };
            (ModuleInit { compute_dtype, ..ModuleInit::default() }, 1)
        };
        assert_says!(refused_with(config, 2, of), "… `layer.weight` … computing in BF16 …");
        let message = refused(2, config, |rank, b| {
            b.parameter("scale", [1], Init::Const(rank as f64))?;
            two_units(b)
        });
        assert_says!(message, "… different models … `scale` … Const(0.0) … Const(1.0) …");
        let message = refused(2, config, |rank, b| {
            let dtype = if rank == 1 { DType::F64 } else { DType::F32 };
            b.buffer("mean", [1], Init::ZEROS, BufferOptions::dtype(dtype))?;
            two_units(b)
        });
        assert_says!(message, "… different models … buffer `mean` [1] F32 … F64 on rank 1 …");
        let message = refused(3, config, |rank, b| {
            let values = Tensor::new(&[if rank == 2 { 1f32 } else { 2.0 }], &Device::Cpu)?;
            b.buffer("table", [1], values, BufferOptions::default())?;
            two_units(b)
        });
        assert_says!(message, "buffer `table` … values on rank 2 differ … rank 0");
    }
    // Replicas must be equal for any reason of difference: here each rank has its own seed.
    let hsdp = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;
    for (ranks, config) in [(2, DDP), (4, hsdp)] {
        let replica = ranks / 2;
        let message =
            refused_with(config, ranks, |rank| (ModuleInit::default(), (rank / replica) as u64));
        assert_says!(message, "parameter `layer.weight` … values on rank 1 differ … rank 0");
    }
}

#[test]
fn lists_may_differ_in_length() {
    // Each rank's list, and the difference that all ranks report.
    let cases: [(&[&str], &str); 5] = [
        (&["ab", "ab", "ab"], "None"),
        (&["ab", "ab", "ac"], "2 1 b c"),
        (&["ab", "a", "b"], "1 1 b nothing"),
        (&["a", "a", "ab"], "2 1 nothing b"),
        (&["", "", "a"], "2 0 nothing a"),
    ];
    for (said, expected) in cases {
        let told = run_ranks(3, |world| {
            let lines: Vec<String> = said[world.rank()].chars().map(String::from).collect();
            first_difference(&*world, &lines)
        });
        for told in told.unwrap() {
            let told = told.map_or("None".to_owned(), |Difference { rank, index, here, there }| {
                format!("{rank} {index} {here} {there}")
            });
            assert_eq!(told, expected, "{said:?}");
        }
    }
}

#[test]
fn a_scalar_under_fsdp() {
    let message = refused(2, FSDP, |_, b| {
        b.parameter("temperature", [], Init::ONES)?;
        two_units(b)
    });
    assert_says!(message, "parameter `temperature` … scalar, which FSDP cannot shard … [1]");
}

// checklist: Lightning: device_mesh before setup is an error
#[test]
fn access_before_setup_is_refused() {
    for config in [r#"{"type": "single_device"}"#, DDP, FSDP] {
        let fabric = Fabric::single(strategy(config).unwrap(), 1).unwrap();
        assert_says!(fabric.module_tree().unwrap_err(), "no model … `Fabric::setup` …");
    }
}

/// Runs `check` on three ranks with two layers and an optimizer.
fn with_model(
    check: impl Fn(&mut Fabric, &[Unit<Linear>], &mut FabricOptimizer) -> Result<()> + Sync,
) {
    for config in [DDP, FSDP] {
        run_ranks(3, |world: Arc<dyn ProcessGroup>| {
            let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 1)?;
            let (layers, mut optimizer) = fabric.setup(two_units, &Sgd::default())?;
            check(&mut fabric, &layers, &mut optimizer)
        })
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    }
}

fn loss(layers: &[Unit<Linear>], factor: f64) -> Result<Loss> {
    let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
    let y = layers[1].forward(&layers[0].forward(&x)?)?;
    Ok(Loss::new((y.sum_all()? * factor)?, 1.0))
}

// checklist: composer: _check_duplicate_modules
#[test]
fn two_layers_of_one_path() {
    let message = refused(1, DDP, |_, b| {
        let twice = (Linear::new(&b.pp("head"), 3, 3)?, Linear::new(&b.pp("head"), 3, 3)?);
        Ok(twice)
    });
    assert_says!(message, "module `head`: two layers … this path … its own name");
}

/// Like torch's `_assert_in_training_states`: parameters gathered for a unit's forward and backward
/// are unavailable before and after, and an access is an error.
// checklist: PyTorch: _assert_in_training_states
#[test]
fn unit_parameters_are_refused_outside_the_unit() {
    run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(FSDP)?, ModuleInit::default(), 1)?;
        let layers = fabric.setup_module(two_units)?;
        let refused = || layers[0].module().weight().tensor().unwrap_err().to_string();
        assert_says!(refused(), "… `layers.0.weight`: has no values …");
        let loss = loss(&layers, 1.0)?;
        assert!(refused().contains("outside the forward"));
        fabric.backward(&loss)?;
        assert!(refused().contains("outside the forward"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_loss_that_depends_on_nothing() {
    with_model(|fabric, layers, _| {
        let constant = Loss::new(Tensor::new(1f32, &Device::Cpu)?, 1.0);
        let error = fabric.backward(&constant).unwrap_err();
        assert_says!(
            error,
            "the loss does not depend on any … parameter … `no_grad` … cut the graph"
        );
        let guard = no_grad();
        let unrecorded = loss(layers, 1.0)?;
        drop(guard);
        assert!(fabric.backward(&unrecorded).is_err());
        Ok(())
    });
}

/// One rank's loss is not finite: all ranks refuse the step and keep their parameters to the bit.
#[test]
fn a_loss_that_is_not_finite_on_one_rank() {
    with_model(|fabric, layers, optimizer| {
        let factor = if fabric.global_rank() == 1 { f64::NAN } else { 1.0 };
        let before = gather_weights(fabric.module_tree()?, &**fabric.world())?;
        fabric.backward(&loss(layers, factor)?)?;
        let error = optimizer.step().unwrap_err();
        assert!(matches!(error, Error::NonFinite { what: "loss", step: 1, .. }), "{error}");
        assert_says!(error, "non-finite loss (NaN) at step 1 …");
        assert_eq!(gather_weights(fabric.module_tree()?, &**fabric.world())?, before);
        Ok(())
    });
}

/// A finite loss whose gradient overflows on one rank.
#[test]
fn a_non_finite_gradient_norm_on_one_rank() {
    with_model(|fabric, layers, optimizer| {
        let mut bad = loss(layers, 1.0)?;
        if fabric.global_rank() == 2 {
            // sqrt at 0: the value is 0, the slope is not finite.
            let zero = (bad.sum() - bad.sum())?.sqrt()?;
            bad = Loss::new((bad.sum() + zero)?, 1.0);
        }
        let before = gather_weights(fabric.module_tree()?, &**fabric.world())?;
        fabric.backward(&bad)?;
        let error = fabric.clip_gradients_norm(optimizer, 1.0).unwrap_err();
        assert!(
            matches!(error, Error::NonFinite { what: "gradient norm", step: 1, .. }),
            "{error}"
        );
        assert_eq!(gather_weights(fabric.module_tree()?, &**fabric.world())?, before);
        Ok(())
    });
}
