//! Formats of quantised weights.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, WithDType};
use rayon::prelude::*;

use super::{int8, nf4};
use crate::{Error, Result};
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::dry_run::skips_pass;

/// How a weight is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// Four bits an element: the NF4 level nearest to the element divided by its block's scale.
    /// Levels are as in "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al., 2023).
    /// The scale is the block's largest magnitude, stored in 8 bits relative to the mean of the
    /// row's scales (double quantisation).
    Nf4 {
        /// Elements of a block, which lies in one row. QLoRA uses 64. Must be even.
        block_size: usize,
    },
    /// Eight bits an element, relative to the largest magnitude of its row, as in LLM.int8.
    Int8,
}

/// One of the two tensors of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedPart {
    /// Bytes. `Nf4`: `[.., rows, blocks, 1 + block_size / 2]`, the block's scale and then its
    /// elements, two a byte, the first in the upper half. `Int8`: `[.., rows, columns]`, the value
    /// plus 128.
    Codes,
    /// In f32. `Nf4`: `[.., rows, 2]`, the mean of the row's scales and the largest distance from
    /// it. `Int8`: `[.., rows, 1]`, the factor of the codes.
    Scales,
}

impl WeightFormat {
    /// The format's name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 { .. } => "nf4",
            Self::Int8 => "int8",
        }
    }

    /// Checks that blocks fill whole bytes.
    ///
    /// # Errors
    /// A message, if the block size is zero or odd.
    pub(crate) fn check_block_size(self) -> std::result::Result<(), String> {
        match self {
            Self::Nf4 { block_size } if block_size == 0 || !block_size.is_multiple_of(2) => {
                Err(format!("must be an even number, found {block_size}"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that weights with rows of this length can be packed.
    ///
    /// # Errors
    /// A message, if the row is not a multiple of the block size, or the block size is invalid.
    pub(crate) fn check(self, columns: usize) -> std::result::Result<(), String> {
        self.check_block_size().map_err(|message| format!("nf4's block size {message}"))?;
        match self {
            Self::Nf4 { block_size } if !columns.is_multiple_of(block_size) => Err(format!(
                "has {columns} inputs, which are no multiple of nf4's blocks of {block_size}"
            )),
            _ => Ok(()),
        }
    }

    /// Weight columns per entry of the codes' dimension of columns. Cuts of the columns must be a
    /// multiple of it.
    pub fn columns_a_code(self) -> usize {
        match self {
            Self::Nf4 { block_size } => block_size,
            Self::Int8 => 1,
        }
    }

    /// The shape of a part of a packed weight of this shape, `[.., rows, columns]`.
    pub fn shape(self, part: PackedPart, weight: &[usize]) -> Vec<usize> {
        let (columns, rows) = weight.split_last().map_or((0, weight), |(n, rows)| (*n, rows));
        let of_row: &[usize] = match (self, part) {
            (Self::Nf4 { block_size }, PackedPart::Codes) => {
                &[columns / block_size, nf4::record_bytes(block_size)]
            }
            (Self::Nf4 { .. }, PackedPart::Scales) => &[2],
            (Self::Int8, PackedPart::Codes) => &[columns],
            (Self::Int8, PackedPart::Scales) => &[1],
        };
        [rows, of_row].concat()
    }

    /// The dtype of a part, the same in all formats.
    pub(crate) fn dtype(part: PackedPart) -> DType {
        match part {
            PackedPart::Codes => DType::U8,
            PackedPart::Scales => DType::F32,
        }
    }

    /// The format with codes and scales of these shapes, and the weight's columns. `None` if no
    /// format fits.
    pub fn of_shapes(codes: &[usize], scales: &[usize]) -> Option<(Self, usize)> {
        match (codes, scales) {
            ([rows @ .., blocks, record], [scales @ .., 2]) if rows == scales && *record > 1 => {
                let block_size = 2 * (record - 1);
                Some((Self::Nf4 { block_size }, blocks * block_size))
            }
            ([rows @ .., columns], [scales @ .., 1]) if rows == scales => {
                Some((Self::Int8, *columns))
            }
            _ => None,
        }
    }

    /// Bytes of a packed weight of this shape, `[.., rows, columns]`.
    pub fn bytes(self, weight: &[usize]) -> usize {
        let bytes = |part| {
            let elements: usize = self.shape(part, weight).iter().product();
            elements * Self::dtype(part).size_in_bytes()
        };
        bytes(PackedPart::Codes) + bytes(PackedPart::Scales)
    }

    /// Packs whole rows and returns one part, flat and on the host.
    ///
    /// `values` holds rows of `columns` elements. For codes, `range` selects entries of their
    /// dimension of columns.
    ///
    /// # Errors
    /// A message that names the value, if one is not finite.
    pub(super) fn pack(
        self,
        part: PackedPart,
        values: &[f32],
        columns: usize,
        range: Range<usize>,
    ) -> std::result::Result<PackedValues, String> {
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let (row, column) = (at / columns, at % columns);
            return Err(format!(
                "has {} in row {row} of those read, column {column}: only finite values can be quantised",
                values[at]
            ));
        }
        let rows = values.len().checked_div(columns).unwrap_or(0);
        Ok(match part {
            PackedPart::Codes => {
                let of_row = self.shape(part, &[columns]);
                let unit = of_row.iter().product::<usize>() / of_row[0].max(1);
                let bytes = range.len() * unit;
                let mut codes = vec![0_u8; rows * bytes];
                if bytes > 0 {
                    let rows = codes.par_chunks_mut(bytes).zip(values.par_chunks(columns));
                    rows.for_each(|(codes, row)| match self {
                        Self::Nf4 { block_size } => {
                            nf4::pack(row, block_size, range.clone(), codes)
                        }
                        Self::Int8 => int8::pack(row, range.clone(), codes),
                    });
                }
                PackedValues::Codes(codes)
            }
            PackedPart::Scales => {
                let width = self.shape(part, &[columns])[0];
                let mut scales = vec![0_f32; rows * width];
                let rows = scales.par_chunks_mut(width).zip(values.par_chunks(columns.max(1)));
                rows.for_each(|(scales, row)| match self {
                    Self::Nf4 { block_size } => {
                        scales.copy_from_slice(&nf4::scales(row, block_size))
                    }
                    Self::Int8 => scales[0] = int8::scale(row),
                });
                PackedValues::Scales(scales)
            }
        })
    }

    /// Unpacks codes and scales into a weight `[.., rows, columns]` in `dtype`, on the codes'
    /// device. The codes may be a part of the weight's columns.
    ///
    /// The computation runs on the host. The same codes give the same bits in every part of the
    /// weight.
    ///
    /// # Errors
    /// If the shapes do not fit this format, or `dtype` is not a float that layers compute in.
    pub fn unpack(self, codes: &Tensor, scales: &Tensor, dtype: DType) -> Result<Tensor> {
        self.unpack_where(codes, scales, dtype, |_| true)
    }

    /// [`unpack`](Self::unpack) for the entries of the first dimension that are `wanted`. The
    /// values of the others are zero.
    ///
    /// # Errors
    /// As there.
    pub fn unpack_where(
        self,
        codes: &Tensor,
        scales: &Tensor,
        dtype: DType,
        wanted: impl Fn(usize) -> bool + Sync,
    ) -> Result<Tensor> {
        let leading = scales.rank().saturating_sub(1).min(codes.rank());
        let (before, of_row) = codes.dims().split_at(leading);
        let codes_a_row = of_row.iter().product();
        let columns = of_row.first().copied().unwrap_or(0) * self.columns_a_code();
        let weight = [before, &[columns]].concat();
        let expected = [
            (self.shape(PackedPart::Codes, &weight), codes),
            (self.shape(PackedPart::Scales, &weight), scales),
        ];
        if let Some((shape, found)) = expected.iter().find(|(shape, t)| shape[..] != *t.dims()) {
            let (name, found) = (self.name(), found.dims());
            return Err(Error::other(format!(
                "{name}: expected the shape {shape:?}, found {found:?}"
            )));
        }
        let device = codes.device().clone();
        let elements: usize = weight.iter().product();
        if skips_pass(codes.elem_count() + elements * dtype.size_in_bytes()) {
            return storage::unset(weight, dtype, &device);
        }
        let [codes, scales] = [codes, scales].map(|t| t.to_device(&Device::Cpu)?.contiguous());
        let (codes, scales) = (codes?, scales?);
        let run = |codes: &[u8], scales: &[f32]| -> Result<Tensor> {
            let of_entry = before.iter().skip(1).product::<usize>().max(1);
            let wanted = |row: usize| wanted(row / of_entry);
            let parts = Rows { format: self, codes, codes_a_row, scales, columns, wanted };
            Ok(match dtype {
                DType::F32 => Tensor::from_vec(parts.unpack::<f32>(), &*weight, &device)?,
                DType::F64 => Tensor::from_vec(parts.unpack::<f64>(), &*weight, &device)?,
                DType::BF16 => Tensor::from_vec(parts.unpack::<half::bf16>(), &*weight, &device)?,
                DType::F16 => Tensor::from_vec(parts.unpack::<half::f16>(), &*weight, &device)?,
                other => {
                    let message = format!("quantised weights cannot be computed with in {other:?}");
                    return Err(Error::other(message));
                }
            })
        };
        storage::with_host(&codes, |codes: &[u8]| {
            storage::with_host(&scales, |scales: &[f32]| run(codes, scales))
        })??
    }
}

/// A part of packed rows.
#[derive(Debug)]
pub(super) enum PackedValues {
    Codes(Vec<u8>),
    Scales(Vec<f32>),
}

/// Rows of a packed weight.
struct Rows<'a, W> {
    format: WeightFormat,
    codes: &'a [u8],
    codes_a_row: usize,
    scales: &'a [f32],
    columns: usize,
    /// Whether a row is unpacked.
    wanted: W,
}

impl<W: Fn(usize) -> bool + Sync> Rows<'_, W> {
    fn unpack<T: WithDType + Default + Send + Sync>(&self) -> Vec<T> {
        let rows = self.codes.len().checked_div(self.codes_a_row).unwrap_or(0);
        let mut values = vec![T::default(); rows * self.columns];
        if values.is_empty() {
            return values;
        }
        let width = self.scales.len() / rows;
        let rows = values.par_chunks_mut(self.columns).zip(self.codes.par_chunks(self.codes_a_row));
        let rows = rows.zip(self.scales.par_chunks(width)).enumerate();
        rows.filter(|(row, _)| (self.wanted)(*row)).for_each(|(_, ((out, codes), scales))| {
            match self.format {
                WeightFormat::Nf4 { block_size } => {
                    nf4::unpack(codes, [scales[0], scales[1]], block_size, out)
                }
                WeightFormat::Int8 => int8::unpack(codes, scales[0], out),
            }
        });
        values
    }
}
