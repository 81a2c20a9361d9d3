//! Launching ranks, the TCP store, failures and signals.
mod local_store;
mod table;
mod tcp_store;
pub use local_store::LocalStore;
pub use tcp_store::{Identity, LostRank, StoreServer, TcpStore};
