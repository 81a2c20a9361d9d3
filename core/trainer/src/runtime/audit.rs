//! The gradient audit: parameters without a gradient, or with gradients that differ between
//! tensor-parallel replicas.

use super::StrategyRuntime;
use super::runtime::RuntimeState;
use super::totals::is_of;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use fulgurite_config::ConfigType;
use fulgurite_engine::collective::{ReduceOp, all_gather_object};
use fulgurite_engine::execution::{dry_run, read};
use fulgurite_engine::mesh::TENSOR_PARALLEL;
use fulgurite_engine::parameter::{Parameter, ParameterSlot, UnusedBecause};
use fulgurite_engine::shard::Placement;
use serde::{Deserialize, Serialize};

/// The reaction to a trainable parameter without a gradient on any rank
/// (`trainer.unused_parameters`). After the first step the optimizer leaves such a parameter alone,
/// as in PyTorch, unless this is [`Zero`](Self::Zero).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnusedParameters {
    /// An error in the first step, which names the parameters.
    #[default]
    Error,
    /// Their gradient is zero in every step, so weight decay and momentum still change them.
    Zero,
    /// The optimizer leaves them alone.
    Ignore,
}

impl ConfigType for UnusedParameters {
    fn describe() -> String {
        "`\"error\"`, `\"zero\"` or `\"ignore\"`".to_owned()
    }
}

/// Explains why `unused` parameters got no gradient on this rank, in one sentence per cause.
fn causes(unused: &[&Parameter]) -> String {
    let sentence = |cause: UnusedBecause| {
        let of = unused.iter().filter(|parameter| parameter.unused_because() == cause);
        let of: Vec<String> = of.map(|parameter| format!("`{}`", parameter.fqn())).collect();
        let of = match of.len() {
            0 => return String::new(),
            // The error names them already.
            n if n == unused.len() => "them".to_owned(),
            _ => of.join(", "),
        };
        match cause {
            UnusedBecause::Detached => format!(
                ". Forward read the values of {of} with `Parameter::value`, which are detached: compute with \
                 `Parameter::tensor`, so that a gradient comes back"
            ),
            UnusedBecause::Cut => format!(
                ". The loss does not depend on what was computed with {of}, or an operation without a backward cut \
                 the graph: candle_nn's fused layer_norm, rms_norm, softmax_last_dim and rope do, and so do \
                 `detach` and writes in place; the layers of `fulgurite::nn` do not"
            ),
            UnusedBecause::NotUsed => format!(". Forward did not use {of}"),
        }
    };
    use UnusedBecause::{Cut, Detached, NotUsed};
    let mut text = [Detached, Cut, NotUsed].map(sentence).concat();
    if unused.iter().any(|parameter| parameter.unused_because() != Detached) {
        text += ". If that is meant, freeze what is not trained (`trainer.freeze`), or set \
                 `trainer.unused_parameters` to \"zero\" or \"ignore\"";
    }
    text
}

impl StrategyRuntime {
    /// Checks that every trainable parameter of an optimizer got a gradient on some rank in this
    /// step. Only the first step is audited, in a collective over the world. In later steps, ranks
    /// report unused parameters with the [totals](Self::step_totals).
    pub(crate) fn audit_gradients(&self, optimizer: usize, policy: UnusedParameters) -> Result<()> {
        let slots = self.context()?.slots;
        let RuntimeState { steps, delivered, first_is_built, .. } = &mut *self.lock_state()?;
        let several = steps.len() > 1;
        let step = &mut steps[optimizer];
        if step.audited {
            return Ok(());
        }
        if several
            && !*first_is_built
            && let Some(slot) = slots.iter().find(|p| p.requires_grad() && p.optimizer() == 0)
        {
            return Err(Error::parameter(
                slot.fqn(),
                "no optimizer updates it: add it to the patterns of one, freeze it, or give what is left \
                 to `Fabric::setup_optimizer`",
            ));
        }
        let own: Vec<_> =
            slots.iter().zip(delivered).filter(|(slot, _)| is_of(slot, optimizer)).collect();
        // The ranks of other stages do not answer a dry run.
        let is_dry = dry_run::is_on();
        let is_used = |slot: &ParameterSlot, used: bool| used || is_dry && slot.is_elsewhere();
        let used: Vec<u8> =
            own.iter().map(|(slot, used)| u8::from(is_used(slot, **used))).collect();
        let n = used.len();
        let used = Tensor::from_vec(used, n, &Device::Cpu)?;
        self.mesh().world().all_reduce(&used, ReduceOp::Max)?.wait()?;
        let used = read::host::<u8>(&used)?;
        let unused: Vec<_> = own
            .iter()
            .zip(used)
            .filter(|(_, used)| *used == 0)
            .map(|((slot, _), _)| slot)
            .collect();
        match policy {
            UnusedParameters::Error if !unused.is_empty() => {
                let names = unused.iter().map(|slot| slot.fqn().to_owned()).collect();
                let unused: Vec<&Parameter> = unused.iter().map(|slot| slot.parameter()).collect();
                return Err(Error::UnusedParameters { names, detail: causes(&unused) });
            }
            UnusedParameters::Ignore => unused.iter().for_each(|slot| slot.set_local_grad(None)),
            _ => {}
        }
        self.check_replicated_gradients(optimizer)?;
        step.audited = true;
        Ok(())
    }

    /// Checks that replicated parameters have equal gradient norms on all tensor-parallel ranks.
    /// The norms differ if a plan shards sequences but leaves out a layer that computes on the
    /// shards. Collective over the tensor-parallel group.
    fn check_replicated_gradients(&self, optimizer: usize) -> Result<()> {
        let Ok(group) = self.mesh().group(TENSOR_PARALLEL) else { return Ok(()) };
        if group.size() == 1 {
            return Ok(());
        }
        let whole = |p: &Parameter| {
            p.spec().cuts.iter().any(|cut| {
                cut.mesh_dim == TENSOR_PARALLEL
                    && cut.placement == Placement::Replicate
                    && cut.size == group.size()
            })
        };
        let own = |p: &&Parameter| p.optimizer() == optimizer && whole(p);
        let parameters: Vec<&Parameter> = self.tree()?.trainable().filter(own).collect();
        let squares = |p: &&Parameter| -> Result<f64> {
            let Some(grad) = p.local_grad() else { return Ok(0.0) };
            read::scalar(&grad.to_dtype(DType::F64)?.sqr()?.sum_all()?, "first step's check")
        };
        let own = parameters.iter().map(squares).collect::<Result<Vec<f64>>>()?;
        // Hexadecimal bits, so that the message size does not depend on the values.
        let own: Vec<String> =
            own.iter().map(|square| format!("{:016x}", square.to_bits())).collect();
        let value =
            |bits: &String| u64::from_str_radix(bits, 16).map(f64::from_bits).map_err(Error::other);
        let all = all_gather_object(&**group, &own)?;
        let all = all.iter().map(|squares| squares.iter().map(value).collect::<Result<Vec<f64>>>());
        let all = all.collect::<Result<Vec<_>>>()?;
        for (i, parameter) in parameters.iter().enumerate() {
            let (a, b) = all.iter().fold((f64::INFINITY, 0f64), |(low, high), squares| {
                (low.min(squares[i]), high.max(squares[i]))
            });
            // False for NaN, which another check reports better.
            if b - a > 1e-3 * b {
                return Err(Error::parameter(
                    parameter.fqn(),
                    format!(
                        "tensor-parallel ranks hold it alike and have gradients of different norms, \
                         {:.6e} to {:.6e}: it is used on parts of an activation. Give its layer a \
                         style in the plan: sequence_parallel (norms), or \
                         replicated_with_grad_allreduce",
                        a.sqrt(),
                        b.sqrt()
                    ),
                ));
            }
        }
        Ok(())
    }
}
