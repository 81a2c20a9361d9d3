//! The part of a file's tensor that a tensor of the model is.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};

/// Some rows of a file's tensor, which may be transposed. Rows are counted in the model's tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
    /// Whether the tensors are stacks along their first dimension, of matrices or vectors that the
    /// rest is about. Vectors are not transposed.
    pub(crate) stacked: bool,
    /// Whether the file holds the tensor transposed.
    pub(crate) transposed: bool,
    pub(crate) rows: Rows,
}

/// Rows of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    All,
    /// `len` rows from `start` on.
    Range {
        start: usize,
        len: usize,
    },
    /// For each of `heads` heads, part `part` of `parts`, each of `dim` rows.
    PerHead {
        part: usize,
        parts: usize,
        heads: usize,
        dim: usize,
    },
    /// Every row whose index has the remainder `part` after division by `parts`.
    Interleaved {
        part: usize,
        parts: usize,
    },
}

impl View {
    pub(crate) const WHOLE: Self = Self { stacked: false, transposed: false, rows: Rows::All };

    /// The shape of the model's tensor, made of a file's tensor of this shape. `None` if the file's
    /// tensor does not have the rows.
    pub(crate) fn shape(self, file: &[usize]) -> Option<Vec<usize>> {
        if self.stacked {
            let (count, each) = file.split_first()?;
            let of_each =
                Self { stacked: false, transposed: self.transposed && each.len() > 1, ..self };
            let mut shape = of_each.shape(each)?;
            shape.insert(0, *count);
            return Some(shape);
        }
        let mut shape = file.to_vec();
        if self.transposed {
            match shape.len() {
                2 => shape.reverse(),
                _ => return None,
            }
        }
        let rows = match self.rows {
            Rows::All => return Some(shape),
            Rows::Range { start, len } => {
                (start.checked_add(len)? <= *shape.first()?).then_some(len)?
            }
            Rows::PerHead { parts, heads, dim, .. } => {
                (heads * parts * dim == *shape.first()?).then_some(heads * dim)?
            }
            Rows::Interleaved { parts, .. } => {
                let rows = *shape.first()?;
                rows.is_multiple_of(parts).then_some(rows / parts)?
            }
        };
        shape[0] = rows;
        Some(shape)
    }

    /// The rows of the file's tensor; `None` for all.
    pub(crate) fn rows_in_file(self) -> Option<Vec<Range<usize>>> {
        match self.rows {
            Rows::All | Rows::Interleaved { .. } => None,
            Rows::Range { start, len } => Some(std::iter::once(start..start + len).collect()),
            Rows::PerHead { part, parts, heads, dim } => {
                let of = |head: usize| (head * parts + part) * dim;
                Some((0..heads).map(|head| of(head)..of(head) + dim).collect())
            }
        }
    }

    /// Reads the region of the model's tensor from the file's tensor `file`, flat, to the host.
    ///
    /// # Errors
    /// As [`TensorSource::read`].
    pub(super) fn read(
        self,
        source: &impl TensorSource,
        file: &str,
        region: &Region,
        dtype: DType,
    ) -> Result<Tensor> {
        if self.stacked {
            return self.read_stacked(source, file, region, dtype);
        }
        let part = |region: Region| -> Result<Tensor> {
            let values = source.read(file, &region, dtype, &Device::Cpu)?;
            match self.transposed {
                false => Ok(values.flatten_all()?),
                true => Ok(values.reshape(region.sizes)?.t()?.contiguous()?.flatten_all()?),
            }
        };
        let parts = self.regions(region).into_iter().map(part).collect::<Result<Vec<_>>>()?;
        match parts.as_slice() {
            [whole] => Ok(whole.clone()),
            parts => Ok(Tensor::cat(parts, 0)?),
        }
    }

    fn read_stacked(
        self,
        source: &impl TensorSource,
        file: &str,
        region: &Region,
        dtype: DType,
    ) -> Result<Tensor> {
        let (start, len) = (region.offsets[1], region.sizes[1]);
        let (first, rows) = match self.rows {
            Rows::All => (start, len),
            Rows::Range { start: first, .. } => (first + start, len),
            Rows::Interleaved { parts, .. } => (start * parts, len * parts),
            Rows::PerHead { .. } => return Err(Error::other("stacks have no rows of heads")),
        };
        let mut of_file = region.clone();
        (of_file.offsets[1], of_file.sizes[1]) = (first, rows);
        let transposed = self.transposed && of_file.sizes.len() == 3;
        if transposed {
            of_file.offsets.swap(1, 2);
            of_file.sizes.swap(1, 2);
        }
        let values = source.read(file, &of_file, dtype, &Device::Cpu)?;
        let mut values = values.reshape(of_file.sizes)?;
        if transposed {
            values = values.transpose(1, 2)?.contiguous()?;
        }
        if let Rows::Interleaved { part, parts } = self.rows {
            let mut shape = region.sizes.clone();
            shape.insert(2, parts);
            values = values.reshape(shape)?.narrow(2, part, 1)?;
        }
        Ok(values.contiguous()?.flatten_all()?)
    }

    /// The parts of the file's tensor that hold the region of the model's, one after the other in
    /// its rows. Not for stacks.
    pub(crate) fn regions(self, region: &Region) -> Vec<Region> {
        let rows = match self.rows {
            Rows::All => return vec![self.in_file(region.clone())],
            Rows::Range { start, .. } => vec![(start + region.offsets[0], region.sizes[0])],
            Rows::PerHead { part, parts, dim, .. } => {
                let (mut at, end) = (region.offsets[0], region.offsets[0] + region.sizes[0]);
                let mut rows = Vec::new();
                while at < end {
                    let (head, within) = (at / dim, at % dim);
                    let len = (dim - within).min(end - at);
                    rows.push(((head * parts + part) * dim + within, len));
                    at += len;
                }
                rows
            }
            Rows::Interleaved { part, parts } => {
                let rows = region.offsets[0]..region.offsets[0] + region.sizes[0];
                rows.map(|row| (row * parts + part, 1)).collect()
            }
        };
        let region = |(start, len): (usize, usize)| {
            let mut region = region.clone();
            (region.offsets[0], region.sizes[0]) = (start, len);
            self.in_file(region)
        };
        rows.into_iter().map(region).collect()
    }

    fn in_file(self, mut region: Region) -> Region {
        if self.transposed {
            region.offsets.reverse();
            region.sizes.reverse();
        }
        region
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: [usize; 2], sizes: [usize; 2]) -> Region {
        Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() }
    }

    #[test]
    fn rows_of_transposed_tensors_are_columns() {
        let rows = Rows::Range { start: 6, len: 3 };
        let view = View { stacked: false, transposed: true, rows };
        assert_eq!(view.shape(&[4, 9]), Some(vec![3, 4]));
        assert_eq!(view.shape(&[4, 8]), None);
        assert_eq!(view.regions(&region([1, 0], [2, 4])), [region([0, 7], [4, 2])]);
    }

    #[test]
    fn parts_of_heads_are_apart() {
        let rows = Rows::PerHead { part: 1, parts: 3, heads: 2, dim: 4 };
        let view = View { stacked: false, transposed: false, rows };
        assert_eq!(view.shape(&[24, 5]), Some(vec![8, 5]));
        let found = view.regions(&region([2, 0], [5, 5]));
        assert_eq!(found, [region([6, 0], [2, 5]), region([16, 0], [3, 5])]);
    }

    #[test]
    fn stacks_have_shapes_of_their_matrices() {
        let rows = Rows::Interleaved { part: 1, parts: 2 };
        let view = View { stacked: true, transposed: true, rows };
        assert_eq!(view.shape(&[5, 3, 8]), Some(vec![5, 4, 3]));
        assert_eq!(view.shape(&[5, 8]), Some(vec![5, 4]));
        assert_eq!(view.shape(&[5, 3, 7]), None);
        let rows = Rows::Range { start: 4, len: 4 };
        let view = View { stacked: true, transposed: false, rows };
        assert_eq!(view.shape(&[5, 8, 3]), Some(vec![5, 4, 3]));
        assert_eq!(view.shape(&[5, 7, 3]), None);
        assert_eq!(view.shape(&[]), None);
    }
}
