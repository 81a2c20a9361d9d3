//! The choice of a row's experts, and their weights.

use candle_core::{D, DType, Tensor};

use super::experts_capacity::Capacity;
use super::experts_config::{MixtureOfExpertsConfig, RouterConfig, RouterScore};
use super::experts_load::{Balance, ExpertLoad};
use super::gradients::accumulate_and_end_use;
use super::input;
use super::kernels::activation::sigmoid_portable;
use super::kernels::matmul::{self, InputGrad};
use super::kernels::routing::Routing;
use super::kernels::softmax::{softmax, softmax_backward};
use super::styles::ExpertStyles;
use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Buffer, BufferOptions, Init, Parameter, accumulation_dtype};

/// Added to the sum of a row's sigmoids, as in `transformers`.
const EPS: f64 = 1e-20;

/// The product that scores the experts.
#[derive(Debug, Clone)]
pub(super) struct Router {
    weight: Parameter,
    bias: Option<Parameter>,
    /// Added to scores for the choice alone.
    correction: Option<Buffer>,
    config: RouterConfig,
    per_row: usize,
    load: ExpertLoad,
    layer: LayerHandle,
}

impl Router {
    pub(super) fn new(b: &ModuleBuilder, config: &MixtureOfExpertsConfig) -> Result<Self> {
        let layer = b.declare(ExpertStyles("Router"))?;
        let &MixtureOfExpertsConfig { hidden_size, num_experts, router, .. } = config;
        let weight = b.parameter("weight", [num_experts, hidden_size], config.init(hidden_size))?;
        let bias = || b.parameter("bias", [num_experts], Init::ZEROS);
        let bias = router.bias.then(bias).transpose()?;
        let load = ExpertLoad::new(num_experts, config.capacity_factor.is_some());
        let correction = router.correction.map(|correction| -> Result<Buffer> {
            let options = BufferOptions::dtype(accumulation_dtype(b.compute_dtype()));
            let options = options.not_set_in_forward();
            let name = "e_score_correction_bias";
            let bias = b.buffer(name, [num_experts], Init::ZEROS, options)?;
            if correction.update_rate > 0.0 {
                b.after_step(std::sync::Arc::new(Balance {
                    load: load.clone(),
                    bias: bias.clone(),
                    update_rate: correction.update_rate,
                    weight: weight.clone(),
                }));
            }
            Ok(bias)
        });
        let correction = correction.transpose()?;
        let per_row = config.experts_per_row;
        Ok(Self { weight, bias, correction, config: router, per_row, load, layer })
    }

    pub(super) fn load(&self) -> &ExpertLoad {
        &self.load
    }

    /// The dtype of products and scores.
    fn dtype(&self) -> DType {
        accumulation_dtype(self.weight.compute_dtype())
    }

    fn wide(&self, parameter: &Parameter) -> Result<Tensor> {
        storage::cast(&parameter.value()?, self.dtype())
    }

    /// The logits of the rows of `x`, `[rows, experts]`, in the graph.
    pub(super) fn logits(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.check_input(x)?;
        input::check_width(&self.layer, x, self.weight.global_shape()[1])?;
        let wide = self.layer.cast_input(x, self.dtype())?;
        let rows = wide.detach().reshape(((), wide.dim(D::Minus1)?))?;
        let y = self.layer.run(|| {
            let bias = self.bias.as_ref().map(|bias| self.wide(bias)).transpose()?;
            matmul::linear(&rows, &self.wide(&self.weight)?, bias.as_ref())
        })?;
        let tracked = self.layer.takes_gradient(&wide);
        let (router, dims) = (self.clone(), wide.dims().to_vec());
        let parameters: Vec<&Parameter> = std::iter::once(&self.weight).chain(&self.bias).collect();
        self.layer.record(&[&wide], &parameters, y, move |_, grad| {
            let dx = match InputGrad::new(tracked) {
                InputGrad::Skip => None,
                into => matmul::input_grad(grad, &router.wide(&router.weight)?, into)?,
            };
            matmul::weight_grad(&router.weight, &rows, grad)?;
            router.weight.end_use()?;
            if let Some(bias) = &router.bias {
                accumulate_and_end_use(bias, &grad.sum(0)?)?;
            }
            Ok(vec![dx.map(|dx| dx.reshape(&*dims)).transpose()?])
        })
    }

    /// Chooses the experts of each row by its logits, outside the graph. Loads count the choices
    /// before those beyond the capacity are dropped.
    pub(super) fn choose(&self, logits: &Tensor, capacity: Option<&Capacity>) -> Result<Choice> {
        let RouterConfig { score, normalize, scale, groups, .. } = self.config;
        let scores = match score {
            RouterScore::Softmax => softmax(logits)?,
            RouterScore::Sigmoid => sigmoid_portable(logits)?,
        };
        let routing = match &self.correction {
            None => Routing::of(&scores, self.per_row, groups)?,
            Some(bias) => {
                let corrected = scores.broadcast_add(&bias.value()?)?;
                Routing::of(&corrected, self.per_row, groups)?
            }
        };
        self.load.add(&routing);
        let routing = match capacity {
            None => routing,
            Some(capacity) => {
                let kept = capacity.apply(routing, scores.device())?;
                self.load.add_dropped(&kept);
                kept
            }
        };
        let chosen = scores.gather(&routing.experts_on(scores.device())?, D::Minus1)?;
        let total = match (normalize, score) {
            (false, _) => None,
            (true, RouterScore::Softmax) => Some(chosen.sum_keepdim(D::Minus1)?),
            (true, RouterScore::Sigmoid) => Some((chosen.sum_keepdim(D::Minus1)? + EPS)?),
        };
        let weights = match &total {
            Some(total) => chosen.broadcast_div(total)?,
            None => chosen,
        };
        let weights = if scale == 1.0 { weights } else { (weights * scale)? };
        Ok(Choice { score, scale, routing, scores, weights, total })
    }
}

/// The experts of each row with their weights. Dropped choices have weights, too: their scores
/// count in the sum that divides the weights.
pub(super) struct Choice {
    score: RouterScore,
    scale: f64,
    pub(super) routing: Routing,
    /// `[rows, experts]`.
    scores: Tensor,
    /// The weights of each row's experts, `[rows, per_row]`.
    pub(super) weights: Tensor,
    /// The sum of their scores, by which the weights are divided.
    total: Option<Tensor>,
}

impl Choice {
    /// Computes the gradient of the logits from the weights' gradient (`[rows * per_row]`).
    pub(super) fn dlogits(&self, dweights: &Tensor) -> Result<Tensor> {
        let d = dweights.reshape(self.weights.shape())?;
        let scaled = if self.scale == 1.0 { d.clone() } else { (&d * self.scale)? };
        let d = match &self.total {
            None => scaled,
            Some(total) => {
                let level = (&d * &self.weights)?.sum_keepdim(D::Minus1)?;
                scaled.broadcast_sub(&level)?.broadcast_div(total)?
            }
        };
        let chosen = self.routing.experts_on(d.device())?;
        let zeros = self.scores.zeros_like()?;
        let d = zeros.scatter_add(&chosen, &d.contiguous()?, D::Minus1)?;
        match self.score {
            RouterScore::Softmax => softmax_backward(&self.scores, &d),
            RouterScore::Sigmoid => Ok((d * (&self.scores * self.scores.affine(-1.0, 1.0)?)?)?),
        }
    }
}
