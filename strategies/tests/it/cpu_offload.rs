//! Shards, gradients and optimizer state in host memory. The device here is the CPU too, so nothing
//! is copied; the would-be copies are counted.

use candle_core::DType;
use fulgurite_core::collective::Counter;
use fulgurite_core::execution::transfer::{self, Transferred};
use fulgurite_test_support::training::{DecoderTraining, Run, Training, Variant, checkpointed};
use fulgurite_transports::run_ranks;

fn with_offload(config: &str) -> String {
    config.replacen('{', r#"{"cpu_offload": true, "#, 1)
}

fn train(ranks: usize, config: &str, dtype: DType) -> Run {
    run_ranks(ranks, |world| Training::new(world, config, dtype, 2)?.run())
        .unwrap_or_else(|error| panic!("{config}: {error}"))
        .swap_remove(0)
}

// checklist: torchtune: CPUOffloadPolicy
// checklist: NeMo: offload_policy
#[test]
fn training_is_the_same_wherever_the_shards_are() {
    for (ranks, config) in [
        (1, r#"{"type": "fsdp"}"#),
        (2, r#"{"type": "fsdp"}"#),
        (3, r#"{"type": "fsdp", "accumulation_sync": "reduce_scatter"}"#),
        (2, r#"{"type": "fsdp", "reshard_after_forward": false}"#),
        (4, r#"{"type": "fsdp", "reshard_after_forward": 2}"#),
        (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#),
        (
            2,
            r#"{"type": "fsdp", "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "f32"}}"#,
        ),
    ] {
        assert_eq!(
            train(ranks, &with_offload(config), DType::F32),
            train(ranks, config, DType::F32),
            "{config} on {ranks}"
        );
    }
    // A single rank without shards: offload makes it move units to the device.
    let alone = r#"{"type": "model_parallel", "data_parallel_size": 1, "tensor_parallel_size": 1}"#;
    let fsdp = train(1, r#"{"type": "fsdp", "accumulation_sync": "all"}"#, DType::F32);
    assert_eq!(train(1, &with_offload(alone), DType::F32), fsdp);
}

/// Transfers of all ranks in the third step, and the bytes that rank 0's groups gathered and
/// reduced in it.
fn third_step(ranks: usize, config: &str, accumulate: usize) -> ([Transferred; 2], [u64; 2]) {
    let of_ranks = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mut training = Training::new(world, config, DType::F32, accumulate)?;
        training.step()?;
        training.step()?;
        counter.reset();
        let now = || {
            ["parameters", "gradients"]
                .map(|what| transfer::counts().get(what).copied().unwrap_or_default())
        };
        let before = now();
        training.step()?;
        let moved = [0, 1].map(|i| Transferred {
            to_device: now()[i].to_device - before[i].to_device,
            to_host: now()[i].to_host - before[i].to_host,
        });
        let bytes = |op| counter.get("data_parallel_shard", op).bytes;
        Ok((moved, ["all_gather_into", "reduce_scatter"].map(bytes)))
    });
    let of_ranks = of_ranks.unwrap_or_else(|error| panic!("{config}: {error}"));
    let total = |i: usize| {
        of_ranks.iter().fold(Transferred::default(), |sum, (moved, _)| Transferred {
            to_device: sum.to_device + moved[i].to_device,
            to_host: sum.to_host + moved[i].to_host,
        })
    };
    ([total(0), total(1)], of_ranks[0].1)
}

// checklist: torchtune: CPUOffloadPolicy
#[test]
fn shards_move_with_gathers_gradients_once() {
    let config = r#"{"type": "fsdp"}"#;
    for (ranks, accumulate) in [(2, 1), (3, 1), (2, 3)] {
        let ([parameters, gradients], [gathered, reduced]) =
            third_step(ranks, &with_offload(config), accumulate);
        assert!(gathered > 0 && reduced > 0);
        assert_eq!(parameters, Transferred { to_device: gathered, to_host: 0 });
        assert_eq!(gradients, Transferred { to_device: 0, to_host: reduced });
        // Without the option nothing is transferred.
        let (moved, bytes) = third_step(ranks, config, accumulate);
        assert_eq!(moved, [Transferred::default(); 2]);
        assert_eq!(bytes, [gathered, reduced]);
    }
    // Parts kept on the device are gathered from there.
    let parts = r#"{"type": "fsdp", "reshard_after_forward": 2}"#;
    let ([parameters, _], [gathered, _]) = third_step(4, &with_offload(parts), 1);
    assert_eq!(parameters.to_device, gathered);
    let ([all, _], _) = third_step(4, &with_offload(config), 1);
    assert!(parameters.to_device < all.to_device, "{parameters:?} and {all:?}");
}

#[test]
fn activations_go_through_the_host() {
    for mode in [r#"{"type": "none", "offload": "disk"}"#, r#"{"type": "full", "offload": "disk"}"#]
    {
        let config = checkpointed(r#"{"type": "fsdp"}"#, mode);
        let moved = run_ranks(2, |world| {
            let mut training = Training::new(world, &config, DType::F32, 1)?;
            training.step()?;
            Ok(transfer::counts()["activations"])
        });
        let moved = moved.unwrap()[0];
        assert!(moved.to_host > 0, "{mode}");
        assert_eq!(moved.to_host, moved.to_device, "{mode}");
    }
}

#[test]
fn checkpoints_know_nothing_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved");
    let config = r#"{"type": "fsdp"}"#;
    let run = |ranks, config: &str, load: bool| {
        let both = run_ranks(ranks, |world| {
            let mut training = DecoderTraining::new(world, config, Variant::default(), 1)?;
            if load {
                training.load(&path)?;
            } else {
                training.step()?;
                training.save(&path)?;
            }
            Ok((training.weights()?, training.optimizer_state()?))
        });
        both.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
    };
    let saved = run(2, &with_offload(config), false);
    assert_eq!(run(3, config, true), saved);
    assert_eq!(run(3, &with_offload(config), true), saved);
}
