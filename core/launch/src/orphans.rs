//! Orphans: processes that ranks started and left running. This process adopts them, and ends them
//! with the job.
//!
//! On Linux an orphaned process is adopted by the nearest ancestor that asked for it, even if it is
//! a daemon or belongs to another session (`setsid`). On other systems orphans stay.

use rustix::process::Pid;

/// This process's children before it started ranks. Every other child is a rank or a rank's orphan.
#[derive(Debug, Clone, Default)]
pub(super) struct Orphans {
    #[cfg(target_os = "linux")]
    before: Vec<Pid>,
}

#[cfg(not(target_os = "linux"))]
impl Orphans {
    pub(super) fn adopt() -> Self {
        Self::default()
    }

    pub(super) fn reap(&self, _ranks: &[Pid]) {}

    pub(super) fn end(&self, _groups: &[Pid], _at_once: bool) {}
}

#[cfg(target_os = "linux")]
mod linux {
    use std::time::Duration;

    use rustix::process::{
        Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, set_child_subreaper, waitid,
    };

    use super::Orphans;
    use fulgurite_error::{counted, print_message};
    use fulgurite_store::Patience;

    /// Time that orphans have from SIGTERM to SIGKILL, and to end after that.
    const GRACE: Duration = Duration::from_secs(2);
    const LOOK: Duration = Duration::from_millis(10);

    /// A child of this process.
    struct Process {
        pid: Pid,
        group: Option<Pid>,
        ended: bool,
    }

    impl Orphans {
        /// From now on, orphans of this process's descendants become its children.
        pub(crate) fn adopt() -> Self {
            // If the system refuses, orphans stay.
            let _ = set_child_subreaper(Some(getpid()));
            Self { before: children().into_iter().map(|child| child.pid).collect() }
        }

        /// Reaps ended orphans, so that they do not fill the process table. Leaves `ranks` alone.
        pub(crate) fn reap(&self, ranks: &[Pid]) {
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if !matches!(waitid(WaitId::All, ended | WaitIdOptions::NOWAIT), Ok(Some(_))) {
                return;
            }
            for child in children() {
                if child.ended && !ranks.contains(&child.pid) && !self.before.contains(&child.pid) {
                    let _ = waitid(WaitId::Pid(child.pid), ended);
                }
            }
        }

        /// Ends all orphans after all ranks have ended: by SIGTERM and then, after a while or
        /// `at_once`, by SIGKILL. Orphans in the ranks' groups were killed before.
        pub(crate) fn end(&self, groups: &[Pid], at_once: bool) {
            let mut patience = Patience::new(if at_once { Duration::ZERO } else { GRACE });
            let mut told = Vec::new();
            let mut killed = None::<Patience>;
            loop {
                self.reap(&[]);
                let is_left = |one: &Process| !one.ended && !self.before.contains(&one.pid);
                let left: Vec<Process> = children().into_iter().filter(is_left).collect();
                if left.is_empty() {
                    break;
                }
                if killed.is_none() && patience.slice().is_none() {
                    killed = Some(Patience::new(GRACE));
                }
                if killed.as_mut().is_some_and(|patience| patience.slice().is_none()) {
                    break;
                }
                for one in left {
                    let of_rank = one.group.is_some_and(|group| groups.contains(&group));
                    if !told.contains(&one.pid) && !of_rank {
                        told.push(one.pid);
                        let _ = kill_process(one.pid, Signal::TERM);
                    }
                    // Its own children become this process's, and appear in the next round.
                    if killed.is_some() || of_rank {
                        let _ = kill_process(one.pid, Signal::KILL);
                    }
                }
                std::thread::sleep(LOOK);
            }
            if !told.is_empty() {
                let count = counted(told.len() as u64, "orphan");
                print_message(&format!("ended with the job: {count} that ranks had left running"));
            }
        }
    }

    fn children() -> Vec<Process> {
        let own = getpid();
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let child = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (parent, process) = parse(pid, &stat)?;
            (parent == Some(own)).then_some(process)
        };
        pids.filter_map(child).collect()
    }

    /// The parent of a process, and the process, by its `/proc/PID/stat`:
    /// `pid (name) state parent group …`. A name may have spaces and parentheses.
    fn parse(pid: i32, stat: &str) -> Option<(Option<Pid>, Process)> {
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let ended = matches!(fields.next()?, "Z" | "X");
        // A process that is being removed has the group -1.
        let mut number =
            || fields.next()?.parse().ok().filter(|raw| *raw > 0).and_then(Pid::from_raw);
        let (parent, group) = (number(), number());
        Some((parent, Process { pid: Pid::from_raw(pid)?, group, ended }))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn removed_process_has_no_group() {
            let (parent, process) = parse(12, "12 (a (b) c) X 7 -1 -1 0").unwrap();
            assert_eq!((parent, process.group, process.ended), (Pid::from_raw(7), None, true));
            let (parent, process) = parse(12, "12 (sh) S 0 5 5 0").unwrap();
            assert_eq!((parent, process.group, process.ended), (None, Pid::from_raw(5), false));
        }
    }
}
