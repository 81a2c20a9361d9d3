//! Promises of every element-wise rule: tensor operations agree with the pass over memory, skipped
//! steps change nothing, and restored state continues to the bit.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_test_message::assert_says;

use super::elementwise_optimizer::{UpdateRule, composed, fused};
use super::groups::Hyper;
use super::state::{OptimizerState, ParamUpdate};
use super::testing::*;
use super::*;
use fulgurite_tensor::autograd::storage;

const NAMES: [(&str, usize); 2] = [("up.weight", 20_000), ("up.bias", 5)];
const HYPER: Hyper = Hyper { lr: 0.05, weight_decay: 0.2 };

/// An update with random gradients and state.
fn update<const N: usize>(dtype: DType, state_dtype: StateDtype) -> ParamUpdate<N> {
    let parameters = parameters(&NAMES[..1], dtype);
    set_grads(&parameters, 1);
    let names = ["state"; N];
    let mut state = OptimizerState::new(&parameters, vec![HYPER], names, state_dtype).unwrap();
    let update = state.update_of(0, 1).unwrap().unwrap();
    for (i, state) in (2..).zip(&update.state) {
        let values = numbers("state", i, NAMES[0].1);
        let values = Tensor::from_vec(values, NAMES[0].1, &Device::Cpu).unwrap();
        // The mean square is above the square of the mean.
        let values = match i {
            2 => values.sqr().unwrap() + 4.0,
            _ => values.sqr().unwrap() * 0.1,
        };
        storage::copy_from(state, &values.unwrap()).unwrap();
    }
    update
}

fn all<const N: usize>(update: &ParamUpdate<N>) -> Vec<Vec<f64>> {
    let tensors = std::iter::once(&update.values).chain(&update.state);
    tensors.map(|t| t.to_dtype(DType::F64).unwrap().to_vec1().unwrap()).collect()
}

fn operations_agree<R: UpdateRule<N>, const N: usize>(rule: &R, state_dtype: StateDtype) {
    let scale = GradScale { factor: 0.7, clip_value: Some(0.6) };
    let c = rule.coefficients(HYPER, 0.5, 3);
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let [one, other, late, skipped] = [(); 4].map(|()| update::<N>(dtype, state_dtype));
        let before = all(&one);
        fused::<R, N>(&one, c, &scale).unwrap();
        composed::<R, N>(&other, c, &scale.into()).unwrap();
        // A direction near zero may have either sign, and bf16 rounds either way.
        let tolerance = if dtype == DType::BF16 { 0.008 } else { 1e-6 };
        for (one, other) in all(&one).iter().zip(all(&other)) {
            assert_close(one, &other, tolerance);
        }
        assert_ne!(all(&one), before);
        composed::<R, N>(&late, c, &late_scale(&scale, 1.0)).unwrap();
        assert_eq!(all(&late), all(&other), "{dtype:?}");
        composed::<R, N>(&skipped, c, &late_scale(&scale, f64::NAN)).unwrap();
        assert_eq!(all(&skipped), before, "{dtype:?}");
    }
}

#[test]
fn tensor_operations_agree_with_the_pass() {
    let rmsprop = RmsProp { alpha: 0.9, ..RmsProp::default() };
    let momentum = RmsProp { momentum: 0.8, ..rmsprop.clone() };
    for dtype in [StateDtype::F32, StateDtype::Bf16] {
        operations_agree::<_, 2>(&Adam::default(), dtype);
        operations_agree::<_, 1>(&Lion::default(), dtype);
        operations_agree::<_, 2>(&ScheduleFreeAdamW::default(), dtype);
        operations_agree::<_, 1>(&Adagrad { lr_decay: 0.1, ..Adagrad::default() }, dtype);
        operations_agree::<_, 1>(&rmsprop, dtype);
        operations_agree::<_, 2>(&momentum, dtype);
        operations_agree::<_, 1>(&Muon::default(), dtype);
        operations_agree::<_, 1>(
            &Muon { momentum: 0.4, nesterov: false, ..Muon::default() },
            dtype,
        );
        operations_agree::<_, 0>(&Muon::default(), dtype);
    }
    let centered = |rmsprop| RmsProp { centered: true, ..rmsprop };
    operations_agree::<_, 2>(&centered(RmsProp { alpha: 0.3, ..rmsprop }), StateDtype::F32);
    operations_agree::<_, 3>(&centered(momentum), StateDtype::F32);
}

/// Every optimizer of this crate but AdamW and SGD, whose files have these tests.
fn optimizers() -> Vec<Box<dyn OptimizerConfig>> {
    let both = RmsProp { momentum: 0.8, centered: true, lr: 1e-3, ..RmsProp::default() };
    vec![
        Box::new(Adam { weight_decay: 0.1, ..Adam::default() }),
        Box::new(Lion::default()),
        Box::new(Lion { state_dtype: StateDtype::Bf16, ..Lion::default() }),
        Box::new(RmsProp::default()),
        Box::new(ScheduleFreeAdamW { warmup_steps: 3, r: 1.0, ..ScheduleFreeAdamW::default() }),
        Box::new(both),
        Box::new(Adagrad { initial_accumulator_value: 0.3, ..Adagrad::default() }),
        Box::new(Adafactor::default()),
        Box::new(Muon::default()),
        Box::new(Muon { state_dtype: StateDtype::Bf16, ..Muon::default() }),
    ]
}

fn shapes() -> Vec<(&'static str, Vec<usize>, Vec<f64>)> {
    [("wide", vec![20, 90]), ("tall", vec![64, 8]), ("bias", vec![33])]
        .map(|(name, shape)| {
            let values = numbers(name, 0, shape.iter().product());
            (name, shape, values)
        })
        .to_vec()
}

#[test]
fn restored_state_continues_bit_for_bit() {
    for config in optimizers() {
        let (one, other) = (shaped(&shapes(), DType::F32), shaped(&shapes(), DType::F32));
        let mut first = config.build(&one).unwrap();
        train(&mut *first, 4, &GradScale::default());
        one[2].set_local_grad(None);
        first.step(&GradScale::default()).unwrap();
        let mut second = config.build(&other).unwrap();
        second.load_scalars(&first.scalars()).unwrap();
        let states = first.state_tensors().unwrap();
        for (from, to) in states.iter().zip(second.state_tensors().unwrap()) {
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
            assert_eq!(values(a), values(b), "{config:?}");
        }
    }
}

#[test]
fn skipped_steps_only_count() {
    for config in optimizers() {
        let parameters = shaped(&shapes(), DType::F32);
        let mut optimizer = config.build(&parameters).unwrap();
        train(&mut *optimizer, 2, &GradScale::default());
        let contents = |optimizer: &mut dyn Optimizer| -> Vec<Vec<f64>> {
            let states = optimizer.state_tensors().unwrap().into_iter();
            let states = states.map(|s| s.values.to_dtype(DType::F64).unwrap());
            let states = states.map(|s| s.to_vec1::<f64>().unwrap());
            parameters.iter().map(values).chain(states).collect()
        };
        let before = (contents(&mut *optimizer), optimizer.scalars());
        set_grads(&parameters, 3);
        optimizer.step_by(&late_scale(&GradScale::default(), f64::NAN)).unwrap();
        assert_eq!(contents(&mut *optimizer), before.0, "{config:?}");
        optimizer.load_scalars(&before.1).unwrap();
        optimizer.step_by(&late_scale(&GradScale::default(), 1.0)).unwrap();
        assert_ne!(contents(&mut *optimizer), before.0, "{config:?}");
        assert_eq!(optimizer.scalars()["step"], 3.0);
    }
}

#[test]
fn the_bits_ignore_the_number_of_threads() {
    for config in optimizers() {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let parameters = shaped(&shapes(), DType::F32);
            let mut optimizer = config.build(&parameters).unwrap();
            pool.install(|| train(&mut *optimizer, 3, &GradScale::default()));
            parameters.iter().map(values).collect::<Vec<_>>()
        };
        assert_eq!(with(1), with(5), "{config:?}");
    }
}

#[test]
fn state_bytes_are_those_of_the_state() {
    for config in optimizers() {
        let parameters = shaped(&shapes(), DType::F32);
        let mut optimizer = config.build(&parameters).unwrap();
        let mut bytes = BTreeMap::<String, u128>::new();
        // `y` is the parameter itself while training.
        for state in optimizer.state_tensors().unwrap().into_iter().filter(|s| s.name != "y") {
            let size = state.values.dtype().size_in_bytes() * state.values.elem_count();
            *bytes.entry(state.fqn).or_default() += size as u128;
        }
        for parameter in &parameters {
            assert_eq!(
                bytes[parameter.fqn()],
                config.parameter_state_bytes(parameter),
                "{config:?}"
            );
        }
    }
}

#[test]
fn groups_are_restored() {
    for config in optimizers() {
        let parameters = shaped(&shapes(), DType::F32);
        let mut optimizer = config.build(&parameters).unwrap();
        let mut groups = optimizer.param_groups();
        let named: usize = groups.iter().map(|group| group.params.len()).sum();
        assert_eq!(named, 3, "{config:?}");
        for group in &mut groups {
            group.options.insert("lr".to_owned(), 0.125);
            group.options.insert("weight_decay".to_owned(), 0.5);
        }
        optimizer.load_param_groups(&groups).unwrap();
        assert_eq!(optimizer.learning_rate(), 0.125);
        assert_eq!(optimizer.param_groups(), groups, "{config:?}");
        let adamw = AdamW::default().build(&parameters).unwrap().param_groups();
        assert!(optimizer.load_param_groups(&adamw).is_err(), "{config:?}");
        assert_eq!(optimizer.param_groups(), groups, "{config:?}");
    }
}

#[test]
fn mistakes_are_explained() {
    let parameters = shaped(&shapes(), DType::F32);
    let message = |config: &dyn OptimizerConfig| {
        let error = config.check(&parameters).unwrap_err().to_string();
        assert_eq!(config.build(&parameters).err().unwrap().to_string(), error);
        error
    };
    assert_says!(
        message(&Adam { betas: (1.0, 0.9), ..Adam::default() }),
        "optimizer.betas[0] … less than 1, got 1.0"
    );
    assert_says!(
        message(&Lion { betas: (0.9, 1.5), ..Lion::default() }),
        "optimizer.betas[1] must be from 0 to 1, got 1.5"
    );
    assert_says!(
        message(&Adagrad { lr_decay: -1.0, ..Adagrad::default() }),
        "optimizer.lr_decay … zero or more, got -1.0"
    );
    assert_says!(
        message(&RmsProp { alpha: 1.0, ..RmsProp::default() }),
        "optimizer.alpha … less than 1, got 1.0"
    );
    let rounded = StateDtype::Bf16;
    assert_says!(
        message(&RmsProp { centered: true, state_dtype: rounded, ..RmsProp::default() }),
        r#"optimizer.centered needs optimizer.state_dtype = "f32" …"#
    );
    assert_says!(
        message(&Adafactor { d: 0.5, ..Adafactor::default() }),
        "optimizer.d must be a number of one or more, got 0.5"
    );
    assert_says!(
        message(&Adafactor { beta2_decay: 0.8, ..Adafactor::default() }),
        "optimizer.beta2_decay … zero or less, got 0.8"
    );
    assert_says!(
        message(&Muon { ns_steps: 100, ..Muon::default() }),
        "optimizer.ns_steps must be from 1 to 99, got 100"
    );
    assert_says!(
        message(&Muon { ns_coefficients: (1.0, f64::NAN, 0.0), ..Muon::default() }),
        "optimizer.ns_coefficients[1] … that f32 can hold, got NaN"
    );
    assert_says!(
        message(&Muon { matrices: vec!["bias".into()], ..Muon::default() }),
        r#"optimizer.matrices … the pattern "bias" matches no parameter … wide, tall …"#
    );
    let adamw = MuonAdamW { betas: (0.9, 1.0), ..MuonAdamW::default() };
    assert_says!(message(&Muon { adamw, ..Muon::default() }), "optimizer.adamw.betas[1] … got 1.0");
    let exclude = vec!["wide".to_owned(), "tall".to_owned()];
    assert_says!(
        message(&Muon { exclude, ..Muon::default() }),
        r#"optimizer.type = "muon" … trains no matrix … use "adamw" … optimizer.matrices"#
    );
    let text = "type = \"muon\"\nadamw = { betas = [0.8, 0.9], momentum = 1 }";
    let error = toml::from_str::<Box<dyn OptimizerConfig>>(text).unwrap_err();
    assert_says!(error.message(), "unknown field `momentum`, expected … `weight_decay`");
}
