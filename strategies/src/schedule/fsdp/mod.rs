//! FSDP's schedule: when groups of parameters are gathered and freed, and their gradients reduced.
//!
//! A *group* is what is gathered and reduced as one: the parameters of a unit, or, in the last group,
//! the *root*, those of no unit. The [`Schedule`] is told [`Event`]s and answers with [`Action`]s.
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
//! "Expected" is a group whose backward may still begin in this backward pass, for the first time or
//! again: it has more recorded forward calls than backwards that began.
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | sharded | its forward begins | unsharded | gather, wait |
//! | sharded | its backward begins | in backward | gather, wait |
//! | sharded | a group that it follows (in forward) or precedes (in backward, and it is expected) begins | prefetched | gather |
//! | part | as sharded | as sharded | gather from the parts, in place of gather |
//! | prefetched | its forward or backward begins | unsharded, in backward | wait |
//! | prefetched | another group's backward begins, and it is not expected | sharded | wait, free |
//! | unsharded | its forward ends, and it is freed after forward | sharded | free |
//! | unsharded | its forward ends, and a part is kept | part | keep the part |
//! | unsharded | its forward ends otherwise | unsharded | |
//! | unsharded | its backward begins | in backward | |
//! | in backward | its gradients are complete (or it is frozen), and it is not expected | backward over | |
//! | backward over | its backward begins again | in backward | |
//! | backward over | another group's backward begins | sharded | free |
//! | any but the root's | the backward pass ends | sharded | (wait) free |
//! | any | parameters have new values | sharded; the root unsharded | (wait) free; the root: gather, wait |
//! | any | the step is abandoned | sharded | free |
//!
//! Values are kept in *backward over* because operations behind frozen layers may still read them.
//!
//! # States of a group's gradients, in one backward pass
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | accumulating | all trainable parameters' gradients are ready | complete | |
//! | complete | it is the first in the reduction queue and not expected, or the backward pass ends | reducing | reduce |
//! | reducing | the next group is reduced, or the backward pass ends | replicating, or scattered | wait; replicate |
//! | scattered, replicating | the backward pass ends | accumulating | wait; deliver |
//!
//! Without reduction ([`ReduceScope::None`]) gradients stay complete until the backward pass ends, and
//! the next one adds to them.
//!
//! # What ranks do alike
//!
//! Ranks must start the same collectives in the same order, and they run the same units. They need not
//! use the same parameters in them, so gradients become ready in an order that differs between ranks.
//! What starts a collective therefore follows from events that ranks have in common:
//!
//! - A gather follows from the forwards and backwards that began. When a group is freed may differ
//!   between ranks, for it waits for gradients; but only groups that are not expected are freed during
//!   backward, and no rank gathers those again.
//! - Groups are reduced in the order in which their backwards began, each once it is complete and not
//!   expected and those before it are: a rank that uses a unit's parameters in one of two calls has
//!   their gradients before other ranks do. What is not in that queue (the root, whose gradients come
//!   from anywhere in the graph) is reduced when the backward pass ends, in index order.
//! - Both hold as long as the uses of parameters are counted exactly: the backward that is running is
//!   that of the forwards since the last one. If a backward of the step left forwards behind, or more
//!   backwards began than forwards were called, whatever is gathered stays until the backward pass ends
//!   and whatever is not reduced waits until then.
//!
//! # How much is gathered
//!
//! At most: the root; the group whose forward or backward runs; [`Prefetch`] groups ahead
//! of it; groups whose forward has run and that are not freed after forward; groups whose backward has
//! begun and is not over (a frozen one that was also called where nothing below it is trainable: to the
//! end of the backward pass); groups whose backward is over, until the next one begins. In backward
//! through a chain of units: the root, the current one, those ahead, and one that was kept.

mod interface;
mod machine;

pub use interface::{Action, Event, Group, Prefetch, ReduceScope};
pub use machine::Schedule;
