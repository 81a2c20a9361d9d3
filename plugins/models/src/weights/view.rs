//! The part of a file's tensor that a tensor of the model is.

use fulgurite_engine::shard::Region;

/// Some rows of a file's tensor, which may be transposed. Rows are counted in the model's tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
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
}

impl View {
    pub(crate) const WHOLE: Self = Self { transposed: false, rows: Rows::All };

    /// The shape of the model's tensor, made of a file's tensor of this shape. `None` if the file's
    /// tensor does not have the rows.
    pub(crate) fn shape(self, file: &[usize]) -> Option<Vec<usize>> {
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
        };
        shape[0] = rows;
        Some(shape)
    }

    /// The parts of the file's tensor that hold the region of the model's, one after the other in
    /// its rows.
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
        let view = View { transposed: true, rows: Rows::Range { start: 6, len: 3 } };
        assert_eq!(view.shape(&[4, 9]), Some(vec![3, 4]));
        assert_eq!(view.shape(&[4, 8]), None);
        assert_eq!(view.regions(&region([1, 0], [2, 4])), [region([0, 7], [4, 2])]);
    }

    #[test]
    fn parts_of_heads_are_apart() {
        let view =
            View { transposed: false, rows: Rows::PerHead { part: 1, parts: 3, heads: 2, dim: 4 } };
        assert_eq!(view.shape(&[24, 5]), Some(vec![8, 5]));
        let found = view.regions(&region([2, 0], [5, 5]));
        assert_eq!(found, [region([6, 0], [2, 5]), region([16, 0], [3, 5])]);
    }
}
