//! [`Twice`]: the tensors of a file for two models.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{TensorInfo, TensorSource};
use fulgurite_engine::shard::Region;
use fulgurite_error::Result;

/// The path of a frozen copy of a model, beside it.
pub(crate) const REFERENCE: &str = "reference";

/// A source with each tensor under its name and under a second one, `PREFIX.name`, which
/// [`names`](TensorSource::names) does not list: a model need not have it.
#[derive(Debug)]
pub(crate) struct Twice<S> {
    source: S,
    prefix: String,
}

impl<S: TensorSource> Twice<S> {
    pub(crate) fn new(source: S, prefix: &str) -> Self {
        Self { source, prefix: format!("{prefix}.") }
    }

    fn own<'a>(&self, name: &'a str) -> &'a str {
        name.strip_prefix(&*self.prefix).unwrap_or(name)
    }
}

impl<S: TensorSource> TensorSource for Twice<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.source.info(self.own(name))
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.source.read(self.own(name), region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.source.read_into(self.own(name), region, target)
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.source.unreadable(self.own(name))
    }

    fn filtered(&self) -> Option<&str> {
        self.source.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.source.warning()
    }
}
