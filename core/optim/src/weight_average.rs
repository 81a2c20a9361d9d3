//! Averages of weights over training.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::elementwise::{Element, Real, arithmetic_dtype, dispatch, update};
use super::optimizer::StateTensor;
use super::step_scale::StepScale;
use crate::{Error, Result};
use fulgurite_module::parameter::{LocalShard, Parameter};
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::transfer;
use fulgurite_tensor::memory::{self, MemoryKind};

/// An average of the weights over training, to evaluate or publish instead of the weights.
///
/// As `torch.optim.swa_utils.AveragedModel`. [`update`](Self::update) computes
/// `average = decay * average + (1 - decay) * weight`. For an [exponential](Self::exponential)
/// average, updated after each optimizer step, `decay` is a constant. For a [mean](Self::mean) of
/// `n` updates so far it is `n / (n + 1)`.
///
/// Only trainable parameters have an average; it covers the shard that this rank's optimizer
/// updates. Averages are in f32 (f64 for f64 parameters), so that small differences are not lost to
/// half-precision weights. An element's average depends on that element alone: nothing is
/// communicated, and the averages are the same on any mesh.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// use fulgurite_core::optim::WeightAverage;
/// use fulgurite_core::parameter::{Init, LocalShard};
/// use fulgurite_core::shard::Region;
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let weight = b.pp("up").parameter("weight", [2], Init::ONES)?;
/// // A strategy sets values, and an optimizer changes them:
/// let values = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let region = Region::full(&[2]);
/// b.finish()?.slots()[0].set_local(LocalShard { values: values.copy()?, region });
/// let mut ema = WeightAverage::exponential(&[weight.clone()], 0.75)?;
/// weight.local()?.values.slice_set(&Tensor::new(&[5f32, 2.], &Device::Cpu)?, 0, 0)?;
/// ema.update()?;
///
/// ema.swap()?; // and then `Strategy::prepare_forward`, before validating with the averages
/// assert_eq!(weight.local()?.values.to_vec1::<f32>()?, [2., 2.]);
/// ema.swap()?; // and `prepare_forward` again
/// assert_eq!(weight.local()?.values.to_vec1::<f32>()?, [5., 2.]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// Every rank calls every method alike; no method is collective.
#[derive(Debug)]
pub struct WeightAverage {
    rule: Rule,
    updates: u64,
    swapped: bool,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Exponential { decay: f64, warmup: bool },
    Mean,
}

#[derive(Debug)]
struct Entry {
    parameter: Parameter,
    average: Tensor,
    /// The weights, while the average is in their place.
    weights: Option<Tensor>,
}

impl WeightAverage {
    /// Starts an exponential moving average of the trainable parameters from their present values.
    ///
    /// A strategy must have set up the values. `decay` is in `[0, 1)`: 0.999 averages over about
    /// the last thousand steps.
    ///
    /// # Errors
    /// If `decay` is out of range, or a parameter lacks values or is not of a float dtype.
    pub fn exponential(parameters: &[Parameter], decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::Config(format!(
                "the decay of an average of weights must be in [0, 1), such as 0.999; got {decay}"
            )));
        }
        Self::new(parameters, Rule::Exponential { decay, warmup: false })
    }

    /// Starts a mean of the trainable parameters' values at each [`update`](Self::update).
    ///
    /// All updates have equal weight (stochastic weight averaging). Before the first update the
    /// mean is the present values.
    ///
    /// # Errors
    /// If a parameter lacks values or is not of a float dtype.
    pub fn mean(parameters: &[Parameter]) -> Result<Self> {
        Self::new(parameters, Rule::Mean)
    }

    fn new(parameters: &[Parameter], rule: Rule) -> Result<Self> {
        let entry = |parameter: &Parameter| {
            let values = parameter.local()?.values;
            let dtype = arithmetic_dtype(values.dtype()).ok_or_else(|| {
                let message =
                    format!("is of dtype {:?}; only floats have an average", values.dtype());
                Error::parameter(parameter.fqn(), message)
            })?;
            // Copied: `to_dtype` to the weights' own dtype would share their memory.
            let _place = transfer::beside(&values);
            let _kind = memory::of_kind(MemoryKind::Averages);
            let average = storage::zeros(values.elem_count(), dtype, values.device())?;
            storage::copy_from(&average, &values)?;
            Ok(Entry { parameter: parameter.clone(), average, weights: None })
        };
        let entries = parameters.iter().filter(|p| p.requires_grad()).map(entry);
        let entries = entries.collect::<Result<_>>()?;
        Ok(Self { rule, updates: 0, swapped: false, entries })
    }

    /// Makes the decay of an exponential average smaller at first, to forget the initial values
    /// soon.
    ///
    /// Update `n` (from 0) uses `min(decay, (1 + n) / (10 + n))`. A mean does not change.
    #[must_use]
    pub fn with_warmup(mut self) -> Self {
        if let Rule::Exponential { warmup, .. } = &mut self.rule {
            *warmup = true;
        }
        self
    }

    /// Returns the average's name in checkpoints: `ema` if exponential, `swa` for a mean.
    pub fn name(&self) -> &'static str {
        if self.follows_steps() { "ema" } else { "swa" }
    }

    /// Returns whether the average is updated after each optimizer step, as an exponential average
    /// is.
    pub fn follows_steps(&self) -> bool {
        matches!(self.rule, Rule::Exponential { .. })
    }

    /// Returns the number of updates.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the decay of the next update.
    fn next_decay(&self) -> f64 {
        let n = self.updates as f64;
        match self.rule {
            Rule::Exponential { decay, warmup: true } => decay.min((1.0 + n) / (10.0 + n)),
            Rule::Exponential { decay, warmup: false } => decay,
            Rule::Mean => n / (n + 1.0),
        }
    }

    /// Updates the averages from the weights, in one pass over memory on the CPU.
    ///
    /// # Errors
    /// If the averages are in the weights' place, or the size of a parameter's shard has changed.
    pub fn update(&mut self) -> Result<()> {
        self.update_unless_skipped(None)
    }

    /// Updates the averages after an optimizer's [`step_by`](super::Optimizer::step_by) with this
    /// scale.
    ///
    /// The averages do not change if the step was skipped. A skipped step still counts as an
    /// update, until [`load_scalars`](Self::load_scalars) restores the count.
    ///
    /// # Errors
    /// As [`update`](Self::update), and if the device cannot be read.
    pub fn update_after(&mut self, scale: &StepScale) -> Result<()> {
        let on_host = || self.entries.iter().any(|entry| entry.average.device().is_cpu());
        match scale.for_values(on_host)? {
            Some(scale) => self.update_unless_skipped(Some(&scale)),
            None => {
                self.updates += 1;
                Ok(())
            }
        }
    }

    /// Updates the averages, unless a `scale` on the device skips the step.
    fn update_unless_skipped(&mut self, scale: Option<&StepScale>) -> Result<()> {
        if self.swapped {
            return Err(Error::other(
                "the averages are in the weights' place, and cannot be updated with themselves; \
                 call `WeightAverage::swap` again before training goes on",
            ));
        }
        let shards = self.shards()?;
        let gain = 1.0 - self.next_decay();
        #[cfg(feature = "cuda")]
        let mut on_gpu = super::gpu::Averages::default();
        for (entry, values) in self.entries.iter().zip(shards) {
            let average = &entry.average;
            if values.elem_count() == 0 {
                continue;
            }
            let _place = transfer::beside(average);
            if gain == 1.0 && scale.is_none_or(|scale| scale.numbers().is_none()) {
                storage::copy_from(average, &values)?;
            } else if average.device().is_cpu() {
                dispatch!(values.dtype(), lerp_state(average, &values, gain))?;
            } else {
                #[cfg(feature = "cuda")]
                if on_gpu.take(average, &values)? {
                    continue;
                }
                let values = values.to_dtype(average.dtype())?;
                storage::copy_from(average, &composed(average, &values, gain, scale)?)?;
            }
        }
        #[cfg(feature = "cuda")]
        on_gpu.update(gain, scale)?;
        self.updates += 1;
        Ok(())
    }

    /// Swaps the weights and the averages, which are rounded to the weights' dtype.
    ///
    /// A second call restores the weights to the bit. Between the two calls a copy of this rank's
    /// weights is kept, and no optimizer may step.
    ///
    /// `Strategy::prepare_forward` must be called after each swap: layers may compute with a copy
    /// of the shards.
    ///
    /// # Errors
    /// If the size of a parameter's shard has changed.
    pub fn swap(&mut self) -> Result<()> {
        let shards = self.shards()?;
        for (entry, values) in self.entries.iter_mut().zip(shards) {
            match entry.weights.take() {
                Some(weights) => storage::copy_from(&values, &weights)?,
                None => {
                    entry.weights = Some(values.copy()?);
                    storage::copy_from(&values, &entry.average)?;
                }
            }
        }
        self.swapped = !self.swapped;
        Ok(())
    }

    /// Returns the averages under their [name](Self::name), for checkpoints to save and to load
    /// into.
    ///
    /// If a checkpoint is loaded while the averages are swapped in, the next [`swap`](Self::swap)
    /// still restores the weights; the loaded averages reach them at the swap after that.
    ///
    /// # Errors
    /// If the size of a parameter's shard has changed.
    pub fn state(&self) -> Result<Vec<StateTensor>> {
        self.shards()?;
        let state = |entry: &Entry| {
            let parameter = &entry.parameter;
            Ok(StateTensor {
                fqn: parameter.fqn().to_owned(),
                name: self.name(),
                values: entry.average.clone(),
                region: parameter.local()?.region,
                shape: parameter.global_shape().to_vec(),
            })
        };
        self.entries.iter().map(state).collect()
    }

    /// Returns the state that is not a tensor, by name: `updates`.
    pub fn scalars(&self) -> BTreeMap<String, f64> {
        BTreeMap::from([("updates".to_owned(), self.updates as f64)])
    }

    /// Restores the state that [`scalars`](Self::scalars) returned.
    ///
    /// # Errors
    /// If the count of updates is missing or invalid.
    pub fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        match scalars.get("updates") {
            Some(&updates) if updates >= 0.0 && updates.fract() == 0.0 => {
                self.updates = updates as u64;
                Ok(())
            }
            Some(updates) => Err(Error::other(format!(
                "the saved `updates` of an average of weights is {updates}, not a count; the \
                 checkpoint is damaged"
            ))),
            None => Err(Error::other(format!(
                "the saved state of an average of weights has no `updates` (it has: {})",
                scalars.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    /// Returns the weights of each entry, all checked before any is changed.
    fn shards(&self) -> Result<Vec<Tensor>> {
        let shard = |entry: &Entry| {
            let LocalShard { values, .. } = entry.parameter.local()?;
            let (now, then) = (values.elem_count(), entry.average.elem_count());
            if now == then {
                return Ok(values);
            }
            Err(Error::parameter(
                entry.parameter.fqn(),
                format!(
                    "its local shard has {now} elements now, but had {then} when the average of \
                     weights was made; make it after the model is set up"
                ),
            ))
        };
        self.entries.iter().map(shard).collect()
    }
}

/// `average += gain * (values - average)`.
fn lerp_state<P: Element<C>, C: Real>(average: &Tensor, values: &Tensor, gain: f64) -> Result<()> {
    let gain = C::from_f64(gain);
    update::<0, C, P, C, C>(average, values, [], None, move |average, value, []| {
        (average + gain * (value - average), [])
    })
}

/// [`lerp_state`] in candle operations, for any device.
fn composed(
    average: &Tensor,
    values: &Tensor,
    gain: f64,
    scale: Option<&StepScale>,
) -> Result<Tensor> {
    let new = (average + ((values - average)? * gain)?)?;
    match scale {
        Some(scale) => scale.unless_skipped(average, new),
        None => Ok(new),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use fulgurite_test_message::assert_says;

    use super::super::GradScale;
    use super::super::testing::{assert_close, late_scale, numbers, parameters, slot, values};
    use super::*;

    const LENGTHS: [(&str, usize); 3] = [("a", 40_000), ("b", 7), ("empty", 0)];

    /// Gives every parameter the values of a step.
    fn set_values(parameters: &[Parameter], step: u64) {
        for p in parameters {
            let n = p.elem_count();
            let values = Tensor::from_vec(numbers(p.fqn(), step, n), n, p.device()).unwrap();
            storage::copy_from(&p.local().unwrap().values, &values).unwrap();
        }
    }

    fn averages(ema: &WeightAverage) -> Vec<Vec<f64>> {
        let state = ema.state().unwrap();
        let all = state.iter().map(|s| s.values.to_dtype(DType::F64).unwrap().to_vec1().unwrap());
        all.collect()
    }

    #[test]
    fn follows_the_naive_loop() {
        for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 1e-6)] {
            for warmup in [false, true] {
                let parameters = parameters(&LENGTHS, dtype);
                let ema = WeightAverage::exponential(&parameters, 0.5).unwrap();
                let mut ema = if warmup { ema.with_warmup() } else { ema };
                let mut want: Vec<Vec<f64>> = parameters.iter().map(values).collect();
                for n in 0..11u32 {
                    // A tenth at first, one half from update 8 on.
                    let warm = f64::from(1 + n) / f64::from(10 + n);
                    let decay = if warmup { f64::min(0.5, warm) } else { 0.5 };
                    assert_eq!(ema.next_decay(), decay);
                    set_values(&parameters, u64::from(n) + 1);
                    ema.update().unwrap();
                    for (want, p) in want.iter_mut().zip(&parameters) {
                        for (want, value) in want.iter_mut().zip(values(p)) {
                            *want = decay * *want + (1.0 - decay) * value;
                        }
                    }
                }
                for (got, want) in averages(&ema).iter().zip(&want) {
                    assert_close(got, want, tolerance);
                }
            }
        }
    }

    #[test]
    fn skipped_steps_leave_averages_alone() {
        let parameters = parameters(&LENGTHS, DType::F32);
        let [mut late, mut known] =
            [(); 2].map(|()| WeightAverage::exponential(&parameters, 0.5).unwrap());
        set_values(&parameters, 1);
        let scale = GradScale::default();
        late.update_after(&late_scale(&scale, 1.0)).unwrap();
        known.update().unwrap();
        assert_eq!(averages(&late), averages(&known));
        set_values(&parameters, 2);
        late.update_after(&late_scale(&scale, f64::NAN)).unwrap();
        assert_eq!((averages(&late), late.updates()), (averages(&known), 2));
        // As computed by devices without a fused pass.
        let average = late.entries[0].average.copy().unwrap();
        let values = parameters[0].local().unwrap().values;
        let of = |loss| composed(&average, &values, 0.5, Some(&late_scale(&scale, loss))).unwrap();
        let same = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap();
        assert_eq!(same(&of(f64::INFINITY)), same(&average));
        assert_eq!(same(&of(1.0)), same(&composed(&average, &values, 0.5, None).unwrap()));
        assert_ne!(same(&of(1.0)), same(&average));
    }

    #[test]
    fn swapping_twice_changes_nothing() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let parameters = parameters(&LENGTHS, dtype);
            let mut ema = WeightAverage::exponential(&parameters, 0.9).unwrap();
            set_values(&parameters, 1);
            ema.update().unwrap();
            let weights: Vec<_> = parameters.iter().map(values).collect();
            let average = averages(&ema);

            ema.swap().unwrap();
            assert!(ema.swapped);
            for (p, average) in parameters.iter().zip(&average) {
                let n = average.len();
                let want = Tensor::from_vec(average.clone(), n, p.device()).unwrap();
                let want = want.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap();
                assert_eq!(values(p), want.to_vec1::<f64>().unwrap());
            }
            assert_eq!(averages(&ema), average, "the state stays");
            assert_says!(ema.update().unwrap_err(), "the averages are in the weights' place …");

            ema.swap().unwrap();
            assert_eq!(parameters.iter().map(values).collect::<Vec<_>>(), weights);
            assert_eq!(averages(&ema), average);
            ema.update().unwrap();
        }
    }

    #[test]
    fn resumed_average_continues_alike() {
        let parameters = parameters(&LENGTHS, DType::F32);
        let mut first = WeightAverage::exponential(&parameters, 0.9).unwrap().with_warmup();
        for step in 1..4 {
            set_values(&parameters, step);
            first.update().unwrap();
        }
        let mut second = WeightAverage::exponential(&parameters, 0.9).unwrap().with_warmup();
        for (to, from) in second.state().unwrap().iter().zip(first.state().unwrap()) {
            assert_eq!((to.name, &to.fqn, &to.region), ("ema", &from.fqn, &from.region));
            assert_eq!(to.values.dtype(), DType::F32);
            storage::copy_from(&to.values, &from.values).unwrap();
        }
        second.load_scalars(&first.scalars()).unwrap();
        set_values(&parameters, 4);
        first.update().unwrap();
        second.update().unwrap();
        assert_eq!(averages(&first), averages(&second));
        assert_eq!(first.scalars(), BTreeMap::from([("updates".to_owned(), 4.0)]));
        assert_says!(
            second.load_scalars(&BTreeMap::new()).unwrap_err(),
            "the saved state of an average … has no `updates` (it has: )"
        );
        let half = BTreeMap::from([("updates".to_owned(), 0.5)]);
        assert_says!(second.load_scalars(&half).unwrap_err(), "the saved `updates` … 0.5, not a …");
    }

    #[test]
    fn shards_average_as_the_whole() {
        // Each "rank" has a range of one tensor; frozen parameters are not averaged.
        use fulgurite_collective::shard::Region;
        use fulgurite_module::module::{ModuleBuilder, ModuleInit};
        use fulgurite_module::parameter::Init;
        let declare = |offset: usize, n: usize| {
            let b = ModuleBuilder::new(ModuleInit::default());
            let p = b.parameter("w", [9], Init::ZEROS).unwrap();
            b.frozen().parameter("frozen", [9], Init::ZEROS).unwrap();
            let values = Tensor::zeros(n, DType::F32, p.device()).unwrap();
            let region = Region { offsets: vec![offset], sizes: vec![n] };
            slot(&p).set_local(LocalShard { values, region });
            (p, WeightAverage::exponential(b.finish().unwrap().parameters(), 0.9).unwrap())
        };
        let run = |offset: usize, n: usize| {
            let (p, mut ema) = declare(offset, n);
            for step in 0..3 {
                let all = numbers("w", step, 9)[offset..offset + n].to_vec();
                let all = Tensor::from_vec(all, n, p.device()).unwrap();
                storage::copy_from(&p.local().unwrap().values, &all).unwrap();
                ema.update().unwrap();
            }
            let state = ema.state().unwrap().remove(0);
            assert_eq!((state.region.offsets[0], state.shape), (offset, vec![9]));
            averages(&ema).remove(0)
        };
        assert_eq!([run(0, 5), run(5, 4)].concat(), run(0, 9));
    }

    #[test]
    fn wrong_use_is_explained() {
        let parameters = parameters(&[("w", 3)], DType::F32);
        let message =
            |decay| WeightAverage::exponential(&parameters, decay).unwrap_err().to_string();
        assert_says!(message(1.0), "the decay of an average … must be in [0, 1) … got 1");
        assert_says!(message(f64::NAN), "the decay of an average … must be in [0, 1) … got NaN");
        let mut ema = WeightAverage::exponential(&parameters, 0.0).unwrap();
        let values = Tensor::zeros(2, DType::F32, parameters[0].device()).unwrap();
        let region = parameters[0].local().unwrap().region;
        slot(&parameters[0]).set_local(LocalShard { values, region });
        assert_says!(ema.swap().unwrap_err(), "parameter `w` … has 2 elements now, but had 3 …");
        assert!(!ema.swapped);
    }
}
