//! Mixtures of experts: each row uses a few of several feed-forward blocks.

use candle_core::{D, DType, Tensor};

use super::experts_exchange::Exchange;
use super::input;
use super::kernels::activation::{Activation, gated, gated_backward};
use super::kernels::grouped::{self, Groups};
use super::kernels::matmul::{self, InputGrad};
use super::kernels::routing::Routing;
use super::kernels::softmax::{softmax, softmax_backward};
use super::kv_cache::CachedTokens;
use super::sizes::check_sizes;
use super::styles::ExpertStyles;
use crate::backend::uses_cpu_kernels;
use crate::{Error, Result};
use fulgurite_engine::autograd::{save_for_backward, storage};
use fulgurite_engine::module::{Experts, Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter, accumulation_dtype};

/// The shape of a [`MixtureOfExperts`].
#[derive(Debug, Clone, Copy)]
pub struct MixtureOfExpertsConfig {
    /// Width of input and output.
    pub hidden_size: usize,
    /// Width inside each expert.
    pub intermediate_size: usize,
    /// Number of experts.
    pub num_experts: usize,
    /// Number of experts that compute each row.
    pub experts_per_row: usize,
    /// Whether the weights of a row's experts are divided by their sum.
    pub normalize: bool,
    /// The activation of the gates.
    pub activation: Activation,
    /// Initial weights; `None` for those of [`Linear::new`](super::Linear::new).
    pub init: Option<Init>,
}

impl MixtureOfExpertsConfig {
    /// Experts with SwiGLU, with normalised weights and the initial weights of
    /// [`Linear::new`](super::Linear::new).
    pub fn new(
        [hidden_size, intermediate_size]: [usize; 2],
        num_experts: usize,
        experts_per_row: usize,
    ) -> Self {
        Self {
            hidden_size,
            intermediate_size,
            num_experts,
            experts_per_row,
            normalize: true,
            activation: Activation::Silu,
            init: None,
        }
    }

    fn check(&self, b: &ModuleBuilder) -> Result<()> {
        let sizes = [
            ("hidden", self.hidden_size),
            ("intermediate", self.intermediate_size),
            ("experts", self.num_experts),
            ("experts of a row", self.experts_per_row),
        ];
        check_sizes(b, &sizes)?;
        match self.experts_per_row > self.num_experts {
            false => Ok(()),
            true => Err(Error::module(
                b.path(),
                format_args!(
                    "a row cannot use {} of {} experts; choose at most as many as there are",
                    self.experts_per_row, self.num_experts
                ),
            )),
        }
    }

    fn init(&self, inputs: usize) -> Init {
        self.init.unwrap_or(Init::kaiming_uniform(inputs))
    }
}

/// A mixture of experts as in Mixtral and Qwen3-MoE: for each row `x` the sum of
/// `w_e down_e(activation(gate_e(x)) * up_e(x))` over the `experts_per_row` likeliest experts `e`.
///
/// Input and output are `[.., hidden]`. The probabilities of the experts are `softmax(gate x)`, in
/// f32 whatever the layer's dtype. The weights `w_e` are the probabilities of the chosen experts,
/// divided by their sum if [`normalize`](MixtureOfExpertsConfig::normalize). Of equally likely
/// experts those of lower index are chosen. No row is dropped, and any number of rows may choose an
/// expert.
///
/// The weights of all experts are one parameter for each projection: `experts.gate_proj.weight` and
/// `experts.up_proj.weight` (`[experts, intermediate, hidden]`), and `experts.down_proj.weight`
/// (`[experts, hidden, intermediate]`). `gate.weight` is `[experts, hidden]`.
///
/// Rows are sorted by expert, and each expert multiplies its rows at once. The order of all sums
/// follows from the choices alone, so results do not depend on the number of threads. The host
/// reads the probabilities to sort rows, also from a GPU.
///
/// Experts take no adapters and cannot be quantised. Tensor-parallel ranks compute the same
/// experts.
///
/// Under expert parallelism (`trainer.strategy.expert_parallel_size`) each rank has some of the
/// experts. The forward and the backward are then collective over the ranks that have all of them
/// together: rows go to the ranks of their experts and come back.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::{MixtureOfExperts, MixtureOfExpertsConfig};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let config = MixtureOfExpertsConfig::new([4, 8], 6, 2); // 6 experts, of which each row uses 2
/// let experts = MixtureOfExperts::new(&b.pp("mlp"), &config)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let x = Tensor::ones((1, 3, 4), DType::F32, &Device::Cpu)?;
/// assert_eq!(experts.forward(&x)?.dims(), [1, 3, 4]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MixtureOfExperts {
    router: Router,
    gate_proj: Parameter,
    up_proj: Parameter,
    down_proj: Parameter,
    experts_per_row: usize,
    normalize: bool,
    activation: Activation,
    experts: Experts,
    layer: LayerHandle,
}

impl MixtureOfExperts {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, if rows use more experts than there are, if the experts are to be quantised,
    /// or if the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, config: &MixtureOfExpertsConfig) -> Result<Self> {
        config.check(b)?;
        let layer = b.declare(ExpertStyles("MixtureOfExperts"))?;
        let &MixtureOfExpertsConfig { hidden_size, intermediate_size, num_experts, .. } = config;
        let router = Router::new(&b.pp("gate"), config)?;
        let experts = b.experts(num_experts);
        let of_experts = b.pp("experts");
        let stack = |name: &str, inputs: usize, outputs: usize| {
            let b = of_experts.pp(name);
            b.declare(ExpertStyles("Experts"))?;
            if b.quantization("weight").is_some() {
                return Err(Error::module(
                    b.path(),
                    "holds the weights of all experts, which cannot be quantised; leave them out with \
                     `trainer.quantization.exclude = [\"lm_head\", \"experts\"]`",
                ));
            }
            let weight =
                b.parameter("weight", [num_experts, outputs, inputs], config.init(inputs))?;
            experts.add(&weight)?;
            Ok(weight)
        };
        Ok(Self {
            router,
            gate_proj: stack("gate_proj", hidden_size, intermediate_size)?,
            up_proj: stack("up_proj", hidden_size, intermediate_size)?,
            down_proj: stack("down_proj", intermediate_size, hidden_size)?,
            experts_per_row: config.experts_per_row,
            normalize: config.normalize,
            activation: config.activation,
            experts,
            layer,
        })
    }

    /// The number of experts that compute each row.
    pub fn experts_per_row(&self) -> usize {
        self.experts_per_row
    }

    /// Returns the output, and the router's logits `[rows, experts]` in f32 (f64 in a layer of
    /// f64), both in the graph. Rows are in the order of the input.
    ///
    /// # Errors
    /// If the last dimension is not `hidden`.
    pub fn forward_with_logits(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        // One cast for router and experts, in the graph, so that their gradients add up before it.
        let own = self.layer.cast_input(x, self.gate_proj.compute_dtype())?;
        let logits = self.router.logits(&own)?;
        let y = self.mix(&own, &logits)?;
        let dtype = self.layer.output_dtype(x.dtype());
        let y = if y.dtype() == dtype { y } else { y.to_dtype(dtype)? };
        Ok((y, logits))
    }

    /// The experts' part of the layer, from the input in the layer's dtype and the router's logits.
    fn mix(&self, x: &Tensor, logits: &Tensor) -> Result<Tensor> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let dims = saved.dims().to_vec();
        let rows = saved.reshape(((), saved.dim(D::Minus1)?))?;
        let (mixed, y) = self.layer.run(|| Mixed::compute(self, &rows, &logits.detach()))?;
        save_for_backward(&mixed.saved());
        let y = y.reshape(&*dims)?;
        let tracked = self.layer.takes_gradient(x);
        let parameters = [&self.gate_proj, &self.up_proj, &self.down_proj];
        let layer = self.clone();
        self.layer.record(&[x, logits], &parameters, y, move |_, grad| {
            let grad = grad.reshape(rows.shape())?;
            let (dx, dlogits) = mixed.backward(&layer, &rows, &grad, tracked)?;
            let dx = dx.map(|dx| input.backward(&dx.reshape(&*dims)?)).transpose()?;
            Ok(vec![dx, Some(dlogits)])
        })
    }
}

impl Module for MixtureOfExperts {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_with_logits(x)?.0)
    }
}

/// The product that scores the experts.
#[derive(Debug, Clone)]
struct Router {
    weight: Parameter,
    layer: LayerHandle,
}

impl Router {
    fn new(b: &ModuleBuilder, config: &MixtureOfExpertsConfig) -> Result<Self> {
        let layer = b.declare(ExpertStyles("Router"))?;
        let &MixtureOfExpertsConfig { hidden_size, num_experts, .. } = config;
        let weight = b.parameter("weight", [num_experts, hidden_size], config.init(hidden_size))?;
        Ok(Self { weight, layer })
    }

    /// The dtype of products and probabilities.
    fn dtype(&self) -> DType {
        accumulation_dtype(self.weight.compute_dtype())
    }

    fn weight(&self) -> Result<Tensor> {
        storage::cast(&self.weight.value()?, self.dtype())
    }

    /// The logits of the rows of `x`, `[rows, experts]`, in the graph.
    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.check_input(x)?;
        input::check_width(&self.layer, x, self.weight.global_shape()[1])?;
        let wide = self.layer.cast_input(x, self.dtype())?;
        let rows = wide.detach().reshape(((), wide.dim(D::Minus1)?))?;
        let y = self.layer.run(|| matmul::linear(&rows, &self.weight()?, None))?;
        let tracked = self.layer.takes_gradient(&wide);
        let (router, dims) = (self.clone(), wide.dims().to_vec());
        self.layer.record(&[&wide], &[&self.weight], y, move |_, grad| {
            let dx = match InputGrad::new(tracked) {
                InputGrad::Skip => None,
                into => matmul::input_grad(grad, &router.weight()?, into)?,
            };
            matmul::weight_grad(&router.weight, &rows, grad)?;
            router.weight.end_use()?;
            Ok(vec![dx.map(|dx| dx.reshape(&*dims)).transpose()?])
        })
    }
}

/// The values that a forward of the experts keeps for its backward. Without an exchange, the
/// choices for this rank's experts are its own.
struct Mixed {
    routing: Routing,
    /// `None` if this rank has all experts.
    exchange: Option<Exchange>,
    /// The choices for each of this rank's experts.
    groups: Groups,
    /// The rows of these choices (`[choices, hidden]`), if other ranks sent some of them.
    received: Option<Tensor>,
    /// `[rows, experts]`.
    probabilities: Tensor,
    /// The weights of each row's experts, `[rows, per_row]`, and their sum before they were
    /// normalised.
    weights: Tensor,
    total: Option<Tensor>,
    /// The projections of the choices for this rank's experts, `[choices, intermediate]`.
    gate: Tensor,
    up: Tensor,
}

impl Mixed {
    /// Computes the output for `x` (`[rows, hidden]`), outside the graph.
    fn compute(layer: &MixtureOfExperts, x: &Tensor, logits: &Tensor) -> Result<(Self, Tensor)> {
        let probabilities = softmax(logits)?;
        let routing = Routing::of(&probabilities, layer.experts_per_row)?;
        let chosen = probabilities.gather(&routing.experts_on(x.device())?, D::Minus1)?;
        let total = match layer.normalize {
            true => Some(chosen.sum_keepdim(D::Minus1)?),
            false => None,
        };
        let weights = match &total {
            Some(total) => chosen.broadcast_div(total)?,
            None => chosen,
        };
        let sorted = select(x, &routing.rows)?;
        let sequence = sequence_of_choices(&routing, x);
        let (exchange, groups, sorted) = match layer.experts.ranks() {
            None => {
                let sequences = sequence.map(|sequence| stretches(&routing.ranges, &sequence));
                (None, Groups { sequences, ranges: routing.ranges.clone() }, sorted)
            }
            Some(ranks) => {
                let exchange = Exchange::new(ranks, &routing, sequence.is_some())?;
                let sequences = exchange.stretches(sequence)?;
                let groups = Groups { sequences, ranges: exchange.ranges().to_vec() };
                let received = exchange.to_experts(&sorted)?;
                (Some(exchange), groups, received)
            }
        };
        let gate = grouped::linear(&sorted, &layer.gate_proj.value()?, &groups)?;
        let up = grouped::linear(&sorted, &layer.up_proj.value()?, &groups)?;
        let hidden = gated(layer.activation, &gate, &up)?;
        let y = grouped::linear(&hidden, &layer.down_proj.value()?, &groups)?;
        let y = exchange.as_ref().map_or(Ok(y.clone()), |exchange| exchange.back(&y))?;
        let factors = select(&weights.flatten_all()?, &routing.choices)?;
        let y = grouped::sum_rows(&y, Some(&factors), &routing.places, routing.per_row)?;
        let received = exchange.is_some().then_some(sorted);
        let this =
            Self { routing, exchange, groups, received, probabilities, weights, total, gate, up };
        Ok((this, y))
    }

    /// The tensors that memory is kept for.
    fn saved(&self) -> Vec<&Tensor> {
        [&self.gate, &self.up].into_iter().chain(&self.received).collect()
    }

    /// Takes values of this rank's sorted choices to the ranks of their experts, and returns those
    /// for this rank's experts.
    fn to_experts(&self, x: Tensor) -> Result<Tensor> {
        self.exchange.as_ref().map_or(Ok(x.clone()), |exchange| exchange.to_experts(&x))
    }

    /// The reverse of [`to_experts`](Self::to_experts).
    fn back(&self, y: Tensor) -> Result<Tensor> {
        self.exchange.as_ref().map_or(Ok(y.clone()), |exchange| exchange.back(&y))
    }

    /// Returns the gradients of input, if wanted, and logits. Adds the experts' gradients and ends
    /// their uses.
    fn backward(
        &self,
        layer: &MixtureOfExperts,
        x: &Tensor,
        grad: &Tensor,
        wanted: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let Self { routing, groups, gate, up, .. } = self;
        let factors = self.to_experts(select(&self.weights.flatten_all()?, &routing.choices)?)?;
        let grad = self.to_experts(select(grad, &routing.rows)?)?;
        // Recomputing the product is cheaper than saving it.
        let hidden = gated(layer.activation, gate, up)?;
        let d = grouped::input_grad(&[(&grad, &layer.down_proj.value()?)], groups)?;
        let dweights = grouped::row_dots(&d, &hidden)?;
        grouped::weight_grad(
            &layer.down_proj,
            &grouped::scale_rows(&hidden, &factors)?,
            &grad,
            groups,
        )?;
        let d = grouped::scale_rows(&d, &factors)?;
        let (dgate, dup) = gated_backward(layer.activation, gate, up, &d)?;
        let sorted = match &self.received {
            Some(received) => received.clone(),
            None => select(x, &routing.rows)?,
        };
        grouped::weight_grad(&layer.gate_proj, &sorted, &dgate, groups)?;
        grouped::weight_grad(&layer.up_proj, &sorted, &dup, groups)?;
        let dx = match wanted {
            false => None,
            true => {
                let (gate, up) = (layer.gate_proj.value()?, layer.up_proj.value()?);
                let dx = grouped::input_grad(&[(&dgate, &gate), (&dup, &up)], groups)?;
                let dx = self.back(dx)?;
                Some(grouped::sum_rows(&dx, None, &routing.places, routing.per_row)?)
            }
        };
        let dweights = self.back(dweights)?;
        let dlogits = self.dlogits(&select(&dweights, &routing.inverse())?)?;
        [&layer.gate_proj, &layer.up_proj, &layer.down_proj]
            .into_iter()
            .try_for_each(Parameter::end_use)?;
        Ok((dx, dlogits))
    }

    /// The gradient of the logits, from that of the weights (`[rows * per_row]`).
    fn dlogits(&self, dweights: &Tensor) -> Result<Tensor> {
        let d = dweights.reshape(self.weights.shape())?;
        let d = match &self.total {
            None => d,
            Some(total) => {
                let level = (&d * &self.weights)?.sum_keepdim(D::Minus1)?;
                d.broadcast_sub(&level)?.broadcast_div(total)?
            }
        };
        let chosen = self.routing.experts_on(d.device())?;
        let zeros = self.probabilities.zeros_like()?;
        let d = zeros.scatter_add(&chosen, &d.contiguous()?, D::Minus1)?;
        softmax_backward(&self.probabilities, &d)
    }
}

/// The rows of `x` with these indices.
pub(super) fn select(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let rows = Tensor::from_slice(rows, rows.len(), x.device())?;
    Ok(x.contiguous()?.index_select(&rows, 0)?)
}

/// In a forward with a cache on the CPU, the sequence of each sorted choice.
fn sequence_of_choices(routing: &Routing, x: &Tensor) -> Option<Vec<usize>> {
    let tokens = CachedTokens::current().filter(|tokens| {
        // A plan that cuts the sequence leaves other rows.
        uses_cpu_kernels(x) && tokens.tokens() * routing.per_row == routing.len()
    })?;
    let mut sequence = vec![tokens.segments().len(); tokens.tokens()];
    for (i, segment) in tokens.segments().iter().enumerate() {
        sequence[segment.at.clone()].fill(i);
    }
    Some(routing.rows.iter().map(|&row| sequence[row as usize]).collect())
}

/// The lengths of the stretches of choices that are of one sequence, for each expert.
pub(super) fn stretches<T: PartialEq>(
    experts: &[std::ops::Range<usize>],
    sequence: &[T],
) -> Vec<Vec<usize>> {
    let of_expert = |choices: &std::ops::Range<usize>| {
        sequence[choices.clone()].chunk_by(|a, b| a == b).map(<[T]>::len).collect()
    };
    experts.iter().map(of_expert).collect()
}
