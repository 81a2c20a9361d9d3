//! Ranks of a benchmark, and times of the slowest rank.

use std::collections::BTreeMap;
use std::time::Instant;

use clap::Args;
use fulgurite_core::collective::ReduceOp;
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::environment::{Variables, detect};
use fulgurite_core::run::RunConfig;
use serde::de::DeserializeOwned;
use toml::Table;

use fulgurite::prelude::*;

/// The ranks of a benchmark.
#[derive(Debug, Clone, Args)]
pub(super) struct Ranks {
    /// Number of processes, unless a launcher (`fulgurite run`, `mpirun`) has started them. Each
    /// computes on RAYON_NUM_THREADS threads, by default on its share of this machine's cores
    #[arg(long, default_value_t = 2, value_parser = at_least_one)]
    pub(super) ranks: usize,
    /// The device of the ranks: cpu, cuda, auto, or a TOML table such as '{ type = "cuda", tf32 =
    /// true }'
    #[arg(long, default_value = "cpu")]
    pub(super) accelerator: String,
}

/// The ranks and the strategy of a benchmark.
#[derive(Debug, Clone, Args)]
pub(super) struct StrategyRanks {
    #[command(flatten)]
    pub(super) ranks: Ranks,
    /// The strategy: a name, or a TOML table such as '{ type = "fsdp_tp" }'
    #[arg(long, default_value = "fsdp")]
    pub(super) strategy: String,
}

impl StrategyRanks {
    /// Becomes a rank; see [`launch`](fulgurite_core::launch::launch). `keys` are further keys of
    /// the configuration, `key=value`.
    pub(super) fn launch(&self, keys: &[String]) -> Result<Fabric> {
        self.ranks.launch(&self.strategy, keys)
    }

    /// The configuration of a run on these ranks; `keys` as in [`launch`](Self::launch).
    pub(super) fn config(&self, keys: &[String]) -> Result<RunConfig<Table, Table>> {
        self.ranks.config(&self.strategy, keys)
    }
}

impl Ranks {
    /// Becomes a rank, under a fixed strategy.
    pub(super) fn launch(&self, strategy: &str, keys: &[String]) -> Result<Fabric> {
        Fabric::from_config(&self.config::<Table, Table>(strategy, keys)?)?.launch()
    }

    /// The configuration of a run on these ranks.
    pub(super) fn config<M, D>(&self, strategy: &str, keys: &[String]) -> Result<RunConfig<M, D>>
    where
        M: DeserializeOwned + 'static,
        D: DeserializeOwned + 'static,
    {
        let variables = Variables::current();
        let started = match detect(&variables)? {
            Some(environment) => environment.build(&variables)?.creates_processes_externally(),
            None => false,
        };
        let devices = if started { "auto".to_owned() } else { self.ranks.to_string() };
        let mut layers = ConfigLayers::new()
            .set(&format!("trainer.devices={devices}"))?
            .set(&format!("trainer.strategy={strategy}"))?
            .set(&format!("trainer.accelerator={}", self.accelerator))?;
        for key in keys {
            layers = layers.set(key)?;
        }
        RunConfig::from_layers(layers)
    }
}

/// Parses a number that is at least 1.
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
    /// Runs `f` on all ranks between barriers, until their devices are done. Notes the time of the
    /// slowest. Collective.
    pub(super) fn measure<T>(
        &mut self,
        fabric: &Fabric,
        name: &'static str,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        // Exclude work that was queued before.
        fabric.device().synchronize()?;
        fabric.barrier()?;
        let started = Instant::now();
        let result = f()?;
        fabric.device().synchronize()?;
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

    /// The times noted under a name, in order.
    pub(super) fn get(&self, name: &str) -> &[f64] {
        self.secs.get(name).map_or(&[], Vec::as_slice)
    }

    /// The shortest time noted under a name.
    pub(super) fn shortest(&self, name: &str) -> Option<f64> {
        self.secs.get(name)?.iter().copied().min_by(f64::total_cmp)
    }

    /// The median time of each name, in the order of measuring.
    pub(super) fn medians(&self) -> Vec<(&'static str, f64)> {
        self.order.iter().map(|name| (*name, median(&self.secs[*name]))).collect()
    }
}

/// The median: for an even number of values the mean of the two in the middle, for none NaN.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => f64::NAN,
        _ => f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
    }
}
