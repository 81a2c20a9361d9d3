//! The stores that agents host for the ranks of an elastic job.

use std::net::{IpAddr, Ipv4Addr};

use super::plan::{Generation, Stop};
use super::ranks::Start;
use crate::elastic::Invitation;
use crate::link::{GOING_ON_KEY, GoingOn, WORK_KEY};
use crate::{Error, Result};
use fulgurite_store::{JobKey, LostRankPolicy, StoreServer};

/// The store of a node's ranks. Programs that are not elastic do not use it.
#[derive(Default)]
pub(super) struct Stores {
    /// The failure in it ends the attempt for the ranks, or invites them to the next generation.
    own: Option<StoreServer>,
    /// Stores of generations whose ranks may not have read yet that they are over.
    earlier: Vec<StoreServer>,
    going_on: Option<GoingOn>,
}

impl Stores {
    /// Hosts the store of a node's ranks.
    pub(super) fn new(start: &Start<'_>) -> Result<Self> {
        let devices = start.attempt.nodes[start.place].devices;
        let (key, localhost) = (start.link(0).own_key(start.secret), Ipv4Addr::LOCALHOST.into());
        let own = Some(bind(localhost, key, devices)?);
        let generation = start.attempt.generation.as_ref();
        let going_on = generation.map(|generation| generation.going_on.clone());
        Ok(Self { own, earlier: Vec::new(), going_on })
    }

    /// The port of this node's store.
    pub(super) fn own_port(&self) -> u16 {
        self.own.as_ref().map_or(0, |own| own.address().port())
    }

    /// How the job goes on, once a rank has told it.
    pub(super) fn going_on(&mut self) -> Option<&GoingOn> {
        let told = |key| self.own.as_ref().and_then(|own| own.value(key));
        if self.going_on.is_none() {
            self.going_on = told(GOING_ON_KEY).and_then(|told| serde_json::from_slice(&told).ok());
        }
        if let Some(work) = told(WORK_KEY)
            && let Some(going_on) = &mut self.going_on
        {
            going_on.work = String::from_utf8(work).ok();
        }
        self.going_on.as_ref()
    }

    pub(super) fn has_joined(&self, local_rank: usize) -> bool {
        self.own.as_ref().is_some_and(|own| own.has_joined(local_rank))
    }

    /// Whether a rank has announced that it leaves.
    pub(super) fn has_left(&self, local_rank: usize) -> bool {
        self.own.as_ref().is_some_and(|own| own.has_left(local_rank))
    }

    /// Tells this node's ranks that the job has failed.
    pub(super) fn fail(&self, failure: &Stop) {
        if let Some(own) = &self.own {
            own.fail(failure.rank.unwrap_or(0), &failure.message);
        }
    }

    /// Closes the stores of earlier generations, once all of this node's ranks have left them.
    pub(super) fn forget_earlier(&mut self) {
        self.earlier.clear();
    }

    /// Invites the ranks of the generation before to this one.
    pub(super) fn follow(&mut self, before: Self, start: &Start<'_>, generation: &Generation) {
        let attempt = start.attempt;
        let nodes = attempt.nodes.iter().map(|node| node.devices).collect();
        let next = (generation.number, attempt.store.clone());
        let mut invitation =
            Invitation::new(next, nodes, &generation.members, generation.world_size_before);
        invitation.agent = Some((attempt.number, self.own_port()));
        if let Some(own) = &before.own {
            own.fail(generation.cause.rank(), &invitation.message(&generation.cause.reason()));
        }
        self.earlier = before.earlier;
        self.earlier.extend(before.own);
    }
}

/// Hosts a store for `ranks` ranks on any free port.
pub(super) fn bind(ip: IpAddr, key: JobKey, ranks: usize) -> Result<StoreServer> {
    StoreServer::bind((ip, 0).into(), key, ranks, LostRankPolicy::ParentReports)
        .map_err(|error| Error::Launch(format!("the store of an elastic job: {error}")))
}
