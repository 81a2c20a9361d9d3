//! Weights in formats of 4 and 8 bits, as some models are published.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use serde_json::Value;

use super::narrow::converted;
use super::{TensorInfo, TensorSource};
use crate::Result;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// A format of packed weights, which `quantization_config` of `config.json` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// OCP MXFP4: in `w_blocks` 32 values of 4 bits (E2M1) of a row, and in `w_scales` the exponent
    /// of each block. `w` is a stack of the transposed matrices.
    Mxfp4,
    /// FP8 (E4M3) with a factor `weight_scale_inv` for each block of so many rows and columns of a
    /// matrix; one factor for the matrix if `None`.
    Fp8 {
        /// Rows and columns of a block.
        block: Option<[usize; 2]>,
    },
}

impl Packing {
    /// The key of `config.json` that [`of_config`](Self::of_config) reads.
    pub const KEY: &str = "quantization_config";

    /// Reads the value of [`KEY`](Self::KEY).
    ///
    /// # Errors
    /// A message, if the method is another one than `mxfp4` or `fp8`, or asks for what cannot be
    /// unpacked.
    pub fn of_config(config: &Value) -> std::result::Result<Self, String> {
        let key = |name: &str| config.get(name).filter(|value| !value.is_null());
        match key("quant_method").and_then(Value::as_str) {
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some("fp8") => {
                if let Some(other) = key("fmt").filter(|fmt| *fmt != "e4m3") {
                    return Err(format!("`fmt` is {other}; only \"e4m3\" is read"));
                }
                let Some(size) = key("weight_block_size") else {
                    return Ok(Self::Fp8 { block: None });
                };
                let sides = size.as_array().map(Vec::as_slice).unwrap_or_default();
                let side = |value: &Value| Some(value.as_u64()? as usize).filter(|side| *side > 0);
                match sides.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
                    Some(&[rows, columns]) => Ok(Self::Fp8 { block: Some([rows, columns]) }),
                    _ => Err(format!(
                        "`weight_block_size` is {size}; expected two sizes of at least 1"
                    )),
                }
            }
            found => {
                let found =
                    found.map_or_else(|| "no method".to_owned(), |name| format!("`{name}`"));
                Err(format!(
                    "the weights are quantised by {found}, and only `mxfp4` and `fp8` are read; take the model's \
                     files in bf16, or save them so with `transformers`. To train with quantised weights, see \
                     `trainer.quantization`"
                ))
            }
        }
    }
}

/// A source whose packed weights are values in f32. Other tensors stay as they are.
pub struct PackedSource<S> {
    source: S,
    /// Packed weights by their names, with their scales' names.
    weights: BTreeMap<String, Weight>,
    /// Weights whose scales are missing or do not fit, each with a reason.
    unreadable: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Weight {
    codes: String,
    scales: String,
    packing: Packing,
    shape: Vec<usize>,
}

/// Values in a block of MXFP4, and the bytes that hold them.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;

const BLOCKS_SUFFIX: &str = "_blocks";
const SCALES_SUFFIX: &str = "_scales";
const FACTORS_SUFFIX: &str = "_scale_inv";

impl<S: TensorSource> PackedSource<S> {
    /// Unpacks all weights of `source` that are packed so. Without a packing, those in FP8 are
    /// [unreadable](TensorSource::unreadable).
    pub fn new(source: S, packing: Option<Packing>) -> Self {
        let (mut weights, mut unreadable) = (BTreeMap::new(), BTreeMap::new());
        for codes in source.names() {
            let found = match (packing, source.info(codes)) {
                (Some(Packing::Mxfp4), Some(info)) => {
                    codes.strip_suffix(BLOCKS_SUFFIX).map(|name| (name, info))
                }
                (_, Some(info)) if info.dtype == Dtype::F8_E4M3 => Some((codes, info)),
                _ => None,
            };
            let Some((name, info)) = found else { continue };
            let weight = match name != codes && source.info(name).is_some() {
                true => Err("is there plain and in MXFP4".to_owned()),
                false => weight(&source, packing, name, codes, &info),
            };
            match weight {
                Ok(weight) => drop(weights.insert(name.to_owned(), weight)),
                Err(reason) => drop(unreadable.insert(name.to_owned(), reason)),
            }
        }
        Self { source, weights, unreadable }
    }

    /// Reads the region of a stack of transposed matrices, one after the other: its rows are
    /// columns of the codes.
    fn read_mxfp4(
        &self,
        name: &str,
        weight: &Weight,
        region: &Region,
        dtype: DType,
    ) -> Result<Tensor> {
        let (start, len) = (region.offsets[1], region.sizes[1]);
        let first = start / BLOCK;
        let blocks = (start + len).div_ceil(BLOCK) - first;
        let matrix = |expert: usize| -> Result<Tensor> {
            let rows = (region.offsets[2], region.sizes[2]);
            let mut part =
                Region { offsets: vec![expert, rows.0, first], sizes: vec![1, rows.1, blocks] };
            let exponents = self.source.read_codes(&weight.scales, &part)?;
            part.offsets.push(0);
            part.sizes.push(BLOCK_BYTES);
            let codes = self.source.read_codes(&weight.codes, &part)?;
            let values = unpack_mxfp4(&codes, &exponents);
            let values = Tensor::from_vec(values, (rows.1, blocks * BLOCK), &Device::Cpu)?;
            let values = values.narrow(1, start - first * BLOCK, len)?.t()?.contiguous()?;
            converted(self.location(), name, &values.flatten_all()?, dtype)
        };
        let experts = region.offsets[0]..region.offsets[0] + region.sizes[0];
        let matrices = experts.map(matrix).collect::<Result<Vec<_>>>()?;
        match matrices.as_slice() {
            [] => Ok(Tensor::zeros(0, dtype, &Device::Cpu)?),
            matrices => Ok(Tensor::cat(matrices, 0)?),
        }
    }

    fn read_fp8(
        &self,
        weight: &Weight,
        block: Option<[usize; 2]>,
        region: &Region,
    ) -> Result<Tensor> {
        let codes = self.source.read_codes(&weight.codes, region)?;
        let of_scales = match block {
            None => {
                Region::full(&self.source.info(&weight.scales).map(|i| i.shape).unwrap_or_default())
            }
            Some(block) => {
                let mut of_scales = region.clone();
                let matrix = region.sizes.len() - 2;
                for (dim, block) in (matrix..).zip(block) {
                    let (start, len) = (region.offsets[dim], region.sizes[dim]);
                    let first = start / block;
                    of_scales.offsets[dim] = first;
                    of_scales.sizes[dim] = (start + len).div_ceil(block) - first;
                }
                of_scales
            }
        };
        let scales = self.source.read(&weight.scales, &of_scales, DType::F32, &Device::Cpu)?;
        let scales = fulgurite_engine::execution::read::host::<f32>(&scales)?;
        let values = unpack_fp8(&codes, &scales, block, region);
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    }
}

/// Describes the weight `name` that these codes hold, or says why they do not.
fn weight(
    source: &impl TensorSource,
    packing: Option<Packing>,
    name: &str,
    codes: &str,
    info: &TensorInfo,
) -> std::result::Result<Weight, String> {
    let Some(packing) = packing else {
        return Err(
            "is in FP8, and config.json has no `quantization_config` that says how it is scaled"
                .to_owned(),
        );
    };
    let suffix = if packing == Packing::Mxfp4 { SCALES_SUFFIX } else { FACTORS_SUFFIX };
    let scales = format!("{name}{suffix}");
    let Some(found) = source.info(&scales) else {
        return Err(format!("lacks its scales `{scales}`: download all files of the model"));
    };
    let shape = &info.shape;
    let (fits, unpacked) = match packing {
        Packing::Mxfp4 => match shape.as_slice() {
            [outer @ .., rows, blocks, BLOCK_BYTES]
                if outer.len() == 1 && info.dtype == Dtype::U8 && found.dtype == Dtype::U8 =>
            {
                let columns = blocks.checked_mul(BLOCK);
                let unpacked = [outer, &[columns.unwrap_or(0), *rows]].concat();
                (columns.is_some() && found.shape == shape[..3], unpacked)
            }
            _ => (false, Vec::new()),
        },
        Packing::Fp8 { block: None } => (found.shape.iter().product::<usize>() == 1, shape.clone()),
        Packing::Fp8 { block: Some([rows, columns]) } => match shape.as_slice() {
            [outer @ .., height, width] => {
                let blocks = [height.div_ceil(rows), width.div_ceil(columns)];
                (found.shape == [outer, &blocks].concat(), shape.clone())
            }
            _ => (false, Vec::new()),
        },
    };
    let is_float = [Dtype::F32, Dtype::BF16, Dtype::F16].contains(&found.dtype);
    if !fits || (packing != Packing::Mxfp4 && !is_float) {
        return Err(format!(
            "has codes {} {shape:?} and scales {} {:?}, which do not belong together as `quantization_config` of \
             config.json says",
            info.dtype, found.dtype, found.shape
        ));
    }
    Ok(Weight { codes: codes.to_owned(), scales, packing, shape: unpacked })
}

/// The values of E2M1, in the order of their codes.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Unpacks blocks; in a byte, the first value has the low bits.
fn unpack_mxfp4(codes: &[u8], exponents: &[u8]) -> Vec<f32> {
    let mut values = Vec::with_capacity(codes.len() * 2);
    for (block, exponent) in codes.chunks_exact(BLOCK_BYTES).zip(exponents) {
        let scale = 2f64.powi(i32::from(*exponent) - 127) as f32;
        let scaled = E2M1.map(|value| value * scale);
        for byte in block {
            values.extend([scaled[usize::from(byte & 15)], scaled[usize::from(byte >> 4)]]);
        }
    }
    values
}

/// The value of a code of E4M3, which has no infinities.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => f32::from(mantissa) / 512.0,
        _ => f32::from(8 + mantissa) * 2f32.powi(i32::from(exponent) - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Multiplies the values of the region by the scales of its blocks.
fn unpack_fp8(
    codes: &[u8],
    scales: &[f32],
    block: Option<[usize; 2]>,
    region: &Region,
) -> Vec<f32> {
    let table: [f32; 256] = std::array::from_fn(|code| e4m3(code as u8));
    let (Some([block_rows, block_columns]), [.., rows, columns]) = (block, region.sizes.as_slice())
    else {
        let scale = scales.first().copied().unwrap_or(1.0);
        return codes.iter().map(|code| table[usize::from(*code)] * scale).collect();
    };
    let [.., first_row, first_column] = *region.offsets.as_slice() else { return Vec::new() };
    // Places within the first block.
    let (down, right) = (first_row % block_rows, first_column % block_columns);
    let width = (right + columns).div_ceil(block_columns);
    let height = (down + rows).div_ceil(block_rows);
    let mut values = Vec::with_capacity(codes.len());
    for (index, row) in codes.chunks_exact((*columns).max(1)).enumerate() {
        let (matrix, row_index) = (index / rows, index % rows);
        let line = (matrix * height + (down + row_index) / block_rows) * width;
        let scaled = row.iter().enumerate().map(|(column, code)| {
            table[usize::from(*code)] * scales[line + (right + column) / block_columns]
        });
        values.extend(scaled);
    }
    values
}

impl<S: TensorSource> TensorSource for PackedSource<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        let parts: std::collections::HashSet<&str> = (self.weights.values())
            .flat_map(|weight| [weight.codes.as_str(), weight.scales.as_str()])
            .collect();
        let others = self.source.names().into_iter().filter(|name| !parts.contains(name));
        let packed = self.weights.keys().chain(self.unreadable.keys()).map(String::as_str);
        let mut names: Vec<&str> = others.chain(packed).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        match self.weights.get(name) {
            Some(weight) => Some(TensorInfo { shape: weight.shape.clone(), dtype: Dtype::F32 }),
            None if self.unreadable.contains_key(name) => None,
            None => self.source.info(name),
        }
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(weight) = self.weights.get(name) else {
            return self.source.read(name, region, dtype, device);
        };
        let values = match weight.packing {
            Packing::Mxfp4 => self.read_mxfp4(name, weight, region, dtype)?,
            Packing::Fp8 { block } => {
                let values = self.read_fp8(weight, block, region)?;
                converted(self.location(), name, &values, dtype)?
            }
        };
        Ok(values.to_device(device)?)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        if !self.weights.contains_key(name) {
            return self.source.read_into(name, region, target);
        }
        let values = self.read(name, region, target.dtype(), target.device())?;
        storage::copy_from(target, &values)
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        let own = self.unreadable.get(name).map(String::as_str);
        own.or_else(|| self.source.unreadable(name))
    }

    fn filtered(&self) -> Option<&str> {
        self.source.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.source.warning()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_blocks_have_their_scales() {
        let (rows, columns, block) = (5, 7, [2, 3]);
        let codes: Vec<u8> = (0..35).map(|i| i * 7 % 120).collect();
        let scales: Vec<f32> = (1..=9u8).map(f32::from).collect();
        for (first, right) in [(0, 0), (1, 2), (3, 6)] {
            let region =
                Region { offsets: vec![first, right], sizes: vec![rows - first, columns - right] };
            let at = |row: usize, column: usize| {
                e4m3(codes[row * columns + column]) * scales[row / 2 * 3 + column / 3]
            };
            let within = || (first..rows).flat_map(|row| (right..columns).map(move |c| (row, c)));
            let expected: Vec<f32> = within().map(|(row, column)| at(row, column)).collect();
            let part: Vec<u8> = within().map(|(row, c)| codes[row * columns + c]).collect();
            // The scales that a reader takes for this region.
            let own: Vec<f32> = (first / 2..3)
                .flat_map(|row| (right / 3..3).map(move |column| (row, column)))
                .map(|(row, column)| scales[row * 3 + column])
                .collect();
            assert_eq!(unpack_fp8(&part, &own, Some(block), &region), expected);
        }
    }

    #[test]
    fn codes_have_the_values_of_their_formats() {
        for (code, value) in [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0)] {
            assert_eq!((e4m3(code), e4m3(code | 0x80)), (value, -value));
        }
        assert_eq!(e4m3(0x7e), 448.0);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let mut codes = [0; BLOCK_BYTES];
        (codes[0], codes[15]) = (0x7a, 0x10);
        let values = unpack_mxfp4(&codes, &[128]);
        assert_eq!((values[0], values[1], values[31]), (-2.0, 12.0, 1.0));
        assert_eq!(unpack_mxfp4(&codes, &[0])[1], 6.0 * 2f32.powi(-126) / 2.0);
    }
}
