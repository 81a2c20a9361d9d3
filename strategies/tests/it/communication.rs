//! The exact calls and bytes of a step's communication.

use std::collections::BTreeMap;

use candle_core::DType;
use fulgurite_core::collective::{Counter, Record};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::parameter::Parameter;
use fulgurite_test_support::training::{Training, checkpointed};
use fulgurite_transports::run_ranks;

type Tally = BTreeMap<(String, &'static str), Record>;

/// Rank 0's tally of the third step, and the model. The first two steps audit and order the
/// buckets.
fn third_step(ranks: usize, config: &str, accumulate: usize) -> (Tally, ModuleTree) {
    let mut tallies = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mut training = Training::new(world, config, DType::F32, accumulate)?;
        training.step()?;
        training.step()?;
        counter.reset();
        training.step()?;
        Ok((counter.snapshot(), training.fabric.module_tree()?.clone()))
    })
    .unwrap_or_else(|error| panic!("{config}: {error}"));
    assert!(tallies.iter().all(|(tally, _)| *tally == tallies[0].0), "{config}: ranks differ");
    tallies.swap_remove(0)
}

fn bytes<'a>(parameters: impl IntoIterator<Item = &'a Parameter>) -> u64 {
    parameters.into_iter().map(|p| 4 * p.elem_count() as u64).sum()
}

fn trainable_bytes(parameters: &[Parameter]) -> u64 {
    bytes(parameters.iter().filter(|p| p.requires_grad()))
}

/// The loss totals (sum, count) over the data-parallel group, and the norm over the world.
fn scalars(data_parallel: &str) -> Tally {
    Tally::from([
        ((data_parallel.to_owned(), "all_reduce"), Record { calls: 1, bytes: 16 }),
        (("world".to_owned(), "all_reduce"), Record { calls: 1, bytes: 8 }),
    ])
}

#[test]
fn ddp_reduces_each_bucket_once() {
    let group = "data_parallel_replicate";
    for accumulate in [1, 3] {
        let (tally, tree) = third_step(3, r#"{"type": "ddp"}"#, accumulate);
        let gradients = bytes(tree.trainable());
        let mut expected = scalars(group);
        expected.get_mut(&(group.to_owned(), "all_reduce")).unwrap().calls += 1;
        expected.get_mut(&(group.to_owned(), "all_reduce")).unwrap().bytes += gradients;
        assert_eq!(tally, expected);

        // One bucket per gradient.
        let tiny = r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0}"#;
        let (tally, tree) = third_step(3, tiny, accumulate);
        let mut expected = scalars(group);
        let buckets = expected.get_mut(&(group.to_owned(), "all_reduce")).unwrap();
        buckets.calls += tree.trainable().count() as u64;
        buckets.bytes += gradients;
        assert_eq!(tally, expected);

        // The number of buckets follows from their size: no two neighbours fit into one.
        let cap = 400.0;
        let mb = cap / 1024.0 / 1024.0;
        let config =
            format!(r#"{{"type": "ddp", "first_bucket_mb": {mb}, "bucket_cap_mb": {mb}}}"#);
        let (tally, _) = third_step(3, &config, accumulate);
        let record = tally[&(group.to_owned(), "all_reduce")];
        assert_eq!(record.bytes, gradients + 16);
        let calls = (record.calls - 1) as f64;
        assert!(calls >= (gradients as f64 / cap).ceil(), "{calls} buckets");
        assert!(calls <= 2.0 * gradients as f64 / cap + 1.0, "{calls} buckets");
    }
}

// checklist: NeMo: recursive FSDP with prefetching
#[test]
fn fsdp_gathers_units_twice_and_reduces_once() {
    let group = "data_parallel_shard";
    for (config, gathers_a_micro_batch) in [
        (r#"{"type": "fsdp", "reshard_after_forward": true}"#, 2),
        (r#"{"type": "fsdp", "reshard_after_forward": true, "prefetch": 0}"#, 2),
        (r#"{"type": "fsdp", "prefetch": 2}"#, 2),
        (r#"{"type": "fsdp", "reshard_after_forward": false}"#, 1),
        (r#"{"type": "fsdp", "reshard_after_forward": false, "prefetch": 0}"#, 1),
    ] {
        for accumulate in [1, 3] {
            let (tally, tree) = third_step(3, config, accumulate);
            let root = tree.unit_parameters(None);
            let gathers = gathers_a_micro_batch * accumulate as u64;
            let mut gather = Record { calls: 1, bytes: bytes(&root) };
            let mut reduce = Record { calls: 1, bytes: trainable_bytes(&root) };
            for unit in tree.units() {
                let parameters = tree.unit_parameters(Some(unit.index()));
                gather.calls += gathers;
                gather.bytes += gathers * bytes(&parameters);
                reduce.calls += 1;
                reduce.bytes += trainable_bytes(&parameters);
            }
            let mut expected = scalars(group);
            expected.insert((group.to_owned(), "all_gather_into"), gather);
            expected.insert((group.to_owned(), "reduce_scatter"), reduce);
            assert_eq!(tally, expected, "{config}, {accumulate} micro-batches");
        }
    }
}

/// With parts over 2 of 4 ranks, backward gathers among 2; the last unit may stay whole.
// checklist: NeMo: recursive FSDP with prefetching
#[test]
fn kept_parts_are_gathered_from_fewer_ranks() {
    let all = ("data_parallel_shard".to_owned(), "all_gather_into");
    let few = ("reshard_after_forward".to_owned(), "all_gather_into");
    for accumulate in [1, 3] {
        let gathers = |config| third_step(4, config, accumulate);
        let (always, tree) = gathers(r#"{"type": "fsdp"}"#);
        let units = tree.units().iter().map(|u| bytes(&tree.unit_parameters(Some(u.index()))));
        let units: Vec<u64> = units.collect();
        let micro = accumulate as u64;
        for (config, of_all, of_few) in [
            (r#"{"type": "fsdp", "reshard_after_forward": 2}"#, 0, &units[..]),
            (
                r#"{"type": "fsdp", "reshard_after_forward": 2, "prefetch": {"forward": 0, "backward": 3}}"#,
                0,
                &units[..],
            ),
            (r#"{"type": "fsdp", "reshard_after_forward": 1}"#, 0, &[]),
            (r#"{"type": "fsdp", "reshard_after_forward": 4}"#, units.len(), &[]),
            (r#"{"type": "fsdp", "reshard_after_forward": "all_but_last"}"#, units.len() - 1, &[]),
        ] {
            let mut expected = always.clone();
            // Only the backward gather of the unit's two gathers.
            let all = expected.get_mut(&all).unwrap();
            all.calls -= micro * (units.len() - of_all) as u64;
            all.bytes -= micro * units[of_all..].iter().sum::<u64>();
            if !of_few.is_empty() {
                let calls = micro * of_few.len() as u64;
                let bytes = micro * of_few.iter().sum::<u64>();
                expected.insert(few.clone(), Record { calls, bytes });
            }
            assert_eq!(gathers(config).0, expected, "{config}, {accumulate} micro-batches");
        }
    }
}

// checklist: composer: wrap policy
#[test]
fn unchosen_units_are_gathered_with_the_root() {
    let config = r#"{"type": "fsdp", "shard_conditions": ["layers.1"]}"#;
    let (tally, tree) = third_step(2, config, 1);
    let unit = bytes(&tree.unit_parameters(Some(1)));
    let gathers = tally[&("data_parallel_shard".to_owned(), "all_gather_into")];
    assert_eq!(gathers, Record { calls: 3, bytes: bytes(tree.parameters()) + unit });
    let reductions = tally[&("data_parallel_shard".to_owned(), "reduce_scatter")];
    assert_eq!(reductions, Record { calls: 2, bytes: bytes(tree.trainable()) });
}

/// Recomputation uses the units already gathered for backward.
// checklist: composer: activation checkpointing
#[test]
fn activation_checkpointing_sends_nothing_more() {
    for config in [
        r#"{"type": "ddp"}"#,
        r#"{"type": "fsdp"}"#,
        r#"{"type": "fsdp", "prefetch": 0}"#,
        r#"{"type": "fsdp", "prefetch": 2}"#,
        r#"{"type": "fsdp", "reshard_after_forward": false}"#,
        r#"{"type": "fsdp", "shard_conditions": ["layers.1"]}"#,
    ] {
        for accumulate in [1, 3] {
            let expected = third_step(3, config, accumulate).0;
            for mode in ["full", "selective"] {
                let (tally, tree) = third_step(3, &checkpointed(config, mode), accumulate);
                let again = tree.units().iter().filter(|u| u.activation_checkpointing()).count();
                assert_eq!(again, if mode == "full" { 3 } else { 1 });
                assert_eq!(tally, expected, "{config}, {mode}, {accumulate} micro-batches");
            }
        }
    }
}

/// Parameters cost exactly half the bytes.
// checklist: composer: mixed-precision presets
// checklist: NeMo: mp_policy
#[test]
fn mixed_precision_gathers_half_the_bytes() {
    let config = r#"{"type": "fsdp",
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "f32"}}"#;
    let full = third_step(2, r#"{"type": "fsdp"}"#, 1).0;
    let half = third_step(2, config, 1).0;
    let key = |op| ("data_parallel_shard".to_owned(), op);
    assert_eq!(2 * half[&key("all_gather_into")].bytes, full[&key("all_gather_into")].bytes);
    assert_eq!(half[&key("reduce_scatter")], full[&key("reduce_scatter")]);
    let bf16 = r#"{"type": "fsdp",
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}"#;
    let bf16 = third_step(2, bf16, 1).0;
    assert_eq!(2 * bf16[&key("reduce_scatter")].bytes, full[&key("reduce_scatter")].bytes);
}

/// A single rank sends nothing over the groups of the mesh. It asks only the world for the norm,
/// and the world communicates nothing at this size.
#[test]
fn one_rank_communicates_nothing() {
    for config in [r#"{"type": "single_device"}"#, r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
        let (tally, _) = third_step(1, config, 1);
        let norm = (("world".to_owned(), "all_reduce"), Record { calls: 1, bytes: 8 });
        assert_eq!(tally, Tally::from([norm]), "{config}");
    }
}
