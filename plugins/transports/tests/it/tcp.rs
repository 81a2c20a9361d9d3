//! Groups of real processes over TCP.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{GroupContext, ProcessGroup, ProcessGroupConfig, ReduceOp};
use fulgurite_core::launch::Store as _;
use fulgurite_core::{Error, Result, conformance};
use fulgurite_transports::Tcp;

use crate::abandonment;
use crate::job::{Job, RESULT, run_as_rank};

/// One rank of a scenario, if this process was started as one.
#[test]
fn a_rank() {
    let timeout_secs = |scenario: &str| match scenario {
        "timeout" | "chunks" => 1,
        "chain" => 3,
        _ => 60,
    };
    run_as_rank(timeout_secs, run_scenario);
}

fn start(size: usize, scenario: &str) -> Job {
    Job::start("tcp::a_rank", size, scenario)
}

fn run_scenario(scenario: &str, context: &GroupContext) -> Result<()> {
    let config = match scenario {
        "small" => Tcp { chunk_bytes: 64 << 10, ..Tcp::default() },
        "chunks" => Tcp { chunk_bytes: (1 + context.rank) << 20, ..Tcp::default() },
        "ports" => Tcp { ports: Some([28650, 28670]), ..Tcp::default() },
        _ => Tcp::default(),
    };
    let group = config.build(context)?;
    match scenario {
        "default" | "small" | "ports" => {
            conformance::process_group(&*group)?;
            // A second world group on the same store.
            let again = config.build(context)?;
            all_reduce_once(&*again)?;
            all_reduce_once(&*group)
        }
        "abort" => conformance::process_group_abort(&*group),
        "abandon" => (0..8).try_for_each(|seed| abandonment::rounds(group.clone(), seed)),
        "timeout" => conformance::process_group_timeout(&*group, context.timeout),
        "strangers" => {
            let contact = context.store.get("network/tcp/contacts1/1", context.timeout)?;
            let contact: serde_json::Value = serde_json::from_slice(&contact).unwrap();
            let address = contact["address"].as_str().unwrap().to_owned();
            let group: Arc<dyn ProcessGroup> = group;
            if context.rank == 0 {
                // Some say nothing, some guess, and there are more than the listener greets at
                // once. So ranks give up waiting for an answer, and call again, before they are
                // greeted.
                let mut strangers = Vec::new();
                for number in 0..100 {
                    let mut stranger = TcpStream::connect(&address).unwrap();
                    if number % 5 == 0 {
                        let _ = stranger.write_all(b"FulgTcp1 may I come in? I am rank 2.");
                    }
                    strangers.push(stranger);
                }
            }
            let part = group.split(&[(0..context.world_size).collect()], "beside strangers")?;
            all_reduce_once(&*part)
        }
        "killed" => {
            for step in 0.. {
                all_reduce_once(&*group)?;
                if step == 20 {
                    context.store.set(&format!("running{}", context.rank), b"")?;
                }
            }
            Ok(())
        }
        "fails" => {
            all_reduce_once(&*group)?;
            if context.rank == 1 {
                context.store.report_failure("the disk is full")?;
                println!("{RESULT}ok");
                std::process::exit(0);
            }
            all_reduce_once(&*group)
        }
        "waits" => {
            context.store.set(&format!("running{}", context.rank), b"")?;
            if context.rank == 1 {
                context.store.get("rank 1 goes on", Duration::from_secs(60))?;
            }
            all_reduce_once(&*group)
        }
        "differ" => {
            let x = Tensor::zeros(100, DType::F32, &Device::Cpu)?;
            match context.rank {
                1 => group.all_gather_into(vec![])?.wait(),
                _ => group.all_reduce(&x, ReduceOp::Sum)?.wait(),
            }
        }
        "messages differ" => {
            let x = Tensor::zeros(100 + context.rank, DType::F32, &Device::Cpu)?;
            match context.rank {
                0 => group.send(&x, 1)?.wait().and_then(|()| group.barrier()?.wait()),
                _ => group.recv(&x, 0)?.wait(),
            }
        }
        "chain" => {
            // Rank 0 waits for rank 1, which waits for rank 2 in another group. Rank 2 sleeps.
            let pairs = group.split(&[vec![0], vec![1, 2]], "pair")?;
            match context.rank {
                0 => {
                    let result = group.barrier()?.wait();
                    context.store.set("given up", b"")?;
                    result
                }
                1 => {
                    // It may give up before rank 0 does, and stays until rank 0 has.
                    let result = pairs.barrier()?.wait();
                    context.store.get("end", Duration::from_secs(60))?;
                    result
                }
                _ => {
                    context.store.get("end", Duration::from_secs(60))?;
                    Ok(())
                }
            }
        }
        other => Err(Error::other(format!("no scenario {other}"))),
    }
}

fn all_reduce_once(group: &dyn ProcessGroup) -> Result<()> {
    let x = Tensor::ones(10_000, DType::F32, &Device::Cpu)?;
    group.all_reduce(&x, ReduceOp::Sum)?.wait()?;
    assert_eq!(x.to_vec1::<f32>()?, vec![group.size() as f32; 10_000]);
    Ok(())
}

#[test]
fn two_processes_conform() {
    start(2, "default").expect_ok();
}

#[test]
fn three_processes_conform() {
    start(3, "small").expect_ok();
}

#[test]
fn four_processes_conform() {
    start(4, "ports").expect_ok();
}

#[test]
fn processes_leave_a_step_together() {
    start(4, "abandon").expect_ok();
}

#[test]
fn abort_reaches_all_processes() {
    start(3, "abort").expect_ok();
}

#[test]
fn missing_process_is_named() {
    start(3, "timeout").expect_ok();
}

#[test]
fn strangers_cannot_enter_or_block_a_group() {
    start(2, "strangers").expect_ok();
}

#[test]
fn killed_process_ends_the_others() {
    let mut job = start(3, "killed");
    (0..3).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.children[2].kill().unwrap();
    let results = job.results();
    assert_eq!(results[2], None);
    for result in &results[..2] {
        let result = result.as_deref().unwrap();
        assert!(
            result.starts_with("rank 2 failed: its connection (127.0.0.1) ended ("),
            "{result}"
        );
        assert!(result.contains("in all_reduce of 40000 bytes of f32"), "{result}");
    }
}

/// The launcher sees how a rank ended, and reports it in the store.
#[test]
fn error_of_killed_process_comes_from_store() {
    let mut job = start(3, "killed");
    (0..3).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.children[2].kill().unwrap();
    job.children[2].wait().unwrap();
    job.store().report_failure("killed by signal 9").unwrap();
    let results = job.results();
    for result in &results[..2] {
        assert_eq!(result.as_deref(), Some("rank 2 failed: killed by signal 9"));
    }
}

#[test]
fn reported_failure_is_every_ranks_error() {
    let results = start(3, "fails").results();
    assert_eq!(results[0].as_deref(), Some("rank 1 failed: the disk is full"));
    assert_eq!(results[2].as_deref(), Some("rank 1 failed: the disk is full"));
}

#[test]
fn interrupted_rank_ends_all_ranks() {
    let job = start(2, "waits");
    (0..2).for_each(|rank| job.wait_for(&format!("running{rank}")));
    job.store().set("asked0", b"").unwrap();
    let results = job.results();
    assert_eq!(results[0].as_deref(), Some("interrupted"));
    assert_eq!(results[1].as_deref(), Some("rank 0 failed: it was asked to end"));
}

#[test]
fn mismatched_collectives_are_detected() {
    let results = start(2, "differ").results();
    let told = "the ranks differ in collective 1 of this group: rank ";
    for result in results {
        let result = result.unwrap();
        assert!(result.contains(told), "{result}");
        assert!(result.contains("all_reduce of 400 bytes of f32"), "{result}");
        assert!(result.contains("all_gather_into"), "{result}");
    }
}

#[test]
fn pieces_of_different_sizes_are_refused() {
    let results = start(2, "chunks").results();
    let told = "trainer.process_group.chunk_bytes is 2097152 on rank 1 and 1048576 on rank 0; it must be the same on all";
    assert!(results[1].as_deref().unwrap().contains(told), "{results:?}");
}

#[test]
fn messages_of_different_lengths_are_refused() {
    for result in start(2, "messages differ").results() {
        let result = result.unwrap();
        let told = "rank 0 sends 400 bytes of f32, but 404 bytes of f32 are received";
        assert!(result.contains(told), "{result}");
    }
}

#[test]
fn wait_chain_of_missing_rank_is_named() {
    let job = start(3, "chain");
    job.wait_for("given up");
    job.store().set("end", b"").unwrap();
    let results = job.results();
    let first = results[0].as_deref().unwrap();
    let told = "in barrier (collective 2 of this group), waited for rank 1 (127.0.0.1), which waits for \
                rank 2";
    assert!(first.contains(told), "{first}");
}
