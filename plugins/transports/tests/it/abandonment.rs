//! Ranks that abandon a step together.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_core::collective::{Abandonment, Collective, ProcessGroup, ReduceOp};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::{Error, Result, conformance};
use fulgurite_transports::run_ranks;

/// Sums the rank numbers, in a collective that may overlap.
fn sum(
    group: &dyn ProcessGroup,
    overlap: bool,
) -> Result<(Tensor, fulgurite_core::collective::Work)> {
    let own = Tensor::new(&[group.rank() as f64 + 1.0], &Device::Cpu)?;
    let work = group.start(Collective::all_reduce(&own, ReduceOp::Sum), overlap)?;
    Ok((own, work))
}

fn check(group: &dyn ProcessGroup, summed: &Tensor) -> Result<()> {
    let size = group.size() as f64;
    assert_eq!(summed.to_vec1::<f64>()?, [size * (size + 1.0) / 2.0]);
    Ok(())
}

/// Runs collectives in groups that cross each other, equal on all ranks. `at` is the call at which
/// this rank gives up.
fn step(groups: &[Arc<dyn ProcessGroup>], plan: &Stream, at: Option<usize>) -> Result<()> {
    let mut under_way = Vec::new();
    for call in 0..24 {
        if at == Some(call) {
            return Err(Error::other("no memory"));
        }
        let word = plan.word(call as u64) as usize;
        let group = &groups[word % groups.len()];
        let (summed, work) = sum(&**group, word & 64 != 0)?;
        under_way.push((group, summed, work));
        // In another order than they were started.
        if word & 128 != 0 {
            let (group, summed, work) = under_way.swap_remove((word >> 8) % under_way.len());
            work.wait()?;
            check(&**group, &summed)?;
        }
    }
    for (group, summed, work) in under_way {
        work.wait()?;
        check(&**group, &summed)?;
    }
    // A rank that passes this barrier knows that all ranks do.
    groups[0].run(Collective::Barrier)
}

/// Four ranks give up at random points, three times, and continue together.
pub(crate) fn rounds(world: Arc<dyn ProcessGroup>, seed: u64) -> Result<()> {
    let steps = Abandonment::new(world.rank());
    let world = steps.watch(world)?;
    let rows = world.split(&[vec![0, 1], vec![2, 3]], "rows")?;
    let columns = world.split(&[vec![0, 2], vec![1, 3]], "columns")?;
    let groups = [world.clone(), rows, columns];
    let seen = |round: u64| Stream::new(seed, Purpose::Init, "plan").child(round);
    for round in 0..4 {
        let plan = seen(round);
        // One or two ranks, at any call; in the last round, no rank gives up.
        let gives_up = |nth: u64| {
            let rank = plan.word(100 + nth) as usize % 4;
            let at = plan.word(200 + nth) as usize % 24;
            (rank == world.rank() && round < 3).then_some(at)
        };
        let at = gives_up(0).or(gives_up(1));
        match step(&groups, &plan, at) {
            Ok(()) => assert!(round == 3 || !steps.is_abandoned()),
            Err(error) if at.is_some() && !steps.is_abandoned() => {
                assert_eq!(error.to_string(), "no memory");
                steps.abandon();
            }
            Err(_) => assert!(steps.is_abandoned()),
        }
        if round == 3 {
            continue;
        }
        let by = steps.resume()?;
        let culprits = [plan.word(100) as usize % 4, plan.word(101) as usize % 4];
        assert!(culprits.contains(&by), "rank {by} of {culprits:?}, seed {seed}");
        assert!(!steps.is_abandoned());
    }
    Ok(())
}

#[test]
fn all_ranks_abandon_and_resume_together() {
    for seed in 0..150 {
        run_ranks(4, |world| rounds(world, seed)).unwrap();
    }
}

#[test]
fn watched_groups_conform() {
    run_ranks(3, |world| {
        conformance::process_group(&*Abandonment::new(world.rank()).watch(world)?)
    })
    .unwrap();
}

#[test]
fn rank_that_ends_instead_is_an_error() {
    let error = run_ranks(2, |world| {
        let rank = world.rank();
        let steps = Abandonment::new(rank);
        let group = steps.watch(world)?;
        if rank == 1 {
            return Err(Error::other("rank 1 ends"));
        }
        steps.abandon();
        let heard = steps.resume().map(drop);
        drop(group);
        heard
    })
    .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("rank 1 ends") || message.contains("could not agree"), "{message}");
}
