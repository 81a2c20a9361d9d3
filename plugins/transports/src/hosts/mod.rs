//! Process groups of several hosts: shared memory within a host, a network between hosts.
//!
//! [`Auto`] makes the group of all ranks. The hosts of a split group's members determine its
//! transport:
//!
//! | members | transport |
//! |---|---|
//! | all on one host | `shm` |
//! | each on its own host | the network |
//! | several hosts, several members on some | both: a *mixed* group |
//!
//! A mixed group works in levels if each host has equally many members, next to each other in the
//! group's order:
//!
//! - **all-gather**: members with the same place on their hosts (a *rail*) gather over the network.
//!   Then the members of a host gather the data of their rails. Every byte reaches a host once.
//! - **broadcast**: over the source's rail, and then within the hosts.
//! - **all-reduce, reduce-scatter**: in pieces, from the first host to the last. The first members
//!   of hosts (the *leaders*) pass on the partial result. The next host reduces its members' values
//!   onto it, in shared memory. From the last host the results go back. So additions run in rank
//!   order, as in any other group, and a training run is bitwise equal on one host and on several.
//!   A host sends and receives every byte once in each direction. Pieces of several hosts are under
//!   way at once.
//!
//! Small all-reduces, all-to-all, barriers and messages use only the network. So do mixed groups of
//! other shapes.

mod config;
mod group;
mod levels;
mod placement;

pub use config::Auto;
