//! Runs random trials: [`trials`].

#![allow(unreachable_pub, reason = "what other modules use reads best with plain `pub`")]

use std::str::FromStr;

use fastrand::Rng;

/// One trial; its seed determines its random choices.
pub struct Trial {
    pub seed: u64,
    pub rng: Rng,
}

/// Runs `CAMPAIGN_TRIALS` trials, or `count` by default, with seeds from `CAMPAIGN_SEED` (default
/// 0) on. A trial that panics prints its seed.
pub fn trials(count: u64, mut trial: impl FnMut(&mut Trial)) {
    let first: u64 = variable("CAMPAIGN_SEED").unwrap_or(0);
    let count = variable("CAMPAIGN_TRIALS").unwrap_or(count);
    for seed in first..first + count {
        let name = SaysSeed(seed);
        trial(&mut Trial { seed, rng: Rng::with_seed(seed) });
        drop(name);
    }
    eprintln!("{count} trials from CAMPAIGN_SEED={first} on");
}

/// Prints the seed if a panic drops it.
struct SaysSeed(u64);

impl Drop for SaysSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was the trial with CAMPAIGN_SEED={}", self.0);
        }
    }
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is `{value}`, not a number")))
}
