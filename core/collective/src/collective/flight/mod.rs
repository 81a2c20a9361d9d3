//! The flight record: a rank's last collectives. After a failure they show which rank fell behind.
//!
//! A [`FlightRecorder`] watches a rank's groups, and [writes](FlightRecorder::write)
//! [`FlightLine`]s. [`Trouble::find`] compares the [`FlightLog`]s of several ranks.

mod line;
mod log;
mod recorder;
mod trouble;

pub use line::{Call, Channel, ChannelLine, FlightHead, FlightLine, GroupLine};
pub use log::FlightLog;
pub use recorder::FlightRecorder;
pub use trouble::{Lag, Trouble, lags};
