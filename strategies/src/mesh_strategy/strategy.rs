//! The mesh strategy.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::DType;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Difference, ProcessGroup, broadcast_object, first_difference};
use fulgurite_engine::execution::transfer;
use fulgurite_engine::memory::{self, MemoryKind, Place};
use fulgurite_engine::mesh::{
    DATA_PARALLEL_REPLICATE, DP_SHARD_CP, DeviceMesh, PIPELINE_PARALLEL, TENSOR_PARALLEL,
};
use fulgurite_engine::module::{ModuleInit, ModuleTree, Reshard, UnitHooks};
use fulgurite_engine::optim::SquaredNorm;
use fulgurite_engine::parameter::{GradReducer, LocalShard, Parameter, ParameterSlot};
use fulgurite_engine::shard::{Cut, Placement, ShardSpec};
use fulgurite_engine::strategy::{
    Capabilities, ParallelizeFn, StepTotals, Strategy, StrategyContext, StrategyExtensions,
    materialize,
};
use fulgurite_error::{Error, Result};

use super::connect::connect;
use super::experts::{self, ExpertShards};
use super::gradients::PartialGrads;
use super::ignored::{self, Ignored};
use super::outer::Outer;
use super::pipeline::{Assignment, Executor, empty_gradient};
use super::reduction::GradientReduction;
use super::replicated::Reducer;
use super::sharded::{Casts, Member, ParamGroup, ShardedRuntime};
use super::{Settings, Sharding, units};
use crate::schedule::ddp;
use crate::schedule::fsdp;

/// Distributes a model over a mesh: first the plan's tensor parallelism, then replicas or shards
/// over the other dimensions.
pub(crate) struct MeshStrategy {
    pub(super) settings: Settings,
    data_parallel: Option<DataParallel>,
    /// `None` without ignored parameters.
    pub(super) ignored: Option<Ignored>,
    /// `None` if replicas train as one.
    pub(super) outer: Option<Outer>,
    /// `None` if every rank computes the whole model.
    pub(super) pipeline: Option<Arc<Executor>>,
}

/// The parameters of data-parallel ranks, after tensor-parallel cuts.
pub(super) enum DataParallel {
    Replicated {
        reducer: Arc<Reducer>,
        /// Whether the buckets are in the observed order of gradients.
        rebuilt: bool,
    },
    Sharded(Arc<ShardedRuntime>),
}

impl MeshStrategy {
    pub(crate) fn new(settings: Settings) -> Self {
        let outer = settings.outer.map(Outer::new);
        Self { settings, data_parallel: None, ignored: None, outer, pipeline: None }
    }

    fn gradient_reduction(&self, mesh: &DeviceMesh) -> Result<GradientReduction> {
        let reduction = GradientReduction::new(&self.settings.gradients, mesh)?;
        Ok(match &self.outer {
            Some(outer) => reduction.unless(outer.apart()),
            None => reduction,
        })
    }

    /// Whether parameters are sharded on this mesh.
    pub(super) fn shards(&self, mesh: &DeviceMesh) -> Result<bool> {
        Ok(match self.settings.sharding {
            Sharding::Always => true,
            Sharding::Never => false,
            Sharding::WhereUseful => {
                let s = &self.settings;
                s.cpu_offload || !s.mixed_precision.is_empty() || mesh.size(DP_SHARD_CP)? > 1
            }
        })
    }

    /// Lets the configured function distribute the model. Returns false without such a function.
    pub(super) fn parallelize(&self, tree: &mut ModuleTree, mesh: &DeviceMesh) -> Result<bool> {
        let default = match mesh.size(TENSOR_PARALLEL)? {
            1 => None,
            _ => self.settings.default_parallelize.as_ref(),
        };
        let Some(parallelize) = self.settings.parallelize.as_ref().or(default) else {
            return Ok(false);
        };
        parallelize.parallelize(tree, mesh)?;
        tree.check_edges()?;
        Ok(true)
    }

    /// Warns on rank 0 if no layer is cut and tensor-parallel ranks therefore hold and compute the
    /// same.
    fn warn_if_nothing_is_cut(&self, tree: &ModuleTree, mesh: &DeviceMesh) -> Result<()> {
        let ranks = mesh.size(TENSOR_PARALLEL)?;
        let is_cut = |parameter: &Parameter| {
            parameter.spec().cuts.iter().any(|cut| cut.mesh_dim == TENSOR_PARALLEL)
        };
        if ranks > 1 && mesh.rank() == 0 && !tree.parameters().iter().any(is_cut) {
            tracing::warn!(
                "strategy `{}`: the {ranks} tensor-parallel ranks compute the same, for its plan cuts no layer of \
                 this model. Set `trainer.strategy.tensor_parallel_size` = 1, so that each has samples of its own, or \
                 cut the model with a plan that fits it (`trainer.strategy.parallelize`, or a function)",
                self.settings.name
            );
        }
        Ok(())
    }

    /// A parameter's spec before sharding: the cuts of tensor parallelism, and replicas.
    pub(super) fn outer_spec(parameter: &Parameter, mesh: &DeviceMesh) -> Result<ShardSpec> {
        let mut spec = parameter.spec();
        let cut_by = |spec: &ShardSpec, dim| spec.cuts.iter().any(|cut| cut.mesh_dim == dim);
        for dim in [TENSOR_PARALLEL, DATA_PARALLEL_REPLICATE] {
            let size = mesh.size(dim)?;
            if size > 1 && !cut_by(&spec, dim) {
                spec = spec.with_cut(Cut::new(dim, size, Placement::Replicate));
            }
        }
        Ok(spec)
    }

    fn replicate(
        &self,
        mut slots: Vec<ParameterSlot>,
        mesh: &DeviceMesh,
        seed: u64,
        partial_grads: PartialGrads,
    ) -> Result<DataParallel> {
        let reduction = self.gradient_reduction(mesh)?;
        for slot in &slots {
            slot.set_spec(Self::outer_spec(slot, mesh)?);
        }
        materialize::replicate(&slots, seed)?;
        let group = mesh.group(DATA_PARALLEL_REPLICATE)?.clone();
        // Without communication the order of buckets does not matter.
        let rebuilt = group.size() == 1 || self.outer.is_some();
        // Reverse of declaration, until a backward shows the real order.
        slots.retain(|slot| slot.requires_grad());
        slots.reverse();
        let bucket_bytes = self.settings.bucket_bytes;
        let reducer =
            Arc::new(Reducer::new(group, reduction, partial_grads, &slots, bucket_bytes)?);
        slots.iter().for_each(|slot| slot.set_reducer(reducer.clone()));
        Ok(DataParallel::Replicated { reducer, rebuilt })
    }

    fn shard(
        &self,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
        seed: u64,
        partial_grads: PartialGrads,
        ignored: &[ParameterSlot],
        experts: Option<&ExpertShards>,
    ) -> Result<DataParallel> {
        let reduction = self.gradient_reduction(mesh)?;
        let chosen = units::choose(&self.settings, tree)?;
        let policy = &self.settings.mixed_precision;
        let sharing = mesh.group(DP_SHARD_CP)?;
        let replicas = mesh.group(DATA_PARALLEL_REPLICATE)?;
        let parts_of = |reshard, parts: &units::PartGroups| match reshard {
            Reshard::Ranks(ranks) => parts.get(&ranks).cloned(),
            _ => None,
        };
        let mut groups = Vec::new();
        let mut units = Vec::new();
        let managed = |mut slots: Vec<ParameterSlot>| {
            slots.retain(|slot| !ignored.contains(slot) && !slot.is_elsewhere());
            slots
        };
        let mut root = managed(tree.unit_slots(None));
        let (reshard, parts) = units::reshard(&self.settings, tree, &chosen, sharing)?;
        if let (Some(_), Some((ranks, _))) = (experts, parts.first_key_value()) {
            return Err(Error::Config(format!(
                "`reshard_after_forward` = {ranks} keeps parts of units on neighbouring ranks, which have different \
                 experts under `expert_parallel_size`; choose `true`, `false` or `\"all_but_last\"`"
            )));
        }
        let mut add = |path: &str, slots: &[ParameterSlot], reshard: Reshard| -> Result<usize> {
            let members = slots
                .iter()
                .map(|slot| self.shard_parameter(slot, mesh, seed, experts))
                .collect::<Result<_>>()?;
            let path = path.to_owned();
            let group = ParamGroup::new(
                path,
                members,
                reshard,
                parts_of(reshard, &parts),
                replicas.clone(),
                reduction.clone(),
            );
            groups.push(group.with_shards_on_host(self.settings.cpu_offload));
            Ok(groups.len() - 1)
        };
        for ((unit, chosen), reshard) in tree.units().to_vec().iter().zip(chosen).zip(reshard) {
            let all = tree.unit_slots(Some(unit.index()));
            let excluded = |slot: &ParameterSlot| ignored.contains(slot) || slot.is_elsewhere();
            let nothing_left = !all.is_empty() && all.iter().all(excluded);
            let slots = managed(all);
            if chosen && !nothing_left {
                units.push(Some(add(unit.path(), &slots, reshard)?));
            } else {
                root.extend(slots);
                units.push(None);
            }
        }
        add("(root)", &root, Reshard::Never)?;
        let output = policy.output_dtype.map(DType::from);
        let casts = Casts { inputs: policy.cast_forward_inputs, output };
        let lists = units::prefetch_lists(tree, &units)?;
        let runtime = ShardedRuntime::new(
            mesh.rank(),
            groups,
            units,
            self.settings.prefetch,
            lists,
            casts,
            partial_grads,
        );
        let runtime = Arc::new(runtime);
        for slot in managed(tree.slots()).iter().filter(|slot| slot.requires_grad()) {
            slot.set_reducer(runtime.clone() as Arc<dyn GradReducer>);
        }
        for unit in tree.units() {
            unit.set_hooks(runtime.clone() as Arc<dyn UnitHooks>)?;
        }
        tracing::debug!(?runtime, "units");
        Ok(DataParallel::Sharded(runtime))
    }

    /// Cuts a parameter's spec along dimension 0.
    pub(super) fn sharded_spec(parameter: &Parameter, mesh: &DeviceMesh) -> Result<ShardSpec> {
        if parameter.global_shape().is_empty() {
            let message = "is a scalar, which FSDP cannot shard; give it the shape [1]";
            return Err(Error::parameter(parameter.fqn(), message));
        }
        let parts = experts::expert_parts(parameter);
        let outer = Self::outer_spec(parameter, mesh)?;
        Ok(experts::with_shards(outer, mesh.size(DP_SHARD_CP)?, parts))
    }

    /// Cuts a parameter and gives this rank's shard its initial values.
    fn shard_parameter(
        &self,
        slot: &ParameterSlot,
        mesh: &DeviceMesh,
        seed: u64,
        experts: Option<&ExpertShards>,
    ) -> Result<Member> {
        let parts = experts::expert_parts(slot);
        let group = match experts {
            Some(experts) if parts > 1 => experts.ranks(),
            _ => mesh.group(DP_SHARD_CP)?,
        };
        let spec = Self::sharded_spec(slot, mesh)?;
        let own = mesh.coordinate(DP_SHARD_CP);
        // Of the same experts as this rank's.
        let place = |shard: usize| shard * parts + own % parts;
        let region =
            |rank| spec.region(|dim| if dim == DP_SHARD_CP { rank } else { mesh.coordinate(dim) });
        let shards = 0..group.size();
        let counts = shards.map(|shard| region(place(shard)).elem_count()).collect();
        let region = region(own);
        let _kind = memory::of_kind(MemoryKind::Parameters);
        let initial = materialize::initial_values(slot, seed, &region)?;
        let on_host = self.settings.cpu_offload;
        let _place = on_host.then(|| memory::at(Place::Host));
        let initial = if on_host { transfer::to_host(&initial, "parameters")? } else { initial };
        let values = if group.size() > 1 {
            let shard = group.empty(initial.elem_count(), initial.dtype(), initial.device())?;
            storage::copy_from(&shard, &initial)?;
            shard
        } else {
            initial
        };
        slot.set_spec(spec);
        slot.set_local(LocalShard { values, region });
        let reduce_dtype = self.settings.mixed_precision.reduce_dtype_of(slot.fqn());
        Ok(Member::new(slot.clone(), group.clone(), counts, reduce_dtype))
    }

    pub(super) fn data_parallel(&self) -> Result<&DataParallel> {
        self.data_parallel.as_ref().ok_or_else(|| {
            Error::other(format!("{}: no model has been set up", self.settings.name))
        })
    }

    /// Ends a backward; its begin decided whether gradients are reduced.
    fn finish_backward(&self, slots: &[ParameterSlot]) -> Result<()> {
        match self.data_parallel()? {
            DataParallel::Replicated { reducer, .. } => reducer.on(ddp::Event::FinishBackward)?,
            DataParallel::Sharded(runtime) => runtime.on(fsdp::Event::FinishBackward)?,
        }
        self.ignored.as_ref().map_or(Ok(()), Ignored::finish_backward)?;
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        pipeline.sum_tied()?;
        for slot in slots.iter().filter(|slot| slot.is_elsewhere() && slot.requires_grad()) {
            slot.set_local_grad(Some(empty_gradient(slot)?));
        }
        Ok(())
    }

    /// Cuts the model into the stages of a pipeline, if there is one.
    pub(super) fn assign(
        &self,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
    ) -> Result<Option<Assignment>> {
        let pipeline = self.settings.pipeline.as_ref();
        pipeline.map(|pipeline| Assignment::new(pipeline, tree, mesh)).transpose()
    }

    /// Checks that replicas hold the same values. Collective.
    fn verify_replicas(tree: &ModuleTree, mesh: &DeviceMesh) -> Result<()> {
        let group = mesh.group(DATA_PARALLEL_REPLICATE)?;
        if group.size() == 1 {
            return Ok(());
        }
        materialize::verify_same_values(tree.parameters(), &**group)
    }

    /// After the first synchronised steps of all optimizers, rebuilds the buckets in the order of
    /// gradients on the first replica, equally on all replicas. Collective.
    fn rebuild_buckets(&mut self, context: StrategyContext<'_>) -> Result<()> {
        let Some(DataParallel::Replicated { reducer, rebuilt: rebuilt @ false }) =
            &mut self.data_parallel
        else {
            return Ok(());
        };
        if reducer.holds_gradients() {
            return Ok(());
        }
        let StrategyContext { mesh, slots, .. } = context;
        let group = mesh.group(DATA_PARALLEL_REPLICATE)?;
        let order = broadcast_object(&**group, &reducer.ready_order(), 0)?;
        let by_fqn: HashMap<&str, &ParameterSlot> =
            slots.iter().map(|slot| (slot.fqn(), slot)).collect();
        let ready: Vec<ParameterSlot> =
            order.iter().filter_map(|fqn| by_fqn.get(fqn.as_str()).copied().cloned()).collect();
        if ready.len() == reducer.parameters() {
            reducer.rebuild_buckets(&ready, self.settings.bucket_bytes)?;
            *rebuilt = true;
        }
        Ok(())
    }
}

/// Checks that the parallelize function decided the same on all ranks. Collective.
fn verify_same_choices(tree: &ModuleTree, world: &dyn ProcessGroup) -> Result<()> {
    let mut choices: Vec<String> = tree
        .parameters()
        .iter()
        .map(|p| {
            format!("`{}`: {:?}, partial gradient {}", p.fqn(), p.spec().cuts, p.has_partial_grad())
        })
        .collect();
    choices.extend(tree.units().iter().map(|unit| {
        let checkpointed = if unit.activation_checkpointing() { ", checkpointed" } else { "" };
        let mut choice = format!(
            "the unit `{}`: {:?}{checkpointed}",
            unit.path(),
            tree.fully_shard_options(unit.path())
        );
        let lists = [unit.units_to_forward_prefetch(), unit.units_to_backward_prefetch()];
        for (direction, list) in ["forward", "backward"].iter().zip(lists) {
            if !list.is_empty() {
                choice += &format!(", {direction} prefetch {}", list.join(" "));
            }
        }
        choice
    }));
    match first_difference(world, &choices)? {
        None => Ok(()),
        Some(Difference { rank, here, there, .. }) => Err(Error::other(format!(
            "the parallelize function decided differently on the ranks: {here} on rank 0, {there} on \
             rank {rank}; it must not depend on the rank"
        ))),
    }
}

impl Strategy for MeshStrategy {
    fn name(&self) -> &str {
        self.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            distributed: self.settings.communicates(),
            sharded: self.settings.sharding != Sharding::Never,
            no_sync: self.settings.communicates(),
            // Independent replicas change their values when they synchronise, and a pipeline's loss
            // is on some ranks only.
            deferred_reads: self.settings.outer.is_none() && self.settings.pipeline.is_none(),
            saves_distributed_checkpoints: self.settings.save_distributed_checkpoint,
        }
    }

    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh> {
        let [replicate, shard, context, tensor] = self.settings.sizes;
        if self.settings.one_rank_only && world.size() != 1 {
            return Err(Error::Mesh(format!(
                "strategy `{}` runs on one rank, the world size is {}; set `trainer.devices = 1`, or \
                 choose `ddp` or `fsdp`",
                self.settings.name,
                world.size()
            )));
        }
        let stages = self.settings.pipeline.as_ref().map_or(1, |pipeline| pipeline.ranks);
        let layout =
            DeviceMesh::layout_for(world.size() / stages, replicate, shard, context, tensor)?;
        let layout = match stages {
            1 => layout,
            stages => layout.repeated(PIPELINE_PARALLEL, stages)?,
        };
        DeviceMesh::new(layout, world)
    }

    fn set_parallelize(&mut self, parallelize: Box<dyn ParallelizeFn>) -> Result<()> {
        if self.settings.sharding == Sharding::Never {
            return Err(Error::other(format!(
                "strategy `{}` takes no parallelize function; `fsdp` and `model_parallel` do",
                self.settings.name
            )));
        }
        self.settings.parallelize = Some(parallelize);
        Ok(())
    }

    fn module_init_context(&self, init: ModuleInit) -> ModuleInit {
        let policy = &self.settings.mixed_precision;
        let compute_dtype = policy.param_dtype.map_or(init.compute_dtype, DType::from);
        let module_dtypes = init.module_dtypes.into_iter().chain(policy.module_dtypes()).collect();
        ModuleInit { compute_dtype, module_dtypes, ..init }
    }

    fn setup_module(&mut self, tree: &mut ModuleTree, mesh: &DeviceMesh, seed: u64) -> Result<()> {
        materialize::verify_same_model(tree, &**mesh.world())?;
        if self.parallelize(tree, mesh)? {
            verify_same_choices(tree, &**mesh.world())?;
        }
        self.warn_if_nothing_is_cut(tree, mesh)?;
        let experts = ExpertShards::new(self.settings.expert_parallel_size, tree, mesh)?;
        let assignment = self.assign(tree, mesh)?;
        let partial_grads = PartialGrads::new(tree, mesh)?;
        let (ignored, managed) = {
            let chosen = ignored::chosen(&self.settings, tree)?;
            let slots = tree.slots().into_iter().zip(chosen);
            let (elsewhere, slots): (Vec<_>, Vec<_>) =
                slots.partition(|(slot, _)| slot.is_elsewhere());
            for (slot, is_ignored) in elsewhere {
                slot.set_spec(match (is_ignored, self.shards(mesh)?) {
                    (false, true) => Self::sharded_spec(&slot, mesh)?,
                    (false, false) => Self::outer_spec(&slot, mesh)?,
                    (true, _) => Ignored::spec(&slot, mesh)?,
                });
            }
            let slots = slots.into_iter();
            let (ignored, managed): (Vec<_>, Vec<_>) = slots.partition(|(_, ignored)| *ignored);
            let only = |slots: Vec<(ParameterSlot, bool)>| -> Vec<ParameterSlot> {
                slots.into_iter().map(|(slot, _)| slot).collect()
            };
            (only(ignored), only(managed))
        };
        let data_parallel = match self.shards(mesh)? {
            true => {
                self.shard(tree, mesh, seed, partial_grads.clone(), &ignored, experts.as_ref())?
            }
            false => self.replicate(managed, mesh, seed, partial_grads.clone())?,
        };
        if !ignored.is_empty() {
            let bucket_bytes = self.settings.bucket_bytes;
            self.ignored = Some(Ignored::new(ignored, mesh, seed, partial_grads, bucket_bytes)?);
        }
        Self::verify_replicas(tree, mesh)?;
        if let Some(slot) = tree.slots().first() {
            let (shards, others) = match &data_parallel {
                DataParallel::Replicated { .. } => (false, Vec::new()),
                DataParallel::Sharded(runtime) => (true, runtime.part_groups()),
            };
            let device = slot.device().clone();
            if let (Some(assignment), Some(settings), Some(group)) =
                (assignment, &self.settings.pipeline, mesh.pipeline())
            {
                self.pipeline =
                    Some(Arc::new(Executor::new(settings, assignment, group, &device)?));
            }
            let others = others.into_iter().chain(self.pipeline.iter().flat_map(|p| p.groups()));
            connect(mesh, &device, shards, others)?;
        }
        self.data_parallel = Some(data_parallel);
        self.outer.as_mut().map_or(Ok(()), |outer| outer.set_up(tree, mesh))
    }

    fn prepare_forward(&mut self, context: StrategyContext<'_>) -> Result<()> {
        match self.data_parallel()? {
            DataParallel::Replicated { .. } => materialize::refresh_compute(context.slots),
            // Values gathered before an optimizer step or a load are stale.
            DataParallel::Sharded(runtime) => {
                runtime.on(fsdp::Event::PrepareForward)?;
                self.ignored.as_ref().map_or(Ok(()), Ignored::prepare_forward)
            }
        }
    }

    fn begin_backward(&mut self, _context: StrategyContext<'_>, synchronise: bool) -> Result<()> {
        self.ignored.as_ref().map_or(Ok(()), Ignored::begin_backward)?;
        match self.data_parallel()? {
            DataParallel::Replicated { reducer, .. } => {
                reducer.begin_backward(synchronise, self.settings.bucket_bytes)
            }
            DataParallel::Sharded(runtime) => {
                runtime.begin_backward(self.settings.accumulation_sync.scope(synchronise))
            }
        }
    }

    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.finish_backward(context.slots)
    }

    fn keep_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.finish_backward(context.slots)
    }

    fn finish_step(&mut self, context: StrategyContext<'_>) -> Result<()> {
        match self.data_parallel()? {
            DataParallel::Replicated { reducer, .. } => reducer.finish_step()?,
            DataParallel::Sharded(runtime) => runtime.on(fsdp::Event::FinishStep)?,
        }
        self.ignored.as_ref().map_or(Ok(()), Ignored::finish_step)?;
        self.outer.as_mut().map_or(Ok(()), Outer::finish_step)?;
        self.rebuild_buckets(context)?;
        self.prepare_forward(context)
    }

    fn finish_load(&mut self, context: StrategyContext<'_>) -> Result<()> {
        // Each replica has read its own copy.
        Self::verify_replicas(context.tree, context.mesh)?;
        self.outer.as_mut().map_or(Ok(()), Outer::start_here)?;
        self.prepare_forward(context)
    }

    fn grad_scale(&self, totals: &StepTotals, local_count: f64) -> Result<f64> {
        match &self.outer {
            Some(outer) if outer.is_apart() => outer.grad_scale(local_count),
            _ => Ok(totals.grad_scale()),
        }
    }

    fn squared_norm(&self, context: StrategyContext<'_>) -> Result<SquaredNorm> {
        let StrategyContext { mesh, slots, .. } = context;
        let trainable = slots.iter().filter(|slot| slot.requires_grad());
        let parameters: Vec<_> = trainable.map(|slot| slot.parameter().clone()).collect();
        match &self.outer {
            Some(outer) if outer.is_apart() => outer.squared_norm(&parameters, mesh),
            _ => SquaredNorm::of(&parameters, &|dim| mesh.coordinate(dim)),
        }
    }

    fn extensions(&mut self) -> Option<&mut dyn StrategyExtensions> {
        Some(self)
    }
}
