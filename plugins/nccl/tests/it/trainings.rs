//! Training over NCCL matches training on one device, for every split of the model and data.

use std::sync::LazyLock;

use candle_core::DType;
use fulgurite_core::conformance::{self, Equivalence};
use fulgurite_core::strategy::StrategyConfig;
use fulgurite_strategies::{Ddp, Fsdp};
use fulgurite_test_support::training::{DecoderTraining, Run, Training, Variant};
use fulgurite_transports::run_ranks;

use crate::orders::orders;
use crate::ranks::Job;

fn conforms<S: StrategyConfig>(config: &S) {
    for ranks in 2..=3 {
        let job = Job::new(ranks as u64);
        job.run(ranks, |world| conformance::strategy(config, &world, Equivalence::OneRank))
            .unwrap();
        job.check();
    }
}

#[test]
fn ddp_conforms() {
    conforms(&Ddp::default());
}

#[test]
fn fsdp_conforms() {
    conforms(&Fsdp::default());
}

fn assert_close(what: &str, one: &[f64], other: &[f64]) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (i, (a, b)) in one.iter().zip(other).enumerate() {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}, step {i}: {a} and {b}");
    }
}

/// Compares losses and norms to 1e-5, and weights to 1e-4.
fn assert_like(what: &str, runs: &[Run], single: &Run) {
    assert!(runs.iter().all(|run| *run == runs[0]), "{what}: ranks differ");
    let run = &runs[0];
    assert_close(&format!("{what}: loss"), &run.losses, &single.losses);
    assert_close(&format!("{what}: norm"), &run.norms, &single.norms);
    for (fqn, weights) in &single.weights {
        for (i, (a, b)) in run.weights[fqn].iter().zip(weights).enumerate() {
            assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{what}: {fqn}[{i}]: {a} and {b}");
        }
    }
}

const SINGLE: &str = r#"{"type": "single_device"}"#;

/// One job with everything on the device, one with integers and f64 (such as control messages) on
/// the host.
fn jobs() -> [Job; 2] {
    let floats = vec![DType::F32, DType::BF16, DType::F16];
    [Job::new(11), Job { dtypes: Some(floats), ..Job::new(12) }]
}

// checklist: torchtune: get_distributed_backend
#[test]
fn ddp_and_fsdp_train_as_one_device() {
    let train = |world, config: &str| Training::new(world, config, DType::F32, 2)?.run();
    let single = run_ranks(1, |world| Training::new(world, SINGLE, DType::F32, 1)?.run()).unwrap();
    for config in [
        r#"{"type": "ddp", "first_bucket_mb": 0.0001, "bucket_cap_mb": 0.0005}"#,
        r#"{"type": "fsdp", "reshard_after_forward": true, "prefetch": 2}"#,
        r#"{"type": "fsdp", "reshard_after_forward": false, "activation_checkpointing": "full"}"#,
    ] {
        for job in jobs() {
            let runs = job.run(2, |world| train(world, config)).unwrap();
            assert_like(config, &runs, &single[0]);
            job.check();
        }
    }
}

static DECODER: LazyLock<Run> = LazyLock::new(|| {
    let train = |world| DecoderTraining::new(world, SINGLE, Variant::default(), 1)?.run();
    run_ranks(1, train).unwrap().swap_remove(0)
});

/// Trains with these sizes of replicate, shard, context and tensor parallelism.
fn mesh(sizes: [usize; 4]) {
    jobs().into_iter().for_each(|job| train(&job, sizes));
}

fn train(job: &Job, [replicate, shard, context, tensor]: [usize; 4]) {
    let config = format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
            "data_parallel_shard_size": {shard}, "context_parallel_size": {context},
            "tensor_parallel_size": {tensor}}}"#
    );
    let train = |world| DecoderTraining::new(world, &config, Variant::ALL[3], 2)?.run();
    let runs = job.run(replicate * shard * context * tensor, train).unwrap();
    assert_like(&config, &runs, &DECODER);
    job.check();
}

/// Gathers ahead of time, delayed reductions, and replicas after them, in several orders of
/// streams.
#[test]
fn shards_with_replicas_train_alike_in_any_order() {
    for seed in 0..orders().div_ceil(10) {
        train(&Job::new(2000 + seed), [2, 2, 1, 1]);
    }
}

#[test]
fn shards_with_replicas_train_as_one_device() {
    mesh([2, 2, 1, 1]);
}

#[test]
fn tensor_parallel_layers_train_as_one_device() {
    mesh([1, 1, 1, 2]);
    mesh([1, 2, 1, 2]);
}

#[test]
fn cut_sequences_train_as_one_device() {
    mesh([1, 1, 2, 1]);
    mesh([1, 2, 2, 1]);
}
