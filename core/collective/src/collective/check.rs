//! Argument checks that transports make before they start a collective.
//!
//! A rank that passes a wrong argument gets an error before anything is sent. Nothing is started,
//! and the group stays usable. Every transport calls these checks, so their messages are the same.

use candle_core::{DType, Tensor};

use super::{AllGather, AllToAll, ProcessGroup, ReduceScatter};
use crate::Result;

/// The beginning of a transport's error about ranks in different collectives.
pub const RANKS_DIFFER: &str = "the ranks differ in";

/// The beginning of a transport's error about ranks that have not come in time.
pub const TIMED_OUT: &str = "timed out after";

/// The dtypes that every transport carries.
pub const DTYPES: [DType; 8] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F16,
    DType::U8,
    DType::U32,
    DType::I32,
    DType::I64,
];

/// Checks that a tensor is contiguous and of one of [`DTYPES`]. `role` names it in the message.
pub fn tensor(
    group: &dyn ProcessGroup,
    op: &'static str,
    role: &str,
    tensor: &Tensor,
) -> Result<()> {
    if !DTYPES.contains(&tensor.dtype()) {
        let message = format!(
            "the {role} is of dtype {}, which no collective carries; convert it to one of {}",
            tensor.dtype().as_str(),
            DTYPES.map(|d| d.as_str()).join(", "),
        );
        return Err(group.error(op, message));
    }
    if !tensor.is_contiguous() {
        let message = format!(
            "the {role} (shape {:?}, strides {:?}) is not contiguous; pass `.contiguous()?`, or for \
             an output a contiguous view",
            tensor.dims(),
            tensor.stride(),
        );
        return Err(group.error(op, message));
    }
    Ok(())
}

/// Checks that `rank` is a rank of the group.
pub(super) fn root(group: &dyn ProcessGroup, op: &'static str, rank: usize) -> Result<()> {
    if rank >= group.size() {
        let message = format!(
            "there is no rank {rank} in a group of {}; group ranks are 0..{}",
            group.size(),
            group.size(),
        );
        return Err(group.error(op, message));
    }
    Ok(())
}

/// Checks that `rank` is a rank of the group other than this one.
pub fn peer(group: &dyn ProcessGroup, op: &'static str, rank: usize) -> Result<()> {
    root(group, op, rank)?;
    if rank == group.rank() {
        let message = format!("group rank {rank} is this rank itself; name another one");
        return Err(group.error(op, message));
    }
    Ok(())
}

/// Checks the arguments of [`ProcessGroup::all_gather_into`].
pub(super) fn all_gather(group: &dyn ProcessGroup, parts: &[AllGather]) -> Result<()> {
    for (i, part) in parts.iter().enumerate() {
        let sizes = Sizes { part: &part.input, whole: &part.output, counts: &part.counts };
        sizes.check(group, "all_gather_into", i, "input", "output")?;
    }
    Ok(())
}

/// Checks the arguments of [`ProcessGroup::reduce_scatter`].
pub(super) fn reduce_scatter(group: &dyn ProcessGroup, parts: &[ReduceScatter]) -> Result<()> {
    for (i, part) in parts.iter().enumerate() {
        let sizes = Sizes { part: &part.output, whole: &part.input, counts: &part.counts };
        sizes.check(group, "reduce_scatter", i, "output", "input")?;
    }
    Ok(())
}

/// Checks the arguments of [`ProcessGroup::all_to_all`].
pub(super) fn all_to_all(group: &dyn ProcessGroup, exchange: &AllToAll) -> Result<()> {
    const OP: &str = "all_to_all";
    let AllToAll { input, output, counts } = exchange;
    tensor(group, OP, "input", input)?;
    tensor(group, OP, "output", output)?;
    same_dtype(group, OP, input, output)?;
    if let Some(counts) = counts {
        return all_to_all_counts(group, exchange, counts);
    }
    if input.elem_count() != output.elem_count() || !input.elem_count().is_multiple_of(group.size())
    {
        let message = format!(
            "input and output must have the same number of elements, a multiple of the group's \
             size {}; the input has {}, the output {}",
            group.size(),
            input.elem_count(),
            output.elem_count(),
        );
        return Err(group.error(OP, message));
    }
    Ok(())
}

fn all_to_all_counts(
    group: &dyn ProcessGroup,
    exchange: &AllToAll,
    counts: &[Vec<usize>],
) -> Result<()> {
    const OP: &str = "all_to_all";
    let (rank, size) = (group.rank(), group.size());
    if counts.len() != size || counts.iter().any(|row| row.len() != size) {
        let rows: Vec<usize> = counts.iter().map(Vec::len).collect();
        let message = format!(
            "there must be {size} counts for each of the group's {size} ranks; the lists of counts have the \
             lengths {rows:?}"
        );
        return Err(group.error(OP, message));
    }
    let end = |parts: Vec<std::ops::Range<usize>>| parts.last().map_or(0, |part| part.end);
    for (role, tensor, expected) in [
        ("input", &exchange.input, end(exchange.sent(rank, size))),
        ("output", &exchange.output, end(exchange.received(rank, size))),
    ] {
        if tensor.elem_count() != expected {
            let message = format!(
                "the {role} has {} elements; counts adds up to {expected} for this rank",
                tensor.elem_count()
            );
            return Err(group.error(OP, message));
        }
    }
    Ok(())
}

/// Checks the partition given to [`ProcessGroup::split`]. Returns the index of this rank's set, and
/// this rank's index in the set.
pub fn partition(group: &dyn ProcessGroup, partition: &[Vec<usize>]) -> Result<(usize, usize)> {
    const OP: &str = "split";
    let mut times = vec![0usize; group.size()];
    let mut mine = None;
    for (set, ranks) in partition.iter().enumerate() {
        if ranks.is_empty() {
            return Err(group.error(OP, format!("set {set} of the partition is empty")));
        }
        for (place, &rank) in ranks.iter().enumerate() {
            root(group, OP, rank)?;
            times[rank] += 1;
            if rank == group.rank() {
                mine = Some((set, place));
            }
        }
    }
    if let Some(rank) = times.iter().position(|&n| n != 1) {
        let message = format!(
            "every group rank must be in exactly one set of the partition; rank {rank} is in {}",
            times[rank],
        );
        return Err(group.error(OP, message));
    }
    mine.ok_or_else(|| group.error(OP, "this rank is in no set of the partition"))
}

fn same_dtype(
    group: &dyn ProcessGroup,
    op: &'static str,
    input: &Tensor,
    output: &Tensor,
) -> Result<()> {
    if input.dtype() != output.dtype() {
        let message = format!(
            "input and output must have one dtype; the input is {}, the output {}",
            input.dtype().as_str(),
            output.dtype().as_str(),
        );
        return Err(group.error(op, message));
    }
    Ok(())
}

/// This rank's part, the whole tensor, and the sizes of all parts.
struct Sizes<'a> {
    part: &'a Tensor,
    whole: &'a Tensor,
    counts: &'a [usize],
}

impl Sizes<'_> {
    fn check(
        &self,
        group: &dyn ProcessGroup,
        op: &'static str,
        index: usize,
        part_role: &str,
        whole_role: &str,
    ) -> Result<()> {
        tensor(group, op, part_role, self.part)?;
        tensor(group, op, whole_role, self.whole)?;
        same_dtype(group, op, self.part, self.whole)?;
        if self.counts.len() != group.size() {
            let message = format!(
                "part {index} has {} counts; the group has {} ranks, and each needs one",
                self.counts.len(),
                group.size(),
            );
            return Err(group.error(op, message));
        }
        let expected = self.counts[group.rank()];
        if self.part.elem_count() != expected {
            let message = format!(
                "the {part_role} of part {index} has {} elements; counts gives this rank {expected}",
                self.part.elem_count(),
            );
            return Err(group.error(op, message));
        }
        let sum: usize = self.counts.iter().sum();
        if self.whole.elem_count() != sum {
            let message = format!(
                "the {whole_role} of part {index} has {} elements; counts adds up to {sum}",
                self.whole.elem_count(),
            );
            return Err(group.error(op, message));
        }
        Ok(())
    }
}
