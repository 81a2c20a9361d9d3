//! The process group: the engine over MPI.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{GroupContext, ProcessGroup, ProcessGroupConfig, ReduceOp};
use fulgurite_core::{Result, conformance};
use fulgurite_mpi::Mpi;
use rustix::process::{Signal, getpid, kill_process};

use crate::job::{By, Ended, Job};

pub(crate) fn run(scenario: &str, context: &GroupContext) -> Option<Result<()>> {
    let config = match scenario {
        "small" => Mpi { chunk_bytes: 64 << 10, piece_bytes: 5000 },
        _ => Mpi::default(),
    };
    let run: fn(&dyn ProcessGroup, &GroupContext) -> Result<()> = match scenario {
        "default" | "small" => |group, _| conformance::process_group(group),
        "abort" => |group, _| conformance::process_group_abort(group),
        "timeout" => |group, context| conformance::process_group_timeout(group, context.timeout),
        "differ" => |group, context| {
            let x = Tensor::zeros(100, DType::F32, &Device::Cpu)?;
            match context.rank {
                1 => group.all_gather_into(vec![])?.wait(),
                _ => group.all_reduce(&x, ReduceOp::Sum)?.wait(),
            }
        },
        "killed" => |group, context| {
            group.barrier()?.wait()?;
            if context.rank == 1 {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            let x = Tensor::zeros(1 << 20, DType::F32, &Device::Cpu)?;
            group.all_reduce(&x, ReduceOp::Sum)?.wait()
        },
        _ => return None,
    };
    Some(config.build(context).and_then(|group| run(&*group, context)))
}

#[test]
fn two_ranks_conform() {
    Job::start(2, "default", 60, By::Mpirun).expect_ok();
}

#[test]
fn four_ranks_conform() {
    Job::start(4, "default", 60, By::Mpirun).expect_ok();
}

#[test]
fn flipped_ranks_with_small_pieces_conform() {
    Job::start(3, "small", 60, By::Flipped).expect_ok();
}

#[test]
fn abort_ends_all_waits() {
    Job::start(2, "abort", 60, By::Mpirun).expect_ok_without_finalize();
    Job::start(4, "abort", 60, By::Mpirun).expect_ok_without_finalize();
}

#[test]
fn wait_for_absent_rank_times_out() {
    Job::start(2, "timeout", 1, By::Mpirun).expect_ok_without_finalize();
    Job::start(4, "timeout", 1, By::Mpirun).expect_ok_without_finalize();
}

#[test]
fn mismatched_collectives_are_detected() {
    let Ended { results, stderr, .. } = Job::start(2, "differ", 30, By::Mpirun).end();
    for result in results {
        let Some(result) = result else { continue };
        assert!(result.contains("the ranks differ in collective 1"), "{result}\n{stderr}");
    }
    assert!(stderr.contains("the ranks differ in collective 1"), "{stderr}");
}

#[test]
fn killed_rank_is_named() {
    let Ended { results, stderr, .. } = Job::start(3, "killed", 30, By::Lingering).end();
    for rank in [0, 2] {
        let result = results[rank].as_deref().unwrap_or_default();
        assert!(result.contains("rank 1"), "rank {rank}: {result}\n{stderr}");
    }
}
