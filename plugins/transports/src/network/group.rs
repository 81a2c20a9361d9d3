//! Groups over a network.

use std::sync::Arc;

use fulgurite_engine::collective::{GroupContext, ProcessGroup};
use fulgurite_error::{Error, Result};

use super::lanes::Lanes;
use super::messenger::Messenger;
use super::shared::{Shared, World};
use super::wire::Network;
use super::worker::Worker;
use crate::engine::{Completion, Failure, Group, Identity, Medium, P2pTask, Queue};

/// Makes the group of all ranks of a job over `network`.
///
/// In a round of a reduction a rank holds up to `chunk_bytes` of the other ranks' data. Collective:
/// every rank of the job calls it, in the same order as other calls.
///
/// # Errors
/// If a rank cannot be reached within `context.timeout`. The error names the rank.
pub fn connect_world(
    network: Arc<dyn Network>,
    context: &GroupContext,
    chunk_bytes: usize,
) -> Result<Arc<dyn ProcessGroup>> {
    // A job may build several world groups. Every rank builds them in the same order.
    let counter = format!("network/{}/builds/{}", network.name(), context.rank);
    let build = context.store.add(&counter, 1)?;
    let identity = Identity {
        key: format!("network/{}/world{build}", network.name()),
        name: "world".to_owned(),
        rank: context.rank,
        global_ranks: (0..context.world_size).collect(),
    };
    let (store, timeout) = (context.store.clone(), context.timeout);
    let messenger = Messenger::new(store.clone())?;
    connect(&World { network, store, messenger, timeout, chunk_bytes }, identity)
}

fn connect(world: &World, identity: Identity) -> Result<Arc<dyn ProcessGroup>> {
    if let Some(alone) = identity.alone() {
        return Ok(alone);
    }
    let wanted = || match world.store.failure() {
        Some((rank, message)) => Err(Error::PeerFailed { rank, message }),
        None => world.store.give_up().map_or(Ok(()), Err),
    };
    let Identity { key, global_ranks, rank, .. } = &identity;
    let wire = world.network.clone().connect(key, global_ranks, *rank, world.timeout, &wanted)?;
    let shared = Arc::new(Shared::new(world, identity));
    let medium = Connections { lanes: Lanes::new(shared.clone()), shared: shared.clone() };
    Ok(Arc::new(Group::new(Arc::new(medium), Worker::new(shared, wire))?))
}

/// A group's state, and its lanes for messages.
struct Connections {
    shared: Arc<Shared>,
    lanes: Lanes,
}

impl Medium for Connections {
    type Worker = Worker;

    fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    fn queue(&self) -> &Arc<Queue> {
        &self.shared.queue
    }

    fn transport(&self) -> &str {
        self.shared.network.name()
    }

    fn message(&self, task: P2pTask) -> Result<Arc<Completion>> {
        self.lanes.push(task)
    }

    fn split(&self, identity: Identity) -> Result<Arc<dyn ProcessGroup>> {
        connect(&self.shared.world(), identity)
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(&Failure::Group(reason.to_owned()));
    }

    fn broken(&self) -> Option<Failure> {
        self.shared.broken()
    }

    fn broken_anywhere(&self) -> Option<Failure> {
        self.shared.broken_anywhere()
    }

    fn close(&self) {
        self.lanes.close();
    }
}
