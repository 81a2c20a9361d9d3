//! Values that steps and hooks log, before the reduction over the ranks.
//!
//! A value that is not wanted is dropped at once: unlogged steps neither read nor reduce anything.

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::metric::{Max, Mean, Merge, Metric, Min, Sum};
use crate::trainer::Histogram;
use crate::trainer::record::logged_tensor::LoggedTensor;
use crate::trainer::record::media::Media;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::read;

/// A number, a tensor of one number, or a [`Metric`] to log.
#[derive(Debug)]
pub struct Logged(Kind);

#[derive(Debug)]
enum Kind {
    Number(f64),
    /// One number on a device.
    Tensor(Tensor),
    Metric(Arc<dyn Metric>),
}

impl From<f64> for Logged {
    fn from(number: f64) -> Self {
        Self(Kind::Number(number))
    }
}

/// A tensor of one number stays on its device until it is read.
impl From<&Tensor> for Logged {
    fn from(number: &Tensor) -> Self {
        Self(Kind::Tensor(number.detach()))
    }
}

impl From<Tensor> for Logged {
    fn from(number: Tensor) -> Self {
        Self::from(&number)
    }
}

impl From<f32> for Logged {
    fn from(number: f32) -> Self {
        Self(Kind::Number(number.into()))
    }
}

impl<M: Metric + 'static> From<M> for Logged {
    fn from(metric: M) -> Self {
        Self(Kind::Metric(Arc::new(metric)))
    }
}

/// The reduction of numbers over batches and ranks. A [`Metric`] has its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduce {
    /// The mean, in which a batch is weighted by its samples.
    #[default]
    Mean,
    /// The sum.
    Sum,
    /// The smallest value.
    Min,
    /// The largest value.
    Max,
}

/// Options of logging (the arguments of Lightning's `self.log`).
///
/// ```
/// use fulgurite_core::trainer::{LogOptions, Reduce};
///
/// let options = LogOptions::default().reduce(Reduce::Sum).on_epoch(true);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogOptions {
    reduce: Reduce,
    weight: Option<f64>,
    on_step: Option<bool>,
    on_epoch: Option<bool>,
    sync: bool,
}

impl Default for LogOptions {
    /// The mean over samples and ranks: of each logged step in training, of all batches elsewhere.
    fn default() -> Self {
        Self { reduce: Reduce::Mean, weight: None, on_step: None, on_epoch: None, sync: true }
    }
}

impl LogOptions {
    /// Sets how numbers are reduced.
    #[must_use]
    pub fn reduce(self, reduce: Reduce) -> Self {
        Self { reduce, ..self }
    }

    /// Sets the number of samples that a number stands for in a mean; by default the batch's
    /// samples.
    #[must_use]
    pub fn weight(self, weight: f64) -> Self {
        Self { weight: Some(weight), ..self }
    }

    /// Sets whether the value of each logged step is logged. The default is true in training.
    #[must_use]
    pub fn on_step(self, on_step: bool) -> Self {
        Self { on_step: Some(on_step), ..self }
    }

    /// Sets whether the value over the whole epoch is logged, at its end. The default is false in
    /// training.
    ///
    /// With [`on_step`](Self::on_step) too, the names end in `_step` and `_epoch`.
    #[must_use]
    pub fn on_epoch(self, on_epoch: bool) -> Self {
        Self { on_epoch: Some(on_epoch), ..self }
    }

    /// Sets whether the value is reduced over the ranks, which must then all log it (the default).
    ///
    /// Otherwise rank 0's own value is logged.
    #[must_use]
    pub fn sync(self, sync: bool) -> Self {
        Self { sync, ..self }
    }
}

/// Logged values by name.
#[derive(Debug, Default)]
pub(crate) struct LogTable {
    entries: BTreeMap<String, Entry>,
    /// States that a resumed run has loaded, of names that were not logged again yet.
    loaded: SavedStates,
    /// The first mistake in a call that cannot return it.
    error: Option<Error>,
    /// Texts, histograms and tables, logged at once by the step or at an evaluation's end.
    pub(crate) media: Media,
}

#[derive(Debug, Clone)]
struct Entry {
    /// Any of the logged metrics of this name: they differ only in their states.
    metric: Arc<dyn Metric>,
    state: Tensor,
    on_step: bool,
    on_epoch: bool,
    sync: bool,
}

/// The states of a rank's table, for a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct SavedStates(BTreeMap<String, SavedState>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedState {
    merge: Merge,
    #[serde(with = "any_numbers")]
    state: Vec<f64>,
}

/// Numbers in JSON, with texts for NaN and infinities, which JSON lacks.
mod any_numbers {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Number {
        Finite(f64),
        Other(String),
    }

    pub(super) fn serialize<S: Serializer>(numbers: &[f64], to: S) -> Result<S::Ok, S::Error> {
        let number = |number: &f64| match number.is_finite() {
            true => Number::Finite(*number),
            false => Number::Other(number.to_string()),
        };
        numbers.iter().map(number).collect::<Vec<_>>().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        let number = |number| match number {
            Number::Finite(number) => Ok(number),
            Number::Other(text) => text.parse().map_err(serde::de::Error::custom),
        };
        Vec::deserialize(from)?.into_iter().map(number).collect()
    }
}

impl SavedStates {
    /// Returns the states with which rank `rank` of `world_size` continues, of all saved states.
    ///
    /// If the number of ranks is unchanged, each gets its own. Otherwise, and after a pipeline,
    /// rank 0 gets all states, merged.
    pub(crate) fn of_rank(mut all: Vec<Self>, rank: usize, world_size: usize) -> Self {
        if all.len() == world_size && !all[0].0.is_empty() {
            return all.swap_remove(rank);
        }
        Self::merged(all, rank == 0)
    }

    /// Returns all saved states, merged, if this rank `receives` them.
    pub(crate) fn merged(all: Vec<Self>, receives: bool) -> Self {
        let mut merged = Self::default();
        for (name, SavedState { merge, state }) in all.into_iter().flat_map(|states| states.0) {
            let neutral = || SavedState { merge, state: vec![merge.neutral(); state.len()] };
            let sum = merged.0.entry(name).or_insert_with(neutral);
            for (sum, number) in sum.state.iter_mut().zip(state) {
                *sum = match merge {
                    Merge::Sum => *sum + number,
                    Merge::Min => sum.min(number),
                    Merge::Max => sum.max(number),
                };
            }
        }
        if receives { merged } else { Self::default() }
    }
}

/// The context in which a value is logged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Source {
    /// Number of samples in the batch.
    pub(crate) samples: f64,
    /// Whether values are logged by step by default, instead of by epoch.
    pub(crate) training: bool,
    /// Whether this step's values are logged.
    pub(crate) wanted: bool,
    /// Whether the batch exists only for its collectives and does not count.
    pub(crate) padding: bool,
}

/// Describes the trainer's own value of this name; `None` if the name is free.
fn own_name(name: &str) -> Option<&'static str> {
    Some(match name {
        "step" => "the number of the step",
        "epoch" => "the epoch",
        "train_loss" => "the mean of the losses that `training_step` returns",
        "grad_norm" => "the norm of the gradients",
        "lr" => "the learning rate",
        "loss_scale" => "the scale of the loss in f16",
        "skipped_steps" => "the number of skipped steps",
        "val_loss" => "the mean of the losses that `validation_step` returns",
        "test_loss" => "the mean of the losses that `test_step` returns",
        name if name.starts_with("val_loss/") => "the mean loss of each validation set",
        _ => return None,
    })
}

/// The error about a name under which the trainer logs `what`.
pub(crate) fn taken(what: &str) -> Error {
    Error::other(format!(
        "the trainer logs {what} under this name; choose another, or leave it to the trainer"
    ))
}

impl LogTable {
    /// Logs one of the trainer's own values, under its own name.
    pub(crate) fn log_own(&mut self, name: &str, number: f64, source: Source) {
        if source.wanted {
            let added = self.add(name, number.into(), LogOptions::default(), (true, false), source);
            if let Err(error) = added {
                self.error.get_or_insert(error);
            }
        }
    }

    pub(crate) fn log(&mut self, name: &str, value: Logged, options: LogOptions, source: Source) {
        let on_step = options.on_step.unwrap_or(source.training);
        let on_epoch = options.on_epoch.unwrap_or(!source.training);
        let by_step = on_step && source.wanted;
        let added = match own_name(name) {
            Some(what) => Err(taken(what)),
            None if by_step || on_epoch => {
                self.add(name, value, options, (on_step, on_epoch), source)
            }
            None => Ok(()),
        };
        if let Err(error) = added {
            let error = Error::other(format!("logging `{name}`: {error}"));
            self.error.get_or_insert(error);
        }
    }

    pub(crate) fn log_text(&mut self, name: &str, text: String, source: Source) {
        if source.wanted && !source.padding {
            self.media.texts.push((name.to_owned(), text));
        }
    }

    pub(crate) fn log_histogram(&mut self, name: &str, histogram: &Histogram, source: Source) {
        let none = Histogram::default();
        if source.wanted {
            let histogram = if source.padding { &none } else { histogram };
            self.media.add_histogram(name, histogram);
        }
    }

    fn add(
        &mut self,
        name: &str,
        value: Logged,
        options: LogOptions,
        (on_step, on_epoch): (bool, bool),
        source: Source,
    ) -> Result<()> {
        let metric: Arc<dyn Metric> = match (value.0, options.reduce) {
            (Kind::Metric(metric), _) => metric,
            (Kind::Tensor(number), reduce) => {
                let weight = options.weight.unwrap_or(source.samples);
                Arc::new(LoggedTensor::new(&number, reduce, weight)?)
            }
            (Kind::Number(number), Reduce::Mean) => {
                Arc::new(Mean::of(number, options.weight.unwrap_or(source.samples)))
            }
            (Kind::Number(number), Reduce::Sum) => Arc::new(Sum(number)),
            (Kind::Number(number), Reduce::Min) => Arc::new(Min(number)),
            (Kind::Number(number), Reduce::Max) => Arc::new(Max(number)),
        };
        let mut state = metric.state()?;
        if state.rank() != 1 || state.dtype() != DType::F64 {
            return Err(Error::other(format!(
                "the state of a metric is a list of f64, got {:?} of {:?}",
                state.dims(),
                state.dtype()
            )));
        }
        if source.padding {
            let neutral = metric.merge().neutral();
            state = Tensor::full(neutral, state.dims(), state.device())?;
        }
        self.put(name, Entry { metric, state, on_step, on_epoch, sync: options.sync })
    }

    fn put(&mut self, name: &str, mut new: Entry) -> Result<()> {
        let loaded = match self.loaded.0.remove(name) {
            Some(SavedState { state, .. }) => {
                let len = state.len();
                Some(Tensor::from_vec(state, len, new.state.device())?)
            }
            None => None,
        };
        let old = self.entries.remove(name);
        let before = old.as_ref().map(|entry| &entry.state).or(loaded.as_ref());
        if let Some(before) = before {
            if before.dims() != new.state.dims() {
                return Err(Error::other(format!(
                    "it had a state of {} numbers before and has one of {} now; log different metrics \
                     under different names",
                    before.elem_count(),
                    new.state.elem_count()
                )));
            }
            new.state = new.metric.merge().apply(before, &new.state)?;
        }
        self.entries.insert(name.to_owned(), new);
        Ok(())
    }

    /// Adds values for the epoch to `epoch`, and keeps values for the step if it is `wanted`.
    ///
    /// # Errors
    /// If a call to log was wrong.
    pub(crate) fn add_to_epoch(&mut self, epoch: &mut Self, wanted: bool) -> Result<()> {
        self.check()?;
        for (name, entry) in self.entries.iter().filter(|(_, entry)| entry.on_epoch) {
            let put = epoch.put(name, entry.clone());
            put.map_err(|error| Error::other(format!("logging `{name}`: {error}")))?;
        }
        self.entries.retain(|_, entry| entry.on_step && wanted);
        Ok(())
    }

    /// Fails with the first mistake in a call to log.
    fn check(&mut self) -> Result<()> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// Returns whether a resumed run would need nothing of this table.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.loaded.0.is_empty()
    }

    /// Reduces the values over all ranks of `world`, and empties the table.
    ///
    /// `counts` is false on ranks with the same samples as another rank that counts, such as
    /// tensor-parallel ranks. Collective in an evaluation, and elsewhere if any value is
    /// synchronised: one all-reduce, and one more if there are extremes. After a training step the
    /// vote of all ranks finds a rank that has logged nothing.
    ///
    /// # Errors
    /// If a call to log was wrong, or the ranks have logged different names.
    pub(crate) fn reduce(
        &mut self,
        stage: Stage,
        world: &dyn ProcessGroup,
        counts: bool,
    ) -> Result<BTreeMap<String, f64>> {
        self.check()?;
        let entries = std::mem::take(&mut self.entries);
        let states: Vec<&Tensor> = entries.values().map(|entry| &entry.state).collect();
        let mut states = read::lists(&states, "logged values")?;
        let takes_part = stage == Stage::Evaluation || entries.values().any(|entry| entry.sync);
        if world.size() > 1 && takes_part {
            synchronize(&entries, &mut states, (world, counts))?;
        }
        let mut values = BTreeMap::new();
        for ((name, entry), state) in entries.into_iter().zip(states) {
            let name = match stage {
                Stage::Step if entry.on_epoch => format!("{name}_step"),
                Stage::Epoch | Stage::Evaluation if entry.on_step => format!("{name}_epoch"),
                _ => name,
            };
            if let Some(table) = entry.metric.table(&state)? {
                self.media.tables.push((name.clone(), table));
            }
            for (name, value) in entry.metric.compute_all(&name, &state) {
                if values.contains_key(&name) {
                    return Err(Error::other(format!(
                        "two of the values that are logged are called `{name}`; give them different names"
                    )));
                }
                values.insert(name, value);
            }
        }
        Ok(values)
    }

    /// Returns the states of this rank, which a resumed run [loads](Self::load).
    ///
    /// # Errors
    /// If a device cannot be read.
    pub(crate) fn states(&self) -> Result<SavedStates> {
        let mut all = self.loaded.clone();
        let states: Vec<&Tensor> = self.entries.values().map(|entry| &entry.state).collect();
        let states = read::lists(&states, "logged values")?;
        for ((name, entry), state) in self.entries.iter().zip(states) {
            all.0.insert(name.clone(), SavedState { merge: entry.metric.merge(), state });
        }
        Ok(all)
    }

    /// Starts with these states. A state counts as soon as a value is logged under its name.
    pub(crate) fn load(&mut self, states: SavedStates) {
        *self = Self { loaded: states, ..Self::default() };
    }
}

/// The scope of a table's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// One step.
    Step,
    /// An epoch of the training, or a hook.
    Epoch,
    /// A set of an evaluation.
    Evaluation,
}

/// Merges the states of all ranks, with equal bits on all of them.
fn synchronize(
    entries: &BTreeMap<String, Entry>,
    states: &mut [Vec<f64>],
    (group, counts): (&dyn ProcessGroup, bool),
) -> Result<()> {
    // If ranks logged different names, the all-reduce would add unrelated values.
    let mut names = XxHash3_64::with_seed(0);
    for ((name, entry), state) in entries.iter().zip(&*states).filter(|((_, e), _)| e.sync) {
        names.write(name.as_bytes());
        names.write_u64(state.len() as u64);
        names.write_u8(entry.metric.merge() as u8);
    }
    // Small enough that the sum of its squares over the ranks is exact.
    let hash = (names.finish() % (1 << 20)) as f64;
    let (mut sums, mut maxima) = (vec![hash, hash * hash], vec![]);
    for ((_, entry), state) in entries.iter().zip(&*states).filter(|((_, e), _)| e.sync) {
        match entry.metric.merge() {
            merge if !counts => match merge {
                Merge::Sum => sums.extend(state.iter().map(|_| 0.0)),
                Merge::Max | Merge::Min => maxima.extend(state.iter().map(|_| f64::NEG_INFINITY)),
            },
            Merge::Sum => sums.extend(state),
            Merge::Max => maxima.extend(state),
            Merge::Min => maxima.extend(state.iter().map(|number| -number)),
        }
    }
    let own = || {
        let names: Vec<&str> = entries.iter().filter(|(_, e)| e.sync).map(|(n, _)| &**n).collect();
        format!(
            "the ranks have logged different metrics, this one {}. All ranks must log the same names, \
             or log with `LogOptions::default().sync(false)` what is rank 0's own",
            names.join(", ")
        )
    };
    let all_reduce = |numbers: Vec<f64>, op| -> Result<Vec<f64>> {
        let numbers = Tensor::new(numbers, &Device::Cpu)?;
        group.run(Collective::all_reduce(&numbers, op)).map_err(|error| match error {
            // Other ranks have other lengths, or are in another collective.
            Error::Collective { rank, group, op, message } => {
                Error::Collective { rank, group, op, message: format!("{message} ({})", own()) }
            }
            other => other,
        })?;
        read::host(&numbers)
    };
    let sums = all_reduce(sums, ReduceOp::Sum)?;
    if group.size() as f64 * sums[1] != sums[0] * sums[0] {
        return Err(Error::other(own()));
    }
    let mut sums = sums.into_iter().skip(2);
    let mut maxima = match maxima.is_empty() {
        true => vec![],
        false => all_reduce(maxima, ReduceOp::Max)?,
    }
    .into_iter();
    for ((_, entry), state) in entries.iter().zip(states).filter(|((_, e), _)| e.sync) {
        for number in state {
            *number = match entry.metric.merge() {
                Merge::Sum => sums.next(),
                Merge::Max => maxima.next(),
                Merge::Min => maxima.next().map(|number| -number),
            }
            .expect("as many as were sent");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fulgurite_engine::collective::Solo;
    use fulgurite_test_message::assert_says;

    use super::*;

    const TRAINING: Source = Source { samples: 2.0, training: true, wanted: true, padding: false };
    const EVALUATION: Source = Source { training: false, ..TRAINING };

    fn values(table: &mut LogTable, stage: Stage) -> Vec<(String, f64)> {
        let values = table.reduce(stage, &Solo::new("world", 0), true).unwrap();
        values.into_iter().collect()
    }

    fn named(pairs: &[(&str, f64)]) -> Vec<(String, f64)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn numbers_are_reduced_as_asked() {
        let mut table = LogTable::default();
        for (value, samples) in [(1.0, 1.0), (4.0, 3.0), (2.0, 0.0)] {
            let source = Source { samples, ..EVALUATION };
            let mut log = |name: &str, options: LogOptions| {
                table.log(name, value.into(), options, source);
            };
            log("mean", LogOptions::default());
            log("weighted", LogOptions::default().weight(1.0));
            log("sum", LogOptions::default().reduce(Reduce::Sum));
            log("min", LogOptions::default().reduce(Reduce::Min));
            log("max", LogOptions::default().reduce(Reduce::Max));
        }
        let expected =
            [("max", 4.0), ("mean", 3.25), ("min", 1.0), ("sum", 7.0), ("weighted", 7.0 / 3.0)];
        assert_eq!(values(&mut table, Stage::Epoch), named(&expected));
        assert!(table.is_empty());
    }

    #[test]
    fn padding_batches_do_not_count() {
        let mut table = LogTable::default();
        let padding = Source { padding: true, ..EVALUATION };
        for (value, source) in [(f64::NAN, padding), (0.5, EVALUATION), (f64::INFINITY, padding)] {
            table.log("mean", value.into(), LogOptions::default(), source);
            table.log("min", value.into(), LogOptions::default().reduce(Reduce::Min), source);
            table.log("sum", Sum(value).into(), LogOptions::default(), source);
        }
        let expected = [("mean", 0.5), ("min", 0.5), ("sum", 0.5)];
        assert_eq!(values(&mut table, Stage::Epoch), named(&expected));
    }

    #[test]
    fn steps_and_epochs_have_own_names() {
        let (mut step, mut epoch) = (LogTable::default(), LogTable::default());
        let both = LogOptions::default().on_epoch(true);
        for (i, value) in [1.0, 3.0].into_iter().enumerate() {
            let source = Source { wanted: i == 1, ..TRAINING };
            step.log("by_step", value.into(), LogOptions::default(), source);
            step.log("by_epoch", value.into(), both.on_step(false), source);
            step.log("both", value.into(), both, source);
            step.add_to_epoch(&mut epoch, source.wanted).unwrap();
            assert_eq!(step.is_empty(), i == 0);
        }
        assert_eq!(values(&mut step, Stage::Step), named(&[("both_step", 3.0), ("by_step", 3.0)]));
        let expected = named(&[("both_epoch", 2.0), ("by_epoch", 2.0)]);
        assert_eq!(values(&mut epoch, Stage::Epoch), expected);
    }

    #[test]
    fn restored_states_continue() {
        let log = |table: &mut LogTable, value: f64| {
            table.log("mean", value.into(), LogOptions::default(), EVALUATION);
        };
        let (mut whole, mut first, mut resumed) =
            (LogTable::default(), LogTable::default(), LogTable::default());
        log(&mut first, 0.1);
        let saved = serde_json::to_string(&first.states().unwrap()).unwrap();
        resumed.load(serde_json::from_str(&saved).unwrap());
        assert_eq!(resumed.states().unwrap(), first.states().unwrap(), "before it is logged again");
        log(&mut resumed, 0.7);
        [0.1, 0.7].into_iter().for_each(|value| log(&mut whole, value));
        assert_eq!(values(&mut resumed, Stage::Epoch), values(&mut whole, Stage::Epoch));
    }

    #[test]
    fn states_of_other_ranks_are_not_lost() {
        let saved = [(1.0, 0.0), (2.0, 5.0), (4.0, 3.0)].map(|(sum, max)| {
            let mut table = LogTable::default();
            table.log("sum", Sum(sum).into(), LogOptions::default(), EVALUATION);
            table.log("max", Max(max).into(), LogOptions::default(), EVALUATION);
            table.states().unwrap()
        });
        let of = |rank, size| SavedStates::of_rank(saved.to_vec(), rank, size);
        assert_eq!(of(1, 3), saved[1], "as many ranks as before");
        assert_eq!(of(1, 2), SavedStates::default());
        let mut table = LogTable::default();
        table.load(of(0, 2));
        let padding = Source { padding: true, ..EVALUATION };
        table.log("sum", Sum(0.0).into(), LogOptions::default(), padding);
        table.log("max", Max(0.0).into(), LogOptions::default(), padding);
        assert_eq!(values(&mut table, Stage::Epoch), named(&[("max", 5.0), ("sum", 7.0)]));
    }

    #[test]
    fn mistakes_surface_in_the_reduction() {
        let solo = Solo::new("world", 0);
        let mut table = LogTable::default();
        table.log("x", 0.5.into(), LogOptions::default(), EVALUATION);
        table.log("x", Sum(1.0).into(), LogOptions::default(), EVALUATION);
        assert_says!(
            table.reduce(Stage::Epoch, &solo, true).unwrap_err(),
            "logging `x`: it had a state of 2 numbers … 1 now … different names"
        );
    }

    #[test]
    fn two_values_of_one_name_are_an_error() {
        let mut table = LogTable::default();
        let both = LogOptions::default().on_epoch(true);
        table.log("acc", 1.0.into(), both, TRAINING);
        table.log("acc_step", 2.0.into(), LogOptions::default(), TRAINING);
        let error = table.reduce(Stage::Step, &Solo::new("world", 0), true).unwrap_err();
        assert_says!(error, "two of the values … are called `acc_step` … different names");
    }
}
