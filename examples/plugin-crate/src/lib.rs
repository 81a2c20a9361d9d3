//! Plugins for Fulgurite in a separate crate.
//!
//! - Strategy: [`LocalSgd`].
//! - Logger: [`Markdown`].
//! - Checkpoint IO: [`Journal`].
//! - Parallelize function: [`EveryOther`].
//! - Gradient compression: [`PowerSgd`].
//! - Layer that plans can cut: [`Glu`].
//!
//! A program links them with `use fulgurite_local_sgd as _;`. A configuration then names them:
//!
//! ```toml
//! [trainer]
//! devices = 2
//! loggers = [{ type = "markdown", columns = ["train_loss", "val_loss"] }]
//! strategy = { type = "local_sgd", sync_every = 16 }
//! # or: strategy = { type = "fsdp", parallelize = "every_other" }
//! # or: strategy = { type = "ddp", gradient_compression = { type = "power_sgd", rank = 4 } }
//!
//! [checkpoint]
//! io = { type = "journal", io = "local" }
//! ```

mod every_other;
mod glu;
mod journal;
mod local_sgd;
mod markdown;
mod power_sgd;

pub use every_other::EveryOther;
pub use glu::Glu;
pub use journal::Journal;
pub use local_sgd::LocalSgd;
pub use markdown::Markdown;
pub use power_sgd::PowerSgd;
