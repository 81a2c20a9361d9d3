//! Launching Fabric from a configuration.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Fabric;
use super::attempts::Attempts;
use crate::profiler::Profiler;
use crate::run::{
    AdapterConfig, Devices, MAX_TIMEOUT_SECS, MicroBatchSize, QuantizationConfig, RunConfig,
    TrainerConfig,
};
use crate::{Error, Result};
use candle_core::Device;
use fulgurite_config::registry::{self, kind};
use fulgurite_config::to_table;
use fulgurite_engine::collective::{
    Agreement, GroupContext, ProcessGroup, ProcessGroupConfig, Solo,
};
use fulgurite_engine::module::{ModuleInit, ModuleTree, PATTERN_HELP, idle_pattern};
use fulgurite_engine::strategy::{BuildContext, ParallelizeFn, StrategyConfig};
use fulgurite_launch::{
    Elastic, LaunchOptions, LaunchedRank, Starting, join_next_generation, launch_checked,
};
use serde::Serialize;
use toml::Table;

/// A launched rank, connected to the others.
pub struct Connection {
    /// Keep it as long as the rank takes part in the job.
    pub launched: LaunchedRank,
    /// The group of all ranks.
    pub world: Arc<dyn ProcessGroup>,
}

/// The configured parts of a launch.
struct Parts {
    strategy: Box<dyn StrategyConfig>,
    options: LaunchOptions,
    process_group: Box<dyn ProcessGroupConfig>,
}

impl TrainerConfig {
    /// Launches the configured ranks, if not yet started by a launcher, and connects them.
    /// Collective.
    ///
    /// Returns in ranks only; see [`launch`](fulgurite_launch::launch).
    ///
    /// # Errors
    /// As [`launch`](fulgurite_launch::launch), and if the process group cannot connect the ranks;
    /// [`Error::Interrupted`] if this process is asked to end while it waits for the ranks.
    pub fn connect(&self) -> Result<Connection> {
        self.connect_checked(&|_| Ok(()))
    }

    /// Like [`connect`](Self::connect), but calls `check` with the world size before starting
    /// ranks.
    ///
    /// If a launcher has started the ranks, rank 0 calls `check` once all ranks have connected.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and the errors of `check`.
    pub fn connect_checked(&self, check: &dyn Fn(usize) -> Result<()>) -> Result<Connection> {
        let _starting = Starting::new();
        let Parts { strategy, options, process_group } = self.parts()?;
        let timeout = options.timeout;
        let fits = |world_size| {
            strategy.build(&BuildContext::new(world_size).on_nodes(self.num_nodes))?;
            check(world_size)
        };
        let launched = launch_checked(options, &fits)?;
        match self.connect_with(&launched, &*process_group, timeout) {
            Ok(world) => Ok(Connection { launched, world }),
            // Another rank may have been lost while this new one started.
            Err(error) => self.reconnect(&error)?.ok_or(error),
        }
    }

    /// Joins the next generation of an elastic job after an error, if there is one, and connects
    /// its ranks. Collective over these.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(crate) fn reconnect(&self, error: &Error) -> Result<Option<Connection>> {
        /// How long a rank waits after a failed collective to hear whether the job goes on. The
        /// supervisor notices a stopped process only after some seconds.
        const LOSS_NOTICE: Duration = Duration::from_secs(5);
        if !self.elastic.enabled {
            return Ok(None);
        }
        let is_loss =
            |error: &Error| matches!(error, Error::PeerFailed { .. } | Error::Collective { .. });
        let mut within = if is_loss(error) { LOSS_NOTICE } else { Duration::ZERO };
        let Parts { options, process_group, .. } = self.parts()?;
        loop {
            let Some(launched) = join_next_generation(within)? else {
                return Ok(None);
            };
            match self.connect_with(&launched, &*process_group, options.timeout) {
                Ok(world) => return Ok(Some(Connection { launched, world })),
                Err(error) if is_loss(&error) => within = LOSS_NOTICE,
                Err(error) => return Err(error),
            }
        }
    }

    fn connect_with(
        &self,
        launched: &LaunchedRank,
        process_group: &dyn ProcessGroupConfig,
        timeout: Duration,
    ) -> Result<Arc<dyn ProcessGroup>> {
        if launched.world_size == 1 {
            return Ok(Arc::new(Solo::new("world", 0)));
        }
        let context = GroupContext {
            rank: launched.rank,
            world_size: launched.world_size,
            local_rank: launched.local_rank,
            local_world_size: launched.local_world_size,
            node_rank: launched.node_rank,
            address: launched.address,
            store: launched.store.clone(),
            timeout,
        };
        self.check_process_group(&context, launched.generation)?;
        self.over_devices(process_group.build(&context)?, &context)
    }

    /// How the job goes on that has lost a rank.
    fn elastic(&self, timeout: Duration) -> Option<Elastic> {
        let config = &self.elastic;
        let (strategy, num_nodes) = (self.strategy.clone(), self.num_nodes);
        let fits = move |world_size| {
            let built = strategy
                .build::<Box<dyn StrategyConfig>>(kind::STRATEGY, "trainer.strategy")
                .and_then(|strategy| {
                    strategy.build(&BuildContext::new(world_size).on_nodes(num_nodes))
                });
            built.is_ok()
        };
        config.enabled.then(|| Elastic {
            min_ranks: config.min_ranks,
            max_restarts: config.max_restarts,
            join_timeout: config.join_timeout_secs.map_or(timeout, Duration::from_secs),
            fits: Arc::new(fits),
        })
    }

    /// Checks that all ranks choose the same process group, before they wait for each other in it.
    ///
    /// Rank 0 puts its choice into the store, and each other rank reads it with one request.
    ///
    /// # Errors
    /// On ranks whose choice differs from rank 0's, or that wait for it in vain. The message names
    /// the key.
    fn check_process_group(&self, context: &GroupContext, generation: u64) -> Result<()> {
        /// How often this process has connected in its generation, whose store is new.
        static CONNECTIONS: Mutex<(u64, u64)> = Mutex::new((0, 0));
        let connection = {
            let mut connections = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
            if connections.0 != generation {
                *connections = (generation, 0);
            }
            connections.1 += 1;
            connections.1
        };
        let key = format!("process_group/configuration/{connection}");
        let own = self.process_group_agreement()?;
        if context.rank == 0 {
            let values = serde_json::to_vec(own.values()).map_err(Error::other)?;
            return context.store.set(&key, &values);
        }
        let of_rank_zero = context.store.get(&key, context.timeout).map_err(|error| match error {
            Error::Launch(why) => Error::Launch(format!(
                "waited for rank 0 to say by which `trainer.process_group` it communicates: {why}"
            )),
            other => other,
        })?;
        let of_rank_zero = serde_json::from_slice(&of_rank_zero).map_err(Error::other)?;
        own.compare(context.rank, &of_rank_zero)
    }

    /// Checks as much of the launch as possible without launching.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(crate) fn check_launch(&self, ranks: usize) -> Result<()> {
        let context = BuildContext::new(ranks).on_nodes(self.num_nodes);
        self.parts()?.strategy.build(&context).map(drop)
    }

    /// # Errors
    /// If a plugin is unknown, or an option is wrong.
    fn parts(&self) -> Result<Parts> {
        registry::require(kind::PROCESS_GROUP, &self.process_group.name)?;
        let strategy =
            self.strategy.build::<Box<dyn StrategyConfig>>(kind::STRATEGY, "trainer.strategy")?;
        let timeout = strategy.timeout_secs().unwrap_or(self.timeout_secs);
        if !(1..=MAX_TIMEOUT_SECS).contains(&timeout) {
            return Err(Error::Config(format!(
                "`trainer.strategy.timeout_secs`: must be from 1 to {MAX_TIMEOUT_SECS}, found {timeout}"
            )));
        }
        let timeout = Duration::from_secs(timeout);
        let options = LaunchOptions {
            devices: match self.devices {
                Devices::Count(n) => Some(n),
                Devices::Auto => None,
            },
            devices_if_alone: self.ranks_if_alone()?,
            num_nodes: self.num_nodes,
            environment: match &self.environment {
                Some(value) => Some(value.build(kind::ENVIRONMENT, "trainer.environment")?),
                None => None,
            },
            timeout,
            job_key_file: self.job_key_file.clone(),
            elastic: self.elastic(timeout),
        };
        let process_group = self
            .process_group
            .build::<Box<dyn ProcessGroupConfig>>(kind::PROCESS_GROUP, "trainer.process_group")?;
        process_group.check()?;
        Ok(Parts { strategy, options, process_group })
    }
}

/// A configured Fabric before its launch; made by [`Fabric::from_config`].
pub struct FabricLauncher<'a> {
    config: &'a TrainerConfig,
    /// Configuration that must be equal on all ranks.
    run: RunConfig<Table, Table>,
}

impl FabricLauncher<'_> {
    /// Launches the ranks. Returns in ranks only; each runs the program from its beginning.
    /// Collective.
    ///
    /// # Errors
    /// As [`TrainerConfig::connect`] and [`Fabric::with_world`]. Also if ranks differ in `[model]`,
    /// or in the tables of optimizer and schedule.
    pub fn launch(self) -> Result<Fabric> {
        let _starting = Starting::new();
        if self.config.elastic.enabled {
            return Err(Error::Config(
                "`trainer.elastic`: a loop over Fabric cannot go on after the loss of a rank; leave it out, or \
                 train with `Trainer::fit`"
                    .to_owned(),
            ));
        }
        let Connection { launched, world } = self.config.connect()?;
        if world.size() > 1 {
            Agreement::check(&*world, &[self.run.agreement(&[])?])?;
        }
        let mut fabric = Fabric::over(world, self.config, self.run.seed, None)?;
        fabric.launched = Some(launched);
        Ok(fabric)
    }
}

impl Fabric {
    /// Creates a launcher from `[trainer]` and `seed` of a run's configuration.
    ///
    /// # Errors
    /// If the configuration is wrong or names plugins that are not linked.
    pub fn from_config<M: Serialize, D>(run: &RunConfig<M, D>) -> Result<FabricLauncher<'_>> {
        run.validate()?;
        run.check_plugins()?;
        // In a program without a `[model]` this is `()`, which does not become a table.
        // `setup_data` compares `[data]`, with the data.
        let model = to_table(&run.model).unwrap_or_default();
        let compared = run.untyped().with(model, Table::new());
        Ok(FabricLauncher { config: &run.trainer, run: compared })
    }

    /// Creates a Fabric over the ranks of `world` from a configuration. Collective.
    ///
    /// `parallelize` replaces the parallelize function in the strategy's configuration.
    ///
    /// # Errors
    /// If the strategy is unknown or does not fit the world size; on every rank, if the ranks
    /// differ in the configuration or the seed.
    pub fn with_world(
        world: Arc<dyn ProcessGroup>,
        config: &TrainerConfig,
        seed: u64,
        parallelize: Option<Box<dyn ParallelizeFn>>,
    ) -> Result<Self> {
        if world.size() > 1 {
            let run = RunConfig { seed, trainer: config.clone(), ..RunConfig::default() };
            Agreement::check(&*world, &[run.agreement(&[])?])?;
        }
        Self::over(world, config, seed, parallelize)
    }

    /// Like [`with_world`](Self::with_world), with a configuration already compared between ranks.
    /// Collective.
    pub(crate) fn over(
        world: Arc<dyn ProcessGroup>,
        config: &TrainerConfig,
        seed: u64,
        parallelize: Option<Box<dyn ParallelizeFn>>,
    ) -> Result<Self> {
        let mut strategy = config
            .strategy
            .build::<Box<dyn StrategyConfig>>(kind::STRATEGY, "trainer.strategy")?
            .build(&BuildContext::new(world.size()).on_nodes(config.num_nodes))?;
        if let Some(parallelize) = parallelize {
            strategy.set_parallelize(parallelize)?;
        }
        let profiler = config.profiler.map(Profiler::new);
        let world = match &profiler {
            Some(profiler) => profiler.watch_group(world),
            None => world,
        };
        let accelerator = config.open_accelerator(&*world)?;
        if let (Some(profiler), Some(accelerator)) = (&profiler, &accelerator) {
            profiler.set_accelerator(accelerator.clone());
        }
        let device = accelerator.as_ref().map_or(Device::Cpu, |opened| opened.device().clone());
        let init = ModuleInit { device, ..config.module_init()? };
        let (attempts, world) = match (&accelerator, config.micro_batch_size) {
            (Some(accelerator), Some(MicroBatchSize::Auto)) => {
                let (attempts, world) = Attempts::new(world, accelerator.clone())?;
                (Some(attempts), world)
            }
            (None, Some(MicroBatchSize::Auto)) if world.rank() == 0 => {
                tracing::warn!(
                    "`trainer.micro_batch_size` = \"auto\" splits no batch on the CPU: a process that takes more of \
                     the host's memory than there is does not hear of it. Give a number of samples"
                );
                (None, world)
            }
            _ => (None, world),
        };
        let mut fabric = Self::new(world, strategy, init, seed)?;
        fabric.accelerator = accelerator;
        fabric.attempts = attempts;
        *fabric.adapter_from.get_mut().expect("nobody panics while holding it") =
            config.adapters.as_ref().and_then(|adapters| adapters.from.clone());
        if let Some(profiler) = profiler {
            fabric.runtime.set_profiler(profiler);
        }
        fabric.workers = config.workers(fabric.device());
        fabric.set_sync_buffers(config.sync_buffers);
        Ok(fabric)
    }
}

impl TrainerConfig {
    /// Returns the model's build context, before the strategy changes it.
    ///
    /// # Errors
    /// As [`AdapterConfig::adapters`](crate::run::AdapterConfig::adapters) and
    /// [`QuantizationConfig::quantization`](crate::run::QuantizationConfig::quantization).
    pub(crate) fn module_init(&self) -> Result<ModuleInit> {
        let adapters = self.adapters.as_ref().map(AdapterConfig::adapters).transpose()?;
        Ok(ModuleInit {
            dtype: self.precision.param_dtype(),
            compute_dtype: self.precision.compute_dtype(),
            keep_in_fp32: self.keep_in_fp32.clone(),
            frozen: self.freeze.clone(),
            eval_mode: self.eval_mode.clone(),
            adapters,
            quantization: self
                .quantization
                .as_ref()
                .map(QuantizationConfig::quantization)
                .transpose()?,
            activation_checkpointing: self.activation_checkpointing.clone(),
            sync_batchnorm: self.sync_batchnorm,
            ..ModuleInit::default()
        })
    }
}

/// Checks that every pattern of `trainer.freeze` matches a parameter.
///
/// # Errors
/// Names the first pattern without a match.
pub(crate) fn check_frozen(frozen: &[String], tree: &ModuleTree) -> Result<()> {
    match idle_pattern(frozen, tree.parameters().iter().map(|p| p.fqn())) {
        None => Ok(()),
        Some(pattern) => {
            let shown = tree.parameters().first().map_or("none", |parameter| parameter.fqn());
            Err(Error::Config(format!(
                "`trainer.freeze`: no parameter matches `{pattern}`; there is {shown}, and so on. {PATTERN_HELP}"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fulgurite_launch::LocalStore;
    use fulgurite_test_message::assert_says;

    use super::*;

    /// As when rank 0 is stopped just before.
    #[test]
    fn a_silent_rank_zero_is_named() {
        let context = GroupContext {
            rank: 1,
            world_size: 2,
            local_rank: 1,
            local_world_size: 2,
            node_rank: 0,
            address: None,
            store: Arc::new(LocalStore::new()),
            timeout: Duration::from_millis(1),
        };
        let error = TrainerConfig::default().check_process_group(&context, 0).unwrap_err();
        assert_says!(error, "launch: waited for rank 0 … `trainer.process_group` … no rank set …");
    }
}
