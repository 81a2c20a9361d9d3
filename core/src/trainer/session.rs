//! A run in progress: the module, its data, the optimizer, and how far they have come.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::hooks::{Hook, Hooks, Moment};
use super::meter::{Meter, peak_rss_mib};
use super::{Event, EventSink, LightningModule, Limits, StepContext, TrainerConfig};
use crate::autograd::no_grad;
use crate::checkpoint::{self, CheckpointIO};
use crate::collective::{ReduceOp, all_gather_object, broadcast_object};
use crate::config::{Amount, CheckpointConfig, ClipAlgorithm};
use crate::data::{DataModule, EvalSampler, SampleOrder, Split, TrainSampler};
use crate::fabric::{Fabric, FabricOptimizer};
use crate::mesh::DP_CP;
use crate::{Error, Result};

/// How far a run has come: all that resuming needs besides weights and optimizer state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cursor {
    /// Optimizer steps done.
    pub(super) step: u64,
    /// Samples used, over all ranks: the position in the endless stream of samples.
    pub(super) samples: u64,
}

/// What a checkpoint holds besides tensors.
#[derive(Debug, Serialize, Deserialize)]
struct SavedState {
    cursor: Cursor,
    seed: u64,
    optimizer: BTreeMap<String, f64>,
}

/// The parts of a session that do not depend on the module.
pub(super) struct Parts {
    pub(super) fabric: Fabric,
    pub(super) config: TrainerConfig,
    pub(super) checkpoint: CheckpointConfig,
    pub(super) io: Option<Arc<dyn CheckpointIO>>,
    pub(super) resolved: toml::Table,
    pub(super) hooks: Hooks,
    pub(super) sinks: Vec<Box<dyn EventSink>>,
    pub(super) meter: Meter,
    pub(super) strategy: String,
    pub(super) interrupted: fn() -> bool,
}

pub(super) struct Session<M, D> {
    pub(super) parts: Parts,
    pub(super) module: M,
    pub(super) data: D,
    pub(super) batch_size: usize,
    pub(super) shuffle: bool,
    pub(super) cursor: Cursor,
    pub(super) metrics: BTreeMap<String, f64>,
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// A limit was reached, or a hook asked to stop.
    Finished,
    /// Someone interrupted the run.
    Interrupted,
}

impl<M, D> Session<M, D>
where
    M: LightningModule<Batch = D::Batch>,
    D: DataModule,
{
    fn world_size(&self) -> usize {
        self.parts.fabric.world_size()
    }

    fn rank(&self) -> usize {
        self.parts.fabric.global_rank()
    }

    fn emit(&mut self, event: &Event) -> Result<()> {
        self.parts.sinks.iter_mut().try_for_each(|sink| sink.event(event))
    }

    fn hook(&mut self, hook: Hook, epoch: u64) -> Result<()> {
        let moment = Moment { step: self.cursor.step, epoch };
        self.parts.hooks.call(hook, &mut self.module, moment, &self.metrics, &self.data)
    }

    fn device(&self) -> Result<Device> {
        let tree = self.parts.fabric.module_tree()?;
        Ok(tree.parameters().first().map_or(Device::Cpu, |p| p.device().clone()))
    }

    /// The order of training samples of this rank.
    fn train_sampler(&self) -> Result<(SampleOrder, TrainSampler)> {
        let len = self.data.len(Split::Train);
        if len == 0 {
            return Err(Error::Data("there are no training samples".to_owned()));
        }
        let share = self.parts.fabric.strategy().distributed_sampler_kwargs()?;
        let order = SampleOrder::new(self.parts.fabric.seed(), self.shuffle, len)?;
        let accumulate = self.parts.config.accumulate_grad_batches as usize;
        let sampler =
            TrainSampler::new(order, self.batch_size, share.num_replicas, share.rank, accumulate)?;
        Ok((order, sampler))
    }

    /// Steps that the run will have made in the end, if that is known.
    pub(super) fn max_steps(&self) -> Result<Option<u64>> {
        let Limits { max_steps, max_epochs, .. } = self.parts.config.limits();
        let (order, sampler) = self.train_sampler()?;
        let by_epochs = max_epochs.map(|epochs| {
            // Samples are a position, not steps: a run may resume with another global batch.
            let left = (epochs * order.epoch_len()).saturating_sub(self.cursor.samples);
            self.cursor.step + left.div_ceil(sampler.global_batch_size())
        });
        Ok(match (max_steps, by_epochs) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// The training loop. Collective.
    pub(super) fn fit(&mut self, optimizer: &mut FabricOptimizer) -> Result<Ended> {
        let (order, sampler) = self.train_sampler()?;
        let device = self.device()?;
        let max_steps = self.max_steps()?;
        let max_time = self.parts.config.limits().max_time;
        let accumulate = self.parts.config.accumulate_grad_batches as usize;
        let share = self.parts.fabric.strategy().distributed_sampler_kwargs()?;
        let per_rank = (self.batch_size * accumulate) as u64;
        let steps_per_epoch =
            (order.epoch_len() as f64 / sampler.global_batch_size() as f64).max(1.0);
        let validate_every = match self.parts.config.val_check_interval {
            Amount::Count(steps) => steps,
            Amount::Fraction(of_epoch) => ((steps_per_epoch * of_epoch).round() as u64).max(1),
        };
        let started = Instant::now();
        let mut ended = Ended::Finished;
        let epoch_of = |samples: u64| order.at(samples).0;
        self.hook(Hook::TrainStart, epoch_of(self.cursor.samples))?;
        let mut epoch = None;
        while max_steps.is_none_or(|max| self.cursor.step < max) {
            self.parts.meter.begin_step();
            let this_epoch = epoch_of(self.cursor.samples);
            if epoch != Some(this_epoch) {
                epoch = Some(this_epoch);
                self.hook(Hook::TrainEpochStart, this_epoch)?;
            }
            let step = self.cursor.step + 1;
            let mut logged = StepContext::new(step, this_epoch, 0, self.rank(), self.world_size());
            for micro_batch in 0..accumulate {
                let indices = sampler.indices_from(self.cursor.samples, micro_batch);
                let batch = self.data.batch(Split::Train, &indices, &device)?;
                let first_sample =
                    share.rank as u64 * per_rank + (micro_batch * self.batch_size) as u64;
                logged.batch_index = micro_batch as u64;
                let _scope = self.parts.fabric.forward_scope(true, step, first_sample);
                let loss = self.module.training_step(&batch, &mut logged)?;
                let _no_sync = self.parts.fabric.no_backward_sync(micro_batch + 1 < accumulate);
                self.parts.fabric.backward(&loss)?;
            }
            // The ranks agree on what to do next in the message that carries the loss.
            let out_of_time = max_time.is_some_and(|limit| started.elapsed() >= limit);
            let flag = |on: bool| f64::from(u8::from(on));
            let flags = [
                flag(out_of_time || self.parts.hooks.stop_requested()),
                flag((self.parts.interrupted)()),
            ];
            let totals = self.parts.fabric.step_totals(&flags)?;
            let loss = totals.mean();
            if !totals.loss_sum.is_finite() {
                return Err(Error::NonFinite {
                    what: "loss",
                    value: loss,
                    step,
                    detail: "; parameters are as they were before the step".to_owned(),
                });
            }
            let grad_norm = match self.parts.config.gradient_clip_val {
                None => self.parts.fabric.gradient_norm(optimizer)?,
                Some(limit) => match self.parts.config.gradient_clip_algorithm {
                    ClipAlgorithm::Norm => {
                        self.parts.fabric.clip_gradients_norm(optimizer, limit)?
                    }
                    ClipAlgorithm::Value => {
                        self.parts.fabric.clip_gradients_value(optimizer, limit)?
                    }
                },
            };
            self.hook(Hook::BeforeOptimizerStep, this_epoch)?;
            let lr = optimizer.learning_rate()?;
            optimizer.step()?;
            self.cursor =
                Cursor { step, samples: self.cursor.samples + sampler.global_batch_size() };
            let tokens_per_s = self.parts.meter.end_step(loss, totals.count);
            let metrics = logged.metrics();
            self.metrics.extend(metrics.clone());
            self.metrics.extend([
                ("train_loss".to_owned(), loss),
                ("grad_norm".to_owned(), grad_norm),
                ("lr".to_owned(), lr),
            ]);
            let epochs = self.cursor.samples as f64 / order.epoch_len() as f64;
            self.emit(&Event::Step {
                step,
                epoch: epochs,
                train_loss: loss,
                grad_norm,
                lr,
                tokens_per_s,
                metrics,
            })?;
            self.hook(Hook::TrainStepEnd, this_epoch)?;
            if step.is_multiple_of(validate_every) {
                self.validate()?;
            }
            if epoch_of(self.cursor.samples) != this_epoch {
                self.hook(Hook::TrainEpochEnd, this_epoch)?;
            }
            if self.parts.checkpoint.every_n_steps.is_some_and(|n| step.is_multiple_of(n)) {
                self.save(optimizer)?;
            }
            let [stop, interrupt] = [totals.flags[0], totals.flags[1]];
            if interrupt > 0.0 {
                ended = Ended::Interrupted;
            }
            if stop + interrupt > 0.0 {
                break;
            }
        }
        self.hook(Hook::TrainEnd, epoch_of(self.cursor.samples))?;
        Ok(ended)
    }

    /// Validates, if there is validation data, and returns the mean loss. Collective.
    pub(super) fn validate(&mut self) -> Result<Option<f64>> {
        let share = self.parts.fabric.strategy().distributed_sampler_kwargs()?;
        let len = self.data.len(Split::Validation);
        let sampler = EvalSampler::new(len, self.batch_size, share.num_replicas, share.rank)?;
        let batches = match self.parts.config.limit_val_batches {
            Amount::Count(n) => sampler.num_batches().min(n),
            Amount::Fraction(part) => (sampler.num_batches() as f64 * part).ceil() as u64,
        };
        if batches == 0 {
            return Ok(None);
        }
        let device = self.device()?;
        let step = self.cursor.step;
        self.hook(Hook::ValidationStart, 0)?;
        let mut ctx = StepContext::new(step, 0, 0, self.rank(), self.world_size());
        let (mut sum, mut count) = (0.0, 0.0);
        {
            let _no_grad = no_grad();
            let _scope = self.parts.fabric.forward_scope(false, step, 0);
            for batch_index in 0..batches {
                let mut indices: Vec<u64> = sampler.indices(batch_index).collect();
                // A rank without a part computes all the same: forwards gather parameters.
                let counts = !indices.is_empty();
                if !counts {
                    indices.push(0);
                }
                let batch = self.data.batch(Split::Validation, &indices, &device)?;
                ctx.batch_index = batch_index;
                let loss = self.module.validation_step(&batch, &mut ctx)?;
                if counts {
                    sum += loss.sum_value()?;
                    count += loss.count();
                }
            }
        }
        let totals = Tensor::new(&[sum, count], &Device::Cpu)?;
        let mesh = self.parts.fabric.device_mesh()?;
        mesh.group(DP_CP)?.all_reduce(&totals, ReduceOp::Sum)?.wait()?;
        let totals = totals.to_vec1::<f64>()?;
        let val_loss = totals[0] / totals[1];
        self.metrics.insert("val_loss".to_owned(), val_loss);
        let batches = batches * share.num_replicas as u64;
        self.emit(&Event::Validation { step, val_loss, batches, metrics: ctx.metrics() })?;
        self.hook(Hook::ValidationEnd, 0)?;
        Ok(Some(val_loss))
    }

    /// Saves a distributed checkpoint of the present step. Collective.
    pub(super) fn save(&mut self, optimizer: &mut FabricOptimizer) -> Result<()> {
        let Some(io) = self.parts.io.clone() else { return Ok(()) };
        self.parts.fabric.strategy().prepare_save()?;
        let tree = self.parts.fabric.module_tree()?;
        let mesh = self.parts.fabric.device_mesh()?;
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let model = checkpoint::model_tensors(&tree, coordinate)?;
        let states = optimizer.state_tensors()?;
        let optimizer_tensors = checkpoint::optimizer_tensors(&tree, &states, coordinate)?;
        let state = SavedState {
            cursor: self.cursor,
            seed: self.parts.fabric.seed(),
            optimizer: optimizer.scalars(),
        };
        let meta = checkpoint::SaveMeta {
            step: self.cursor.step,
            mesh: mesh
                .layout()
                .names()
                .iter()
                .cloned()
                .zip(mesh.layout().sizes().iter().copied())
                .collect(),
            specs: checkpoint::specs(&tree),
            state: to_json(&state)?,
            config: to_json(&self.parts.resolved)?,
        };
        let name = checkpoint::step_name(self.cursor.step);
        let world = self.parts.fabric.world().clone();
        let path = checkpoint::save(&*io, &*world, &name, &model, &optimizer_tensors, &meta)?;
        self.emit(&Event::Checkpoint { step: self.cursor.step, path: path.clone() })?;
        let moment = Moment { step: self.cursor.step, epoch: 0 };
        self.parts.hooks.saved(&path, moment, &self.metrics, &self.data)
    }

    /// Goes on from a distributed checkpoint. Collective.
    pub(super) fn resume(
        &mut self,
        path: &std::path::Path,
        optimizer: Option<&mut FabricOptimizer>,
    ) -> Result<()> {
        let source = checkpoint::DistributedCheckpoint::open(path)?;
        let tree = self.parts.fabric.module_tree()?;
        checkpoint::load_into(source.model(), &tree, true)?;
        let state: SavedState =
            serde_json::from_value(source.manifest().state.clone()).map_err(|error| {
                Error::checkpoint(path, format!("its training state cannot be read: {error}"))
            })?;
        if let Some(optimizer) = optimizer {
            let states = optimizer.state_tensors()?;
            checkpoint::load_optimizer(source.optimizer(), &tree, &states, true)?;
            optimizer.load_scalars(&state.optimizer)?;
        }
        if state.seed != self.parts.fabric.seed() && self.rank() == 0 {
            tracing::warn!(
                "the checkpoint was written with seed {}, this run has {}: the order of samples \
                 and dropout will differ from an uninterrupted run",
                state.seed,
                self.parts.fabric.seed()
            );
        }
        self.cursor = state.cursor;
        self.parts.fabric.strategy().prepare_forward()
    }

    /// The checkpoint that `ckpt_path` names, on every rank. Collective.
    pub(super) fn checkpoint_to_resume(&self) -> Result<Option<PathBuf>> {
        use crate::config::CkptPath;
        match &self.parts.config.ckpt_path {
            None => Ok(None),
            Some(CkptPath::Path(path)) => Ok(Some(path.clone())),
            Some(CkptPath::Last) => {
                let latest = match &self.parts.io {
                    Some(io) if self.rank() == 0 => {
                        checkpoint::latest(&**io)?.map(|committed| committed.path)
                    }
                    _ => None,
                };
                broadcast_object(&**self.parts.fabric.world(), &latest, 0)
            }
        }
    }

    /// Tells the module and the callbacks that the run is over, and the world what it was. Collective.
    pub(super) fn finish_fit(&mut self) -> Result<()> {
        self.hook(Hook::FitEnd, 0)?;
        self.summary()
    }

    /// Emits the summary. Collective.
    pub(super) fn summary(&mut self) -> Result<()> {
        let peak_rss_mib = all_gather_object(&**self.parts.fabric.world(), &peak_rss_mib())?
            .into_iter()
            .map(|mib| mib.unwrap_or(f64::NAN))
            .collect();
        let meter = &self.parts.meter;
        let event = Event::Summary {
            steps: self.cursor.step,
            world_size: self.world_size(),
            strategy: self.parts.strategy.clone(),
            first_loss: meter.first_loss(),
            last_loss: meter.last_loss(),
            step_s_median: meter.median_step_secs(),
            tokens_per_s: meter.counts_per_sec(),
            startup_s: meter.startup_secs(),
            peak_rss_mib,
        };
        self.emit(&event)
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|e| Error::other(format!("encoding training state: {e}")))
}
