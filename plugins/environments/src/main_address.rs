//! Rank 0's address and port, shared by all environments.

use fulgurite_error::{Error, Result};
use fulgurite_launch::environment::Variables;

/// The valid values of `MASTER_PORT`, for messages.
pub(crate) const PORT: &str = "a free TCP port of rank 0's host, 1-65535";

/// Reads `MASTER_PORT`, if it is set.
///
/// # Errors
/// If the value is not a port.
pub(crate) fn master_port(variables: &Variables) -> Result<Option<u16>> {
    match variables.parse("MASTER_PORT", PORT)? {
        Some(0) => Err(Error::Launch(format!("MASTER_PORT is `0`, but should be {PORT}"))),
        port => Ok(port),
    }
}

/// Derives a port from a job's id. All ranks of a job get the same port, and another job most
/// likely a different one. The range is below the ports that systems assign to connections.
pub(crate) fn port_of(job_id: &str) -> u16 {
    // FNV-1a: the same in every build of the program.
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
        // Ranks that run different builds of a program must agree.
        assert_eq!(port_of("prterun-vm-8168@1"), 13470);
    }
}
