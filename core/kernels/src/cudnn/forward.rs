//! Attention as one operation.

use super::graph::{Argument, Graph, Number, Operation, Sdpa};
use super::mask::masks;
use super::shape::Shape;
use crate::plans::Attention;

/// The graph of attention. Its inputs are [`Q`](Argument::Q), [`K`](Argument::K) and
/// [`V`](Argument::V); its outputs are [`Output`](Argument::Output) and [`Lse`](Argument::Lse).
///
/// # Panics
/// If the attention is [not supported](super::unsupported).
pub fn forward(of: &Attention) -> Graph {
    let (shape, mut graph) = (Shape::of(of), Graph::default());
    let q = shape.argument(&mut graph, Argument::Q, shape.of_queries());
    let k = shape.argument(&mut graph, Argument::K, shape.of_keys());
    let v = shape.argument(&mut graph, Argument::V, shape.of_keys());
    let output = shape.argument(&mut graph, Argument::Output, shape.of_queries());
    let lse = shape.lse(&mut graph);
    let scale = graph.number(Number::F32(of.scale));
    let mask = of.causal.then(|| {
        let scores = graph.intermediate(shape.scores());
        let (operations, seen) = masks(&mut graph, of, scores);
        (scores, seen, operations)
    });
    let softmax = [(); 2].map(|()| graph.intermediate(shape.scores()));
    let sdpa = Sdpa { q, k, v, scale, mask, softmax, lse, output };
    graph.push(Operation::Sdpa(Box::new(sdpa)));
    graph
}
