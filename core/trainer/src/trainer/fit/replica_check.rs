//! Comparing what replicas hold (`trainer.check_replicas_every_n_steps`).

use crate::fabric::{OptimizerState, SyncBuffers};
use crate::trainer::elastic::{lose, place_in_replica};
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_checkpoint::ShardTensor;
use fulgurite_engine::collective::{all_gather_object, broadcast_object};

/// Ranks of one place in their replicas, and digests of what each of them holds.
type Place<'a> = Vec<(usize, &'a [u64])>;

/// Warns if there is nothing to compare.
///
/// # Errors
/// If replicas hold different values: they train apart, or divide the optimizer's state.
pub(crate) fn check_key(session: &mut Session) -> Result<()> {
    let fabric = &session.setup.fabric;
    if session.setup.config.check_replicas_every_n_steps.is_none() {
        return Ok(());
    }
    if !fabric.runtime.update_ranks()?.are_all() {
        return Err(Error::Config(
            "`trainer.check_replicas_every_n_steps`: this strategy lets replicas train apart, so they differ; leave \
             the key out"
                .to_owned(),
        ));
    }
    let (_, replica_size) = place_in_replica(fabric.device_mesh());
    if replica_size == fabric.world_size() {
        if fabric.is_global_zero() {
            tracing::warn!(
                "`trainer.check_replicas_every_n_steps` compares nothing: no two ranks of strategy `{}` hold the same",
                session.setup.strategy
            );
        }
        return Ok(());
    }
    let wrong = |error| Error::Config(format!("`trainer.check_replicas_every_n_steps`: {error}"));
    held(session).map(drop).map_err(wrong)
}

/// Compares the bits of parameters, buffers and optimizer state between replicas, if the step asks
/// for it. Collective.
///
/// # Errors
/// On every rank, if replicas differ. In an elastic training a rank that differs from most others
/// is lost instead, and the others go on without it.
pub(crate) fn check_replicas_if_due(session: &mut Session) -> Result<()> {
    let Some(every_n_steps) = session.setup.config.check_replicas_every_n_steps else {
        return Ok(());
    };
    let step = session.progress.step();
    let (place, replica_size) = place_in_replica(session.setup.fabric.device_mesh());
    if !step.is_multiple_of(every_n_steps) || replica_size == session.setup.world_size() {
        return Ok(());
    }
    session.read_pending_step()?;
    let tensors = held(session)?;
    let digests = tensors.iter().map(ShardTensor::digest).collect::<Result<Vec<u64>>>()?;
    let world = session.setup.fabric.world();
    // One number of each rank, as long as all is well.
    let sum = digests.iter().fold(0u64, |sum, digest| sum.rotate_left(7) ^ digest);
    let sums: Vec<(Vec<usize>, u64)> = all_gather_object(&**world, &(place, sum))?;
    let differs = |(place, sum): &(Vec<usize>, u64)| {
        sums.iter().any(|(other, other_sum)| other == place && other_sum != sum)
    };
    let Some(first) = sums.iter().position(differs) else { return Ok(()) };
    let all = all_gather_object(&**world, &digests)?;
    let at_place = sums.iter().enumerate().filter(|(_, (place, _))| *place == sums[first].0);
    let ranks: Place<'_> = at_place.map(|(rank, _)| (rank, &*all[rank])).collect();
    let odd = odd_ranks(&ranks);
    let message = match session.setup.rank() == first {
        true => describe(&ranks, &odd, &tensors),
        false => String::new(),
    };
    let message = broadcast_object(&**world, &message, first)?;
    let before = match step - every_n_steps {
        0 => "Start again".to_owned(),
        equal => format!("Go on from a checkpoint of step {equal} or before"),
    };
    let message = format!(
        "after step {step} replicas differ: {message}. They compute the same, so a memory or a processor may be \
         faulty, or the program changes values on one rank alone. {before}"
    );
    if session.setup.config.elastic.enabled && !odd.is_empty() {
        if session.setup.fabric.is_global_zero() || odd.contains(&session.setup.rank()) {
            tracing::warn!("{message}. The training goes on without what these ranks hold");
        }
        lose(world, &odd)?;
    }
    Err(Error::other(message))
}

/// This rank's parts of its replica.
fn held(session: &mut Session) -> Result<Vec<ShardTensor>> {
    let optimizer = session.optimizers.as_mut().map(|all| all as &mut dyn OptimizerState);
    let fabric = &session.setup.fabric;
    let request = fabric.checkpoints().held_request("", optimizer, &(), serde_json::Value::Null)?;
    let own_buffers = session.setup.config.sync_buffers == SyncBuffers::None;
    let tree = fabric.module_tree()?;
    let compared = |tensor: &ShardTensor| {
        !(own_buffers && tree.persistent_buffers().any(|buffer| buffer.fqn() == tensor.name))
    };
    Ok(request.model.into_iter().filter(compared).chain(request.optimizer).collect())
}

/// Returns the ranks that differ from what more than half of the ranks hold; none without such a
/// majority.
fn odd_ranks(ranks: &Place<'_>) -> Vec<usize> {
    let count = |digests: &[u64]| ranks.iter().filter(|(_, other)| *other == digests).count();
    match ranks.iter().find(|(_, digests)| 2 * count(digests) > ranks.len()) {
        Some((_, most)) => {
            ranks.iter().filter(|(_, own)| own != most).map(|(rank, _)| *rank).collect()
        }
        None => Vec::new(),
    }
}

/// `rank 2 holds other values than ranks 0, 1 in 3 of 40 tensors, the first of which is ...`
fn describe(ranks: &Place<'_>, odd: &[usize], tensors: &[ShardTensor]) -> String {
    let differing: Vec<&ShardTensor> = tensors
        .iter()
        .enumerate()
        .filter(|(i, _)| ranks.iter().any(|(_, digests)| digests.get(*i) != ranks[0].1.get(*i)))
        .map(|(_, tensor)| tensor)
        .collect();
    let list = |ranks: Vec<usize>| match &ranks[..] {
        [rank] => format!("rank {rank}"),
        ranks => {
            format!("ranks {}", ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    };
    let others = ranks.iter().map(|(rank, _)| *rank).filter(|rank| !odd.contains(rank)).collect();
    let who = match odd {
        [] => format!("{} hold different values", list(others)),
        odd => {
            let verb = if odd.len() == 1 { "holds" } else { "hold" };
            format!("{} {verb} other values than {}", list(odd.to_vec()), list(others))
        }
    };
    let (count, all) = (differing.len(), tensors.len());
    let first = differing.first().map_or("", |tensor| &tensor.name);
    format!("{who} in {count} of {all} tensors, the first of which is `{first}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_ranks_decide_who_is_odd() {
        let (a, b, c) = ([1, 2], [1, 3], [4, 2]);
        let odd = |ranks: &[&[u64]]| odd_ranks(&ranks.iter().copied().enumerate().collect());
        assert_eq!(odd(&[&a, &b, &a]), [1]);
        assert_eq!(odd(&[&b, &a, &a, &c, &a]), [0, 3]);
        assert!(odd(&[&a, &b]).is_empty() && odd(&[&a, &b, &c]).is_empty());
        assert!(odd(&[&a, &a, &b, &b]).is_empty());
    }
}
