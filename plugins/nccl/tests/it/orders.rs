//! Results do not depend on the order in which streams run.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::{
    Abandonment, AllGather, Collective, ProcessGroup, ReduceOp, ReduceScatter, all_gather_object,
};
use fulgurite_nccl::{Parts, connect};
use fulgurite_transports::run_ranks_with;

use crate::host_memory::HostMemory;
use crate::ranks::Job;

/// Number of seeds: `NCCL_ORDERS`, or 50.
pub(crate) fn orders() -> u64 {
    std::env::var("NCCL_ORDERS").ok().and_then(|n| n.parse().ok()).unwrap_or(50)
}

fn range(start: usize, n: usize) -> Result<Tensor> {
    Ok(Tensor::from_vec((start..start + n).map(|i| i as f32).collect::<Vec<_>>(), n, &Device::Cpu)?)
}

/// The schedule of an FSDP step with replicas, and a ring, all begun before the first wait. Values
/// are small integers, whose sums are exact in any order.
fn step(group: &dyn ProcessGroup, round: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let counts: Vec<usize> = (0..size).map(|r| (r * 5 + round) % 7).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let total = start(size);

    // Waited for at once, before the streams reach it.
    for _ in 0..3 {
        let whole = Tensor::zeros(total, DType::F32, &Device::Cpu)?;
        let input = range(start(rank), counts[rank])?;
        let part = AllGather { input, output: whole.clone(), counts: counts.clone() };
        group.run(Collective::all_gather_into(vec![part]))?;
        assert_eq!(whole.to_vec1::<f32>()?, range(0, total)?.to_vec1::<f32>()?, "at once");
    }

    let whole = Tensor::zeros(total, DType::F32, &Device::Cpu)?;
    let even = Tensor::zeros(4 * size, DType::F32, &Device::Cpu)?;
    let parts = vec![
        AllGather {
            input: range(start(rank), counts[rank])?,
            output: whole.clone(),
            counts: counts.clone(),
        },
        AllGather::even(&even, &range(4 * rank, 4)?, size),
    ];
    let gather = group.all_gather_into(parts)?;

    let shard = Tensor::zeros(counts[rank], DType::F32, &Device::Cpu)?;
    let part =
        ReduceScatter { input: range(rank, total)?, output: shard.clone(), counts: counts.clone() };
    let scatter = group.reduce_scatter(vec![part], ReduceOp::Sum)?;

    let chain = Tensor::ones(33, DType::F32, &Device::Cpu)?;
    let sums = [(); 3].map(|()| group.all_reduce(&chain, ReduceOp::Sum));

    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let received = Tensor::zeros(17, DType::F32, &Device::Cpu)?;
    let send = group.send(&range(rank, 17)?, next)?;
    let recv = group.recv(&received, previous)?;
    // Never waited for.
    drop(group.all_reduce(&Tensor::ones(9, DType::F32, &Device::Cpu)?, ReduceOp::Max)?);

    recv.wait()?;
    for sum in sums.into_iter().rev() {
        sum?.wait()?;
    }
    scatter.wait()?;
    gather.wait()?;
    send.wait()?;

    let values = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap();
    assert_eq!(values(&whole), values(&range(0, total)?), "gathered, uneven");
    assert_eq!(values(&even), values(&range(0, 4 * size)?), "gathered, even");
    let ranks: usize = (0..size).sum();
    let own = (start(rank)..start(rank) + counts[rank]).map(|i| (i * size + ranks) as f32);
    assert_eq!(values(&shard), own.collect::<Vec<_>>(), "scattered");
    assert_eq!(values(&chain), vec![(size as f32).powi(3); 33], "a chain");
    assert_eq!(values(&received), values(&range(previous, 17)?), "a ring");
    Ok(())
}

#[test]
fn streams_may_run_in_any_order() {
    for seed in 0..orders() {
        let ranks = 2 + seed as usize % 3;
        let job = Job::new(1000 + seed);
        job.run(ranks, |group| {
            for round in 0..3 {
                step(&*group, round)?;
            }
            // A group of some of the ranks, beside the group of all.
            let child = group.split(&[vec![0], (1..ranks).rev().collect()], "part")?;
            step_of_part(&*child)?;
            assert_eq!(all_gather_object(&*group, &group.rank())?.len(), ranks);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        job.check();
    }
}

fn step_of_part(group: &dyn ProcessGroup) -> Result<()> {
    let one = Tensor::ones(5, DType::F32, &Device::Cpu)?;
    group.run(Collective::all_reduce(&one, ReduceOp::Sum))?;
    assert_eq!(one.to_vec1::<f32>()?, vec![group.size() as f32; 5]);
    Ok(())
}

/// Two ranks drop works, as in an abandoned step. After `end` the compute stream has waited for all
/// of them.
fn dropped_works_have_run(
    seeds: std::ops::Range<u64>,
    end: impl Fn(&dyn ProcessGroup, &Abandonment) -> Result<()> + Sync,
) {
    for seed in seeds {
        let job = Job::new(seed);
        run_ranks_with(2, job.timeout, |host| {
            // Agreement between ranks uses the host.
            let on_device = Some(vec![DType::F32]);
            let memory = HostMemory::new(&job.machine, on_device, &job.batches);
            let steps = Abandonment::new(host.rank());
            let parts = Parts { streams: memory.clone(), ..job.parts(host) };
            let group = steps.watch(connect(parts)?)?;
            for round in 1..4 {
                for elements in [9, 4000, 70] {
                    let ones = Tensor::ones(elements, DType::F32, &Device::Cpu)?;
                    drop(group.all_reduce(&ones, ReduceOp::Sum)?);
                }
                end(&*group, &steps)?;
                let (launched, under_way) = memory.launched();
                assert!(launched <= 3 * round, "{launched} in round {round}");
                assert_eq!(under_way, 0, "of {launched} collectives, seed {seed}");
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        job.check();
    }
}

#[test]
fn barriers_order_dropped_collectives() {
    dropped_works_have_run(0..orders(), |group, _| group.run(Collective::Barrier));
}

#[test]
fn resumed_steps_follow_dropped_collectives() {
    dropped_works_have_run(0..orders(), |group, steps| {
        // All or some collectives are launched before a rank gives up.
        if group.rank() == 1 {
            steps.abandon();
        } else {
            assert!(group.run(Collective::Barrier).is_err());
        }
        steps.resume().map(drop)
    });
}
