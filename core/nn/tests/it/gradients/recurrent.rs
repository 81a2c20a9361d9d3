use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::module::{Module as _, ModuleBuilder};
use fulgurite_core::nn::{Documents, Gru, Lstm, LstmState, RecurrentConfig, force_portable};
use fulgurite_test_message::assert_says;

use super::harness::{Params, assert_close, builder, check, flat, randn};
use super::recorded::{numbers, read, values};

enum Layer {
    Gru(Gru),
    Lstm(Lstm),
}

impl Layer {
    fn new(b: &ModuleBuilder, kind: &str, config: &RecurrentConfig) -> Self {
        match kind {
            "gru" => Self::Gru(Gru::with_config(b, config).unwrap()),
            _ => Self::Lstm(Lstm::with_config(b, config).unwrap()),
        }
    }

    fn states(&self) -> usize {
        match self {
            Self::Gru(_) => 1,
            Self::Lstm(_) => 2,
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gru(layer) => layer.forward(x),
            Self::Lstm(layer) => layer.forward(x),
        }
    }

    /// Returns the output, then the final states. Without states, starts with the default.
    fn with_state(&self, x: &Tensor, states: &[Tensor]) -> Result<Vec<Tensor>> {
        match self {
            Self::Gru(layer) => {
                let (y, state) = layer.forward_with_state(x, states.first())?;
                Ok(vec![y, state])
            }
            Self::Lstm(layer) => {
                let state = states
                    .first()
                    .map(|hidden| LstmState { hidden: hidden.clone(), cell: states[1].clone() });
                let (y, state) = layer.forward_with_state(x, state.as_ref())?;
                Ok(vec![y, state.hidden, state.cell])
            }
        }
    }
}

fn two_layers() -> RecurrentConfig {
    RecurrentConfig { num_layers: 2, ..RecurrentConfig::new(3, 4) }
}

/// Outputs, final states and all gradients.
#[test]
fn values_and_gradients_follow_pytorch() {
    let recorded = read(include_str!("../../fixtures/pytorch.toml"));
    let follows = |name: &str, dtype: DType, tolerance: f64| {
        let want = recorded[name].as_table().unwrap();
        let kind = name.split('_').next().unwrap();
        let bidirectional = name.ends_with("both");
        let num_layers = if name.ends_with('2') || bidirectional { 2 } else { 1 };
        let bias = !name.ends_with("no_bias");
        let config =
            RecurrentConfig { num_layers, bidirectional, bias, ..RecurrentConfig::new(3, 4) };
        let entries = num_layers * if bidirectional { 2 } else { 1 };
        let b = builder(dtype);
        let layer = Layer::new(&b.pp("layer"), kind, &config);
        let params = Params::new(&b);
        let tensor =
            |seed: usize, shape: &[usize]| values(seed as f64, shape).to_dtype(dtype).unwrap();
        for (i, slot) in params.slots.iter().enumerate() {
            let values = tensor(i + 1, slot.global_shape());
            storage::copy_from(slot.compute().unwrap(), &values).unwrap();
        }
        let x = Var::from_tensor(&tensor(0, &[2, 5, 3])).unwrap();
        let initial: Vec<Var> = (0..layer.states())
            .map(|i| Var::from_tensor(&tensor(10 + i, &[entries, 2, 4])).unwrap())
            .collect();
        let states: Vec<Tensor> = initial.iter().map(|x| x.as_tensor().clone()).collect();
        let outputs = layer.with_state(&x, &states).unwrap();
        let close = |key: &str, got: &[f64]| {
            let what = format!("{name} in {dtype:?}, {key}");
            assert_close(&what, got, &numbers(want, key), tolerance);
        };
        close("output", &flat(&outputs[0]));
        for (i, state) in outputs[1..].iter().enumerate() {
            close(&format!("final_{i}"), &flat(state));
        }
        let losses = outputs.iter().enumerate();
        let losses = losses.map(|(i, y)| (y * tensor(20 + i, y.dims())).unwrap().sum_all());
        let loss = losses.map(|loss| loss.unwrap()).reduce(|a, b| (a + b).unwrap()).unwrap();
        let grads = loss.backward().unwrap();
        close("input_grad", &flat(grads.get(&x).unwrap()));
        for (i, state) in initial.iter().enumerate() {
            close(&format!("initial_grad_{i}"), &flat(grads.get(state).unwrap()));
        }
        for slot in &params.slots {
            close(slot.fqn().strip_prefix("layer.").unwrap(), &params.take(slot).unwrap());
        }
        assert_eq!(params.slots.len(), entries * if bias { 4 } else { 2 });
    };
    for name in ["gru_1", "gru_2", "gru_no_bias", "gru_both", "lstm_1", "lstm_2", "lstm_both"] {
        follows(name, DType::F64, 1e-8);
        follows(name, DType::F32, 1e-5);
        let _portable = force_portable();
        follows(name, DType::F64, 1e-8);
        follows(name, DType::F32, 1e-5);
    }
}

#[test]
fn finite_differences_with_states() {
    for (kind, bidirectional) in [("gru", false), ("gru", true), ("lstm", false), ("lstm", true)] {
        let b = builder(DType::F64);
        let config = RecurrentConfig { bidirectional, ..two_layers() };
        let layer = Layer::new(&b.pp("layer"), kind, &config);
        let params = Params::new(&b);
        let entries = if bidirectional { 4 } else { 2 };
        let mut inputs = vec![randn("x", &[2, 3, 3])];
        for i in 0..layer.states() {
            inputs.push(randn(&format!("state {i}"), &[entries, 2, 4]));
        }
        check(&inputs, &params, &|inputs| {
            let outputs = layer.with_state(&inputs[0], &inputs[1..])?;
            let flat = outputs.iter().map(Tensor::flatten_all);
            Ok(Tensor::cat(&flat.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
        });
        check(&inputs[..1], &params, &|inputs| layer.forward(&inputs[0]));
    }
}

/// Enough elements for several tasks of a kernel.
#[test]
fn parts_of_a_sequence_give_the_whole() {
    for kind in ["gru", "lstm"] {
        let b = builder(DType::F32);
        let config = RecurrentConfig { num_layers: 2, ..RecurrentConfig::new(5, 300) };
        let layer = Layer::new(&b.pp("layer"), kind, &config);
        let _params = Params::new(&b);
        let x = randn("x", &[20, 7, 5]).to_dtype(DType::F32).unwrap();
        let whole = layer.with_state(&x, &[]).unwrap();
        assert_close("no states", &flat(&layer.forward(&x).unwrap()), &flat(&whole[0]), 0.0);
        let first = layer.with_state(&x.narrow(1, 0, 3).unwrap(), &[]).unwrap();
        let second = layer.with_state(&x.narrow(1, 3, 4).unwrap(), &first[1..]).unwrap();
        let y = Tensor::cat(&[&first[0], &second[0]], 1).unwrap();
        assert_close("outputs", &flat(&y), &flat(&whole[0]), 1e-6);
        for (got, want) in second[1..].iter().zip(&whole[1..]) {
            assert_close("final states", &flat(got), &flat(want), 1e-6);
        }
    }
}

#[test]
fn empty_batches_and_constants_are_computed() {
    let both = || {
        for kind in ["gru", "lstm"] {
            let b = builder(DType::F64);
            let layer = Layer::new(
                &b.pp("layer"),
                kind,
                &RecurrentConfig { bidirectional: true, ..two_layers() },
            );
            let params = Params::new(&b);
            let empty = Tensor::zeros((0, 3, 3), DType::F64, &Device::Cpu).unwrap();
            assert_eq!(layer.forward(&empty).unwrap().dims(), [0, 3, 8]);
            let outputs = layer.with_state(&empty, &[]).unwrap();
            assert_eq!((outputs[0].dims(), outputs[1].dims()), (&[0, 3, 8][..], &[4, 0, 4][..]));
            outputs[0].sum_all().unwrap().backward().unwrap();
            params.slots.iter().for_each(|slot| {
                assert!(params.take(slot).unwrap().iter().all(|x| *x == 0.0));
            });
            let y = layer.forward(&randn("x", &[2, 2, 3])).unwrap();
            y.sum_all().unwrap().backward().unwrap();
            for slot in &params.slots {
                assert!(params.take(slot).unwrap().iter().any(|x| *x != 0.0), "{}", slot.fqn());
            }
        }
    };
    both();
    let _portable = force_portable();
    both();
}

#[test]
fn unusable_sequences_and_states_are_explained() {
    let b = builder(DType::F64);
    let gru = Gru::new(&b.pp("encoder"), 3, 4).unwrap();
    let _params = Params::new(&b);
    let x = randn("x", &[2, 5, 3]);
    assert_says!(
        gru.forward(&randn("x", &[2, 5, 4])).unwrap_err(),
        "module `encoder` … input of shape [batch, time, 3], got [2, 5, 4]"
    );
    assert_says!(
        gru.forward(&x.narrow(1, 0, 0).unwrap()).unwrap_err(),
        "module `encoder` … sequence of at least one step, got none"
    );
    assert_says!(
        gru.forward_with_state(&x, Some(&randn("state", &[2, 4]))).unwrap_err(),
        "module `encoder` … states of shape … here [1, 2, 4], got [2, 4]"
    );
    let ids = Tensor::zeros((2, 5), DType::U32, &Device::Cpu).unwrap();
    let documents = Documents::of_mask(&ids.ones_like().unwrap()).unwrap();
    assert_says!(documents.run(|| gru.forward(&x)).unwrap_err(), "module `encoder`: documents …");
}
