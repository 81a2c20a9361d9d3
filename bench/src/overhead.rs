//! The time that the framework adds to a step, and the time before the first step.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use fulgurite_core::collective::{Collective, ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::counted;
use fulgurite_core::fabric::Connection;
use fulgurite_core::run::RunConfig;
use serde::Serialize;
use serde_json::json;
use toml::Table;

use super::loops::{Job, Loop, Measured, alone};
use super::ranks::{at_least_one, median};
use super::startup::{Startup, start};
use super::tiny_models::TinyModel;
use super::train::now;
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench overhead`.
#[derive(Debug, Clone, Args)]
pub struct OverheadBench {
    /// Number of processes that `ddp` and `fsdp` are measured on; with one there is `single_device`
    /// alone
    #[arg(long, default_value_t = 2, value_parser = at_least_one)]
    ranks: usize,
    /// Models to train, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [TinyModel::Tiny, TinyModel::Small, TinyModel::One])]
    models: Vec<TinyModel>,
    /// Steps that are timed, each time
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before those
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    warmup: u64,
    /// How often the loops take turns
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    rounds: usize,
    /// Threads that make the trainer's batches, as `trainer.num_workers`
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or a step fails.
pub(crate) fn overhead(options: &OverheadBench) -> Result<()> {
    let entered = now();
    let strategy = if options.ranks == 1 { "single_device" } else { "fsdp" };
    let layers = ConfigLayers::new()
        .set(&format!("trainer.devices={}", options.ranks))?
        .set("trainer.accelerator=cpu")?
        .set(&format!("trainer.strategy={strategy}"))?;
    let run = RunConfig::<Table, Table>::from_layers(layers)?;
    run.check_plugins()?;
    let Connection { launched, world } = run.trainer.connect()?;
    let startup = start(&run.trainer, &world, launched.program_start, entered)?;

    let dir = std::env::temp_dir().join(format!("fulgurite-bench-{}", std::process::id()));
    let dir: PathBuf = broadcast_object(&*world, &dir, 0)?;
    let measured = measure(options, &world, &dir);
    // After a failure the other ranks run another collective, so skip the barrier.
    let met = measured.as_ref().map_or(Ok(()), |_| world.run(Collective::Barrier));
    let removed = match world.rank() {
        0 => std::fs::remove_dir_all(&dir).map_err(Error::io("removing", &dir)),
        _ => Ok(()),
    };
    let loops = measured?;
    met.and(removed)?;
    let report = Report {
        ranks: world.size(),
        threads: rayon::current_num_threads(),
        warmup: options.warmup,
        steps: options.steps,
        rounds: options.rounds,
        loops,
        startup,
    };
    if world.rank() == 0 { show(options, &report) } else { Ok(()) }
}

/// Measures all loops alternately. Collective.
fn measure(
    options: &OverheadBench,
    world: &Arc<dyn ProcessGroup>,
    dir: &std::path::Path,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &model in &options.models {
        let OverheadBench { warmup, steps, workers, .. } = *options;
        let job = |strategy| Job { model, strategy, warmup, steps, workers, dir };
        // On one rank, while the others wait.
        let loops = [Loop::Trainer, Loop::Fabric, Loop::Bare];
        let meet = || world.run(Collective::Barrier);
        if world.rank() == 0 {
            rows.extend(alternate(options.rounds, &job("single_device"), &loops, &alone(), meet)?);
        } else {
            (0..options.rounds * loops.len()).try_for_each(|_| meet())?;
        }
        meet()?;
        for strategy in ["ddp", "fsdp"] {
            if world.size() > 1 {
                let loops = &loops[..2];
                rows.extend(alternate(options.rounds, &job(strategy), loops, world, meet)?);
            }
        }
    }
    Ok(rows)
}

/// The times of one model under one strategy, with the loops in alternation. Collective over
/// `world`. Before each loop all ranks call `meet`, idle ones too, so that none waits longer than
/// one loop takes.
fn alternate(
    rounds: usize,
    job: &Job,
    loops: &[Loop],
    world: &Arc<dyn ProcessGroup>,
    meet: impl Fn() -> Result<()>,
) -> Result<Vec<Row>> {
    let mut steps = vec![Vec::new(); loops.len()];
    let mut means = vec![Vec::new(); loops.len()];
    let mut losses = vec![f64::NAN; loops.len()];
    for _ in 0..rounds {
        for (i, &by) in loops.iter().enumerate() {
            meet()?;
            let Measured { steps: secs, loss } = job.run(by, world)?;
            means[i].push(secs.iter().sum::<f64>() / secs.len() as f64);
            steps[i].extend(secs);
            losses[i] = loss;
        }
    }
    let shortest = |secs: &[f64]| secs.iter().copied().fold(f64::INFINITY, f64::min);
    let own: Vec<[f64; 3]> = std::iter::zip(&steps, &means)
        .map(|(steps, means)| [median(steps), shortest(steps), median(means)])
        .collect();
    let all = all_gather_object(&**world, &own)?;
    let slowest = |i: usize, which: usize| all.iter().map(|own| own[i][which]).fold(0.0, f64::max);
    let medians: Vec<f64> = (0..loops.len()).map(|i| slowest(i, 0)).collect();
    let against = |by: Loop, secs: f64| {
        loops.iter().position(|other| *other == by).map(|other| secs / medians[other])
    };
    let row = |(i, &by): (usize, &Loop)| Row {
        model: job.model.name(),
        strategy: job.strategy.to_owned(),
        ranks: world.size(),
        by: by.name(),
        step_us: medians[i] * 1e6,
        step_us_min: slowest(i, 1) * 1e6,
        mean_us: slowest(i, 2) * 1e6,
        of_fabric: against(Loop::Fabric, medians[i]),
        of_bare: against(Loop::Bare, medians[i]),
        loss: losses[i],
    };
    Ok(loops.iter().enumerate().map(row).collect())
}

/// The result.
#[derive(Serialize)]
struct Report {
    /// Processes that `ddp`, `fsdp` and the start-up were measured on.
    ranks: usize,
    /// Threads that a rank computes on.
    threads: usize,
    warmup: u64,
    /// Steps of each loop that were timed, in each round.
    steps: u64,
    rounds: usize,
    loops: Vec<Row>,
    startup: Startup,
}

/// Times of one loop on the slowest rank, over all rounds.
#[derive(Serialize)]
struct Row {
    /// `tiny`, `small` or `one`.
    model: &'static str,
    strategy: String,
    ranks: usize,
    /// `trainer`, `fabric` or `bare`.
    #[serde(rename = "loop")]
    by: &'static str,
    /// The median time of a step, from the end of the previous one to its own.
    step_us: f64,
    step_us_min: f64,
    /// The mean time of a step in the median round, including occasional work such as logging.
    mean_us: f64,
    /// The median relative to the loop with Fabric.
    of_fabric: Option<f64>,
    /// The median relative to the loop without a framework on one device.
    of_bare: Option<f64>,
    /// The loss of the last step, equal in all loops of a model and a strategy.
    loss: f64,
}

fn show(options: &OverheadBench, report: &Report) -> Result<()> {
    if options.json {
        let mut whole = json!({ "bench": "overhead" });
        let fields = serde_json::to_value(report).map_err(Error::other)?;
        if let (Some(whole), serde_json::Value::Object(fields)) = (whole.as_object_mut(), fields) {
            whole.extend(fields);
        }
        return print(&format!("{whole}\n"));
    }
    let mut text = format!(
        "median of {} steps, {} in turns; {} a rank\n\
         model  strategy       ranks  loop     us a step   (best)      mean        of fabric  of bare\n",
        report.steps,
        counted(report.rounds, "round"),
        counted(report.threads, "thread")
    );
    let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
    for row in &report.loops {
        let Row { model, strategy, ranks, by, step_us, step_us_min, mean_us, .. } = row;
        text += &format!(
            "{model:6} {strategy:14} {ranks:<6} {by:8} {step_us:<11.1} {:<11} {mean_us:<11.1} {:<10} {}\n",
            format!("({step_us_min:.1})"),
            ratio(row.of_fabric),
            ratio(row.of_bare)
        );
    }
    text += &report.startup.to_string();
    print(&text)
}
