//! Schedules of gradient reduction and of sharded parameters, as pure state machines.
//!
//! A schedule receives events (a unit's forward begins, a gradient is complete, a backward ends).
//! It answers with actions (gather, free, reduce, wait), which its driver performs in order. It has
//! no tensors, locks, clocks or communication, so the strategies of this crate, a test or a
//! simulation of a large run can drive it. A driver locks its schedule for one event, and holds no
//! lock while a collective is started or a peer is waited for.
//!
//! | module | decides |
//! |---|---|
//! | [`fsdp`] | when to gather and free units and reduce-scatter their gradients |
//! | [`ddp`] | when to all-reduce gradient buckets |
//! | [`pipeline`] | which stage and micro-batch a rank of a pipeline computes next |

pub mod ddp;
pub mod fsdp;
pub mod pipeline;
