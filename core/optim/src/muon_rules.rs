//! The element-wise steps of Muon: before a matrix is made orthogonal, and after.

use candle_core::Tensor;

use super::elementwise::Real;
use super::elementwise_optimizer::{UpdateRule, composed, fused};
use super::groups::Hyper;
use super::muon::Muon;
use super::state::ParamUpdate;
use super::step_scale::GradScale;
use crate::Result;

/// The coefficients of the momentum's update.
#[derive(Clone, Copy)]
pub(super) struct Momentum {
    momentum: f64,
    nesterov: bool,
}

/// Updates the momentum, the state, and writes the matrix that is made orthogonal to the values.
impl UpdateRule<1> for Muon {
    type Coefficients = Momentum;

    fn coefficients(&self, _: Hyper, _: f64, _: u64) -> Momentum {
        Momentum { momentum: self.momentum, nesterov: self.nesterov }
    }

    fn on_elements<C: Real>(c: Momentum) -> impl Fn(C, C, [C; 1]) -> (C, [C; 1]) + Copy + Sync {
        let [keep, gain] = [c.momentum, 1.0 - c.momentum].map(C::from_f64);
        // As torch.lerp: interpolate from the nearer end.
        let (small, nesterov) = (1.0 - c.momentum < 0.5, c.nesterov);
        move |_, g, [old]| {
            let m = if small { old + gain * (g - old) } else { g - (g - old) * keep };
            let ahead = if small { m - (m - g) * gain } else { g + keep * (m - g) };
            (if nesterov { ahead } else { m }, [m])
        }
    }

    fn on_tensors(
        c: Momentum,
        _: &Tensor,
        g: Tensor,
        [old]: &[Tensor; 1],
    ) -> Result<(Tensor, [Tensor; 1])> {
        let (keep, gain) = (c.momentum, 1.0 - c.momentum);
        let difference = (&g - old)?;
        let m =
            if gain < 0.5 { (old + (difference * gain)?)? } else { (&g - (difference * keep)?)? };
        let ahead = match (c.nesterov, gain < 0.5) {
            (false, _) => m.clone(),
            (true, true) => (&m - ((&m - &g)? * gain)?)?,
            (true, false) => (&g + ((&m - &g)? * keep)?)?,
        };
        Ok((ahead, [m]))
    }
}

/// The coefficients of a matrix's update.
#[derive(Clone, Copy)]
pub(super) struct Move {
    /// The factor of the values that makes the weight decay.
    keep: f64,
    /// Minus the learning rate, with the factor for the matrix's shape.
    pub(super) step_size: f64,
}

/// Moves values by an orthogonal matrix, which takes the place of the gradient.
impl UpdateRule<0> for Muon {
    type Coefficients = Move;

    fn coefficients(&self, hyper: Hyper, schedule: f64, _: u64) -> Move {
        let lr = hyper.lr * schedule;
        Move { keep: 1.0 - lr * hyper.weight_decay, step_size: -lr }
    }

    fn on_elements<C: Real>(c: Move) -> impl Fn(C, C, [C; 0]) -> (C, [C; 0]) + Copy + Sync {
        let [keep, step_size] = [c.keep, c.step_size].map(C::from_f64);
        move |p, update, []| (p * keep + step_size * update, [])
    }

    fn on_tensors(
        c: Move,
        values: &Tensor,
        update: Tensor,
        _: &[Tensor; 0],
    ) -> Result<(Tensor, [Tensor; 0])> {
        Ok((((values * c.keep)? + (update * c.step_size)?)?, []))
    }
}

/// Computes an update by the fastest means of its device.
pub(super) fn compute<const N: usize>(
    update: &ParamUpdate<N>,
    c: <Muon as UpdateRule<N>>::Coefficients,
    scale: &GradScale,
) -> Result<()>
where
    Muon: UpdateRule<N>,
{
    match update.values.device().is_cpu() {
        true => fused::<Muon, N>(update, c, scale),
        false => composed::<Muon, N>(update, c, &(*scale).into()),
    }
}
