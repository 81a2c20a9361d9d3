//! Whole tensors of a model and its optimizer in memory: read, changed, and loaded under another
//! strategy.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint_local as _;
use fulgurite_core::checkpoint::{
    self, GatherOptions, LoadOptions, RankZeroSource, TensorMap, load_into,
};
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::fabric::{FullParams, OptimizerStateDict};
use fulgurite_core::optim::{AdamW, OptimizerConfig, ParamGroupConfig, Sgd};
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

const STRATEGIES: [(usize, &str); 6] = [
    (1, r#"{"type": "single_device"}"#),
    (3, r#"{"type": "ddp"}"#),
    (2, r#"{"type": "fsdp"}"#),
    (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}"#),
    (2, r#"{"type": "tp", "tensor_parallel_size": 2}"#),
    (4, r#"{"type": "fsdp_tp", "data_parallel_shard_size": 2, "tensor_parallel_size": 2}"#),
];

const FROM_RANK0: fn() -> LoadOptions =
    || LoadOptions { broadcast_from_rank0: true, ..LoadOptions::default() };

fn training(
    world: Arc<dyn ProcessGroup>,
    config: &str,
    optimizer: &dyn OptimizerConfig,
) -> Result<DecoderTraining> {
    DecoderTraining::with_optimizer(world, config, Variant::default(), 1, &[], optimizer)
}

fn adamw() -> AdamW {
    let slow =
        ParamGroupConfig { patterns: vec!["embedding".into()], lr: Some(1e-3), weight_decay: None };
    AdamW { betas: (0.8, 0.95), eps: 1e-6, groups: vec![slow], ..DecoderTraining::adamw() }
}

/// Model and optimizer after three steps, on rank 0, and the losses of two more.
fn three_steps(
    ranks: usize,
    config: &str,
    optimizer: &dyn OptimizerConfig,
) -> (BTreeMap<String, Tensor>, OptimizerStateDict, Vec<(f64, f64)>) {
    let taken = run_ranks(ranks, |world| {
        let mut training = training(world.clone(), config, optimizer)?;
        for _ in 0..3 {
            training.step()?;
        }
        let all = GatherOptions::default();
        let model = training.fabric.full_state().model_state_dict(&all)?;
        let state =
            training.fabric.full_state().optimizer_state_dict(&mut training.optimizer, &all)?;
        assert_eq!(model.is_empty(), world.rank() > 0);
        assert_eq!(state.tensors.is_empty(), world.rank() > 0);
        Ok((model, state, vec![training.step()?, training.step()?]))
    });
    taken.unwrap().swap_remove(0)
}

/// Two steps from such a state, with an optimizer of these options.
fn two_more(
    ranks: usize,
    config: &str,
    optimizer: &dyn OptimizerConfig,
    (model, state): (&BTreeMap<String, Tensor>, &OptimizerStateDict),
) -> Result<Vec<(f64, f64)>> {
    let losses = run_ranks(ranks, |world| {
        let mut training = training(world.clone(), config, optimizer)?;
        let (model, state) = match world.rank() {
            0 => (TensorMap::from(model.clone()), state.clone()),
            _ => Default::default(),
        };
        training.fabric.full_state().load_model_state_dict(&model, FROM_RANK0())?;
        let optimizer = &mut training.optimizer;
        training.fabric.full_state().load_optimizer_state_dict(optimizer, &state, true)?;
        assert_eq!(training.optimizer.steps(), 3);
        training.step = 3;
        Ok(vec![training.step()?, training.step()?])
    });
    Ok(losses?.swap_remove(0))
}

/// The state is complete: moments, the step of the bias correction, learning rates and decay of the
/// groups. An optimizer built with other options continues as the original would.
// checklist: torchtune: get_full_optimizer_state_dict
// checklist: torchtune: load_from_full_optimizer_state_dict
#[test]
fn a_loaded_state_brings_step_and_options() {
    let others = AdamW { lr: 0.5, weight_decay: 0.9, betas: (0.1, 0.2), ..AdamW::default() };
    for (i, (ranks, config)) in STRATEGIES.into_iter().enumerate() {
        let (model, state, expected) = three_steps(ranks, config, &adamw());
        assert_eq!(state.scalars["step"], 3.0);
        let groups = &state.param_groups[""];
        let lr_of = |name: &str| {
            let group = groups.iter().find(|group| group.params.iter().any(|fqn| fqn == name));
            (group.unwrap().options["lr"], group.unwrap().options["weight_decay"])
        };
        assert_eq!(lr_of("embedding.weight"), (1e-3, 0.1));
        assert_eq!(lr_of("layers.0.mlp.up_proj.weight"), (3e-3, 0.1));
        assert_eq!(lr_of("norm.weight"), (3e-3, 0.0));
        let again = two_more(ranks, config, &others, (&model, &state)).unwrap();
        assert_eq!(again, expected, "{config}");
        let (ranks, other) = STRATEGIES[(i + 1) % STRATEGIES.len()];
        let elsewhere = two_more(ranks, other, &others, (&model, &state)).unwrap();
        for ((a, b), (x, y)) in elsewhere.iter().zip(&expected) {
            assert!(
                (a - x).abs() < 1e-5 && (b - y).abs() < 1e-4,
                "{config} to {other}: {elsewhere:?} {expected:?}"
            );
        }
        // The options matter for the steps, not the moments alone.
        let mut forgotten = state.clone();
        forgotten.param_groups.get_mut("").unwrap()[0].options.insert("beta2".into(), 0.2);
        let forgotten = two_more(ranks, other, &others, (&model, &forgotten)).unwrap();
        assert!((forgotten[1].0 - expected[1].0).abs() > 1e-5);
    }
}

// checklist: torchtune: load_from_full_optimizer_state_dict
#[test]
fn other_kinds_of_optimizer_state_are_refused() {
    let config = STRATEGIES[2].1;
    let sgd = Sgd { lr: 0.01, momentum: 0.9, ..Sgd::default() };
    let (model, state, expected) = three_steps(2, config, &sgd);
    let plain = Sgd { lr: 0.7, momentum: 0.3, nesterov: true, ..Sgd::default() };
    assert_eq!(two_more(2, config, &plain, (&model, &state)).unwrap(), expected);
    let error = |optimizer: &dyn OptimizerConfig, state: &OptimizerStateDict| {
        let errors = run_ranks(2, |world| {
            let mut training = training(world.clone(), config, optimizer)?;
            training.step()?;
            let has = |training: &mut DecoderTraining| -> Result<_> {
                let all = GatherOptions::default();
                let state = training
                    .fabric
                    .full_state()
                    .optimizer_state_dict(&mut training.optimizer, &all)?;
                let values = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
                let values =
                    state.tensors.values().map(values).collect::<candle_core::Result<Vec<_>>>()?;
                Ok((values, state.scalars, state.param_groups))
            };
            let before = has(&mut training)?;
            let state =
                if world.rank() == 0 { state.clone() } else { OptimizerStateDict::default() };
            let to = &mut training.optimizer;
            let error = training
                .fabric
                .full_state()
                .load_optimizer_state_dict(to, &state, true)
                .unwrap_err();
            assert_eq!(has(&mut training)?, before);
            Ok(error.to_string())
        });
        errors.unwrap().swap_remove(0)
    };
    assert_says!(error(&adamw(), &state), "the parameter group 0 has no `beta1` … another kind …");
    assert_says!(
        error(&Sgd { momentum: 0.0, ..sgd.clone() }, &state),
        "the parameter groups have a momentum of 0.9 … built with 0 …"
    );
    let mut less = state.clone();
    less.param_groups.clear();
    assert_says!(error(&sgd, &less), "the state has no parameter groups; it has none at all");
    let mut less = state.clone();
    less.param_groups.get_mut("").unwrap()[0].options.insert("lr".into(), -1.0);
    assert_says!(error(&sgd, &less), "`lr` of the parameter group 0 … zero or more, got -1.0");
    let mut less = state.clone();
    less.tensors.remove("state.norm.weight.momentum_buffer");
    insta::assert_snapshot!(error(&sgd, &less), @r#"
    checkpoint (tensors in memory): does not fit this optimizer:
      missing, the optimizer has it and the checkpoint does not (1):
        state.norm.weight.momentum_buffer
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    "#);
}

/// The other ranks cannot open the source, and get the same bits.
// checklist: torchtune: broadcast_from_rank0
// checklist: composer: FSDP2Config
#[test]
fn rank_0_reads_and_sends_to_the_others() {
    let temp = tempfile::tempdir().unwrap();
    for (i, (ranks, config)) in STRATEGIES.into_iter().enumerate() {
        let path = temp.path().join(format!("weights-{i}"));
        run_ranks(ranks, |world| {
            let mut trained = training(world.clone(), config, &adamw())?;
            trained.step()?;
            trained.fabric.save_full(&path, None, &(), &Default::default())?;
            let weights = trained.weights()?;

            let fresh = training(world.clone(), config, &adamw())?;
            assert_ne!(fresh.weights()?, weights);
            let own = match world.rank() {
                0 => path.clone(),
                rank => temp.path().join(format!("not-on-rank-{rank}")),
            };
            let report = fresh.fabric.load_raw(&own, FROM_RANK0())?;
            assert!(report.is_empty() && !report.loaded.is_empty());
            assert_eq!(fresh.weights()?, weights, "{config}");

            // Tensors in another dtype, and a subset.
            let halves = trained.fabric.full_state().model_state_dict(&GatherOptions {
                dtype: Some(DType::F64),
                ..GatherOptions::default().with_filter(|name| name.contains("layers.1"))
            })?;
            let doubled = halves.into_iter().map(|(name, t)| Ok((name, (t * 2.0)?)));
            let doubled: BTreeMap<_, _> = doubled.collect::<Result<_>>()?;
            let options = LoadOptions { strict: false, ..FROM_RANK0() };
            let report = fresh
                .fabric
                .full_state()
                .load_model_state_dict(&TensorMap::from(doubled), options)?;
            assert!(report.missing.contains(&"norm.weight".to_owned()));
            let (now, was) = (fresh.weights()?, &weights);
            let twice = |name: &str| was[name].iter().map(|x| x * 2.0).collect::<Vec<_>>();
            assert_eq!(now["layers.1.scale"], twice("layers.1.scale"));
            let name = "layers.1.self_attn.q_proj.weight";
            assert_eq!(now[name], twice(name));
            assert_eq!(now["norm.weight"], was["norm.weight"]);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    }
}

// checklist: torchtune: broadcast_from_rank0
#[test]
fn read_errors_of_rank_0_reach_every_rank() {
    let errors = run_ranks(2, |world| {
        let training = training(world.clone(), STRATEGIES[2].1, &adamw())?;
        let fabric = &training.fabric;
        let absent = fabric.load_raw("/nowhere/at/all", FROM_RANK0()).unwrap_err();
        // The stream breaks off between tensors.
        let of = |name: &str| -> Result<(String, checkpoint::TensorInfo)> {
            let shape = fabric.module_tree()?.parameter(name).unwrap().global_shape().to_vec();
            Ok((name.to_owned(), checkpoint::TensorInfo { shape, dtype: safetensors::Dtype::F32 }))
        };
        let infos = [of("embedding.weight")?, of("norm.weight")?];
        let source = checkpoint::TensorFn::new("the cable", infos, |name, region| match name {
            "norm.weight" => Err(Error::other("was cut")),
            _ => Ok(Tensor::zeros(region.elem_count(), DType::F32, &Device::Cpu)?),
        });
        let options = LoadOptions { strict: false, ..FROM_RANK0() };
        let torn = fabric.full_state().load_model_state_dict(&source, options).unwrap_err();
        // Without a group there cannot be a rank 0.
        let alone = load_into(&source, fabric.module_tree()?, FROM_RANK0()).unwrap_err();
        let strict = fabric
            .full_state()
            .load_model_state_dict(&TensorMap::default(), FROM_RANK0())
            .unwrap_err();
        // The ranks remain in step.
        fabric.barrier()?;
        Ok([absent, torn, alone, strict].map(|error| error.to_string()))
    })
    .unwrap();
    insta::assert_snapshot!(errors[0][..3].join("\n"), @r#"
    checkpoint /nowhere/at/all: there is no such file or directory
    checkpoint the cable: tensor `norm.weight`: was cut
    `broadcast_from_rank0` is collective, and this function reads on each rank by itself; load with `Fabric::load_raw`, `FullState::load_model_state_dict` or a `RankZeroSource`
    "#);
    insta::assert_snapshot!(errors[1][..3].join("\n"), @r#"
    rank 0 failed: checkpoint /nowhere/at/all: there is no such file or directory
    rank 0 failed: checkpoint the cable: tensor `norm.weight`: was cut
    `broadcast_from_rank0` is collective, and this function reads on each rank by itself; load with `Fabric::load_raw`, `FullState::load_model_state_dict` or a `RankZeroSource`
    "#);
    assert!(errors.iter().all(|errors| errors[3].contains("embedding.weight")), "{errors:?}");
}

/// The tensors of a source, whole, on every rank. Messages have 8 MiB; this tensor needs three and
/// a rest.
#[test]
fn a_tensor_of_several_messages_arrives_whole() {
    let n = 3 * (8 << 20) / 4 + 5;
    run_ranks(3, |world| {
        let numbers = Tensor::arange(0u32, n as u32, &Device::Cpu)?.reshape((n, 1))?;
        let scalar = Tensor::new(7f64, &Device::Cpu)?;
        let own = [("numbers".to_owned(), numbers.clone()), ("scalar".to_owned(), scalar)];
        let own = TensorMap::new(own.into_iter().filter(|_| world.rank() == 0));
        let source = RankZeroSource::new(&*world, || Ok(Box::new(own)))?;
        assert_eq!(source.described().names(), ["numbers", "scalar"]);
        let tensors = source.tensors()?;
        assert_eq!(tensors["numbers"].dims(), numbers.dims());
        let same = tensors["numbers"].eq(&numbers)?.to_dtype(DType::F64)?.sum_all()?;
        assert_eq!(same.to_scalar::<f64>()?, n as f64);
        assert_eq!(tensors["scalar"].to_scalar::<f64>()?, 7.0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn full_parameters_can_be_read_and_changed() {
    for (ranks, config) in STRATEGIES {
        run_ranks(ranks, |world| {
            let mut training = training(world.clone(), config, &adamw())?;
            training.step()?;
            let fabric = &training.fabric;
            let weights = training.weights()?;
            let flat = |tensor: &Tensor| Ok::<_, Error>(tensor.flatten_all()?.to_vec1::<f32>()?);

            fabric.full_state().summon_full_params(&FullParams::all(), |params| {
                assert_eq!(params.len(), weights.len());
                for (name, tensor) in params.iter() {
                    assert_eq!(flat(tensor)?, weights[name], "{config}: {name}");
                }
                // Discarded.
                for tensor in params.values_mut() {
                    *tensor = tensor.zeros_like()?;
                }
                Ok(())
            })?;
            assert_eq!(training.weights()?, weights);
            let whole = fabric.full_state().full_tensor("lm_head.weight")?;
            assert_eq!(
                (whole.dims(), flat(&whole)?),
                ([12, 8].as_slice(), weights["embedding.weight"].clone())
            );

            // A unit, on all ranks, and a pattern, on rank 0.
            let layer = FullParams::of(["layers.1"]).writable();
            fabric.full_state().summon_full_params(&layer, |params| {
                assert!(
                    !params.is_empty() && params.keys().all(|name| name.starts_with("layers.1."))
                );
                for tensor in params.values_mut() {
                    *tensor = (&*tensor * 3.0)?;
                }
                Ok(())
            })?;
            let scales = FullParams::of(["layers.*.scale"]).rank0_only().writable();
            let there = fabric.full_state().summon_full_params(&scales, |params| {
                for tensor in params.values_mut() {
                    *tensor = Tensor::full(-1f32, 1, &Device::Cpu)?;
                }
                Ok(params.len())
            })?;
            assert_eq!(there, if world.rank() == 0 { 3 } else { 0 });
            let now = training.weights()?;
            for (name, was) in &weights {
                let expected = match name {
                    name if name.ends_with(".scale") => vec![-1.0],
                    name if name.starts_with("layers.1.") => was.iter().map(|x| x * 3.0).collect(),
                    _ => was.clone(),
                };
                assert_eq!(now[name], expected, "{config}: {name}");
            }
            // Training continues from the changed values.
            training.step()?;
            assert_ne!(training.weights()?["layers.1.scale"], [-1.0]);
            assert!((training.weights()?["layers.1.scale"][0] + 1.0).abs() < 0.1);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    }
}

#[test]
fn full_parameter_mistakes_change_nothing() {
    let messages = run_ranks(2, |world| {
        let training = training(world.clone(), STRATEGIES[2].1, &adamw())?;
        let (fabric, weights) = (&training.fabric, training.weights()?);
        let unknown = fabric.full_state().full_tensor("lm_haed.weight").unwrap_err();
        let all = FullParams::all().writable();
        let idle = FullParams::of(["layers.0", "layer.1"]);
        let idle = fabric.full_state().summon_full_params(&idle, |_| Ok(())).unwrap_err();
        let reshaped = fabric.full_state().summon_full_params(&all, |params| {
            let tensor = params["embedding.weight"].t()?;
            params.insert("embedding.weight".to_owned(), tensor);
            Ok(())
        });
        let failed = fabric.full_state().summon_full_params(&all, |params| {
            for tensor in params.values_mut() {
                *tensor = tensor.zeros_like()?;
            }
            if world.rank() == 1 { Err(Error::other("no, rather not")) } else { Ok(()) }
        });
        assert_eq!(training.weights()?, weights);
        let errors = [unknown, idle, reshaped.unwrap_err(), failed.unwrap_err()];
        Ok(errors.map(|error| error.to_string()))
    })
    .unwrap();
    insta::assert_snapshot!(messages[0].join("\n"), @r#"
    no parameter of the model is called `lm_haed.weight`; there are `embedding.weight`, `layers.0.norm.weight`, `layers.0.self_attn.q_proj.weight`, `layers.0.self_attn.q_proj.bias`, `layers.0.self_attn.k_proj.weight`, …
    no parameter of the model is called `layer.1`; there are `embedding.weight`, `layers.0.norm.weight`, `layers.0.self_attn.q_proj.weight`, `layers.0.self_attn.q_proj.bias`, `layers.0.self_attn.k_proj.weight`, …
    the parameters that `summon_full_params` gathered have other names or shapes than before; replace tensors by such of the same shape, and add and remove none
    rank 1 failed: no, rather not
    "#);
    assert_says!(messages[1][3], "no, rather not");
}
