//! The loggers against the programs that read what they write.

mod mlflow;
mod tensorboard;
