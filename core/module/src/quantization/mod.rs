//! Quantised weights for the frozen base models of adapters (QLoRA).
//!
//! A [`WeightFormat`] packs a weight `[.., rows, columns]` into two tensors,
//! [codes and scales](PackedPart). Each of their rows depends only on the same row of the weight. A
//! layer declares both as frozen parameters with
//! [`ModuleBuilder::packed_parameters`](crate::module::ModuleBuilder::packed_parameters) and
//! unpacks them when it computes. Strategies shard, gather and save the packed bytes like any
//! parameter. The parameters are filled by packing the weight: its initial values, or the tensor
//! that a checkpoint has under its name.
//!
//! ```
//! use fulgurite_core::quantization::{PackedPart, WeightFormat};
//!
//! let nf4 = WeightFormat::Nf4 { block_size: 64 };
//! // 32 bytes of codes and 1 byte for the scale, for each block of 64.
//! assert_eq!(nf4.shape(PackedPart::Codes, &[11_008, 4096]), [11_008, 64, 33]);
//! assert_eq!(nf4.shape(PackedPart::Scales, &[11_008, 4096]), [11_008, 2]);
//! ```

mod format;
mod int8;
mod nf4;
mod packed;

pub use format::{PackedPart, WeightFormat};
pub use packed::{Packed, SCALE_SUFFIX};
