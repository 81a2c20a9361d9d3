//! The experts' part of a mixture: forward and backward of the rows that its ranks choose.

use candle_core::{DType, Tensor};

use super::experts_capacity::Capacity;
use super::experts_config::{ExpertActivation, MixtureOfExpertsConfig};
use super::experts_exchange::Exchange;
use super::experts_lora::StackLora;
use super::experts_router::{Choice, Router};
use super::gradients::add_to;
use super::kernels::activation::{gated, gated_backward};
use super::kernels::grouped::{self, Groups};
use super::kernels::routing::Routing;
use super::kv_cache::CachedTokens;
use super::styles::ExpertStyles;
use super::weight::Weight;
use crate::Result;
use crate::backend::uses_cpu_kernels;
use fulgurite_engine::module::{Experts, ModuleBuilder, adapters_are_off};
use fulgurite_engine::parameter::{Init, Parameter};

/// A projection of all experts.
#[derive(Debug, Clone)]
struct Stack {
    weight: Weight,
    bias: Option<Parameter>,
    lora: Option<StackLora>,
}

impl Stack {
    fn new(
        b: &ModuleBuilder,
        experts: &Experts,
        config: &MixtureOfExpertsConfig,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Self> {
        b.declare(ExpertStyles("Experts"))?;
        let count = config.num_experts;
        let weight = Weight::declare(b, &[count, outputs, inputs], config.init(inputs))?;
        weight.parameters().try_for_each(|parameter| experts.add(parameter))?;
        let bias = || b.parameter("bias", [count, outputs], Init::ZEROS);
        let bias = config.bias.then(bias).transpose()?;
        bias.iter().try_for_each(|bias| experts.add(bias))?;
        let lora = StackLora::declare(b, experts, [inputs, outputs])?;
        Ok(Self { weight, bias, lora })
    }

    fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        let lora = self.lora.iter().flat_map(StackLora::parameters);
        self.weight.parameters().chain(&self.bias).chain(lora)
    }

    fn forward(&self, x: &Tensor, groups: &Groups) -> Result<Tensor> {
        let mut y = grouped::linear(x, &self.weight.value_of_experts(groups)?, groups)?;
        if let Some(bias) = &self.bias {
            y = add_to(y, &grouped::spread(&bias.value()?, groups)?)?;
        }
        match self.lora.as_ref().filter(|_| !adapters_are_off()) {
            None => Ok(y),
            Some(lora) => lora.add(y, x, groups),
        }
    }

    /// The gradient behind the adapters' first product, for a gradient of the output.
    fn inner_grad(&self, grad: &Tensor, groups: &Groups) -> Result<Option<Tensor>> {
        self.lora.as_ref().map(|lora| lora.inner_grad(grad, groups)).transpose()
    }

    /// The gradient of the input of some stacks with the same input, for the gradients of their
    /// outputs and [inner gradients](Self::inner_grad).
    fn input_grad(stacks: &[(&Self, &Tensor, &Option<Tensor>)], groups: &Groups) -> Result<Tensor> {
        let mut pairs = Vec::new();
        for (stack, grad, inner) in stacks {
            pairs.push(((*grad).clone(), stack.weight.value_of_experts(groups)?));
            if let (Some(lora), Some(inner)) = (&stack.lora, inner) {
                pairs.push((inner.clone(), lora.a()?));
            }
        }
        let pairs: Vec<(&Tensor, &Tensor)> = pairs.iter().map(|(grad, w)| (grad, w)).collect();
        grouped::input_grad(&pairs, groups)
    }

    /// Adds the gradients of weight and adapters, without ending their uses.
    fn weight_grads(
        &self,
        x: &Tensor,
        grad: &Tensor,
        inner: &Option<Tensor>,
        groups: &Groups,
    ) -> Result<()> {
        if let Some(weight) = self.weight.trained() {
            grouped::weight_grad(weight, x, grad, groups)?;
        }
        match (&self.lora, inner) {
            (Some(lora), Some(inner)) => lora.weight_grads(x, grad, inner, groups),
            _ => Ok(()),
        }
    }
}

/// The projections of the experts, and what is between them.
#[derive(Debug, Clone)]
pub(super) struct Projections {
    gate: Stack,
    up: Stack,
    down: Stack,
    activation: ExpertActivation,
    experts: Experts,
}

impl Projections {
    /// The projections of the mixture at the builder's path.
    pub(super) fn new(b: &ModuleBuilder, config: &MixtureOfExpertsConfig) -> Result<Self> {
        let &MixtureOfExpertsConfig { hidden_size, intermediate_size, num_experts, .. } = config;
        let experts = b.experts(num_experts, config.experts_per_row);
        let of_experts = b.pp("experts");
        let stack = |name: &str, sizes| Stack::new(&of_experts.pp(name), &experts, config, sizes);
        Ok(Self {
            gate: stack("gate_proj", [hidden_size, intermediate_size])?,
            up: stack("up_proj", [hidden_size, intermediate_size])?,
            down: stack("down_proj", [intermediate_size, hidden_size])?,
            activation: config.activation,
            experts,
        })
    }

    /// The dtype that the mixture computes in.
    pub(super) fn compute_dtype(&self) -> DType {
        self.gate.weight.compute_dtype()
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(Stack::parameters)
    }

    fn hidden(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self.activation {
            ExpertActivation::Gated(activation) => gated(activation, gate, up),
            ExpertActivation::Clamped(clamped) => clamped.forward(gate, up),
        }
    }

    fn hidden_backward(
        &self,
        gate: &Tensor,
        up: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        match self.activation {
            ExpertActivation::Gated(activation) => gated_backward(activation, gate, up, grad),
            ExpertActivation::Clamped(clamped) => clamped.backward(gate, up, grad),
        }
    }
}

/// The values that a forward of the experts keeps for its backward. Without an exchange, the
/// choices for this rank's experts are its own.
pub(super) struct Mixed {
    choice: Choice,
    /// `None` if this rank has all experts.
    exchange: Option<Exchange>,
    /// The choices for each of this rank's experts.
    groups: Groups,
    /// The rows of these choices (`[choices, hidden]`), if other ranks sent some of them.
    received: Option<Tensor>,
    /// The projections of the choices for this rank's experts, `[choices, intermediate]`.
    gate: Tensor,
    up: Tensor,
}

impl Mixed {
    /// Computes the output for `x` (`[rows, hidden]`), outside the graph. Choices beyond the
    /// capacity are dropped.
    pub(super) fn compute(
        router: &Router,
        projections: &Projections,
        x: &Tensor,
        logits: &Tensor,
        capacity: Option<&Capacity>,
    ) -> Result<(Self, Tensor)> {
        let choice = router.choose(logits, capacity)?;
        let routing = &choice.routing;
        let sorted = select(x, &routing.rows)?;
        let sequence = sequence_of_choices(routing, x);
        let (exchange, groups, sorted) = match projections.experts.ranks() {
            None => {
                let sequences = sequence.map(|sequence| stretches(&routing.ranges, &sequence));
                (None, Groups { sequences, ranges: routing.ranges.clone() }, sorted)
            }
            Some(ranks) => {
                let exchange = Exchange::new(ranks, routing, sequence.is_some())?;
                let sequences = exchange.stretches(sequence)?;
                let groups = Groups { sequences, ranges: exchange.ranges().to_vec() };
                let received = exchange.to_experts(&sorted)?;
                (Some(exchange), groups, received)
            }
        };
        let gate = projections.gate.forward(&sorted, &groups)?;
        let up = projections.up.forward(&sorted, &groups)?;
        let y = projections.down.forward(&projections.hidden(&gate, &up)?, &groups)?;
        let y = exchange.as_ref().map_or(Ok(y.clone()), |exchange| exchange.back(&y))?;
        let factors = select(&choice.weights.flatten_all()?, &routing.choices)?;
        let y = grouped::sum_rows(&y, Some(&factors), &routing.places, routing.per_row)?;
        let received = exchange.is_some().then_some(sorted);
        Ok((Self { choice, exchange, groups, received, gate, up }, y))
    }

    /// The tensors that memory is kept for.
    pub(super) fn saved(&self) -> Vec<&Tensor> {
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
    pub(super) fn backward(
        &self,
        projections: &Projections,
        x: &Tensor,
        grad: &Tensor,
        wanted: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let Self { choice, groups, gate, up, .. } = self;
        let routing = &choice.routing;
        let Projections { gate: gates, up: ups, down: downs, .. } = projections;
        let factors = select(&choice.weights.flatten_all()?, &routing.choices)?;
        let factors = self.to_experts(factors)?;
        let grad = self.to_experts(select(grad, &routing.rows)?)?;
        // Recomputing the product is cheaper than saving it.
        let hidden = projections.hidden(gate, up)?;
        let inner = downs.inner_grad(&grad, groups)?;
        let d = Stack::input_grad(&[(downs, &grad, &inner)], groups)?;
        let mut dweights = grouped::row_dots(&d, &hidden)?;
        let scaled = grouped::scale_rows(&hidden, &factors)?;
        downs.weight_grads(&scaled, &grad, &inner, groups)?;
        if let Some(bias) = &downs.bias {
            let own = grouped::spread(&bias.value()?, groups)?;
            dweights = (dweights + grouped::row_dots(&grad, &own)?)?;
            grouped::bias_grad(bias, &grouped::scale_rows(&grad, &factors)?, groups)?;
        }
        let d = grouped::scale_rows(&d, &factors)?;
        let (dgate, dup) = projections.hidden_backward(gate, up, &d)?;
        let sorted = match &self.received {
            Some(received) => received.clone(),
            None => select(x, &routing.rows)?,
        };
        let inner_gate = gates.inner_grad(&dgate, groups)?;
        let inner_up = ups.inner_grad(&dup, groups)?;
        let stacks = [(gates, &dgate, &inner_gate), (ups, &dup, &inner_up)];
        for (stack, d, inner) in stacks {
            stack.weight_grads(&sorted, d, inner, groups)?;
            stack.bias.iter().try_for_each(|bias| grouped::bias_grad(bias, d, groups))?;
        }
        let dx = match wanted {
            false => None,
            true => {
                let dx = self.back(Stack::input_grad(&stacks, groups)?)?;
                Some(grouped::sum_rows(&dx, None, &routing.places, routing.per_row)?)
            }
        };
        let dweights = self.back(dweights)?;
        // Dropped choices have the constant weight 0.
        let inverse = routing.inverse();
        let dweights = grouped::with_zeros_behind(&dweights, &inverse)?;
        let dlogits = choice.dlogits(&select(&dweights, &inverse)?)?;
        projections.parameters().try_for_each(Parameter::end_use)?;
        Ok((dx, dlogits))
    }
}

/// The rows of `x` with these indices.
pub(super) fn select(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    if rows.is_empty() {
        return Ok(x.detach().narrow(0, 0, 0)?);
    }
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
