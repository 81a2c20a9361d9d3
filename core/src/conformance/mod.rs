//! Conformance suites that any plugin can be put through.
