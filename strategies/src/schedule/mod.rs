//! The schedules of gradient reduction and of sharded parameters, as pure state machines.
//!
//! A machine is given events (a unit's forward begins, a gradient is complete, a backward ends) and
//! answers with actions (gather, free, reduce, wait) for its driver to perform in order. It holds no
//! tensor, no lock and no clock and communicates nothing, so the strategies of this crate, a test or
//! a simulation of a large run can drive the same one.
//!
//! | module | schedule |
//! |---|---|
//! | [`fsdp`] | when units are gathered and freed and their gradients reduce-scattered |
//! | [`ddp`] | when gradient buckets are all-reduced |

pub mod ddp;
pub mod fsdp;
