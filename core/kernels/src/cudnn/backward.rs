//! The gradients of attention, as a pattern of operations that cuDNN fuses into one kernel.

use super::graph::{
    Argument, DataType, Graph, Layout, Number, Operation, Place, PointwiseMode, TensorId,
};
use super::mask::masks;
use super::shape::Shape;
use crate::plans::Attention;

/// The graph of the gradients. Its inputs are [`Q`](Argument::Q), [`K`](Argument::K),
/// [`V`](Argument::V), [`Output`](Argument::Output), [`Lse`](Argument::Lse) and
/// [`OutputGrad`](Argument::OutputGrad); its outputs are [`QGrad`](Argument::QGrad),
/// [`KGrad`](Argument::KGrad) and [`VGrad`](Argument::VGrad). Scores are recomputed.
///
/// The operations and their order are the same as in NVIDIA's cudnn-frontend
/// (`CompositeSDPABackwardNode`), because cuDNN looks for this pattern. Several blocks add to the
/// gradient of the queries, in f32 and in an order that differs from run to run.
///
/// # Panics
/// If the attention is [not supported](super::unsupported).
pub fn backward(of: &Attention) -> Graph {
    let mut b = Backward::new(of);
    let level = b.level();
    let probabilities = b.probabilities();
    let turned = b.transposed_scores(probabilities);
    b.sum_over_queries(turned, b.output_grad, Argument::VGrad);
    let dscores = b.score_grad(probabilities, level);
    let turned = b.transposed_scores(dscores);
    b.sum_over_queries(turned, b.q, Argument::KGrad);
    b.q_grad(dscores);
    b.graph
}

struct Backward<'a> {
    of: &'a Attention,
    shape: Shape,
    graph: Graph,
    q: TensorId,
    /// Keys and values, with transposed matrices.
    k: TensorId,
    v: TensorId,
    output: TensorId,
    output_grad: TensorId,
    lse: TensorId,
    scale: TensorId,
}

impl<'a> Backward<'a> {
    fn new(of: &'a Attention) -> Self {
        let (shape, mut graph) = (Shape::of(of), Graph::default());
        let q = shape.argument(&mut graph, Argument::Q, shape.of_queries());
        let [k, v] = [Argument::K, Argument::V].map(|argument| {
            let layout = Layout::time_first(shape.of_keys()).transposed();
            graph.tensor(shape.half, layout, Place::Argument(argument))
        });
        let output = shape.argument(&mut graph, Argument::Output, shape.of_queries());
        let output_grad = shape.argument(&mut graph, Argument::OutputGrad, shape.of_queries());
        let lse = shape.lse(&mut graph);
        let scale = graph.number(Number::F32(of.scale));
        Self { of, shape, graph, q, k, v, output, output_grad, lse, scale }
    }

    /// Adds `mode(x, b)` with this layout, in f32.
    fn pointwise(
        &mut self,
        mode: PointwiseMode,
        x: TensorId,
        b: Option<TensorId>,
        layout: Layout,
    ) -> TensorId {
        let y = self.graph.intermediate(layout);
        self.graph.push(Operation::Pointwise { mode, x, b, y });
        y
    }

    /// Adds an operation on scores.
    fn on_scores(&mut self, mode: PointwiseMode, x: TensorId, b: Option<TensorId>) -> TensorId {
        self.pointwise(mode, x, b, self.shape.scores())
    }

    /// Adds a product of matrices.
    fn matmul(&mut self, a: TensorId, b: TensorId, c: TensorId) {
        self.graph.push(Operation::Matmul { a, b, c });
    }

    /// Adds, for each query, the sum of output times its gradient.
    fn level(&mut self) -> TensorId {
        // The frontend's strides. For a virtual tensor they have no effect.
        let dims = self.shape.of_queries();
        let [_, heads, queries, width] = dims;
        let strides = [heads * queries * width, queries * width, heads * width, 1];
        let (output, grad) = (self.output, self.output_grad);
        let layout = Layout { dims, strides };
        let products = self.pointwise(PointwiseMode::Mul, grad, Some(output), layout);
        let sum = self.graph.intermediate(self.shape.rows());
        self.graph.push(Operation::Sum { x: products, y: sum });
        // The place of the dropout factor in the pattern.
        let one = self.graph.number(Number::F32(1.0));
        let level = self.graph.tensor(DataType::F32, self.shape.rows(), Place::Scratch);
        let mode = PointwiseMode::Mul;
        self.graph.push(Operation::Pointwise { mode, x: sum, b: Some(one), y: level });
        level
    }

    /// Adds the probabilities of forward.
    fn probabilities(&mut self) -> TensorId {
        let scores = self.graph.intermediate(self.shape.scores());
        self.matmul(self.q, self.k, scores);
        let scaled = self.on_scores(PointwiseMode::Mul, scores, Some(self.scale));
        let below = self.on_scores(PointwiseMode::Sub, scaled, Some(self.lse));
        let (operations, seen) = masks(&mut self.graph, self.of, below);
        operations.into_iter().for_each(|operation| self.graph.push(operation));
        self.on_scores(PointwiseMode::Exp, seen, None)
    }

    /// Adds `x`, shaped like the scores, with its matrices transposed, rounded.
    fn transposed_scores(&mut self, x: TensorId) -> TensorId {
        let layout = self.shape.scores().transposed();
        let y = self.graph.tensor(self.shape.half, layout, Place::Virtual);
        self.graph.push(Operation::Transpose { x, y });
        y
    }

    /// Adds a gradient of keys or values: `turned x`, summed over the heads of a group.
    fn sum_over_queries(&mut self, turned: TensorId, x: TensorId, to: Argument) {
        let shape = self.shape;
        let grad = shape.argument(&mut self.graph, to, shape.of_keys());
        if !shape.is_grouped() {
            return self.matmul(turned, x, grad);
        }
        let layout = Layout::packed(shape.of_repeated_keys());
        let of_heads = self.graph.tensor(shape.half, layout, Place::Virtual);
        self.matmul(turned, x, of_heads);
        self.graph.push(Operation::Sum { x: of_heads, y: grad });
    }

    /// Adds the gradient of the scores, times the scale.
    fn score_grad(&mut self, probabilities: TensorId, level: TensorId) -> TensorId {
        let grad = self.graph.intermediate(self.shape.scores());
        self.matmul(self.output_grad, self.v, grad);
        let above = self.on_scores(PointwiseMode::Sub, grad, Some(level));
        let grad = self.on_scores(PointwiseMode::Mul, above, Some(probabilities));
        self.on_scores(PointwiseMode::Mul, grad, Some(self.scale))
    }

    /// Adds the gradient of the queries, in f32 first.
    fn q_grad(&mut self, dscores: TensorId) {
        let shape = self.shape;
        let keys = self.graph.intermediate(Layout::time_first(shape.of_keys()));
        self.graph.push(Operation::Transpose { x: self.k, y: keys });
        let layout = Layout::packed(shape.of_queries());
        let sum = self.graph.tensor(DataType::F32, layout, Place::Scratch);
        self.matmul(dscores, keys, sum);
        let y = shape.argument(&mut self.graph, Argument::QGrad, shape.of_queries());
        let mode = PointwiseMode::Identity;
        self.graph.push(Operation::Pointwise { mode, x: sum, b: None, y });
    }
}
