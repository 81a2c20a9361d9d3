//! The share of a step's communication that computing hides: the step, the same step without
//! communication, and only its communication, measured alternately.

use std::sync::Arc;

use clap::Args;
use fulgurite_core::collective::{Collective, ProcessGroup};
use fulgurite_core::execution::transfer;
use fulgurite_core::fabric::Connection;
use fulgurite_core::mesh::DATA_PARALLEL;
use serde::Serialize;
use serde_json::json;

use super::ranks::{StrategyRanks, Times, at_least_one, median};
use super::switch::{Control, Mode, Note};
use super::train::tokens;
use super::{Decoder, DecoderSize, SizeOptions, Workload};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench overlap`.
#[derive(Debug, Clone, Args)]
pub struct OverlapBench {
    #[command(flatten)]
    ranks: StrategyRanks,
    /// The process group: a name such as `tcp`, or a TOML table
    #[arg(long, default_value = "auto")]
    process_group: String,
    #[command(flatten)]
    size: SizeOptions,
    /// Tokens a sequence: the fewer, the more of a step is communication
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    seq: usize,
    /// Sequences a step, on each data-parallel rank
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    batch: usize,
    /// How often each of the three is timed
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Untimed rounds before the timed ones
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    warmup: u64,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or a step fails.
pub(crate) fn overlap(options: &OverlapBench) -> Result<()> {
    let size = options.size.decoder(Workload::M30)?;
    let process_group = format!("trainer.process_group={}", options.process_group);
    let run = options.ranks.config(&[process_group])?;
    run.check_plugins()?;
    // Held until the end.
    let Connection { launched: _launched, world } = run.trainer.connect()?;
    let control = Control::default();
    control.set(Mode::Run);
    let world = control.watch(world);
    let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
    let (model, mut optimizer) =
        fabric.setup(|b| Decoder::new(b, &size), &AdamW { lr: 3e-4, ..AdamW::default() })?;
    if fabric.context_parallel().is_some() {
        return Err(Error::Config(
            "bench overlap gives every rank whole sequences; leave out context parallelism".into(),
        ));
    }
    let part = fabric.device_mesh().group(DATA_PARALLEL)?.rank() as u64;
    let (ids, targets) = tokens(size.vocab, [options.batch, options.seq], part)?;
    let device = fabric.device();
    let ids = transfer::to_device(&ids, device, "batch")?;
    let targets = transfer::to_device(&targets, device, "batch")?;
    let step = |i: u64| -> Result<()> {
        let _scope = fabric.forward_scope(true, i, 0);
        fabric.backward(&model.loss(&ids, &targets)?)?;
        fabric.step_totals(&[]).map(drop)
    };

    let mut times = Times::default();
    let mut communication: Option<Communication> = None;
    for i in 0..options.warmup + options.steps {
        if i == options.warmup {
            times = Times::default();
        }
        times.measure(&fabric, "step", || {
            control.set(Mode::Note);
            let stepped = step(i);
            control.set(Mode::Run);
            stepped
        })?;
        let noted = control.take_notes();
        optimizer.step()?;
        times.measure(&fabric, "compute", || {
            control.set(Mode::LeaveOut);
            let stepped = step(i);
            control.set(Mode::Run);
            stepped
        })?;
        // Discards gradients of the local step: they are this rank's only, or leftovers.
        optimizer.zero_grad()?;
        let communication = match &mut communication {
            Some(communication) if communication.is_like(&noted) => communication,
            // The first step may gather tensors that later steps keep.
            other if i < options.warmup => other.insert(Communication::of(&noted)?),
            _ => return Err(Error::other("steps differ in what they communicate")),
        };
        times.measure(&fabric, "communication", || communication.run())?;
    }
    let Some(communication) = communication.filter(|_| fabric.is_global_zero()) else {
        return Ok(());
    };
    let [step_s, compute_s, communication_s] =
        ["step", "compute", "communication"].map(|name| median(times.get(name)));
    let hidden = (compute_s + communication_s - step_s) / communication_s;
    report(
        options,
        &Report {
            strategy: &options.ranks.strategy,
            transport: fabric.world().transport(),
            ranks: fabric.world_size(),
            threads: rayon::current_num_threads(),
            size,
            seq: options.seq,
            batch: options.batch,
            parameters: fabric.module_tree()?.elem_count(),
            steps: options.steps,
            collectives: communication.calls.len(),
            collective_bytes: communication.bytes,
            step_s,
            compute_s,
            communication_s,
            hidden: (!communication.calls.is_empty()).then_some(hidden),
        },
    )
}

/// The collectives of a step, with separate tensors.
struct Communication {
    calls: Vec<(Arc<dyn ProcessGroup>, Collective)>,
    bytes: usize,
}

impl Communication {
    fn of(notes: &[Note]) -> Result<Self> {
        let calls = notes.iter().map(Note::again).collect::<Result<_>>()?;
        Ok(Self { calls, bytes: bytes(notes) })
    }

    /// Whether the notes have the same number of collectives and bytes.
    fn is_like(&self, notes: &[Note]) -> bool {
        self.calls.len() == notes.len() && self.bytes == bytes(notes)
    }

    /// Runs the collectives one after the other. Collective.
    fn run(&self) -> Result<()> {
        self.calls.iter().try_for_each(|(group, collective)| group.run(collective.clone()))
    }
}

fn bytes(notes: &[Note]) -> usize {
    notes.iter().map(|note| note.bytes).sum()
}

/// The result. Times are medians of the slowest rank, in seconds.
#[derive(Serialize)]
struct Report<'a> {
    strategy: &'a str,
    transport: String,
    ranks: usize,
    /// Threads that a rank computes on.
    threads: usize,
    #[serde(flatten)]
    size: DecoderSize,
    seq: usize,
    batch: usize,
    parameters: usize,
    steps: u64,
    /// Collectives of a step, and the bytes of their whole tensors.
    collectives: usize,
    collective_bytes: usize,
    /// Forward, backward and the step's totals, without the optimizer.
    step_s: f64,
    /// The same step without communication.
    compute_s: f64,
    /// The step's collectives one after the other, without computing.
    communication_s: f64,
    /// The hidden share of `communication_s`: 1 if communication costs nothing, 0 if nothing
    /// overlaps, less if they slow each other down. `None` without communication.
    hidden: Option<f64>,
}

fn report(options: &OverlapBench, report: &Report) -> Result<()> {
    if options.json {
        let mut whole = json!({ "bench": "overlap" });
        let fields = serde_json::to_value(report).map_err(Error::other)?;
        if let (Some(whole), serde_json::Value::Object(fields)) = (whole.as_object_mut(), fields) {
            whole.extend(fields);
        }
        return print(&format!("{whole}\n"));
    }
    let Report { step_s, compute_s, communication_s, .. } = report;
    let mut text = format!(
        "{:.2} M parameters, {} on {} ranks over {}, {} threads a rank\n         step                {:.1} ms  (forward and backward)\n         compute alone       {:.1} ms\n         communication alone {:.1} ms  ({} collectives, {:.1} MiB)\n",
        report.parameters as f64 / 1e6,
        report.strategy,
        report.ranks,
        report.transport,
        report.threads,
        step_s * 1e3,
        compute_s * 1e3,
        communication_s * 1e3,
        report.collectives,
        report.collective_bytes as f64 / f64::from(1 << 20),
    );
    if let Some(hidden) = report.hidden {
        text += &format!("hidden              {:.0} % of the communication\n", hidden * 100.0);
    }
    print(&text)
}
