//! Ranks, and times that they agree on.

use std::collections::BTreeMap;
use std::time::Instant;

use clap::Args;
use fulgurite_core::collective::ReduceOp;
use fulgurite_core::config::{ConfigLayers, RunConfig};
use toml::Table;

use crate::prelude::*;

/// Where a benchmark runs.
#[derive(Debug, Clone, Args)]
pub(super) struct Ranks {
    /// Number of processes
    #[arg(long, default_value_t = 2, value_parser = at_least_one)]
    pub(super) ranks: usize,
    /// The strategy: a name, or a TOML table such as '{ type = "fsdp_tp" }'
    #[arg(long, default_value = "fsdp")]
    pub(super) strategy: String,
}

impl Ranks {
    /// Becomes a rank; see [`launch`](fulgurite_core::launch::launch).
    pub(super) fn launch(&self) -> Result<Fabric> {
        self.launch_with(&[])
    }

    /// The same with further keys of the configuration, `key=value`.
    pub(super) fn launch_with(&self, keys: &[String]) -> Result<Fabric> {
        let mut layers = ConfigLayers::new()
            .set(&format!("trainer.devices={}", self.ranks))?
            .set(&format!("trainer.strategy={}", self.strategy))?;
        for key in keys {
            layers = layers.set(key)?;
        }
        Fabric::from_config(&RunConfig::<Table, Table>::from_layers(layers)?)?.launch()
    }
}

/// Reads a number of things of which there must be one.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be 1 or more".to_owned()),
        Ok(n) => Ok(n),
        Err(error) => Err(format!("{error}")),
    }
}

/// Seconds by name, in the order of measuring.
#[derive(Debug, Default)]
pub(super) struct Times {
    order: Vec<&'static str>,
    secs: BTreeMap<&'static str, Vec<f64>>,
}

impl Times {
    /// Runs `f` on all ranks between barriers and notes how long the slowest took. Collective.
    pub(super) fn measure<T>(
        &mut self,
        fabric: &Fabric,
        name: &'static str,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        fabric.barrier()?;
        let started = Instant::now();
        let result = f()?;
        self.note(fabric, name, started.elapsed().as_secs_f64())?;
        Ok(result)
    }

    /// Notes the longest of the ranks' times. Collective.
    pub(super) fn note(&mut self, fabric: &Fabric, name: &'static str, secs: f64) -> Result<()> {
        let slowest = Tensor::new(&[secs], &Device::Cpu)?;
        fabric.all_reduce(&slowest, ReduceOp::Max)?;
        if !self.secs.contains_key(name) {
            self.order.push(name);
        }
        self.secs.entry(name).or_default().push(slowest.to_vec1::<f64>()?[0]);
        Ok(())
    }

    /// All that were noted under a name, in order.
    pub(super) fn get(&self, name: &str) -> &[f64] {
        self.secs.get(name).map_or(&[], Vec::as_slice)
    }

    /// The shortest time of one.
    pub(super) fn shortest(&self, name: &str) -> Option<f64> {
        self.secs.get(name)?.iter().copied().min_by(f64::total_cmp)
    }

    /// The median of each, in the order of measuring.
    pub(super) fn medians(&self) -> Vec<(&'static str, f64)> {
        let median = |name: &&'static str| {
            let mut secs = self.secs[*name].clone();
            secs.sort_by(f64::total_cmp);
            (*name, secs[secs.len() / 2])
        };
        self.order.iter().map(median).collect()
    }
}
