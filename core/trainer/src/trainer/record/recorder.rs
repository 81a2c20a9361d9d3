//! The reports of a run: metrics by name, and events for sinks. The last step may not be read yet.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::OnceLock;

use crate::fabric::{Fabric, PendingStep, StepNumbers};
use crate::run::TrainerConfig;
use crate::trainer::progress::Cursor;
use crate::trainer::record::display::{EvaluationProgress, RunStart};
use crate::trainer::record::event::{Event, RunStatus, SharedSink};
use crate::trainer::record::item_rate::ItemRate;
use crate::trainer::record::log_table::{LogTable, SavedStates, Stage, taken};
use crate::trainer::record::meter::Meter;
use crate::trainer::record::run_dir::RunDirGuard;
use crate::trainer::record::usage::Usage;
use crate::{Error, Result};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::data::DataReport;
use fulgurite_engine::mesh::DP_CP;
use fulgurite_error::output;

const TRAIN_LOSS: &str = "train_loss";
const GRAD_NORM: &str = "grad_norm";

/// The metrics of a run, and the receivers of its events.
pub(crate) struct Recorder {
    sinks: Vec<SharedSink>,
    meter: Meter,
    usage: Usage,
    /// [`DataModule::items`](fulgurite_engine::data::DataModule::items).
    items_name: &'static str,
    has_loggers: bool,
    /// Whether the sinks know of the run from an earlier generation.
    goes_on: bool,
    /// The last step that the sinks know; `None` before they know that the run begins.
    told: Option<u64>,
    /// Whether the run is a trial, which keeps nothing (`trainer.fast_dev_run`).
    is_trial: bool,
    metrics: BTreeMap<String, f64>,
    /// The step in which each metric was logged last.
    metric_steps: BTreeMap<String, u64>,
    /// [`DataModule::report`](fulgurite_engine::data::DataModule::report), until it is sent to the
    /// sinks.
    data: Option<DataReport>,
    /// Values logged in the present epoch.
    epoch_table: LogTable,
    /// Values logged by the running hook.
    hook_table: LogTable,
    /// The last step, until it is reported.
    pending: Option<DoneStep>,
    /// The report of the last step, in an elastic training.
    last_step: Option<Event>,
    keeps_last_step: bool,
    /// The last field, so that it is dropped last: removes the run's directory if it has no
    /// results.
    guard: Option<RunDirGuard>,
}

/// The receivers and measurements of a rank that go on in the next generation of an elastic
/// training.
pub(crate) struct Reports {
    pub(crate) sinks: Vec<SharedSink>,
    pub(crate) meter: Meter,
    pub(crate) guard: Option<RunDirGuard>,
    /// The last step that the sinks know; `None` before they know that the run begins.
    pub(crate) told: Option<u64>,
}

/// A finished step that is not reported yet.
#[derive(Debug)]
pub(crate) struct DoneStep {
    pub(crate) report: StepReport,
    pub(crate) numbers: PendingStep,
    /// The run's position before the step.
    pub(crate) before: Cursor,
}

/// The part of a step's report that the host knows without its device.
#[derive(Debug)]
pub(crate) struct StepReport {
    pub(crate) step: u64,
    /// Number of passes over the training data.
    pub(crate) epoch: f64,
    pub(crate) lr: f64,
    pub(crate) rate: ItemRate,
    pub(crate) metrics: BTreeMap<String, f64>,
}

impl Recorder {
    /// Creates a recorder that reports to `sinks` on this rank.
    pub(crate) fn new(
        config: &TrainerConfig,
        sinks: Vec<SharedSink>,
        (meter, usage): (Meter, Usage),
        (items_name, data): (&'static str, Option<DataReport>),
        guard: Option<RunDirGuard>,
    ) -> Self {
        Self {
            sinks,
            meter,
            usage,
            items_name,
            has_loggers: !config.loggers.is_empty(),
            goes_on: false,
            told: None,
            is_trial: config.fast_dev_run.batches().is_some(),
            metrics: BTreeMap::new(),
            metric_steps: BTreeMap::new(),
            data,
            epoch_table: LogTable::default(),
            hook_table: LogTable::default(),
            pending: None,
            last_step: None,
            keeps_last_step: config.elastic.enabled,
            guard,
        }
    }

    /// Sets the last step that the sinks know from an earlier generation, if they know of the run.
    pub(crate) fn going_on(self, told: Option<u64>) -> Self {
        Self { goes_on: told.is_some(), told, ..self }
    }

    /// Whether the sinks know this step, or a later one.
    pub(crate) fn has_told(&self, step: u64) -> bool {
        self.told.is_some_and(|told| told >= step)
    }

    /// Returns whether the sinks know of the run from an earlier generation.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// The memory and traffic of steps.
    pub(crate) fn usage(&mut self) -> &mut Usage {
        &mut self.usage
    }

    /// Sends an event to the sinks.
    pub(crate) fn emit(&mut self, fabric: &Fabric, event: &Event) -> Result<()> {
        let _phase = fabric.measurements().phase("logging");
        let is_logged = self.has_loggers && event.is_logged();
        if is_logged || matches!(event, Event::Step { .. } | Event::Checkpoint { .. }) {
            self.keep_run_dir();
        }
        if let Event::Step { step, .. } = event {
            self.told = Some(*step);
        }
        self.sinks.iter().try_for_each(|sink| sink.lock().event(event))
    }

    /// Keeps the directory of a run with results, unless the run is a trial.
    pub(crate) fn keep_run_dir(&mut self) {
        if let Some(guard) = self.guard.as_mut().filter(|_| !self.is_trial) {
            guard.keep();
        }
    }

    /// Sends the data report to the sinks, and warns of data that was left out by mistake.
    pub(crate) fn report_data(&mut self, fabric: &Fabric) -> Result<()> {
        let Some(report) = self.data.take().filter(|_| !self.goes_on) else { return Ok(()) };
        if let (true, Some(faults)) = (fabric.is_global_zero(), report.faults()) {
            tracing::warn!("some of the data cannot be used and was left out: {faults}");
        }
        self.emit(fabric, &Event::Data(report))
    }

    /// Tells the sinks that the run begins. `start` is called only if there are sinks.
    pub(crate) fn begin(&mut self, start: impl FnOnce() -> Result<RunStart>) -> Result<()> {
        self.told = Some(self.told.unwrap_or(0));
        if self.sinks.is_empty() {
            return Ok(());
        }
        let start = start()?;
        self.sinks.iter().for_each(|sink| {
            let mut sink = sink.lock();
            sink.begin(&start);
            sink.start(start.max_steps);
        });
        Ok(())
    }

    /// Sends the progress of an evaluation to the sinks.
    pub(crate) fn show_evaluation(&self, progress: EvaluationProgress) {
        self.sinks.iter().for_each(|sink| sink.lock().evaluating(progress));
    }

    /// Finishes the sinks, and drops them. Returns the first error.
    pub(crate) fn finish(&mut self, status: RunStatus) -> Result<()> {
        let sinks = std::mem::take(&mut self.sinks);
        let results: Vec<Result<()>> =
            sinks.iter().map(|sink| sink.lock().finish(status)).collect();
        // The program may end now.
        match status {
            RunStatus::Failed => output::flush_briefly(),
            RunStatus::Success | RunStatus::Interrupted => output::flush(),
        }
        results.into_iter().collect()
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Forgets the times of the last steps, which are taken again.
    pub(crate) fn forget_last(&mut self, steps: u64) {
        self.meter.forget_last(steps);
    }

    pub(crate) fn begin_step(&mut self) {
        self.meter.begin_step();
    }

    /// Ends the timing of a step whose losses count `items`.
    pub(crate) fn end_step(&mut self, items: f64) -> ItemRate {
        ItemRate::new(self.items_name, self.meter.end_step(items))
    }

    pub(crate) fn items_name(&self) -> &'static str {
        self.items_name
    }

    /// Returns the latest value of each metric, without the values of a pending step.
    pub(crate) fn metrics(&self) -> &BTreeMap<String, f64> {
        &self.metrics
    }

    /// Restores the metrics of an earlier run, or of an earlier point of this run.
    pub(crate) fn set_metrics(&mut self, metrics: BTreeMap<String, f64>) {
        self.metrics = metrics;
    }

    /// Returns the step in which each metric was logged last.
    pub(crate) fn metric_steps(&self) -> &BTreeMap<String, u64> {
        &self.metric_steps
    }

    /// Restores what [`metric_steps`](Self::metric_steps) returned.
    pub(crate) fn set_metric_steps(&mut self, steps: BTreeMap<String, u64>) {
        self.metric_steps = steps;
    }

    /// Returns the step in which a metric was logged last.
    pub(crate) fn metric_step(&self, name: &str) -> Option<u64> {
        self.metric_steps.get(name).copied()
    }

    /// Records metrics of a step.
    pub(crate) fn record(&mut self, step: u64, values: &BTreeMap<String, f64>) {
        for (name, value) in values {
            self.record_one(step, name, *value);
        }
    }

    /// Records a metric of a step.
    pub(crate) fn record_one(&mut self, step: u64, name: &str, value: f64) {
        self.metrics.insert(name.to_owned(), value);
        self.metric_steps.insert(name.to_owned(), step);
    }

    /// Reduces a table over all ranks. Collective as [`LogTable::reduce`].
    pub(crate) fn reduce(
        fabric: &Fabric,
        table: &mut LogTable,
        stage: Stage,
    ) -> Result<BTreeMap<String, f64>> {
        let (world, group) = (fabric.world(), fabric.device_mesh().group(DP_CP)?);
        let counts = group.global_ranks().contains(&world.global_ranks()[0]);
        table.reduce(stage, &**world, counts)
    }

    /// Reduces a table of steps over all ranks. Under a pipeline, steps log where they end, in the
    /// last stage, whose ranks give the others what they reduced. Collective as
    /// [`LogTable::reduce`], and always under a pipeline.
    pub(crate) fn reduce_of_steps(
        fabric: &Fabric,
        table: &mut LogTable,
        stage: Stage,
    ) -> Result<BTreeMap<String, f64>> {
        let Some(pipeline) = fabric.runtime.pipeline()? else {
            return Self::reduce(fabric, table, stage);
        };
        let mut metrics = BTreeMap::new();
        if pipeline.group().rank() == pipeline.last_rank() {
            let mesh = fabric.device_mesh();
            let (ranks, group) = (mesh.stage_ranks(), mesh.group(DP_CP)?);
            let counts = group.global_ranks().contains(&ranks.global_ranks()[0]);
            metrics = table.reduce(stage, &**ranks, counts)?;
            table.media.reduce_in_place(&**ranks)?;
        } else {
            *table = LogTable::default();
        }
        let group = &**pipeline.group();
        // As bits: JSON cannot express NaN.
        let bits: Vec<(String, u64)> =
            metrics.into_iter().map(|(name, value)| (name, f64::to_bits(value))).collect();
        let given = (bits, std::mem::take(&mut table.media));
        let (bits, media) = broadcast_object(group, &given, pipeline.last_rank())?;
        table.media = media;
        Ok(bits.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect())
    }

    /// Reduces and reports the values of a table of steps, if any. Collective as
    /// [`reduce_of_steps`](Self::reduce_of_steps).
    pub(crate) fn log_steps(
        &mut self,
        fabric: &Fabric,
        step: u64,
        table: &mut LogTable,
    ) -> Result<()> {
        let metrics = Self::reduce_of_steps(fabric, table, Stage::Epoch)?;
        self.report_table(fabric, step, table, metrics)
    }

    /// Reduces and reports the values of a table, if any. Collective.
    pub(crate) fn log_table(
        &mut self,
        fabric: &Fabric,
        step: u64,
        table: &mut LogTable,
        stage: Stage,
    ) -> Result<()> {
        let metrics = Self::reduce(fabric, table, stage)?;
        self.report_table(fabric, step, table, metrics)
    }

    fn report_table(
        &mut self,
        fabric: &Fabric,
        step: u64,
        table: &mut LogTable,
        metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        if !metrics.is_empty() {
            self.record(step, &metrics);
            self.emit(fabric, &Event::Metrics { step, metrics })?;
        }
        self.log_media(fabric, step, table)
    }

    /// Reports the texts, histograms and tables of a table of logged values, if any. Collective if
    /// there are histograms.
    pub(crate) fn log_media(
        &mut self,
        fabric: &Fabric,
        step: u64,
        table: &mut LogTable,
    ) -> Result<()> {
        let mut media = std::mem::take(&mut table.media);
        let histograms = media.reduce_histograms(&**fabric.world())?;
        for (name, text) in media.texts {
            self.emit(fabric, &Event::Text { step, name, text })?;
        }
        for (name, table) in media.tables {
            self.emit(fabric, &Event::Table { step, name, table })?;
        }
        for (name, histogram) in histograms {
            self.emit(fabric, &Event::Histogram { step, name, histogram })?;
        }
        Ok(())
    }

    /// Reports the values of the last hook. Collective if any are synchronised.
    pub(crate) fn log_hook(&mut self, fabric: &Fabric, step: u64) -> Result<()> {
        let mut table = std::mem::take(&mut self.hook_table);
        self.log_table(fabric, step, &mut table, Stage::Step)
    }

    /// Drops values that hooks have logged.
    pub(crate) fn forget_hook(&mut self) {
        self.hook_table = LogTable::default();
    }

    /// Reports the values of the ending epoch. Collective.
    pub(crate) fn log_epoch(&mut self, fabric: &Fabric, step: u64) -> Result<()> {
        let mut table = std::mem::take(&mut self.epoch_table);
        self.log_steps(fabric, step, &mut table)
    }

    /// Reduces the values of a step over all ranks, and adds them to the epoch. Collective.
    pub(crate) fn reduce_step(
        &mut self,
        fabric: &Fabric,
        table: &mut LogTable,
        is_logged: bool,
        rate: &ItemRate,
    ) -> Result<BTreeMap<String, f64>> {
        table.add_to_epoch(&mut self.epoch_table, is_logged)?;
        let mut metrics = match fabric.runtime.pipeline()? {
            // Values of unlogged steps are not passed on.
            Some(_) if !is_logged => {
                *table = LogTable::default();
                BTreeMap::new()
            }
            _ => Self::reduce_of_steps(fabric, table, Stage::Step)?,
        };
        if let Some(scale) = fabric.loss_scale()? {
            metrics.insert("loss_scale".to_owned(), scale.factor());
        }
        if metrics.contains_key(&rate.name()) {
            let taken = taken("how many items a second there are");
            return Err(Error::other(format!("logging `{}`: {taken}", rate.name())));
        }
        Ok(metrics)
    }

    /// Returns this rank's values of the present epoch, for a checkpoint; `None` if no rank has
    /// any.
    pub(crate) fn epoch_states(&self, fabric: &Fabric) -> Option<Result<SavedStates>> {
        // Under a pipeline, only ranks of the last stage have some.
        let mesh = fabric.device_mesh();
        let has = !self.epoch_table.is_empty() || mesh.pipeline().is_some();
        // Ranks with the same samples have the same values.
        let counts = mesh.group(DP_CP).is_ok_and(|group| {
            group.global_ranks().contains(&mesh.stage_ranks().global_ranks()[0])
        });
        has.then(|| if counts { self.epoch_table.states() } else { Ok(SavedStates::default()) })
    }

    /// Returns this rank's values of the present epoch; `None` if it has none.
    pub(crate) fn own_epoch_states(&self) -> Option<Result<SavedStates>> {
        (!self.epoch_table.is_empty()).then(|| self.epoch_table.states())
    }

    /// Returns whether the last step is not reported yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes what goes on in the next generation. The recorder reports nothing any more.
    pub(crate) fn hand_over(&mut self) -> Reports {
        let sinks = std::mem::take(&mut self.sinks);
        let meter = std::mem::replace(&mut self.meter, Meter::new(0.0));
        Reports { sinks, meter, guard: self.guard.take(), told: self.told }
    }

    /// Restores the values of a checkpoint's epoch.
    pub(crate) fn load_epoch(&mut self, states: SavedStates) {
        self.epoch_table.load(states);
    }

    /// Sets the last step, which is reported when it is read.
    pub(crate) fn set_pending(&mut self, step: DoneStep) {
        self.pending = Some(step);
    }

    /// Takes the last step if it is not reported.
    pub(crate) fn take_pending(&mut self) -> Option<DoneStep> {
        self.pending.take()
    }

    /// Reports a step.
    pub(crate) fn report_step(
        &mut self,
        fabric: &Fabric,
        report: StepReport,
        StepNumbers { loss, grad_norm }: StepNumbers,
    ) -> Result<()> {
        let StepReport { step, epoch, lr, rate, metrics } = report;
        // A step in which nothing counts has no loss: keep the loss of the step before.
        if !loss.is_nan() {
            self.meter.note_loss(loss);
            self.record_one(step, TRAIN_LOSS, loss);
        }
        self.record_one(step, GRAD_NORM, grad_norm);
        let event = Event::Step { step, epoch, train_loss: loss, grad_norm, lr, rate, metrics };
        if self.keeps_last_step {
            self.last_step = Some(event.clone());
        }
        self.emit(fabric, &event)
    }

    /// Returns the report of the last step, in an elastic training.
    pub(crate) fn last_step(&self) -> Option<&Event> {
        self.last_step.as_ref()
    }

    /// Returns the gradient norm of the last reported step.
    pub(crate) fn last_grad_norm(&self) -> f64 {
        self.metrics.get(GRAD_NORM).copied().unwrap_or(0.0)
    }

    /// Returns a hook's view: the metrics, the step of each, and the table that the hook logs to.
    pub(crate) fn for_hook(&mut self) -> (Metrics<'_>, &BTreeMap<String, u64>, &mut LogTable) {
        let metrics = Metrics {
            known: &self.metrics,
            pending: self.pending.as_ref(),
            with_pending: OnceLock::new(),
        };
        (metrics, &self.metric_steps, &mut self.hook_table)
    }
}

/// The latest metrics by name, as a map for hooks.
///
/// With `trainer.late_reads`, the last step's loss and norm may still be on the device. Access to
/// the map then reads them.
pub struct Metrics<'a> {
    known: &'a BTreeMap<String, f64>,
    pending: Option<&'a DoneStep>,
    with_pending: OnceLock<BTreeMap<String, f64>>,
}

impl Metrics<'_> {
    /// Returns the step of a metric, if that step is not read yet.
    pub(crate) fn pending_step(&self, name: &str) -> Option<u64> {
        let is_of_step = [TRAIN_LOSS, GRAD_NORM].contains(&name);
        self.pending.filter(|_| is_of_step).map(|step| step.report.step)
    }
}

impl Deref for Metrics<'_> {
    type Target = BTreeMap<String, f64>;

    fn deref(&self) -> &BTreeMap<String, f64> {
        let Some(step) = self.pending else { return self.known };
        self.with_pending.get_or_init(|| {
            // The end of the next step, at the latest, reports the error.
            let unknown = StepNumbers { loss: f64::NAN, grad_norm: f64::NAN };
            let StepNumbers { loss, grad_norm } = step.numbers.numbers().unwrap_or(unknown);
            let mut all = self.known.clone();
            let both = [(TRAIN_LOSS, loss), (GRAD_NORM, grad_norm)];
            all.extend(both.map(|(name, value)| (name.to_owned(), value)));
            all
        })
    }
}

impl std::fmt::Debug for Metrics<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.known.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_engine::collective::TrafficMeter;

    fn recorder() -> Recorder {
        let measured = (Meter::new(0.0), Usage::new(TrafficMeter::default(), 0));
        Recorder::new(&TrainerConfig::default(), Vec::new(), measured, ("items", None), None)
    }

    #[test]
    fn next_generation_tells_what_was_not_told() {
        // A rank was lost before the sinks knew of the run.
        let told = recorder().hand_over().told;
        assert!(!recorder().going_on(told).goes_on());
        let mut begun = recorder();
        begun.begin(|| panic!("there are no sinks")).unwrap();
        let next = recorder().going_on(begun.hand_over().told);
        assert!(next.goes_on() && next.has_told(0) && !next.has_told(1));
    }
}
