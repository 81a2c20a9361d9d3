//! Collectives of f32 buffers, from a few kilobytes to many megabytes, over any process group.

use std::time::Instant;

use clap::Args;
use fulgurite_core::autograd::storage::{copy_from, with_host_mut};
use fulgurite_core::collective::{
    AllGather, Collective, ReduceOp, ReduceScatter, all_gather_object,
};
use serde_json::json;

use super::bare_mpi;
use super::ranks::{Ranks, median};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench collectives`.
#[derive(Debug, Clone, Args)]
pub struct CollectivesBench {
    #[command(flatten)]
    ranks: Ranks,
    /// The process group: a name such as `tcp`, or a TOML table such as '{ type = "auto", levels =
    /// false }'
    #[arg(long, default_value = "auto")]
    process_group: String,
    /// Bytes of the whole buffer, an all-gather's output, a reduce-scatter's input; separated by
    /// commas
    #[arg(long, value_delimiter = ',', default_values_t = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20])]
    sizes: Vec<usize>,
    /// Buffers in memory of each process's own; by default they are where the transport reaches
    /// them best, as strategies place what they communicate
    #[arg(long)]
    private: bool,
    /// As JSON on standard output, a line each
    #[arg(long)]
    json: bool,
}

/// A collective to measure.
const OPS: [&str; 5] = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"];

/// Runs the benchmark. Launches the other ranks; returns in ranks only. Collective.
///
/// # Errors
/// If ranks cannot be started, or a collective fails or gives a wrong result.
pub(crate) fn collectives(options: &CollectivesBench) -> Result<()> {
    let process_group = format!("trainer.process_group={}", options.process_group);
    let fabric = options.ranks.launch("ddp", &[process_group])?;
    for op in OPS {
        let sizes: &[usize] = if op == "barrier" { &[0] } else { &options.sizes };
        for &bytes in sizes {
            let measured = Measured::new(&fabric, options, op, bytes)?;
            if fabric.is_global_zero() {
                measured.report(options, op, &fabric)?;
            }
        }
    }
    Ok(())
}

/// The times of one collective at one size.
struct Measured {
    bytes: usize,
    times: Times,
    /// Times of MPI's own collective, if the ranks use MPI.
    mpi: Option<Times>,
}

/// Call times of the slowest rank.
#[derive(Clone, Copy)]
struct Times {
    /// The median of single calls, each after a barrier.
    median_secs: f64,
    shortest_secs: f64,
    /// The mean of consecutive calls without barriers.
    in_a_row_secs: f64,
}

impl Measured {
    fn new(fabric: &Fabric, options: &CollectivesBench, op: &str, bytes: usize) -> Result<Self> {
        let (world, n) = (fabric.world(), fabric.world_size());
        let part = bytes / 4 / n;
        if op != "barrier" && part == 0 {
            return Err(Error::Config(format!(
                "--sizes {bytes}: a buffer has an f32 for each rank, so at least {} bytes",
                4 * n
            )));
        }
        let (value, device) = ((fabric.global_rank() + 1) as f32, fabric.device());
        let full = |elements| -> Result<Tensor> {
            let tensor = match options.private {
                true => Tensor::zeros(elements, DType::F32, device)?,
                false => world.empty(elements, DType::F32, device)?,
            };
            fill(&tensor, value)?;
            Ok(tensor)
        };
        let (whole, own) = (full(part * n)?, full(part)?);
        let counts = vec![part; n];
        let mut call = || {
            world.run(match op {
                "all_reduce" => Collective::all_reduce(&whole, ReduceOp::Sum),
                "all_gather" => Collective::all_gather_into(vec![AllGather {
                    output: whole.clone(),
                    input: own.clone(),
                    counts: counts.clone(),
                }]),
                "reduce_scatter" => Collective::reduce_scatter(
                    vec![ReduceScatter {
                        output: own.clone(),
                        input: whole.clone(),
                        counts: counts.clone(),
                    }],
                    ReduceOp::Sum,
                ),
                "broadcast" => Collective::broadcast(&whole, 0),
                _ => Collective::Barrier,
            })
        };
        call()?;
        let sum = (n * (n + 1) / 2) as f32;
        let wanted: Option<(&Tensor, Vec<f32>)> = match op {
            "all_reduce" => Some((&whole, vec![sum; part * n])),
            "all_gather" => {
                let ranks = (1..=n).flat_map(|rank| std::iter::repeat_n(rank as f32, part));
                Some((&whole, ranks.collect()))
            }
            "reduce_scatter" => Some((&own, vec![sum; part])),
            "broadcast" => Some((&whole, vec![1.0; part * n])),
            _ => None,
        };
        if let Some((tensor, wanted)) = wanted
            && tensor.to_vec1::<f32>()? != wanted
        {
            return Err(Error::other(format!("{op} of {bytes} bytes gave a wrong result")));
        }
        // Zeros, so that repeated sums stay finite.
        for tensor in [&whole, &own] {
            fill(tensor, 0.0)?;
        }
        let mut of_mpi = match device {
            Device::Cpu => bare_mpi::call(op, part, n)?,
            _ => None,
        };
        let mut calls: Vec<&mut dyn FnMut() -> Result<()>> = vec![&mut call];
        calls.extend(of_mpi.as_deref_mut().map(|call| call as &mut dyn FnMut() -> Result<()>));
        let times = time(fabric, &mut calls, ((128 << 20) / bytes.max(1)).clamp(8, 200))?;
        let bytes = if op == "barrier" { 0 } else { part * n * 4 };
        Ok(Self { bytes, times: times[0], mpi: times.get(1).copied() })
    }

    fn report(&self, options: &CollectivesBench, op: &str, fabric: &Fabric) -> Result<()> {
        let (ranks, transport) = (fabric.world_size(), fabric.world().transport());
        let Self { bytes, times, mpi } = *self;
        let Times { median_secs, shortest_secs, in_a_row_secs } = times;
        let gib_per_s = bytes as f64 / median_secs / f64::from(1 << 30);
        if options.json {
            let mut line = json!({
                "bench": "collectives", "op": op, "ranks": ranks, "transport": transport, "bytes": bytes,
                "private": options.private,
                "latency_s": median_secs, "latency_min_s": shortest_secs, "loop_s": in_a_row_secs,
                "algbw_gib_s": gib_per_s,
            });
            if let Some(mpi) = mpi {
                line["mpi_latency_s"] = json!(mpi.median_secs);
                line["mpi_latency_min_s"] = json!(mpi.shortest_secs);
                line["mpi_loop_s"] = json!(mpi.in_a_row_secs);
            }
            return print(&format!("{line}\n"));
        }
        let micros = |Times { median_secs, shortest_secs, in_a_row_secs }: Times| {
            format!(
                "{:>9.1} us  (best {:.1}, in a row {:.1})",
                median_secs * 1e6,
                shortest_secs * 1e6,
                in_a_row_secs * 1e6,
            )
        };
        let mpi = mpi.map_or_else(String::new, |mpi| format!("   MPI alone {}", micros(mpi)));
        let own = micros(times);
        print(&format!("{op:15} {bytes:>9} bytes  {own}  {gib_per_s:.2} GiB/s{mpi}\n"))
    }
}

fn fill(tensor: &Tensor, value: f32) -> Result<()> {
    match tensor.device() {
        Device::Cpu => with_host_mut(tensor, |x: &mut [f32]| x.fill(value)),
        // The empty tensor of a barrier.
        _ if tensor.elem_count() == 0 => Ok(()),
        device => copy_from(tensor, &Tensor::full(value, tensor.elem_count(), device)?),
    }
}

/// Times each of `calls` on all ranks, alternately, `times` times each, including device work.
/// Collective.
fn time(
    fabric: &Fabric,
    calls: &mut [&mut dyn FnMut() -> Result<()>],
    times: usize,
) -> Result<Vec<Times>> {
    let (world, device) = (&**fabric.world(), fabric.device());
    device.synchronize()?;
    let mut single = vec![Vec::with_capacity(times); calls.len()];
    for i in 0..times + 3 {
        for (call, secs) in calls.iter_mut().zip(&mut single) {
            world.run(Collective::Barrier)?;
            let started = Instant::now();
            call()?;
            device.synchronize()?;
            if i >= 3 {
                secs.push(started.elapsed().as_secs_f64());
            }
        }
    }
    let mut in_a_row = Vec::new();
    for call in calls {
        world.run(Collective::Barrier)?;
        let started = Instant::now();
        (0..times).try_for_each(|_| call())?;
        device.synchronize()?;
        in_a_row.push(started.elapsed().as_secs_f64() / times as f64);
    }
    let own: Vec<(Vec<f64>, f64)> = single.into_iter().zip(in_a_row).collect();
    let all = all_gather_object(world, &own)?;
    let of_call = |call: usize| {
        let slowest = |i: usize| all.iter().map(|own| own[call].0[i]).fold(0.0, f64::max);
        let slowest: Vec<f64> = (0..times).map(slowest).collect();
        Times {
            median_secs: median(&slowest),
            shortest_secs: slowest.iter().copied().fold(f64::INFINITY, f64::min),
            in_a_row_secs: all.iter().map(|own| own[call].1).fold(0.0, f64::max),
        }
    };
    Ok((0..own.len()).map(of_call).collect())
}
