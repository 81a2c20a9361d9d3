//! Mixtures of experts with a capacity: dropped choices, and gradients without them.

use fulgurite_core::autograd::no_grad;
use fulgurite_core::module::{ForwardScope, Module as _};
use fulgurite_core::nn::{MixtureOfExperts, MixtureOfExpertsConfig, force_portable};
use proptest::prelude::*;

use super::experts::{by_definition, layer_with_correction, variants};
use super::harness::{Params, analytic, assert_close, check, flat, randn};

fn training() -> ForwardScope {
    ForwardScope { training: true, ..ForwardScope::default() }
}

fn limited(config: &MixtureOfExpertsConfig, factor: f64) -> MixtureOfExpertsConfig {
    MixtureOfExpertsConfig { capacity_factor: Some(factor), ..*config }
}

#[test]
fn drops_match_finite_differences() {
    let _scope = training().enter();
    let one = MixtureOfExpertsConfig::new([6, 4], 3, 1);
    for config in variants().iter().chain([&one]) {
        let (layer, params) = layer_with_correction(&limited(config, 0.6));
        check(&[randn("x", &[2, 7, 6])], &params, &|x| layer.forward(&x[0]));
        assert!(layer.load().take_dropped().unwrap() > 0.0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn limited_experts_equal_their_definition(
        variant in 0usize..7,
        sequences in 1usize..4,
        time in 1usize..20,
        factor in 0.05..2.0,
    ) {
        let _scope = training().enter();
        let config = limited(&variants()[variant], factor);
        let (layer, params) = layer_with_correction(&config);
        let x = randn("x", &[sequences, time, 6]);
        let expected = flat(&by_definition(&config, &params, &x).unwrap());
        assert_close("output", &flat(&layer.forward(&x).unwrap()), &expected, 1e-12);
        let _portable = force_portable();
        assert_close("portable", &flat(&layer.forward(&x).unwrap()), &expected, 1e-12);
    }
}

/// All tokens choose the only expert.
#[test]
fn an_expert_takes_the_first_rows() {
    let _scope = training().enter();
    let config = MixtureOfExpertsConfig::new([6, 4], 1, 1);
    let (layer, _params) = layer_with_correction(&limited(&config, 0.5));
    let x = randn("x", &[2, 7, 6]);
    let y = layer.forward(&x).unwrap();
    assert_eq!(layer.load().take(), [14.0]);
    assert_eq!(layer.load().take_dropped(), Some(6.0));
    assert_eq!(layer.load().take_dropped(), Some(0.0));
    let dropless = ForwardScope::default().run(|| layer.forward(&x)).unwrap();
    for sequence in 0..2 {
        let [y, dropless] = [&y, &dropless].map(|y| flat(&y.get(sequence).unwrap()));
        assert_eq!(y[..4 * 6], dropless[..4 * 6]);
        assert_eq!(y[4 * 6..], [0.0; 3 * 6]);
    }
}

#[test]
fn large_capacities_are_dropless_to_the_bit() {
    let _scope = training().enter();
    for config in variants() {
        // A single row has room, whatever the factor.
        for (shape, factor) in [(&[2, 7, 6][..], 6.0), (&[3, 1, 6], 0.1), (&[5, 6], 6.0)] {
            let x = [randn("x", shape)];
            let run = |config: &MixtureOfExpertsConfig| {
                let (layer, params): (MixtureOfExperts, Params) = layer_with_correction(config);
                format!("{:?}", analytic(&x, &params, &|x| layer.forward(&x[0])))
            };
            assert_eq!(run(&limited(&config, factor)), run(&config), "{shape:?}");
        }
    }
}

#[test]
fn evaluation_drops_nothing() {
    let x = randn("x", &[2, 7, 6]);
    for config in variants() {
        let outputs = |config: &MixtureOfExpertsConfig| {
            let (layer, _params) = layer_with_correction(config);
            let evaluated = ForwardScope::default().run(|| layer.forward(&x)).unwrap();
            let outside = {
                let _no_grad = no_grad();
                layer.forward(&x).unwrap()
            };
            let dropped = layer.load().take_dropped();
            assert_eq!(dropped, config.capacity_factor.map(|_| 0.0));
            let trained = training().run(|| layer.forward(&x)).unwrap();
            [evaluated, outside, trained].map(|y| flat(&y))
        };
        let (dropless, found) = (outputs(&config), outputs(&limited(&config, 0.3)));
        assert_eq!(found[..2], dropless[..2]);
        assert_ne!(found[2], dropless[2]);
    }
}

#[test]
fn a_capacity_needs_a_scope() {
    let config = limited(&MixtureOfExpertsConfig::new([6, 4], 4, 2), 1.0);
    let (layer, _params) = layer_with_correction(&config);
    let error = layer.forward(&randn("x", &[1, 3, 6])).unwrap_err().to_string();
    assert!(error.contains("module `mlp`: is called outside of any forward scope"), "{error}");
}
