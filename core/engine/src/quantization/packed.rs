//! What a parameter is a packed part of.

use candle_core::{DType, Device, Tensor};

use super::format::PackedValues;
use super::{PackedPart, WeightFormat};
use crate::autograd::storage;
use crate::shard::Region;
use crate::{Error, Result};

/// What the name of the codes (that of the weight) ends with in the name of the scales.
pub const SCALE_SUFFIX: &str = "_scale";

/// What a parameter is a packed part of: a weight that exists nowhere else.
#[derive(Debug, Clone, PartialEq)]
pub struct Packed {
    /// The weight's FQN.
    pub weight: String,
    /// The weight's shape, rows and columns.
    pub shape: [usize; 2],
    /// How it is packed.
    pub format: WeightFormat,
    /// Which part this is.
    pub part: PackedPart,
}

impl Packed {
    /// Elements of the weight, counted for its codes alone.
    pub(crate) fn model_elem_count(&self) -> usize {
        match self.part {
            PackedPart::Codes => self.shape.iter().product(),
            PackedPart::Scales => 0,
        }
    }

    /// The region of the weight that this region of the part follows from: the whole of its rows.
    pub fn rows(&self, region: &Region) -> Region {
        Region { offsets: vec![region.offsets[0], 0], sizes: vec![region.sizes[0], self.shape[1]] }
    }

    /// This region of the part, flat and on the host. `rows` are the weight's values of
    /// [`rows`](Self::rows), flat, in any dtype and on any device.
    ///
    /// # Errors
    /// If a value is not finite.
    pub fn pack(&self, region: &Region, rows: &Tensor) -> Result<Tensor> {
        let values = rows.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let values = values.flatten_all()?.contiguous()?;
        // The last dimension of the codes is never cut.
        let range = region.offsets[1]..region.offsets[1] + region.sizes[1];
        let packed = storage::with_host(&values, |values: &[f32]| {
            self.format.pack(self.part, values, self.shape[1], range)
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
