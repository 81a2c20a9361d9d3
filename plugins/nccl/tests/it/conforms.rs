//! The group keeps what the trait promises.

use candle_core::DType;
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

/// Integers go over the host's group, floating-point numbers over NCCL.
#[test]
fn tensors_of_host_and_device_go_their_own_ways() {
    let dtypes = Some(vec![DType::F32, DType::F64, DType::BF16, DType::F16]);
    let job = Job { dtypes, ..Job::new(7) };
    job.run(3, |group| conformance::process_group(&*group)).unwrap();
    job.check();
}
