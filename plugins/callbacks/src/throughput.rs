//! Logs how much is computed per second.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::time::Instant;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, LogOptions};
use serde::{Deserialize, Serialize};

/// Logs rates over the last steps: `{ type = "throughput_monitor" }`. Uses the names of Lightning's
/// `ThroughputMonitor`: `device/batches_per_sec`, `device/items_per_sec`, `device/flops_per_sec`
/// and `device/mfu` are per rank. The names without `device/`, except `mfu`, are the sum over all
/// ranks, and `time` is the seconds of training. An item is a token, or another unit that the loss
/// counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ThroughputMonitorConfig {
    /// Number of steps that the rates cover.
    #[default(NonZeroUsize::new(100).expect("it is not zero"))]
    pub window_size: NonZeroUsize,
    /// Floating-point operations per token (or other item), forward and backward. By default six
    /// for each trainable parameter and four for each frozen one, as is usual for transformers;
    /// this omits attention. Of a mixture's experts, as many count as a token uses.
    pub flops_per_item: Option<f64>,
    /// Peak floating-point operations per second of a rank's hardware, in teraflop/s; without it
    /// `device/mfu` is not logged.
    pub peak_tflops: Option<f64>,
}

#[typetag::serde(name = "throughput_monitor")]
impl CallbackConfig for ThroughputMonitorConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        for (key, value) in
            [("flops_per_item", self.flops_per_item), ("peak_tflops", self.peak_tflops)]
        {
            if let Some(value) = value
                && !(value.is_finite() && value > 0.0)
            {
                return Err(Error::Config(format!(
                    "`trainer.callbacks`, throughput_monitor: `{key}`: must be above 0, found {value:?}"
                )));
            }
        }
        let flops_per_item = self.flops_per_item.unwrap_or(0.0);
        Ok(Box::new(ThroughputMonitor {
            config: self.clone(),
            flops_per_item,
            started: Instant::now(),
            ends: VecDeque::new(),
        }))
    }
}

fulgurite_config::register_callback!(
    "throughput_monitor",
    ThroughputMonitorConfig,
    "Logs batches, items and floating-point operations a second",
    "{ type = \"throughput_monitor\", peak_tflops = 312.0 }"
);

struct ThroughputMonitor {
    config: ThroughputMonitorConfig,
    flops_per_item: f64,
    started: Instant,
    /// End times of the last steps, with their items and micro-batches.
    ends: VecDeque<(Instant, f64, f64)>,
}

impl Callback for ThroughputMonitor {}

impl Hooks for ThroughputMonitor {
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.config.flops_per_item.is_none() {
            self.flops_per_item = ctx.fabric().module_tree()?.flops_per_item();
        }
        self.started = Instant::now();
        self.ends = VecDeque::from([(self.started, 0.0, 0.0)]);
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let batches = (ctx.accumulate_grad_batches
            * ctx.fabric().data_context()?.data_parallel_size as u64) as f64;
        self.ends.push_back((Instant::now(), ctx.items, batches));
        if self.ends.len() > self.config.window_size.get() + 1 {
            self.ends.pop_front();
        }
        if !ctx.is_logged() {
            return Ok(());
        }
        let (first, last) = (self.ends[0].0, self.ends[self.ends.len() - 1].0);
        let secs = (last - first).as_secs_f64();
        if secs <= 0.0 {
            return Ok(());
        }
        let sum =
            |part: fn(&(Instant, f64, f64)) -> f64| self.ends.iter().skip(1).map(part).sum::<f64>();
        let (items, batches) = (sum(|end| end.1) / secs, sum(|end| end.2) / secs);
        let ranks = ctx.world_size as f64;
        let flops = items * self.flops_per_item;
        let mut rates = vec![
            ("batches_per_sec", batches),
            ("items_per_sec", items),
            ("flops_per_sec", flops),
            ("device/batches_per_sec", batches / ranks),
            ("device/items_per_sec", items / ranks),
            ("device/flops_per_sec", flops / ranks),
            ("time", self.started.elapsed().as_secs_f64()),
        ];
        if let Some(peak) = self.config.peak_tflops {
            rates.push(("device/mfu", flops / ranks / (peak * 1e12)));
        }
        // The counts already cover all ranks.
        let own = LogOptions::default().sync(false);
        rates.into_iter().for_each(|(name, rate)| ctx.log_with(name, rate, own));
        Ok(())
    }

    /// Excludes the validation's time from the rates.
    fn on_validation_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.ends = VecDeque::from([(Instant::now(), 0.0, 0.0)]);
        Ok(())
    }
}
