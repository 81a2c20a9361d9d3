//! The key-value store over which the ranks of a job meet.
//!
//! Rendezvous, health and control messages go over a [`Store`]; no data does. [`LocalStore`] is that of
//! a job of one process; [`TcpStore`] talks to a [`StoreServer`], which one process of the job hosts.
//! Knows no tensor, and not how ranks are started.

mod local_store;
mod store;
mod table;
mod tcp_store;

pub use fulgurite_error::{Error, Result};
pub use local_store::LocalStore;
pub use store::Store;
pub use tcp_store::{Identity, LostRank, StoreServer, TcpStore};
