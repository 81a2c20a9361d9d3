//! What the process group adds to MPI: its all-reduce beside `MPI_Allreduce`, and messages of MPI alone, in turns in
//! one run. Ranks are started by `mpirun` with the variables of `torchrun`, as `.ci/mpi bench` does.
#![allow(unsafe_code)] // Calls MPI.

use std::ffi::c_int;
use std::time::Instant;

use candle_core::{DType, Device};
use fulgurite_core::Result;
use fulgurite_core::collective::{GroupContext, ProcessGroupConfig, ReduceOp};
use fulgurite_core::launch::{LaunchOptions, launch, report_and_exit_code};
use fulgurite_environments::TorchElastic;
use fulgurite_mpi::Mpi;
use mpi_sys as ffi;

/// How many times each of the two is measured, in turns.
const TURNS: usize = 9;

fn main() -> std::process::ExitCode {
    report_and_exit_code(run())
}

fn run() -> Result<()> {
    let environment = Some(Box::new(TorchElastic {}) as _);
    let launched = launch(LaunchOptions { environment, ..Default::default() })?;
    let context = GroupContext {
        rank: launched.rank,
        world_size: launched.world_size,
        local_rank: launched.local_rank,
        local_world_size: launched.local_world_size,
        node_rank: launched.node_rank,
        address: None,
        store: launched.store.clone(),
        timeout: std::time::Duration::from_secs(120),
    };
    let group = Mpi::default().build(&context)?;
    let say = |text: String| {
        if context.rank == 0 {
            println!("{text}");
        }
    };
    say(format!("{} ranks; medians of {TURNS} turns, on rank 0", context.world_size));
    say("bytes\tmessage, µs\tGB/s\tMPI_Allreduce, µs\tall_reduce, µs".to_owned());
    for bytes in [4 << 10, 1 << 20, 64 << 20] {
        let times = (16 << 20) / bytes + 1;
        let x = group.empty(bytes / 4, DType::F32, &Device::Cpu)?;
        x.zero_set()?;
        let (mut source, mut sum) = (vec![0f32; bytes / 4], vec![0f32; bytes / 4]);
        let mut taken = [vec![], vec![], vec![]];
        // The first turn is not counted.
        for turn in 0..=TURNS {
            group.barrier()?.wait()?;
            let message = time(times, || {
                there_and_back(context.rank, &mut source);
                Ok(())
            })? / 2.0;
            group.barrier()?.wait()?;
            let bare = time(times, || {
                bare_all_reduce(&source, &mut sum);
                Ok(())
            })?;
            group.barrier()?.wait()?;
            let ours = time(times, || group.all_reduce(&x, ReduceOp::Sum)?.wait())?;
            if turn > 0 {
                [message, bare, ours].into_iter().zip(&mut taken).for_each(|(t, all)| all.push(t));
            }
        }
        let [message, bare, ours] = taken.map(median);
        let speed = bytes as f64 / message / 1000.0;
        say(format!("{bytes}\t{message:.1}\t{speed:.2}\t{bare:.1}\t{ours:.1}"));
    }
    Ok(())
}

/// Microseconds of one of `times` calls.
fn time(times: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    (0..times).try_for_each(|_| call())?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / times as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A message from rank 0 to rank 1 and back.
fn there_and_back(rank: usize, values: &mut [f32]) {
    let (len, tag) = (size_of_val(values) as c_int, 1);
    let memory = values.as_mut_ptr().cast();
    // SAFETY: blocking calls, with memory that is borrowed; MPI is in use by the group.
    unsafe {
        let (bytes, world, ignore) =
            (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD, ffi::RSMPI_STATUS_IGNORE);
        match rank {
            0 => {
                ffi::MPI_Send(memory, len, bytes, 1, tag, world);
                ffi::MPI_Recv(memory, len, bytes, 1, tag, world, ignore);
            }
            1 => {
                ffi::MPI_Recv(memory, len, bytes, 0, tag, world, ignore);
                ffi::MPI_Send(memory, len, bytes, 0, tag, world);
            }
            _ => {}
        }
    }
}

fn bare_all_reduce(source: &[f32], sum: &mut [f32]) {
    let (from, to) = (source.as_ptr().cast(), sum.as_mut_ptr().cast());
    // SAFETY: as above.
    unsafe {
        let (len, world) = (source.len() as c_int, ffi::RSMPI_COMM_WORLD);
        ffi::MPI_Allreduce(from, to, len, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, world);
    }
}
