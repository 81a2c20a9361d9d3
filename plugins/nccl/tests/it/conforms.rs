//! The process group conforms to the trait.

use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::collective::Solo;
use fulgurite_core::conformance;

use crate::ranks::Job;

#[test]
fn groups_of_one_to_four_conform() {
    for ranks in 1..=4 {
        let job = Job::new(ranks as u64);
        job.run(ranks, |group| conformance::process_group(&*group)).unwrap();
        job.check();
    }
}

#[test]
fn single_rank_over_nccl_conforms() {
    let job = Job::new(5);
    job.nccl.allow_alone();
    let host = Arc::new(Solo::new("world", 0));
    let group = fulgurite_nccl::connect_even_alone(job.parts(host)).unwrap();
    conformance::process_group(&*group).unwrap();
    // A group of one rank normally lacks a communicator.
    assert_eq!(job.nccl.live(), 1);
    drop(group);
    job.check();
}

/// Integers use the host's group, floating-point numbers NCCL.
#[test]
fn host_and_device_tensors_are_routed_apart() {
    let dtypes = Some(vec![DType::F32, DType::F64, DType::BF16, DType::F16]);
    let job = Job { dtypes, ..Job::new(7) };
    job.run(3, |group| conformance::process_group(&*group)).unwrap();
    job.check();
}
