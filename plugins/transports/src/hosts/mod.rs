//! Process groups of several hosts: shared memory within a host, a network between hosts.
//!
//! [`Auto`] makes the group of all ranks; how the groups that are split from it communicate follows from where
//! their members are:
//!
//! | the members are | they communicate by |
//! |---|---|
//! | on one host | `shm` |
//! | on as many hosts as there are members | the network |
//! | several on each of several hosts | both: a *mixed* group |
//!
//! A mixed group with equally many members on each host, those of a host next to each other, works in levels:
//!
//! - **all-gather**: members with the same place on their hosts (a *rail*) gather over the network, and then the
//!   members of a host what their rails have. Every byte comes to a host once.
//! - **broadcast**: over the source's rail, and then within the hosts.
//! - **all-reduce, reduce-scatter**: in pieces, from the first host to the last. The first members of hosts (the
//!   *leaders*) pass on what is reduced so far; the next host reduces its members' values onto it, in shared memory. From
//!   the last host the results go back. So the order of additions is that of the ranks, as in any other group,
//!   and a training has the same bits on one host and on several; a host sends and receives every byte once each
//!   way. Pieces of several hosts are under way at once.
//!
//! Small all-reduces, all-to-all, barriers and messages, and what mixed groups of other shapes do, go over the network
//! alone.

mod config;
mod group;
mod levels;
mod placement;

pub use config::Auto;
