//! Random trials of robustness. `cargo test` runs a few; many can be run by hand:
//!
//! ```sh
//! CAMPAIGN_TRIALS=1000 cargo test --release --test it campaign::kills -- --nocapture
//! # trial 17 again
//! CAMPAIGN_SEED=17 CAMPAIGN_TRIALS=1 cargo test --test it campaign::kills -- --nocapture
//! ```

mod agents;
mod configs;
mod coordinators;
mod elastic_hosts;
mod flips;
mod kills;
mod limits;
mod losses;
mod partitions;
mod pipelines;
mod plans;
mod readers;
mod strangers;
mod trials;
