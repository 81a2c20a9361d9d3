//! The group keeps what the trait promises.

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
fn a_rank_alone_conforms_over_nccl_too() {
    let job = Job::new(5);
    job.nccl.allow_alone();
    let host = Arc::new(Solo::new("world", 0));
    let group = fulgurite_nccl::connect_even_alone(job.parts(host)).unwrap();
    conformance::process_group(&*group).unwrap();
    // Its communicator, which a group of one rank has not otherwise.
    assert_eq!(job.nccl.live(), 1);
    drop(group);
    job.check();
}

/// Integers go over the host's group, floating-point numbers over NCCL.
#[test]
fn tensors_of_host_and_device_go_their_own_ways() {
    let dtypes = Some(vec![DType::F32, DType::F64, DType::BF16, DType::F16]);
    let job = Job { dtypes, ..Job::new(7) };
    job.run(3, |group| conformance::process_group(&*group)).unwrap();
    job.check();
}
