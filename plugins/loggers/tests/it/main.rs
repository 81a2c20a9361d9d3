//! Tests of the loggers against the programs that read their output.

mod mlflow;
mod tensorboard;
