//! The process that has started the ranks of this host.

/// The nearest ancestor of this process that has no variable `rank`: the launcher's daemon or agent on this host, under
/// whatever scripts it has started. Linux only.
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

/// When a process was started, in ticks since this host was: tells it from others that had its number. Linux only.
pub(crate) fn start_time(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // `number (name) state …`, of which the 22nd is wanted; the name may have spaces and brackets.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_starter_is_an_ancestor() {
        // Nobody has this variable, so it is the parent.
        assert_eq!(starter("NO_SUCH_RANK"), Some(std::os::unix::process::parent_id()));
        // All have this one.
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
