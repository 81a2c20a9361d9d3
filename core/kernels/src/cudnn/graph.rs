//! Graphs of operations, as data.

pub use super::constants::{DataType, PointwiseMode};
use crate::Float;

/// A tensor of a graph, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorId(usize);

impl TensorId {
    /// Returns the index, which counts the graph's tensors from 0.
    pub fn index(self) -> usize {
        self.0
    }
}

/// A tensor of the caller. All except the log-sum-exp are `[batch, time, heads, width]` in memory.
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

/// A number that is passed to a kernel by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// Of [`DataType::F32`].
    F32(f32),
    /// Of [`DataType::I32`].
    I32(i32),
}

/// The location of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Place {
    /// In the caller's memory.
    Argument(Argument),
    /// In the plan's scratch memory.
    Scratch,
    /// Nowhere: a value between two operations of a kernel (cuDNN's *virtual*).
    Virtual,
    /// In the call itself (cuDNN's *by value*).
    Number(Number),
}

/// A tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// The type of its elements.
    pub data_type: DataType,
    /// The sizes of its dimensions: batch, heads, rows and columns.
    pub dims: Vec<i64>,
    /// The strides of its dimensions, in elements.
    pub strides: Vec<i64>,
    /// The location of its elements.
    pub place: Place,
}

/// An operation. Sizes of 1 are broadcast, and key heads are repeated for the query heads of a
/// group.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// `y = mode(x, b)`, in f32.
    Pointwise {
        /// The function.
        mode: PointwiseMode,
        /// The first input.
        x: TensorId,
        /// The second input, if the function takes two.
        b: Option<TensorId>,
        /// The output.
        y: TensorId,
    },
    /// `c = a b`: batched matrix product with sums in f32.
    Matmul {
        /// The first factor.
        a: TensorId,
        /// The second factor.
        b: TensorId,
        /// The product.
        c: TensorId,
    },
    /// `y` is the sum of `x` over the dimensions where `y` is smaller, in f32.
    Sum {
        /// The input.
        x: TensorId,
        /// The sum. If it has fewer heads, each of its heads sums the heads of a group.
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

/// A mask on scores, by row `i` and column `j`. Without a left bound it keeps
/// `i + keys - queries >= j`, where absent sizes count as 0. With a left bound it keeps
/// `j + left > i`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BandMask {
    /// The scores.
    pub x: TensorId,
    /// The replacement of masked scores.
    pub fill: TensorId,
    /// The numbers of queries and of keys, to align the last query with the last key.
    pub sizes: Option<[TensorId; 2]>,
    /// The left bound.
    pub left: Option<TensorId>,
    /// The masked scores.
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
    /// The tensors, by index.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The operations, ordered so that each tensor is written before it is read.
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

    /// Adds a virtual tensor in f32.
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
    /// Contiguous, in row-major order.
    pub(super) fn packed(dims: [i64; 4]) -> Self {
        let [_, heads, rows, columns] = dims;
        Self { dims, strides: [heads * rows * columns, rows * columns, columns, 1] }
    }

    /// `[batch, heads, time, width]` that is stored as `[batch, time, heads, width]`.
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
    /// Returns the type of a 16-bit dtype.
    ///
    /// # Panics
    /// For other dtypes.
    pub(super) fn of_half(dtype: Float) -> Self {
        match dtype {
            Float::Bf16 => Self::Bf16,
            Float::F16 => Self::F16,
            Float::F32 | Float::F64 => panic!("cuDNN attends in bf16 and f16, not in {dtype:?}"),
        }
    }
}
