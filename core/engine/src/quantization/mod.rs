//! Weights in few bits, for frozen bases of adapters (QLoRA).
//!
//! A [`WeightFormat`] packs a weight `[rows, columns]` into two tensors, [codes and scales](PackedPart), of which
//! every row follows from that row of the weight alone. A layer declares them as frozen parameters
//! ([`ModuleBuilder::packed_parameters`](crate::module::ModuleBuilder::packed_parameters)), so that strategies cut,
//! gather and save the packed bytes like those of any parameter, and unpacks them when it computes. What the
//! parameters are filled from is the weight itself: its initial values, or what a checkpoint has under its name.
//!
//! ```
//! use fulgurite_core::quantization::{PackedPart, WeightFormat};
//!
//! let nf4 = WeightFormat::Nf4 { block_size: 64 };
//! // 32 bytes of codes and one of the scale, for each block of 64.
//! assert_eq!(nf4.shape(PackedPart::Codes, [11_008, 4096]), [11_008, 64, 33]);
//! assert_eq!(nf4.shape(PackedPart::Scales, [11_008, 4096]), [11_008, 2]);
//! ```

mod format;
mod int8;
mod nf4;
mod packed;

pub use format::{PackedPart, WeightFormat};
pub use packed::{Packed, SCALE_SUFFIX};
