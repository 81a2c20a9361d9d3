//! Copies of views, and of rows.

use super::{CHUNK, blocks};
use crate::{In, Out, Plan, table};

/// A strided view of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element: 2, 4 or 8.
    pub element: u64,
    /// Size of each dimension, in elements.
    pub sizes: [u64; 4],
    /// Stride of each dimension, in elements.
    pub strides: [u64; 4],
}

impl View {
    /// Returns the same bytes as a view of words of `bytes` bytes, if sizes and alignment permit.
    fn in_words_of(self, bytes: u64, target: u64) -> Option<Self> {
        let many = bytes / self.element;
        let [size0, size1, size2, size3] = self.sizes;
        let [stride0, stride1, stride2, stride3] = self.strides;
        let others = [(size0, stride0), (size1, stride1), (size2, stride2)];
        let fits = (many == 1 || stride3 == 1)
            && size3.is_multiple_of(many)
            && self.address.is_multiple_of(bytes)
            && target.is_multiple_of(bytes)
            && others.iter().all(|&(size, stride)| size < 2 || stride.is_multiple_of(many));
        fits.then(|| Self {
            address: self.address,
            element: bytes,
            sizes: [size0, size1, size2, size3 / many],
            strides: [stride0 / many, stride1 / many, stride2 / many, stride3],
        })
    }
}

/// Copies the elements of a view to contiguous memory at `target`, the last dimension first: one
/// launch. Returns `None` if there are 2^32 words or more.
///
/// # Panics
/// If the element size is not 2, 4 or 8 bytes.
pub fn dense(view: View, target: u64) -> Option<Plan> {
    assert!([2, 4, 8].contains(&view.element), "elements of {} bytes", view.element);
    let mut plan = Plan::default();
    let words = [16, 8, 4, 2].into_iter().filter(|&bytes| bytes >= view.element);
    let View { address, element, sizes, strides } =
        words.filter_map(|bytes| view.in_words_of(bytes, target)).next().unwrap_or(view);
    let n = u32::try_from(sizes.iter().product::<u64>()).ok()?;
    if n == 0 {
        return Some(plan);
    }
    // Each is less than the product, and none is 0.
    let [_, size1, size2, size3] = sizes.map(|size| size as u32);
    let [stride0, stride1, stride2, stride3] = strides;
    let call = match element {
        2 => table::dense_2,
        4 => table::dense_4,
        8 => table::dense_8,
        _ => table::dense_16,
    };
    plan.call(call(
        blocks(n.into(), CHUNK),
        In::at(address),
        Out::at(target),
        n,
        size1,
        size2,
        size3,
        stride0,
        stride1,
        stride2,
        stride3,
    ));
    Some(plan)
}

/// Copies the rows of a table that the `rows` ids select to contiguous memory at `target`: one
/// launch. A row has `width` bytes. The id [`u32::MAX`] gives zeros.
///
/// # Panics
/// If a row has an odd number of bytes.
pub fn pick_rows(ids: u64, table: u64, target: u64, rows: u64, width: u64) -> Plan {
    let mut plan = Plan::default();
    let fits = |word: &u64| [table, target, width].iter().all(|at| at.is_multiple_of(*word));
    let word = [16, 4, 2].into_iter().find(fits);
    let word = word.unwrap_or_else(|| panic!("rows of {width} bytes"));
    if rows * width > 0 {
        plan.call(table::pick_rows(
            blocks(rows * (width / word), CHUNK),
            In::at(ids),
            In::at(table),
            Out::at(target),
            rows,
            width,
            word as u32,
        ));
    }
    plan
}
