//! The memory that the ranks of a group share.

mod bell;
mod layout;
mod region;

pub(crate) use bell::{Bell, ring};
pub(crate) use layout::{BUFFERS, LINE, Layout, MAILS, RankRecord};
pub(crate) use region::Region;
