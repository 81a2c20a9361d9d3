//! What a layer knows of its place in a plan.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use candle_core::Tensor;

use super::{Crossing, Layout, Redistribute};
use crate::autograd::GradMode;
use crate::collective::{ProcessGroup, all_gather_object};
use crate::{Error, Result};

/// A layer's record in the [`ModuleTree`](crate::module::ModuleTree), which plans write to and the
/// layer reads when it computes. Clones are the same record.
#[derive(Clone)]
pub struct LayerHandle(Arc<Inner>);

struct Inner {
    path: String,
    parallel: RwLock<Option<Arc<LayerParallel>>>,
}

/// The length of the sequence that a plan's layers have cut, for those that put it together again.
#[derive(Debug, Clone, Default)]
pub struct SequenceLength(Arc<AtomicUsize>);

/// What a plan asks of a layer.
pub struct LayerParallel {
    pub group: Arc<dyn ProcessGroup>,
    /// What happens to the input.
    pub input: Redistribute,
    /// What happens to the output.
    pub output: Redistribute,
    /// The layout that the layer itself computes in, where its result depends on it (dropout).
    pub layout: Layout,
    /// Whether the output is the sum over the ranks, so that a bias is added after the reduction.
    pub sums: bool,
    /// Size of the whole output's last dimension.
    pub output_width: usize,
    /// Whether logits stay cut where the loss works on the parts.
    pub loss_parallel: bool,
    pub sequence: SequenceLength,
    /// What [`last_dimension`](Self::last_dimension) found for a width.
    pub last: Mutex<Option<(usize, (usize, usize))>>,
}

impl LayerParallel {
    /// Where this rank's part of a last dimension begins, `width` of the whole, and how wide that is.
    /// Collective over the group when a width is new.
    pub fn last_dimension(&self, width: usize) -> Result<(usize, usize)> {
        let mut known = self.last.lock().expect("no panic while asking");
        if let Some((of, place)) = *known
            && of == width
        {
            return Ok(place);
        }
        let widths = all_gather_object(&*self.group, &width)?;
        let place = (widths[..self.group.rank()].iter().sum(), widths.iter().sum());
        *known = Some((width, place));
        Ok(place)
    }
}

impl LayerHandle {
    pub fn new(path: String) -> Self {
        Self(Arc::new(Inner { path, parallel: RwLock::default() }))
    }

    /// The layer's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    pub fn parallel(&self) -> Option<Arc<LayerParallel>> {
        self.0.parallel.read().expect("no panic while reading").clone()
    }

    pub fn set_parallel(&self, parallel: LayerParallel) {
        *self.0.parallel.write().expect("no panic while writing") = Some(Arc::new(parallel));
    }

    /// Whether the layer's output is the sum over ranks, so that its bias comes last.
    pub fn sums(&self) -> bool {
        self.parallel().is_some_and(|parallel| parallel.sums)
    }

    /// The input as the layer computes with it. Collective if a plan says so.
    pub fn enter(&self, x: &Tensor) -> Result<(Tensor, Crossing)> {
        match self.parallel() {
            None => Ok((x.detach(), Crossing::none())),
            Some(parallel) => {
                if parallel.layout == Layout::SEQUENCE && parallel.input == Redistribute::Keep {
                    parallel.sequence.check(&self.0.path, x, &*parallel.group)?;
                }
                self.cross(&parallel, parallel.input, &x.detach())
            }
        }
    }

    /// The output as the next layer gets it. Collective if a plan says so.
    pub fn exit(&self, y: Tensor) -> Result<(Tensor, Crossing)> {
        match self.parallel() {
            None => Ok((y, Crossing::none())),
            Some(parallel) => self.cross(&parallel, parallel.output, &y),
        }
    }

    fn cross(
        &self,
        parallel: &LayerParallel,
        how: Redistribute,
        x: &Tensor,
    ) -> Result<(Tensor, Crossing)> {
        let total = |dim| match dim {
            1 => parallel.sequence.check(&self.0.path, x, &*parallel.group),
            _ => Ok(parallel.output_width),
        };
        match how {
            Redistribute::ReduceScatter(1) | Redistribute::Split(1) => {
                parallel.sequence.note(&self.0.path, x, &*parallel.group)?;
            }
            _ => {}
        }
        match how {
            Redistribute::AllGather(dim) | Redistribute::Gather(dim) => {
                how.forward(x, || total(dim), &parallel.group)
            }
            _ => how.forward(x, || Ok(0), &parallel.group),
        }
    }
}

impl SequenceLength {
    /// Notes the length of a sequence that is about to be cut.
    fn note(&self, path: &str, x: &Tensor, group: &dyn ProcessGroup) -> Result<()> {
        let (length, ranks) = (x.dims().get(1).copied().unwrap_or(0), group.size());
        // Without a graph, in generation, any length will do.
        if GradMode::current().expects_backward() && !length.is_multiple_of(ranks) {
            return Err(Error::Module {
                path: path.to_owned(),
                message: format!(
                    "sequence parallelism cannot cut a sequence of {length} positions over {ranks} \
                     ranks of `{}`; use a length that is a multiple of {ranks}",
                    group.name()
                ),
            });
        }
        self.0.store(length, Ordering::Relaxed);
        Ok(())
    }

    /// The length of the sequence that `x` is a part of.
    fn check(&self, path: &str, x: &Tensor, group: &dyn ProcessGroup) -> Result<usize> {
        if GradMode::current().recomputation().is_some() {
            // Its forward has checked it; another sequence may have been cut since.
            return Ok(x.dim(1)? * group.size());
        }
        let length = self.0.load(Ordering::Relaxed);
        let part = crate::shard::chunk(length, group.size(), group.rank()).1;
        if length > 0 && x.dims().get(1) == Some(&part) {
            return Ok(length);
        }
        Err(Error::Module {
            path: path.to_owned(),
            message: format!(
                "takes a part of the sequence (shard(1)) and got a tensor of shape {:?}, {}; the \
                 plan must cut the sequence before this layer, as `output = \"shard(1)\"` on the \
                 embedding does",
                x.dims(),
                match length {
                    0 => "but no layer of the plan has cut one".to_owned(),
                    n => format!("of a sequence of {n} positions this rank should have {part}"),
                }
            ),
        })
    }
}

impl std::fmt::Debug for LayerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LayerHandle").field(&self.0.path).finish()
    }
}
