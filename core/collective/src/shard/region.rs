//! Hyper-rectangles in a global tensor.

use serde::{Deserialize, Serialize};

/// Number of elements of a tensor of this shape. `None` if the product of its nonzero sizes
/// overflows.
pub fn checked_elem_count(shape: &[usize]) -> Option<usize> {
    let nonzero = |&size: &usize| size.max(1);
    shape.iter().map(nonzero).try_fold(1_usize, usize::checked_mul)?;
    Some(shape.iter().product())
}

/// A hyper-rectangle: offsets and sizes, one of each a tensor dimension. A scalar has
/// zero dimensions and one element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Offset of the region in the global tensor.
    pub offsets: Vec<usize>,
    /// Size of the region. A zero in any dimension makes it empty.
    pub sizes: Vec<usize>,
}

/// A stretch of elements that is contiguous both in a region and in the tensor around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Row-major index of the first element in the surrounding tensor.
    pub outer: usize,
    /// Row-major index of the first element in the region.
    pub inner: usize,
    /// Number of elements.
    pub len: usize,
}

impl Region {
    /// All of a tensor.
    pub fn full(shape: &[usize]) -> Self {
        Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.elem_count() == 0
    }

    /// The intersection with another region of the same tensor; `None` if it is empty.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        debug_assert_eq!(self.sizes.len(), other.sizes.len());
        let mut shared = Self { offsets: Vec::new(), sizes: Vec::new() };
        for d in 0..self.sizes.len() {
            let start = self.offsets[d].max(other.offsets[d]);
            let end = (self.offsets[d] + self.sizes[d]).min(other.offsets[d] + other.sizes[d]);
            if start >= end {
                return None;
            }
            shared.offsets.push(start);
            shared.sizes.push(end - start);
        }
        Some(shared)
    }

    /// This region in the coordinates of `outer`, which must contain it.
    pub fn relative_to(&self, outer: &Self) -> Self {
        let offsets = self.offsets.iter().zip(&outer.offsets).map(|(a, b)| a - b).collect();
        Self { offsets, sizes: self.sizes.clone() }
    }

    /// The part of this region that chunk `index` of `parts` along `dim` covers (`torch.chunk`).
    pub(crate) fn chunked(&self, dim: usize, parts: usize, index: usize) -> Self {
        let mut region = self.clone();
        let (offset, size) = super::chunk(self.sizes[dim], parts, index);
        region.offsets[dim] += offset;
        region.sizes[dim] = size;
        region
    }

    /// The region's elements as contiguous runs of a row-major tensor of shape `outer`, in order.
    ///
    /// A region that is contiguous in the tensor is one run.
    pub fn runs(&self, outer: &[usize]) -> Vec<Run> {
        let runs = Runs::new(self, outer);
        (0..runs.count).map(|index| runs.get(index)).collect()
    }
}

/// A list-free view of a region's runs, by index. All runs have one length.
#[derive(Debug, Clone)]
pub struct Runs {
    /// Number of elements of each run.
    pub len: usize,
    /// Number of runs.
    pub count: usize,
    /// Row-major index of the first run's first element in the surrounding tensor.
    base: usize,
    /// Size in the region and stride in the tensor of each dimension outside of the runs, innermost
    /// first.
    dims: Vec<[usize; 2]>,
}

impl Runs {
    /// The runs of `region` in a row-major tensor of shape `outer`.
    pub fn new(region: &Region, outer: &[usize]) -> Self {
        if region.is_empty() {
            return Self { len: 0, count: 0, base: 0, dims: Vec::new() };
        }
        // Trailing dimensions that the region covers whole merge into one run.
        let mut split = region.sizes.len();
        let mut len = 1;
        while split > 0 {
            split -= 1;
            len *= region.sizes[split];
            if region.sizes[split] != outer[split] {
                break;
            }
        }
        let stride = |d: usize| outer[d + 1..].iter().product::<usize>();
        let base = (0..outer.len()).map(|d| region.offsets[d] * stride(d)).sum();
        let dims: Vec<_> = (0..split).rev().map(|d| [region.sizes[d], stride(d)]).collect();
        let count = dims.iter().map(|[size, _]| size).product();
        Self { len, count, base, dims }
    }

    /// Row-major index of the first run's first element in the surrounding tensor.
    pub fn base(&self) -> usize {
        self.base
    }

    /// As in `dims`, without dimensions of size 1: region size and tensor stride, innermost first.
    pub fn dims(&self) -> impl Iterator<Item = [usize; 2]> {
        self.dims.iter().copied().filter(|[size, _]| *size != 1)
    }

    /// The run with index `index`.
    pub fn get(&self, index: usize) -> Run {
        let (mut outer, mut rest) = (self.base, index);
        for [size, stride] in &self.dims {
            outer += rest % size * stride;
            rest /= size;
        }
        Run { outer, inner: index * self.len, len: self.len }
    }
}
