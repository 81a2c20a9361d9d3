//! Times at which collectives run on their streams.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::accelerator::TimeStamp;
use fulgurite_core::collective::{Collective, ProcessGroup, ReduceOp, Timing};

use crate::ranks::Job;

type Told = (String, Arc<dyn TimeStamp>, Arc<dyn TimeStamp>);

fn numbers() -> Result<Tensor> {
    Ok(Tensor::ones(100, DType::F32, &Device::Cpu)?)
}

/// Returns the reports of collectives that begin under a [`Timing`], and of messages begun at their
/// later wait.
fn told(group: &dyn ProcessGroup) -> Result<Vec<Told>> {
    let told = Arc::<Mutex<Vec<Told>>>::default();
    let number = || told.lock().unwrap().len();
    let next = (group.rank() + 1) % group.size();
    let (sent, received) = (numbers()?, numbers()?);
    group.run(Collective::all_reduce(&numbers()?, ReduceOp::Sum))?;

    let tell = told.clone();
    let timing = Timing::enter(move |stream, from, to| {
        tell.lock().unwrap().push((stream.to_owned(), from, to));
    });
    let (first, second) = (numbers()?, numbers()?);
    let one = group.start(Collective::all_reduce(&first, ReduceOp::Sum), true)?;
    let other = group.start(Collective::broadcast(&second, 0), true)?;
    assert_eq!(number(), 2, "they are on their stream");
    let send = group.send(&sent, next)?;
    let recv = group.recv(&received, next)?;
    drop(timing);

    one.wait()?;
    other.wait()?;
    group.run(Collective::all_reduce(&numbers()?, ReduceOp::Sum))?;
    send.wait()?;
    recv.wait()?;
    Ok(std::mem::take(&mut *told.lock().unwrap()))
}

#[test]
fn timings_cover_collectives_and_messages() {
    for seed in 0..20 {
        let job = Job::new(seed);
        for (rank, told) in job.run(2, |group| told(&*group)).unwrap().into_iter().enumerate() {
            let streams: Vec<_> = told.iter().map(|(stream, ..)| stream.as_str()).collect();
            let pair = format!("world, with rank {}", 1 - rank);
            assert_eq!(streams, ["world", "world", &pair, &pair]);
            for (_, from, to) in &told {
                assert!(to.micros_since(&**from).unwrap() >= 0.0);
                assert!(to.is_past().unwrap());
            }
            let [(_, _, first), (_, second, _), ..] = &told[..] else { unreachable!() };
            assert!(second.micros_since(&**first).unwrap() >= 0.0, "one at a time on a stream");
        }
        job.check();
    }
}
