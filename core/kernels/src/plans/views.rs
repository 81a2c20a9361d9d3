//! Copies of views, and of rows.

use super::{CHUNK, blocks};
use crate::{In, Out, Plan, table};

/// Elements that lie in memory with gaps, or in another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Where its first element is.
    pub address: u64,
    /// Bytes of an element: 2, 4 or 8.
    pub element: u64,
    /// Elements in each dimension.
    pub sizes: [u64; 4],
    /// How many elements lie between neighbours in each dimension.
    pub strides: [u64; 4],
}

impl View {
    /// The same bytes as elements of `bytes`, if they can be taken so: the words that a kernel copies.
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

/// Copies the elements of a view, the last dimension first, to `target`, where they lie one after the other. One launch;
/// `None` if there are 2^32 words or more.
///
/// # Panics
/// If an element has other than 2, 4 or 8 bytes.
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
    // Less than their product, and none is 0.
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

/// Copies rows of `width` bytes of a table, whose numbers are the `rows` ids, to `target`, one after the other; zeros for
/// [`u32::MAX`]. One launch.
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
