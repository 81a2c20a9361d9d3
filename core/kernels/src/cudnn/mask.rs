//! The mask on scores.

use super::graph::{BandMask, Graph, Number, Operation, TensorId};
use super::shape::Shape;
use crate::plans::Attention;

/// Returns the operations that mask the scores `x`, first the right bound, then the left one, and
/// the masked scores.
pub(super) fn masks(graph: &mut Graph, of: &Attention, x: TensorId) -> (Vec<Operation>, TensorId) {
    let (shape, mut operations) = (Shape::of(of), Vec::new());
    if !of.causal {
        return (operations, x);
    }
    let size = |n: usize| i32::try_from(n).expect("sizes below 2^31");
    // Aligns the last query with the last key. Without sizes, the first query is at the first key.
    let sizes = (of.queries != of.keys)
        .then(|| [of.queries, of.keys].map(|n| graph.number(Number::I32(size(n)))));
    let mut mask = |graph: &mut Graph, x, sizes, left| {
        let fill = graph.number(Number::F32(f32::NEG_INFINITY));
        let y = graph.intermediate(shape.scores());
        operations.push(Operation::BandMask(BandMask { x, fill, sizes, left, y }));
        y
    };
    let mut y = mask(graph, x, sizes, None);
    if let Some(window) = of.window.filter(|&window| window < of.keys) {
        // cuDNN takes the bound in f32, which is exact up to 2^24.
        let left = i64::from(size(window)) - i64::from(size(of.keys - of.queries));
        let left = graph.number(Number::F32(left as f32));
        y = mask(graph, y, None, Some(left));
    }
    (operations, y)
}
