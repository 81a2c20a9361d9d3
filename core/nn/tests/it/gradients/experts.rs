//! Mixtures of experts: gradients, against one MLP for each row and expert, and the balance of
//! experts.

use candle_core::{D, DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, Quantization};
use fulgurite_core::nn::{
    Activation, ClampedSwiGlu, CorrectionBias, ExpertActivation, ExpertGroups, MixtureOfExperts,
    MixtureOfExpertsConfig, RouterConfig, RouterScore, SharedExpertConfig, force_portable,
    functional, load_balancing_loss,
};
use fulgurite_core::quantization::WeightFormat;
use fulgurite_test_message::assert_says;
use proptest::prelude::*;

use super::harness::{Params, analytic, assert_close, builder, check, flat, randn};

fn layer(config: &MixtureOfExpertsConfig, dtype: DType) -> (MixtureOfExperts, Params) {
    let b = builder(dtype);
    let layer = MixtureOfExperts::new(&b.pp("mlp"), config).unwrap();
    (layer, Params::new(&b))
}

fn value(params: &Params, name: &str) -> Tensor {
    let slot = params.slots.iter().find(|slot| slot.fqn() == format!("mlp.{name}")).unwrap();
    slot.parameter().value().unwrap().reshape(slot.global_shape()).unwrap()
}

#[test]
fn gradients_are_finite_differences() {
    for (experts, per_row, normalize) in [(4, 2, true), (5, 3, false), (3, 3, true), (3, 1, false)]
    {
        for shape in [&[2, 5, 6][..], &[1, 6]] {
            let config = MixtureOfExpertsConfig {
                router: RouterConfig { normalize, ..RouterConfig::default() },
                activation: Activation::GeluTanh.into(),
                ..MixtureOfExpertsConfig::new([6, 4], experts, per_row)
            };
            let (layer, params) = layer(&config, DType::F64);
            check(&[randn("x", shape)], &params, &|x| layer.forward(&x[0]));
        }
    }
}

/// The balance reaches router and input through the logits, beside the output.
#[test]
fn balance_has_gradients_of_finite_differences() {
    let (layer, params) = layer(&MixtureOfExpertsConfig::new([6, 4], 4, 2), DType::F64);
    check(&[randn("x", &[2, 4, 6])], &params, &|x| {
        let (y, logits) = layer.forward_with_logits(&x[0])?;
        let (_, again) = layer.forward_with_logits(&y)?;
        let balance = load_balancing_loss(&[logits, again], 2, 3.0)?;
        Ok((y.sqr()?.sum_all()? + balance.sqr()?)?)
    });
}

/// Every part that a mixture can have.
pub(super) fn variants() -> Vec<MixtureOfExpertsConfig> {
    let sizes = MixtureOfExpertsConfig::new([6, 4], 6, 2);
    let router = RouterConfig::default();
    let sigmoid = RouterConfig { score: RouterScore::Sigmoid, scale: 2.5, ..router };
    let correction = Some(CorrectionBias { update_rate: 0.0 });
    let groups = Some(ExpertGroups { count: 3, per_row: 2 });
    let clamped = ExpertActivation::Clamped(ClampedSwiGlu { alpha: 1.702, limit: 0.5 });
    let shared = |gated| Some(SharedExpertConfig { intermediate_size: 5, gated });
    let with = |router| MixtureOfExpertsConfig { router, ..sizes };
    vec![
        with(sigmoid),
        with(RouterConfig { normalize: false, ..sigmoid }),
        with(RouterConfig { correction, groups, ..sigmoid }),
        with(RouterConfig { correction, groups, scale: 0.3, ..router }),
        MixtureOfExpertsConfig { shared: shared(false), ..sizes },
        MixtureOfExpertsConfig { shared: shared(true), ..with(sigmoid) },
        MixtureOfExpertsConfig {
            bias: true,
            activation: clamped,
            ..with(RouterConfig { bias: true, ..router })
        },
    ]
}

#[test]
fn variants_have_gradients_of_finite_differences() {
    for config in variants() {
        let (layer, params) = layer_with_correction(&config);
        let run = check(&[randn("x", &[2, 5, 6])], &params, &|x| layer.forward(&x[0]));
        let _portable = force_portable();
        let portable = analytic(&[randn("x", &[2, 5, 6])], &params, &|x| layer.forward(&x[0]));
        assert_close("portable", &portable.output, &run.output, 1e-12);
        for (slot, (found, expected)) in
            params.slots.iter().zip(portable.params.iter().zip(&run.params))
        {
            let (found, expected) = (found.as_ref().unwrap(), expected.as_ref().unwrap());
            assert_close(slot.fqn(), found, expected, 1e-10);
        }
    }
}

/// A layer whose correction bias differs between experts.
pub(super) fn layer_with_correction(config: &MixtureOfExpertsConfig) -> (MixtureOfExperts, Params) {
    let b = builder(DType::F64);
    let layer = MixtureOfExperts::new(&b.pp("mlp"), config).unwrap();
    let params = Params::new(&b);
    for buffer in params.tree.buffers() {
        let values: Vec<f64> = (0..config.num_experts).map(|e| 0.2 * (e % 3) as f64).collect();
        buffer
            .overwrite(&Tensor::from_vec(values, config.num_experts, &Device::Cpu).unwrap())
            .unwrap();
    }
    (layer, params)
}

fn descending(scores: &[f64], among: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|i| among(*i)).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order
}

/// The layer in training by its definition, one MLP for each row and expert.
pub(super) fn by_definition(
    config: &MixtureOfExpertsConfig,
    params: &Params,
    x: &Tensor,
) -> Result<Tensor> {
    let rows = x.flatten_to(D::Minus2)?;
    let RouterConfig { score, normalize, scale, groups, .. } = config.router;
    let linear = |x: &Tensor, name: &str, e: Option<usize>| -> Result<Tensor> {
        let of = |kind: &str| {
            let whole = value(params, &format!("{name}.{kind}"));
            e.map_or(Ok(whole.clone()), |e| whole.get(e))
        };
        let y = x.matmul(&of("weight")?.t()?)?;
        let has_bias = params.slots.iter().any(|slot| slot.fqn() == format!("mlp.{name}.bias"));
        Ok(if has_bias { y.broadcast_add(&of("bias")?)? } else { y })
    };
    let logits = linear(&rows, "gate", None)?;
    let scores = match score {
        RouterScore::Softmax => functional::softmax_last_dim(&logits)?,
        RouterScore::Sigmoid => (logits.neg()?.exp()? + 1.0)?.recip()?,
    };
    let scores = scores.to_vec2::<f64>()?;
    let correction: Vec<f64> = match params.tree.buffers().first() {
        Some(buffer) => buffer.value()?.to_vec1()?,
        None => vec![0.0; config.num_experts],
    };
    let time = x.dim(D::Minus2)?;
    let even = (time * config.experts_per_row) as f64 / config.num_experts as f64;
    let capacity =
        config.capacity_factor.map_or(usize::MAX, |factor| (factor * even).ceil() as usize);
    let mut taken = Vec::new();
    let mut outputs = Vec::new();
    for (row, scores) in scores.iter().enumerate() {
        let corrected: Vec<f64> = scores.iter().zip(&correction).map(|(a, b)| a + b).collect();
        let groups = groups.unwrap_or(ExpertGroups { count: 1, per_row: 1 });
        let size = config.num_experts / groups.count;
        let of_groups: Vec<f64> = corrected
            .chunks(size)
            .map(|group| descending(group, |_| true).iter().take(2).map(|i| group[*i]).sum())
            .collect();
        let kept = &descending(&of_groups, |_| true)[..groups.per_row];
        let mut order = descending(&corrected, |e| kept.contains(&(e / size)));
        order.truncate(config.experts_per_row);
        let total: f64 = order.iter().map(|e| scores[*e]).sum();
        if row.is_multiple_of(time) {
            taken = vec![0; config.num_experts];
        }
        order.iter().for_each(|e| taken[*e] += 1);
        order.retain(|e| taken[*e] <= capacity);
        let x = rows.narrow(0, row, 1)?;
        let mut y = x.zeros_like()?;
        for e in order {
            let gate = linear(&x, "experts.gate_proj", Some(e))?;
            let up = linear(&x, "experts.up_proj", Some(e))?;
            let hidden = match config.activation {
                ExpertActivation::Gated(_) => (functional::silu(&gate)? * up)?,
                ExpertActivation::Clamped(ClampedSwiGlu { alpha, limit }) => {
                    let gate = gate.minimum(limit)?;
                    let glu = (&gate / ((&gate * -alpha)?.exp()? + 1.0)?)?;
                    ((up.clamp(-limit, limit)? + 1.0)? * glu)?
                }
            };
            let own = linear(&hidden, "experts.down_proj", Some(e))?;
            let weight = scale * scores[e] / if normalize { total } else { 1.0 };
            y = (y + (own * weight)?)?;
        }
        if let Some(shared) = config.shared {
            let gate = functional::silu(&linear(&x, "shared_expert.gate_proj", None)?)?;
            let up = linear(&x, "shared_expert.up_proj", None)?;
            let own = linear(&(gate * up)?, "shared_expert.down_proj", None)?;
            let factor = match shared.gated {
                false => own.ones_like()?,
                true => {
                    let logit = linear(&x, "shared_expert_gate", None)?;
                    (logit.neg()?.exp()? + 1.0)?.recip()?.broadcast_as(own.shape())?
                }
            };
            y = (y + (own * factor)?)?;
        }
        outputs.push(y);
    }
    Ok(Tensor::cat(&outputs, 0)?.reshape(x.shape())?)
}

#[test]
fn variants_equal_their_definition() {
    for config in variants() {
        let (layer, params) = layer_with_correction(&config);
        let x = randn("x", &[1, 40, 6]);
        let expected = flat(&by_definition(&config, &params, &x).unwrap());
        assert_close("output", &flat(&layer.forward(&x).unwrap()), &expected, 1e-12);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn equals_an_mlp_for_each_row_and_expert(
        rows in 1usize..40,
        experts in 1usize..9,
        of in 0.0..1.0,
        normalize: bool,
    ) {
        let per_row = 1 + (of * experts as f64) as usize;
        let sizes = MixtureOfExpertsConfig::new([5, 7], experts, per_row);
        let router = RouterConfig { normalize, ..RouterConfig::default() };
        let config = MixtureOfExpertsConfig { router, ..sizes };
        let (layer, params) = layer(&config, DType::F64);
        let x = randn("x", &[1, rows, 5]);
        let expected = flat(&by_definition(&config, &params, &x).unwrap());
        assert_close("output", &flat(&layer.forward(&x).unwrap()), &expected, 1e-12);
        let _portable = force_portable();
        assert_close("portable", &flat(&layer.forward(&x).unwrap()), &expected, 1e-12);
    }
}

/// Sets the router so that each row of positive numbers chooses this expert.
fn route_to(params: &Params, expert: usize) {
    let gate = params.slots.iter().find(|slot| slot.fqn() == "mlp.gate.weight").unwrap();
    let width = gate.global_shape()[1];
    storage::with_host_mut(gate.compute().unwrap(), |weight: &mut [f64]| {
        for (i, weight) in weight.iter_mut().enumerate() {
            *weight = if i / width == expert { 1.0 } else { -1.0 };
        }
    })
    .unwrap();
}

#[test]
fn one_expert_may_compute_all_rows() {
    let config = MixtureOfExpertsConfig::new([6, 4], 4, 1);
    for rows in [1, 37] {
        let (layer, params) = layer(&config, DType::F64);
        route_to(&params, 2);
        let x = randn("x", &[rows, 6]).abs().unwrap();
        let run = check(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0]));
        let stack = |name: &str| value(&params, &format!("experts.{name}.weight")).get(2)?.t();
        let gate = functional::silu(&x.matmul(&stack("gate_proj").unwrap()).unwrap()).unwrap();
        let up = x.matmul(&stack("up_proj").unwrap()).unwrap();
        let y = (gate * up).unwrap().matmul(&stack("down_proj").unwrap()).unwrap();
        assert_close("output", &run.output, &flat(&y), 1e-12);
        // Experts without rows have a gradient, and it is zero.
        for (slot, grad) in params.slots.iter().zip(&run.params) {
            let grad = grad.as_ref().unwrap();
            if slot.fqn().contains(".experts.") {
                let size = grad.len() / 4;
                for (expert, grad) in grad.chunks(size).enumerate() {
                    assert_eq!(grad.iter().any(|g| *g != 0.0), expert == 2, "{}", slot.fqn());
                }
            }
        }
    }
}

#[test]
fn equal_scores_choose_the_first_experts() {
    let (layer, params) = layer(&MixtureOfExpertsConfig::new([6, 4], 5, 2), DType::F64);
    let gate = params.slots.iter().find(|slot| slot.fqn() == "mlp.gate.weight").unwrap();
    storage::with_host_mut(gate.compute().unwrap(), |weight: &mut [f64]| weight.fill(0.0)).unwrap();
    let x = randn("x", &[3, 6]);
    let run = analytic(&[x], &params, &|x| layer.forward(&x[0]));
    let at = params.slots.iter().position(|slot| slot.fqn().ends_with("down_proj.weight")).unwrap();
    let grad = run.params[at].as_ref().unwrap();
    let has_rows: Vec<bool> =
        grad.chunks(grad.len() / 5).map(|grad| grad.iter().any(|g| *g != 0.0)).collect();
    assert_eq!(has_rows, [true, true, false, false, false]);
}

#[test]
fn threads_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let (layer, params) = layer(&MixtureOfExpertsConfig::new([48, 40], 6, 2), dtype);
        let x = randn("x", &[300, 48]).to_dtype(dtype).unwrap();
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let run = pool
                .install(|| analytic(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0])));
            format!("{run:?}")
        };
        assert_eq!(run(1), run(3));
    }
}

#[test]
fn unusable_sizes_are_refused() {
    let error = |sizes: [usize; 2], experts, per_row| {
        let config = MixtureOfExpertsConfig::new(sizes, experts, per_row);
        MixtureOfExperts::new(&builder(DType::F32).pp("mlp"), &config).unwrap_err()
    };
    assert_says!(error([0, 4], 4, 2), "module `mlp`: hidden must be at least 1, got 0");
    assert_says!(error([4, 4], 2, 3), "module `mlp`: a row cannot use 3 of 2 experts …");
    let (layer, _params) = layer(&MixtureOfExpertsConfig::new([6, 4], 4, 2), DType::F64);
    assert_says!(
        layer.forward(&randn("x", &[2, 5])).unwrap_err(),
        "module `mlp.gate` … last dimension of 6, got [2, 5]"
    );
    let init = ModuleInit {
        frozen: vec!["mlp".to_owned()],
        quantization: Some(Quantization::new(WeightFormat::Nf4 { block_size: 8 })),
        ..ModuleInit::default()
    };
    let config = MixtureOfExpertsConfig::new([4, 4], 2, 1);
    let with_router = |router: RouterConfig| {
        let config = MixtureOfExpertsConfig { router, ..MixtureOfExpertsConfig::new([4, 4], 8, 3) };
        MixtureOfExperts::new(&builder(DType::F32).pp("mlp"), &config).unwrap_err()
    };
    let groups = |count, per_row| {
        let groups = Some(ExpertGroups { count, per_row });
        with_router(RouterConfig { groups, ..RouterConfig::default() })
    };
    assert_says!(groups(3, 1), "module `mlp`: 8 experts cannot be divided into 3 groups …");
    assert_says!(groups(8, 4), "module `mlp` … no two best scores; use at most 4 groups for 8 …");
    assert_says!(groups(4, 5), "module `mlp` … cannot use 5 of 4 groups … 1 to 4");
    assert_says!(groups(4, 1), "module `mlp` … use 3 of the 2 experts … (1 of 2 experts each)");
    let correction = Some(CorrectionBias { update_rate: -1.0 });
    let error = with_router(RouterConfig { correction, ..RouterConfig::default() });
    assert_says!(error, "module `mlp` … correction bias must be at least 0, got -1.0");
    let error = with_router(RouterConfig { scale: 0.0, ..RouterConfig::default() });
    assert_says!(error, "module `mlp`: the factor … must be positive, got 0.0");
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let config = MixtureOfExpertsConfig { capacity_factor: Some(factor), ..config };
        let error = MixtureOfExperts::new(&builder(DType::F32).pp("mlp"), &config).unwrap_err();
        assert!(
            error.to_string().ends_with(&format!("must be positive, got {factor:?}")),
            "{error}"
        );
    }
    let both = MixtureOfExpertsConfig {
        activation: ExpertActivation::Clamped(ClampedSwiGlu { alpha: 1.702, limit: 7.0 }),
        shared: Some(SharedExpertConfig { intermediate_size: 4, gated: false }),
        ..config
    };
    let error = MixtureOfExperts::new(&builder(DType::F32).pp("mlp"), &both).unwrap_err();
    assert_says!(error, "module `mlp`: a shared expert has no clamped SwiGLU …");
    let error = MixtureOfExperts::new(&ModuleBuilder::new(init).pp("mlp"), &config).unwrap_err();
    assert_says!(error, "module `mlp.experts.gate_proj`: has 4 inputs … nf4's blocks of 8 …");
}

#[test]
fn balance_is_least_for_equal_experts() {
    let balance = |logits: &Tensor, per_row: usize| {
        load_balancing_loss(std::slice::from_ref(logits), per_row, 1.0).unwrap()
    };
    let equal = Tensor::zeros((6, 4), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(flat(&balance(&equal, 3)), [3.0]);
    let sure = Tensor::new(&[[100f32, 0.0, 0.0, 0.0]; 5], &Device::Cpu).unwrap();
    assert_eq!(flat(&balance(&sure, 1)), [4.0]);
    assert_says!(
        load_balancing_loss(std::slice::from_ref(&equal), 5, 1.0).unwrap_err(),
        "rows cannot use 5 of 4 experts; expected from 1 to 4"
    );
    assert_says!(load_balancing_loss(&[], 1, 1.0).unwrap_err(), "the balance … at least one …");
}
