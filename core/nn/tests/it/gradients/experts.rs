//! Mixtures of experts: gradients, against one MLP for each row and expert, and the balance of
//! experts.

use candle_core::{D, DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, Quantization};
use fulgurite_core::nn::{
    Activation, MixtureOfExperts, MixtureOfExpertsConfig, force_portable, functional,
    load_balancing_loss,
};
use fulgurite_core::quantization::WeightFormat;
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
                normalize,
                activation: Activation::GeluTanh,
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

/// The layer by its definition, one MLP for each row and expert.
fn by_definition(config: &MixtureOfExpertsConfig, params: &Params, x: &Tensor) -> Result<Tensor> {
    let rows = x.flatten_to(D::Minus2)?;
    let logits = rows.matmul(&value(params, "gate.weight").t()?)?;
    let probabilities = functional::softmax_last_dim(&logits)?.to_vec2::<f64>()?;
    let stack = |name: &str, e: usize| value(params, &format!("experts.{name}.weight")).get(e);
    let mut outputs = Vec::new();
    for (row, probabilities) in probabilities.iter().enumerate() {
        let mut order: Vec<usize> = (0..config.num_experts).collect();
        order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]));
        order.truncate(config.experts_per_row);
        let total: f64 = order.iter().map(|e| probabilities[*e]).sum();
        let x = rows.narrow(0, row, 1)?;
        let mut y = x.zeros_like()?;
        for e in order {
            let gate = functional::silu(&x.matmul(&stack("gate_proj", e)?.t()?)?)?;
            let up = x.matmul(&stack("up_proj", e)?.t()?)?;
            let own = (gate * up)?.matmul(&stack("down_proj", e)?.t()?)?;
            let weight = probabilities[e] / if config.normalize { total } else { 1.0 };
            y = (y + (own * weight)?)?;
        }
        outputs.push(y);
    }
    Ok(Tensor::cat(&outputs, 0)?.reshape(x.shape())?)
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
        let config = MixtureOfExpertsConfig { normalize, ..sizes };
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
    insta::assert_snapshot!(error([0, 4], 4, 2), @"module `mlp`: hidden must be at least 1, got 0");
    insta::assert_snapshot!(error([4, 4], 2, 3), @"module `mlp`: a row cannot use 3 of 2 experts; choose at most as many as there are");
    let (layer, _params) = layer(&MixtureOfExpertsConfig::new([6, 4], 4, 2), DType::F64);
    insta::assert_snapshot!(layer.forward(&randn("x", &[2, 5])).unwrap_err(), @"module `mlp.gate`: expected a last dimension of 6, got [2, 5]");
    let init = ModuleInit {
        frozen: vec!["mlp".to_owned()],
        quantization: Some(Quantization::new(WeightFormat::Nf4 { block_size: 2 })),
        ..ModuleInit::default()
    };
    let config = MixtureOfExpertsConfig::new([4, 4], 2, 1);
    let error = MixtureOfExperts::new(&ModuleBuilder::new(init).pp("mlp"), &config).unwrap_err();
    insta::assert_snapshot!(error, @r#"module `mlp.experts.gate_proj`: holds the weights of all experts, which cannot be quantised; leave them out with `trainer.quantization.exclude = ["lm_head", "experts"]`"#);
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
    insta::assert_snapshot!(load_balancing_loss(std::slice::from_ref(&equal), 5, 1.0).unwrap_err(), @"rows cannot use 5 of 4 experts; expected from 1 to 4");
    insta::assert_snapshot!(load_balancing_loss(&[], 1, 1.0).unwrap_err(), @"the balance of experts follows from the logits [rows, experts] of at least one mixture of experts");
}
