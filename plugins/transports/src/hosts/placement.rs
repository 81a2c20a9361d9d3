//! The hosts of a group's members.

use std::ops::Range;

/// The members of a group by host. Members are numbered by their index in the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placement {
    /// The members of each host. Hosts are in the order of their first member.
    hosts: Vec<Vec<usize>>,
}

impl Placement {
    /// Makes the placement from the host of each member.
    pub(super) fn of(host_of_member: &[usize]) -> Self {
        let mut known: Vec<usize> = Vec::new();
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (member, host) in host_of_member.iter().enumerate() {
            match known.iter().position(|one| one == host) {
                Some(place) => hosts[place].push(member),
                None => {
                    known.push(*host);
                    hosts.push(vec![member]);
                }
            }
        }
        Self { hosts }
    }

    pub(super) fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// Whether all members are on one host.
    pub(super) fn is_local(&self) -> bool {
        self.hosts.len() == 1
    }

    /// Whether no two members are on one host.
    pub(super) fn is_spread(&self) -> bool {
        self.hosts.iter().all(|members| members.len() == 1)
    }

    /// Number of members of each host, if all are equal and the members of a host are consecutive.
    pub(super) fn per_host(&self) -> Option<usize> {
        let per_host = self.hosts.first()?.len();
        let in_order = self.hosts.iter().flatten().copied().eq(0..per_host * self.hosts.len());
        let even = self.hosts.iter().all(|members| members.len() == per_host);
        (in_order && even).then_some(per_host)
    }

    /// Returns the host of a member, and its index among the host's members.
    pub(super) fn find(&self, member: usize) -> (usize, usize) {
        for (host, members) in self.hosts.iter().enumerate() {
            if let Some(place) = members.iter().position(|&one| one == member) {
                return (host, place);
            }
        }
        unreachable!("every member is on a host")
    }
}

/// Cuts `total` into pieces of `len` and a shorter last one.
pub(super) fn pieces(total: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total.div_ceil(len)).map(move |piece| piece * len..((piece + 1) * len).min(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_by_host() {
        let two_by_two = Placement::of(&[7, 7, 3, 3]);
        assert_eq!(two_by_two.hosts(), [vec![0, 1], vec![2, 3]]);
        assert_eq!((two_by_two.per_host(), two_by_two.find(3)), (Some(2), (1, 1)));
        assert!(!two_by_two.is_local() && !two_by_two.is_spread());
        assert_eq!(Placement::of(&[0, 1, 0, 1]).per_host(), None);
        assert_eq!(Placement::of(&[0, 0, 1]).per_host(), None);
        assert!(Placement::of(&[4, 4]).is_local());
        assert!(Placement::of(&[4, 2, 3]).is_spread());
    }

    #[test]
    fn pieces_cover() {
        assert_eq!(pieces(10, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
        assert_eq!(pieces(0, 4).count(), 0);
    }
}
