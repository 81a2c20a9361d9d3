//! Checkpoints in the memory of several hosts, without a directory that all ranks share.
//!
//! Each host has a [`CheckpointIO`](super::CheckpointIO) of its own. A rank's files are on its
//! host, and once more on the next host ([`Hosts::keeper`]). So any one host may be lost.
//!
//! [`save_on_hosts`] writes such a checkpoint. [`whole_on_hosts`] finds those that still have all
//! their files. [`OnHosts::open`] reads one: a rank asks other hosts for the byte ranges that its
//! own host lacks.

mod found;
mod hosts;
mod read;
mod save;
mod serve;

pub use found::{HostPart, OnHosts, parts_on_host, whole_on_hosts};
pub use hosts::Hosts;
pub use read::HostsReader;
pub use save::save_on_hosts;
