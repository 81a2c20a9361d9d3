//! Mixtures of experts: each row uses a few of several feed-forward blocks.

use candle_core::{D, Tensor};

use super::experts_capacity::{Capacity, CapacityConfig};
use super::experts_config::MixtureOfExpertsConfig;
use super::experts_load::ExpertLoad;
use super::experts_mixed::{Mixed, Projections};
use super::experts_router::Router;
use super::experts_shared::SharedExpert;
use super::functional::add;
use super::styles::ExpertStyles;
use crate::Result;
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::Parameter;

/// A mixture of experts as in Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss: for each row `x` the sum
/// of `w_e down_e(activation(gate_e(x)) * up_e(x))` over the row's `experts_per_row` experts `e`,
/// plus the output of a [shared expert](super::SharedExpertConfig) if there is one.
///
/// Input and output are `[.., hidden]`. The scores of the experts are the softmax or sigmoid of
/// `gate x`, in f32 whatever the layer's dtype. A row uses the experts with the best scores, after
/// a [correction bias](super::CorrectionBias) is added and within the row's best
/// [groups](super::ExpertGroups) if the [router](super::RouterConfig) has these. Of equally good
/// experts the lower index is chosen. The weights `w_e` are the scores without the bias, divided by
/// their sum and multiplied by a factor as the router says. Any number of rows may choose an
/// expert. Without a [capacity](MixtureOfExpertsConfig::capacity_factor) no row is dropped.
///
/// The weights of all experts are one parameter for each projection: `experts.gate_proj.weight` and
/// `experts.up_proj.weight` (`[experts, intermediate, hidden]`), and `experts.down_proj.weight`
/// (`[experts, hidden, intermediate]`), with biases `[experts, outputs]` if the configuration asks
/// for them. `gate.weight` is `[experts, hidden]`. A shared expert is `shared_expert`, and its gate
/// `shared_expert_gate`.
///
/// Rows are sorted by expert, and each expert multiplies its rows at once. The order of all sums
/// follows from the choices alone, so results do not depend on the number of threads. The host
/// reads the scores to sort rows, also from a GPU.
///
/// [`Adapters`](fulgurite_engine::module::Adapters) may target projections, without dropout and
/// magnitudes; each expert then has an adapter. Frozen weights may be quantised
/// ([`Quantization`](fulgurite_engine::module::Quantization)); those of experts with rows are
/// unpacked. Tensor-parallel ranks compute the same experts.
///
/// Under expert parallelism (`trainer.strategy.expert_parallel_size`) each rank has some of the
/// experts. The forward and the backward are then collective over the ranks that have all of them
/// together: rows go to the ranks of their experts and come back.
///
/// With a capacity, an input `[.., time, hidden]` has sequences of `time` rows. A forward in
/// training then needs a [`ForwardScope`](fulgurite_engine::module::ForwardScope). It is collective
/// over the ranks that share sequences, which count the choices of earlier positions together.
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
    projections: Projections,
    shared: Option<SharedExpert>,
    experts_per_row: usize,
    capacity: CapacityConfig,
    layer: LayerHandle,
}

impl MixtureOfExperts {
    /// A layer of this shape.
    ///
    /// # Errors
    /// If a size is 0, if rows use more experts than there are in their groups, or if groups do not
    /// divide the experts. If a factor is not positive, if weights of these sizes cannot be
    /// quantised, or if the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, config: &MixtureOfExpertsConfig) -> Result<Self> {
        config.check(b)?;
        let layer = b.declare(ExpertStyles("MixtureOfExperts"))?;
        let router = Router::new(&b.pp("gate"), config)?;
        let projections = Projections::new(b, config)?;
        let shared = config.shared.map(|shared| SharedExpert::new(b, config, shared));
        let shared = shared.transpose()?;
        let experts_per_row = config.experts_per_row;
        let capacity = CapacityConfig::new(config);
        Ok(Self { router, projections, shared, experts_per_row, capacity, layer })
    }

    /// The number of experts that compute each row.
    pub fn experts_per_row(&self) -> usize {
        self.experts_per_row
    }

    /// The rows that this rank's training forwards gave to each expert.
    pub fn load(&self) -> &ExpertLoad {
        self.router.load()
    }

    /// Returns the output, and the router's logits `[rows, experts]` in f32 (f64 in a layer of
    /// f64), both in the graph. Rows are in the order of the input.
    ///
    /// # Errors
    /// If the last dimension is not `hidden`. With a capacity, if gradients are enabled outside of
    /// any scope, or if a peer fails.
    pub fn forward_with_logits(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        // One cast for router and experts, in the graph, so that their gradients add up before it.
        let own = self.layer.cast_input(x, self.projections.compute_dtype())?;
        let logits = self.router.logits(&own)?;
        let mut y = self.mix(&own, &logits)?;
        if let Some(shared) = &self.shared {
            y = add(&y, &shared.forward(&own)?)?;
        }
        let dtype = self.layer.output_dtype(x.dtype());
        let y = if y.dtype() == dtype { y } else { y.to_dtype(dtype)? };
        Ok((y, logits))
    }

    /// The chosen experts' part of the layer, from the input in the layer's dtype and the router's
    /// logits.
    fn mix(&self, x: &Tensor, logits: &Tensor) -> Result<Tensor> {
        let (saved, input) = self.layer.redistribute_input(x)?;
        let dims = saved.dims().to_vec();
        let rows = saved.reshape(((), saved.dim(D::Minus1)?))?;
        let capacity = Capacity::of_forward(&self.capacity, &self.layer, &dims)?;
        let (mixed, y) = self.layer.run(|| {
            let (router, projections) = (&self.router, &self.projections);
            Mixed::compute(router, projections, &rows, &logits.detach(), capacity.as_ref())
        })?;
        save_for_backward(&mixed.saved());
        let y = y.reshape(&*dims)?;
        let tracked = self.layer.takes_gradient(x);
        let parameters: Vec<&Parameter> = self.projections.parameters().collect();
        let projections = self.projections.clone();
        self.layer.record(&[x, logits], &parameters, y, move |_, grad| {
            let grad = grad.reshape(rows.shape())?;
            let (dx, dlogits) = mixed.backward(&projections, &rows, &grad, tracked)?;
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
