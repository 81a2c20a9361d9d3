//! The dry run of one rank: its memory, its collectives, its work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::Tensor;
use tracing::dispatcher;
use tracing::subscriber::NoSubscriber;

use super::brief::{Brief, check_time};
use super::copies::StateBytes;
use crate::run::{CountOrFraction, RunConfig};
use crate::trainer::{Callback, HookContext, Hooks, LightningModule, RunConfigOf, Trainer};
use crate::{Error, Result};
use fulgurite_engine::collective::{
    Collective, DryRunGroup, End, Intercepted, Interceptor, Label, ProcessGroup, Record, Solo, Work,
};
use fulgurite_engine::execution::dry_run::{DryRun, Happening};
use fulgurite_engine::execution::{self, ExecutionContext};
use fulgurite_engine::memory::{self, Trace, Traced};
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::shard::ShardSpec;
use fulgurite_engine::strategy::{DryBorders, Loss, ParallelizeFn};
use fulgurite_launch::on_own_threads;

/// Steps of a dry run, which is cut off after the reported one. That is neither the first, nor
/// logged, nor the last.
const STEPS: u64 = 3;
const REPORTED_STEP: u64 = 2;

/// A process group that a step uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedGroup {
    /// Its name: a mesh dimension, or `world`.
    pub name: String,
    /// Its global ranks.
    pub global_ranks: Vec<usize>,
}

impl PlannedGroup {
    /// Whether the group has ranks of several hosts, of `ranks_per_host` consecutive ranks each.
    pub fn spans_hosts(&self, ranks_per_host: usize) -> bool {
        let mut hosts = self.global_ranks.iter().map(|rank| rank / ranks_per_host.max(1));
        let first = hosts.next();
        hosts.any(|host| Some(host) != first)
    }
}

/// What the dry run of one rank has shown.
pub(super) struct RankRun {
    /// `None` if the program's allocator does not count.
    pub(super) memory: Option<Traced>,
    /// Bytes of data that the run will hold, beside `memory`.
    pub(super) unread_bytes: u64,
    /// The collectives of the reported step, by group index and name.
    pub(super) calls: BTreeMap<(usize, &'static str), Record>,
    pub(super) groups: Vec<PlannedGroup>,
    /// What happened in the reported step, in order.
    pub(super) happenings: Vec<Happening>,
    pub(super) model: Model,
    /// The error of a dry run that set up the model but made no step.
    pub(super) failed: Option<Error>,
}

/// What a dry run has learned of the model and its mesh.
#[derive(Clone, Default)]
pub(super) struct Model {
    pub(super) parameters: u64,
    pub(super) trained_parameters: u64,
    /// Floating-point operations that the model needs for an item, without attention: 4 for each
    /// parameter that it passes through, and 2 more for a trained one.
    pub(super) flops_per_item: f64,
    /// The cuts of parameters, each different one once.
    pub(super) specs: Vec<ShardSpec>,
    pub(super) mesh: Option<DeviceMesh>,
    /// Micro-batches of the reported step.
    pub(super) micro_batches: u64,
    /// Items that its losses counted on this rank; 1 on ranks without the last stage.
    pub(super) items: f64,
    /// Bytes of a checkpoint: parameters and the optimizers' state.
    pub(super) state: StateBytes,
}

/// The configuration of a dry run: `run` without what saves, validates, or ends early.
///
/// # Errors
/// If the configuration of the data cannot be written and read.
fn dry<M: LightningModule>(run: &RunConfigOf<M>) -> Result<RunConfigOf<M>> {
    let data = serde_json::to_value(&run.data).and_then(serde_json::from_value);
    let mut run: RunConfigOf<M> = RunConfig {
        seed: run.seed,
        module: run.module.clone(),
        model: run.model.clone(),
        data: data.map_err(|error| Error::Config(format!("`data`: {error}")))?,
        optimizer: run.optimizer.clone(),
        scheduler: run.scheduler.clone(),
        trainer: run.trainer.clone(),
        checkpoint: run.checkpoint.clone(),
    };
    let trainer = &mut run.trainer;
    trainer.loggers.clear();
    trainer.enable_progress_bar = false;
    trainer.profiler = None;
    trainer.ckpt_path = None;
    trainer.max_steps = Some(STEPS);
    trainer.max_epochs = None;
    trainer.min_steps = None;
    trainer.min_epochs = None;
    trainer.max_time = None;
    trainer.fast_dev_run = crate::run::FastDevRun::Off;
    trainer.log_every_n_steps = 1 << 40;
    trainer.num_sanity_val_steps = 0;
    // Copies go in the background: see `copies`.
    trainer.elastic.replicas = 0;
    trainer.limit_val_batches = CountOrFraction::Count(0);
    let checkpoint = &mut run.checkpoint;
    checkpoint.dir = None;
    checkpoint.save_last = false;
    checkpoint.every_n_steps = None;
    checkpoint.save_top_k = None;
    checkpoint.keep_last = None;
    checkpoint.monitor = None;
    checkpoint.async_save = false;
    Ok(run)
}

/// Runs `rank` of `world_size` ranks dry. `None` if it is not done at `end`. Ranks of a pipeline
/// tell each other in `borders` what their stages give.
///
/// With `has_host` its device has memory of its own.
///
/// The rank has threads of its own, so that the buffers that threads keep for products are among
/// its memory.
///
/// # Errors
/// As a run, before its first step.
///
/// # Panics
/// If the module does.
pub(super) fn run_rank<M: LightningModule>(
    run: &RunConfigOf<M>,
    parallelize: Option<Arc<dyn ParallelizeFn>>,
    at: (usize, usize),
    borders: &DryBorders,
    (has_host, end): (bool, Option<Instant>),
) -> Result<Option<RankRun>> {
    let context = ExecutionContext::current();
    let log = dispatcher::get_default(Clone::clone);
    on_own_threads(format!("dry rank {}", at.0), || {
        let dry = || context.run(|| run_here::<M>(run, parallelize, at, borders, (has_host, end)));
        dispatcher::with_default(&log, dry)
    })
    .map_err(Error::other)?
}

fn run_here<M: LightningModule>(
    run: &RunConfigOf<M>,
    parallelize: Option<Arc<dyn ParallelizeFn>>,
    (rank, world_size): (usize, usize),
    borders: &DryBorders,
    (has_host, end): (bool, Option<Instant>),
) -> Result<Option<RankRun>> {
    let run = dry::<M>(run)?;
    let seen = Arc::new(Mutex::new(Seen::default()));
    let trace = Trace::start_reserving(has_host);
    if has_host && trace.is_none() {
        tracing::warn!(
            "this program's allocator counts nothing (`fulgurite::use_mimalloc!()`), so that all memory is planned as \
             the device's, and copies from the host are not"
        );
    }
    let has_host = has_host && trace.is_some();
    let run_dry = if has_host { DryRun::with_host() } else { DryRun::default() };
    let log = Log { run: run_dry, groups: Arc::default() };
    let world: Arc<dyn ProcessGroup> = match world_size {
        1 => Arc::new(Solo::new("world", 0)),
        _ => log.watch(Arc::new(DryRunGroup::world(rank, world_size))),
    };
    let mut trainer = Trainer::new(world)
        .with_print(|_| ())
        .with_callback(Box::new(Watch { log: log.clone(), seen: seen.clone() }));
    if let Some(parallelize) = parallelize {
        trainer = trainer.parallelize(move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
            parallelize.parallelize(tree, mesh)
        });
    }
    // At the start of a run, the run itself says what there is to be said.
    let quiet = end.map(|_| tracing::subscriber::set_default(NoSubscriber::default()));
    let brief = end.map(|end| execution::enter(Brief::until(end)));
    let of_data = execution::value::<Brief>();
    let borders = execution::enter(borders.clone());
    let dry = log.run.enter();
    let result = trainer.fit::<M>(&run);
    drop((dry, borders, brief, quiet));
    let unread_bytes = of_data.map_or(0, |brief| brief.unread_bytes());
    drop(trainer);
    let memory = trace.map(Trace::finish);
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    if seen.happenings.is_none() && end.is_some_and(|end| Instant::now() > end) {
        return Ok(None);
    }
    let (happenings, failed) = match (seen.happenings, result) {
        (Some(happenings), _) => (happenings, None),
        // Other stages may have to say first what this rank gets.
        (None, Err(error)) if has_stages(&seen.model) => (Vec::new(), Some(error)),
        (None, Err(error)) => return Err(error),
        (None, Ok(_)) => {
            return Err(Error::other("the dry run made no step: the run has no second step"));
        }
    };
    let mut calls = BTreeMap::<_, Record>::new();
    for happening in &happenings {
        if let Happening::Start { group, op, bytes, .. } = happening {
            let record = calls.entry((*group, *op)).or_default();
            record.calls += 1;
            record.bytes += bytes;
        }
    }
    let groups = log.groups().clone();
    let model = seen.model;
    Ok(Some(RankRun { memory, unread_bytes, calls, groups, happenings, model, failed }))
}

fn has_stages(model: &Model) -> bool {
    model.mesh.as_ref().is_some_and(|mesh| mesh.pipeline().is_some())
}

/// What the callback has seen.
#[derive(Default)]
struct Seen {
    happenings: Option<Vec<Happening>>,
    model: Model,
}

/// Cuts the record at the borders of the reported step, and looks at the model.
struct Watch {
    log: Log,
    seen: Arc<Mutex<Seen>>,
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a part of the step, unless the dry run has taken too long.
    fn begin(&self, part: &str) -> Result<()> {
        check_time()?;
        self.log.mark(part);
        Ok(())
    }
}

impl Callback for Watch {
    fn decides_by_metrics(&self) -> bool {
        true // the last of all
    }
}

impl Hooks for Watch {
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let fabric = ctx.fabric();
        let tree = fabric.module_tree()?;
        let mut model = Model { mesh: Some(fabric.device_mesh().clone()), ..Model::default() };
        model.flops_per_item = tree.flops_per_item();
        for parameter in tree.parameters() {
            model.parameters += parameter.model_elem_count() as u64;
            model.trained_parameters +=
                if parameter.requires_grad() { parameter.elem_count() as u64 } else { 0 };
            let spec = parameter.spec();
            let bytes_per_element = parameter.dtype().size_in_bytes();
            model.state.add(parameter.fqn(), spec.clone(), bytes_per_element);
            if !model.specs.contains(&spec) {
                model.specs.push(spec);
            }
        }
        self.seen().model = model;
        memory::mark("step 1");
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.step + 1 == REPORTED_STEP {
            self.seen().model.micro_batches += 1;
        }
        self.begin("forward")
    }

    fn on_before_backward(&mut self, _: &Loss, _: &mut HookContext) -> Result<()> {
        self.begin("backward")
    }

    fn on_before_optimizer_step(&mut self, _: &mut HookContext) -> Result<()> {
        self.begin("update")
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        memory::mark(&format!("step {}", ctx.step + 1));
        let happenings = self.log.run.take();
        if ctx.step == REPORTED_STEP {
            let mut states = Vec::new();
            for (_, optimizer) in ctx.optimizers_mut().into_iter().flat_map(|all| all.iter_mut()) {
                states.extend(optimizer.state_tensors()?);
            }
            let mut seen = self.seen();
            let tree = ctx.fabric().module_tree()?;
            for StateTensor { fqn, values, shape, .. } in states {
                let bytes = values.dtype().size_in_bytes();
                match tree.parameters().iter().find(|parameter| parameter.fqn() == fqn) {
                    Some(parameter) if parameter.global_shape() == shape => {
                        seen.model.state.add(&fqn, parameter.spec(), bytes);
                    }
                    _ => {
                        let elements = shape.iter().product::<usize>();
                        seen.model.state.add_whole((elements * bytes) as u64);
                    }
                }
            }
            seen.happenings = Some(happenings);
            seen.model.items = ctx.items;
            return Err(Error::other("the dry run is done"));
        }
        Ok(())
    }
}

/// The record of a dry run, and the groups that it names.
#[derive(Clone)]
struct Log {
    run: DryRun,
    groups: Arc<Mutex<Vec<PlannedGroup>>>,
}

impl Log {
    fn watch(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Intercepted::new(group, self.clone()))
    }

    fn groups(&self) -> MutexGuard<'_, Vec<PlannedGroup>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, label: &str) {
        memory::mark(label);
        self.run.record(Happening::Mark(label.to_owned()));
    }

    /// Records a start, and returns its number.
    fn start(&self, group: &Arc<dyn ProcessGroup>, op: &'static str, bytes: usize) -> u64 {
        let (name, ranks) = (group.name(), group.global_ranks());
        let mut groups = self.groups();
        let same = |known: &PlannedGroup| known.name == name && known.global_ranks == ranks;
        let index = groups.iter().position(same).unwrap_or_else(|| {
            groups.push(PlannedGroup { name: name.to_owned(), global_ranks: ranks.to_vec() });
            groups.len() - 1
        });
        let label = Label::current().filter(|_| matches!(op, "send" | "recv"));
        let message = label.map_or_else(String::new, |label| label.0.clone());
        let (id, bytes) = (self.run.number(), bytes as u64);
        self.run.record(Happening::Start { id, group: index, op, bytes, message });
        id
    }

    /// Records the wait for `work`.
    fn waited(&self, id: u64, work: Work) -> Work {
        let run = self.run.clone();
        Work::pending(move || {
            run.record(Happening::Wait { id });
            work.wait()
        })
    }
}

impl Interceptor for Log {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        let id = self.start(group, collective.name(), collective.bytes());
        Ok(self.waited(id, group.start(collective, overlap)?))
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        let (op, bytes) = (collective.name(), collective.bytes());
        Ok(match group.start_after(end, collective)? {
            Some(work) => {
                let id = self.start(group, op, bytes);
                Some(self.waited(id, work))
            }
            None => None,
        })
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.watch(part))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        let id = self.start(group, "send", tensor.elem_count() * tensor.dtype().size_in_bytes());
        Ok(self.waited(id, group.send(tensor, dst)?))
    }

    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        let id = self.start(group, "recv", tensor.elem_count() * tensor.dtype().size_in_bytes());
        Ok(self.waited(id, group.recv(tensor, src)?))
    }
}
