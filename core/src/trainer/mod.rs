//! The trainer: loop, events, loggers, callbacks.
