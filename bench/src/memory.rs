//! What a process holds in memory, as Linux counts it.

use fulgurite::prelude::*;

/// Resident memory in bytes: all pages of this process that are in memory, files' included.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// At this moment.
    pub(super) now: u64,
    /// At most, since the process started or the last [`forget_peak`].
    pub(super) peak: u64,
}

/// Reads it from `/proc`.
///
/// # Errors
/// Where there is no such thing.
pub(super) fn resident() -> Result<Resident> {
    const STATUS: &str = "/proc/self/status";
    let status = std::fs::read_to_string(STATUS).map_err(Error::io("reading", STATUS))?;
    let bytes = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.trim_end_matches("kB").trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10)
            .ok_or_else(|| Error::other(format!("{STATUS} does not tell {key}")))
    };
    Ok(Resident { now: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
}

/// Lets the peak begin anew at what is held now.
///
/// # Errors
/// Where that cannot be asked of the system.
pub(super) fn forget_peak() -> Result<()> {
    const CLEAR: &str = "/proc/self/clear_refs";
    std::fs::write(CLEAR, "5").map_err(Error::io("writing", CLEAR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_and_went_is_in_the_peak_until_it_is_forgotten() {
        const BYTES: u64 = 64 << 20;
        let before = resident().unwrap();
        drop(std::hint::black_box(vec![1_u8; BYTES as usize]));
        // Linux counts pages per processor first: the sum is not exact.
        assert!(resident().unwrap().peak >= before.now + BYTES / 2);
        forget_peak().unwrap();
        // The allocator may keep what was dropped.
        let after = resident().unwrap();
        assert!(after.peak < after.now + BYTES / 2, "{after:?}");
    }
}
