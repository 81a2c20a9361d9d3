//! The process that started the ranks of this host.

/// Finds the process that started this host's ranks: the nearest ancestor without the variable
/// `rank`. This is the launcher's daemon or agent, even if scripts run in between. Linux only.
pub(crate) fn starter(rank: &str) -> Option<u32> {
    let assignment = format!("{rank}=");
    let mut process = std::os::unix::process::parent_id();
    while process > 1 {
        let environment = std::fs::read(format!("/proc/{process}/environ")).ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        if !variables.any(|variable| variable.starts_with(assignment.as_bytes())) {
            return Some(process);
        }
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        process =
            status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    }
    None
}

/// Returns a process's start time, in ticks since the host's boot. Distinguishes it from other
/// processes with the same id. Linux only.
pub(crate) fn start_time(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Field 22 of `number (name) state …`; the name may contain spaces and brackets.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_starter_is_an_ancestor() {
        // No process has this variable, so the starter is the parent.
        assert_eq!(starter("NO_SUCH_RANK"), Some(std::os::unix::process::parent_id()));
        // All processes have this variable.
        assert_ne!(starter("PATH"), Some(std::os::unix::process::parent_id()));
    }

    #[test]
    fn processes_are_started_one_after_the_other() {
        let start = |process| start_time(process).unwrap();
        assert!(start(std::os::unix::process::parent_id()) <= start(std::process::id()));
        assert!(start(1) <= start(std::process::id()));
        assert_eq!(start_time(0), None);
    }
}
