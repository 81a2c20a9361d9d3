//! How published weights are packed, by `quantization_config` of `config.json`.

use fulgurite_checkpoint::Packing;
use fulgurite_error::Result;

use crate::config::Reader;

/// The packing of a file's weights; `None` if they are plain.
///
/// # Errors
/// As [`Packing::of_config`].
pub(super) fn packing(reader: &Reader<'_>) -> Result<Option<Packing>> {
    let packing = reader.value(Packing::KEY).map(Packing::of_config).transpose();
    packing.map_err(|message| reader.wrong(Packing::KEY, message))
}
