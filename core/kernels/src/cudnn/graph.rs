//! Graphs of operations, as data.

pub use super::constants::{DataType, PointwiseMode};
use crate::Float;

/// A tensor of a graph, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorId(usize);

impl TensorId {
    /// The number, which counts the graph's tensors from 0.
    pub fn index(self) -> usize {
        self.0
    }
}

/// A tensor of the caller's. All but the log-sum-exp are `[batch, time, heads, width]` in
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The output of forward.
    Output,
    /// The log-sum-exp of each query's scores, f32 `[batch, heads, queries]`.
    Lse,
    /// The gradient of the output.
    OutputGrad,
    /// The gradient of the queries.
    QGrad,
    /// The gradient of the keys.
    KGrad,
    /// The gradient of the values.
    VGrad,
}

/// A number that a kernel is given by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// Of [`DataType::F32`].
    F32(f32),
    /// Of [`DataType::I32`].
    I32(i32),
}

/// The place of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Place {
    /// In memory of the caller's.
    Argument(Argument),
    /// In memory that the plan needs while it runs.
    Scratch,
    /// Nowhere: between two operations of a kernel (cuDNN's *virtual*).
    Virtual,
    /// In the call (cuDNN's *by value*).
    Number(Number),
}

/// A tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// The type of its elements.
    pub data_type: DataType,
    /// The sizes of its dimensions: batch, heads, rows and columns.
    pub dims: Vec<i64>,
    /// Elements from one index of a dimension to the next.
    pub strides: Vec<i64>,
    /// Where its elements are.
    pub place: Place,
}

/// An operation. Sizes of 1 are repeated, and so are heads of keys for the queries of a group.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// `y = mode(x, b)`, in f32.
    Pointwise {
        /// What is done.
        mode: PointwiseMode,
        /// Its first input.
        x: TensorId,
        /// Its second one, if the mode takes two.
        b: Option<TensorId>,
        /// The output.
        y: TensorId,
    },
    /// `c = a b`, products of matrices with sums in f32.
    Matmul {
        /// The first factor.
        a: TensorId,
        /// The second factor.
        b: TensorId,
        /// The product.
        c: TensorId,
    },
    /// `y` is the sum of `x` over the dimensions in which it is smaller, in f32.
    Sum {
        /// The input.
        x: TensorId,
        /// The sum. If it has fewer heads, each sums up the heads of a group.
        y: TensorId,
    },
    /// `y` is `x` with its matrices transposed.
    Transpose {
        /// The input.
        x: TensorId,
        /// The output.
        y: TensorId,
    },
    /// `y` is `x` on one side of a diagonal and `fill` on the other.
    BandMask(BandMask),
    /// Attention as one operation.
    Sdpa(Box<Sdpa>),
}

/// Which scores a query sees, by row `i` and column `j`. Without a left bound it keeps
/// `i + keys - queries >= j`, where absent sizes count as 0. With one it keeps `j + left > i`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BandMask {
    /// The scores.
    pub x: TensorId,
    /// What takes the place of scores that are not seen.
    pub fill: TensorId,
    /// The numbers of queries and of keys, if the last query is at the last key.
    pub sizes: Option<[TensorId; 2]>,
    /// The left bound.
    pub left: Option<TensorId>,
    /// The scores that are seen.
    pub y: TensorId,
}

/// `output = softmax(mask(scale q k^T)) v`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sdpa {
    /// Queries.
    pub q: TensorId,
    /// Keys.
    pub k: TensorId,
    /// Values.
    pub v: TensorId,
    /// Factor of the scores.
    pub scale: TensorId,
    /// The input, the output and the operations of a mask between scores and softmax.
    pub mask: Option<(TensorId, TensorId, Vec<Operation>)>,
    /// The softmax's input and output.
    pub softmax: [TensorId; 2],
    /// The log-sum-exp of each row of scores.
    pub lse: TensorId,
    /// The output.
    pub output: TensorId,
}

/// Operations, from inputs to outputs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    tensors: Vec<Tensor>,
    operations: Vec<Operation>,
}

impl Graph {
    /// The tensors, by number.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The operations, in an order in which each tensor is written before it is read.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Adds a tensor.
    pub(super) fn tensor(&mut self, data_type: DataType, layout: Layout, place: Place) -> TensorId {
        let Layout { dims, strides } = layout;
        let (dims, strides) = (dims.to_vec(), strides.to_vec());
        self.tensors.push(Tensor { data_type, dims, strides, place });
        TensorId(self.tensors.len() - 1)
    }

    /// Adds a tensor in f32 that is nowhere in memory.
    pub(super) fn intermediate(&mut self, layout: Layout) -> TensorId {
        self.tensor(DataType::F32, layout, Place::Virtual)
    }

    /// Adds a number.
    pub(super) fn number(&mut self, number: Number) -> TensorId {
        let data_type = match number {
            Number::F32(_) => DataType::F32,
            Number::I32(_) => DataType::I32,
        };
        let layout = Layout { dims: [1; 4], strides: [1; 4] };
        self.tensor(data_type, layout, Place::Number(number))
    }

    /// Adds an operation.
    pub(super) fn push(&mut self, operation: Operation) {
        self.operations.push(operation);
    }
}

/// Sizes and strides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Layout {
    /// One element after the other.
    pub(super) fn packed(dims: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = dims;
        Self { dims, strides: [heads * rows * columns, rows * columns, columns, 1] }
    }

    /// `[batch, heads, time, width]` that is `[batch, time, heads, width]` in memory.
    pub(super) fn time_first(dims: [i64; 4]) -> Self {
        let [_, heads, time, width] = dims;
        Self { dims, strides: [time * heads * width, width, heads * width, 1] }
    }

    /// The same memory with its matrices transposed.
    pub(super) fn transposed(self) -> Self {
        let turn = |[a, b, c, d]: [i64; 4]| [a, b, d, c];
        Self { dims: turn(self.dims), strides: turn(self.strides) }
    }
}

impl DataType {
    /// The type of a dtype of half a word.
    ///
    /// # Panics
    /// For others.
    pub(super) fn of_half(dtype: Float) -> Self {
        match dtype {
            Float::Bf16 => Self::Bf16,
            Float::F16 => Self::F16,
            Float::F32 | Float::F64 => panic!("cuDNN attends in bf16 and f16, not in {dtype:?}"),
        }
    }
}
