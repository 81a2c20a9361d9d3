//! Configuration files, layers and overrides.
