//! Launching ranks, the TCP store, failures and signals.
