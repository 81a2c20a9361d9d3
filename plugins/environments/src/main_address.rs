//! Where rank 0 is: what every launcher has in common.

use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::Variables;

/// What `MASTER_PORT` should be, for messages.
pub(crate) const PORT: &str = "a free TCP port of rank 0's host, 1-65535";

/// `MASTER_PORT`, if it is set.
///
/// # Errors
/// If it is no port.
pub(crate) fn master_port(variables: &Variables) -> Result<Option<u16>> {
    match variables.parse("MASTER_PORT", PORT)? {
        Some(0) => Err(Error::Launch(format!("MASTER_PORT is `0`, but should be {PORT}"))),
        port => Ok(port),
    }
}

/// A port that follows from a job's id: the same on all of its ranks, most likely another one for another job, and
/// below those that systems give to connections.
pub(crate) fn port_of(job_id: &str) -> u16 {
    // FNV-1a, which is the same in every build of the program.
    let hash = job_id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    10_000 + (hash % 20_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_follow_from_jobs() {
        let ports: Vec<u16> = (0..1000).map(|job| port_of(&format!("job-{job}"))).collect();
        assert!(ports.iter().all(|port| (10_000..30_000).contains(port)));
        let mut different = ports.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 950, "{}", different.len());
        // Ranks of different builds of a program must agree.
        assert_eq!(port_of("prterun-vm-8168@1"), 13470);
    }
}
