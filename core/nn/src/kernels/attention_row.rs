//! Attention of one query on the CPU. Its bits depend on the query, its keys and values, and the
//! CPU alone.

use pulp::{Simd, WithSimd};

use super::few_rows::{Dots, widened};
use crate::host::{Element, Float, exp_in_place, max};

/// Keys whose scores are computed at a time.
const KEYS: usize = 4;

/// The attention of one query to `scores.len()` keys. Returns the largest score `max`, and the sum
/// of `exp(score - max)`.
pub(super) struct Row<'a, E: Element> {
    pub(super) output: &'a mut [E::Wide],
    pub(super) scores: &'a mut [E::Wide],
    pub(super) query: &'a [E::Wide],
    pub(super) keys: &'a [E],
    pub(super) values: &'a [E],
    /// The bound of the scores, if any.
    pub(super) cap: Option<E::Wide>,
    /// Memory for keys that are not in the type of the arithmetic.
    pub(super) room: &'a mut Vec<E::Wide>,
}

impl<E: Element<Wide: Dots>> WithSimd for Row<'_, E> {
    type Output = (E::Wide, E::Wide);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Self { output, scores, query, keys, values, cap, room } = self;
        let dim = query.len();
        let whole = scores.len() / KEYS * KEYS;
        for at in (0..whole).step_by(KEYS) {
            let keys = &keys[at * dim..][..KEYS * dim];
            let found = widened(keys, dim, room, |keys: [&[E::Wide]; KEYS]| {
                E::Wide::dots::<S, 1, KEYS>(simd, [query], keys)
            });
            scores[at..at + KEYS].copy_from_slice(&found.map(|[score]| score));
        }
        for at in whole..scores.len() {
            let [[score]] =
                widened(&keys[at * dim..][..dim], dim, room, |keys: [&[E::Wide]; 1]| {
                    E::Wide::dots::<S, 1, 1>(simd, [query], keys)
                });
            scores[at] = score;
        }
        if let Some(cap) = cap {
            let inverse = E::Wide::ONE / cap;
            scores.iter_mut().for_each(|x| *x = cap * (*x * inverse).tanh());
        }
        let top = max(scores);
        let sum = exp_in_place(scores, top);
        output.fill(E::Wide::ZERO);
        for (&score, value) in scores.iter().zip(values.chunks_exact(dim)) {
            output.iter_mut().zip(value).for_each(|(out, v)| *out += score * v.widen());
        }
        let scale = E::Wide::ONE / sum;
        output.iter_mut().for_each(|x| *x *= scale);
        (top, sum)
    }
}
