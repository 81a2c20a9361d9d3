//! The end of waits when a rank does not join a collective.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};

use super::suite::Suite;
use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, ReduceOp, Work};

/// Checks that [`ProcessGroup::abort`] ends all waits.
///
/// The last rank aborts. All other ranks' waits must end with its reason, and all later calls must
/// fail. Every rank calls it; the group is unusable afterwards.
///
/// # Errors
/// The broken promise.
pub fn process_group_abort(group: &dyn ProcessGroup) -> Result<()> {
    let suite = Suite { group, device: &Device::Cpu, from_group: false };
    let reason = "the roof is on fire";
    group.barrier()?.wait()?;
    let expect_reason = |what: &str, result: Result<()>| match result {
        Ok(()) => Err(suite.wrong(format!("{what} succeeded"))),
        Err(error) => suite.ensure(
            error.to_string().contains(reason),
            format!("{what} failed without the reason that abort was given: {error}"),
        ),
    };
    if group.rank() == group.size() - 1 {
        group.abort(reason);
    } else {
        let tensor = large(group)?;
        let first = group.all_reduce(&tensor, ReduceOp::Sum);
        let second = group.barrier();
        expect_reason("a pending all_reduce on an aborted group", first.and_then(Work::wait))?;
        expect_reason("a pending barrier on an aborted group", second.and_then(Work::wait))?;
    }
    let later = group.barrier().and_then(Work::wait);
    expect_reason("a later barrier on an aborted group", later)?;
    let partition = [(0..group.size()).collect()];
    expect_reason("a later split of an aborted group", group.split(&partition, "late").map(drop))?;
    // A group need not know its failure.
    match group.failure() {
        Some(error) => expect_reason("failure() of an aborted group", Err(error)),
        None => Ok(()),
    }
}

/// A tensor large enough that a transport may reduce it in place.
fn large(group: &dyn ProcessGroup) -> Result<Tensor> {
    let tensor = group.empty(1 << 16, DType::F32, &Device::Cpu)?;
    tensor.zero_set()?;
    Ok(tensor)
}

/// Checks that ranks time out if the last rank does not join a collective.
///
/// The error must name the last rank. Every rank calls it, on a group with the timeout `timeout`
/// (about a second); the group is unusable afterwards.
///
/// # Errors
/// The broken promise.
pub fn process_group_timeout(group: &dyn ProcessGroup, timeout: Duration) -> Result<()> {
    let suite = Suite { group, device: &Device::Cpu, from_group: false };
    group.barrier()?.wait()?;
    if group.size() == 1 {
        return Ok(());
    }
    let tensor = large(group)?;
    if group.rank() == group.size() - 1 {
        // The last rank joins after the others have timed out, and must not wait forever either.
        std::thread::sleep(3 * timeout);
        let late = group.all_reduce(&tensor, ReduceOp::Sum).and_then(Work::wait);
        return suite.ensure(late.is_err(), "a collective that the others gave up succeeded");
    }
    match group.all_reduce(&tensor, ReduceOp::Sum).and_then(Work::wait) {
        Ok(()) => Err(suite.wrong("all_reduce succeeded without all ranks")),
        Err(error) => {
            let missing = group.global_ranks()[group.size() - 1].to_string();
            let message = error.to_string();
            let names = message.split(|c: char| !c.is_ascii_digit()).any(|word| word == missing);
            suite.ensure(names, format!("a timeout does not name rank {missing}: {message}"))
        }
    }
}
