//! FSDP's schedule: decides when groups of parameters are gathered and freed, and their gradients
//! reduced.
//!
//! A *group* is gathered and reduced as a whole. Each unit's parameters form a group; the last
//! group, the *root*, has the remaining parameters. The [`Schedule`] receives [`Event`]s and
//! answers with [`Action`]s.
//!
//! ```
//! use fulgurite_strategies::schedule::fsdp::{Action, Event, Group, ReduceScope, Schedule};
//!
//! let group = Group { parameters: 2, trainable: 1, reshard_after_forward: true.into() };
//! let mut schedule = Schedule::new(&[group, group], 1.into()); // one unit (0) and the root (1)
//! assert_eq!(schedule.on(Event::PrepareForward), [Action::Gather(1), Action::WaitGather(1)]);
//!
//! let forward = schedule.on(Event::PreForward { group: 0, records_graph: true });
//! assert_eq!(forward, [Action::Gather(0), Action::WaitGather(0)]);
//! assert_eq!(schedule.on(Event::PostForward { group: 0 }), [Action::Free(0)]);
//!
//! schedule.on(Event::BeginBackward { reduce: ReduceScope::All });
//! let backward = schedule.on(Event::PreBackward { group: 0 });
//! assert_eq!(backward, [Action::Gather(0), Action::WaitGather(0), Action::CompleteUnused(0)]);
//! assert_eq!(schedule.on(Event::GradientReady { group: 0 }), [Action::Reduce(0)]);
//! schedule.on(Event::GradientReady { group: 1 }); // the root is reduced last
//! let end = schedule.on(Event::FinishBackward);
//! assert_eq!(end[..3], [Action::WaitReduction(0), Action::Replicate(0), Action::Reduce(1)]);
//! ```
//!
//! # States of a group's parameters
//!
//! A group is "expected" if its backward may still begin in this backward pass, for the first time
//! or again: it has more recorded forward calls than backwards begun.
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | sharded | its forward begins | unsharded | gather, wait |
//! | sharded | its backward begins | in backward | gather, wait |
//! | sharded | another group's forward or backward prefetches it | prefetched | gather |
//! | part | as for sharded | as for sharded | gather from the parts, instead of gather |
//! | prefetched | its forward or backward begins | unsharded, in backward | wait |
//! | prefetched | another group's backward begins, and it is not expected | sharded | wait, free |
//! | unsharded | its forward ends, and it is freed after forward | sharded | free |
//! | unsharded | its forward ends, and a part is kept | part | keep the part |
//! | unsharded | its forward ends otherwise | unsharded | |
//! | unsharded | its backward begins | in backward | |
//! | in backward | its gradients are complete (or it is frozen), not expected | backward over | |
//! | backward over | its backward begins again | in backward | |
//! | backward over | another group's backward begins | sharded | free |
//! | any but the root's | the backward pass ends | sharded | (wait) free |
//! | any | new parameter values | sharded; root: unsharded | (wait) free; root: gather, wait |
//! | any | the step is abandoned | sharded | free |
//!
//! A group that begins its forward prefetches the groups after it. A group that begins its backward
//! prefetches the expected groups before it. Values are kept in *backward over* because operations
//! behind frozen layers may still read them.
//!
//! # States of a group's gradients, in one backward pass
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | accumulating | the gradients of all trainable parameters are ready | complete | |
//! | complete | first in the reduction queue and not expected, or end of pass | reducing | reduce |
//! | reducing | the next reduction, or end of pass | replicating or scattered | wait; replicate |
//! | scattered, replicating | end of pass | accumulating | wait; deliver |
//!
//! Without reduction ([`ReduceScope::None`]) gradients stay complete until the backward pass ends,
//! and the next pass adds to them.
//!
//! # What ranks do alike
//!
//! Ranks must start the same collectives in the same order, and they run the same units. They may
//! use different parameters in the units, so gradients become ready in an order that differs
//! between ranks. Therefore only events common to all ranks start a collective:
//!
//! - Gathers follow from the forwards and backwards begun. The time of freeing a group may differ
//!   between ranks, because it depends on gradients. But during backward only groups that are not
//!   expected are freed, and no rank gathers these again.
//! - Groups are reduced in the order in which their backwards began. A group is reduced once it and
//!   all groups before it are complete and not expected. A rank that uses a unit's parameters in
//!   only one of two calls has their gradients before other ranks do. The root is not in this
//!   queue, because its gradients come from anywhere in the graph. Groups outside the queue are
//!   reduced when the backward pass ends, in index order.
//! - Both rules need exactly counted uses of parameters: the running backward must belong to the
//!   forwards since the last pass. If a backward of the step left forwards behind, or if more
//!   backwards began than forwards were called, gathered groups stay until the backward pass ends.
//!   Outstanding reductions wait until then too.
//!
//! # How much is gathered
//!
//! At most:
//!
//! - the root;
//! - the group whose forward or backward runs;
//! - [`Prefetch`] groups ahead of it;
//! - groups after their forward that are not freed after forward;
//! - groups whose backward has begun and is not over. A frozen group stays until the end of the
//!   backward pass if one of its calls has nothing trainable below it;
//! - groups whose backward is over, until the next one begins.
//!
//! In backward through a chain of units: the root, the current unit, those ahead, and one kept
//! unit.

mod interface;
mod machine;

pub use interface::{Action, Event, Group, Prefetch, ReduceScope};
pub use machine::Schedule;
