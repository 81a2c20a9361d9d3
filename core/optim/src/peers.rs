//! Optimizers against the values of `tests/fixtures/make_peers.py`.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use super::testing::{shaped, values};
use super::*;
use fulgurite_module::parameter::Parameter;

type Values = BTreeMap<String, Vec<f64>>;

#[derive(Deserialize)]
struct Peers {
    shapes: BTreeMap<String, Vec<usize>>,
    start: Values,
    /// By step.
    grads: Vec<Values>,
    /// Values after each third step, by case.
    cases: BTreeMap<String, Vec<Values>>,
}

impl Peers {
    fn read() -> Self {
        serde_json::from_str(include_str!("../tests/fixtures/peers.json")).unwrap()
    }

    /// Trains the case's parameters as the script does. Returns the largest distance of an element.
    fn distance(&self, case: &str, dtype: DType, config: &dyn OptimizerConfig) -> f64 {
        let recorded = &self.cases[case];
        let declared: Vec<_> = recorded[0]
            .keys()
            .map(|name| (name.as_str(), self.shapes[name].clone(), self.start[name].clone()))
            .collect();
        let parameters = shaped(&declared, dtype);
        let mut optimizer = config.build(&parameters).unwrap();
        let mut distance = 0f64;
        for (step, grads) in (1..).zip(&self.grads) {
            set_grads(&parameters, step, grads);
            optimizer.set_schedule_factor(schedule(step));
            optimizer.step(&GradScale::default()).unwrap();
            if step % 3 != 0 {
                continue;
            }
            // The cases of evaluations have their weights.
            let evaluated = case.ends_with("_x");
            assert_eq!(optimizer.set_training(!evaluated).unwrap(), evaluated);
            for parameter in &parameters {
                let expected = &recorded[step as usize / 3 - 1][parameter.fqn()];
                let found = values(parameter);
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    distance = distance.max((found - expected).abs() / expected.abs().max(1.0));
                }
            }
            optimizer.set_training(true).unwrap();
        }
        distance
    }
}

fn set_grads(parameters: &[Parameter], step: u64, grads: &Values) {
    for parameter in parameters {
        let grad = grads[parameter.fqn()].clone();
        let n = grad.len();
        let grad = Tensor::from_vec(grad, n, &Device::Cpu).unwrap();
        let grad = grad.to_dtype(parameter.dtype()).unwrap();
        // The third step has no gradient of the bias.
        parameter.set_local_grad(((step, parameter.fqn()) != (3, "bias")).then_some(grad));
    }
}

fn schedule(step: u64) -> f64 {
    1.0 - 0.05 * (step - 1) as f64
}

#[test]
fn twelve_steps_equal_the_peers() {
    let peers = Peers::read();
    let adam = Adam { lr: 0.02, ..Adam::default() };
    let lion = Lion { lr: 0.02, ..Lion::default() };
    let rmsprop = RmsProp { lr: 0.02, ..RmsProp::default() };
    let adagrad = Adagrad { lr: 0.1, ..Adagrad::default() };
    let muon = Muon { lr: 0.05, ..Muon::default() };
    let free = ScheduleFreeAdamW { lr: 0.02, ..ScheduleFreeAdamW::default() };
    let free_options = ScheduleFreeAdamW {
        betas: (0.7, 0.95),
        eps: 1e-4,
        weight_decay: 0.3,
        warmup_steps: 4,
        r: 1.0,
        weight_lr_power: 1.5,
        ..free.clone()
    };
    let cases: Vec<(&str, Box<dyn OptimizerConfig>)> = vec![
        ("adam", Box::new(adam.clone())),
        ("adam_decay", Box::new(Adam { betas: (0.4, 0.9), eps: 1e-3, weight_decay: 0.3, ..adam })),
        ("lion", Box::new(lion.clone())),
        ("lion_decay", Box::new(Lion { betas: (0.8, 0.6), weight_decay: 0.3, ..lion })),
        ("rmsprop", Box::new(rmsprop.clone())),
        (
            "rmsprop_centered",
            Box::new(RmsProp { alpha: 0.4, centered: true, weight_decay: 0.3, ..rmsprop.clone() }),
        ),
        (
            "rmsprop_momentum",
            Box::new(RmsProp { alpha: 0.9, momentum: 0.8, eps: 1e-3, ..rmsprop.clone() }),
        ),
        ("rmsprop_both", Box::new(RmsProp { momentum: 0.8, centered: true, ..rmsprop })),
        ("adagrad", Box::new(adagrad.clone())),
        (
            "adagrad_decay",
            Box::new(Adagrad {
                lr_decay: 0.2,
                initial_accumulator_value: 0.5,
                weight_decay: 0.3,
                eps: 1e-3,
                ..adagrad
            }),
        ),
        ("adafactor", Box::new(Adafactor { lr: 0.05, ..Adafactor::default() })),
        (
            "adafactor_options",
            Box::new(Adafactor {
                lr: 0.5,
                beta2_decay: -0.5,
                eps1: Some(1e-4),
                eps2: 0.3,
                d: 2.0,
                weight_decay: 0.1,
                ..Adafactor::default()
            }),
        ),
        ("muon", Box::new(muon.clone())),
        (
            "muon_rms",
            Box::new(Muon {
                adjust_lr_fn: AdjustLr::MatchRmsAdamw,
                nesterov: false,
                ..muon.clone()
            }),
        ),
        (
            "muon_options",
            Box::new(Muon {
                momentum: 0.7,
                ns_steps: 3,
                ns_coefficients: (2.0, -1.5, 0.5),
                weight_decay: 0.4,
                eps: 1e-3,
                ..muon
            }),
        ),
        ("schedule_free", Box::new(free.clone())),
        ("schedule_free_x", Box::new(free)),
        ("schedule_free_options", Box::new(free_options.clone())),
        ("schedule_free_options_x", Box::new(free_options)),
    ];
    for (case, config) in &cases {
        // torch computed in f32.
        for (dtype, limit) in [(DType::F32, 1e-6), (DType::F64, 3e-6)] {
            let distance = peers.distance(case, dtype, &**config);
            assert!(distance < limit, "{case} {dtype:?}: {distance:e}");
        }
    }
    // The distance shows other options.
    let others = [("adam", &cases[1].1), ("adafactor", &cases[11].1), ("muon", &cases[13].1)];
    for (case, config) in others {
        assert!(peers.distance(case, DType::F32, &**config) > 1e-3, "{case}");
    }
}
