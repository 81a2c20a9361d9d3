//! The resident memory of this process, from Linux.

use fulgurite::prelude::*;

/// Resident memory in bytes, including mapped pages of files.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// The present size.
    pub(super) now: u64,
    /// The peak since the process started or the last [`reset_peak`].
    pub(super) peak: u64,
}

/// Reads the resident memory from `/proc`.
///
/// # Errors
/// On systems without `/proc/self/status`.
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

/// Resets the peak to the present size.
///
/// # Errors
/// On systems that do not support it.
pub(super) fn reset_peak() -> Result<()> {
    const CLEAR: &str = "/proc/self/clear_refs";
    std::fs::write(CLEAR, "5").map_err(Error::io("writing", CLEAR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_includes_freed_memory_until_reset() {
        const BYTES: u64 = 64 << 20;
        let before = resident().unwrap();
        drop(std::hint::black_box(vec![1_u8; BYTES as usize]));
        // Linux counts pages per processor first, so the sum is not exact.
        assert!(resident().unwrap().peak >= before.now + BYTES / 2);
        reset_peak().unwrap();
        // The allocator may keep dropped memory.
        let after = resident().unwrap();
        assert!(after.peak < after.now + BYTES / 2, "{after:?}");
    }
}
