//! The trainer's configuration.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    AdapterConfig, CkptPath, ClipAlgorithm, CountOrFraction, Devices, ElasticConfig, FastDevRun,
    LateReads, MemoryCheck, MicroBatchSize, Precision, QuantizationConfig, TimeLimit,
};
use crate::profiler::ProfilerConfig;
use crate::runtime::{SyncBuffers, UnusedParameters};
use crate::{Error, Result, counted};
use candle_core::Device;
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;

use fulgurite_engine::data::{LastBatch, Workers};
use fulgurite_engine::module::ActivationCheckpointing;

/// How a model is trained: the table `[trainer]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerConfig {
    /// The device of each rank. `"auto"` is CUDA if the program is built with it and finds a
    /// GPU, else the CPU.
    #[default(PluginValue::new("auto"))]
    pub accelerator: PluginValue,
    /// Number of ranks on each node. `"auto"` is as many as a launcher has started, else one
    /// per core, or one per GPU.
    #[default(Devices::Count(1))]
    pub devices: Devices,
    /// Number of nodes. More than one needs a launcher that starts the ranks, such as
    /// `torchrun` or `srun`.
    #[default(1)]
    pub num_nodes: usize,
    /// Stop after this many optimizer steps.
    pub max_steps: Option<u64>,
    /// Stop after this many passes over the training data. If nothing else limits the run,
    /// it makes one pass.
    pub max_epochs: Option<u64>,
    /// Do not stop before this many optimizer steps, even if a callback asks to stop or the
    /// time is up.
    pub min_steps: Option<u64>,
    /// Do not stop before this many passes over the training data, as `min_steps`.
    pub min_epochs: Option<u64>,
    /// Stop after this time, counted from the first step of this process.
    pub max_time: Option<TimeLimit>,
    /// Number of threads per rank that make batches during the step; with 0 the training thread
    /// makes them. By default 0 on the CPU, and 1 on other devices, so that batches are made
    /// and copied ahead. The batches and their order do not depend on this number.
    pub num_workers: Option<usize>,
    /// Number of batches that each of the `num_workers` threads may be ahead.
    #[default(2)]
    pub prefetch_factor: usize,
    /// How an epoch ends whose last samples do not fill a step: with `"wrap"` the step
    /// continues into the next epoch, with `"partial"` the last step has fewer samples, with
    /// `"drop"` the samples are left out.
    #[default(LastBatch::Wrap)]
    pub last_batch: LastBatch,
    /// Number of micro-batches in an optimizer step.
    #[default(1)]
    pub accumulate_grad_batches: u64,
    /// Number of samples in an optimizer step, over all ranks, in place of
    /// `accumulate_grad_batches`. The number of micro-batches follows from the batch size and
    /// the number of data-parallel ranks, whose product must divide it. So a job that resumes
    /// on more or fewer ranks trains as before.
    pub global_batch_size: Option<u64>,
    /// Number of samples of a rank's batch that are computed at a time in training; must divide
    /// the batch. The step does not depend on it. `"auto"`, on devices with their own memory,
    /// starts with the whole batch; when a rank runs out of memory in a step, all ranks restart
    /// the step with half as many samples (Composer's `device_train_microbatch_size`). Without
    /// this key the whole batch.
    pub micro_batch_size: Option<MicroBatchSize>,
    /// The limit of gradient clipping; without it gradients are not clipped.
    pub gradient_clip_val: Option<f64>,
    /// Whether the norm of all gradients together is clipped, or the value of each element.
    #[default(ClipAlgorithm::Norm)]
    pub gradient_clip_algorithm: ClipAlgorithm,
    /// The decay of an exponential moving average of the weights, such as `0.999`. The average
    /// is updated after each step, used instead of the weights in validations, and saved with
    /// the optimizer's state (`state.{parameter}.ema`). Without this key no average is kept.
    pub ema_decay: Option<f64>,
    /// The interval of validations: an integer is optimizer steps, a float is a fraction of an
    /// epoch (`1.0` is the end of each).
    #[default(CountOrFraction::Fraction(1.0))]
    pub val_check_interval: CountOrFraction,
    /// Only epochs with a multiple of this number, counted from 1, have validations.
    #[default(1)]
    pub check_val_every_n_epoch: u64,
    /// Number of validation batches per rank before a new run trains, so that mistakes in the
    /// validation show at once; `0` for none. Values logged there are dropped.
    #[default(2)]
    pub num_sanity_val_steps: u64,
    /// The part of the training data in an epoch: an integer is batches of each rank, a float
    /// is a fraction. If samples are shuffled, each epoch has others.
    #[default(CountOrFraction::Fraction(1.0))]
    pub limit_train_batches: CountOrFraction,
    /// The part of the validation data that is used: an integer is batches of each rank, a
    /// float is a fraction; `0` turns validation off.
    #[default(CountOrFraction::Fraction(1.0))]
    pub limit_val_batches: CountOrFraction,
    /// The part of the test data that is used, as `limit_val_batches`.
    #[default(CountOrFraction::Fraction(1.0))]
    pub limit_test_batches: CountOrFraction,
    /// The part of the data for prediction that is used, as `limit_val_batches`.
    #[default(CountOrFraction::Fraction(1.0))]
    pub limit_predict_batches: CountOrFraction,
    /// Trains on this part of the training data again and again, in order, to see whether the
    /// model can learn it. An integer is batches of each rank, a float is a fraction; `0` for
    /// normal training. As much of the validation data is used.
    #[default(CountOrFraction::Count(0))]
    pub overfit_batches: CountOrFraction,
    /// A trial of everything: trains on this many batches of each rank and validates on as
    /// many, without loggers and checkpoints. `true` is one batch.
    #[default(FastDevRun::Off)]
    pub fast_dev_run: FastDevRun,
    /// Checks the results of every layer and unit in forward and backward, and ends with an
    /// error that names the first NaN or infinite one. Slow.
    pub detect_anomaly: bool,
    /// How buffers (running statistics) of data-parallel ranks are made equal after each step:
    /// all get the first one's (`"broadcast"`) or the mean (`"mean"`), or keep their own
    /// (`"none"`; checkpoints have rank 0's).
    #[default(SyncBuffers::Broadcast)]
    pub sync_buffers: SyncBuffers,
    /// Whether batch norms (`nn::BatchNorm`) compute over the batches of all data-parallel
    /// ranks, unless a batch norm says otherwise.
    pub sync_batchnorm: bool,
    /// The interval of logged steps, in optimizer steps.
    #[default(10)]
    pub log_every_n_steps: u64,
    /// Whether the loss and gradient norm of unlogged steps stay on the device, where the
    /// update uses them. The host then reads them one step later, without waiting. `"auto"`: on
    /// devices other than the CPU, `true`: on every device, `false`: on none. A non-finite loss
    /// or norm is then an error one step later, but still changes nothing. Steps in f16, of
    /// several optimizers, with `detect_anomaly` or `cpu_offload`, or with manual optimization
    /// are always read at once.
    #[default(LateReads::Auto)]
    pub late_reads: LateReads,
    /// The dtypes of parameters and computation. `16`, `32`, `64` and `"bf16"` are short for
    /// `"16-mixed"`, `"32-true"`, `"64-true"` and `"bf16-mixed"`. In f16 the loss scale follows
    /// the gradients, as PyTorch's `GradScaler`: it is logged as `loss_scale`, and a step whose
    /// gradients overflow is skipped.
    #[default(Precision::F32True)]
    pub precision: Precision,
    /// Patterns of layers that compute in f32 while others compute in half precision, such as
    /// `["*norm*", "lm_head"]`. The layers cast their inputs and outputs.
    pub keep_in_fp32: Vec<String>,
    /// The directory of runs. Each run writes to its own `version_N`.
    #[default(PathBuf::from("fulgurite_logs"))]
    pub default_root_dir: PathBuf,
    /// The checkpoint to resume from: a path, or a name in `checkpoint.dir`. `"last"` is the
    /// checkpoint that was saved last to `checkpoint.dir` or, without that key, by the runs in
    /// `default_root_dir`; without any checkpoint yet, training starts at step 0. Without this
    /// key, a job that its launcher has restarted resumes from its own last checkpoint.
    pub ckpt_path: Option<CkptPath>,
    /// Whether rank 0 shows the model and its progress on stderr, both from the command line
    /// and from code: bars on a terminal, lines elsewhere.
    #[default(true)]
    pub enable_progress_bar: bool,
    /// Whether rank 0 plans the run before its first step, as `fulgurite plan` does, so that
    /// the summary compares the plan with what was taken.
    #[default(true)]
    pub enable_plan: bool,
    /// The hardware of that plan's step time: a name or file, as for
    /// `fulgurite plan --hardware`; by default `cpu`.
    pub plan_hardware: Option<String>,
    /// The reaction to a trainable parameter without a gradient in the first step. In later
    /// steps the optimizer leaves such a parameter alone, unless this is `"zero"`.
    #[default(UnusedParameters::Error)]
    pub unused_parameters: UnusedParameters,
    /// Patterns of parameters that are not trained:
    /// `["bert.encoder"]`, `["model.embed_tokens"]`, `["*norm*"]`.
    pub freeze: Vec<String>,
    /// Patterns of modules whose layers compute as in an evaluation, in training too: without
    /// dropout, and batch norms with their running statistics, which stay as they are. Usually
    /// the modules of `freeze`.
    pub eval_mode: Vec<String>,
    /// Small trainable parameters beside frozen layers: see `[trainer.adapters]` below. Without
    /// this key the whole model is trained.
    pub adapters: Option<AdapterConfig>,
    /// Frozen weights in fewer bits, beside which adapters are trained (QLoRA): see
    /// `[trainer.quantization]` below. Without this key no weight is quantised.
    pub quantization: Option<QuantizationConfig>,
    /// The units whose activations are recomputed in backward instead of saved: `"none"`,
    /// `"full"` (every unit), `"selective"` (every second unit), or a table.
    /// `{ type = "selective", every = 3, units = ["model.layers.*"] }` is every third unit
    /// whose path matches a pattern (`*` is one segment). `offload = "host"` or `"disk"` moves
    /// the tensors that units keep until backward to host memory or to temporary files: their
    /// inputs with type `"full"`, all of their activations with type `"none"`.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Number of seconds that a rank waits for others before it fails.
    #[default(600)]
    pub timeout_secs: u64,
    /// The interval, in optimizer steps, in which replicas compare the bits of what they hold:
    /// parameters, buffers and optimizer state. Replicas compute the same, so a difference is a
    /// fault of a memory or a processor, or of the program. It ends the run with an error that
    /// names the rank. With `trainer.elastic` the rank is replaced, if most ranks agree; the
    /// steps since the last comparison stay. Without this key nothing is compared.
    pub check_replicas_every_n_steps: Option<u64>,
    /// Names ranks that compute this factor longer than half of the ranks, in two logged steps
    /// in a row: `1.5` is one and a half times as long. Time in collectives does not count. On
    /// the CPU only. Without this key ranks are not compared.
    pub slow_rank_factor: Option<f64>,
    /// Number of the last collectives that each of several ranks keeps in a record. If ranks
    /// wait in vain or make different calls, the records are in the folder `flight` of the
    /// run's directory afterwards, and `fulgurite flight` names the rank that fell behind. `0`
    /// for none.
    #[default(20_000)]
    pub flight_recorder: usize,
    /// Whether the training goes on after the loss of a rank: see `[trainer.elastic]` below.
    pub elastic: ElasticConfig,
    /// The reaction to a model that is too large for the machine, before any process is
    /// started. `"error"` counts parameters, gradients, optimizer state and memory that ranks
    /// share. It refuses a run that needs more than one and a half times the host's memory, or
    /// more than a process may have (`ulimit -v`), and warns if the run needs more than is
    /// available. `"warn"` only warns; `"off"` does neither.
    #[default(MemoryCheck::Error)]
    pub memory_check: MemoryCheck,
    /// The distribution of the model over the ranks. `"auto"` is a single device for one rank
    /// and data parallelism for more.
    #[default(PluginValue::new("auto"))]
    pub strategy: PluginValue,
    /// The process group, which transfers data between ranks. `"auto"`: shared memory between
    /// the ranks of a host, and a network between hosts.
    #[default(PluginValue::new("auto"))]
    pub process_group: PluginValue,
    /// The cluster environment, which tells each process its rank; by default detected.
    pub environment: Option<PluginValue>,
    /// A file with the secret that the ranks of a job share, readable only by its owner, the
    /// same on all nodes. For ranks that a launcher such as `torchrun` starts; the variable
    /// `FULGURITE_JOB_KEY` has precedence. Without either, strangers can join the job.
    pub job_key_file: Option<PathBuf>,
    /// The profile of the run. `"simple"`: total times of the phases of steps, units and
    /// collectives, in a table at the end. `"trace"`: also each span on every rank, in
    /// `trace.json` in the run's directory, for Perfetto. A table such as
    /// `{ type = "trace", skip_steps = 3, steps = 5 }` chooses the steps.
    pub profiler: Option<ProfilerConfig>,
    /// Callbacks by name, such as `[{ type = "early_stopping", monitor = "val_loss" }]`.
    pub callbacks: Vec<PluginValue>,
    /// The loggers that write metrics.
    #[default(vec![PluginValue::new("csv"), PluginValue::new("jsonl")])]
    pub loggers: Vec<PluginValue>,
}

/// Limit of ranks on one node. With more cores the limit is higher.
const MAX_DEVICES: usize = 256;
/// Limit of ranks on one node, per core.
const MAX_DEVICES_PER_CORE: usize = 16;
const MAX_NODES: usize = 1 << 20;
const MAX_MICRO_BATCHES: u64 = 1 << 20;
/// A year.
pub(crate) const MAX_TIMEOUT_SECS: u64 = 365 * 24 * 60 * 60;

/// The limits of a run. It ends at the first limit that it reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Number of optimizer steps.
    pub max_steps: Option<u64>,
    /// Number of passes over the training data.
    pub max_epochs: Option<u64>,
    /// Time from the first step.
    pub max_time: Option<Duration>,
}

impl TrainerConfig {
    /// Returns the limits of the run: one epoch if the configuration sets no limit.
    pub fn limits(&self) -> Limits {
        let unlimited =
            self.max_steps.is_none() && self.max_epochs.is_none() && self.max_time.is_none();
        Limits {
            max_steps: self.max_steps,
            max_epochs: if unlimited { Some(1) } else { self.max_epochs },
            max_time: self.max_time.map(|limit| limit.0),
        }
    }

    /// Returns the limit and algorithm of gradient clipping, if gradients are clipped.
    pub(crate) fn clipping(&self) -> Option<(f64, ClipAlgorithm)> {
        Some((self.gradient_clip_val?, self.gradient_clip_algorithm))
    }

    /// Applies `fast_dev_run` and `overfit_batches`.
    pub(crate) fn effective(&self) -> Self {
        let mut config = self.clone();
        if self.overfit_batches != CountOrFraction::Count(0) {
            config.limit_train_batches = self.overfit_batches;
            config.limit_val_batches = self.overfit_batches;
        }
        if let Some(batches) = self.fast_dev_run.batches() {
            let limit = |limit: &mut CountOrFraction| {
                if *limit != CountOrFraction::Count(0) {
                    *limit = CountOrFraction::Count(batches);
                }
            };
            limit(&mut config.limit_train_batches);
            limit(&mut config.limit_val_batches);
            limit(&mut config.limit_test_batches);
            limit(&mut config.limit_predict_batches);
            (config.max_steps, config.min_steps) = (None, None);
            (config.max_epochs, config.min_epochs) = (Some(1), None);
            config.val_check_interval = CountOrFraction::Fraction(1.0);
            config.check_val_every_n_epoch = 1;
            config.num_sanity_val_steps = 0;
            config.log_every_n_steps = 1;
            config.loggers.clear();
        }
        config
    }

    /// Returns whether training samples come in order, regardless of the data module.
    pub(crate) fn in_order(&self) -> bool {
        self.overfit_batches != CountOrFraction::Count(0)
    }

    /// Returns whether step `step` is logged: the first, and every
    /// [`log_every_n_steps`](Self::log_every_n_steps).
    pub(crate) fn logs_step(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.log_every_n_steps)
    }

    /// Returns the workers that make batches for this device.
    pub fn workers(&self, device: &Device) -> Workers {
        let by_default = Workers::for_device(device).num_workers;
        let num_workers = self.num_workers.unwrap_or(by_default);
        Workers { num_workers, prefetch_factor: self.prefetch_factor }
    }

    /// Returns the number of micro-batches in an optimizer step.
    ///
    /// Each of `ranks` data-parallel ranks has `batch_size` samples in a micro-batch.
    ///
    /// # Errors
    /// [`Error::Config`] if [`global_batch_size`](Self::global_batch_size) is not a multiple of
    /// `batch_size * ranks`.
    pub fn micro_batches(&self, batch_size: usize, ranks: usize) -> Result<u64> {
        let Some(samples) = self.global_batch_size else { return Ok(self.accumulate_grad_batches) };
        let at_a_time = (batch_size as u64).saturating_mul(ranks as u64).max(1);
        match samples.checked_div(at_a_time) {
            Some(count @ 1..=MAX_MICRO_BATCHES) if samples.is_multiple_of(at_a_time) => Ok(count),
            _ => config_error(
                "global_batch_size",
                format!(
                    "found {samples}, which is no multiple of {at_a_time}: {} with {} each at a time. Change it, the \
                     batch size, or the number of ranks",
                    counted(ranks, "data-parallel rank"),
                    counted(batch_size, "sample")
                ),
            ),
        }
    }

    /// Returns the initial number of micro-batches in a rank's batch of `batch_size` samples.
    ///
    /// # Errors
    /// [`Error::Config`] if [`micro_batch_size`](Self::micro_batch_size) does not divide
    /// `batch_size`.
    pub(crate) fn micro_batches_in_batch(&self, batch_size: usize) -> Result<usize> {
        match self.micro_batch_size {
            None | Some(MicroBatchSize::Auto) => Ok(1),
            Some(MicroBatchSize::Samples(samples)) if batch_size.is_multiple_of(samples) => {
                Ok((batch_size / samples).max(1))
            }
            Some(MicroBatchSize::Samples(samples)) => config_error(
                "micro_batch_size",
                format!(
                    "must divide the {} of a batch, found {samples}",
                    counted(batch_size, "sample")
                ),
            ),
        }
    }

    /// Checks ranges, and keys that depend on each other.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn validate(&self) -> Result<()> {
        if let Some(adapters) = self.adapters.as_ref().filter(|adapters| adapters.from.is_none()) {
            adapters.adapters()?;
        }
        if let Some(quantization) = &self.quantization {
            quantization.quantization()?;
        }
        let at_least_one = [
            ("num_nodes", self.num_nodes as u64),
            ("accumulate_grad_batches", self.accumulate_grad_batches),
            ("log_every_n_steps", self.log_every_n_steps),
            ("check_val_every_n_epoch", self.check_val_every_n_epoch),
            ("check_replicas_every_n_steps", self.check_replicas_every_n_steps.unwrap_or(1)),
            ("timeout_secs", self.timeout_secs),
        ];
        for (key, value) in at_least_one {
            if value == 0 {
                return config_error(key, "must be at least 1, found 0");
            }
        }
        self.check_elastic()?;
        match self.slow_rank_factor {
            // Not `<=`, so that NaN is refused too.
            Some(factor) if !(factor > 1.0 && factor.is_finite()) => {
                return config_error(
                    "slow_rank_factor",
                    format!("must be above 1.0, found {factor:?}"),
                );
            }
            Some(_) if self.flight_recorder == 0 => {
                return config_error(
                    "slow_rank_factor",
                    "needs the record of collectives, which `trainer.flight_recorder = 0` turns off",
                );
            }
            _ => {}
        }
        match self.global_batch_size {
            Some(0) => return config_error("global_batch_size", "must be at least 1, found 0"),
            Some(_) if self.accumulate_grad_batches > 1 => {
                return config_error(
                    "global_batch_size",
                    format!(
                        "the number of micro-batches follows from it, so `trainer.accumulate_grad_batches` = {} \
                         must be left out",
                        self.accumulate_grad_batches
                    ),
                );
            }
            _ => {}
        }
        let at_most = [
            ("num_nodes", self.num_nodes as u64, MAX_NODES as u64),
            ("accumulate_grad_batches", self.accumulate_grad_batches, MAX_MICRO_BATCHES),
            ("timeout_secs", self.timeout_secs, MAX_TIMEOUT_SECS),
        ];
        for (key, value, limit) in at_most {
            if value > limit {
                return config_error(key, format!("must be at most {limit}, found {value}"));
            }
        }
        self.workers(&Device::Cpu).validate()?;
        let limit = MAX_DEVICES.max(available_cores().saturating_mul(MAX_DEVICES_PER_CORE));
        if let Devices::Count(devices) = self.devices
            && devices > limit
        {
            return config_error(
                "devices",
                format!(
                    "must be at most {limit} ranks on this host of {}, found {devices}",
                    counted(available_cores(), "core")
                ),
            );
        }
        for (least, min, most, max) in [
            ("min_steps", self.min_steps, "max_steps", self.max_steps),
            ("min_epochs", self.min_epochs, "max_epochs", self.max_epochs),
        ] {
            if let (Some(min), Some(max)) = (min, max)
                && min > max
            {
                let message = format!("must not exceed `trainer.{most}` = {max}, found {min}");
                return config_error(least, message);
            }
        }
        if matches!(
            self.limit_train_batches,
            CountOrFraction::Count(0) | CountOrFraction::Fraction(0.0)
        ) {
            return config_error("limit_train_batches", "must be above 0, or there is no training");
        }
        if let Some(limit) = self.gradient_clip_val
            && !(limit.is_finite() && limit > 0.0)
        {
            return config_error(
                "gradient_clip_val",
                format!("must be above 0, found {limit:?}; leave it out for no clipping"),
            );
        }
        if let Some(decay) = self.ema_decay
            && !(0.0..1.0).contains(&decay)
        {
            return config_error(
                "ema_decay",
                format!("must be at least 0 and below 1, such as 0.999; found {decay:?}"),
            );
        }
        if let Err(message) = self.activation_checkpointing.check() {
            return config_error("activation_checkpointing", message);
        }
        if let Some(Err(message)) = self.profiler.as_ref().map(ProfilerConfig::check) {
            return config_error("profiler", message);
        }
        match self.val_check_interval {
            CountOrFraction::Count(0) => config_error(
                "val_check_interval",
                "must be at least 1 step; `trainer.limit_val_batches = 0` turns validation off",
            ),
            CountOrFraction::Fraction(0.0) => config_error(
                "val_check_interval",
                "must be above 0.0; `trainer.limit_val_batches = 0` turns validation off",
            ),
            _ => Ok(()),
        }
    }

    /// Checks `trainer.elastic`, and keys that it depends on.
    fn check_elastic(&self) -> Result<()> {
        let elastic = &self.elastic;
        elastic.validate()?;
        if elastic.replace_slow_ranks && self.slow_rank_factor.is_none() {
            return config_error(
                "elastic.replace_slow_ranks",
                "which ranks are slow? Set `trainer.slow_rank_factor`, such as 1.5",
            );
        }
        if !elastic.enabled {
            return Ok(());
        }
        match self.devices {
            Devices::Count(ranks) if ranks.saturating_mul(self.num_nodes) < elastic.min_ranks => {
                let of_nodes = match self.num_nodes {
                    1 => String::new(),
                    nodes => format!(" of each of {nodes} nodes"),
                };
                config_error(
                    "elastic.min_ranks",
                    format!(
                        "found {}, and `trainer.devices` = {ranks}{of_nodes} are all ranks",
                        elastic.min_ranks
                    ),
                )
            }
            _ => Ok(()),
        }
    }

    /// Checks that all plugins are linked into the program and accept their options.
    ///
    /// # Errors
    /// [`Error::UnknownPlugin`], or [`Error::Config`] for an option.
    pub fn check_plugins(&self) -> Result<()> {
        self.strategy.check(kind::STRATEGY, "trainer.strategy")?;
        if self.names_accelerator() {
            self.accelerator.check(kind::ACCELERATOR, "trainer.accelerator")?;
        }
        self.process_group.check(kind::PROCESS_GROUP, "trainer.process_group")?;
        if let Some(environment) = &self.environment {
            environment.check(kind::ENVIRONMENT, "trainer.environment")?;
        }
        for (i, callback) in self.callbacks.iter().enumerate() {
            callback.check(kind::CALLBACK, &format!("trainer.callbacks[{i}]"))?;
        }
        for (i, logger) in self.loggers.iter().enumerate() {
            logger.check(kind::LOGGER, &format!("trainer.loggers[{i}]"))?;
        }
        Ok(())
    }
}

/// Number of cores that this process may use.
pub(crate) fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(super) fn config_error<T>(key: &str, message: impl std::fmt::Display) -> Result<T> {
    Err(Error::Config(format!("`trainer.{key}`: {message}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;
    use fulgurite_config::ConfigLayers;
    use fulgurite_engine::module::ActivationOffload;
    use fulgurite_test_message::assert_says;

    fn trainer(keys: &str) -> Result<TrainerConfig> {
        let text = format!("[trainer]\n{keys}");
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        RunConfig::<toml::Table, toml::Table>::from_layers(layers).map(|run| run.trainer)
    }

    #[test]
    fn a_run_without_limits_is_one_epoch() {
        let one_epoch = Limits { max_steps: None, max_epochs: Some(1), max_time: None };
        assert_eq!(trainer("").unwrap().limits(), one_epoch);
        let ten_steps = Limits { max_steps: Some(10), max_epochs: None, max_time: None };
        assert_eq!(trainer("max_steps = 10").unwrap().limits(), ten_steps);
        let minute =
            Limits { max_steps: None, max_epochs: None, max_time: Some(Duration::from_secs(60)) };
        assert_eq!(trainer("max_time = '00:00:01:00'").unwrap().limits(), minute);
    }

    #[test]
    fn batches_are_sent_ahead_to_other_devices() {
        let device = Device::Metal(candle_core::MetalDevice);
        let of = |keys, device: &Device| {
            let Workers { num_workers, prefetch_factor } = trainer(keys).unwrap().workers(device);
            [num_workers, prefetch_factor]
        };
        assert_eq!([of("", &Device::Cpu), of("", &device)], [[0, 2], [1, 2]]);
        let keys = "num_workers = 0\nprefetch_factor = 1";
        assert_eq!([of(keys, &Device::Cpu), of(keys, &device)], [[0, 1]; 2]);
        assert_eq!(of("num_workers = 3", &Device::Cpu), [3, 2]);
    }

    #[test]
    fn wrong_values_are_refused() {
        let error = |keys| trainer(keys).unwrap_err();
        assert_says!(
            error("accumulate_grad_batches = 0"),
            "`trainer.accumulate_grad_batches`: must be at least 1, found 0"
        );
        assert_says!(
            error("accumulate_grad_batches = 1_000_000_000_000_000_000"),
            "`trainer.accumulate_grad_batches` … at most 1048576, found 1000000000000000000"
        );
        assert_says!(error("num_workers = 100_000"), "`trainer.num_workers` … 256, found 100000");
        assert_says!(error("prefetch_factor = 0"), "`trainer.prefetch_factor` … least 1 … found 0");
        assert_says!(
            error("timeout_secs = 9223372036854775807"),
            "`trainer.timeout_secs` … most …"
        );
        assert_says!(error("num_nodes = 4611686018427387904"), "`trainer.num_nodes` … 1048576 …");
        let devices = error("devices = 4611686018427387904").to_string();
        assert!(devices.starts_with("`trainer.devices`: must be at most "), "{devices}");
        assert!(devices.ends_with(", found 4611686018427387904"), "{devices}");
        assert_says!(error("memory_check = 'maybe'"), r#"… `trainer.memory_check` … "maybe""#);
        assert_says!(
            error("gradient_clip_val = -1"),
            "`trainer.gradient_clip_val` … above 0, found -1.0 …"
        );
        assert_says!(error("gradient_clip_val = nan"), "`trainer.gradient_clip_val` … found NaN …");
        assert_says!(error("ema_decay = 1.0"), "`trainer.ema_decay` … 0 and below 1 … found 1.0");
        assert_says!(
            error("activation_checkpointing = 'some'"),
            r#"run.toml: `trainer.activation_checkpointing`: expected "none" … found "some""#
        );
        assert_says!(
            error("activation_checkpointing = true"),
            "run.toml: `trainer.activation_checkpointing`: expected … a table … found `true`"
        );
        assert_says!(
            error("activation_checkpointing = { every = 2 }"),
            r#"`trainer.activation_checkpointing`: `every` … `type = "selective"` … "none""#
        );
        assert_says!(
            error("activation_checkpointing = { type = 'full', every = 2 }"),
            r#"`trainer.activation_checkpointing`: `every` … `type = "selective"` … "full""#
        );
        assert_says!(
            error("activation_checkpointing = { type = 'selective', every = 0 }"),
            "`trainer.activation_checkpointing`: `every` must be at least 1, found 0 …"
        );
        assert_says!(
            error("activation_checkpointing = { type = 'full', offload = 'cloud' }"),
            r#"run.toml: `trainer.activation_checkpointing.offload`: expected "host" … "cloud""#
        );
        assert_says!(
            error("activation_checkpointing = { type = 'none', units = ['a'] }"),
            r#"`trainer.activation_checkpointing`: `units` … type is "none"; choose "full" …"#
        );
        assert_says!(
            error("profiler = 'advanced'"),
            r#"run.toml: `trainer.profiler` … "advanced""#
        );
        assert_says!(
            error("profiler = { type = 'trace', step = 3 }"),
            "run.toml: unknown key `trainer.profiler.step`; did you mean `steps`? …"
        );
        assert_says!(
            error("profiler = { type = 'trace', steps = 0 }"),
            r#"`trainer.profiler`: `steps` … must be from 1 to 10000, found 0; "simple" …"#
        );
        assert_says!(error("val_check_interval = 0"), "`trainer.val_check_interval` … least 1 …");
        assert_says!(error("val_check_interval = 0.0"), "`trainer.val_check_interval` … above …");
        assert_says!(error("max_steps = -1"), "run.toml: `trainer.max_steps` … least 0 … `-1` …");
        assert_says!(error("max_steps = 1e3"), "run.toml: `trainer.max_steps` … `1000.0` … 1000");
        assert_says!(error("loggers = 'csv'"), r#"run.toml: `trainer.loggers` … a list … ["csv"]"#);
        assert_says!(error("loggers = [3]"), "run.toml: `trainer.loggers[0]` … `type`, found `3`");
        assert_says!(
            error("strategy = { bucket_cap_mb = 3, type = 4 }"),
            "run.toml: `trainer.strategy.type`: expected a string, found `4` … quotes"
        );
        assert_says!(error("default_root_dir = 3"), "run.toml: `trainer.default_root_dir` … `3` …");
    }

    // checklist: torchtune: _get_sharding_strategy
    #[test]
    fn unlinked_plugins_are_named() {
        let error = trainer("strategy = 'fsdpp'").unwrap().check_plugins().unwrap_err();
        assert!(matches!(error, Error::UnknownPlugin { kind: "strategy", .. }), "{error}");
    }

    #[test]
    fn the_defaults_survive_every_format() {
        let table = ActivationCheckpointing {
            units: vec!["layers.*".to_owned()],
            ..ActivationCheckpointing::selective(3)
        };
        let offloaded = ActivationCheckpointing {
            offload: Some(ActivationOffload::Disk),
            ..ActivationCheckpointing::full()
        };
        let choices =
            [ActivationCheckpointing::default(), ActivationCheckpointing::full(), table, offloaded];
        for activation_checkpointing in choices {
            survives(TrainerConfig { activation_checkpointing, ..TrainerConfig::default() });
        }
        for profiler in
            [ProfilerConfig::Simple, ProfilerConfig::Trace { skip_steps: 1, steps: 2 }].map(Some)
        {
            survives(TrainerConfig { profiler, ..TrainerConfig::default() });
        }
    }

    fn survives(config: TrainerConfig) {
        let toml = fulgurite_config::to_table(&config).unwrap();
        assert_eq!(fulgurite_config::parse::<TrainerConfig>(toml).unwrap(), config);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<TrainerConfig>(&json).unwrap(), config);
    }
}
