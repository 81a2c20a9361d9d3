//! The strategy.

use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::mesh::{DATA_PARALLEL_SHARD, DeviceMesh};
use fulgurite_core::module::{ModuleInit, ModuleTree, UnitHooks, glob_match};
use fulgurite_core::parameter::{GradReducer, LocalShard, Parameter};
use fulgurite_core::shard::{Cut, Placement};
use fulgurite_core::strategy::{Capabilities, ParallelizeFn, Strategy, StrategyState, materialize};
use fulgurite_core::{Error, Result};

use super::config::{Fsdp, ReshardAfterForward};
use super::group::{Member, ParamGroup};
use super::schedule::Schedule;
use crate::mixed_precision::MixedPrecisionPolicy;

pub(super) struct FsdpStrategy {
    name: &'static str,
    state: StrategyState,
    reshard_after_forward: bool,
    mixed_precision: MixedPrecisionPolicy,
    prefetch: usize,
    shard_conditions: Vec<String>,
    allow_root_only: bool,
    parallelize: Option<Box<dyn ParallelizeFn>>,
    schedule: Option<Arc<Schedule>>,
}

impl FsdpStrategy {
    pub(super) fn new(
        name: &'static str,
        config: &Fsdp,
        parallelize: Option<Box<dyn ParallelizeFn>>,
    ) -> Self {
        Self {
            name,
            state: StrategyState::default(),
            reshard_after_forward: config.reshard_after_forward != ReshardAfterForward::Never,
            mixed_precision: config.mixed_precision,
            prefetch: config.prefetch,
            shard_conditions: config.shard_conditions.clone(),
            allow_root_only: config.allow_root_only,
            parallelize,
            schedule: None,
        }
    }

    /// Whether each unit is gathered on its own.
    fn choose_units(&self, tree: &mut ModuleTree) -> Result<Vec<bool>> {
        let chosen: Vec<bool> = if let Some(parallelize) = &self.parallelize {
            parallelize.parallelize(tree, self.state.mesh()?)?;
            tree.units().iter().map(|unit| tree.is_fully_sharded(unit.path())).collect()
        } else if self.shard_conditions.is_empty() {
            vec![true; tree.units().len()]
        } else {
            let matches = |path: &str| self.shard_conditions.iter().any(|p| glob_match(p, path));
            tree.units().iter().map(|unit| matches(unit.path())).collect()
        };
        if chosen.contains(&true) || self.allow_root_only {
            return Ok(chosen);
        }
        let units: Vec<&str> = tree.units().iter().map(|unit| unit.path()).collect();
        Err(Error::other(if units.is_empty() {
            "no layer modules were sharded: the model has no units. Build the blocks that are \
             worth gathering on their own with `ModuleBuilder::unit`, or set \
             `trainer.strategy.allow_root_only = true` to gather the whole model at once"
                .to_owned()
        } else {
            format!(
                "no layer modules were sharded: neither `shard_conditions` ({}) nor a parallelize \
                 function chose any of the model's units ({}). A pattern is a whole path, in which \
                 `*` is one segment",
                self.shard_conditions.join(", "),
                units.join(", ")
            )
        }))
    }

    /// Cuts a parameter along dim 0 and gives this rank's shard its initial values.
    fn shard(&self, parameter: &Parameter, seed: u64, group: &dyn ProcessGroup) -> Result<Member> {
        let fqn = parameter.fqn();
        if parameter.global_shape().is_empty() {
            let message = "is a scalar, which FSDP cannot shard; give it the shape [1]";
            return Err(Error::parameter(fqn, message));
        }
        let spec = parameter.spec().with_cut(Cut::new(
            DATA_PARALLEL_SHARD,
            group.size(),
            Placement::Shard(0),
        ));
        let counts = (0..group.size()).map(|rank| spec.region(|_| rank).elem_count()).collect();
        let region = spec.region(|_| group.rank());
        let values = materialize::initial_values(parameter, seed, &region)?;
        parameter.set_spec(spec);
        parameter.set_local(LocalShard { values, region });
        Ok(Member { parameter: parameter.clone(), counts })
    }

    fn schedule(&self) -> Result<&Arc<Schedule>> {
        self.schedule.as_ref().ok_or_else(|| Error::other("fsdp: no model has been set up"))
    }
}

impl Strategy for FsdpStrategy {
    fn name(&self) -> &str {
        self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { distributed: true, sharded: true, no_sync: true }
    }

    fn state(&self) -> &StrategyState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut StrategyState {
        &mut self.state
    }

    fn setup_environment(&mut self, world: Arc<dyn ProcessGroup>) -> Result<()> {
        let layout = DeviceMesh::layout_for(world.size(), Some(1), None, Some(1), Some(1))?;
        self.state.set_mesh(DeviceMesh::new(layout, world)?);
        Ok(())
    }

    fn set_parallelize(&mut self, parallelize: Box<dyn ParallelizeFn>) -> Result<()> {
        self.parallelize = Some(parallelize);
        Ok(())
    }

    fn module_init_context(&self, init: ModuleInit) -> ModuleInit {
        match self.mixed_precision.param_dtype {
            Some(dtype) => ModuleInit { compute_dtype: dtype.into(), ..init },
            None => init,
        }
    }

    fn setup_module(&mut self, mut tree: ModuleTree, seed: u64) -> Result<()> {
        let process_group = self.state.mesh()?.group(DATA_PARALLEL_SHARD)?.clone();
        materialize::verify_same_model(&tree, &*process_group)?;
        let chosen = self.choose_units(&mut tree)?;
        let policy = self.mixed_precision;
        let reduce_dtype = policy.reduce_dtype.map(DType::from);
        let mut groups = Vec::new();
        let mut units = Vec::new();
        let mut root = tree.unit_parameters(None);
        let mut add = |path: &str, parameters: &[Parameter], reshard: bool| -> Result<usize> {
            let members = parameters
                .iter()
                .map(|parameter| self.shard(parameter, seed, &*process_group))
                .collect::<Result<_>>()?;
            let path = path.to_owned();
            let group =
                ParamGroup::new(path, members, reshard, process_group.clone(), reduce_dtype);
            groups.push(group);
            Ok(groups.len() - 1)
        };
        for (unit, chosen) in tree.units().iter().zip(chosen) {
            let parameters = tree.unit_parameters(Some(unit.index()));
            if chosen {
                units.push(Some(add(unit.path(), &parameters, self.reshard_after_forward)?));
            } else {
                root.extend(parameters);
                units.push(None);
            }
        }
        add("(root)", &root, false)?;
        let cast = policy.param_dtype.filter(|_| policy.cast_forward_inputs).map(DType::from);
        let dtypes = (cast, policy.output_dtype.map(DType::from));
        let schedule =
            Arc::new(Schedule::new(groups, units, self.prefetch, dtypes, self.state.sync_flag()));
        for parameter in tree.trainable() {
            parameter.set_reducer(schedule.clone() as Arc<dyn GradReducer>);
        }
        for unit in tree.units() {
            unit.set_hooks(schedule.clone() as Arc<dyn UnitHooks>);
        }
        tracing::debug!(?schedule, "fsdp units");
        self.schedule = Some(schedule);
        self.state.set_tree(tree);
        Ok(())
    }

    fn prepare_forward(&mut self) -> Result<()> {
        // What was gathered before an optimizer step or a load is out of date.
        self.schedule()?.reshard_all()?;
        self.schedule()?.prepare_forward()
    }

    fn finish_backward(&mut self) -> Result<()> {
        self.schedule()?.finish_backward()
    }

    fn finish_step(&mut self) -> Result<()> {
        self.state.end_step()?;
        self.schedule()?.finish_step();
        self.prepare_forward()
    }
}
