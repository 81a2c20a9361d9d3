//! Memory and processor time of the ranks.

use std::time::Instant;

use fulgurite_error::Result;
use fulgurite_trainer::trainer::{
    Callback, CallbackConfig, HookContext, Hooks, LogOptions, Reduce, peak_rss_mib,
};
use serde::{Deserialize, Serialize};

/// Logs the ranks' memory and processor time: `{ type = "device_stats_monitor" }`. `cpu/rss_mib`
/// (current memory) and `cpu/peak_rss_mib` are the maximum over the ranks. `cpu/percent` is the sum
/// over the ranks of the processor time since the last logged step, where 100 is one core. Like
/// Lightning's `DeviceStatsMonitor`.
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceStatsMonitorConfig {}

#[typetag::serde(name = "device_stats_monitor")]
impl CallbackConfig for DeviceStatsMonitorConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        Ok(Box::new(DeviceStatsMonitor { before: None }))
    }
}

fulgurite_config::register_callback!(
    "device_stats_monitor",
    DeviceStatsMonitorConfig,
    "Logs memory and processor time of the ranks",
    "\"device_stats_monitor\""
);

struct DeviceStatsMonitor {
    /// Time and processor seconds at the last logged step.
    before: Option<(Instant, f64)>,
}

impl Callback for DeviceStatsMonitor {}

impl Hooks for DeviceStatsMonitor {
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if !ctx.is_logged() {
            return Ok(());
        }
        let (now, cpu_secs) = (Instant::now(), cpu_secs().unwrap_or(f64::NAN));
        let percent = self.before.map_or(f64::NAN, |(then, before)| {
            100.0 * (cpu_secs - before) / (now - then).as_secs_f64()
        });
        let is_first = self.before.replace((now, cpu_secs)).is_none();
        let largest = LogOptions::default().reduce(Reduce::Max);
        ctx.log_with("cpu/rss_mib", rss_mib().unwrap_or(f64::NAN), largest);
        ctx.log_with("cpu/peak_rss_mib", peak_rss_mib().unwrap_or(f64::NAN), largest);
        if !is_first {
            ctx.log_with("cpu/percent", percent, LogOptions::default().reduce(Reduce::Sum));
        }
        Ok(())
    }
}

/// The process's resident memory in MiB.
fn rss_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}

/// The process's processor time in seconds. The kernel reports hundredths.
fn cpu_secs() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may contain spaces.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_takes_memory_and_time() {
        assert!(rss_mib().unwrap() > 1.0);
        assert!(rss_mib().unwrap() <= peak_rss_mib().unwrap() + 1.0);
        let before = cpu_secs().unwrap();
        let mut sum = 0_u64;
        while cpu_secs().unwrap() - before < 0.03 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
    }
}
