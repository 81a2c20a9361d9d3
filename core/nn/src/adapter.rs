//! The choice of a layer's computation: plain, or with the adapter that the builder asks for.

use std::sync::Arc;

use super::dora::DoraProduct;
use super::lookup::{Lookup, Table};
use super::lora::{LoraLookup, LoraProduct};
use super::product::Product;
use super::weight::Weight;
use crate::{Error, Result};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::Parameter;

/// Returns the product of the linear layer at the builder's path, and declares its adapter.
pub(super) fn product(
    b: &ModuleBuilder,
    layer: &LayerHandle,
    weight: Weight,
    sizes: [usize; 2],
) -> Result<Arc<dyn Product>> {
    Ok(match b.linear_adapter() {
        None => Arc::new(weight),
        Some(of) if of.dora => Arc::new(DoraProduct::declare(b, layer, of, weight, sizes)?),
        Some(of) => Arc::new(LoraProduct::declare(b, layer, of, weight, sizes)?),
    })
}

/// Returns the lookup of the embedding at the builder's path, and declares its adapter.
pub(super) fn lookup(
    b: &ModuleBuilder,
    layer: &LayerHandle,
    weight: Parameter,
) -> Result<Arc<dyn Lookup>> {
    Ok(match b.adapter() {
        None => Arc::new(Table(weight)),
        Some(of) if of.dora => {
            return Err(Error::module(
                b.path(),
                "is an embedding, which takes no adapter with magnitudes (DoRA); leave it out with \
                 `trainer.adapters.exclude`, or set `trainer.adapters.dora = false`",
            ));
        }
        Some(of) => Arc::new(LoraLookup::declare(b, layer, of, weight)?),
    })
}
