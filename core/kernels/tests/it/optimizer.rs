//! Optimizers and averages against the CPU's, bit for bit.

use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::optim::{
    AdamW, GradScale, Optimizer, OptimizerConfig, Sgd, StateDtype, WeightAverage,
};
use fulgurite_core::parameter::{Init, LocalShard, Parameter};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::shard::Region;
use fulgurite_kernels::Plan;
use fulgurite_kernels::plans::{
    self, Average, Momentum, Noise, Scale, State, StepScale, Update, Values,
};
use half::{bf16, f16};

use crate::numbers::{Dtype, normal, tensor};
use crate::shim::Machine;

/// A parameter's shape and this rank's shard of it, with the dimensions outside the runs for
/// [`Noise`].
struct Part {
    shape: Vec<usize>,
    region: Region,
    run: u64,
    base: u64,
    dims: Vec<[u64; 2]>,
}

impl Part {
    fn full(n: usize) -> Self {
        let region = Region::full(&[n]);
        Self { shape: vec![n], region, run: n.max(1) as u64, base: 0, dims: vec![] }
    }

    fn n(&self) -> usize {
        self.region.elem_count()
    }
}

/// Shards of many forms: more than 2^16 elements, far from the parameter's start, sharded in
/// several dimensions, of one element, and empty.
fn parts() -> Vec<Part> {
    let region = |offsets: &[usize], sizes: &[usize]| Region {
        offsets: offsets.to_vec(),
        sizes: sizes.to_vec(),
    };
    vec![
        Part::full(8193),
        Part {
            shape: vec![131_074],
            region: region(&[65_530], &[9_001]),
            run: 9_001,
            base: 65_530,
            dims: vec![],
        },
        Part::full(0),
        Part {
            shape: vec![5, 6, 7, 2, 11],
            region: region(&[1, 2, 3, 1, 4], &[3, 3, 2, 1, 5]),
            run: 5,
            base: (((6 + 2) * 7 + 3) * 2 + 1) * 11 + 4,
            dims: vec![[1, 11], [2, 22], [3, 154], [3, 924]],
        },
        Part::full(1),
    ]
}

fn noise(index: usize, part: &Part, seed: u64, step: u64) -> Noise {
    let stream = Stream::new(seed, Purpose::Rounding, &format!("p{index}")).child(step);
    let (key, high) = (stream.key(), stream.high());
    Noise { key, high, run: part.run, base: part.base, dims: part.dims.clone() }
}

/// Parameters of a dtype on the CPU, with different values.
fn parameters<P: Dtype>(parts: &[Part]) -> Vec<Parameter> {
    let b = ModuleBuilder::new(ModuleInit { dtype: P::DTYPE, ..ModuleInit::default() });
    let make = |(i, part): (usize, &Part)| {
        b.parameter(&format!("p{i}"), part.shape.clone(), Init::ZEROS).unwrap()
    };
    let parameters: Vec<_> = parts.iter().enumerate().map(make).collect();
    for ((i, part), slot) in parts.iter().enumerate().zip(b.finish().unwrap().slots()) {
        let values = tensor(&normal::<P>(&format!("values {i}"), part.n()), part.n());
        slot.set_local(LocalShard { values, region: part.region.clone() });
    }
    parameters
}

fn grads(i: usize, step: u64, part: &Part) -> Vec<f32> {
    normal(&format!("grads {i} {step}"), part.n())
}

/// The parameters' memory on the test device.
struct OnDevice<const N: usize> {
    machine: Machine,
    values: Vec<u64>,
    state: Vec<[u64; N]>,
    state_dtype: State,
}

impl<const N: usize> OnDevice<N> {
    fn new<P: Dtype>(parts: &[Part], state_dtype: StateDtype) -> Self {
        let mut machine = Machine::default();
        let values = parts.iter().enumerate();
        let values = values
            .map(|(i, part)| machine.put(&normal::<P>(&format!("values {i}"), part.n())))
            .collect();
        let state = parts.iter().map(|part| {
            std::array::from_fn(|_| match state_dtype {
                StateDtype::F32 => machine.put(&vec![0f32; part.n()]),
                StateDtype::Bf16 => machine.put(&vec![bf16::ZERO; part.n()]),
            })
        });
        let state = state.collect();
        let state_dtype = match state_dtype {
            StateDtype::F32 => State::F32,
            StateDtype::Bf16 => State::Bf16,
        };
        Self { machine, values, state, state_dtype }
    }

    /// Runs one update of all tensors, by the plan that `plan` makes.
    fn update<P: Dtype>(
        &mut self,
        parts: &[Part],
        step: u64,
        (step_size, decay): (f64, f64),
        plan: impl FnOnce(Vec<Update<'_, N>>) -> Plan,
    ) {
        let noises: Vec<_> =
            parts.iter().enumerate().map(|(i, part)| noise(i, part, 3, step)).collect();
        let updates = parts.iter().enumerate().map(|(i, part)| Update {
            values: Values { address: self.values[i], length: part.n() as u64, dtype: P::FLOAT },
            grad: self.machine.put(&grads(i, step, part)),
            state: self.state[i],
            state_dtype: self.state_dtype,
            noise: &noises[i],
            step_size: step_size as f32,
            decay: decay as f32,
        });
        let updates = updates.collect();
        self.machine.run(&plan(updates));
    }

    /// Compares with the result of an optimizer on the CPU.
    fn expect<P: Dtype>(&self, parameters: &[Parameter], optimizer: &mut dyn Optimizer) {
        for (parameter, &address) in parameters.iter().zip(&self.values) {
            let expected = parameter.local().unwrap().values.to_vec1::<P>().unwrap();
            assert!(self.machine.get::<P>(address) == expected, "values of {}", parameter.fqn());
        }
        let addresses = self.state.iter().flatten();
        let states = optimizer.state_tensors().unwrap();
        assert_eq!(states.len(), N * parameters.len());
        for (state, &address) in states.iter().zip(addresses) {
            let what = format!("{} of {}", state.name, state.fqn);
            if self.state_dtype == State::Bf16 {
                let expected = state.values.to_vec1::<bf16>().unwrap();
                assert!(self.machine.get::<bf16>(address) == expected, "{what}");
            } else {
                let expected = state.values.to_vec1::<f32>().unwrap();
                assert!(self.machine.get::<f32>(address) == expected, "{what}");
            }
        }
    }
}

fn step_on_cpu(optimizer: &mut dyn Optimizer, parts: &[Part], step: u64, scale: &GradScale) {
    for (i, (parameter, part)) in optimizer.parameters().to_vec().iter().zip(parts).enumerate() {
        parameter.set_local_grad(Some(tensor(&grads(i, step, part), part.n())));
    }
    optimizer.step(scale).unwrap();
}

const SCALE: GradScale = GradScale { factor: 0.7, clip_value: Some(0.9) };

fn known() -> Scale {
    Scale::Known { factor: 0.7, bound: 0.9 }
}

fn adamw_has_the_bits_of_the_cpu<P: Dtype>(state_dtype: StateDtype, beta1: f64) {
    let parts = parts();
    let parameters = parameters::<P>(&parts);
    let config = AdamW { lr: 0.02, betas: (beta1, 0.95), state_dtype, ..AdamW::default() };
    let mut optimizer = config.build(&parameters).unwrap();
    optimizer.set_seed(3);
    let mut device = OnDevice::<2>::new::<P>(&parts, state_dtype);
    for step in [1, 2] {
        step_on_cpu(&mut *optimizer, &parts, step, &SCALE);
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        let common = plans::AdamW {
            beta1,
            beta2: 0.95,
            correction2_sqrt: correction(0.95).sqrt(),
            eps: config.eps,
        };
        let decay = 1.0 - config.lr * config.weight_decay;
        let step_size = -(config.lr / correction(beta1));
        device.update::<P>(&parts, step, (step_size, decay), |updates| {
            plans::adamw(updates, common, known())
        });
    }
    device.expect::<P>(&parameters, &mut *optimizer);
}

#[test]
fn adamw_with_f32_state_matches_the_cpu() {
    adamw_has_the_bits_of_the_cpu::<f32>(StateDtype::F32, 0.9);
    adamw_has_the_bits_of_the_cpu::<bf16>(StateDtype::F32, 0.3);
    adamw_has_the_bits_of_the_cpu::<f16>(StateDtype::F32, 0.9);
}

#[test]
fn adamw_with_bf16_state_matches_the_cpu() {
    adamw_has_the_bits_of_the_cpu::<f32>(StateDtype::Bf16, 0.3);
    adamw_has_the_bits_of_the_cpu::<bf16>(StateDtype::Bf16, 0.9);
    adamw_has_the_bits_of_the_cpu::<f16>(StateDtype::Bf16, 0.9);
}

fn sgd_has_the_bits_of_the_cpu<P: Dtype>(state_dtype: StateDtype, nesterov: bool) {
    let parts = parts();
    let parameters = parameters::<P>(&parts);
    let config = Sgd {
        lr: 0.1,
        momentum: 0.8,
        dampening: if nesterov { 0.0 } else { 0.25 },
        nesterov,
        weight_decay: 0.125,
        state_dtype,
        ..Sgd::default()
    };
    let mut optimizer = config.build(&parameters).unwrap();
    optimizer.set_seed(3);
    let mut device = OnDevice::<1>::new::<P>(&parts, state_dtype);
    for step in [1, 2] {
        step_on_cpu(&mut *optimizer, &parts, step, &SCALE);
        let momentum = Momentum {
            momentum: config.momentum,
            gain: if step == 1 { 1.0 } else { 1.0 - config.dampening },
            keep: if step == 1 { 0.0 } else { config.momentum },
            nesterov,
        };
        device.update::<P>(&parts, step, (-config.lr, config.weight_decay), |updates| {
            plans::sgd(updates, Some(momentum), known())
        });
    }
    device.expect::<P>(&parameters, &mut *optimizer);
}

#[test]
fn sgd_with_momentum_has_the_bits_of_the_cpu() {
    sgd_has_the_bits_of_the_cpu::<f32>(StateDtype::F32, true);
    sgd_has_the_bits_of_the_cpu::<bf16>(StateDtype::Bf16, false);
    sgd_has_the_bits_of_the_cpu::<f16>(StateDtype::F32, false);
    sgd_has_the_bits_of_the_cpu::<f32>(StateDtype::Bf16, true);
}

/// Values and gradients with arbitrary bits, which also test the conversions from and to half
/// precision.
fn sgd_of_any_bits<P: Dtype>(values: &[P], grads: &[f32]) {
    let n = values.len();
    let b = ModuleBuilder::new(ModuleInit { dtype: P::DTYPE, ..ModuleInit::default() });
    let parameter = b.parameter("p", [n], Init::ZEROS).unwrap();
    let region = Region::full(&[n]);
    b.finish().unwrap().slots()[0].set_local(LocalShard { values: tensor(values, n), region });
    parameter.set_local_grad(Some(tensor(grads, n)));
    let config = Sgd { lr: 1.0, ..Sgd::default() };
    config.build(std::slice::from_ref(&parameter)).unwrap().step(&GradScale::default()).unwrap();

    let mut machine = Machine::default();
    let address = machine.put(values);
    let update = Update {
        values: Values { address, length: n as u64, dtype: P::FLOAT },
        grad: machine.put(grads),
        state: [0],
        state_dtype: State::F32,
        noise: &Noise::default(),
        step_size: -1.0,
        decay: 0.0,
    };
    machine.run(&plans::sgd([update], None, Scale::Known { factor: 1.0, bound: f32::INFINITY }));
    let expected = parameter.local().unwrap().values.to_vec1::<P>().unwrap();
    for (i, (got, expected)) in machine.get::<P>(address).into_iter().zip(expected).enumerate() {
        let bits = |x: &P| bytemuck::bytes_of(x).to_vec();
        let both_nan = got.to_f64().is_nan() && expected.to_f64().is_nan();
        assert!(
            both_nan || bits(&got) == bits(&expected),
            "{:?} and a gradient of {:?} ({:x}) make {got:?}, not {expected:?}",
            values[i],
            grads[i],
            grads[i].to_bits()
        );
    }
}

#[test]
fn half_precision_numbers_round_trip() {
    let all = || 0..=u16::MAX;
    let zeros = vec![0.0; 1 << 16];
    sgd_of_any_bits::<f16>(&all().map(f16::from_bits).collect::<Vec<_>>(), &zeros);
    sgd_of_any_bits::<bf16>(&all().map(bf16::from_bits).collect::<Vec<_>>(), &zeros);
}

#[test]
fn rounding_to_half_precision_matches_the_cpu() {
    let mut grads: Vec<f32> = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];
    // Around every fifth f16 number, around the midpoint to the next number, and at random.
    for bits in (0..0x7c00u16).step_by(5) {
        let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        let middle = if high.is_finite() { (low + high) / 2.0 } else { 65520.0 };
        for x in [low, middle] {
            grads.extend([x, -x, x.next_up(), -x.next_down()]);
        }
    }
    let stream = Stream::new(1, Purpose::Sample, "bits");
    grads.extend((0..20_000).map(|i| f32::from_bits(stream.word(i))));
    sgd_of_any_bits::<f16>(&vec![f16::ZERO; grads.len()], &grads);
    sgd_of_any_bits::<bf16>(&vec![bf16::ZERO; grads.len()], &grads);
    sgd_of_any_bits::<f32>(&vec![0.0; grads.len()], &grads);
}

/// The scale is read from the device, where another kernel may have written it.
#[test]
fn a_step_that_is_skipped_changes_nothing() {
    let values: Vec<f32> = normal("values", 300);
    // Training computes `skip` by f32 operations.
    for skip in [0, 1, 1f32.to_bits()] {
        let mut machine = Machine::default();
        let [address, m, v] = [(); 3].map(|()| machine.put(&values));
        let scale = [1f32.to_bits(), 2f32.to_bits(), skip, 0];
        let scale = Scale::At(machine.put(&scale));
        let grad = machine.put(&values);
        let values_of = Values { address, length: 300, dtype: f32::FLOAT };
        let update = Update {
            values: values_of,
            grad,
            state: [m, v],
            state_dtype: State::F32,
            noise: &Noise::default(),
            step_size: -1.0,
            decay: 0.5,
        };
        let adamw = plans::AdamW { beta1: 0.9, beta2: 0.99, correction2_sqrt: 0.1, eps: 1e-8 };
        let first = update_without_state(&update);
        for plan in [plans::adamw([update], adamw, scale), plans::sgd([first], None, scale)] {
            machine.run(&plan);
            let same = machine.get::<f32>(address) == values;
            assert_eq!(same, skip != 0);
        }
        assert_eq!(machine.get::<f32>(m) == values, skip != 0);
        let Scale::At(scale) = scale else { unreachable!() };
        let averages = [Average { average: v, values: values_of }];
        let before = machine.get::<f32>(v);
        machine.run(&plans::average(&averages, 0.5, Some(scale)));
        assert_eq!(machine.get::<f32>(v) == before, skip != 0);
    }
    // The layout behind `Scale::At`.
    let fields = fulgurite_kernels::table::rows();
    let (_, fields) = fields.iter().find(|(name, _)| *name == "StepScale").unwrap();
    assert_eq!(fields.iter().map(|f| f.offset).collect::<Vec<_>>(), [0, 4, 8, 12]);
    let _: StepScale;
}

fn update_without_state<'a>(update: &Update<'a, 2>) -> Update<'a, 1> {
    Update {
        values: update.values,
        grad: update.grad,
        state: [0],
        state_dtype: update.state_dtype,
        noise: update.noise,
        step_size: update.step_size,
        decay: update.decay,
    }
}

fn average_has_the_bits_of_the_cpu<P: Dtype>() {
    let parts = parts();
    let parameters = parameters::<P>(&parts);
    let mut average = WeightAverage::exponential(&parameters, 0.9).unwrap();
    let mut machine = Machine::default();
    let mut averages = Vec::new();
    for (i, (part, parameter)) in parts.iter().zip(&parameters).enumerate() {
        let start = average.state().unwrap()[i].values.to_vec1::<f32>().unwrap();
        let changed = normal::<P>(&format!("changed {i}"), part.n());
        let values =
            Values { address: machine.put(&changed), length: part.n() as u64, dtype: P::FLOAT };
        averages.push(Average { average: machine.put(&start), values });
        if part.n() > 0 {
            let values = parameter.local().unwrap().values;
            values.slice_set(&tensor(&changed, part.n()), 0, 0).unwrap();
        }
    }
    average.update().unwrap();
    machine.run(&plans::average(&averages, 1.0 - 0.9, None));
    for (state, on_device) in average.state().unwrap().iter().zip(&averages) {
        let expected = state.values.to_vec1::<f32>().unwrap();
        assert!(machine.get::<f32>(on_device.average) == expected, "{}", state.fqn);
    }
}

#[test]
fn averages_have_the_bits_of_the_cpu() {
    average_has_the_bits_of_the_cpu::<f32>();
    average_has_the_bits_of_the_cpu::<bf16>();
    average_has_the_bits_of_the_cpu::<f16>();
}

#[test]
fn empty_tensors_launch_nothing() {
    let none: [Update<'_, 1>; 0] = [];
    let scale = Scale::Known { factor: 1.0, bound: 1.0 };
    assert!(plans::sgd(none, None, scale).calls().is_empty());
    assert!(plans::average(&[], 0.5, None).calls().is_empty());
}
