//! Copies of many parts of memory in one launch.

use super::{Blocks, CHUNK};
use crate::plan::{Address, rows};
use crate::{Float, Plan, table};

rows! {
    /// A part of memory and its target, as the kernel reads them.
    pub struct CopiedPart {
        /// Address of the target.
        pub target: Address,
        /// Address of the source.
        pub source: Address,
        /// Number of elements, or of bytes.
        pub length: u64,
        /// The first block of this part.
        pub first_block: u32,
        /// The number of the source's dtype, or 4 for bytes.
        pub from: u32,
        /// The number of the target's dtype, or 4 for bytes.
        pub to: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// Bytes of a part that one block copies: `COPIED_BYTES` in `kernels/copies.cu`.
const BYTES: u64 = CHUNK * 4;

/// A copy of one part of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Copied {
    target: u64,
    source: u64,
    length: u64,
    cast: Option<[Float; 2]>,
}

impl Copied {
    /// A copy of bytes, at any addresses.
    pub fn bytes(target: u64, source: u64, bytes: u64) -> Self {
        Self { target, source, length: bytes, cast: None }
    }

    /// A cast of elements to another dtype, rounded to nearest, ties to even.
    ///
    /// # Panics
    /// If one of the dtypes is f64 and the other is not.
    pub fn cast(target: u64, source: u64, elements: u64, [from, to]: [Float; 2]) -> Self {
        if from == to {
            return Self::bytes(target, source, elements * from.size() as u64);
        }
        assert!(from != Float::F64 && to != Float::F64, "the kernel of copies casts no f64");
        Self { target, source, length: elements, cast: Some([from, to]) }
    }
}

/// Makes all copies in one launch, in any order. No target may overlap another target or a source.
pub fn copies(copied: impl IntoIterator<Item = Copied>) -> Plan {
    const NONE: u32 = 4;
    let mut plan = Plan::default();
    let mut blocks = Blocks::default();
    let rows: Vec<_> = copied
        .into_iter()
        .filter(|copied| copied.length > 0)
        .map(|Copied { target, source, length, cast }| {
            let [from, to] = cast.map_or([NONE; 2], |dtypes| dtypes.map(|dtype| dtype as u32));
            CopiedPart {
                target: Address(target),
                source: Address(source),
                length,
                first_block: blocks.next_of(length, if cast.is_some() { CHUNK } else { BYTES }),
                from,
                to,
                unused: 0,
            }
        })
        .collect();
    let count = rows.len() as u32;
    let parts = plan.table(rows);
    plan.call(table::copy_parts(blocks.0, parts, count));
    plan
}
