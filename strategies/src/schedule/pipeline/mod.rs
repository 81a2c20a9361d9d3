//! Schedules of pipeline parallelism: which rank computes what, when, and what it sends.
//!
//! A model is cut into stages. A [`Schedule`] gives each rank its stages and a list of [`Action`]s:
//!
//! - [`Schedule::new`] makes one of the known schedules.
//! - [`Schedule::from_csv`] reads other lists.
//! - [`Schedule::lower`] adds sends, receives, and the gathers and reductions of FSDP.
//! - [`Schedule::simulate`] runs the lists of all ranks with given costs. It finds deadlocks, the
//!   time in which ranks wait (the *bubble*), and how many micro-batches a rank holds.
//!
//! ```
//! use fulgurite_strategies::schedule::pipeline::{Costs, Schedule, Type};
//!
//! let schedule = Schedule::new(Type::OneForwardOneBackward, 2, 1, 3)?; // 2 ranks, 3 micro-batches
//! assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
//!
//! let simulation = schedule.simulate(&Costs::default())?; // forward 1, backward 1 + 1
//! assert_eq!(simulation.duration(), 12.0);
//! assert_eq!(simulation.bubble(), 0.25); // (p − 1) / (m + p − 1)
//! assert_eq!(simulation.peak_in_flight(), [2, 1]);
//!
//! let sends = schedule.lower(None)?;
//! assert!(sends.to_csv().starts_with("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! # Schedules
//!
//! With p ranks, v stages a rank and m micro-batches:
//!
//! | [`Type`] | stages of rank r | needs | rank r holds at most |
//! |---|---|---|---|
//! | `gpipe` | r + k·p | | v·m micro-batches |
//! | `1f1b` | r | | min(p − r, m) |
//! | `interleaved_1f1b` | r + k·p | m divides into max(1, m / p) rounds | (v − 1)·p + 2(p − r) − 1, if p divides m |
//! | `zb_h1` | r + k·p | the same, if v > 1 | v·p, if p divides m |
//! | `zb_v` | r, 2p − 1 − r | | 2p |
//! | `dual_pipe_v` | r, 2p − 1 − r | m ≥ 2p | 2p + 1 |
//!
//! F, I and W are a stage's times of a forward and of the two halves of a backward. The bubble of
//! `gpipe` (with one stage a rank), `1f1b` and `interleaved_1f1b` (if p divides m) is
//! (p − 1)(F + I + W), and the stages of `interleaved_1f1b` are smaller. With F = I = W and m ≥ 2p,
//! that of `zb_h1` (with one stage a rank) and of `zb_v` is (p − 1)·F.
//!
//! The lists are those of PyTorch's schedules GPipe (with one stage a rank), 1F1B, Interleaved1F1B,
//! InterleavedZeroBubble, ZBVZeroBubble and DualPipeV. What PyTorch's DualPipeV overlaps stands one
//! after the other here.

mod action;
mod check;
mod csv;
mod generate;
mod lower;
mod schedule;
mod simulate;
mod v_shaped;

pub use action::{Action, Kind};
pub use generate::Type;
pub use schedule::Schedule;
pub use simulate::{Costs, Simulation, Span};
