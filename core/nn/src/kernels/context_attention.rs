//! Attention with or without context parallelism, which gives each rank a share of every sequence.

use candle_core::Tensor;

use super::attention::{AttentionOutput, DotProductAttention};
use super::sinks;
use crate::gradients::add_to;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parallel::ContextParallel;

/// Attention whose sequences may be sharded over ranks.
#[derive(Debug, Clone)]
pub(crate) struct ContextAttention {
    /// The attention, with the angles of all positions of a sequence.
    pub(crate) attend: DotProductAttention,
    /// The ranks that share sequences; `None` if sequences are whole.
    pub(crate) context: Option<ContextParallel>,
}

/// The output, and the state for backward besides the inputs.
#[derive(Debug, Clone)]
pub(crate) struct ContextAttentionOutput {
    output: Tensor,
    /// One output for each range of consecutive positions.
    query_ranges: Vec<AttentionOutput>,
}

impl ContextAttentionOutput {
    /// `[batch, queries, heads, head_dim]`.
    pub(crate) fn output(&self) -> &Tensor {
        &self.output
    }

    /// Replaces the memory of the output. A node of the graph takes the memory of its output, so a
    /// backward needs the node's.
    pub(crate) fn with_output(&self, output: &Tensor) -> Result<Self> {
        let (mut start, mut query_ranges) = (0, Vec::new());
        for AttentionOutput { lse, .. } in &self.query_ranges {
            let n = lse.dim(2)?;
            let (output, lse) = (output.narrow(1, start, n)?, lse.clone());
            query_ranges.push(AttentionOutput { output, lse });
            start += n;
        }
        Ok(Self { output: output.clone(), query_ranges })
    }
}

impl ContextAttention {
    /// `softmax(scale q k^T) v`. Collective over the ranks that share sequences.
    pub(crate) fn forward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<ContextAttentionOutput> {
        let Some(context) = &self.context else {
            let attended = self.attend.forward(q, k, v)?;
            let output = attended.output.clone();
            return Ok(ContextAttentionOutput { output, query_ranges: vec![attended] });
        };
        let (k, v) = gather(context, k, v)?;
        let mut query_ranges = Vec::new();
        for QueryRange { attend, queries, keys } in self.query_ranges(context, q)? {
            let (k, v) = (k.narrow(1, 0, keys)?, v.narrow(1, 0, keys)?);
            query_ranges.push(attend.forward(&queries, &k, &v)?);
        }
        let outputs = query_ranges.iter().map(|attended: &AttentionOutput| attended.output.clone());
        let output = storage::cat(&outputs.collect::<Vec<_>>(), 1)?;
        Ok(ContextAttentionOutput { output, query_ranges })
    }

    /// The gradient of the sinks, if there are any. Not collective: from this rank's queries.
    pub(crate) fn sinks_backward(
        &self,
        attended: &ContextAttentionOutput,
        grad: &Tensor,
    ) -> Result<Option<Tensor>> {
        let Some(sinks) = &self.attend.sinks else { return Ok(None) };
        let (mut start, mut sum) = (0, sinks.zeros_like()?);
        for attended in &attended.query_ranges {
            let n = attended.output.dim(1)?;
            let AttentionOutput { output, lse } = attended;
            let grad = grad.narrow(1, start, n)?;
            sum = (sum + sinks::backward(output, lse, sinks, &grad)?)?;
            start += n;
        }
        Ok(Some(sum))
    }

    /// The gradients of q, k and v, contiguous. Collective over the ranks that share sequences.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        attended: &ContextAttentionOutput,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let Some(context) = &self.context else {
            return self.attend.backward([q, k, v], &attended.query_ranges[0], grad);
        };
        let (k, v) = gather(context, k, v)?;
        let mut dqs = Vec::new();
        let mut sums: Option<[Tensor; 2]> = None;
        let mut start = 0;
        let query_ranges = self.query_ranges(context, q)?;
        for (QueryRange { attend, queries, keys }, attended) in
            query_ranges.into_iter().zip(&attended.query_ranges)
        {
            let n = queries.dim(1)?;
            let grad = grad.narrow(1, start, n)?;
            start += n;
            let rest = k.dim(1)? - keys;
            let (k, v) = (k.narrow(1, 0, keys)?, v.narrow(1, 0, keys)?);
            let [dq, dk, dv] = attend.backward([&queries, &k, &v], attended, &grad)?;
            dqs.push(dq);
            let [dk, dv] = [with_zeros(dk, rest)?, with_zeros(dv, rest)?];
            sums = Some(match sums {
                None => [dk, dv],
                Some([k, v]) => [add_to(k, &dk)?, add_to(v, &dv)?],
            });
        }
        let [dk, dv] = sums.ok_or_else(|| Error::other("a sequence has no positions"))?;
        let mut parts = context.reduce_scatter(&[&dk, &dv])?.into_iter();
        match (parts.next(), parts.next()) {
            (Some(dk), Some(dv)) => Ok([storage::cat(&dqs, 1)?, dk, dv]),
            _ => Err(Error::other("a reduce-scatter lost a tensor")),
        }
    }

    /// Returns this rank's ranges of consecutive positions.
    fn query_ranges(&self, context: &ContextParallel, q: &Tensor) -> Result<Vec<QueryRange>> {
        let mut start = 0;
        let mut query_ranges = Vec::new();
        for range in context.positions(q.dim(1)?) {
            let mut attend = self.attend.clone();
            let mut keys = q.dim(1)? * context.size();
            if attend.causal {
                keys = range.end;
            } else {
                attend.first_query = Some(range.start);
            }
            if let Some(angles) = &mut attend.angles {
                angles.cos = angles.cos.narrow(0, 0, keys)?;
                angles.sin = angles.sin.narrow(0, 0, keys)?;
            }
            let queries = q.narrow(1, start, range.len())?;
            query_ranges.push(QueryRange { attend, queries, keys });
            start += range.len();
        }
        Ok(query_ranges)
    }
}

/// Consecutive queries, and the number of keys that they attend to: all, or those up to the last
/// query's position.
struct QueryRange {
    attend: DotProductAttention,
    queries: Tensor,
    keys: usize,
}

/// Gathers the keys and values of whole sequences. Collective.
fn gather(context: &ContextParallel, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut wholes = context.gather(&[k, v])?.into_iter();
    match (wholes.next(), wholes.next()) {
        (Some(k), Some(v)) => Ok((k, v)),
        _ => Err(Error::other("an all-gather lost a tensor")),
    }
}

/// Adds `rest` positions of zeros behind a gradient of keys or values.
fn with_zeros(grad: Tensor, rest: usize) -> Result<Tensor> {
    if rest == 0 {
        return Ok(grad);
    }
    let mut dims = grad.dims().to_vec();
    dims[1] = rest;
    storage::cat(&[grad.clone(), storage::zeros(dims, grad.dtype(), grad.device())?], 1)
}
