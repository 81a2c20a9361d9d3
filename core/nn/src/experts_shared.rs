//! The expert of a mixture that computes every row.

use candle_core::{D, Tensor};

use super::experts_config::{ExpertActivation, MixtureOfExpertsConfig, SharedExpertConfig};
use super::kernels::activation::{Activation, sigmoid_portable};
use super::kernels::grouped::{row_dots, scale_rows};
use super::linear::Linear;
use super::mlp::{GatedMlp, MlpConfig};
use crate::Result;
use crate::backend::to_accumulation_dtype;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_engine::parallel::record_function;

/// `shared_expert(x)`, times the sigmoid of `shared_expert_gate(x)` if there is a gate.
#[derive(Debug, Clone)]
pub(super) struct SharedExpert {
    mlp: GatedMlp,
    gate: Option<Linear>,
}

impl SharedExpert {
    pub(super) fn new(
        b: &ModuleBuilder,
        config: &MixtureOfExpertsConfig,
        shared: SharedExpertConfig,
    ) -> Result<Self> {
        let SharedExpertConfig { intermediate_size, gated } = shared;
        let &MixtureOfExpertsConfig { hidden_size, init, .. } = config;
        let activation = match config.activation {
            ExpertActivation::Gated(activation) => activation,
            // `MixtureOfExpertsConfig::check` refuses this.
            ExpertActivation::Clamped(_) => Activation::Silu,
        };
        let of_mlp = MlpConfig { hidden_size, intermediate_size, activation, bias: false, init };
        let mlp = GatedMlp::with_config(&b.pp("shared_expert"), &of_mlp)?;
        let gate = || {
            Linear::with_init(&b.pp("shared_expert_gate"), hidden_size, 1, config.init(hidden_size))
        };
        Ok(Self { mlp, gate: gated.then(gate).transpose()? })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.mlp.forward(x)?;
        match &self.gate {
            None => Ok(y),
            Some(gate) => times_sigmoid(&y, &gate.forward(x)?),
        }
    }
}

/// The rows of `y` (`[.., width]`) times the sigmoid of their logits (`[.., 1]`).
fn times_sigmoid(y: &Tensor, logits: &Tensor) -> Result<Tensor> {
    let (dtype, of_logits) = (logits.dtype(), logits.dims().to_vec());
    let rows = y.detach().reshape(((), y.dim(D::Minus1)?))?;
    let wide = to_accumulation_dtype(&logits.detach())?.flatten_all()?;
    let factors = sigmoid_portable(&wide)?;
    let output = scale_rows(&rows, &factors)?.reshape(y.shape())?;
    record_function(&[y, logits], output, move |output, grad| {
        let grad = grad.reshape(rows.shape())?;
        let dy = scale_rows(&grad, &factors)?.reshape(output.shape())?;
        let slopes = (&factors * factors.affine(-1.0, 1.0)?)?;
        let dlogits = (row_dots(&grad, &rows)? * slopes)?.reshape(of_logits.as_slice())?;
        Ok(vec![Some(dy), Some(storage::cast(&dlogits, dtype)?)])
    })
}
