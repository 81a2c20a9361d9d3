//! Packed parts of quantised weights.

use candle_core::{DType, Device, Tensor};

use super::format::PackedValues;
use super::{PackedPart, WeightFormat};
use crate::{Error, Result};
use fulgurite_collective::shard::Region;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::dry_run::skips_pass;

/// The suffix that turns the name of the codes, which is the weight's, into the name of the scales.
pub const SCALE_SUFFIX: &str = "_scale";

/// Marks a parameter as a packed part of a weight. The weight itself is stored nowhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Packed {
    /// The weight's FQN.
    pub weight: String,
    /// The weight's shape, `[.., rows, columns]`.
    pub shape: Vec<usize>,
    /// The weight's format.
    pub format: WeightFormat,
    /// The part that the parameter holds.
    pub part: PackedPart,
}

impl Packed {
    /// Elements that count towards the model's size: the weight's for its codes, 0 for its scales.
    pub(crate) fn model_elem_count(&self) -> usize {
        match self.part {
            PackedPart::Codes => self.shape.iter().product(),
            PackedPart::Scales => 0,
        }
    }

    /// The region of the weight from which a region of this part is computed: its whole rows.
    pub fn rows(&self, region: &Region) -> Region {
        let leading = self.leading();
        Region {
            offsets: [&region.offsets[..leading], &[0]].concat(),
            sizes: [&region.sizes[..leading], &self.shape[leading..]].concat(),
        }
    }

    /// The number of dimensions before the columns.
    fn leading(&self) -> usize {
        self.shape.len() - 1
    }

    /// Packs a region of the part, flat and on the host. `rows` holds the weight's values in the
    /// region [`rows`](Self::rows), flat, in any dtype and on any device.
    ///
    /// # Errors
    /// If a value is not finite.
    pub fn pack(&self, region: &Region, rows: &Tensor) -> Result<Tensor> {
        if skips_pass(rows.elem_count() * size_of::<f32>()) {
            let dtype = WeightFormat::dtype(self.part);
            return storage::zeros(region.elem_count(), dtype, &Device::Cpu);
        }
        let values = rows.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let values = values.flatten_all()?.contiguous()?;
        // The bytes of a block are never cut.
        let (at, columns) = (self.leading(), self.shape[self.leading()]);
        let range = region.offsets[at]..region.offsets[at] + region.sizes[at];
        let packed = storage::with_host(&values, |values: &[f32]| {
            self.format.pack(self.part, values, columns, range)
        })?
        .map_err(|message| Error::parameter(&self.weight, message))?;
        Ok(match packed {
            PackedValues::Codes(codes) => {
                let n = codes.len();
                Tensor::from_vec(codes, n, &Device::Cpu)?
            }
            PackedValues::Scales(scales) => {
                let n = scales.len();
                Tensor::from_vec(scales, n, &Device::Cpu)?
            }
        })
    }
}
