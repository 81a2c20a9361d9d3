//! The key-value store over which the ranks of a job meet.
//!
//! A [`Store`] carries rendezvous, health and control messages; tensors go over process groups. A
//! job of one process has a [`LocalStore`]; in others each rank has a [`TcpStore`], a client of the
//! [`StoreServer`] that one process hosts. The crate depends on no tensor library, and not on how
//! ranks are started.

mod local_store;
mod patience;
mod store;
mod table;
mod tcp_store;

pub use fulgurite_error::{Error, Result};
pub use local_store::LocalStore;
pub use patience::Patience;
pub use store::Store;
pub use tcp_store::{
    ClientIdentity, ClientOptions, JobKey, LostRankPolicy, StoreHost, StoreServer, TcpStore,
};
