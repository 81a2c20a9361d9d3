//! A training is equal under every strategy, on any number of ranks, for any cut of its batches.

use candle_core::DType;
use fulgurite_test_support::training::{Run, Training};
use fulgurite_transports::run_ranks;

const DDP: &str = r#"{"type": "ddp"}"#;

/// Configurations that must agree bit for bit with [`DDP`] on the same ranks and micro-batches.
const CASES: &[&str] = &[
    r#"{"type": "ddp", "first_bucket_mb": 0.0001, "bucket_cap_mb": 0.0005}"#,
    r#"{"type": "fsdp", "reshard_after_forward": true}"#,
    r#"{"type": "fsdp", "reshard_after_forward": false}"#,
    r#"{"type": "fsdp2", "reshard_after_forward": "auto", "prefetch": 2}"#,
    r#"{"type": "fsdp", "prefetch": 0}"#,
    r#"{"type": "fsdp", "prefetch": {"forward": 2, "backward": 0}}"#,
    r#"{"type": "fsdp", "reshard_after_forward": "all_but_last"}"#,
    r#"{"type": "fsdp", "shard_conditions": ["layers.1", "layers.2"]}"#,
    // The same with recomputed units.
    r#"{"type": "ddp", "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "reshard_after_forward": false, "activation_checkpointing": "selective"}"#,
    r#"{"type": "fsdp", "prefetch": 0, "activation_checkpointing": "selective"}"#,
    r#"{"type": "fsdp", "shard_conditions": ["layers.1"], "activation_checkpointing": "full"}"#,
];

fn train(ranks: usize, config: &str, accumulate: usize) -> Run {
    let mut runs =
        run_ranks(ranks, |world| Training::new(world, config, DType::F32, accumulate)?.run())
            .unwrap_or_else(|error| panic!("{config} on {ranks} ranks: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{config}: ranks differ");
    run
}

fn assert_close(what: &str, one: &[f64], other: &[f64], relative: f64) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (i, (a, b)) in one.iter().zip(other).enumerate() {
        assert!((a - b).abs() <= relative * b.abs(), "{what}, step {i}: {a} and {b}");
    }
}

/// Compares with the whole global batch on one rank: losses and norms to 1e-5, weights to 1e-4.
fn assert_like_single(what: &str, run: &Run, single: &Run) {
    assert_close(&format!("{what}: loss"), &run.losses, &single.losses, 1e-5);
    assert_close(&format!("{what}: norm"), &run.norms, &single.norms, 1e-5);
    for (fqn, weights) in &single.weights {
        for (i, (a, b)) in run.weights[fqn].iter().zip(weights).enumerate() {
            assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{what}: {fqn}[{i}]: {a} and {b}");
        }
    }
}

/// Every case on `ranks` ranks.
fn check(ranks: usize) {
    let single = train(1, r#"{"type": "single_device"}"#, 1);
    assert!(single.losses[19] < 0.8 * single.losses[0], "{:?}", single.losses);
    for accumulate in [1, 3] {
        let ddp = train(ranks, DDP, accumulate);
        assert_like_single(&format!("ddp, {ranks} ranks, {accumulate}"), &ddp, &single);
        for config in CASES {
            let run = train(ranks, config, accumulate);
            let what = format!("{config} on {ranks} ranks, {accumulate} micro-batches");
            assert_eq!(run.losses, ddp.losses, "{what}");
            assert_eq!(run.norms, ddp.norms, "{what}");
            assert_eq!(run.weights, ddp.weights, "{what}");
        }
    }
}

#[test]
fn on_one_rank() {
    check(1);
}

#[test]
fn on_two_ranks() {
    check(2);
}

#[test]
fn on_three_ranks() {
    check(3);
}

// checklist: Lightning: setup_module, materialising
#[test]
fn on_four_ranks() {
    check(4);
}

#[test]
fn a_training_repeats_bit_for_bit() {
    for config in [DDP, CASES[0], CASES[1]] {
        assert_eq!(train(3, config, 3), train(3, config, 3), "{config}");
    }
}
