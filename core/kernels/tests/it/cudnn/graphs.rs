//! Evaluates the graphs in f64 on the CPU, and compares with the formula of attention.

use std::collections::HashMap;

use fulgurite_kernels::Float;
use fulgurite_kernels::cudnn::{
    Argument, BandMask, Graph, Number, Operation, Place, PointwiseMode, Sdpa, Tensor, TensorId,
    backward, forward, unsupported,
};
use fulgurite_kernels::plans::Attention;
use half::bf16;

use crate::attention::{Case, expected, wide};
use crate::flash::exchanged;
use crate::numbers::normal;

/// The values of arguments, in memory order.
type Memory = Vec<(Argument, Vec<f64>)>;

/// The values of a graph's tensors, in row-major order.
struct Machine<'a> {
    graph: &'a Graph,
    values: HashMap<TensorId, Vec<f64>>,
}

/// The indices of all elements, in order.
fn indices(dims: &[i64]) -> impl Iterator<Item = Vec<i64>> + use<> {
    let dims = dims.to_vec();
    (0..dims.iter().product::<i64>()).map(move |mut n| {
        let mut index = vec![0; dims.len()];
        for (i, size) in dims.iter().enumerate().rev() {
            (index[i], n) = (n % size, n / size);
        }
        index
    })
}

fn in_order(dims: &[i64], index: &[i64]) -> usize {
    dims.iter().zip(index).fold(0, |n, (size, i)| n * size + i) as usize
}

fn in_memory(tensor: &Tensor, index: &[i64]) -> usize {
    tensor.strides.iter().zip(index).map(|(stride, i)| stride * i).sum::<i64>() as usize
}

impl<'a> Machine<'a> {
    fn tensor(&self, id: TensorId) -> &'a Tensor {
        &self.graph.tensors()[id.index()]
    }

    /// Loads the values of a tensor that an operation reads.
    fn load(&mut self, id: TensorId, memory: &Memory) {
        let tensor = self.tensor(id);
        let values = match tensor.place {
            Place::Number(Number::F32(x)) => vec![f64::from(x)],
            Place::Number(Number::I32(x)) => vec![f64::from(x)],
            Place::Argument(argument) => {
                let Some((_, held)) = memory.iter().find(|(other, _)| *other == argument) else {
                    return;
                };
                indices(&tensor.dims).map(|i| held[in_memory(tensor, &i)]).collect()
            }
            Place::Scratch | Place::Virtual => return,
        };
        self.values.insert(id, values);
    }

    /// Returns an element. Sizes of 1 are broadcast, and a key head is repeated for each query head
    /// of its group.
    fn at(&self, id: TensorId, index: &[i64], heads: i64) -> f64 {
        let dims = &self.tensor(id).dims;
        let of_group = heads / dims[1];
        let index: Vec<i64> = index
            .iter()
            .enumerate()
            .map(|(i, &at)| match i {
                1 => at / of_group,
                _ => at.min(dims[i] - 1),
            })
            .collect();
        self.values[&id][in_order(dims, &index)]
    }

    fn set(&mut self, id: TensorId, values: Vec<f64>) {
        assert_eq!(values.len() as i64, self.tensor(id).dims.iter().product::<i64>());
        assert!(self.values.insert(id, values).is_none(), "a tensor is written twice");
    }

    fn each(&mut self, y: TensorId, f: impl Fn(&Self, &[i64]) -> f64) {
        let values = indices(&self.tensor(y).dims).map(|i| f(self, &i)).collect();
        self.set(y, values);
    }

    fn run(&mut self, operation: &Operation) {
        match operation {
            Operation::Pointwise { mode, x, b, y } => {
                let heads = self.tensor(*y).dims[1];
                self.each(*y, |m, i| {
                    let x = m.at(*x, i, heads);
                    let b = || m.at(b.unwrap(), i, heads);
                    match mode {
                        PointwiseMode::Mul => x * b(),
                        PointwiseMode::Sub => x - b(),
                        PointwiseMode::Exp => x.exp(),
                        PointwiseMode::Identity => x,
                        PointwiseMode::Greater | PointwiseMode::GreaterEqual => unreachable!(),
                    }
                });
            }
            Operation::Matmul { a, b, c } => self.matmul(*a, *b, *c),
            Operation::Sum { x, y } => {
                let (dims, sums) = (self.tensor(*x).dims.clone(), self.tensor(*y).dims.clone());
                let mut values = vec![0.0; sums.iter().product::<i64>() as usize];
                for index in indices(&dims) {
                    let to: Vec<i64> =
                        (0..index.len()).map(|i| index[i] * sums[i] / dims[i]).collect();
                    values[in_order(&sums, &to)] += self.values[x][in_order(&dims, &index)];
                }
                self.set(*y, values);
            }
            Operation::Transpose { x, y } => {
                let heads = self.tensor(*y).dims[1];
                self.each(*y, |m, i| m.at(*x, &[i[0], i[1], i[3], i[2]], heads));
            }
            Operation::BandMask(mask) => self.band_mask(mask),
            Operation::Sdpa(sdpa) => self.sdpa(sdpa),
        }
    }

    fn matmul(&mut self, a: TensorId, b: TensorId, c: TensorId) {
        let (heads, inner) = (self.tensor(c).dims[1], self.tensor(a).dims[3]);
        assert_eq!(inner, self.tensor(b).dims[2]);
        self.each(c, |m, i| {
            let term =
                |k| m.at(a, &[i[0], i[1], i[2], k], heads) * m.at(b, &[i[0], i[1], k, i[3]], heads);
            (0..inner).map(term).sum()
        });
    }

    fn band_mask(&mut self, mask: &BandMask) {
        let number = |m: &Self, id: TensorId| m.values[&id][0];
        let below =
            mask.sizes.map_or(0.0, |[queries, keys]| number(self, keys) - number(self, queries));
        let left = mask.left.map(|left| number(self, left));
        self.each(mask.y, |m, i| {
            let (row, column) = (i[2] as f64, i[3] as f64);
            let is_seen = match left {
                Some(left) => column + left > row,
                None => row + below >= column,
            };
            m.values[if is_seen { &mask.x } else { &mask.fill }]
                [if is_seen { in_order(&m.tensor(mask.x).dims, i) } else { 0 }]
        });
    }

    fn sdpa(&mut self, sdpa: &Sdpa) {
        let scores = sdpa.mask.as_ref().map_or(sdpa.softmax[0], |(input, _, _)| *input);
        let (heads, width) = (self.tensor(sdpa.q).dims[1], self.tensor(sdpa.q).dims[3]);
        let scale = self.values[&sdpa.scale][0];
        self.each(scores, |m, i| {
            let term = |d| {
                m.at(sdpa.q, &[i[0], i[1], i[2], d], heads)
                    * m.at(sdpa.k, &[i[0], i[1], i[3], d], heads)
            };
            scale * (0..width).map(term).sum::<f64>()
        });
        let mut seen = scores;
        if let Some((_, output, operations)) = &sdpa.mask {
            operations.iter().for_each(|operation| self.run(operation));
            seen = *output;
        }
        let keys = self.tensor(scores).dims[3];
        self.each(sdpa.lse, |m, i| {
            let exp = |j| m.at(seen, &[i[0], i[1], i[2], j], heads).exp();
            (0..keys).map(exp).sum::<f64>().ln()
        });
        let probabilities = sdpa.softmax[1];
        self.each(probabilities, |m, i| (m.at(seen, i, heads) - m.at(sdpa.lse, i, heads)).exp());
        self.each(sdpa.output, |m, i| {
            let term = |j| {
                m.at(probabilities, &[i[0], i[1], i[2], j], heads)
                    * m.at(sdpa.v, &[i[0], i[1], j, i[3]], heads)
            };
            (0..keys).map(term).sum()
        });
    }
}

/// Evaluates a graph, and adds its outputs to the memory.
fn carry_out(graph: &Graph, memory: &mut Memory) {
    let mut machine = Machine { graph, values: HashMap::new() };
    // Tensors are numbered in the order of their addition.
    let ids: Vec<TensorId> = ids(graph);
    ids.iter().for_each(|&id| machine.load(id, memory));
    graph.operations().iter().for_each(|operation| machine.run(operation));
    for id in ids {
        let tensor = machine.tensor(id);
        let Place::Argument(argument) = tensor.place else { continue };
        if memory.iter().any(|(other, _)| *other == argument) {
            continue;
        }
        let mut values = vec![f64::NAN; tensor.dims.iter().product::<i64>() as usize];
        for index in indices(&tensor.dims) {
            let value = machine.values[&id][in_order(&tensor.dims, &index)];
            values[in_memory(tensor, &index)] = value;
        }
        memory.push((argument, values));
    }
}

/// Returns the tensors of all operations.
fn ids(graph: &Graph) -> Vec<TensorId> {
    fn of(operation: &Operation) -> Vec<TensorId> {
        match operation {
            Operation::Pointwise { x, b, y, .. } => [*x, *y].into_iter().chain(*b).collect(),
            Operation::Matmul { a, b, c } => vec![*a, *b, *c],
            Operation::Sum { x, y } | Operation::Transpose { x, y } => vec![*x, *y],
            Operation::BandMask(BandMask { x, fill, sizes, left, y }) => {
                let rest = sizes.iter().flatten().chain(left).copied();
                [*x, *fill, *y].into_iter().chain(rest).collect()
            }
            Operation::Sdpa(sdpa) => {
                let Sdpa { q, k, v, scale, mask, softmax, lse, output } = &**sdpa;
                let mut all = vec![*q, *k, *v, *scale, *lse, *output, softmax[0], softmax[1]];
                if let Some((input, output, operations)) = mask {
                    all.extend([*input, *output]);
                    all.extend(operations.iter().flat_map(of));
                }
                all
            }
        }
    }
    let mut all: Vec<TensorId> = graph.operations().iter().flat_map(of).collect();
    all.sort_by_key(|id| id.index());
    all.dedup();
    all
}

/// `sizes`: batch, key heads, group, queries, keys, width.
fn case(sizes: [usize; 6], causal: bool) -> Case {
    let [batch, kv_heads, group, queries, keys, width] = sizes;
    Case::new::<bf16>([batch, kv_heads, group, queries, keys, width, 0], causal, None)
}

/// Evaluates both graphs, and compares their outputs with the formula.
fn has_its_formula_and_gradient(case: &Case) {
    let of = case.of;
    let (heads, width) = (of.kv_heads * of.group, of.width);
    let (rows, pairs) = (of.batch * heads * of.queries, of.batch * of.kv_heads * of.keys);
    let [q, grad] = ["q", "grad"].map(|what| normal::<bf16>(what, rows * width));
    let [k, v] = ["k", "v"].map(|what| normal::<bf16>(what, pairs * width));
    let of_queries = |x: &[bf16]| wide(&exchanged(x, [heads, of.queries, width]));
    let of_keys = |x: &[bf16]| wide(&exchanged(x, [of.kv_heads, of.keys, width]));
    let mut memory =
        vec![(Argument::Q, of_queries(&q)), (Argument::K, of_keys(&k)), (Argument::V, of_keys(&v))];
    carry_out(&forward(&of), &mut memory);
    memory.push((Argument::OutputGrad, of_queries(&grad)));
    carry_out(&backward(&of), &mut memory);

    let [y, lse, dq, dk, dv] = expected(case, [&q, &k, &v, &grad]);
    for (argument, want, sizes) in [
        (Argument::Lse, lse, None),
        (Argument::Output, y, Some([of.queries, heads])),
        (Argument::QGrad, dq, Some([of.queries, heads])),
        (Argument::KGrad, dk, Some([of.keys, of.kv_heads])),
        (Argument::VGrad, dv, Some([of.keys, of.kv_heads])),
    ] {
        let (_, got) = memory.iter().find(|(other, _)| *other == argument).unwrap();
        let got = match sizes {
            Some([time, heads]) => exchanged(got, [time, heads, width]),
            None => got.clone(),
        };
        assert_eq!(got.len(), want.len(), "{argument:?}");
        let apart = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
        let most = apart.fold(0.0, f64::max);
        assert!(most < 1e-9 && got.iter().all(|x| x.is_finite()), "{argument:?}: {most}, {of:?}");
    }
}

#[test]
fn all_keys_are_seen_without_causal() {
    has_its_formula_and_gradient(&case([2, 2, 1, 5, 7, 4], false));
    has_its_formula_and_gradient(&case([2, 2, 3, 7, 5, 4], false));
}

#[test]
fn causal_queries_see_earlier_keys() {
    has_its_formula_and_gradient(&case([1, 2, 1, 6, 6, 4], true));
    has_its_formula_and_gradient(&case([2, 1, 2, 6, 6, 4], true));
    has_its_formula_and_gradient(&case([2, 2, 2, 4, 9, 4], true));
}

#[test]
fn queries_see_their_window() {
    for window in [1, 3, 8, 9, 20] {
        has_its_formula_and_gradient(&case([1, 2, 2, 9, 9, 4], true).within(window));
        has_its_formula_and_gradient(&case([1, 1, 2, 5, 9, 4], true).within(window));
    }
}

#[test]
fn attention_for_other_kernels_is_known() {
    let of = Attention { width: 64, ..case([1, 1, 1, 3, 3, 64], true).of };
    let why = |of: Attention| unsupported(&of).unwrap_or("none");
    assert_eq!(why(of), "none");
    assert_eq!(why(Attention { dtype: Float::F16, width: 256, ..of }), "none");
    assert_eq!(why(Attention { dtype: Float::F32, ..of }), "it takes bf16 and f16 alone");
    assert_eq!(why(Attention { firsts: 16, ..of }), "packed documents are not given to it");
    assert_eq!(why(Attention { ends: 16, ..of }), "packed documents are not given to it");
    assert_eq!(why(Attention { softcap: Some(9.0), ..of }), "bounded scores are not given to it");
    let both = Attention { window: Some(2), causal: false, ..of };
    assert_eq!(why(both), "windows to both sides are not given to it");
    let placed = Attention { first_query: Some(0), ..of };
    assert_eq!(why(placed), "the position of the first query is not given to it");
    assert_eq!(
        why(Attention { width: 72, ..of }),
        "it is asked for heads of 64, 128 and 256 alone"
    );
    assert_eq!(why(Attention { queries: 1, ..of }), "it is asked for two queries or more");
}
