//! Checks of layers' inputs.

use candle_core::Tensor;

use crate::{Error, Result};
use fulgurite_engine::parallel::LayerHandle;

/// Checks that the last dimension of a layer's input has `width` elements.
pub(super) fn check_width(layer: &LayerHandle, x: &Tensor, width: usize) -> Result<()> {
    if x.dims().last() == Some(&width) {
        return Ok(());
    }
    Err(Error::module(
        layer.path(),
        format_args!("expected a last dimension of {width}, got {:?}", x.dims()),
    ))
}

/// Checks that a layer's input has the dimensions `dims`.
pub(super) fn check_dims(layer: &LayerHandle, x: &Tensor, dims: &[Dim]) -> Result<()> {
    let fits = |(dim, size): (&Dim, &usize)| match dim {
        Dim::Any(_) => true,
        Dim::Size(want) => want == size,
    };
    if dims.len() == x.rank() && dims.iter().zip(x.dims()).all(fits) {
        return Ok(());
    }
    let dims: Vec<String> = dims
        .iter()
        .map(|dim| match dim {
            Dim::Any(name) => (*name).to_owned(),
            Dim::Size(size) => size.to_string(),
        })
        .collect();
    let message = format!("expected an input of shape [{}], got {:?}", dims.join(", "), x.dims());
    Err(Error::module(layer.path(), message))
}

/// An expected dimension of an input.
pub(super) enum Dim {
    /// Any size; the name is for messages.
    Any(&'static str),
    /// Exactly this size.
    Size(usize),
}
