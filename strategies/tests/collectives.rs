//! The collectives that carry gradients: values against a naive computation, gradients against
//! finite differences, calls and bytes.

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{Counter, Counting, ProcessGroup, Record, Solo};
use fulgurite_core::parallel::collectives;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_transports::run_ranks;

/// One of the functions, with the dimensions it works along.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Op {
    CopyTo,
    ReduceFrom,
    AllGather(isize),
    ReduceScatter(isize),
    Gather(isize),
    Split(isize),
    AllToAll(isize, isize),
}

use Op::{AllGather, AllToAll, CopyTo, Gather, ReduceFrom, ReduceScatter, Split};

impl Op {
    /// All of them, along every dimension of a tensor of three.
    fn all() -> Vec<Self> {
        let mut all = vec![CopyTo, ReduceFrom];
        for dim in [0, 1, 2, -1, -2] {
            all.extend([AllGather(dim), ReduceScatter(dim), Gather(dim), Split(dim)]);
        }
        for (split, concat) in [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0), (1, 1), (-1, -3)] {
            all.push(AllToAll(split, concat));
        }
        all
    }

    fn apply(self, x: &Tensor, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
        match self {
            CopyTo => collectives::copy_to(x, group),
            ReduceFrom => collectives::reduce_from(x, group),
            AllGather(dim) => collectives::all_gather(x, dim, group),
            ReduceScatter(dim) => collectives::reduce_scatter(x, dim, group),
            Gather(dim) => collectives::gather(x, dim, group),
            Split(dim) => collectives::split(x, dim, group),
            AllToAll(split, concat) => collectives::all_to_all(x, split, concat, group),
        }
    }

    /// The outputs of all ranks from the inputs of all ranks.
    fn naive(self, inputs: &[Tensor]) -> Vec<Tensor> {
        let n = inputs.len();
        let place = |dim: isize| dim.rem_euclid(3) as usize;
        let sum = || inputs.iter().skip(1).fold(inputs[0].clone(), |sum, x| (sum + x).unwrap());
        let part = |x: &Tensor, dim: usize, rank: usize| {
            let size = x.dims()[dim] / n;
            x.narrow(dim, rank * size, size).unwrap()
        };
        let outputs: Vec<Tensor> = match self {
            CopyTo => inputs.to_vec(),
            ReduceFrom => vec![sum(); n],
            AllGather(dim) | Gather(dim) => vec![Tensor::cat(inputs, place(dim)).unwrap(); n],
            ReduceScatter(dim) => (0..n).map(|r| part(&sum(), place(dim), r)).collect(),
            Split(dim) => (0..n).map(|r| part(&inputs[r], place(dim), r)).collect(),
            AllToAll(split, concat) => (0..n)
                .map(|r| {
                    let parts: Vec<_> = inputs.iter().map(|x| part(x, place(split), r)).collect();
                    Tensor::cat(&parts, place(concat)).unwrap()
                })
                .collect(),
        };
        outputs.iter().map(|y| y.contiguous().unwrap()).collect()
    }

    /// Whether the ranks all have the same whole, on the side where it is whole, and all compute the
    /// same from it: the loss then is one rank's, not the sum of all.
    fn same_everywhere(self) -> bool {
        matches!(self, ReduceFrom | Gather(_) | Split(_))
    }

    /// Whether the ranks must have the same input.
    fn replicated_input(self) -> bool {
        matches!(self, CopyTo | Split(_))
    }

    /// The calls of forward and of backward for an input of `bytes` bytes on `n` ranks.
    fn calls(self, bytes: u64, n: u64) -> [Option<(&'static str, u64)>; 2] {
        match self {
            CopyTo => [None, Some(("all_reduce", bytes))],
            ReduceFrom => [Some(("all_reduce", bytes)), None],
            AllGather(_) => {
                [Some(("all_gather_into", bytes * n)), Some(("reduce_scatter", bytes * n))]
            }
            ReduceScatter(_) => {
                [Some(("reduce_scatter", bytes)), Some(("all_gather_into", bytes))]
            }
            Gather(_) => [Some(("all_gather_into", bytes * n)), None],
            Split(_) => [None, Some(("all_gather_into", bytes))],
            AllToAll(..) => [Some(("all_to_all", bytes)); 2],
        }
    }
}

fn randn(what: &str, shape: &[usize]) -> Tensor {
    let mut values = vec![0f64; shape.iter().product()];
    Stream::new(3, Purpose::Sample, what).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// What a rank makes of its output, not linear so that a gradient from stale values shows: the sum
/// of the output's sines times fixed numbers. Where ranks compute the same, the numbers are the
/// same.
fn loss(op: Op, rank: usize, y: &Tensor) -> Result<Tensor> {
    let what = match op {
        ReduceFrom | Gather(_) => "cotangent".to_owned(),
        _ => format!("cotangent {rank}"),
    };
    Ok((y.sin()? * randn(&what, y.dims()))?.sum_all()?)
}

/// The loss whose gradient the ranks' backwards compute, from the inputs of all ranks.
fn total(op: Op, inputs: &[Tensor]) -> f64 {
    let outputs = op.naive(inputs);
    let of = |rank| loss(op, rank, &outputs[rank]).unwrap().to_scalar::<f64>().unwrap();
    match op {
        // Every rank's loss is the one loss.
        ReduceFrom | Gather(_) => of(0),
        _ => (0..inputs.len()).map(of).sum(),
    }
}

/// The gradient of each rank's input by central differences.
fn numeric(op: Op, inputs: &[Tensor]) -> Vec<Vec<f64>> {
    const H: f64 = 1e-5;
    let shifted = |rank: usize, i: usize, h: f64| {
        let mut inputs = inputs.to_vec();
        // Where the input is replicated it is one input, and changes on all ranks.
        let ranks = if op.replicated_input() { 0..inputs.len() } else { rank..rank + 1 };
        for rank in ranks {
            let mut values = flat(&inputs[rank]);
            values[i] += h;
            inputs[rank] = Tensor::from_vec(values, inputs[rank].dims(), &Device::Cpu).unwrap();
        }
        total(op, &inputs)
    };
    (0..inputs.len())
        .map(|rank| {
            let elements = 0..inputs[rank].elem_count();
            elements
                .map(|i| (shifted(rank, i, H) - shifted(rank, i, -H)) / (2.0 * H))
                .collect()
        })
        .collect()
}

fn input(op: Op, rank: usize) -> Tensor {
    // Divisible by 2 and by 3, and all different.
    let what = if op.replicated_input() { "x".to_owned() } else { format!("x {rank}") };
    randn(&what, &[6, 12, 18])
}

/// The same numbers behind an offset, with the last two dimensions turned in memory.
fn strided(x: &Tensor) -> Tensor {
    let turned = x.transpose(1, 2).unwrap().contiguous().unwrap();
    let padded = turned.pad_with_zeros(0, 1, 1).unwrap();
    padded.narrow(0, 1, x.dims()[0]).unwrap().transpose(1, 2).unwrap()
}
