//! bf16: computing in it, reducing in it.

use candle_core::DType;
use fulgurite_test_support::training::{Run, Training};
use fulgurite_transports::run_ranks;

fn train(ranks: usize, config: &str, compute_dtype: DType) -> Run {
    run_ranks(ranks, |world| Training::new(world, config, compute_dtype, 2)?.run())
        .unwrap_or_else(|error| panic!("{config}: {error}"))
        .swap_remove(0)
}

fn policy(param: &str, reduce: &str) -> String {
    format!(
        r#"{{"type": "fsdp",
            "mixed_precision": {{"param_dtype": "{param}", "reduce_dtype": "{reduce}"}}}}"#
    )
}

fn assert_trains_like(what: &str, run: &Run, reference: &Run, tolerance: f64) {
    let last = run.losses.len() - 1;
    assert!(run.losses[last] < 0.85 * run.losses[0], "{what} did not learn: {:?}", run.losses);
    for (i, (a, b)) in run.losses.iter().zip(&reference.losses).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs(), "{what}, step {i}: {a} and {b}");
    }
}

// checklist: composer: mixed-precision presets
// checklist: NeMo: mp_policy
#[test]
fn bf16_trains_like_f32_under_every_strategy() {
    let f32s = train(1, r#"{"type": "single_device"}"#, DType::F32);
    let single = train(1, r#"{"type": "single_device"}"#, DType::BF16);
    assert_trains_like("single_device", &single, &f32s, 0.03);
    assert_ne!(single.losses, f32s.losses);
    let ddp = train(3, r#"{"type": "ddp"}"#, DType::BF16);
    assert_trains_like("ddp", &ddp, &single, 0.02);
    // Gradients are reduced in f32 either way: the same bits.
    let fsdp = train(3, &policy("bf16", "f32"), DType::F32);
    assert_eq!(fsdp, ddp);
    let reduced = train(3, &policy("bf16", "bf16"), DType::F32);
    assert_trains_like("reduced in bf16", &reduced, &ddp, 0.03);
    assert_ne!(reduced.losses, ddp.losses);
}

/// What optimizers update stays in f32: updates far below bf16's resolution add up.
#[test]
fn values_stay_in_f32() {
    let run = train(2, &policy("bf16", "bf16"), DType::F32);
    let weights = &run.weights["layers.0.mlp.up_proj.weight"];
    // Bits that bf16 does not have.
    assert!(weights.iter().any(|x| x.to_bits() & 0xffff != 0));
}
