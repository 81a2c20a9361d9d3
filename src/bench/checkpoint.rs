//! Saving and loading, against raw writes and reads of the same bytes.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use fulgurite_core::autograd::storage;
use fulgurite_core::optim::AdamW;
use rustix::fs::{Advice, fadvise};
use serde_json::json;

use super::ranks::{Ranks, Times};
use super::{Decoder, SizeOptions, Workload};
use crate::cli::print;
use crate::prelude::*;

/// The options of `fulgurite bench checkpoint`.
#[derive(Debug, Clone, Args)]
pub struct CheckpointBench {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    size: SizeOptions,
    /// Where to write; a directory of its own is made there and removed again
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// How often to measure each
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

const CHUNK: usize = 16 << 20;

/// Measures. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or the directory cannot be written.
pub fn checkpoint(options: &CheckpointBench) -> Result<()> {
    let size = options.size.decoder(Workload::Ckpt)?;
    let mut fabric = options.ranks.launch()?;
    let adamw = AdamW { lr: 3e-4, weight_decay: 0.1, ..AdamW::default() };
    let (_model, mut optimizer) = fabric.setup(|b| Decoder::new(b, &size), &adamw)?;
    // Moments that are not zero, as after a step.
    for (i, state) in optimizer.state_tensors()?.into_iter().enumerate() {
        let values = (state.values.ones_like()? * (1e-3 * (i + 1) as f64))?;
        storage::copy_from(&state.values, &values)?;
    }
    let elements = fabric.module_tree()?.elem_count();
    let total = 12 * elements;
    let share = total / fabric.world_size();
    let here = options.dir.join(format!("fulgurite-bench-{}", std::process::id()));
    let here = PathBuf::from(fabric.strategy().broadcast(&here.to_string_lossy(), 0)?);
    if fabric.is_global_zero() {
        fs::create_dir_all(&here).map_err(Error::io("creating", &here))?;
    }
    fabric.barrier()?;
    let measured = measure(options, &fabric, &mut optimizer, &here, share);
    fabric.barrier()?;
    if fabric.is_global_zero() {
        fs::remove_dir_all(&here).map_err(Error::io("removing", &here))?;
    }
    let times = measured?;
    if fabric.is_global_zero() {
        let gib = total as f64 / f64::from(1 << 30);
        report(options, &times, gib)?;
    }
    Ok(())
}

fn measure(
    options: &CheckpointBench,
    fabric: &Fabric,
    optimizer: &mut FabricOptimizer,
    here: &Path,
    share: usize,
) -> Result<Times> {
    let mut times = Times::default();
    let raw = here.join(format!("raw-{}", fabric.global_rank()));
    let saved = here.join("saved");
    for _ in 0..options.repeat {
        times.measure(fabric, "raw_write", || raw_write(&raw, share))?;
        times.measure(fabric, "raw_read_warm", || raw_read(&raw))?;
        drop_from_cache(&raw)?;
        times.measure(fabric, "raw_read_cold", || raw_read(&raw))?;
        fs::remove_file(&raw).map_err(Error::io("removing", &raw))?;

        times.measure(fabric, "save", || fabric.save(&saved, optimizer, &()))?;
        times.measure(fabric, "load_warm", || fabric.load::<()>(&saved, Some(optimizer)))?;
        if fabric.is_global_zero() {
            drop_from_cache(&saved)?;
        }
        times.measure(fabric, "load_cold", || fabric.load::<()>(&saved, Some(optimizer)))?;
        fabric.barrier()?;
        if fabric.is_global_zero() {
            fs::remove_dir_all(&saved).map_err(Error::io("removing", &saved))?;
        }
        fabric.barrier()?;
    }
    Ok(times)
}

/// Writes so many bytes and makes them durable.
fn raw_write(path: &Path, bytes: usize) -> Result<()> {
    let failed = || Error::io("writing", path);
    // No two pages alike.
    let noise: Vec<u8> =
        (0..CHUNK as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    let mut file = File::create(path).map_err(failed())?;
    let mut left = bytes;
    while left > 0 {
        let n = left.min(CHUNK);
        file.write_all(&noise[..n]).map_err(failed())?;
        left -= n;
    }
    file.sync_all().map_err(failed())
}

fn raw_read(path: &Path) -> Result<()> {
    let failed = || Error::io("reading", path);
    let mut file = File::open(path).map_err(failed())?;
    let mut buffer = vec![0; CHUNK];
    while file.read(&mut buffer).map_err(failed())? > 0 {}
    Ok(())
}

/// Drops a file, or all files under a directory, from the page cache.
fn drop_from_cache(path: &Path) -> Result<()> {
    let failed = || Error::io("reading", path);
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(failed())? {
            drop_from_cache(&entry.map_err(failed())?.path())?;
        }
        return Ok(());
    }
    let file = File::open(path).map_err(failed())?;
    file.sync_all().map_err(failed())?;
    fadvise(&file, 0, None, Advice::DontNeed).map_err(|e| Error::io("reading", path)(e.into()))
}

/// What each time is compared with.
fn limit(name: &str) -> Option<&'static str> {
    Some(match name {
        "save" => "raw_write",
        "load_warm" => "raw_read_warm",
        "load_cold" => "raw_read_cold",
        _ => return None,
    })
}

fn report(options: &CheckpointBench, times: &Times, gib: f64) -> Result<()> {
    let medians = times.medians();
    let secs = |name: &str| medians.iter().find(|(n, _)| *n == name).map(|(_, secs)| *secs);
    let ratio = |name: &str, own: f64| limit(name).and_then(secs).map(|raw| raw / own);
    if options.json {
        let rows: Vec<_> = medians
            .iter()
            .map(|(name, secs)| {
                json!({
                    "what": name, "secs": secs, "gib_per_s": gib / secs,
                    "of_raw": ratio(name, *secs),
                })
            })
            .collect();
        let whole = json!({ "bench": "checkpoint", "state_gib": gib, "repeat": options.repeat,
            "times": rows });
        return print(&format!("{whole}\n"));
    }
    let mut text = format!("{gib:.2} GiB of weights and AdamW state\n");
    for (name, secs) in &medians {
        let ratio = ratio(name, *secs).map(|r| format!("  {r:.2} of raw")).unwrap_or_default();
        text += &format!("{name:15} {secs:8.3} s  {:6.2} GiB/s{ratio}\n", gib / secs);
    }
    print(&text)
}
