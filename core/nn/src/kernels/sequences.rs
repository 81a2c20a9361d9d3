//! Attention over sequences that are whole, or of which each rank has a part.

use candle_core::Tensor;

use super::attention::{Attend, Attended};
use crate::{Error, Result};
use fulgurite_engine::parallel::ContextParallel;

/// How to attend, over sequences shared by ranks or not.
#[derive(Debug, Clone)]
pub(crate) struct Sequences {
    /// Its angles are those of all positions.
    pub(crate) attend: Attend,
    /// The ranks that share sequences.
    pub(crate) context: Option<ContextParallel>,
}

/// What backward needs of a forward.
#[derive(Debug, Clone)]
pub(crate) struct SequencesAttended {
    output: Tensor,
    /// One for each stretch of consecutive positions.
    stretches: Vec<Attended>,
}

impl SequencesAttended {
    /// `[batch, queries, heads, head_dim]`.
    pub(crate) fn output(&self) -> &Tensor {
        &self.output
    }
}

impl Sequences {
    /// `softmax(scale q k^T) v`. Collective over the ranks that share sequences.
    pub(crate) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<SequencesAttended> {
        let Some(context) = &self.context else {
            let attended = self.attend.forward(q, k, v)?;
            let output = attended.output.clone();
            return Ok(SequencesAttended { output, stretches: vec![attended] });
        };
        let (k, v) = gather(context, k, v)?;
        let mut stretches = Vec::new();
        for Stretch { attend, queries, keys } in self.stretches(context, q)? {
            let (k, v) = (k.narrow(1, 0, keys)?, v.narrow(1, 0, keys)?);
            stretches.push(attend.forward(&queries, &k, &v)?);
        }
        let outputs: Vec<&Tensor> = stretches.iter().map(|attended| &attended.output).collect();
        Ok(SequencesAttended { output: Tensor::cat(&outputs, 1)?, stretches })
    }

    /// The gradients of q, k and v, contiguous. Collective over the ranks that share sequences.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        attended: &SequencesAttended,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let Some(context) = &self.context else {
            return self.attend.backward([q, k, v], &attended.stretches[0], grad);
        };
        let (k, v) = gather(context, k, v)?;
        let mut dqs = Vec::new();
        let mut sums: Option<[Tensor; 2]> = None;
        let mut start = 0;
        let stretches = self.stretches(context, q)?;
        for (Stretch { attend, queries, keys }, attended) in
            stretches.into_iter().zip(&attended.stretches)
        {
            let n = queries.dim(1)?;
            let grad = grad.narrow(1, start, n)?;
            start += n;
            let rest = k.dim(1)? - keys;
            let (k, v) = (k.narrow(1, 0, keys)?, v.narrow(1, 0, keys)?);
            let [dq, dk, dv] = attend.backward([&queries, &k, &v], attended, &grad)?;
            dqs.push(dq);
            let [dk, dv] = [dk.pad_with_zeros(1, 0, rest)?, dv.pad_with_zeros(1, 0, rest)?];
            sums = Some(match sums {
                None => [dk, dv],
                Some([k, v]) => [(k + dk)?, (v + dv)?],
            });
        }
        let [dk, dv] = sums.ok_or_else(|| Error::other("a sequence has no positions"))?;
        let mut parts = context.reduce_scatter(&[&dk, &dv])?.into_iter();
        match (parts.next(), parts.next()) {
            (Some(dk), Some(dv)) => Ok([Tensor::cat(&dqs, 1)?, dk, dv]),
            _ => Err(Error::other("a reduce-scatter lost a tensor")),
        }
    }

    /// This rank's stretches of consecutive positions.
    fn stretches(&self, context: &ContextParallel, q: &Tensor) -> Result<Vec<Stretch>> {
        let mut start = 0;
        let mut stretches = Vec::new();
        for range in context.positions(q.dim(1)?) {
            let mut attend = self.attend.clone();
            if let Some(angles) = &mut attend.angles {
                angles.cos = angles.cos.narrow(0, 0, range.end)?;
                angles.sin = angles.sin.narrow(0, 0, range.end)?;
            }
            let queries = q.narrow(1, start, range.len())?;
            stretches.push(Stretch { attend, queries, keys: range.end });
            start += range.len();
        }
        Ok(stretches)
    }
}

/// Consecutive queries, and the keys up to the last one's position.
struct Stretch {
    attend: Attend,
    queries: Tensor,
    keys: usize,
}

/// The keys and values of whole sequences. Collective.
fn gather(context: &ContextParallel, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut wholes = context.gather(&[k, v])?.into_iter();
    match (wholes.next(), wholes.next()) {
        (Some(k), Some(v)) => Ok((k, v)),
        _ => Err(Error::other("an all-gather lost a tensor")),
    }
}
