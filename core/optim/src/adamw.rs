//! Adam with decoupled weight decay.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
#[cfg(feature = "cuda")]
use super::gpu::Updates;
use super::groups::{Hyper, ParamGroupConfig, at_least_zero, unit_interval};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::state_bytes;
use super::state_dtype::StateDtype;
#[cfg(feature = "cuda")]
use super::step_scale::StepScale;
use crate::Result;
use fulgurite_module::parameter::Parameter;

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), computed in the order of
/// `torch.optim.AdamW`: `optimizer.type = "adamw"`.
///
/// Steps are counted per parameter, as in torch: steps without a gradient do not count. State:
/// `exp_avg`, `exp_avg_sq`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct AdamW {
    /// The learning rate, before the schedule.
    #[default(1e-3)]
    pub lr: f64,
    /// The decay rates of the two moments, each in `[0, 1)`.
    #[default((0.9, 0.999))]
    pub betas: (f64, f64),
    /// Added to the denominator.
    #[default(1e-8)]
    pub eps: f64,
    /// Values shrink by this times the learning rate in each step.
    #[default(0.01)]
    pub weight_decay: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the two moments: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "adamw")]
impl OptimizerConfig for AdamW {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        2 * state_bytes(self.state_dtype, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let names = ["exp_avg", "exp_avg_sq"];
        Ok(Box::new(ElementwiseOptimizer::new(self, parameters, names)?))
    }
}

fulgurite_config::register_optimizer!(
    "adamw",
    AdamW,
    "Adam with decoupled weight decay, as torch.optim.AdamW",
    "{ type = \"adamw\", lr = 3e-4, weight_decay = 0.1, no_decay = [\"*norm*\"] }"
);

impl Options for AdamW {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        vec![("beta1", self.betas.0), ("beta2", self.betas.1), ("eps", self.eps)]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let betas = (option("beta1")?, option("beta2")?);
        let options = Self { betas, eps: option("eps")?, ..self.clone() };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        unit_interval("optimizer.betas[0]", self.betas.0)?;
        unit_interval("optimizer.betas[1]", self.betas.1)?;
        at_least_zero("optimizer.eps", self.eps)
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    /// The factor of the values that makes the weight decay.
    keep: f64,
    beta1: f64,
    beta2: f64,
    /// Square root of the second moment's bias correction.
    correction2_sqrt: f64,
    eps: f64,
    /// Minus the learning rate over the first moment's bias correction.
    step_size: f64,
}

impl UpdateRule<2> for AdamW {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Coefficients {
        let lr = hyper.lr * schedule;
        let (beta1, beta2) = self.betas;
        let steps = steps as f64;
        Coefficients {
            keep: 1.0 - lr * hyper.weight_decay,
            beta1,
            beta2,
            correction2_sqrt: (1.0 - beta2.powf(steps)).sqrt(),
            eps: self.eps,
            step_size: -(lr / (1.0 - beta1.powf(steps))),
        }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; 2]) -> (C, [C; 2]) + Copy + Sync {
        let [keep, weight1, rest1, beta2, weight2] =
            [c.keep, 1.0 - c.beta1, c.beta1, c.beta2, 1.0 - c.beta2].map(C::from_f64);
        let [correction2_sqrt, eps, step_size] =
            [c.correction2_sqrt, c.eps, c.step_size].map(C::from_f64);
        let small = 1.0 - c.beta1 < 0.5;
        move |p, g, [m, v]| {
            let p = p * keep;
            // As torch.lerp: interpolate from the nearer end.
            let m = if small { m + weight1 * (g - m) } else { g - (g - m) * rest1 };
            let v = v * beta2 + weight2 * g * g;
            let denominator = v.sqrt() / correction2_sqrt + eps;
            (p + step_size * m / denominator, [m, v])
        }
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        g: Tensor,
        [old_m, old_v]: &[Tensor; 2],
    ) -> Result<(Tensor, [Tensor; 2])> {
        let p = (values * c.keep)?;
        let weight1 = 1.0 - c.beta1;
        let difference = (&g - old_m)?;
        let m = if weight1 < 0.5 {
            (old_m + (difference * weight1)?)?
        } else {
            (&g - (difference * c.beta1)?)?
        };
        let v = ((old_v * c.beta2)? + (g.sqr()? * (1.0 - c.beta2))?)?;
        let denominator: Tensor = ((v.sqrt()? / c.correction2_sqrt)? + c.eps)?;
        let p = (p + ((&m * c.step_size)? / denominator)?)?;
        Ok((p, [m, v]))
    }

    #[cfg(feature = "cuda")]
    fn kernel_coefficients(c: Coefficients) -> Option<(f64, f64)> {
        Some((c.step_size, c.keep))
    }

    #[cfg(feature = "cuda")]
    fn launch(updates: Updates<2>, c: Coefficients, scale: &StepScale) -> Result<()> {
        let Coefficients { beta1, beta2, correction2_sqrt, eps, .. } = c;
        let adamw = fulgurite_kernels::plans::AdamW { beta1, beta2, correction2_sqrt, eps };
        super::gpu::adamw(updates, adamw, scale)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::Device;
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::GradScale;
    use crate::elementwise_optimizer::{composed, fused};
    use crate::state::{OptimizerState, ParamUpdate};
    use crate::testing::*;
    use fulgurite_tensor::autograd::storage;

    const NAMES: [(&str, usize); 3] =
        [("layers.0.up.weight", 40_000), ("layers.0.up.bias", 7), ("norm.weight", 33)];

    /// The paper's formulas in f64: the values after `steps` steps.
    fn reference(config: &AdamW, hyper: Hyper, name: (&str, usize), steps: u64) -> Vec<f64> {
        reference_scaled(config, hyper, name, steps, &GradScale::default())
    }

    fn reference_scaled(
        config: &AdamW,
        hyper: Hyper,
        (fqn, n): (&str, usize),
        steps: u64,
        scale: &GradScale,
    ) -> Vec<f64> {
        let (beta1, beta2) = config.betas;
        let mut p = numbers(fqn, 0, n);
        let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
        for step in 1..=steps {
            let lr = hyper.lr * schedule(step);
            let t = step as i32;
            for (i, g) in numbers(fqn, step, n).into_iter().enumerate() {
                let mut g = g * scale.factor;
                if let Some(bound) = scale.clip_value {
                    g = g.max(-bound).min(bound);
                }
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let m_hat = m[i] / (1.0 - beta1.powi(t));
                let v_hat = v[i] / (1.0 - beta2.powi(t));
                let decayed = p[i] - lr * hyper.weight_decay * p[i];
                p[i] = decayed - lr * m_hat / (v_hat.sqrt() + config.eps);
            }
        }
        p
    }

    #[test]
    fn follows_the_formulas_with_groups() {
        let config = AdamW {
            lr: 0.02,
            weight_decay: 0.3,
            no_decay: vec!["*norm*".into(), "bias".into()],
            groups: vec![ParamGroupConfig {
                patterns: vec!["norm.weight".into()],
                lr: Some(0.1),
                weight_decay: Some(0.5), // overridden by no_decay
            }],
            ..AdamW::default()
        };
        let hypers = [(0.02, 0.3), (0.02, 0.0), (0.1, 0.0)]
            .map(|(lr, weight_decay)| Hyper { lr, weight_decay });
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-13)] {
            let parameters = parameters(&NAMES, dtype);
            let mut optimizer = config.build(&parameters).unwrap();
            train(&mut *optimizer, 10, &GradScale::default());
            for ((p, name), hyper) in parameters.iter().zip(NAMES).zip(hypers) {
                assert_close(&values(p), &reference(&config, hyper, name, 10), tolerance);
            }
        }
    }

    #[test]
    fn gradients_are_scaled_and_clipped() {
        let config = AdamW::default();
        let hyper = Hyper { lr: 1e-3, weight_decay: 0.01 };
        let scale = GradScale { factor: 0.5, clip_value: Some(0.25) };
        let parameters = parameters(&NAMES, DType::F32);
        train(&mut *config.build(&parameters).unwrap(), 10, &scale);
        for (p, name) in parameters.iter().zip(NAMES) {
            assert_close(&values(p), &reference_scaled(&config, hyper, name, 10, &scale), 1e-6);
        }
        // Adam depends little on the factor, but much on the clipping.
        let unclipped = reference(&config, hyper, NAMES[0], 10);
        assert!(values(&parameters[0]).iter().zip(&unclipped).any(|(a, b)| (a - b).abs() > 1e-4));
    }

    #[test]
    fn half_parameters_have_f32_state() {
        let parameters = parameters(&NAMES[..1], DType::BF16);
        let start = values(&parameters[0]);
        let config = AdamW { lr: 0.1, ..AdamW::default() };
        let mut optimizer = config.build(&parameters).unwrap();
        assert_eq!(optimizer.state_tensors().unwrap()[0].values.dtype(), DType::F32);
        train(&mut *optimizer, 1, &GradScale::default());
        let grads = numbers(NAMES[0].0, 1, NAMES[0].1);
        for ((before, after), g) in start.iter().zip(values(&parameters[0])).zip(grads) {
            // The first step moves by the learning rate in the gradient's direction.
            let expected = before * (1.0 - 0.001) - 0.1 * g.signum();
            assert!((after - expected).abs() <= 0.005 * expected.abs().max(0.1) + 1e-3);
        }
    }

    #[test]
    fn the_bits_ignore_the_number_of_threads() {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let parameters = parameters(&NAMES, DType::F32);
            let mut optimizer = AdamW::default().build(&parameters).unwrap();
            pool.install(|| train(&mut *optimizer, 3, &GradScale::default()));
            values(&parameters[0])
        };
        assert_eq!(with(1), with(5));
    }

    /// The operations of devices without a fused pass agree with the CPU's fused pass.
    #[test]
    fn composed_and_fused_agree() {
        let scale = GradScale { factor: 0.7, clip_value: Some(0.6) };
        let rounded = [StateDtype::F32, StateDtype::Bf16];
        for (beta1, state_dtype) in [0.9, 0.3].into_iter().flat_map(|b| rounded.map(|s| (b, s))) {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                let c = Coefficients {
                    keep: 0.99,
                    beta1,
                    beta2: 0.99,
                    correction2_sqrt: 0.3,
                    eps: 1e-6,
                    step_size: -0.05,
                };
                let make = || {
                    let parameters = parameters(&NAMES[2..], dtype);
                    set_grads(&parameters, 1);
                    let hyper = Hyper { lr: 0.0, weight_decay: 0.0 };
                    let mut state =
                        OptimizerState::new(&parameters, vec![hyper], ["m", "v"], state_dtype)
                            .unwrap();
                    let update = state.update_of(0, 1).unwrap().unwrap();
                    let state = numbers("state", 0, 33);
                    let state = Tensor::from_vec(state, 33, &Device::Cpu).unwrap();
                    storage::copy_from(&update.state[0], &state).unwrap();
                    storage::copy_from(&update.state[1], &state.sqr().unwrap()).unwrap();
                    update
                };
                let (one, other) = (make(), make());
                let state = one.state[0].dtype();
                assert_eq!(state == DType::BF16, state_dtype == StateDtype::Bf16);
                fused::<AdamW, 2>(&one, c, &scale).unwrap();
                composed::<AdamW, 2>(&other, c, &scale.into()).unwrap();
                let all = |w: &ParamUpdate<2>| {
                    let tensors = [&w.values, &w.state[0], &w.state[1]];
                    tensors.map(|t| t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap())
                };
                for (one, other) in all(&one).iter().zip(all(&other)) {
                    assert_close(one, &other, if dtype == DType::BF16 { 0.008 } else { 1e-6 });
                }
                let (late, skipped) = (make(), make());
                composed::<AdamW, 2>(&late, c, &late_scale(&scale, 1.0)).unwrap();
                assert_eq!(all(&late), all(&other), "{dtype:?} {state_dtype:?}");
                composed::<AdamW, 2>(&skipped, c, &late_scale(&scale, f64::NAN)).unwrap();
                assert_eq!(all(&skipped), all(&make()), "{dtype:?} {state_dtype:?}");
            }
        }
    }

    #[test]
    fn no_gradient_or_elements_means_no_update() {
        let parameters = parameters(&[("a", 3), ("b", 0), ("c", 2)], DType::F32);
        let mut optimizer = AdamW::default().build(&parameters).unwrap();
        let before = values(&parameters[0]);
        set_grads(&parameters, 1);
        parameters[0].set_local_grad(None);
        optimizer.step(&GradScale::default()).unwrap();
        assert_eq!(values(&parameters[0]), before);
        assert_ne!(values(&parameters[2]), numbers("c", 0, 2));
        let state = optimizer.state_tensors().unwrap();
        let listed: Vec<_> =
            state.iter().map(|s| (s.fqn.as_str(), s.name, s.values.elem_count())).collect();
        assert_eq!(
            listed,
            [
                ("a", "exp_avg", 3),
                ("a", "exp_avg_sq", 3),
                ("b", "exp_avg", 0),
                ("b", "exp_avg_sq", 0),
                ("c", "exp_avg", 2),
                ("c", "exp_avg_sq", 2),
            ]
        );
    }

    #[test]
    fn restored_state_continues_bit_for_bit() {
        let (one, other) = (parameters(&NAMES, DType::F32), parameters(&NAMES, DType::F32));
        let mut first = AdamW::default().build(&one).unwrap();
        train(&mut *first, 4, &GradScale::default());
        let mut second = AdamW::default().build(&other).unwrap();
        second.load_scalars(&first.scalars()).unwrap();
        let pairs = first.state_tensors().unwrap().into_iter();
        for (from, to) in pairs.zip(second.state_tensors().unwrap()) {
            assert_eq!((&from.fqn, from.name, &from.region), (&to.fqn, to.name, &to.region));
            storage::copy_from(&to.values, &from.values).unwrap();
        }
        for (from, to) in one.iter().zip(&other) {
            let (from, to) = (from.local().unwrap().values, to.local().unwrap().values);
            storage::copy_from(&to, &from).unwrap();
        }
        train(&mut *first, 2, &GradScale::default());
        train(&mut *second, 2, &GradScale::default());
        for (a, b) in one.iter().zip(&other) {
            assert_eq!(values(a), values(b));
        }
    }

    #[test]
    fn configured_by_type() {
        let text = "type = \"adamw\"\nlr = 0.5\nbetas = [0.8, 0.95]\n\
                    groups = [{ patterns = [\"bias\"], weight_decay = 0 }]";
        let config: Box<dyn OptimizerConfig> = toml::from_str(text).unwrap();
        let expected = AdamW {
            lr: 0.5,
            betas: (0.8, 0.95),
            groups: vec![ParamGroupConfig {
                patterns: vec!["bias".into()],
                lr: None,
                weight_decay: Some(0.0),
            }],
            ..AdamW::default()
        };
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
        let written = toml::to_string(&config).unwrap();
        let again: Box<dyn OptimizerConfig> = toml::from_str(&written).unwrap();
        assert_eq!(format!("{again:?}"), format!("{expected:?}"));
        let error = toml::from_str::<Box<dyn OptimizerConfig>>("type = \"adamw\"\nbeta = 1");
        assert_says!(error.unwrap_err().message().to_owned(), "unknown field `beta` … `betas` …");
    }

    #[test]
    fn mistakes_are_explained() {
        let parameters = parameters(&NAMES, DType::F32);
        let message = |config: AdamW| match config.build(&parameters) {
            Ok(_) => panic!("{config:?} was accepted"),
            Err(error) => error.to_string(),
        };
        let base = AdamW::default;
        assert_says!(message(AdamW { lr: -1.0, ..base() }), "optimizer.lr … or more, got -1.0");
        assert_says!(
            message(AdamW { betas: (0.9, 1.0), ..base() }),
            "optimizer.betas[1] … less than 1, got 1.0"
        );
        assert_says!(message(AdamW { eps: f64::NAN, ..base() }), "optimizer.eps … more, got NaN");
        assert_says!(message(AdamW { eps: 3.5e38, ..base() }), "optimizer.eps … at most … 3.5e38");
        assert_says!(
            message(AdamW { weight_decay: -0.1, ..base() }),
            "optimizer.weight_decay … zero or more, got -0.1"
        );
        assert_says!(
            message(AdamW { no_decay: vec!["up.scale".into()], ..base() }),
            r#"optimizer.no_decay: the pattern "up.scale" matches no parameter …"#
        );
        let group = |patterns: &[&str], lr| ParamGroupConfig {
            patterns: patterns.iter().map(|&p| p.into()).collect(),
            lr,
            weight_decay: None,
        };
        let groups = vec![group(&["bias"], None), group(&[], None)];
        assert_says!(
            message(AdamW { groups, ..base() }),
            "optimizer.groups[1].patterns is empty …"
        );
        let groups = vec![group(&["bias"], Some(-2.0))];
        assert_says!(message(AdamW { groups, ..base() }), "optimizer.groups[0].lr … zero … -2.0");
    }

    #[test]
    fn mismatched_gradients_and_state_are_explained() {
        let parameters = parameters(&NAMES[1..2], DType::F32);
        let mut optimizer = AdamW::default().build(&parameters).unwrap();
        let short = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        parameters[0].set_local_grad(Some(short));
        let mut message = |scale| optimizer.step(&scale).unwrap_err().to_string();
        assert_says!(message(GradScale::default()), "parameter `layers.0.up.bias` … 3 … shard 7 …");
        assert_says!(
            message(GradScale { factor: 1.0, clip_value: Some(-1.0) }),
            "trainer.gradient_clip_val … zero or more … by value, got -1"
        );
        let error = optimizer.load_scalars(&BTreeMap::from([("rho".to_owned(), 1.0)]));
        assert_says!(error.unwrap_err(), "the optimizer's … has no `step` (it has: rho) …");
    }
}
