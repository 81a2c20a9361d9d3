//! Collectives that carry gradients: values against a naive computation, gradients against finite
//! differences, and the exact calls and bytes.

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{Counter, ProcessGroup, Record, Solo};
use fulgurite_core::parallel::collectives;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

/// A collective function, with its dimensions.
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
    /// All functions, along every dimension of a 3-dimensional tensor.
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

    /// The output's shape for a 3-dimensional input.
    fn output_shape(self, input: &[usize; 3], n: usize) -> [usize; 3] {
        let place = |dim: isize| dim.rem_euclid(3) as usize;
        let mut shape = *input;
        match self {
            CopyTo | ReduceFrom => {}
            AllGather(dim) | Gather(dim) => shape[place(dim)] *= n,
            ReduceScatter(dim) | Split(dim) => shape[place(dim)] /= n,
            AllToAll(split, concat) => {
                shape[place(split)] /= n;
                shape[place(concat)] *= n;
            }
        }
        shape
    }

    /// Whether all ranks have the same output and compute the same from it. The loss is then one
    /// rank's loss, otherwise the sum of all ranks' losses.
    fn same_output(self) -> bool {
        matches!(self, ReduceFrom | Gather(_))
    }

    /// Whether the ranks have the same input.
    fn same_input(self) -> bool {
        matches!(self, CopyTo | Split(_))
    }

    /// The calls of forward and backward for an input of `bytes` bytes on `n` ranks.
    fn calls(self, bytes: u64, n: u64) -> [Option<(&'static str, u64)>; 2] {
        match self {
            CopyTo => [None, Some(("all_reduce", bytes))],
            ReduceFrom => [Some(("all_reduce", bytes)), None],
            AllGather(_) => {
                [Some(("all_gather_into", bytes * n)), Some(("reduce_scatter", bytes * n))]
            }
            ReduceScatter(_) => [Some(("reduce_scatter", bytes)), Some(("all_gather_into", bytes))],
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

/// A view that starts at an offset and has its last two dimensions transposed in memory.
fn view(padded: &Tensor) -> Tensor {
    let n = padded.dims()[0] - 2;
    padded.narrow(0, 1, n).unwrap().transpose(1, 2).unwrap()
}

/// A tensor whose [`view`] has the elements of `x`.
fn padded(x: &Tensor) -> Tensor {
    x.transpose(1, 2).unwrap().contiguous().unwrap().pad_with_zeros(0, 1, 1).unwrap()
}

/// A rank's loss: sines of its output, so that stale values show, times fixed numbers.
fn loss(op: Op, rank: usize, y: &Tensor) -> Result<Tensor> {
    let what = if op.same_output() { "loss".to_owned() } else { format!("loss {rank}") };
    Ok((y.sin()? * randn(&what, y.dims()))?.sum_all()?)
}

/// The loss of all ranks, from the inputs of all ranks.
fn total(op: Op, inputs: &[Tensor]) -> f64 {
    let outputs = op.naive(inputs);
    let ranks = if op.same_output() { 1 } else { inputs.len() };
    let loss = |rank: usize| loss(op, rank, &outputs[rank]).unwrap().to_scalar::<f64>().unwrap();
    (0..ranks).map(loss).sum()
}

/// The gradient of each rank's input, by central differences.
fn numeric(op: Op, inputs: &[Tensor]) -> Vec<Vec<f64>> {
    const H: f64 = 1e-5;
    let at = |rank: usize, i: usize, h: f64| {
        let mut inputs = inputs.to_vec();
        let mut values = flat(&inputs[rank]);
        values[i] += h;
        let changed = Tensor::from_vec(values, inputs[rank].dims(), &Device::Cpu).unwrap();
        if op.same_input() {
            inputs.fill(changed);
        } else {
            inputs[rank] = changed;
        }
        total(op, &inputs)
    };
    let gradient = |rank: usize| {
        let elements = 0..inputs[rank].elem_count();
        elements.map(|i| (at(rank, i, H) - at(rank, i, -H)) / (2.0 * H)).collect()
    };
    if op.same_input() {
        return vec![gradient(0); inputs.len()];
    }
    (0..inputs.len()).map(gradient).collect()
}

/// The inputs of all ranks.
fn inputs(op: Op, shape: &[usize], n: usize) -> Vec<Tensor> {
    let what = |rank| if op.same_input() { "x".to_owned() } else { format!("x {rank}") };
    (0..n).map(|rank| randn(&what(rank), shape)).collect()
}

fn counting(world: Arc<dyn ProcessGroup>) -> (Arc<dyn ProcessGroup>, Counter) {
    let counter = Counter::default();
    (counter.watch(world), counter)
}

fn assert_counted(counter: &Counter, want: Option<(&'static str, u64)>, what: &str) {
    let got: Vec<_> =
        counter.snapshot().into_iter().map(|((_, op), record)| (op, record)).collect();
    let want: Vec<_> =
        want.into_iter().map(|(op, bytes)| (op, Record { calls: 1, bytes })).collect();
    assert_eq!(got, want, "{what}");
    counter.reset();
}

/// Checks `op` on inputs of `shape` on `n` ranks.
fn check(op: Op, shape: &[usize], n: usize) {
    let inputs = inputs(op, shape, n);
    let (outputs, gradients) = (op.naive(&inputs), numeric(op, &inputs));
    let bytes = 8 * inputs[0].elem_count() as u64;
    run_ranks(n, |world| {
        let rank = world.rank();
        let (group, counter) = counting(world);
        let [forward, backward] = op.calls(bytes, n as u64);
        for strided in [false, true] {
            let what = format!("{op:?} of {shape:?} on {n} ranks, strided {strided}");
            let x = &inputs[rank];
            let var = Var::from_tensor(&if strided { padded(x) } else { x.copy()? })?;
            let before = flat(&var);
            let seen = |t: &Tensor| if strided { view(t) } else { t.clone() };
            let y = op.apply(&seen(&var), &group)?;
            assert_counted(&counter, forward, &what);
            assert_eq!(
                (y.dims(), flat(&y)),
                (outputs[rank].dims(), flat(&outputs[rank])),
                "{what}"
            );
            let grads = loss(op, rank, &y)?.backward()?;
            assert_counted(&counter, backward, &what);
            let grad = flat(&seen(grads.get(&var).expect("a gradient")));
            for (i, (g, w)) in grad.iter().zip(&gradients[rank]).enumerate() {
                assert!((g - w).abs() < 1e-8, "{what}, rank {rank}: gradient {i}: {g}, not {w}");
            }
            assert_eq!(flat(&var), before, "{what}: the input has changed");

            // Outside of a graph the result is the same, and the input stays unchanged.
            let _no_grad = no_grad();
            let y = op.apply(&seen(&var), &group)?;
            assert!(!y.detach().track_op());
            assert_eq!(flat(&y), flat(&outputs[rank]), "{what}, no graph");
            assert_eq!(flat(&var), before, "{what}: the input has changed");
            counter.reset();
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn every_dimension_has_right_values_and_traffic() {
    for n in [2, 3] {
        for op in Op::all() {
            check(op, &[n, 2 * n, 3 * n], n);
        }
    }
}

#[test]
fn a_batch_of_one_is_cut_along_the_sequence() {
    // The parts of such a tensor are contiguous in it, but must not share its memory.
    for op in [AllGather(1), ReduceScatter(1), Gather(1), Split(1), AllToAll(1, 2), AllToAll(2, 1)]
    {
        check(op, &[1, 6, 9], 3);
    }
}

#[test]
fn functions_follow_each_other_in_one_graph() {
    // A column-parallel and a row-parallel product between two cuts of the sequence.
    let (n, shape) = (3, [2, 6, 4]);
    let x = randn("x", &shape);
    let weights: Vec<Tensor> = (0..n).map(|rank| randn(&format!("w {rank}"), &shape)).collect();
    let whole = Var::from_tensor(&x).unwrap();
    let y = weights.iter().map(|w| (whole.sin().unwrap() * w).unwrap());
    let y = y.reduce(|a, b| (a + b).unwrap()).unwrap();
    let want_loss = (y.sqr().unwrap()).sum_all().unwrap();
    let want = flat(want_loss.backward().unwrap().get(&whole).unwrap());
    let want_loss = want_loss.to_scalar::<f64>().unwrap();
    for sequence in [false, true] {
        run_ranks(n, |group| {
            let rank = group.rank();
            let var = Var::from_tensor(&x)?;
            let y = if sequence {
                let part = collectives::split(&var, 1, &group)?;
                let gathered = collectives::all_gather(&part.sin()?, 1, &group)?;
                let part = collectives::reduce_scatter(&(gathered * &weights[rank])?, 1, &group)?;
                collectives::gather(&part, 1, &group)?
            } else {
                let same = collectives::copy_to(&var, &group)?;
                collectives::reduce_from(&(same.sin()? * &weights[rank])?, &group)?
            };
            let loss = y.sqr()?.sum_all()?;
            let grads = loss.backward()?;
            assert!((loss.to_scalar::<f64>()? - want_loss).abs() < 1e-10);
            for (g, w) in flat(grads.get(&var).unwrap()).iter().zip(&want) {
                assert!((g - w).abs() < 1e-10, "sequence {sequence}: {g}, not {w}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn tensors_without_elements_pass() {
    for op in Op::all() {
        // The position of the empty dimension must not matter.
        for shape in [[0, 6, 6], [6, 0, 6], [6, 6, 0]] {
            run_ranks(2, |group| {
                let x = Tensor::zeros(&shape, candle_core::DType::F64, &Device::Cpu)?;
                let y = op.apply(&x, &group)?;
                assert_eq!(y.dims(), op.output_shape(&shape, 2), "{op:?}");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn one_rank_communicates_nothing() {
    for op in Op::all() {
        let (group, counter) = counting(Arc::new(Solo::new("tensor_parallel", 0)));
        let x = Var::from_tensor(&randn("x", &[2, 3, 5])).unwrap();
        let y = op.apply(&x, &group).unwrap();
        assert_eq!((y.dims(), flat(&y)), (x.dims(), flat(&x)), "{op:?}");
        let grads = loss(op, 0, &y).unwrap().backward().unwrap();
        let want = loss(op, 0, &x).unwrap().backward().unwrap();
        assert_eq!(flat(grads.get(&x).unwrap()), flat(want.get(&x).unwrap()), "{op:?}");
        assert!(counter.snapshot().is_empty(), "{op:?}");
    }
}

#[test]
fn uncuttable_parameters_are_refused() {
    run_ranks(2, |group| {
        let (group, counter) = counting(group);
        let x = randn("x", &[2, 3, 4]);
        let error = |op: Op| op.apply(&x, &group).unwrap_err().to_string();
        let odd = error(ReduceScatter(1));
        for op in [Split(1), AllToAll(1, 0)] {
            assert_eq!(error(op), odd);
        }
        let missing = error(AllGather(3));
        for op in [ReduceScatter(3), Gather(3), Split(3), AllToAll(3, 0), AllToAll(0, 3)] {
            assert_eq!(error(op), missing);
        }
        assert_says!(odd, "dimension 1 … [2, 3, 4] … `world`: 3 is not divisible by 2");
        assert_says!(error(Split(-2)), "dimension -2 … [2, 3, 4] … 3 is not divisible by 2");
        assert_says!(missing, "a tensor of shape [2, 3, 4] has no dimension 3");
        assert_says!(error(Split(-4)), "a tensor of shape [2, 3, 4] has no dimension -4");
        assert!(counter.snapshot().is_empty());
        Ok(())
    })
    .unwrap();
}
