//! Saving and loading, compared with raw writes, reads and copies of the same number of bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_core::autograd::storage;
use fulgurite_core::checkpoint::{AsyncSaver, FullOptions};
use fulgurite_core::collective::all_gather_object;
use fulgurite_core::optim::AdamW;
use rustix::fs::{Advice, fadvise};
use serde_json::json;

use super::memory::{reset_peak, resident};
use super::ranks::{StrategyRanks, Times, at_least_one};
use super::{Decoder, SizeOptions, Workload};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench checkpoint`.
#[derive(Debug, Clone, Args)]
pub struct CheckpointBench {
    #[command(flatten)]
    ranks: StrategyRanks,
    #[command(flatten)]
    size: SizeOptions,
    /// Where to write; a directory of its own is made there and removed again
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// How often to measure each
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    repeat: usize,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Bytes of one raw write or read call.
const CHUNK: usize = 16 << 20;

/// The limit that each time is compared with.
const LIMITS: [(&str, &str); 9] = [
    ("save", "raw_write"),
    ("load_warm", "raw_read_warm"),
    ("load_cold", "raw_read_cold"),
    ("async_block_first", "memcpy"),
    ("async_block_reserved", "memcpy"),
    ("async_block", "memcpy"),
    ("async_done", "raw_write"),
    ("full_save", "raw_write_by_one"),
    ("full_load_warm", "raw_read_warm"),
];

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or the directory cannot be written.
pub(crate) fn checkpoint(options: &CheckpointBench) -> Result<()> {
    let size = options.size.decoder(Workload::Ckpt)?;
    let mut fabric = options.ranks.launch(&[])?;
    let adamw = AdamW { lr: 3e-4, weight_decay: 0.1, ..AdamW::default() };
    let (_model, mut optimizer) = fabric.setup(|b| Decoder::new(b, &size), &adamw)?;
    // Nonzero moments, as after a step.
    for (i, state) in optimizer.state_tensors()?.into_iter().enumerate() {
        let values = (state.values.ones_like()? * (1e-3 * (i + 1) as f64))?;
        storage::copy_from(&state.values, &values)?;
    }
    let here = options.dir.join(format!("fulgurite-bench-{}", std::process::id()));
    let here = PathBuf::from(fabric.broadcast(&here.to_string_lossy().into_owned(), 0)?);
    if fabric.is_global_zero() {
        fs::create_dir_all(&here).map_err(Error::io("creating", &here))?;
    }
    fabric.barrier()?;
    let sizes = Sizes::of(&fabric)?;
    let mut meter = Meter { fabric: &fabric, times: Times::default(), increases: BTreeMap::new() };
    let measured = measure(&mut meter, options.repeat, &mut optimizer, &here, &sizes);
    // After a failure the other ranks run another collective, so skip the barrier.
    let met = measured.as_ref().map_or(Ok(()), |()| fabric.barrier());
    let removed = match fabric.is_global_zero() {
        true => fs::remove_dir_all(&here).map_err(Error::io("removing", &here)),
        false => Ok(()),
    };
    measured.and(met).and(removed)?;
    let increases = all_gather_object(&**fabric.world(), &meter.increases)?;
    if fabric.is_global_zero() {
        report(options, &sizes, &meter.times, &increases)?;
    }
    Ok(())
}

/// Sizes in bytes.
struct Sizes {
    /// Weights and AdamW's state of all ranks.
    state: usize,
    /// The share of each rank.
    share: usize,
    largest_tensor: usize,
}

impl Sizes {
    fn of(fabric: &Fabric) -> Result<Self> {
        let tree = fabric.module_tree()?;
        let counts = tree.parameters().iter().map(|p| p.global_shape().iter().product::<usize>());
        let state = 12 * tree.elem_count();
        let share = state / fabric.world_size();
        Ok(Self { state, share, largest_tensor: 4 * counts.max().unwrap_or(0) })
    }
}

/// The largest increase of a rank's memory during each operation, in bytes, by the operation's
/// name.
type MemoryIncreases = BTreeMap<String, u64>;

/// Measures times and memory.
struct Meter<'f> {
    fabric: &'f Fabric,
    times: Times,
    increases: MemoryIncreases,
}

impl Meter<'_> {
    /// Runs `f` on all ranks, and notes the time of the slowest and the increase of this rank's
    /// memory. Collective.
    fn measure<T>(&mut self, name: &'static str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let resting = resident()?.now;
        reset_peak()?;
        let result = self.times.measure(self.fabric, name, f)?;
        self.note_increase(name, resting)?;
        Ok(result)
    }

    fn note_increase(&mut self, name: &str, resting: u64) -> Result<()> {
        let rise = self.increases.entry(name.to_owned()).or_default();
        *rise = resident()?.peak.saturating_sub(resting).max(*rise);
        Ok(())
    }

    /// Runs `f` on rank 0, while the others wait.
    fn on_rank_zero(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let result = if self.fabric.is_global_zero() { f() } else { Ok(()) };
        self.fabric.barrier()?;
        result
    }

    /// Saves in the background; notes the time until control returns and until the checkpoint is
    /// committed.
    fn save_in_background(
        &mut self,
        saver: &mut AsyncSaver,
        optimizer: &mut FabricOptimizer,
        names: [&'static str; 2],
    ) -> Result<()> {
        self.fabric.barrier()?;
        let resting = resident()?.now;
        reset_peak()?;
        let started = Instant::now();
        let request = self.fabric.checkpoints().save_request(
            "saved",
            Some(optimizer),
            &(),
            serde_json::Value::Null,
        )?;
        saver.start(request)?;
        let blocked = started.elapsed().as_secs_f64();
        saver.wait()?;
        let done = started.elapsed().as_secs_f64();
        for (name, secs) in names.into_iter().zip([blocked, done]) {
            self.times.note(self.fabric, name, secs)?;
        }
        self.note_increase(names[0], resting)
    }
}

fn measure(
    meter: &mut Meter,
    repeat: usize,
    optimizer: &mut FabricOptimizer,
    here: &Path,
    sizes: &Sizes,
) -> Result<()> {
    let fabric = meter.fabric;
    let raw = here.join(format!("raw-{}", fabric.global_rank()));
    let saved = here.join("saved");
    let remove = || fs::remove_dir_all(&saved).map_err(Error::io("removing", &saved));
    // Bytes that differ from page to page.
    let noise =
        (0..sizes.share as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
    let (from, mut to) = (noise.collect::<Vec<_>>(), vec![2_u8; sizes.share]);
    let io = Arc::new(LocalDirectory::new(here));
    let new_saver = || AsyncSaver::new(io.clone(), &**fabric.world());
    for _ in 0..repeat {
        let mut reserved = new_saver()?;
        let nothing = serde_json::Value::Null;
        reserved.reserve(&fabric.checkpoints().save_request(
            "saved",
            Some(optimizer),
            &(),
            nothing,
        )?)?;
        // Once before measuring: the first use of cache pages takes longer.
        raw_write(&raw, &from)?;

        meter.measure("raw_write", || raw_write(&raw, &from))?;
        meter.measure("raw_read_warm", || raw_read(&raw, &mut to))?;
        drop_from_cache(&raw)?;
        meter.measure("raw_read_cold", || raw_read(&raw, &mut to))?;
        fs::remove_file(&raw).map_err(Error::io("removing", &raw))?;

        meter.measure("save", || fabric.save(&saved, optimizer, &()))?;
        meter.measure("load_warm", || fabric.load::<()>(&saved, Some(optimizer)))?;
        meter.on_rank_zero(|| drop_from_cache(&saved))?;
        meter.measure("load_cold", || fabric.load::<()>(&saved, Some(optimizer)))?;
        meter.on_rank_zero(remove)?;

        meter.measure("memcpy", || {
            to.copy_from_slice(&from);
            std::hint::black_box(&to);
            Ok(())
        })?;
        meter.save_in_background(
            &mut reserved,
            optimizer,
            ["async_block_reserved", "async_done"],
        )?;
        drop(reserved);
        meter.on_rank_zero(remove)?;
        let mut saver = new_saver()?;
        for name in ["async_block_first", "async_block"] {
            meter.save_in_background(&mut saver, optimizer, [name, "async_done"])?;
            meter.on_rank_zero(remove)?;
        }
        drop(saver);

        meter.measure("raw_write_by_one", || {
            let parts = if fabric.is_global_zero() { fabric.world_size() } else { 0 };
            raw_write_times(&raw, &from, parts)
        })?;
        meter.on_rank_zero(|| fs::remove_file(&raw).map_err(Error::io("removing", &raw)))?;
        let full = FullOptions::default();
        meter.measure("full_save", || fabric.save_full(&saved, Some(optimizer), &(), &full))?;
        meter.measure("full_load_warm", || fabric.load::<()>(&saved, Some(optimizer)))?;
        meter.on_rank_zero(remove)?;
    }
    Ok(())
}

/// Writes bytes to a file and makes them durable.
fn raw_write(path: &Path, bytes: &[u8]) -> Result<()> {
    raw_write_times(path, bytes, 1)
}

/// Writes the bytes `times` times to one file and makes it durable; no file if `times` is 0.
fn raw_write_times(path: &Path, bytes: &[u8], times: usize) -> Result<()> {
    let failed = || Error::io("writing", path);
    if times == 0 {
        return Ok(());
    }
    let mut file = File::create(path).map_err(failed())?;
    for chunk in std::iter::repeat_n(bytes, times).flat_map(|bytes| bytes.chunks(CHUNK)) {
        file.write_all(chunk).map_err(failed())?;
    }
    file.sync_all().map_err(failed())
}

/// Fills memory from a file.
fn raw_read(path: &Path, bytes: &mut [u8]) -> Result<()> {
    let failed = || Error::io("reading", path);
    let mut file = File::open(path).map_err(failed())?;
    bytes.chunks_mut(CHUNK).try_for_each(|chunk| file.read_exact(chunk)).map_err(failed())
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

fn report(
    options: &CheckpointBench,
    sizes: &Sizes,
    times: &Times,
    increases: &[MemoryIncreases],
) -> Result<()> {
    let medians = times.medians();
    let gib = sizes.state as f64 / f64::from(1 << 30);
    let mib = |bytes: u64| (bytes as f64 / f64::from(1 << 20) * 10.0).round() / 10.0;
    let secs = |name: &str| medians.iter().find(|(n, _)| *n == name).map(|(_, secs)| *secs);
    let limit = |name: &str| LIMITS.iter().find(|(n, _)| *n == name).map(|(_, limit)| *limit);
    let ratio = |name: &str, own: f64| limit(name).and_then(secs).map(|limit| limit / own);
    let increases = |name: &str| {
        increases
            .iter()
            .filter_map(|increases| increases.get(name))
            .map(|b| mib(*b))
            .collect::<Vec<_>>()
    };
    if options.json {
        let rows: Vec<_> = medians
            .iter()
            .map(|(name, secs)| {
                json!({
                    "what": name, "secs": secs, "secs_min": times.shortest(name), "gib_per_s": gib / secs, "limit": limit(name),
                    "of_limit": ratio(name, *secs), "rise_mib": increases(name),
                })
            })
            .collect();
        let whole = json!({
            "bench": "checkpoint", "state_gib": gib, "repeat": options.repeat,
            "share_mib": mib(sizes.share as u64), "times": rows,
            "largest_tensor_mib": mib(sizes.largest_tensor as u64),
        });
        return print(&format!("{whole}\n"));
    }
    let mut text = format!(
        "{gib:.2} GiB of weights and AdamW state; a rank's share is {} MiB, the largest tensor {}\n",
        mib(sizes.share as u64),
        mib(sizes.largest_tensor as u64)
    );
    for (name, secs) in &medians {
        let compared = limit(name).zip(ratio(name, *secs));
        let compared = compared.map(|(limit, ratio)| format!("{ratio:.2} of {limit}"));
        text += &format!(
            "{name:20} {secs:8.3} s (at best {:.3})  {:6.2} GiB/s  {:24} rise of memory {:?} MiB\n",
            times.shortest(name).unwrap_or(*secs),
            gib / secs,
            compared.unwrap_or_default(),
            increases(name)
        );
    }
    print(&text)
}
