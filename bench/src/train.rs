//! Training steps with [`Fabric`], compared with only their matrix products.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fulgurite_core::collective::all_gather_object;
use fulgurite_core::execution::transfer;
use fulgurite_core::mesh::{DATA_PARALLEL, TENSOR_PARALLEL};
use fulgurite_core::optim::{AdamW, StateDtype};
use fulgurite_core::run::ClipAlgorithm;
use fulgurite_core::trainer::peak_rss_mib;
use serde::Serialize;
use serde_json::json;

use super::floor::Floor;
use super::ranks::{StrategyRanks, Times, at_least_one, median};
use super::{Decoder, DecoderSize, SizeOptions, Workload};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench train`.
#[derive(Debug, Clone, Args)]
pub struct TrainBench {
    #[command(flatten)]
    ranks: StrategyRanks,
    #[command(flatten)]
    size: SizeOptions,
    /// The dtypes of computing, as `trainer.precision`: 32-true, bf16-mixed, …
    #[arg(long, default_value = "32-true")]
    precision: String,
    /// Tokens a sequence [default: the workload's]
    #[arg(long, value_parser = at_least_one)]
    seq: Option<usize>,
    /// Sequences a micro-batch, on each data-parallel rank [default: the workload's]
    #[arg(long, value_parser = at_least_one)]
    batch: Option<usize>,
    /// Whose activations are computed again in backward: none, full or selective, or a TOML table
    /// such as '{ type = "selective", every = 3 }' or '{ type = "full", offload = "disk" }'
    #[arg(long, default_value = "none")]
    activation_checkpointing: String,
    /// What AdamW's moments are kept in
    #[arg(long, default_value = "f32", value_parser = state_dtypes())]
    optimizer_state_dtype: StateDtype,
    /// Micro-batches a step; gradients are synchronised after the last
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulate: u64,
    /// Steps that are timed
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before those, two at least: from the second on the optimizer's state is in memory
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(2..))]
    warmup: u64,
    /// Do not measure the floor, the time of the step's matrix products alone. It is in f32 on the
    /// host's cores
    #[arg(long)]
    no_floor: bool,
    /// As JSON on standard output
    #[arg(long)]
    json: bool,
}

/// Number of batches, used cyclically.
const POOL: u64 = 4;

/// How often the floor is measured before the timed steps, and again after them.
const FLOORS: usize = 3;

fn state_dtypes() -> impl TypedValueParser<Value = StateDtype> {
    PossibleValuesParser::new(["f32", "bf16"]).map(|name| match name.as_str() {
        "bf16" => StateDtype::Bf16,
        _ => StateDtype::F32,
    })
}

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or a step fails.
pub(crate) fn train(options: &TrainBench) -> Result<()> {
    let size = options.size.decoder(Workload::M30)?;
    let (seq, batch) = match options.size.workload(Workload::M30) {
        Workload::Tiny => (64, 4),
        Workload::M30 => (256, 4),
        Workload::Ckpt => (16, 1),
        Workload::Llama1b => (2048, 8),
    };
    let (seq, batch) = (options.seq.unwrap_or(seq), options.batch.unwrap_or(batch));
    let checkpointing = &options.activation_checkpointing;
    let mut fabric = options.ranks.launch(&[
        format!("trainer.activation_checkpointing={checkpointing}"),
        format!("trainer.precision={}", options.precision),
    ])?;
    let device = fabric.device().clone();
    let with_floor = !options.no_floor && device.is_cpu() && options.precision == "32-true";
    let adamw = AdamW {
        lr: 3e-4,
        betas: (0.9, 0.95),
        weight_decay: 0.1,
        eps: 1e-8,
        state_dtype: options.optimizer_state_dtype,
        ..AdamW::default()
    };
    let (model, mut optimizer) = fabric.setup(|b| Decoder::new(b, &size), &adamw)?;
    if fabric.context_parallel().is_some() {
        return Err(Error::Config(
            "bench train gives every rank whole sequences; leave out context parallelism".into(),
        ));
    }
    let mesh = fabric.device_mesh();
    let data_parallel = mesh.group(DATA_PARALLEL)?.clone();
    let tensor_parallel = mesh.group(TENSOR_PARALLEL)?.size();

    let pool: Vec<(Tensor, Tensor)> = (0..POOL * options.accumulate)
        .map(|i| {
            let (ids, targets) = tokens(
                size.vocab,
                [batch, seq],
                i * data_parallel.size() as u64 + data_parallel.rank() as u64,
            )?;
            // As in data modules, so that layers need not read the ids back.
            Ok((
                transfer::to_device(&ids, &device, "batch")?,
                transfer::to_device(&targets, &device, "batch")?,
            ))
        })
        .collect::<Result<_>>()?;
    let mut step = |i: u64| -> Result<f64> {
        for micro in 0..options.accumulate {
            let (ids, targets) = &pool[((i % POOL) * options.accumulate + micro) as usize];
            let _scope = fabric.forward_scope(true, i, 0);
            let _no_sync = fabric.no_backward_sync(micro + 1 < options.accumulate);
            fabric.backward(&model.loss(ids, targets)?)?;
        }
        if !device.is_cpu() {
            let numbers = optimizer.clip_and_step(Some((1.0, ClipAlgorithm::Norm)))?;
            return Ok(optimizer.read(numbers)?.loss);
        }
        let loss = fabric.step_totals(&[])?.mean();
        fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
        optimizer.step()?;
        Ok(loss)
    };

    let mut times = Times::default();
    let loss_first = step(0)?;
    let startup_s = now() - fabric.measurements().program_start().unwrap_or(f64::NAN);
    times.note(&fabric, "startup", startup_s)?;
    for i in 1..options.warmup {
        step(i)?;
    }
    let peak_before_floor = peak_rss_mib();
    let mut floor = with_floor.then(|| Floor::new(&size, batch, seq, tensor_parallel));
    let accumulate = options.accumulate;
    let measure_floor = |floor: &mut Floor, times: &mut Times| -> Result<()> {
        (0..FLOORS).try_for_each(|_| {
            times.measure(&fabric, "floor", || {
                (0..accumulate).for_each(|_| floor.run());
                Ok(())
            })
        })
    };
    // Before and after the steps, because the machine's speed changes. Not between them: the steps
    // must follow each other as in training.
    if let Some(floor) = &mut floor {
        floor.run();
        measure_floor(floor, &mut times)?;
    }
    let mut loss_last = loss_first;
    for i in options.warmup..options.warmup + options.steps {
        loss_last = times.measure(&fabric, "step", || step(i))?;
    }
    // Excludes the floor's memory.
    let peak_rss_mib = if floor.is_some() { peak_before_floor } else { peak_rss_mib() };
    if let Some(floor) = &mut floor {
        measure_floor(floor, &mut times)?;
    }
    let peak_rss_mib = all_gather_object(&**fabric.world(), &peak_rss_mib)?;
    let memory = fabric
        .measurements()
        .device_memory()?
        .map(|memory| memory.peak_bytes as f64 / f64::from(1 << 20));
    let peak_device_mib = all_gather_object(&**fabric.world(), &memory)?;
    let tokens_per_step = batch * seq * data_parallel.size() * options.accumulate as usize;
    if !fabric.is_global_zero() {
        return Ok(());
    }
    let step = times.get("step");
    let step_s = median(step);
    let floor_s = with_floor.then(|| median(times.get("floor")));
    report(
        options,
        &Report {
            strategy: &options.ranks.strategy,
            ranks: fabric.world_size(),
            data_parallel: data_parallel.size(),
            tensor_parallel,
            threads: rayon::current_num_threads(),
            accelerator: &options.ranks.ranks.accelerator,
            precision: &options.precision,
            size,
            seq,
            batch,
            accumulate: options.accumulate,
            activation_checkpointing: checkpointing,
            optimizer_state_dtype: options.optimizer_state_dtype,
            parameters: fabric.module_tree()?.elem_count(),
            steps: options.steps,
            step_s,
            step_s_min: step.iter().copied().fold(f64::INFINITY, f64::min),
            step_s_max: step.iter().copied().fold(0.0, f64::max),
            tokens_per_step,
            tokens_per_s: tokens_per_step as f64 / step_s,
            gemm_floor_s: floor_s,
            of_floor: floor_s.map(|floor| step_s / floor),
            startup_s: median(times.get("startup")),
            peak_rss_mib,
            peak_device_mib,
            loss_first,
            loss_last,
        },
    )
}

/// The result, from the slowest rank; `step_s` and `gemm_floor_s` are medians.
#[derive(Serialize)]
struct Report<'a> {
    strategy: &'a str,
    ranks: usize,
    data_parallel: usize,
    tensor_parallel: usize,
    threads: usize,
    accelerator: &'a str,
    precision: &'a str,
    #[serde(flatten)]
    size: DecoderSize,
    seq: usize,
    batch: usize,
    accumulate: u64,
    activation_checkpointing: &'a str,
    optimizer_state_dtype: StateDtype,
    parameters: usize,
    steps: u64,
    step_s: f64,
    step_s_min: f64,
    step_s_max: f64,
    tokens_per_step: usize,
    tokens_per_s: f64,
    gemm_floor_s: Option<f64>,
    of_floor: Option<f64>,
    startup_s: f64,
    peak_rss_mib: Vec<Option<f64>>,
    /// Peak of tensors on each rank's device; `None` if the device is the host.
    peak_device_mib: Vec<Option<f64>>,
    loss_first: f64,
    loss_last: f64,
}

fn report(options: &TrainBench, report: &Report) -> Result<()> {
    if options.json {
        let mut whole = json!({ "bench": "train" });
        let fields = serde_json::to_value(report).map_err(Error::other)?;
        if let (Some(whole), serde_json::Value::Object(fields)) = (whole.as_object_mut(), fields) {
            whole.extend(fields);
        }
        return print(&format!("{whole}\n"));
    }
    let Report { step_s, step_s_min, step_s_max, .. } = report;
    let mut text = format!(
        "{:.2} M parameters, {} on {} ranks, {} threads a rank\n\
         step        {step_s:.4} s  ({step_s_min:.4} to {step_s_max:.4})\n\
         tokens/s    {:.0}\n",
        report.parameters as f64 / 1e6,
        report.strategy,
        report.ranks,
        report.threads,
        report.tokens_per_s,
    );
    if let (Some(floor), Some(ratio)) = (report.gemm_floor_s, report.of_floor) {
        text += &format!("GEMMs alone {floor:.4} s  (the step takes {ratio:.2} times as long)\n");
    }
    let list = |mib: &[Option<f64>]| {
        mib.iter().flatten().map(|mib| format!("{mib:.0}")).collect::<Vec<_>>().join(", ")
    };
    let on_device = match report.peak_device_mib.iter().any(Option::is_some) {
        true => format!("on device   {} MiB at most\n", list(&report.peak_device_mib)),
        false => String::new(),
    };
    text += &format!(
        "start-up    {:.3} s to the end of the first step\n\
         peak RSS    {} MiB\n{on_device}loss        {:.4} to {:.4}\n",
        report.startup_s,
        list(&report.peak_rss_mib),
        report.loss_first,
        report.loss_last,
    );
    print(&text)
}

/// A batch of random ids, and the ids that follow them.
pub(super) fn tokens(
    vocab: usize,
    [batch, seq]: [usize; 2],
    seed: u64,
) -> Result<(Tensor, Tensor)> {
    let mut state = seed;
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % vocab as u64) as u32
    };
    let ids: Vec<u32> = (0..batch * (seq + 1)).map(|_| next()).collect();
    let ids = Tensor::from_vec(ids, (batch, seq + 1), &Device::Cpu)?;
    Ok((ids.narrow(1, 0, seq)?.contiguous()?, ids.narrow(1, 1, seq)?.contiguous()?))
}

/// Seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(f64::NAN, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_equal_the_peers_batches() {
        let (ids, targets) = tokens(1 << 16, [1, 2], 0).unwrap();
        // splitmix64 from 0, modulo the vocabulary, in order: like `decoder_tokens` in
        // benches/peer.
        let [first, second, third] =
            [0xe220_a839_7b1d_cdaf_u64, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]
                .map(|number| (number % (1 << 16)) as u32);
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[first, second]]);
        assert_eq!(targets.to_vec2::<u32>().unwrap(), [[second, third]]);
    }
}
