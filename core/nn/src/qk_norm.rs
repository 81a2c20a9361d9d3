//! Norms of queries and keys within attention.

use candle_core::{D, Tensor};

use super::backend::to_accumulation_dtype;
use super::gradients::accumulate_and_end_use;
use super::kernels::attention::merge_heads;
use super::kernels::norm::{Norm, NormGrads, Stats};
use super::norm::check_eps;
use super::styles::NormStyles;
use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::Parameter;

/// RMS norms of queries and keys before the rotation, the layers `q_norm` and `k_norm` of an
/// attention block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNorm {
    /// Added to the mean square.
    pub eps: f64,
    /// The elements that are normalised together.
    pub scope: QkNormScope,
    /// Whether the factor of an element is `1 + weight`, with initial weights of 0, as in Gemma 3.
    /// Otherwise it is `weight`, initially 1.
    pub unit_offset: bool,
}

/// The elements that a [`QkNorm`] normalises together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormScope {
    /// Each head, with one weight of `head_dim` elements for all heads: Qwen3, Gemma 3.
    Head,
    /// All heads of a token, with a weight for each element of the projection: OLMo 2.
    Projection,
}

/// The norm of one projection's output, `[batch, time, heads, head_dim]`.
#[derive(Debug, Clone)]
pub(super) struct ProjectionNorm {
    norm: Norm,
    scope: QkNormScope,
    weight: Parameter,
}

/// The state of a norm's forward for its backward.
#[derive(Debug)]
pub(super) enum NormCall {
    /// Every row is whole on this rank.
    Whole(Stats),
    /// Rows are shared by ranks. The reciprocal root of each row's mean square plus `eps`.
    Shared { rstd: Tensor },
}

impl ProjectionNorm {
    /// A norm at the path of `b`, for `heads` heads.
    pub(super) fn new(
        b: &ModuleBuilder,
        config: QkNorm,
        heads: usize,
        head_dim: usize,
    ) -> Result<Self> {
        let QkNorm { eps, scope, unit_offset } = config;
        check_eps(b, eps)?;
        let width = match scope {
            QkNormScope::Head => head_dim,
            QkNormScope::Projection => heads * head_dim,
        };
        b.declare(NormStyles { kind: "RmsNorm", width })?;
        let norm = Norm { center: false, eps, unit_offset };
        let weight = b.parameter("weight", [width], norm.initial_weight())?;
        Ok(Self { norm, scope, weight })
    }

    /// Views `x` with the elements in the last dimension that are normalised together.
    fn rows(&self, x: &Tensor) -> Result<Tensor> {
        match self.scope {
            QkNormScope::Head => Ok(x.clone()),
            QkNormScope::Projection => merge_heads(x),
        }
    }

    /// Returns the number of elements of a row on all ranks, if ranks share rows. Heads that
    /// several ranks hold count for each of them.
    fn shared(&self, attention: &LayerHandle, rows: &Tensor) -> Result<Option<f64>> {
        let shared = self.scope == QkNormScope::Projection && attention.output_is_partial();
        let ranks = attention.rank_and_size().1;
        Ok(match shared && ranks > 1 {
            true => Some((rows.dim(D::Minus1)? * ranks) as f64),
            false => None,
        })
    }

    /// Computes the norm of `x`. Collective over the ranks that share the heads of `attention` if
    /// the scope is the projection.
    pub(super) fn forward(
        &self,
        attention: &LayerHandle,
        x: &Tensor,
    ) -> Result<(Tensor, NormCall)> {
        let rows = self.rows(x)?;
        let (y, call) = match self.shared(attention, &rows)? {
            None => {
                let (y, stats) = self.norm.forward(&rows, &self.weight.value()?, None)?;
                (y, NormCall::Whole(stats))
            }
            Some(elements) => {
                let squares = to_accumulation_dtype(&rows)?.sqr()?.sum_keepdim(D::Minus1)?;
                let squares = attention.sum_over_inputs(squares)?;
                let rstd = ((squares / elements)? + self.norm.eps)?.sqrt()?.recip()?;
                (self.scale(&rows, &rstd)?, NormCall::Shared { rstd })
            }
        };
        Ok((y.reshape(x.shape())?, call))
    }

    /// Computes the norm of `x` again. Not collective.
    pub(super) fn forward_again(&self, call: &NormCall, x: &Tensor) -> Result<Tensor> {
        let rows = self.rows(x)?;
        let y = match call {
            NormCall::Whole(_) => self.norm.forward(&rows, &self.weight.value()?, None)?.0,
            NormCall::Shared { rstd } => self.scale(&rows, rstd)?,
        };
        Ok(y.reshape(x.shape())?)
    }

    /// Returns `rows * rstd * factors`, in the dtype of `rows`.
    fn scale(&self, rows: &Tensor, rstd: &Tensor) -> Result<Tensor> {
        let factors = to_accumulation_dtype(&self.norm.factors(&self.weight.value()?)?)?;
        let y = to_accumulation_dtype(rows)?.broadcast_mul(rstd)?.broadcast_mul(&factors)?;
        storage::cast(&y, rows.dtype())
    }

    /// Computes the gradient of `x`, adds the weight's gradient and ends its use. Collective like
    /// [`forward`](Self::forward).
    pub(super) fn backward(
        &self,
        attention: &LayerHandle,
        call: &NormCall,
        x: &Tensor,
        grad: &Tensor,
    ) -> Result<Tensor> {
        let (rows, grad) = (self.rows(x)?, self.rows(grad)?);
        let weight = self.weight.value()?;
        let grads = match call {
            NormCall::Whole(stats) => {
                self.norm.backward(&rows, &weight, false, stats, &grad, None)?
            }
            NormCall::Shared { rstd } => {
                let factors = to_accumulation_dtype(&self.norm.factors(&weight)?)?;
                self.shared_backward(attention, &factors, rstd, &rows, &grad)?
            }
        };
        drop(weight);
        accumulate_and_end_use(&self.weight, &grads.weight)?;
        Ok(grads.x.reshape(x.shape())?)
    }

    fn shared_backward(
        &self,
        attention: &LayerHandle,
        factors: &Tensor,
        rstd: &Tensor,
        rows: &Tensor,
        grad: &Tensor,
    ) -> Result<NormGrads> {
        let width = rows.dim(D::Minus1)?;
        let grad = to_accumulation_dtype(grad)?;
        let xhat = to_accumulation_dtype(rows)?.broadcast_mul(rstd)?;
        let g = grad.broadcast_mul(factors)?;
        // Ranks with the same heads have different terms of their gradient. The sum over all ranks
        // counts each term once, and each of these ranks subtracts its share of the mean.
        let along = attention.sum_over_inputs((&g * &xhat)?.sum_keepdim(D::Minus1)?)?;
        let along = (along / (width * attention.rank_and_size().1) as f64)?;
        let dx = (g - xhat.broadcast_mul(&along)?)?.broadcast_mul(rstd)?;
        let weight = (grad * xhat)?.reshape(((), width))?.sum(0)?;
        Ok(NormGrads { x: storage::cast(&dx, rows.dtype())?, weight, bias: None })
    }
}

/// The norms of queries and keys.
#[derive(Debug, Clone)]
pub(super) struct QkNorms {
    q: ProjectionNorm,
    k: ProjectionNorm,
}

/// The state of both norms' forwards.
#[derive(Debug)]
pub(super) struct QkCalls {
    q: NormCall,
    k: NormCall,
}

impl QkNorms {
    /// The norms of an attention block at the path of `b`, with these numbers of query heads and of
    /// key heads.
    pub(super) fn new(
        b: &ModuleBuilder,
        config: QkNorm,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
    ) -> Result<Self> {
        Ok(Self {
            q: ProjectionNorm::new(&b.pp("q_norm"), config, heads, head_dim)?,
            k: ProjectionNorm::new(&b.pp("k_norm"), config, kv_heads, head_dim)?,
        })
    }

    pub(super) fn parameters(&self) -> [&Parameter; 2] {
        [&self.q.weight, &self.k.weight]
    }

    pub(super) fn forward(
        &self,
        attention: &LayerHandle,
        [q, k]: [&Tensor; 2],
    ) -> Result<([Tensor; 2], QkCalls)> {
        let (q, q_call) = self.q.forward(attention, q)?;
        let (k, k_call) = self.k.forward(attention, k)?;
        Ok(([q, k], QkCalls { q: q_call, k: k_call }))
    }

    pub(super) fn forward_again(
        &self,
        calls: &QkCalls,
        [q, k]: [&Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        Ok([self.q.forward_again(&calls.q, q)?, self.k.forward_again(&calls.k, k)?])
    }

    /// Computes the gradients of both inputs, adds the weights' gradients and ends their uses.
    pub(super) fn backward(
        &self,
        attention: &LayerHandle,
        calls: &QkCalls,
        [q, k]: [&Tensor; 2],
        [dq, dk]: [&Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let dq = self.q.backward(attention, &calls.q, q, dq)?;
        Ok([dq, self.k.backward(attention, &calls.k, k, dk)?])
    }
}
