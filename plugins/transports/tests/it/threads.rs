//! Groups of threads: the conformance suites, and behaviour that only shows within one process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{ProcessGroup, ReduceOp, Work};
use fulgurite_core::{Error, Result, conformance};
use fulgurite_test_message::assert_says;
use fulgurite_transports::{ThreadsGroup, run_ranks, run_ranks_with};

const LONG: Duration = Duration::from_secs(120);

/// Runs `f` for each rank of existing groups.
fn on_threads<T: Send>(
    groups: Vec<Arc<dyn ProcessGroup>>,
    f: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let handles: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn conforms(size: usize) {
    run_ranks(size, |group| conformance::process_group(&*group)).unwrap();
}

#[test]
fn one_thread_conforms() {
    conforms(1);
}

// checklist: torchtune: _broadcast_tensor
#[test]
fn two_threads_conform() {
    conforms(2);
}

#[test]
fn three_threads_conform() {
    conforms(3);
}

#[test]
fn four_threads_conform() {
    conforms(4);
}

#[test]
fn eight_threads_conform() {
    conforms(8);
}

#[test]
fn tiny_chunks_conform() {
    // A portion is one cache line, so every collective takes many phases.
    for size in [2, 3] {
        let groups = ThreadsGroup::create_with(size, LONG, 64).unwrap();
        let small = |group: Arc<dyn ProcessGroup>| -> Result<()> {
            for n in [1usize, 17, 1000] {
                let x = Tensor::arange(0f32, n as f32, &Device::Cpu)?;
                let y = (&x * (group.rank() + 1) as f64)?;
                group.all_reduce(&y, ReduceOp::Sum)?.wait()?;
                let factor = (1..=group.size()).sum::<usize>() as f64;
                assert_eq!(y.to_vec1::<f32>()?, (x * factor)?.to_vec1::<f32>()?);
                let z = y.zeros_like()?;
                let send = group.send(&y, (group.rank() + 1) % group.size())?;
                group.recv(&z, (group.rank() + group.size() - 1) % group.size())?.wait()?;
                send.wait()?;
                assert_eq!(y.to_vec1::<f32>()?, z.to_vec1::<f32>()?);
            }
            Ok(())
        };
        on_threads(groups, small).into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn abort_ends_all_waits() {
    for size in [1, 2, 4] {
        run_ranks(size, |group| conformance::process_group_abort(&*group)).unwrap();
    }
}

// checklist: Lightning: timeout
#[test]
fn missing_rank_is_named() {
    let timeout = Duration::from_secs(1);
    for size in [2, 3] {
        let groups = ThreadsGroup::create(size, timeout).unwrap();
        let suite =
            |group: Arc<dyn ProcessGroup>| conformance::process_group_timeout(&*group, timeout);
        on_threads(groups, suite).into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn timeout_names_last_collective_of_missing_rank() {
    let groups = ThreadsGroup::create(3, Duration::from_millis(300)).unwrap();
    let errors = Mutex::new(vec![]);
    let turn = std::sync::Barrier::new(3);
    on_threads(groups, |group| {
        group.barrier().unwrap().wait().unwrap();
        if group.rank() == 0 {
            let x = Tensor::zeros(8, DType::BF16, &Device::Cpu).unwrap();
            let error = group.all_reduce(&x, ReduceOp::Max).unwrap().wait().unwrap_err();
            errors.lock().unwrap().push(error.to_string());
        }
        turn.wait();
    });
    assert_says!(
        errors.lock().unwrap()[0],
        "rank 0, process group `world`, all_reduce: timed out … rank 1 (last seen in barrier, \
         its collective 1), rank 2 (last seen in barrier, its collective 1)"
    );
}

/// Ranks 0 and 1 wait for 2 and 3 in one dimension of a mesh, rank 2 for rank 3 in the other
/// dimension.
#[test]
fn timeout_names_the_rank_to_blame() {
    let groups = ThreadsGroup::create(4, Duration::from_secs(2)).unwrap();
    let turn = std::sync::Barrier::new(4);
    let errors = on_threads(groups, |world| {
        let columns = world.split(&[vec![0, 2], vec![1, 3]], "columns").unwrap();
        let rows = world.split(&[vec![0, 1], vec![2, 3]], "rows").unwrap();
        let waits = match world.rank() {
            0 | 1 => Some(columns.barrier()),
            2 => Some(rows.barrier()),
            _ => None,
        };
        let error = waits.map(|waits| waits.unwrap().wait().unwrap_err().to_string());
        turn.wait();
        error.unwrap_or_default()
    });
    insta::assert_snapshot!(errors.join("\n"), @r"
    rank 0, process group `columns`, barrier: timed out after 2s: in barrier (collective 1 of this group), waited for rank 2 (which has started no collective of this group), which waits for rank 3, which waits for nobody
    rank 1, process group `columns`, barrier: timed out after 2s: in barrier (collective 1 of this group), waited for rank 3 (which has started no collective of this group)
    rank 2, process group `rows`, barrier: timed out after 2s: in barrier (collective 1 of this group), waited for rank 3 (which has started no collective of this group)
    ");
}

#[test]
fn mismatched_collectives_are_detected() {
    let errors = |call: fn(&dyn ProcessGroup) -> Result<()>| {
        let groups = ThreadsGroup::create(2, LONG).unwrap();
        on_threads(groups, |group| call(&*group).unwrap_err().to_string()).join("\n")
    };
    let shapes = errors(|group| {
        let x = Tensor::zeros(10 + group.rank(), DType::F32, &Device::Cpu)?;
        group.all_reduce(&x, ReduceOp::Sum)?.wait()
    });
    insta::assert_snapshot!(shapes, @r"
    rank 0, process group `world`, all_reduce: the ranks differ in collective 1 of this group: rank 0: all_reduce of 40 bytes of f32; rank 1: all_reduce of 44 bytes of f32. All ranks must call the same collectives in the same order
    rank 1, process group `world`, all_reduce: the ranks differ in collective 1 of this group: rank 0: all_reduce of 40 bytes of f32; rank 1: all_reduce of 44 bytes of f32. All ranks must call the same collectives in the same order
    ");
    let kinds = errors(|group| {
        let x = Tensor::zeros(10, DType::F32, &Device::Cpu)?;
        group.barrier()?.wait()?;
        if group.rank() == 0 { group.broadcast(&x, 0)?.wait() } else { group.barrier()?.wait() }
    });
    insta::assert_snapshot!(kinds, @r"
    rank 0, process group `world`, broadcast: the ranks differ in collective 2 of this group: rank 0: broadcast of 40 bytes of f32; rank 1: barrier. All ranks must call the same collectives in the same order
    rank 1, process group `world`, barrier: the ranks differ in collective 2 of this group: rank 0: broadcast of 40 bytes of f32; rank 1: barrier. All ranks must call the same collectives in the same order
    ");
    let details = errors(|group| {
        let x = Tensor::zeros(10, DType::F32, &Device::Cpu)?;
        group.broadcast(&x, group.rank())?.wait()
    });
    insta::assert_snapshot!(details, @r"
    rank 0, process group `world`, broadcast: the ranks differ in collective 1 of this group: all ranks called broadcast of 40 bytes of f32, but with different arguments (counts, operation, source or partition). All ranks must call the same collectives in the same order
    rank 1, process group `world`, broadcast: the ranks differ in collective 1 of this group: all ranks called broadcast of 40 bytes of f32, but with different arguments (counts, operation, source or partition). All ranks must call the same collectives in the same order
    ");
    let partitions = errors(|group| {
        let name = if group.rank() == 0 { "left" } else { "right" };
        group.split(&[vec![0, 1]], name).map(drop)
    });
    insta::assert_snapshot!(partitions, @r"
    rank 0, process group `world`, split: the ranks differ in collective 1 of this group: all ranks called split, but with different arguments (counts, operation, source or partition). All ranks must call the same collectives in the same order
    rank 1, process group `world`, split: the ranks differ in collective 1 of this group: all ranks called split, but with different arguments (counts, operation, source or partition). All ranks must call the same collectives in the same order
    ");
}

#[test]
fn mismatched_messages_fail() {
    let groups = ThreadsGroup::create(2, LONG).unwrap();
    let results = on_threads(groups, |group| {
        let x = Tensor::zeros(10 + group.rank(), DType::F32, &Device::Cpu).unwrap();
        if group.rank() == 0 {
            group.send(&x, 1).unwrap().wait().unwrap();
            group.barrier().and_then(|work| work.wait()).unwrap_err().to_string()
        } else {
            group.recv(&x, 0).unwrap().wait().unwrap_err().to_string()
        }
    });
    insta::assert_snapshot!(results.join("\n"), @r"
    rank 0, process group `world`, barrier: aborted by rank 1: rank 0 sent 40 bytes of f32, and this rank receives 44 bytes of f32; send and recv must match in pairs, in order
    rank 1, process group `world`, recv: rank 0 sent 40 bytes of f32, and this rank receives 44 bytes of f32; send and recv must match in pairs, in order
    ");
}

#[test]
fn misuse_is_explained() {
    let groups = ThreadsGroup::create(2, LONG).unwrap();
    let f32s = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
    let group = &groups[1];
    let messages = [
        group.broadcast(&f32s(1), 2).unwrap_err().to_string(),
        group.send(&f32s(1), 1).unwrap_err().to_string(),
        group.all_to_all(&f32s(3), &f32s(3)).unwrap_err().to_string(),
        group.split(&[vec![1]], "x").map(drop).unwrap_err().to_string(),
        group
            .all_reduce(&Tensor::zeros(1, DType::I16, &Device::Cpu).unwrap(), ReduceOp::Sum)
            .unwrap_err()
            .to_string(),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r"
    rank 1, process group `world`, broadcast: there is no rank 2 in a group of 2; group ranks are 0..2
    rank 1, process group `world`, send: group rank 1 is this rank itself; name another one
    rank 1, process group `world`, all_to_all: input and output must have the same number of elements, a multiple of the group's size 2; the input has 3, the output 3
    rank 1, process group `world`, split: every group rank must be in exactly one set of the partition; rank 0 is in 0
    rank 1, process group `world`, all_reduce: the tensor is of dtype i16, which no collective carries; convert it to one of f32, f64, bf16, f16, u8, u32, i32, i64
    ");
}

// checklist: PyTorch: _assert_in_training_states
#[test]
fn first_error_ends_all_ranks() {
    let result = run_ranks(4, |group| {
        let half = group.split(&[vec![0, 1], vec![2, 3]], "half")?;
        if group.rank() == 2 {
            return Err(Error::other("out of coffee"));
        }
        // The other ranks wait, some in a group without the failed rank.
        if group.rank() < 2 { group.barrier()?.wait() } else { half.barrier()?.wait() }
    });
    assert_eq!(result.unwrap_err().to_string(), "out of coffee");
}

#[test]
fn panic_ends_all_ranks() {
    let seen = Mutex::new(vec![]);
    let result = run_ranks(3, |group| {
        if group.rank() == 1 {
            panic!("rank of little faith");
        }
        let result = group.barrier()?.wait();
        seen.lock().unwrap().push(result.as_ref().map_err(Error::to_string).err());
        result
    });
    assert_says!(result.unwrap_err(), "rank 1 panicked: rank of little faith");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 2);
    for error in seen {
        assert_eq!(error.unwrap(), "rank 1 failed: rank 1 panicked: rank of little faith");
    }
}

#[test]
fn leaving_rank_is_reported() {
    let groups = ThreadsGroup::create(2, LONG).unwrap();
    let results = on_threads(groups, |group| {
        group.barrier().unwrap().wait().unwrap();
        if group.rank() == 1 {
            return None;
        }
        Some(group.barrier().unwrap().wait().unwrap_err().to_string())
    });
    assert_says!(results[0].as_ref().unwrap(), "rank 1 failed: it left … `world` … barrier …");
}

// checklist: PyTorch: _no_dispatch_record_stream
#[test]
fn dropped_group_finishes_started_collectives() {
    let results = run_ranks(3, |group| {
        let x = Tensor::ones(100_000, DType::F32, &Device::Cpu)?;
        for _ in 0..3 {
            drop(group.all_reduce(&x, ReduceOp::Sum)?);
        }
        drop(group);
        Ok(x.to_vec1::<f32>()?[99_999])
    });
    // `run_ranks` holds a handle too, so the tensors are read while the collectives run. This only
    // checks that no rank hangs. The values are checked with separate handles:
    assert_eq!(results.unwrap().len(), 3);
    let groups = ThreadsGroup::create(3, LONG).unwrap();
    let sums = on_threads(groups, |group| {
        let x = Tensor::ones(100_000, DType::F32, &Device::Cpu).unwrap();
        drop(group.all_reduce(&x, ReduceOp::Sum).unwrap());
        drop(group.all_reduce(&x, ReduceOp::Sum).unwrap());
        drop(group);
        x.to_vec1::<f32>().unwrap()[99_999]
    });
    assert_eq!(sums, [9.0; 3]);
}

#[test]
fn unread_error_comes_with_the_next_call() {
    let groups = ThreadsGroup::create(2, Duration::from_millis(200)).unwrap();
    let group = &groups[0];
    drop(group.barrier().unwrap());
    let error = loop {
        // Until the timeout, calls are accepted, and end with the timeout too.
        if let Err(error) = group.barrier().and_then(|work| work.wait()) {
            break error.to_string();
        }
    };
    assert!(error.contains("timed out"), "{error}");
    assert!(group.barrier().unwrap_err().to_string().contains("timed out"));
    assert!(groups[1].barrier().unwrap_err().to_string().contains("aborted by rank 0"));
}

/// A tensor under way may be a view of a buffer that the rank computes with elsewhere.
#[test]
fn no_tensor_is_locked_during_a_wait() {
    let steps = AtomicUsize::new(0);
    run_ranks(2, |group| {
        let buffer = Tensor::ones(2000, DType::F32, &Device::Cpu)?;
        let (view, other) = (buffer.narrow(0, 0, 1000)?, buffer.narrow(0, 1000, 1000)?);
        if group.rank() == 0 {
            let work = group.all_reduce(&view, ReduceOp::Sum)?;
            // Rank 1 starts its part only after this rank has changed the buffer under the
            // collective.
            storage::with_host_mut(&other, |x: &mut [f32]| x.fill(5.0))?;
            steps.fetch_add(1, Ordering::SeqCst);
            work.wait()?;
        } else {
            while steps.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            group.all_reduce(&view, ReduceOp::Sum)?.wait()?;
        }
        assert_eq!(view.to_vec1::<f32>()?, [2.0; 1000]);
        let rest = if group.rank() == 0 { 5.0 } else { 1.0 };
        assert_eq!(other.to_vec1::<f32>()?, [rest; 1000]);
        Ok(())
    })
    .unwrap();
}

/// Another rank may still access the tensors of a collective that failed on this rank.
#[cfg(target_os = "linux")]
#[test]
fn memory_of_failed_collective_is_not_reused() {
    let groups = ThreadsGroup::create(2, LONG).unwrap();
    let place = |x: &Tensor| storage::with_host(x, |x: &[f32]| x.as_ptr().addr()).unwrap();
    let started = AtomicUsize::new(0);
    on_threads(groups, |group| {
        if group.rank() == 0 {
            let make = || group.empty(1 << 20, DType::F32, &Device::Cpu).unwrap();
            let x = make();
            let at = place(&x);
            let work = group.all_reduce(&x, ReduceOp::Sum).unwrap();
            drop(x);
            started.store(1, Ordering::SeqCst);
            work.wait().unwrap_err();
            assert_ne!(place(&make()), at);
        } else {
            while started.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            group.abort("no");
        }
    });
}

/// From 16 KiB on, tensors made by a group are not copied through slots.
#[test]
fn in_place_all_to_all_works_for_all_sizes() {
    for n in [2, 1 << 16] {
        run_ranks(2, |group| {
            let x = group.empty(n, DType::F32, &Device::Cpu)?;
            storage::with_host_mut(&x, |x: &mut [f32]| {
                let rank = group.rank() as f32;
                x[..n / 2].fill(10. * rank);
                x[n / 2..].fill(10. * rank + 1.);
            })?;
            group.all_to_all(&x, &x)?.wait()?;
            let parts = x.to_vec1::<f32>()?;
            let rank = group.rank() as f32;
            assert_eq!(parts, [vec![rank; n / 2], vec![10. + rank; n / 2]].concat());
            Ok(())
        })
        .unwrap();
    }
}

/// The tensor's memory goes away after the call: an error on all ranks, not a hang.
#[test]
fn tensor_without_memory_fails_on_all_ranks() {
    let groups = ThreadsGroup::create(2, LONG).unwrap();
    let errors = on_threads(groups, |group| {
        let x = group.empty(10_000, DType::F32, &Device::Cpu).unwrap();
        if group.rank() == 1 {
            storage::release(&x).unwrap();
        }
        // Rank 0 may learn of the failure at the start of its call.
        let done = group.all_reduce(&x, ReduceOp::Sum).and_then(Work::wait);
        done.unwrap_err().to_string()
    });
    insta::assert_snapshot!(errors.join("\n"), @r"
    rank 0, process group `world`, all_reduce: aborted by rank 1: host access to a tensor whose memory is released
    rank 1, process group `world`, all_reduce: host access to a tensor whose memory is released
    ");
}

#[test]
fn results_come_in_rank_order() {
    let ranks = run_ranks_with(4, LONG, |group| Ok(group.rank())).unwrap();
    assert_eq!(ranks, [0, 1, 2, 3]);
}
