//! The key-value store that connects the ranks of a job.
//!
//! A [`Store`] carries rendezvous, health and control messages; tensors go over process groups. A
//! job of one process has a [`LocalStore`]. In other jobs each rank has a [`TcpStore`], a client of
//! the [`StoreServer`] that one process hosts. The crate depends neither on a tensor library nor on
//! the way ranks are started.
//!
//! Client and server prove to each other that they know the job's key. Until then the server bounds
//! the bytes, the time and the number of its clients.

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
