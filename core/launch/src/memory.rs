//! The memory that this host has for a job.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// The memory available to this host's processes, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// The host's memory and swap space, or the limit of this process's control group if lower.
    pub total: u64,
    /// The unused part of `total`.
    pub available: u64,
    /// The limit on one process's address space (`ulimit -v`).
    pub address_space: Option<u64>,
    /// Address space in use by this process: its program, stacks, and its allocator's reserve.
    pub addresses_in_use: u64,
}

impl HostMemory {
    /// Reads this host's memory; `None` if the system does not report it.
    pub fn now() -> Option<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut memory = Self::of_host(&meminfo)?;
        for group in memory_groups(Path::new("/sys/fs/cgroup"), &groups) {
            memory.limit_to(&group);
        }
        memory.address_space = getrlimit(Resource::As).current;
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        memory.addresses_in_use = bytes_of(&status, "VmSize").unwrap_or(0);
        Some(memory)
    }

    fn of_host(meminfo: &str) -> Option<Self> {
        let bytes = |key: &str| bytes_of(meminfo, key);
        Some(Self {
            total: bytes("MemTotal")? + bytes("SwapTotal").unwrap_or(0),
            available: bytes("MemAvailable")? + bytes("SwapFree").unwrap_or(0),
            address_space: None,
            addresses_in_use: 0,
        })
    }

    /// Applies the limit of a control group, if it has one.
    fn limit_to(&mut self, group: &Path) {
        let number = |names: [&str; 2]| {
            let read = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            names.into_iter().find_map(read)
        };
        let limit = number(["memory.max", "memory.limit_in_bytes"]);
        if let Some(limit) = limit.filter(|&limit| limit < self.total) {
            let used = number(["memory.current", "memory.usage_in_bytes"]).unwrap_or(0);
            self.total = limit;
            self.available = self.available.min(limit.saturating_sub(used));
        }
    }
}

/// Reads a key from one of the system's lists: `MemTotal:  1000 kB`.
fn bytes_of(list: &str, key: &str) -> Option<u64> {
    let line = list.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the directories of the control groups that limit this process's memory, from the content
/// of `/proc/self/cgroup`: its own group and all parents.
fn memory_groups(mount: &Path, groups: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let root = match controllers {
            "" => mount.to_owned(),
            _ if controllers.split(',').any(|name| name == "memory") => mount.join("memory"),
            _ => continue,
        };
        let own = root.join(path.trim_start_matches('/'));
        folders
            .extend(own.ancestors().take_while(|dir| dir.starts_with(&root)).map(Path::to_owned));
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    700 kB\n\
                           SwapTotal:        24 kB\nSwapFree:         4 kB\n";

    #[test]
    fn the_host_has_memory_and_swap_space() {
        let memory = HostMemory::of_host(MEMINFO).unwrap();
        assert_eq!((memory.total, memory.available), (1024 << 10, 704 << 10));
        assert_eq!(HostMemory::of_host("MemTotal: much"), None);
        assert_eq!(HostMemory::of_host(&format!("MemTotal: {} kB\n", u64::MAX)), None);
    }

    #[test]
    fn smallest_enclosing_group_is_the_limit() {
        let mount = std::env::temp_dir().join(format!("groups-{}", std::process::id()));
        let own = mount.join("jobs/mine");
        fs::create_dir_all(&own).unwrap();
        fs::write(mount.join("jobs/memory.max"), "500000\n").unwrap();
        fs::write(mount.join("jobs/memory.current"), "100000\n").unwrap();
        fs::write(own.join("memory.max"), "max\n").unwrap();
        let mut memory = HostMemory::of_host(MEMINFO).unwrap();
        let groups = memory_groups(&mount, "0::/jobs/mine\n");
        assert_eq!(groups, [own, mount.join("jobs"), mount.clone()]);
        groups.iter().for_each(|group| memory.limit_to(group));
        fs::remove_dir_all(&mount).unwrap();
        assert_eq!((memory.total, memory.available), (500_000, 400_000));
        let v1 = memory_groups(Path::new("/c"), "3:cpu,memory:/a\n2:pids:/b\n");
        assert_eq!(v1, [Path::new("/c/memory/a"), Path::new("/c/memory")]);
    }

    #[test]
    fn this_host_has_memory() {
        let memory = HostMemory::now().unwrap();
        assert!(memory.available > 0 && memory.available <= memory.total, "{memory:?}");
        assert!(memory.addresses_in_use > 1 << 20, "{memory:?}");
    }
}
