//! Ranks that hold whole parameters: gradients are all-reduced in buckets during backward.

mod bucket;
mod reducer;

pub(super) use reducer::Reducer;
