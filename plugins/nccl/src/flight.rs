//! Collectives and messages that a group has begun and not finished.

use std::sync::Arc;
use std::time::Instant;

use fulgurite_engine::collective::{AllToAll, Collective};

use crate::streams::{Event, Memory};

/// Description of a collective or message, for error messages.
pub(crate) struct Notice {
    /// Position among the group's collectives, from 1 on; `None` for messages.
    pub(crate) number: Option<u64>,
    /// `all_reduce Sum of 4096 f32`
    pub(crate) what: String,
    /// The purpose, such as the path of a unit.
    pub(crate) label: Option<String>,
    /// Group ranks that it waits for. A collective waits for all other ranks.
    pub(crate) peers: Vec<usize>,
}

impl Notice {
    /// ``collective 12 (all_reduce Sum of 4096 f32, for unit `layers.3`)``
    pub(crate) fn describe(&self) -> String {
        let what = match &self.label {
            Some(label) => format!("{}, for {label}", self.what),
            None => self.what.clone(),
        };
        match self.number {
            Some(number) => format!("collective {number} ({what})"),
            None => what,
        }
    }
}

/// A collective or message that is under way.
pub(crate) struct Flight {
    pub(crate) notice: Arc<Notice>,
    pub(crate) since: Instant,
    /// `None` until the launch.
    pub(crate) event: Option<Arc<dyn Event>>,
    /// Memory of a dropped work, held until it has run.
    pub(crate) memory: Vec<Memory>,
    /// Time of the last question to the other ranks about their collectives.
    pub(crate) asked: Option<Instant>,
}

impl Flight {
    /// A collective or message that begins now.
    pub(crate) fn new(notice: Notice) -> Self {
        let (notice, since) = (Arc::new(notice), Instant::now());
        Self { notice, since, event: None, memory: Vec::new(), asked: None }
    }
}

/// Describes a collective, for people and for comparison between ranks.
pub(crate) fn describe(collective: &Collective) -> String {
    let name = collective.name();
    match collective {
        Collective::AllReduce { tensor, op } => {
            format!("{name} {op:?} of {} {}", tensor.elem_count(), tensor.dtype().as_str())
        }
        Collective::Broadcast { tensor, src } => {
            let dtype = tensor.dtype().as_str();
            format!("{name} of {} {dtype} from group rank {src}", tensor.elem_count())
        }
        Collective::AllToAll(AllToAll { input, counts, .. }) => {
            let elements = match counts {
                None => input.elem_count(),
                // Ranks may send different lengths.
                Some(counts) => counts.iter().flatten().sum(),
            };
            format!("{name} of {elements} {}", input.dtype().as_str())
        }
        Collective::AllGatherInto(parts) => {
            let tensors = parts.iter().map(|part| &part.output);
            format!("{name} of {}", sizes(tensors))
        }
        Collective::ReduceScatter { parts, op } => {
            let tensors = parts.iter().map(|part| &part.input);
            format!("{name} {op:?} of {}", sizes(tensors))
        }
        Collective::Barrier => name.to_owned(),
    }
}

/// `4096 f32` or `3 tensors, 12288 f32 and 64 bf16`
fn sizes<'a>(tensors: impl ExactSizeIterator<Item = &'a candle_core::Tensor>) -> String {
    let count = tensors.len();
    let mut sizes: Vec<(&'static str, usize)> = Vec::new();
    for tensor in tensors {
        let dtype = tensor.dtype().as_str();
        match sizes.iter_mut().find(|(other, _)| *other == dtype) {
            Some((_, size)) => *size += tensor.elem_count(),
            None => sizes.push((dtype, tensor.elem_count())),
        }
    }
    let sizes: Vec<String> = sizes.iter().map(|(dtype, n)| format!("{n} {dtype}")).collect();
    match count {
        1 => sizes.join(""),
        _ => format!("{count} tensors, {}", sizes.join(" and ")),
    }
}
