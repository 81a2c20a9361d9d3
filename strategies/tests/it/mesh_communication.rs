//! The exact calls and bytes per step of tensor, sequence, context and hybrid-sharded parallelism,
//! according to the book's formulas.

use std::collections::BTreeMap;

use fulgurite_core::collective::{Counter, Record};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::parameter::Parameter;
use fulgurite_test_support::training::{DecoderTraining, LENGTH, Variant, checkpointed};
use fulgurite_transports::run_ranks;

type Tally = BTreeMap<(String, &'static str), Record>;

/// Sequences of a step on one replica, width, vocabulary and blocks of the decoder.
const BATCH: u64 = 8;
const WIDTH: u64 = 8;
const VOCABULARY: u64 = 12;
const BLOCKS: u64 = 3;
const TOKENS: u64 = BATCH * LENGTH as u64;
/// Bytes of a replica's residual stream.
const STREAM: u64 = 4 * TOKENS * WIDTH;
/// Bytes of its logits.
const LOGITS: u64 = 4 * TOKENS * VOCABULARY;

/// Rank 0's tally of the third step, and the model.
fn third_step(
    ranks: usize,
    config: &str,
    variant: Variant,
    accumulate: usize,
) -> (Tally, ModuleTree) {
    let mut tallies = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mut training = DecoderTraining::new(world, config, variant, accumulate)?;
        training.step()?;
        training.step()?;
        counter.reset();
        training.step()?;
        Ok((counter.snapshot(), training.fabric.module_tree()?.clone()))
    })
    .unwrap_or_else(|error| panic!("{config}: {error}"));
    tallies.swap_remove(0)
}

/// Rows of an expected tally.
fn tally(rows: &[(&str, &'static str, u64, u64)]) -> Tally {
    rows.iter()
        .filter(|(_, _, calls, _)| *calls > 0)
        .map(|&(group, op, calls, bytes)| ((group.to_owned(), op), Record { calls, bytes }))
        .collect()
}

fn bytes<'a>(parameters: impl IntoIterator<Item = &'a Parameter>) -> u64 {
    parameters.into_iter().map(|p| 4 * p.compute_elem_count() as u64).sum()
}

/// The gradient norm.
const NORM: (&str, &str, u64, u64) = ("world", "all_reduce", 1, 8);

fn tp(ranks: usize) -> String {
    format!(r#"{{"type": "tp", "tensor_parallel_size": {ranks}}}"#)
}

#[test]
fn tensor_parallel_blocks_reduce_twice_each_way() {
    let (got, _) = third_step(2, &tp(2), Variant::default(), 1);
    // Besides the blocks: the embedding's output, and the gradient of the head's input.
    let reductions = 4 * BLOCKS + 2;
    let expected = tally(&[
        NORM,
        ("tensor_parallel", "all_reduce", reductions, reductions * STREAM),
        ("tensor_parallel", "all_gather_into", 1, LOGITS),
    ]);
    assert_eq!(got, expected);
}

#[test]
fn shared_key_heads_are_summed_once_a_step() {
    for accumulate in [1, 2] {
        let (got, tree) = third_step(4, &tp(4), Variant::default(), accumulate);
        let reductions = 4 * BLOCKS + 2;
        let shared = bytes(tree.parameters().iter().filter(|p| p.has_partial_grad()));
        // The weights and biases of a key and a value head of 2 elements in each block.
        assert_eq!(shared, BLOCKS * 2 * 4 * (2 * WIDTH + 2));
        let expected = tally(&[
            NORM,
            ("tensor_parallel", "all_reduce", accumulate as u64 * reductions, reductions * STREAM),
            ("tensor_parallel", "all_gather_into", accumulate as u64, LOGITS),
            ("tensor_parallel_replicas", "all_reduce", 1, shared),
        ]);
        assert_eq!(got, expected, "{accumulate}");
    }
}

// checklist: NeMo: sequence_parallel
#[test]
fn sequence_parallel_blocks_gather_and_scatter() {
    let variant = Variant { sequence_parallel: true, loss_parallel: false };
    let (got, tree) = third_step(2, &tp(2), variant, 1);
    let moves = 4 * BLOCKS + 2;
    let partial = bytes(tree.parameters().iter().filter(|p| p.has_partial_grad()));
    // Norms, the biases behind reductions, and the scale of each block.
    assert_eq!(partial, 4 * (BLOCKS * (3 * WIDTH + 1) + 2 * WIDTH + WIDTH));
    let expected = tally(&[
        NORM,
        ("tensor_parallel", "all_gather_into", moves + 1, moves * STREAM + LOGITS),
        ("tensor_parallel", "reduce_scatter", moves, moves * STREAM),
        ("tensor_parallel", "all_reduce", 1, partial),
    ]);
    assert_eq!(got, expected);
}

// checklist: torchtune: context-parallel manager, loss parallel
#[test]
fn a_parallel_loss_sends_three_numbers_a_token() {
    let variant = Variant { sequence_parallel: false, loss_parallel: true };
    let (got, _) = third_step(2, &tp(2), variant, 1);
    let reductions = 4 * BLOCKS + 2;
    let expected = tally(&[
        NORM,
        ("tensor_parallel", "all_reduce", reductions + 2, reductions * STREAM + 3 * 4 * TOKENS),
    ]);
    assert_eq!(got, expected);
}

/// FSDP's communication: units are gathered for forward and for backward, the root once, and each
/// is reduced once a step.
fn fsdp(tree: &ModuleTree, micro_batches: u64) -> [Record; 2] {
    let root = tree.unit_parameters(None);
    let mut gather = Record { calls: 1, bytes: bytes(&root) };
    let mut reduce = Record { calls: 1, bytes: bytes(&root) };
    for unit in tree.units() {
        let unit = bytes(&tree.unit_parameters(Some(unit.index())));
        gather.calls += 2 * micro_batches;
        gather.bytes += 2 * micro_batches * unit;
        reduce.calls += 1;
        reduce.bytes += unit;
    }
    [gather, reduce]
}

// checklist: torchtune: context-parallel manager, loss parallel
#[test]
fn context_parallelism_gathers_keys_and_values() {
    let config =
        r#"{"type": "model_parallel", "context_parallel_size": 2, "tensor_parallel_size": 1}"#;
    let (got, tree) = third_step(2, config, Variant::default(), 1);
    let [gather, reduce] = fsdp(&tree, 1);
    // Two key and value heads of 2 elements, gathered in forward and in backward, and their
    // gradients reduced.
    let keys_and_values = 2 * 4 * TOKENS * 4;
    let group = "context_parallel";
    let expected = tally(&[
        NORM,
        ("dp_cp", "all_reduce", 1, 16),
        ("dp_shard_cp", "all_gather_into", gather.calls, gather.bytes),
        ("dp_shard_cp", "reduce_scatter", reduce.calls, reduce.bytes),
        (group, "all_gather_into", 2 * BLOCKS, 2 * BLOCKS * keys_and_values),
        (group, "reduce_scatter", BLOCKS, BLOCKS * keys_and_values),
    ]);
    assert_eq!(got, expected);
}

/// A repeated forward repeats its communication; nothing else is repeated.
#[test]
fn recomputed_units_repeat_forward_traffic() {
    // Two reductions in a block's forward; with sequence parallelism two gathers and two
    // reduce-scatters.
    for (variant, ops) in [
        (Variant::ALL[0], &["all_reduce"][..]),
        (Variant::ALL[1], &["all_gather_into", "reduce_scatter"]),
    ] {
        let mut expected = third_step(2, &tp(2), variant, 1).0;
        for op in ops {
            let record = expected.get_mut(&("tensor_parallel".to_owned(), *op)).unwrap();
            record.calls += 2 * BLOCKS;
            record.bytes += 2 * BLOCKS * STREAM;
        }
        assert_eq!(third_step(2, &checkpointed(&tp(2), "full"), variant, 1).0, expected);
    }
    let config =
        r#"{"type": "model_parallel", "context_parallel_size": 2, "tensor_parallel_size": 1}"#;
    let mut expected = third_step(2, config, Variant::default(), 1).0;
    let keys = expected.get_mut(&("context_parallel".to_owned(), "all_gather_into")).unwrap();
    // Forward and backward have the same number of calls.
    *keys = Record { calls: keys.calls / 2 * 3, bytes: keys.bytes / 2 * 3 };
    assert_eq!(third_step(2, &checkpointed(config, "full"), Variant::default(), 1).0, expected);
}

#[test]
fn accumulation_sets_the_replicas_reductions() {
    for (mode, scatters, replications) in [("none", 1, 1), ("reduce_scatter", 2, 1), ("all", 2, 2)]
    {
        let config = format!(
            r#"{{"type": "hsdp", "data_parallel_replicate_size": 2, "data_parallel_shard_size": 2,
                "accumulation_sync": "{mode}"}}"#
        );
        let (got, tree) = third_step(4, &config, Variant::default(), 2);
        let [gather, reduce] = fsdp(&tree, 2);
        let shards: u64 = tree
            .parameters()
            .iter()
            .map(|p| 4 * p.local().unwrap().values.elem_count() as u64)
            .sum();
        let units = BLOCKS + 1;
        let expected = tally(&[
            NORM,
            ("dp_cp", "all_reduce", 1, 16),
            ("data_parallel_shard", "all_gather_into", gather.calls, gather.bytes),
            (
                "data_parallel_shard",
                "reduce_scatter",
                scatters * reduce.calls,
                scatters * reduce.bytes,
            ),
            ("data_parallel_replicate", "all_reduce", replications * units, replications * shards),
        ]);
        assert_eq!(got, expected, "{mode}");
    }
}

#[test]
fn dimensions_of_size_one_send_nothing() {
    let (got, _) = third_step(1, r#"{"type": "model_parallel"}"#, Variant::ALL[3], 1);
    assert_eq!(got, tally(&[NORM]));
    let config = r#"{"type": "model_parallel", "tensor_parallel_size": 1}"#;
    let (got, tree) = third_step(2, config, Variant::ALL[3], 1);
    let [gather, reduce] = fsdp(&tree, 1);
    let shard = "data_parallel_shard";
    let expected = tally(&[
        NORM,
        // The loss and its count: `dp_cp` consists only of this dimension.
        (shard, "all_reduce", 1, 16),
        (shard, "all_gather_into", gather.calls, gather.bytes),
        (shard, "reduce_scatter", reduce.calls, reduce.bytes),
    ]);
    assert_eq!(got, expected);
}

#[test]
fn shards_and_tensor_parallel_traffic_adds_up() {
    let config = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
    for accumulate in [1, 2] {
        let (got, tree) = third_step(4, config, Variant::default(), accumulate);
        // Units hold only this rank's part of the parameters after the plan's cuts.
        let [gather, reduce] = fsdp(&tree, accumulate as u64);
        let whole: u64 = tree.parameters().iter().map(|p| 4 * p.elem_count() as u64).sum();
        assert!(reduce.bytes < whole, "{} of {whole}", reduce.bytes);
        // The other shard has half of the batch.
        let (stream, logits) = (STREAM / 2, LOGITS / 2);
        let reductions = 4 * BLOCKS + 2;
        let (shard, calls) = ("data_parallel_shard", accumulate as u64);
        let expected = tally(&[
            NORM,
            (shard, "all_reduce", 1, 16),
            (shard, "all_gather_into", gather.calls, gather.bytes),
            (shard, "reduce_scatter", reduce.calls, reduce.bytes),
            ("tensor_parallel", "all_reduce", calls * reductions, reductions * stream),
            ("tensor_parallel", "all_gather_into", calls, logits),
        ]);
        assert_eq!(got, expected, "{accumulate}");
    }
}
