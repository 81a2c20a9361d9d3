//! Repositories of the Hugging Face Hub: in the cache that `huggingface_hub` keeps on this machine,
//! and downloads into it.
//!
//! Training reads the cache and never the network: [`Cache::find`] is what
//! `model.from_pretrained = "owner/name"` does. `Hub::download` is for a command of its own, and
//! needs the feature `download`, which is on by default.
//!
//! ```no_run
//! # #[cfg(feature = "download")] {
//! use fulgurite_hub::{Cache, Hub, Repository, Selection};
//!
//! let (hub, cache) = (Hub::from_environment()?, Cache::from_environment());
//! let repository: Repository = "Qwen/Qwen3-0.6B".parse()?;
//! let folder = hub.download(&cache, &repository, "main", &Selection::default(), &mut |_| {})?;
//! assert_eq!(cache.find(&repository, "main"), Some(folder));
//! # }
//! # Ok::<(), fulgurite_error::Error>(())
//! ```

mod cache;
#[cfg(feature = "download")]
mod client;
#[cfg(feature = "download")]
mod download;
mod repository;
#[cfg(feature = "download")]
mod selection;

pub use cache::Cache;
#[cfg(feature = "download")]
pub use client::Hub;
#[cfg(feature = "download")]
pub use download::Event;
pub use repository::Repository;
#[cfg(feature = "download")]
pub use selection::Selection;
