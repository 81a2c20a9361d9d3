//! Ranks that are late, dead or in another collective, and an NCCL that fails: every wait ends with
//! a reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{Collective, Label, ProcessGroup, ReduceOp, Work};
use fulgurite_core::{Error, Result, conformance};
use fulgurite_nccl::connect;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::Training;

use crate::ranks::Job;

const SECOND: Duration = Duration::from_secs(1);

fn job() -> Job {
    Job { timeout: SECOND, ..Job::new(1) }
}

fn ones(n: usize) -> Result<Tensor> {
    Ok(Tensor::ones(n, DType::F32, &Device::Cpu)?)
}

fn sum(group: &dyn ProcessGroup, n: usize) -> Result<()> {
    group.run(Collective::all_reduce(&ones(n)?, ReduceOp::Sum))
}

/// Waits until the group has failed on any rank.
fn until_failed(group: &dyn ProcessGroup) -> Error {
    loop {
        match group.failure() {
            Some(error) => return error,
            None => std::thread::yield_now(),
        }
    }
}

/// Runs `f` on each rank, and returns the ranks' errors.
fn errors(
    job: &Job,
    ranks: usize,
    f: impl Fn(Arc<dyn ProcessGroup>) -> Result<()> + Sync,
) -> String {
    let errors = Mutex::new(vec![String::new(); ranks]);
    job.run(ranks, |group| {
        if let Err(error) = f(group.clone()) {
            errors.lock().unwrap()[group.rank()] = error.to_string();
        }
        Ok(())
    })
    .unwrap();
    errors.into_inner().unwrap().join("\n")
}

#[test]
fn abort_and_timeout_conform() {
    for connected in [false, true] {
        let run = |f: fn(&dyn ProcessGroup) -> Result<()>| {
            let job = job();
            let run = |group: Arc<dyn ProcessGroup>| {
                if connected {
                    sum(&*group, 10)?;
                }
                f(&*group)
            };
            job.run(3, run).unwrap();
            assert_eq!((job.nccl.violations(), job.nccl.live()), (0, 0));
            assert_eq!(job.nccl.aborts(), if connected { 3 } else { 0 });
        };
        run(|group| conformance::process_group_abort(group));
        run(|group| conformance::process_group_timeout(group, SECOND));
    }
}

#[test]
fn late_rank_is_named_and_fails() {
    let job = job();
    let found = errors(&job, 2, |group| {
        sum(&*group, 10)?;
        if group.rank() == 1 {
            until_failed(&*group);
        }
        let _label = Label::enter("unit `layers.3`");
        sum(&*group, 100)
    });
    insta::assert_snapshot!(found, @"
    rank 0, process group `world`, all_reduce: timed out after 1s in collective 2 (all_reduce Sum of 100 f32, for unit `layers.3`): waited for rank 1
    rank 1, process group `world`, all_reduce: aborted by rank 0: timed out after 1s in collective 2 (all_reduce Sum of 100 f32, for unit `layers.3`): waited for rank 1
    ");
    assert_eq!((job.nccl.violations(), job.nccl.aborts(), job.nccl.live()), (0, 2, 0));
}

/// The unit or bucket of a strategy's collective is named.
#[test]
fn stuck_training_names_its_collective() {
    let stuck = |config: &str| {
        // Long enough for a slow setup.
        let job = Job { timeout: 5 * SECOND, ..Job::new(5) };
        let over = AtomicBool::new(false);
        let found = errors(&job, 2, |group| {
            let mut training = Training::new(group.clone(), config, DType::F32, 1)?;
            if group.rank() == 1 {
                // The failing group is one of the mesh.
                while !over.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                return Ok(());
            }
            let stuck = training.step().map(drop);
            over.store(true, Ordering::SeqCst);
            stuck
        });
        found.lines().next().unwrap().to_owned()
    };
    assert_says!(
        stuck(r#"{"type": "fsdp"}"#),
        "rank 0 … `data_parallel_shard` … timed out … for rank 1"
    );
    assert_says!(
        stuck(r#"{"type": "ddp"}"#),
        "rank 0 … `data_parallel_replicate` … timed out … rank 1"
    );
}

#[test]
fn vanished_rank_is_named() {
    let job = job();
    let found = errors(&job, 3, |group| {
        sum(&*group, 10)?;
        match group.rank() {
            2 => Ok(()),
            // The message comes from the first rank that times out.
            _ => sum(&*group, 100).map_err(|error| Error::other(reason(&error))),
        }
    });
    insta::assert_snapshot!(found, @"
    timed out after 1s in collective 2 (all_reduce Sum of 100 f32): waited for rank 2
    timed out after 1s in collective 2 (all_reduce Sum of 100 f32): waited for rank 2
    ");
}

/// Returns the original message, without the names of the ranks that report it.
fn reason(error: &Error) -> String {
    let text = error.to_string();
    let words = ["timed out", "rank 0 is in", "rank 1 is in"];
    let start = words.iter().filter_map(|word| text.find(word)).min();
    text[start.unwrap_or(0)..].to_owned()
}

#[test]
fn failing_rank_ends_the_waits_of_others() {
    let job = job();
    let other = Mutex::new(None);
    let first = job.run(2, |group| {
        sum(&*group, 10)?;
        if group.rank() == 1 {
            return Err(Error::other("the disk is full"));
        }
        *other.lock().unwrap() = Some(sum(&*group, 100).unwrap_err().to_string());
        Ok(())
    });
    assert_says!(first.unwrap_err(), "the disk is full");
    assert_says!(other.into_inner().unwrap().unwrap(), "rank 1 failed: the disk is full");
}

#[test]
fn mismatched_collectives_fail_before_timeout() {
    let job = Job { timeout: Duration::from_secs(600), ..Job::new(3) };
    let found = errors(&job, 2, |group| {
        sum(&*group, 10)?;
        let _label = Label::enter("unit `layers.3`");
        let wrong = sum(&*group, 100 * (1 + group.rank()));
        wrong.map_err(|error| Error::other(reason(&error)))
    });
    insta::assert_snapshot!(found, @"
    rank 0 is in collective 2 (all_reduce Sum of 100 f32, for unit `layers.3`), but rank 1 is in collective 2 (all_reduce Sum of 200 f32, for unit `layers.3`): all ranks of a group must call the same collectives, in the same order, with the same shapes and dtypes
    rank 0 is in collective 2 (all_reduce Sum of 100 f32, for unit `layers.3`), but rank 1 is in collective 2 (all_reduce Sum of 200 f32, for unit `layers.3`): all ranks of a group must call the same collectives, in the same order, with the same shapes and dtypes
    ");
    assert_eq!((job.nccl.aborts(), job.nccl.live()), (2, 0));
}

#[test]
fn nccl_error_names_the_collective() {
    let job = job();
    // Rank 1's communicator fails in its second collective, which rank 0 never joins.
    job.nccl.fail(1, 2, 6);
    let found = errors(&job, 2, |group| {
        sum(&*group, 10)?;
        if group.rank() == 0 {
            return Err(until_failed(&*group));
        }
        sum(&*group, 100)
    });
    insta::assert_snapshot!(found, @"
    rank 0, process group `world`, failure: aborted by rank 1: a communicator: remote process exited or there was a network error, in collective 2 (all_reduce Sum of 100 f32)
    rank 1, process group `world`, all_reduce: a communicator: remote process exited or there was a network error, in collective 2 (all_reduce Sum of 100 f32)
    ");
}

#[test]
fn unreceived_message_times_out() {
    let job = job();
    let found = errors(&job, 2, |group| {
        let tensor = ones(5)?;
        for last in [false, true] {
            let work = match group.rank() {
                0 => group.send(&tensor, 1),
                _ if last => return Err(until_failed(&*group)),
                _ => group.recv(&tensor, 0),
            };
            work.and_then(Work::wait)?;
        }
        Ok(())
    });
    insta::assert_snapshot!(found, @"
    rank 0, process group `world`, send: timed out after 1s in send of 5 f32 to rank 1: waited for rank 1
    rank 1, process group `world`, failure: aborted by rank 0: timed out after 1s in send of 5 f32 to rank 1: waited for rank 1
    ");
}

#[test]
fn missing_or_old_nccl_is_refused() {
    let job = job();
    let refused = || job.run(2, |group| sum(&*group, 10)).unwrap_err().to_string();
    job.nccl.set_version(21_703);
    let path = job.nccl.path.display().to_string();
    assert_says!(refused().replace(&path, "LIBRARY"), "trainer.process_group.type … 2.17.3 …");
    job.nccl.set_version(22_304);
    assert_says!(refused().replace(&path, "LIBRARY"), "several ranks are threads … NCCL 2.23.4 …");
    let other = job.nccl.path.with_file_name("libother.so");
    let hosts = fulgurite_transports::ThreadsGroup::create(2, SECOND).unwrap();
    let host = hosts.into_iter().next().unwrap();
    let parts = fulgurite_nccl::Parts { library: Some(other.clone()), ..job.parts(host) };
    let error = connect(parts).err().unwrap().to_string();
    assert_says!(
        error.replace(&other.display().to_string(), "LIBRARY"),
        r#"trainer.process_group.type is "nccl" … cannot be loaded: LIBRARY … NCCL 2.18 …"#
    );
}

#[test]
fn older_versions_of_nccl_are_taken() {
    for version in [22_403, 22_605, 22_703, 23_004] {
        let job = job();
        job.nccl.set_version(version);
        job.run(2, |group| {
            group.connect(&Device::Cpu)?;
            sum(&*group, 10)
        })
        .unwrap();
        job.check();
    }
}
