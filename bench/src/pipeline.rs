//! Pipelines of each schedule, against the schedule's simulation with the times that were measured.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::Args;
use fulgurite::cli::print;
use fulgurite::prelude::*;
use fulgurite_core::collective::{Collective, ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_core::fabric::Connection;
use fulgurite_core::memory;
use fulgurite_core::run::RunConfig;
use fulgurite_strategies::schedule::pipeline::{Costs, Kind, Schedule, Type};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ranks::{Ranks, at_least_one, median};
use super::train::tokens;
use super::{Decoder, DecoderSize, SizeOptions, Workload};

/// The options of `fulgurite bench pipeline`.
#[derive(Debug, Clone, Args)]
pub struct PipelineBench {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    size: SizeOptions,
    /// The schedules, separated by commas
    #[arg(long, value_delimiter = ',', value_parser = Type::ALL.map(Type::name), default_values_t = Type::ALL.map(|kind| kind.name().to_owned()))]
    schedules: Vec<String>,
    /// Micro-batches a step
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    micro_batches: usize,
    /// Tokens a sequence
    #[arg(long, default_value_t = 256, value_parser = at_least_one)]
    seq: usize,
    /// Sequences a micro-batch
    #[arg(long, default_value_t = 2, value_parser = at_least_one)]
    batch: usize,
    /// Steps that are timed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Untimed steps before those
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    warmup: u64,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, a schedule does not exist for these sizes, or a step fails.
pub(crate) fn pipeline(options: &PipelineBench) -> Result<()> {
    let size = options.size.decoder(Workload::M30)?;
    if options.ranks.ranks < 2 {
        return Err(Error::Config("bench pipeline needs stages on --ranks 2 or more".into()));
    }
    let names: Vec<&str> = options.schedules.iter().map(String::as_str).collect();
    let kinds = Type::ALL.into_iter().filter(|kind| names.contains(&kind.name()));
    let runs = kinds.map(|kind| {
        let of_rank = kind.stages_per_rank();
        let schedule = Schedule::new(kind, options.ranks.ranks, of_rank, options.micro_batches)?;
        if schedule.stages() > size.layers {
            return Err(Error::Config(format!(
                "{} on {} ranks has {} stages, and the decoder {} layers; each stage needs one (--layers)",
                kind.name(),
                options.ranks.ranks,
                schedule.stages(),
                size.layers
            )));
        }
        Ok((kind, schedule, options.config(kind, &size)?))
    });
    // All of them are checked before the first begins.
    let runs: Vec<_> = runs.collect::<Result<_>>()?;
    let Some((_, _, first)) = runs.first() else { return Ok(()) };
    first.check_plugins()?;
    let Connection { world, .. } = first.trainer.connect()?;
    let dir = std::env::temp_dir().join(format!("fulgurite-bench-{}", std::process::id()));
    let dir = broadcast_object(&*world, &dir, 0)?;
    let rows = runs
        .into_iter()
        .map(|(kind, schedule, run)| measure(options, &world, &dir, (kind, &schedule, run)))
        .collect::<Result<Vec<_>>>();
    // After a failure the other ranks run another collective, so skip the barrier.
    let met = rows.as_ref().map_or(Ok(()), |_| world.run(Collective::Barrier));
    let removed = match world.rank() {
        0 => std::fs::remove_dir_all(&dir).map_err(Error::io("removing", &dir)),
        _ => Ok(()),
    };
    let rows = rows?;
    met.and(removed)?;
    if world.rank() == 0 { report(options, &size, &rows) } else { Ok(()) }
}

impl PipelineBench {
    fn config(
        &self,
        kind: Type,
        size: &DecoderSize,
    ) -> Result<RunConfig<DecoderSize, TokensConfig>> {
        let Self { ranks, micro_batches, seq, batch, warmup, steps, .. } = self;
        let strategy = format!(
            "{{ type = 'model_parallel', pipeline_parallel_size = {}, pipeline_schedule = '{}' }}",
            ranks.ranks,
            kind.name()
        );
        let keys = [
            format!("trainer.accumulate_grad_batches={micro_batches}"),
            format!("trainer.max_steps={}", warmup + steps),
            format!(
                "trainer.profiler={{ type = 'trace', skip_steps = {warmup}, steps = {steps} }}"
            ),
            "trainer.gradient_clip_val=1.0".to_owned(),
            "trainer.loggers=[]".to_owned(),
            "trainer.enable_progress_bar=false".to_owned(),
            "checkpoint.save_last=false".to_owned(),
        ];
        let mut run: RunConfig<DecoderSize, TokensConfig> = ranks.config(&strategy, &keys)?;
        run.model = *size;
        run.data = TokensConfig { batch_size: *batch, length: *seq, vocab: size.vocab };
        Ok(run)
    }
}

/// Trains with one schedule. Collective.
fn measure(
    options: &PipelineBench,
    world: &Arc<dyn ProcessGroup>,
    dir: &Path,
    (kind, schedule, mut run): (Type, &Schedule, RunConfig<DecoderSize, TokensConfig>),
) -> Result<Row> {
    run.trainer.default_root_dir = dir.join(kind.name());
    let held = HeldAtOnce::default();
    let trainer = Trainer::new(world.clone()).with_callback(Box::new(held.clone()));
    let trained = trainer.fit::<Net>(&run)?;
    let own = held.lock().most;
    let held = all_gather_object(&**world, &own)?;
    let path = trained.outcome().run_dir.join("trace.json");
    // Rank 0 has written the file, and all wait for each other in the next collective.
    if world.rank() != 0 {
        return Ok(Row::default());
    }
    let text = std::fs::read_to_string(&path).map_err(Error::io("reading", &path))?;
    let steps = measured_steps(&text, schedule, options.steps as usize)?;
    let simulation = schedule.simulate(&costs(&steps, schedule))?;
    let of_steps =
        |f: &dyn Fn(&MeasuredStep) -> f64| median(&steps.iter().map(f).collect::<Vec<_>>());
    Ok(Row {
        schedule: kind.name().to_owned(),
        step_s: of_steps(&MeasuredStep::duration),
        simulated_s: simulation.duration(),
        bubble: of_steps(&MeasuredStep::bubble),
        simulated_bubble: simulation.bubble(),
        in_flight: simulation.peak_in_flight().to_vec(),
        held_mib: held.iter().map(|bytes| *bytes as f64 / f64::from(1 << 20)).collect(),
        loss: trained.outcome().last_loss,
    })
}

/// An action of a rank that was measured, with start and end in seconds.
type Measured = (Kind, usize, f64, f64);

/// The actions of a step, by rank.
struct MeasuredStep(Vec<Vec<Measured>>);

impl MeasuredStep {
    /// The time from the first action's start to the last one's end.
    fn duration(&self) -> f64 {
        let all = || self.0.iter().flatten();
        let start = all().map(|(.., start, _)| *start).fold(f64::INFINITY, f64::min);
        all().map(|(.., end)| *end).fold(0.0, f64::max) - start
    }

    /// The share of the time in which ranks compute nothing.
    fn bubble(&self) -> f64 {
        let busy: f64 = self.0.iter().flatten().map(|(.., start, end)| end - start).sum();
        1.0 - busy / (self.duration() * self.0.len() as f64)
    }
}

/// Reads a trace. Each action is a phase of its rank, in the order of the rank's list.
fn measured_steps(trace: &str, schedule: &Schedule, steps: usize) -> Result<Vec<MeasuredStep>> {
    let trace: Value = serde_json::from_str(trace).map_err(Error::other)?;
    let mut phases = vec![Vec::new(); schedule.ranks()];
    for event in trace["traceEvents"].as_array().into_iter().flatten() {
        let is_action = event["cat"] == "phase"
            && ["forward", "backward"].iter().any(|name| event["name"] == *name);
        let numbers = [&event["pid"], &event["ts"], &event["dur"]].map(Value::as_f64);
        if let ([Some(rank), Some(start), Some(secs)], true) = (numbers, is_action)
            && let Some(phases) = phases.get_mut(rank as usize)
        {
            phases.push([start * 1e-6, (start + secs) * 1e-6]);
        }
    }
    let mut measured: Vec<_> = (0..steps).map(|_| MeasuredStep(Vec::new())).collect();
    for (rank, mut phases) in phases.into_iter().enumerate() {
        phases.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let actions: Vec<_> =
            schedule.actions(rank).iter().filter(|action| action.kind.computes()).collect();
        if phases.len() != actions.len() * steps {
            return Err(Error::other(format!(
                "the trace of rank {rank} has {} forwards and backwards, and {steps} steps of the schedule have {}",
                phases.len(),
                actions.len() * steps
            )));
        }
        for (step, phases) in measured.iter_mut().zip(phases.chunks(actions.len())) {
            let of_rank = actions.iter().zip(phases);
            let of_rank =
                of_rank.map(|(action, [start, end])| (action.kind, action.stage, *start, *end));
            step.0.push(of_rank.collect());
        }
    }
    Ok(measured)
}

/// The median times of the actions, as costs of the simulation.
fn costs(steps: &[MeasuredStep], schedule: &Schedule) -> Costs {
    let mut times: BTreeMap<(usize, u8), Vec<f64>> = BTreeMap::new();
    for (kind, stage, start, end) in steps.iter().flat_map(|step| step.0.iter().flatten()) {
        times.entry((*stage, half(*kind))).or_default().push(end - start);
    }
    let time = |stage, kind| times.get(&(stage, half(kind))).map(|all| median(all));
    // A schedule without halves does not ask how long each is.
    let of_stage = |stage: usize| {
        let whole = time(stage, Kind::Backward).unwrap_or(0.0);
        let halves = [Kind::BackwardInput, Kind::BackwardWeight];
        let [input, weight] = halves.map(|kind| time(stage, kind).unwrap_or(whole / 2.0));
        [time(stage, Kind::Forward).unwrap_or(0.0), input, weight]
    };
    let stages: Vec<[f64; 3]> = (0..schedule.stages()).map(of_stage).collect();
    let mean = |part: usize| stages.iter().map(|of| of[part]).sum::<f64>() / stages.len() as f64;
    let [forward, backward_input, backward_weight] = [0, 1, 2].map(mean);
    let all = forward + backward_input + backward_weight;
    let stages = stages.iter().map(|of| of.iter().sum::<f64>() / all).collect();
    Costs { forward, backward_input, backward_weight, stages, ..Costs::default() }
}

/// A number for each kind that computes.
fn half(kind: Kind) -> u8 {
    match kind {
        Kind::Forward => 0,
        Kind::Backward => 1,
        Kind::BackwardInput => 2,
        _ => 3,
    }
}

/// The most bytes that this rank's forwards and backwards held in a step, beyond those held before.
#[derive(Clone, Default)]
struct HeldAtOnce(Arc<Mutex<Bytes>>);

#[derive(Default)]
struct Bytes {
    at_start: u64,
    most: u64,
}

impl HeldAtOnce {
    fn lock(&self) -> MutexGuard<'_, Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Callback for HeldAtOnce {}

impl Hooks for HeldAtOnce {
    /// Called for all micro-batches of the step before the first forward.
    fn on_train_batch_start(&mut self, _: &mut HookContext) -> Result<()> {
        self.lock().at_start = memory::reset_peak();
        Ok(())
    }

    /// Called for all micro-batches of the step after the last backward.
    fn on_train_batch_end(&mut self, _: &mut HookContext) -> Result<()> {
        let bytes = &mut *self.lock();
        bytes.most = bytes.most.max(memory::peak().saturating_sub(bytes.at_start));
        Ok(())
    }
}

struct Net(Decoder);

impl LightningModule for Net {
    type Config = DecoderSize;
    type Data = Tokens;

    fn configure_model(size: &DecoderSize, b: &ModuleBuilder) -> Result<Self> {
        Decoder::new(b, size).map(Self)
    }

    fn training_step(&mut self, batch: &(Tensor, Tensor), _: &mut StepContext) -> Result<Loss> {
        self.0.loss(&batch.0, &batch.1)
    }
}

impl Hooks<Tokens> for Net {}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TokensConfig {
    batch_size: usize,
    length: usize,
    vocab: usize,
}

/// Random tokens without an end.
struct Tokens(TokensConfig);

impl DataModule for Tokens {
    type Config = TokensConfig;
    type Batch = (Tensor, Tensor);

    fn setup(config: &TokensConfig, _: &DataContext) -> Result<Self> {
        Ok(Self(config.clone()))
    }

    fn batch_size(config: &TokensConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 1 << 40 } else { 0 }
    }

    fn shuffle(_: &TokensConfig) -> bool {
        false
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let first = indices.first().copied().unwrap_or(0);
        let (ids, targets) = tokens(self.0.vocab, [indices.len(), self.0.length], first)?;
        Ok((ids.to_device(device)?, targets.to_device(device)?))
    }
}

/// One schedule's result, on rank 0.
#[derive(Debug, Default, Serialize)]
struct Row {
    schedule: String,
    /// From the first forward of a step to its last backward.
    step_s: f64,
    /// The same by simulation, with the medians of the actions' times.
    simulated_s: f64,
    /// The share of that time in which ranks computed nothing.
    bubble: f64,
    simulated_bubble: f64,
    /// By rank, the most micro-batches of a stage held at once, by simulation.
    in_flight: Vec<usize>,
    /// By rank, the most memory in a step, less what was held at its start.
    held_mib: Vec<f64>,
    loss: f64,
}

fn report(options: &PipelineBench, size: &DecoderSize, rows: &[Row]) -> Result<()> {
    let PipelineBench { ranks, micro_batches, seq, batch, steps, .. } = options;
    let threads = rayon::current_num_threads();
    if options.json {
        let report = json!({
            "bench": "pipeline", "ranks": ranks.ranks, "threads": threads, "size": size,
            "micro_batches": micro_batches, "seq": seq, "batch": batch, "steps": steps,
            "schedules": rows,
        });
        return print(&format!("{report}\n"));
    }
    let mut text = format!(
        "{} ranks, {threads} threads a rank, {micro_batches} micro-batches of {batch} x {seq} tokens\n\
         {:<18} {:>8} {:>9} {:>8} {:>9}  {:<12} held MiB, by rank\n",
        ranks.ranks, "", "step s", "simulated", "bubble", "simulated", "in flight",
    );
    for row in rows {
        let in_flight: Vec<String> = row.in_flight.iter().map(ToString::to_string).collect();
        let held: Vec<String> = row.held_mib.iter().map(|mib| format!("{mib:.1}")).collect();
        text += &format!(
            "{:<18} {:>8.4} {:>9.4} {:>6.1} % {:>7.1} %  {:<12} {}\n",
            row.schedule,
            row.step_s,
            row.simulated_s,
            row.bubble * 100.0,
            row.simulated_bubble * 100.0,
            in_flight.join(" "),
            held.join(" "),
        );
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trace in which an action takes as many seconds as the schedule's simulation says.
    fn trace(schedule: &Schedule, costs: &Costs, steps: usize) -> String {
        let simulation = schedule.simulate(costs).unwrap();
        let mut events = Vec::new();
        for step in 0..steps {
            for rank in 0..schedule.ranks() {
                for span in simulation.spans(rank) {
                    let name =
                        if span.action.kind == Kind::Forward { "forward" } else { "backward" };
                    let at = (step as f64 * 1000.0 + span.start) * 1e6;
                    let secs = (span.end - span.start) * 1e6;
                    events.push(json!({
                        "ph": "X", "cat": "phase", "name": name, "pid": rank, "ts": at, "dur": secs
                    }));
                }
                events.push(json!({ "ph": "X", "cat": "phase", "name": "data", "pid": rank }));
            }
        }
        json!({ "traceEvents": events }).to_string()
    }

    #[test]
    fn times_of_a_trace_are_simulated_again() {
        for kind in Type::ALL {
            let schedule = Schedule::new(kind, 2, kind.stages_per_rank(), 4).unwrap();
            let stages = (1..=schedule.stages()).map(|stage| stage as f64).collect();
            let given = Costs { forward: 2.0, stages, ..Costs::default() };
            let steps = measured_steps(&trace(&schedule, &given, 3), &schedule, 3).unwrap();
            let expected = schedule.simulate(&given).unwrap();
            let again = schedule.simulate(&costs(&steps, &schedule)).unwrap();
            for (found, expected) in [
                (steps[2].duration(), expected.duration()),
                (steps[1].bubble(), expected.bubble()),
                (again.duration(), expected.duration()),
            ] {
                assert!((found - expected).abs() < 1e-6, "{}: {found} {expected}", kind.name());
            }
        }
    }

    #[test]
    fn missing_actions_are_an_error() {
        let schedule = Schedule::new(Type::GPipe, 2, 1, 4).unwrap();
        let trace = trace(&schedule, &Costs::default(), 1);
        assert!(measured_steps(&trace, &schedule, 2).is_err());
    }
}
