//! The speeds of this host, as a table for `fulgurite plan --hardware`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use fulgurite_core::collective::{AllGather, Collective, ReduceOp};
use fulgurite_core::execution::read;
use fulgurite_core::launch::HostMemory;
use fulgurite_core::nn::functional::{rms_norm, swiglu};
use fulgurite_core::nn::gemm::{Mat, Threads, gemm, gemm_bf16};
use fulgurite_core::run_plan::{Flops, Hardware, Link};
use half::bf16;

use super::ranks::{Ranks, at_least_one, median};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench hardware`.
#[derive(Debug, Clone, Args)]
pub struct HardwareBench {
    #[command(flatten)]
    ranks: Ranks,
    /// Where to write the table; by default standard output
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The table's name
    #[arg(long, default_value = "this host")]
    name: String,
    /// How often to measure each; the median counts
    #[arg(long, default_value_t = 7, value_parser = at_least_one)]
    repeat: usize,
}

/// Rows, inner dimension and columns of a large product, and of a small one.
const LARGE: usize = 1024;
const SMALL: usize = 64;
/// Elements of a pass, more than caches hold.
const PASS: usize = 4 << 20;
const WIDTH: usize = 512;
/// Bytes that a norm and SwiGLU read and write for an element.
const PASS_BYTES: f64 = 20.0;
/// Bytes of a small and of a large collective.
const FEW: usize = 1 << 10;
const MANY: usize = 32 << 20;

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// All ranks compute at once, and their speeds are added: a host is one device, which its ranks
/// share.
///
/// # Errors
/// If ranks cannot be started, or the file cannot be written.
pub(crate) fn run(options: &HardwareBench) -> Result<()> {
    let fabric = options.ranks.launch("ddp", &[])?;
    let of = |f: &mut dyn FnMut() -> Result<()>| time(&fabric, options.repeat, f);
    let mut out = vec![0f32; LARGE * LARGE];
    let wide = vec![0.01f32; LARGE * LARGE];
    let half = vec![bf16::from_f32(0.01); LARGE * LARGE];
    let square = |n: usize| (Mat::new(&wide[..n * n], n, n), Mat::new(&wide[..n * n], n, n).t());
    let mut product = |n: usize| {
        let (a, b) = square(n);
        of(&mut || {
            gemm(&mut out, a, b, false, Threads::All);
            Ok(())
        })
    };
    let (large_s, small_s) = (product(LARGE)?, product(SMALL)?);
    let (a, b) = (Mat::new(&half, LARGE, LARGE), Mat::new(&half, LARGE, LARGE).t());
    let half_s = of(&mut || {
        gemm_bf16(&mut out, a, b, false, Threads::All);
        Ok(())
    })?;
    // The passes of a decoder: a norm and an activation.
    let passes = |rows: usize, width: usize| -> Result<f64> {
        let full = |value: f32| Tensor::full(value, (rows, width), &Device::Cpu);
        let (x, y, weight) =
            (full(0.5)?, full(0.25)?, Tensor::ones(width, DType::F32, &Device::Cpu)?);
        of(&mut || {
            rms_norm(&x, &weight, 1e-5)?;
            swiglu(&x, &y).map(drop)
        })
    };
    let (pass_s, launch_s) = (passes(PASS / WIDTH, WIDTH)?, passes(1, 8)? / 2.0);
    let ranks = fabric.world_size();
    let gather = |bytes: usize| -> Result<f64> {
        let part = bytes / 4 / ranks;
        let own = fabric.world().empty(part, DType::F32, fabric.device())?;
        let whole = fabric.world().empty(part * ranks, DType::F32, fabric.device())?;
        let part = AllGather::even(&whole, &own, ranks);
        of(&mut || fabric.world().run(Collective::all_gather_into(vec![part.clone()])))
    };
    let within = match ranks {
        1 => Link { latency_s: 1e-6, bytes_per_s: 1e9 },
        _ => {
            let (few_s, many_s) = (gather(FEW)?, gather(MANY)?);
            let moved = (MANY - MANY / ranks) as f64;
            Link { latency_s: few_s, bytes_per_s: moved / (many_s - few_s).max(1e-9) }
        }
    };
    if !fabric.is_global_zero() {
        return Ok(());
    }
    let all = ranks as f64;
    let [large, small] = [LARGE, SMALL].map(|n| (n as f64).powi(3));
    let hardware = Hardware {
        name: options.name.clone(),
        measured: true,
        devices_per_host: 1,
        flops: Flops { f32: all * 2.0 * large / large_s, bf16: Some(all * 2.0 * large / half_s) },
        flops_reached: 1.0,
        // A product takes as long as its multiplications and these at full speed.
        half_speed_multiplications: (small_s * large / large_s - small).max(0.0),
        memory_bytes_per_s: all * PASS_BYTES * PASS as f64 / pass_s,
        launch_s,
        memory_bytes: HostMemory::now().map(|memory| memory.total),
        host: None,
        within_hosts: within,
        // One host is measured: give the network's own numbers.
        between_hosts: within,
        storage_bytes_per_s: None,
        price_per_device_hour: None,
        failures_per_device_hour: None,
        restart_s: None,
        going_on_s: None,
    };
    let text = toml::to_string(&hardware).map_err(Error::other)?;
    let text = format!(
        "# Measured by `fulgurite bench hardware` with {ranks} ranks on one host, which is one device.\n\
         # `between_hosts` repeats `within_hosts`: no network was measured.\n{text}"
    );
    match &options.file {
        Some(path) => {
            std::fs::write(path, text).map_err(Error::io("writing the table of hardware", path))
        }
        None => print(&text),
    }
}

/// The median time of a call on the slowest rank, with all ranks at work. Collective.
fn time(fabric: &Fabric, repeat: usize, f: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let started = Instant::now();
    f()?;
    // As many calls on every rank, for about 20 ms.
    let once = slowest(fabric, started.elapsed().as_secs_f64())?;
    let calls = (0.02 / once.max(1e-7)).clamp(1.0, 1e4) as u32;
    let mut times = Vec::with_capacity(repeat);
    for _ in 0..repeat {
        fabric.barrier()?;
        let started = Instant::now();
        for _ in 0..calls {
            f()?;
        }
        let secs = started.elapsed().as_secs_f64() / f64::from(calls);
        times.push(slowest(fabric, secs)?);
    }
    Ok(median(&times))
}

fn slowest(fabric: &Fabric, secs: f64) -> Result<f64> {
    let slowest = Tensor::new(&[secs], &Device::Cpu)?;
    fabric.all_reduce(&slowest, ReduceOp::Max)?;
    Ok(read::host::<f64>(&slowest)?[0])
}
