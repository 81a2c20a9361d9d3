//! The layouts at the edges of a layer: decided when a plan is applied, checked before ranks start
//! along declared edges, and at run time for every input.

use std::fmt;
use std::sync::Arc;

use super::{LayerSharding, Layout, ParallelStyle, Redistribute};
use crate::Result;

/// The layouts at a layer's edges.
#[derive(Debug, Clone)]
pub(crate) struct LayerEdges {
    /// The layer's path and style, for messages.
    pub(crate) name: Arc<str>,
    /// Whether the plan names the layer.
    pub(crate) in_plan: bool,
    /// Whether the layer accepts any part of an activation, and gives the same part.
    pub(crate) on_parts: bool,
    pub(crate) takes: Layout,
    pub(crate) gives: Layout,
    pub(crate) loss_parallel: bool,
    /// Whether the layer cuts whole sequences.
    pub(crate) cuts_sequence: bool,
}

impl LayerEdges {
    /// The edges of a layer that the plan shards.
    ///
    /// # Errors
    /// If the layer cannot redistribute as its sharding says.
    pub(crate) fn new(
        path: &str,
        style: Option<&ParallelStyle>,
        sharding: &LayerSharding,
    ) -> Result<Self> {
        let cuts = |how| matches!(how, Redistribute::ReduceScatter(1) | Redistribute::Split(1));
        let name = match style {
            Some(style) => format!("`{path}` ({})", style.name()),
            None => format!("`{path}`"),
        };
        Ok(Self {
            name: name.into(),
            in_plan: true,
            on_parts: sharding.on_parts,
            takes: sharding.input[0],
            gives: sharding.output[1],
            loss_parallel: sharding.loss_parallel,
            cuts_sequence: sharding.redistributions(path)?.into_iter().any(cuts),
        })
    }

    /// The edges of a layer that computes with whole activations.
    pub(crate) fn not_in_plan(path: &str) -> Self {
        Self {
            name: format!("`{path}` (not in the plan)").into(),
            in_plan: false,
            on_parts: false,
            takes: Layout::Replicate,
            gives: Layout::Replicate,
            loss_parallel: false,
            cuts_sequence: false,
        }
    }

    /// Checks an input with this layout, which `source` gives. `rank` is its number of dimensions,
    /// if known.
    ///
    /// # Errors
    /// If the layer takes another layout. The message names both ends, and how to make them agree.
    pub(crate) fn check(
        &self,
        layout: Option<Layout>,
        source: &str,
        rank: Option<usize>,
        ranks: usize,
    ) -> Result<(), String> {
        let got = describe(layout, source);
        if self.on_parts {
            return match layout == Some(Layout::Replicate) {
                false => Ok(()),
                true => Err(counted_often(&got, ranks)),
            };
        }
        let fits = match layout {
            Some(layout) => same(self.takes, layout, rank),
            None => self.takes != Layout::Replicate,
        };
        if fits {
            return Ok(());
        }
        Err(match self.in_plan {
            true => format!(
                "takes {} as its input and gets {got}; both ends of an edge must have one layout: \
                 change what one gives or what the other takes (`input` and `output` of their \
                 styles), or put a style that redistributes between them",
                self.takes,
            ),
            false => format!(
                "is not in the plan, so it computes with whole activations, and gets {got}: give it a \
                 style for that part (sequence_parallel, replicated_with_grad_allreduce, …), or let \
                 {source} give replicate",
            ),
        })
    }
}

/// A layout with its source, for messages. `None`: known only to the code of the source.
pub(crate) fn describe(layout: Option<Layout>, source: impl fmt::Display) -> String {
    match layout {
        Some(layout) => format!("{layout} from {source}"),
        None => format!("what each rank has of its own, from {source}"),
    }
}

/// Why a layer with partial gradients cannot take a whole activation.
pub(super) fn counted_often(got: &str, ranks: usize) -> String {
    format!(
        "is replicated_with_grad_allreduce, which sums its gradients over the ranks because each has \
         a partial one from another part of an activation, and it gets {got}, of which every rank has \
         the whole gradient: it would count {ranks} times. Leave it out of the plan, or give it a part",
    )
}

/// Why a loss cannot take these logits.
pub(crate) fn sharded_loss(got: &str) -> String {
    format!(
        "the loss takes whole logits and gets {got}; give the layer `output = \"replicate\"`, with \
         `loss_parallel = true` if the loss is to work on parts of the classes",
    )
}

/// Why activations of several layouts cannot be put together.
pub(crate) fn mixed(user: &str, one: &str, other: &str) -> String {
    format!(
        "what {user} gets is put together from {one} and {other}; the ranks must hold all of it in \
         one way: change the plan so that both have one layout",
    )
}

/// Whether two layouts of a tensor with `rank` dimensions are the same. If that is not known,
/// whether they can be.
pub(crate) fn same(a: Layout, b: Layout, rank: Option<usize>) -> bool {
    match (a, b, rank) {
        (Layout::Shard(a), Layout::Shard(b), None) => a == b || (a < 0) != (b < 0),
        (Layout::Shard(a), Layout::Shard(b), Some(rank)) => {
            let place = |dim: isize| if dim < 0 { dim + rank as isize } else { dim };
            place(a) == place(b)
        }
        _ => a == b,
    }
}
