//! [`Hosts`]: which ranks share a host, and which hosts keep a rank's files.

use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// The hosts of a group's ranks. Hosts are in the order of their first ranks, and form a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    /// The group ranks of each host.
    ranks: Vec<Vec<usize>>,
    /// The host of each group rank.
    host: Vec<usize>,
}

impl Hosts {
    /// Gathers the hosts of a group's ranks. Ranks with the same `id` are on one host. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn gather(group: &dyn ProcessGroup, id: &str) -> Result<Self> {
        Ok(Self::new(&all_gather_object(group, &id.to_owned())?))
    }

    /// Returns the hosts of ranks whose hosts have these ids.
    pub fn new(ids: &[String]) -> Self {
        let mut seen: Vec<&String> = Vec::new();
        let mut ranks: Vec<Vec<usize>> = Vec::new();
        let mut host = Vec::new();
        for (rank, id) in ids.iter().enumerate() {
            let index = seen.iter().position(|other| *other == id).unwrap_or(seen.len());
            if index == seen.len() {
                seen.push(id);
                ranks.push(Vec::new());
            }
            ranks[index].push(rank);
            host.push(index);
        }
        Self { ranks, host }
    }

    /// Number of hosts.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The host of a rank.
    pub fn of(&self, rank: usize) -> usize {
        self.host[rank]
    }

    /// The ranks of a host.
    pub fn ranks(&self, host: usize) -> &[usize] {
        &self.ranks[host]
    }

    /// The first rank of a host, which does what is done once on each host.
    pub fn leader(&self, host: usize) -> usize {
        self.ranks[host][0]
    }

    /// Whether a rank is its host's first.
    pub fn leads(&self, rank: usize) -> bool {
        self.leader(self.of(rank)) == rank
    }

    /// The rank of the next host that writes `rank`'s files there; `None` if there is one host.
    pub fn keeper(&self, rank: usize) -> Option<usize> {
        let host = self.of(rank);
        let next = (host + 1) % self.count();
        let place = self.ranks[host].iter().position(|other| *other == rank)?;
        let keepers = &self.ranks[next];
        (next != host).then(|| keepers[place % keepers.len()])
    }

    /// The ranks whose files `rank` writes on its host, besides its own.
    pub fn kept_by(&self, rank: usize) -> Vec<usize> {
        (0..self.host.len()).filter(|other| self.keeper(*other) == Some(rank)).collect()
    }

    /// The ranks whose files are on a host.
    pub fn files_on(&self, host: usize) -> Vec<usize> {
        let is_there = |rank: &usize| {
            let keeper = self.keeper(*rank).map(|keeper| self.of(keeper));
            self.of(*rank) == host || keeper == Some(host)
        };
        (0..self.host.len()).filter(is_there).collect()
    }

    /// The bytes of the [files on](Self::files_on) each host, given the bytes of each rank's files.
    pub fn bytes(&self, of_ranks: &[u64]) -> Vec<u64> {
        let of_host = |host| self.files_on(host).into_iter().map(|rank| of_ranks[rank]).sum();
        (0..self.count()).map(of_host).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(ids: &[usize]) -> Hosts {
        Hosts::new(&ids.iter().map(usize::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn one_host_keeps_its_own_files_only() {
        let hosts = hosts(&[4, 4, 4]);
        assert_eq!((hosts.count(), hosts.keeper(1)), (1, None));
        assert_eq!(hosts.files_on(0), [0, 1, 2]);
    }

    #[test]
    fn next_host_keeps_uneven_ranks() {
        let hosts = hosts(&[7, 7, 7, 1, 1, 5]);
        let keepers: Vec<_> = (0..6).map(|rank| hosts.keeper(rank).unwrap()).collect();
        assert_eq!(keepers, [3, 4, 3, 5, 5, 0]);
        assert_eq!(hosts.kept_by(3), [0, 2]);
        assert_eq!(hosts.files_on(1), [0, 1, 2, 3, 4]);
        assert!(hosts.leads(0) && hosts.leads(3) && hosts.leads(5) && !hosts.leads(4));
    }

    #[test]
    fn each_file_takes_room_on_two_hosts() {
        let bytes = [1, 2, 4, 8, 16];
        assert_eq!(hosts(&[0, 0, 1, 1, 2]).bytes(&bytes), [19, 15, 28]);
        assert_eq!(hosts(&[0; 5]).bytes(&bytes), [31]);
    }

    proptest! {
        /// All files are left if no two lost hosts follow each other in the ring.
        #[test]
        fn hosts_apart_may_be_lost(
            ids in prop::collection::vec(0_usize..6, 1..14),
            lost in prop::collection::btree_set(0_usize..6, 1..4),
        ) {
            let hosts = hosts(&ids);
            let next = |host: usize| (host + 1) % hosts.count();
            prop_assume!(lost.iter().all(|host| *host < hosts.count()));
            prop_assume!(lost.iter().all(|host| !lost.contains(&next(*host))));
            for rank in 0..ids.len() {
                let is_left = |host: usize| !lost.contains(&host) && hosts.files_on(host).contains(&rank);
                prop_assert!((0..hosts.count()).any(is_left));
            }
        }

        /// Without any one host, the files of all ranks are left.
        #[test]
        fn any_host_may_be_lost(ids in prop::collection::vec(0_usize..5, 1..12)) {
            let hosts = hosts(&ids);
            for lost in 0..hosts.count() {
                let left: Vec<usize> = (0..hosts.count()).filter(|host| *host != lost).collect();
                for rank in 0..ids.len() {
                    let copies = left.iter().filter(|host| hosts.files_on(**host).contains(&rank));
                    let expected = match hosts.count() {
                        1 => 0,
                        _ => 2 - usize::from(hosts.files_on(lost).contains(&rank)),
                    };
                    prop_assert_eq!(copies.count(), expected);
                }
            }
            for rank in 0..ids.len() {
                prop_assert!(hosts.kept_by(rank).iter().all(|other| ids[*other] != ids[rank]));
            }
        }
    }
}
