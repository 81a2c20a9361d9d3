//! Independent replicas, and the outer optimizer that synchronises them at intervals.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::memory::{self, MemoryKind};
use fulgurite_engine::mesh::{DATA_PARALLEL_REPLICATE, DP_SHARD_CP, DeviceMesh};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::{SquaredNorm, StateTensor};
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};
use fulgurite_error::{Error, Result};

/// Name of the momentum in checkpoints.
const MOMENTUM: &str = "strategy_outer_momentum";
/// Name of the step count in checkpoints.
const STEPS: &str = "outer.warmup_steps";
/// Maximum number of elements averaged in one collective, unless a single parameter has more.
const CHUNK: usize = 1 << 23;

/// The configured options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OuterSettings {
    /// Optimizer steps between synchronisations.
    pub(crate) sync_every: u64,
    /// Steps at the start in which replicas train as one.
    pub(crate) warmup_steps: u64,
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) nesterov: bool,
}

impl OuterSettings {
    /// Bytes of the outer optimizer's f32 state per trainable element of a rank.
    pub(super) fn bytes_per_element(&self) -> u64 {
        if self.momentum == 0.0 { 4 } else { 8 }
    }
}

/// The outer optimizer of DiLoCo (Douillard et al., 2023): SGD with `synced - mean(local)` as the
/// gradient.
pub(super) struct Outer {
    settings: OuterSettings,
    /// Shared with the gradient reductions.
    apart: Arc<AtomicBool>,
    /// Completed steps, counted up to the end of the warm-up.
    steps: u64,
    /// Steps since the replicas were last equal.
    since: u64,
    /// Whether the inner optimizers' states may differ between replicas.
    states_differ: bool,
    model: Option<Model>,
}

struct Model {
    /// The ranks with the same shards, one per replica.
    replicas: Arc<dyn ProcessGroup>,
    /// The ranks of this replica that sum their gradients.
    replica: Arc<dyn ProcessGroup>,
    shards: Vec<Shard>,
}

/// This rank's shard of a trainable parameter.
struct Shard {
    parameter: Parameter,
    /// Values at the last synchronisation.
    synced: Tensor,
    momentum: Option<Tensor>,
}

impl Outer {
    pub(super) fn new(settings: OuterSettings) -> Self {
        let apart = Arc::new(AtomicBool::new(settings.warmup_steps == 0));
        Self { settings, apart, steps: 0, since: 0, states_differ: false, model: None }
    }

    /// Whether replicas currently do not reduce gradients among each other.
    pub(super) fn is_apart(&self) -> bool {
        self.apart.load(Ordering::Relaxed)
    }

    /// The shared flag behind [`is_apart`](Self::is_apart).
    pub(super) fn apart(&self) -> Arc<AtomicBool> {
        self.apart.clone()
    }

    /// Whether replicas have taken steps since they were last equal.
    pub(super) fn replicas_differ(&self) -> bool {
        self.since > 0
    }

    /// Starts from the values in `tree`. Not collective.
    ///
    /// # Errors
    /// If a layer synchronises its batches over replicas.
    pub(super) fn set_up(&mut self, tree: &ModuleTree, mesh: &DeviceMesh) -> Result<()> {
        let replicas = mesh.group(DATA_PARALLEL_REPLICATE)?.clone();
        if tree.synchronises_batches() && replicas.size() > 1 {
            return Err(Error::other(
                "strategy `diloco`: the model computes with the batches of all ranks, and replicas train on their own; \
                 leave `synchronised` and `trainer.sync_batchnorm` of batch norms out, and \
                 `model.output_router_logits` of mixtures of experts",
            ));
        }
        let mut shards = Vec::new();
        for parameter in tree.trainable() {
            let values = parameter.local()?.values;
            let zeros = || {
                let _kind = memory::of_kind(MemoryKind::OptimizerState);
                let dtype = accumulation_dtype(parameter.dtype());
                storage::zeros(values.elem_count(), dtype, values.device())
            };
            let momentum = (self.settings.momentum != 0.0).then(zeros).transpose()?;
            shards.push(Shard { parameter: parameter.clone(), synced: zeros()?, momentum });
        }
        let replica = mesh.group(DP_SHARD_CP)?.clone();
        self.model = Some(Model { replicas, replica, shards });
        self.start_here()
    }

    fn model(&self) -> Result<&Model> {
        let none = || Error::other("the outer optimizer has no model yet");
        self.model.as_ref().ok_or_else(none)
    }

    /// Records the current values, equal on all replicas, as the last synchronised ones. Keeps the
    /// momentum. Not collective.
    pub(super) fn start_here(&mut self) -> Result<()> {
        for shard in &self.model()?.shards {
            let values = shard.parameter.local()?.values;
            if values.elem_count() > 0 {
                storage::copy_from(&shard.synced, &values.to_dtype(shard.synced.dtype())?)?;
            }
        }
        self.since = 0;
        Ok(())
    }

    /// Counts an inner step and synchronises if due. Collective if it synchronises.
    pub(super) fn finish_step(&mut self) -> Result<()> {
        if !self.is_apart() {
            self.steps += 1;
            if self.steps >= self.settings.warmup_steps {
                self.apart.store(true, Ordering::Relaxed);
            }
            return self.start_here();
        }
        (self.since, self.states_differ) = (self.since + 1, true);
        if self.since < self.settings.sync_every { Ok(()) } else { self.synchronise() }
    }

    /// Takes an outer step, from which all replicas continue. Collective over the replicas.
    pub(super) fn synchronise(&mut self) -> Result<()> {
        let OuterSettings { lr, momentum, nesterov, .. } = self.settings;
        let Model { replicas, shards, .. } = self.model()?;
        for chunk in chunks(shards) {
            let changes = chunk.iter().map(|shard| {
                let values = shard.parameter.local()?.values;
                Ok((&shard.synced - values.to_dtype(shard.synced.dtype())?)?)
            });
            let changes = Tensor::cat(&changes.collect::<Result<Vec<_>>>()?, 0)?;
            let mean = mean(changes, replicas)?;
            let mut start = 0;
            for Shard { parameter, synced, momentum: buffer } in chunk {
                let grad = mean.narrow(0, start, synced.elem_count())?;
                start += synced.elem_count();
                let direction = match buffer {
                    None => grad,
                    Some(buffer) => {
                        let moved = ((buffer * momentum)? + &grad)?;
                        storage::copy_from(buffer, &moved)?;
                        if nesterov { (grad + (moved * momentum)?)? } else { moved }
                    }
                };
                storage::copy_from(synced, &(synced - (direction * lr)?)?)?;
                // In place: layers and the optimizer share this memory.
                let values = parameter.local()?.values;
                storage::copy_from(&values, &synced.to_dtype(values.dtype())?)?;
            }
        }
        self.since = 0;
        Ok(())
    }

    /// Averages over this replica's items only. Collective over the replica's ranks.
    pub(super) fn grad_scale(&self, local_count: f64) -> Result<f64> {
        let replica = &self.model()?.replica;
        let count = if replica.size() == 1 {
            local_count
        } else {
            let count = Tensor::new(&[local_count], &Device::Cpu)?;
            replica.run(Collective::all_reduce(&count, ReduceOp::Sum))?;
            read::host::<f64>(&count)?[0]
        };
        Ok(if count > 0.0 { 1.0 / count } else { 0.0 })
    }

    /// This rank's part of the mean square of the replicas' gradient norms. The mean is equal on
    /// all replicas, so that they clip and stop alike. Not collective.
    pub(super) fn squared_norm(
        &self,
        parameters: &[Parameter],
        mesh: &DeviceMesh,
    ) -> Result<SquaredNorm> {
        let replicas = self.model()?.replicas.size();
        // Normally one replica owns each element; here each replica has gradients of all elements.
        let mut squares = (0..replicas).map(|replica| {
            SquaredNorm::of(parameters, &|dim| match dim {
                DATA_PARALLEL_REPLICATE => replica,
                dim => mesh.coordinate(dim),
            })
        });
        squares
            .try_fold(SquaredNorm::default(), |sum, square| sum.plus(square?))?
            .divided_by(replicas as f64)
    }

    /// Averages the inner optimizers' states over the replicas, if they may differ. Collective.
    pub(super) fn prepare_save_states(&mut self, states: &[StateTensor]) -> Result<()> {
        // Checkpoints hold the synced values in the parameter's dtype; this run continues from the
        // same values.
        if self.since == 0 {
            self.start_here()?;
        }
        if !std::mem::take(&mut self.states_differ) {
            return Ok(());
        }
        let replicas = &self.model()?.replicas;
        for StateTensor { values, .. } in states {
            if values.elem_count() == 0 || replicas.size() == 1 {
                continue;
            }
            if !values.dtype().is_float() {
                replicas.run(Collective::broadcast(values, 0))?;
                continue;
            }
            let wide = Tensor::zeros(
                values.elem_count(),
                accumulation_dtype(values.dtype()),
                values.device(),
            )?;
            storage::copy_from(&wide, &values.to_dtype(wide.dtype())?)?;
            storage::copy_from(values, &mean(wide, replicas)?.to_dtype(values.dtype())?)?;
        }
        Ok(())
    }

    pub(super) fn state_tensors(&self) -> Result<Vec<StateTensor>> {
        let shards = self.model()?.shards.iter();
        let with_momentum = shards.filter_map(|shard| Some((shard, shard.momentum.clone()?)));
        with_momentum
            .map(|(Shard { parameter, .. }, values)| {
                Ok(StateTensor {
                    fqn: parameter.fqn().to_owned(),
                    name: MOMENTUM,
                    values,
                    region: parameter.local()?.region,
                    shape: parameter.global_shape().to_vec(),
                })
            })
            .collect()
    }

    pub(super) fn scalars(&self) -> BTreeMap<String, f64> {
        BTreeMap::from([(STEPS.to_owned(), self.steps as f64)])
    }

    /// Resumes within or after the warm-up. A checkpoint of another strategy restarts the warm-up.
    pub(super) fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let steps = scalars.get(STEPS).copied().unwrap_or(0.0);
        if !(steps >= 0.0 && steps.fract() == 0.0) {
            return Err(Error::other(format!(
                "the saved `{STEPS}` is {steps}, not a count of steps; the checkpoint is damaged"
            )));
        }
        self.steps = steps as u64;
        self.apart.store(self.steps >= self.settings.warmup_steps, Ordering::Relaxed);
        self.states_differ = false;
        Ok(())
    }
}

/// Replaces `values` by their mean over the ranks of `group`. Collective.
fn mean(values: Tensor, group: &Arc<dyn ProcessGroup>) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(values);
    }
    group.run(Collective::all_reduce(&values, ReduceOp::Sum))?;
    Ok((values / group.size() as f64)?)
}

/// Groups consecutive shards of one dtype with up to [`CHUNK`] elements. Skips empty shards.
fn chunks(shards: &[Shard]) -> Vec<Vec<&Shard>> {
    let mut chunks: Vec<Vec<&Shard>> = Vec::new();
    let mut last: (Option<DType>, usize) = (None, 0);
    for shard in shards {
        let (dtype, elements) = (shard.synced.dtype(), shard.synced.elem_count());
        if elements == 0 {
            continue;
        }
        match chunks.last_mut() {
            Some(chunk) if last.0 == Some(dtype) && last.1 + elements <= CHUNK => {
                chunk.push(shard);
                last.1 += elements;
            }
            _ => {
                chunks.push(vec![shard]);
                last = (Some(dtype), elements);
            }
        }
    }
    chunks
}
