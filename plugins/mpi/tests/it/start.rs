//! Start and end of MPI.

use std::time::Duration;

use fulgurite_core::collective::{GroupContext, ProcessGroupConfig, ReduceOp};
use fulgurite_core::{Error, Result};
use fulgurite_mpi::{Mpi, MpiNetwork};
use fulgurite_test_message::assert_says;

use crate::job::{By, Ended, Job};

pub(crate) fn run(scenario: &str, context: &GroupContext) -> Option<Result<()>> {
    let result = match scenario {
        "start" => MpiNetwork::new(&Mpi::default(), context).map(drop),
        "again" => (0..3).try_for_each(|_| {
            let group = Mpi::default().build(context)?;
            group.barrier()?.wait()
        }),
        "otherwise" => MpiNetwork::new(&Mpi::default(), context).and_then(|_| {
            MpiNetwork::new(&Mpi { piece_bytes: 1, ..Mpi::default() }, context).map(drop)
        }),
        "unequal" => {
            let piece_bytes = 1000 + context.rank;
            MpiNetwork::new(&Mpi { piece_bytes, ..Mpi::default() }, context).map(drop)
        }
        "late" => MpiNetwork::new(&Mpi::default(), context).map(|_| {
            // The other ranks finish long before.
            std::thread::sleep(Duration::from_millis(700 * context.rank as u64));
        }),
        "fails" => Mpi::default().build(context).and_then(|group| {
            group.barrier()?.wait()?;
            if context.rank == 1 {
                return Err(Error::other("the disk is full"));
            }
            let x =
                candle_core::Tensor::zeros(10, candle_core::DType::F32, &candle_core::Device::Cpu)?;
            group.all_reduce(&x, ReduceOp::Sum)?.wait()
        }),
        "absent" => match context.rank {
            1 => context.store.get("rank 0 gave up", Duration::from_secs(30)).map(drop),
            _ => MpiNetwork::new(&Mpi::default(), context).map(drop).or_else(|error| {
                context.store.set("rank 0 gave up", b"")?;
                Err(error)
            }),
        },
        _ => return None,
    };
    Some(result)
}

/// Returns rank 0's error.
fn error_of_rank_0(ended: &Ended) -> String {
    let error = ended.results[0].clone();
    error.unwrap_or_else(|| panic!("rank 0 said nothing:\n{}", ended.stderr))
}

#[test]
fn clean_end_waits_for_all_ranks() {
    Job::start(3, "start", 30, By::Mpirun).expect_ok();
    Job::start(3, "late", 30, By::Mpirun).expect_ok();
}

#[test]
fn groups_are_rebuilt_only_with_equal_options() {
    Job::start(2, "again", 30, By::Mpirun).expect_ok();
    let ended = Job::start(2, "otherwise", 30, By::Mpirun).end();
    assert_says!(error_of_rank_0(&ended), "trainer.process_group.piece_bytes is 1 … stay the same");
}

#[test]
fn rank_error_precedes_launcher_output() {
    let ended = Job::start(3, "fails", 30, By::Mpirun).end();
    assert!(!ended.success);
    let stderr = &ended.stderr;
    let own = stderr.find("rank 1 failed: the disk is full").expect(stderr);
    let launcher = ["mpirun", "PRIMARY JOB", "BAD TERMINATION"];
    for of_launcher in launcher.iter().filter_map(|text| stderr.find(text)) {
        assert!(own < of_launcher, "{stderr}");
    }
}

#[test]
fn missing_launcher_is_reported() {
    let ended = Job::start(2, "start", 10, By::Hand).end();
    assert_says!(error_of_rank_0(&ended), "launch: process group `mpi`: 2 of 2 … not started …");
}

#[test]
fn launcher_of_other_family_is_reported() {
    if std::env::var("FULGURITE_OTHER_MPIRUN").is_err() {
        eprintln!(
            "skipped: FULGURITE_OTHER_MPIRUN does not say where the other family's mpirun is"
        );
        return;
    }
    let ended = Job::start(2, "start", 10, By::Other).end();
    let error = error_of_rank_0(&ended);
    let wrong = "it was started by the launcher of another MPI family, or by none";
    assert!(error.contains(wrong), "{error}\n{}", ended.stderr);
}

#[test]
fn differing_options_fail_on_all_ranks() {
    let ended = Job::start(2, "unequal", 10, By::Mpirun).end();
    assert_says!(error_of_rank_0(&ended), "launch: process group `mpi`: piece_bytes … same on all");
}

#[test]
fn absent_rank_is_named() {
    let ended = Job::start(2, "absent", 1, By::Mpirun).end();
    assert_says!(error_of_rank_0(&ended), "launch: rank 1 did not come to start MPI within 1 s …");
}
