//! Number of queued copies into and out of flat buffers.

use std::sync::atomic::Ordering;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::{AllGather, Collective, ProcessGroup, ReduceOp, ReduceScatter};

use crate::ranks::Job;

const RANKS: usize = 3;

/// Gradients or parameters of a unit: two dtypes, uneven parts, some of them empty.
const COUNTS: [([usize; RANKS], DType); 5] = [
    ([3, 4, 5], DType::F32),
    ([0, 7, 1], DType::BF16),
    ([2, 2, 2], DType::F32),
    ([1, 0, 0], DType::F32),
    ([9, 8, 8], DType::BF16),
];

fn numbers(start: usize, n: usize, dtype: DType) -> Result<Tensor> {
    let numbers = (start..start + n).map(|i| i as f32).collect::<Vec<_>>();
    Ok(Tensor::from_vec(numbers, n, &Device::Cpu)?.to_dtype(dtype)?)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

fn gather(group: &dyn ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let part = |(counts, dtype): ([usize; RANKS], DType)| {
        let start = counts[..rank].iter().sum();
        let output = Tensor::zeros(counts.iter().sum::<usize>(), dtype, &Device::Cpu)?;
        let input = numbers(start, counts[rank], dtype)?;
        Ok(AllGather { input, output, counts: counts.to_vec() })
    };
    let parts: Vec<AllGather> = COUNTS.into_iter().map(part).collect::<Result<_>>()?;
    group.run(Collective::all_gather_into(parts.clone()))?;
    for AllGather { output, .. } in parts {
        assert_eq!(values(&output), values(&numbers(0, output.elem_count(), DType::F32)?));
    }
    Ok(())
}

fn scatter(group: &dyn ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let part = |(counts, dtype): ([usize; RANKS], DType)| {
        let input = numbers(0, counts.iter().sum(), dtype)?;
        let output = Tensor::zeros(counts[rank], dtype, &Device::Cpu)?;
        Ok(ReduceScatter { input, output, counts: counts.to_vec() })
    };
    let parts: Vec<ReduceScatter> = COUNTS.into_iter().map(part).collect::<Result<_>>()?;
    group.run(Collective::reduce_scatter(parts.clone(), ReduceOp::Sum))?;
    for ReduceScatter { output, counts, .. } in parts {
        let start: usize = counts[..rank].iter().sum();
        let sums = (start..start + counts[rank]).map(|i| (i * RANKS) as f32);
        assert_eq!(values(&output), sums.collect::<Vec<_>>());
    }
    Ok(())
}

#[test]
fn uneven_tensors_are_copied_in_two_batches() {
    for (seed, collective) in [gather, scatter].into_iter().enumerate() {
        let job = Job::new(seed as u64);
        job.run(RANKS, |group| collective(&*group)).unwrap();
        job.check();
        let batches = job.batches.load(Ordering::Relaxed);
        assert_eq!(batches, 2 * RANKS as u64, "in, and out, on each rank");
    }
}

#[test]
fn even_tensors_are_not_copied() {
    let job = Job::new(7);
    job.run(RANKS, |group| {
        let output = Tensor::zeros(2 * RANKS, DType::F32, &Device::Cpu)?;
        let input = numbers(2 * group.rank(), 2, DType::F32)?;
        group.run(Collective::all_gather_into(vec![AllGather::even(&output, &input, RANKS)]))?;
        assert_eq!(values(&output), values(&numbers(0, 2 * RANKS, DType::F32)?));
        Ok(())
    })
    .unwrap();
    assert_eq!(job.batches.load(Ordering::Relaxed), 0);
}
