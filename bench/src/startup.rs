//! The parts of the time before the first step.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use fulgurite_core::collective::{ProcessGroup, all_gather_object};
use fulgurite_core::run::TrainerConfig;
use serde::Serialize;

use super::tiny_models::{Net, TinyModel, TinyModelConfig, Tokens};
use super::train::now;
use fulgurite::prelude::*;

/// The times from the start of the program to the end of `tiny`'s first step, in seconds, each on
/// the slowest rank.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Startup {
    /// From the start of the program to the start of the rank's process.
    process_s: f64,
    /// Rendezvous: the store, and the process group's memory.
    rendezvous_s: f64,
    /// The strategy, and the groups of its mesh.
    strategy_s: f64,
    /// Describing the model.
    build_s: f64,
    /// Comparing the ranks' models, sharding the parameters, initialising values.
    materialize_s: f64,
    optimizer_s: f64,
    /// Opening the data.
    data_s: f64,
    first_step_s: f64,
    /// The sum.
    total_s: f64,
}

/// Builds a Fabric over `world` and runs a step. `program` and `entered` are the start times of the
/// program and of this rank's process, in seconds since 1970. Collective.
///
/// # Errors
/// If the step fails.
pub(super) fn start(
    config: &TrainerConfig,
    world: &Arc<dyn ProcessGroup>,
    program: f64,
    entered: f64,
) -> Result<Startup> {
    let rendezvous_s = now() - entered;
    let mut clock = Instant::now();
    let mut lap = || {
        let secs = clock.elapsed().as_secs_f64();
        clock = Instant::now();
        secs
    };
    let mut fabric = Fabric::with_world(world.clone(), config, 0, None)?;
    let strategy_s = lap();
    let mut build_s = 0.0;
    let net = fabric.setup_module(|b| {
        let net = Net::new(b, TinyModel::Tiny);
        build_s = lap();
        net
    })?;
    let materialize_s = lap();
    let mut optimizer = fabric.setup_optimizer(&AdamW::default())?;
    let optimizer_s = lap();
    let mut batches = fabric.setup_data::<Tokens>(&TinyModelConfig { name: TinyModel::Tiny })?;
    let data_s = lap();
    if let Some(batch) = batches.next() {
        fabric.backward(&batch?.forward(|batch| net.loss(batch))?)?;
        fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
        optimizer.step()?;
    }
    let first_step_s = lap();
    let own = [
        entered - program,
        rendezvous_s,
        strategy_s,
        build_s,
        materialize_s,
        optimizer_s,
        data_s,
        first_step_s,
        now() - program,
    ];
    let all: Vec<[f64; 9]> = all_gather_object(&**world, &own)?;
    let slowest = |i: usize| all.iter().map(|own| own[i]).fold(0.0, f64::max);
    Ok(Startup {
        process_s: slowest(0),
        rendezvous_s: slowest(1),
        strategy_s: slowest(2),
        build_s: slowest(3),
        materialize_s: slowest(4),
        optimizer_s: slowest(5),
        data_s: slowest(6),
        first_step_s: slowest(7),
        total_s: slowest(8),
    })
}

impl fmt::Display for Startup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |secs: f64| secs * 1e3;
        writeln!(
            f,
            "start-up to the end of the first step of `tiny`: {:.1} ms (process {:.1}, rendezvous \
             {:.1}, strategy {:.1}, building {:.2}, materializing {:.1}, optimizer {:.2}, data {:.2}, \
             first step {:.1})",
            ms(self.total_s),
            ms(self.process_s),
            ms(self.rendezvous_s),
            ms(self.strategy_s),
            ms(self.build_s),
            ms(self.materialize_s),
            ms(self.optimizer_s),
            ms(self.data_s),
            ms(self.first_step_s),
        )
    }
}
