//! Tables of hardware, from which a plan computes times.

use std::path::Path;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The speeds of a host and its devices: a TOML file for `fulgurite plan --hardware`.
///
/// ```
/// use fulgurite_core::run_plan::Hardware;
///
/// let text = r#"
/// name = "an accelerator of a data sheet"
/// flops = { f32 = 67e12, bf16 = 989e12 }
/// memory_bytes_per_s = 3.35e12
/// within_hosts = { latency_s = 5e-6, bytes_per_s = 450e9 }
/// between_hosts = { latency_s = 15e-6, bytes_per_s = 50e9 }
/// "#;
/// let hardware = Hardware::parse(text, "h.toml")?;
/// assert_eq!(hardware.devices_per_host, 1);
/// assert!(Hardware::parse("name = \"x\"", "x.toml").is_err());
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// A name for reports.
    pub name: String,
    /// Whether the numbers were measured by `fulgurite bench hardware`, and not taken from a sheet.
    #[serde(default)]
    pub measured: bool,
    /// Devices of a host. Ranks beyond them share the devices evenly.
    #[serde(default = "one")]
    pub devices_per_host: usize,
    /// Floating-point operations a second of a device's large matrix products.
    pub flops: Flops,
    /// The part of `flops` that products reach, from a sheet's number to practice.
    #[serde(default = "whole")]
    pub flops_reached: f64,
    /// The multiplications of a product that reaches half of it.
    #[serde(default)]
    pub half_speed_multiplications: f64,
    /// Bytes a second that a device reads and writes in passes over its memory.
    pub memory_bytes_per_s: f64,
    /// Seconds that a product or a pass takes besides.
    #[serde(default)]
    pub launch_s: f64,
    /// Memory of a device, in bytes.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// A host's own memory. Left out for devices that compute in it, such as its cores.
    #[serde(default)]
    pub host: Option<Host>,
    /// The connection of ranks of one host.
    pub within_hosts: Link,
    /// The connection of ranks of several hosts.
    pub between_hosts: Link,
    /// Bytes a second that all ranks together write to the place of checkpoints.
    #[serde(default)]
    pub storage_bytes_per_s: Option<f64>,
    /// The price of a device for an hour.
    #[serde(default)]
    pub price_per_device_hour: Option<f64>,
    /// Failures of a device in an hour, each of which ends the run.
    #[serde(default)]
    pub failures_per_device_hour: Option<f64>,
    /// Seconds from a failure until a job that was started again loads its checkpoint: 300 by
    /// default.
    #[serde(default)]
    pub restart_s: Option<f64>,
    /// Seconds from a failure until the ranks that are left load a state, with `trainer.elastic`:
    /// by default 40, of which agents take 30 to notice that a host is lost.
    #[serde(default)]
    pub going_on_s: Option<f64>,
}

/// Operations a second, by dtype.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flops {
    /// In f32; f64 counts as twice the work.
    pub f32: f64,
    /// In bf16 and f16; as f32 by default.
    #[serde(default)]
    pub bf16: Option<f64>,
}

/// A connection between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds of one exchange of nothing.
    pub latency_s: f64,
    /// Bytes a second in each direction, of one rank.
    pub bytes_per_s: f64,
}

/// The memory of a host beside its devices', where `cpu_offload` and offloaded activations are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Bytes of it, which the host's devices share.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Bytes a second that the host's cores read and write in passes over it, all together.
    pub memory_bytes_per_s: f64,
    /// The connection of one device to it.
    pub link: Link,
}

fn one() -> usize {
    1
}

fn whole() -> f64 {
    1.0
}

impl Hardware {
    /// Reads a table. `name` is the file's, for messages.
    ///
    /// # Errors
    /// If a key is missing or unknown, or a speed is not positive.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        let wrong = |error: &dyn std::fmt::Display| Error::Config(format!("{name}: {error}"));
        let hardware: Self = toml::from_str(text).map_err(|error| wrong(&error))?;
        let speeds = [
            ("flops.f32", hardware.flops.f32),
            ("flops.bf16", hardware.flops.bf16.unwrap_or(1.0)),
            ("flops_reached", hardware.flops_reached),
            ("memory_bytes_per_s", hardware.memory_bytes_per_s),
            ("within_hosts.bytes_per_s", hardware.within_hosts.bytes_per_s),
            ("between_hosts.bytes_per_s", hardware.between_hosts.bytes_per_s),
            ("storage_bytes_per_s", hardware.storage_bytes_per_s.unwrap_or(1.0)),
            ("devices_per_host", hardware.devices_per_host as f64),
            ("host.memory_bytes_per_s", hardware.host.map_or(1.0, |host| host.memory_bytes_per_s)),
            ("host.link.bytes_per_s", hardware.host.map_or(1.0, |host| host.link.bytes_per_s)),
        ];
        if let Some((key, value)) = speeds.iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return Err(wrong(&format!("`{key}` must be above 0, found {value}")));
        }
        let times = [
            ("launch_s", hardware.launch_s),
            ("half_speed_multiplications", hardware.half_speed_multiplications),
            ("within_hosts.latency_s", hardware.within_hosts.latency_s),
            ("between_hosts.latency_s", hardware.between_hosts.latency_s),
            ("host.link.latency_s", hardware.host.map_or(0.0, |host| host.link.latency_s)),
            ("price_per_device_hour", hardware.price_per_device_hour.unwrap_or(0.0)),
            ("failures_per_device_hour", hardware.failures_per_device_hour.unwrap_or(0.0)),
            ("restart_s", hardware.restart_s.unwrap_or(0.0)),
            ("going_on_s", hardware.going_on_s.unwrap_or(0.0)),
        ];
        match times.iter().find(|(_, v)| !(v.is_finite() && *v >= 0.0)) {
            Some((key, value)) => Err(wrong(&format!("`{key}` must be at least 0, found {value}"))),
            None => Ok(hardware),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), and if the file cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(Error::io("reading the table of hardware", path))?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Operations a second of a device's products in a dtype.
    pub(super) fn flops(&self, dtype: DType) -> f64 {
        let peak = match dtype {
            DType::BF16 | DType::F16 => self.flops.bf16.unwrap_or(self.flops.f32),
            DType::F64 => self.flops.f32 / 2.0,
            _ => self.flops.f32,
        };
        peak * self.flops_reached
    }
}
