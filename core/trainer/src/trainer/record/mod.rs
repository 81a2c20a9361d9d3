//! The reports of a run: logged values, events, and their receivers.

pub(crate) mod display;
pub(crate) mod event;
pub(crate) mod event_log;
pub(crate) mod flight;
pub(crate) mod histogram;
pub(crate) mod item_rate;
pub(crate) mod log_table;
pub(crate) mod logged_tensor;
pub(crate) mod logger;
pub(crate) mod media;
pub(crate) mod meter;
pub(crate) mod model_summary;
pub(crate) mod pace;
pub(crate) mod recorder;
pub(crate) mod run_dir;
pub(crate) mod usage;
