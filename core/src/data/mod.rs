//! Data modules and the order of samples.
