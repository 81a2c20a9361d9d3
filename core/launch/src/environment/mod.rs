//! Cluster environments, which tell a process its rank.
//!
//! A launcher (a batch scheduler, an elastic agent) passes each process of a job its rank in
//! environment variables. An [`EnvironmentConfig`] is the plugin that recognises and reads one
//! launcher's variables; it builds a [`ClusterEnvironment`].
//!
//! ```
//! use fulgurite_launch::environment::{ClusterEnvironment, EnvironmentConfig, Variables};
//! use fulgurite_config::register_environment;
//! use fulgurite_launch::Result;
//! use serde::{Deserialize, Serialize};
//!
//! /// Ranks that a home-made script starts with `MY_RANK=r MY_SIZE=n`.
//! #[derive(Debug, Clone, Serialize, Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Homemade {}
//!
//! #[derive(Debug)]
//! struct Process { rank: usize, size: usize }
//!
//! #[typetag::serde(name = "homemade")]
//! impl EnvironmentConfig for Homemade {
//!     fn priority(&self) -> i32 { 50 }
//!     fn detect(&self, variables: &Variables) -> bool { variables.is_set("MY_RANK") }
//!     fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>> {
//!         let rank = variables.require("MY_RANK", "this process's rank, a number")?;
//!         let size = variables.require("MY_SIZE", "the number of processes")?;
//!         Ok(Box::new(Process { rank, size }))
//!     }
//! }
//! register_environment!("homemade", Homemade, "Ranks started by a home-made script");
//!
//! impl ClusterEnvironment for Process {
//!     fn name(&self) -> &'static str { "homemade" }
//!     fn creates_processes_externally(&self) -> bool { true }
//!     fn world_size(&self) -> usize { self.size }
//!     fn global_rank(&self) -> usize { self.rank }
//!     fn local_rank(&self) -> usize { self.rank }
//!     fn local_world_size(&self) -> usize { self.size }
//!     fn node_rank(&self) -> usize { 0 }
//!     fn main_address(&self) -> String { "127.0.0.1".into() }
//!     fn main_port(&self) -> u16 { 29500 }
//!     fn job_id(&self) -> String { "homemade".into() }
//! }
//!
//! let variables = Variables::from([("MY_RANK", "1"), ("MY_SIZE", "2")]);
//! let found = fulgurite_launch::environment::detect(&variables)?.unwrap();
//! assert_eq!(found.build(&variables)?.global_rank(), 1);
//! # Ok::<(), fulgurite_launch::Error>(())
//! ```

mod cluster;
mod detect;
mod requeue;
mod variables;

pub use cluster::{ClusterEnvironment, EnvironmentConfig};
pub use detect::{by_name, detect};
pub use requeue::Requeue;
pub use variables::Variables;
