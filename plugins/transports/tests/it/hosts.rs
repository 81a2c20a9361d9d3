//! Groups of processes on one host that act as several hosts.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{
    Collective, GroupContext, ProcessGroup, ProcessGroupConfig, ReduceOp, ReduceScatter,
};
use fulgurite_core::{Error, Result, conformance};
use fulgurite_transports::{Auto, Tcp};

use crate::job::{Job, run_as_rank_on};

/// One rank of a scenario, if this process was started as one.
#[test]
fn a_rank() {
    let timeout_secs = |scenario: &str| if scenario.starts_with("timeout") { 2 } else { 60 };
    run_as_rank_on(nodes, timeout_secs, run_scenario);
}

/// Returns the node of each rank, from the second word of a scenario.
fn nodes(scenario: &str, size: usize) -> Vec<usize> {
    let nodes = scenario.split(' ').nth(1).unwrap();
    let nodes: Vec<usize> = nodes.bytes().map(|digit| usize::from(digit - b'0')).collect();
    assert_eq!(nodes.len(), size);
    nodes
}

fn start(scenario: &str, nodes: &str) -> Job {
    Job::start("hosts::a_rank", nodes.len(), &format!("{scenario} {nodes}"))
}

fn run_scenario(scenario: &str, context: &GroupContext) -> Result<()> {
    let (scenario, _) = scenario.split_once(' ').unwrap();
    let config = Auto { levels: scenario != "flat", ..Auto::default() };
    let group = config.build(context)?;
    match scenario {
        "conforms" | "flat" => {
            conformance::process_group(&*group)?;
            // A second world group on the same store.
            all_reduce_once(&*config.build(context)?)
        }
        "abort" => conformance::process_group_abort(&*group),
        "timeout" => conformance::process_group_timeout(&*group, context.timeout),
        "bits" => {
            let flat = Tcp::default().build(context)?;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                same_bits(&*group, &*flat, dtype)?;
            }
            Ok(())
        }
        "killed" => {
            for step in 0.. {
                all_reduce_once(&*group)?;
                if step == 5 {
                    context.store.set(&format!("running{}", context.rank), b"")?;
                }
            }
            Ok(())
        }
        "overlap" => {
            // Many collectives at once, with other groups meanwhile.
            let halves = (0..2)
                .map(|half| (0..context.world_size).filter(|rank| rank % 2 == half).collect());
            let part = group.split(&halves.collect::<Vec<_>>(), "half")?;
            let tensors: Vec<Tensor> = (0..8)
                .map(|i| Tensor::full(i as f32, 300_000, &Device::Cpu))
                .collect::<Result<_, _>>()?;
            let mut works = Vec::new();
            for (i, tensor) in tensors.iter().enumerate() {
                let group = if i % 3 == 2 { &part } else { &group };
                works.push(group.all_reduce(tensor, ReduceOp::Sum)?);
            }
            works.into_iter().rev().try_for_each(|work| work.wait())?;
            for (i, tensor) in tensors.iter().enumerate() {
                let size = if i % 3 == 2 { part.size() } else { group.size() };
                assert_eq!(tensor.max(0)?.to_scalar::<f32>()?, (i * size) as f32);
            }
            Ok(())
        }
        other => Err(Error::other(format!("no scenario {other}"))),
    }
}

fn all_reduce_once(group: &dyn ProcessGroup) -> Result<()> {
    let x = Tensor::ones(400_000, DType::F32, &Device::Cpu)?;
    group.all_reduce(&x, ReduceOp::Sum)?.wait()?;
    assert_eq!(x.max(0)?.to_scalar::<f32>()?, group.size() as f32);
    Ok(())
}

/// Checks that sums in levels are bitwise equal to sums in rank order.
fn same_bits(levels: &dyn ProcessGroup, flat: &dyn ProcessGroup, dtype: DType) -> Result<()> {
    let (n, rank, size) = (1_300_003, levels.rank(), levels.size());
    let values = (0..n).map(|i| {
        let i = (i as u32).wrapping_mul(2_654_435_761) ^ (rank as u32).wrapping_mul(40_503);
        (i % 100_003) as f32 / 1000.0 - 50.0
    });
    let values = Tensor::from_iter(values, &Device::Cpu)?.to_dtype(dtype)?;
    let bits = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.to_vec1::<f32>();
    let sum = |group: &dyn ProcessGroup| -> Result<(Vec<f32>, Vec<f32>)> {
        let whole = values.copy()?;
        group.run(Collective::all_reduce(&whole, ReduceOp::Sum))?;
        let mut counts = vec![n / size; size];
        counts[size - 1] += n % size;
        let output = Tensor::zeros(counts[rank], dtype, &Device::Cpu)?;
        let part = ReduceScatter { input: values.copy()?, output: output.clone(), counts };
        group.run(Collective::reduce_scatter(vec![part], ReduceOp::Sum))?;
        Ok((bits(&whole)?, bits(&output)?))
    };
    let ((all, part), (all_flat, part_flat)) = (sum(levels)?, sum(flat)?);
    assert!(all.iter().zip(&all_flat).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype:?}");
    assert!(part.iter().zip(&part_flat).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype:?}");
    Ok(())
}

#[test]
fn two_hosts_of_two_conform() {
    start("conforms", "0011").expect_ok();
}

#[test]
fn three_hosts_of_two_conform() {
    start("conforms", "001122").expect_ok();
}

#[test]
fn hosts_of_different_sizes_conform() {
    start("conforms", "0111").expect_ok();
}

#[test]
fn ranks_interleaved_over_hosts_conform() {
    start("conforms", "0101").expect_ok();
}

#[test]
fn hosts_of_one_rank_conform() {
    start("conforms", "01").expect_ok();
}

#[test]
fn groups_without_levels_conform() {
    start("flat", "0011").expect_ok();
}

#[test]
fn sums_in_levels_equal_sums_in_rank_order() {
    start("bits", "0011").expect_ok();
    start("bits", "001122").expect_ok();
}

#[test]
fn collectives_of_several_groups_overlap() {
    start("overlap", "0011").expect_ok();
}

#[test]
fn abort_reaches_all_hosts() {
    start("abort", "0011").expect_ok();
}

#[test]
fn missing_rank_is_named_on_all_hosts() {
    start("timeout", "0011").expect_ok();
}

#[test]
fn killed_rank_ends_ranks_of_all_hosts() {
    for killed in [0, 3] {
        let mut job = start("killed", "0011");
        (0..4).for_each(|rank| job.wait_for(&format!("running{rank}")));
        job.children[killed].kill().unwrap();
        for (rank, result) in job.results().into_iter().enumerate() {
            match (rank == killed, result) {
                (true, result) => assert_eq!(result, None),
                (false, Some(result)) => {
                    assert!(
                        result.contains(&format!("rank {killed} failed: ")),
                        "{rank}: {result}"
                    );
                }
                (false, None) => panic!("rank {rank} said nothing"),
            }
        }
    }
}
