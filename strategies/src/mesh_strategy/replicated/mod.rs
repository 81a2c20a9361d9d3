//! Ranks that hold whole parameters; gradients are all-reduced in buckets while backward goes on.

mod bucket;
mod reducer;

pub(super) use reducer::Reducer;
