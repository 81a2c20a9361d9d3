//! Loading where only rank 0 can read: it reads tensor by tensor and sends them to the others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::load::{LoadPlan, check_patterns, local_parameter_targets, state_targets};
use super::manifest::Section;
use super::narrow::converted;
use super::stored::loadable_dtype;
use super::tied::{differ, same_values};
use super::{LoadOptions, LoadReport, TensorInfo, TensorSource};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, ProcessGroup, broadcast_object};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::shard::{Region, Run};

/// Size of a message in bytes.
const WINDOW: usize = 8 << 20;

/// A source that only rank 0 reads, as PyTorch's `broadcast_from_rank0`.
///
/// It is for weights on a disk that the other hosts do not have, or in the memory of one process.
///
/// Rank 0 reads one whole tensor at a time and broadcasts it in messages of 8 MiB; each rank keeps
/// its own part. So rank 0 needs memory for one tensor, and the others for one message. Where all
/// ranks can read, [`load_into`](super::load_into) is faster: each reads its own part.
pub struct RankZeroSource<'a> {
    group: &'a dyn ProcessGroup,
    source: Source<'a>,
}

enum Source<'a> {
    /// On rank 0.
    Read(Box<dyn TensorSource + 'a>),
    /// On the other ranks.
    Told(Described),
}

/// Rank 0's description of its source for the other ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Described {
    location: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Dtype)>,
    unreadable: BTreeMap<String, String>,
    filtered: Option<String>,
}

impl<'a> RankZeroSource<'a> {
    /// Calls `open` on rank 0 of `group`, and sends the list of tensors to the other ranks.
    /// Collective.
    ///
    /// # Errors
    /// On every rank, if `open` fails on rank 0.
    pub fn new(
        group: &'a dyn ProcessGroup,
        open: impl FnOnce() -> Result<Box<dyn TensorSource + 'a>>,
    ) -> Result<Self> {
        if group.rank() == 0 {
            let opened = open();
            let told = opened.as_ref().map(|source| Described::of(&**source));
            let _ = broadcast_object(group, &told.map_err(ToString::to_string), 0)?;
            return Ok(Self { group, source: Source::Read(opened?) });
        }
        let told = broadcast_object(group, &Err::<Described, String>(String::new()), 0)?;
        let told =
            told.map_err(|message| Error::PeerFailed { rank: group.global_ranks()[0], message })?;
        Ok(Self { group, source: Source::Told(told) })
    }

    /// Fills this rank's part of every parameter, as [`load_into`](super::load_into). Collective.
    ///
    /// # Errors
    /// As [`load_into`](super::load_into), on every rank.
    pub fn load_into(
        &self,
        tree: &ModuleTree,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let options = options.into();
        let targets = local_parameter_targets(tree, &options)?;
        let renamed = Section::Model.renamed(self.described(), &targets, &options)?;
        check_patterns(self.described(), &*renamed, &targets, &options)?;
        let plan = LoadPlan::new(&*renamed, &targets, &options, Section::Model);
        plan.check(&options)?;
        self.check_tied(&*renamed, &plan)?;
        self.fill(&*renamed, plan, &options)
    }

    /// Fills this rank's part of an optimizer's state, as
    /// [`load_optimizer`](super::load_optimizer).
    ///
    /// Collective.
    ///
    /// # Errors
    /// As [`load_optimizer`](super::load_optimizer), on every rank.
    pub fn load_optimizer(
        &self,
        tree: &ModuleTree,
        states: &[StateTensor],
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let options = options.into();
        let targets = state_targets(tree, states, &options);
        let renamed = Section::Optimizer.renamed(self.described(), &targets, &options)?;
        let plan = LoadPlan::new(&*renamed, &targets, &options, Section::Optimizer);
        plan.check(&options)?;
        self.fill(&*renamed, plan, &options)
    }

    /// Returns all tensors, whole, in host memory, on every rank. Collective.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot read a tensor.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let source = self.described();
        let mut tensors = BTreeMap::new();
        for name in source.names() {
            let Some(info) = source.info(name) else { continue };
            let read = self.read_on_rank_zero(source, name, &info, &LoadOptions::default())?;
            let whole = Region::full(&info.shape);
            let values = match &read {
                Some(values) => values.clone(),
                None => Tensor::zeros(whole.elem_count(), dtype_of(name, &info)?, &Device::Cpu)?,
            };
            let local = read.is_none().then(|| (values.clone(), whole));
            self.send(name, &info, read.as_ref(), local.as_ref())?;
            tensors.insert(name.to_owned(), values.reshape(info.shape)?);
        }
        Ok(tensors)
    }

    /// The source's names and shapes, and on rank 0 its values.
    pub fn described(&self) -> &dyn TensorSource {
        match &self.source {
            Source::Read(source) => &**source,
            Source::Told(told) => told,
        }
    }

    /// Does [`LoadPlan::check_tied`] for whole tensors, on rank 0. Collective.
    fn check_tied(&self, source: &dyn TensorSource, plan: &LoadPlan<'_>) -> Result<()> {
        let shared: Vec<_> = plan.shared().map(|(_, name, other)| (name, other)).collect();
        if shared.is_empty() {
            return Ok(());
        }
        let check = || {
            for (name, other) in &shared {
                if !same_values(source, name, other)? {
                    return Err(differ(source, name, other));
                }
            }
            Ok(())
        };
        let checked = if self.group.rank() == 0 { check() } else { Ok(()) };
        let failure = checked.as_ref().err().map(ToString::to_string);
        let failure = broadcast_object(self.group, &failure, 0)?;
        checked?;
        match failure {
            None => Ok(()),
            Some(message) => Err(Error::PeerFailed { rank: self.group.global_ranks()[0], message }),
        }
    }

    /// Sends the tensors of the plan. The order follows from names and shapes, so all ranks agree.
    fn fill(
        &self,
        source: &dyn TensorSource,
        plan: LoadPlan<'_>,
        options: &LoadOptions,
    ) -> Result<LoadReport> {
        for fill in plan.fills() {
            let fill = fill?;
            let Some(info) = source.info(fill.name) else { continue };
            let whole = self.read_on_rank_zero(source, fill.name, &info, options)?;
            self.send(fill.name, &info, whole.as_ref(), fill.into.as_ref())?;
            fill.finish()?;
        }
        Ok(plan.into_report())
    }

    /// Returns the whole tensor on rank 0. Collective: the others learn whether it could be read.
    fn read_on_rank_zero(
        &self,
        source: &dyn TensorSource,
        name: &str,
        info: &TensorInfo,
        options: &LoadOptions,
    ) -> Result<Option<Tensor>> {
        if self.group.rank() == 0 {
            let read = || {
                let whole = Region::full(&info.shape);
                let values =
                    Tensor::zeros(whole.elem_count(), dtype_of(name, info)?, &Device::Cpu)?;
                match options.verify {
                    true => source.read_into(name, &whole, &values)?,
                    false => source.read_into_unverified(name, &whole, &values)?,
                }
                Ok(values)
            };
            let read: Result<Tensor> = read();
            let failure = read.as_ref().err().map(ToString::to_string);
            broadcast_object(self.group, &failure, 0)?;
            return read.map(Some);
        }
        match broadcast_object(self.group, &None::<String>, 0)? {
            None => Ok(None),
            Some(message) => Err(Error::PeerFailed { rank: self.group.global_ranks()[0], message }),
        }
    }

    /// Broadcasts a tensor. `local` is this rank's memory and the region that it keeps.
    fn send(
        &self,
        name: &str,
        info: &TensorInfo,
        whole: Option<&Tensor>,
        local: Option<&(Tensor, Region)>,
    ) -> Result<()> {
        let dtype = dtype_of(name, info)?;
        let elements: usize = info.shape.iter().product();
        let step = WINDOW / dtype.size_in_bytes();
        let part = local.filter(|(_, region)| !region.is_empty());
        let runs = part.map(|(_, region)| region.runs(&info.shape)).unwrap_or_default();
        let received = match part {
            Some((values, _)) if is_plain(values, dtype) => Some(values.flatten_all()?),
            Some((_, region)) => Some(Tensor::zeros(region.elem_count(), dtype, &Device::Cpu)?),
            None => None,
        };
        for start in (0..elements).step_by(step) {
            let len = step.min(elements - start);
            let window = match whole {
                Some(whole) => whole.narrow(0, start, len)?,
                None => Tensor::zeros(len, dtype, &Device::Cpu)?,
            };
            self.group.run(Collective::broadcast(&window, 0))?;
            if let Some(received) = &received {
                keep(received, &runs, &window, start)?;
            }
        }
        match (part, received) {
            (Some((values, _)), Some(received)) if !is_plain(values, dtype) => {
                let location = self.described().location();
                let received = converted(location, name, &received, values.dtype())?;
                storage::copy_from(values, &received.to_device(values.device())?)
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for RankZeroSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("RankZeroSource");
        debug.field("location", &self.described().location()).finish_non_exhaustive()
    }
}

impl Described {
    fn of(source: &dyn TensorSource) -> Self {
        let of =
            |name: &str| source.info(name).map(|info| (name.to_owned(), (info.shape, info.dtype)));
        let reason = |name: &str| Some((name.to_owned(), source.unreadable(name)?.to_owned()));
        Self {
            location: source.location().to_owned(),
            tensors: source.names().into_iter().filter_map(of).collect(),
            unreadable: source.names().into_iter().filter_map(reason).collect(),
            filtered: source.filtered().map(str::to_owned),
        }
    }
}

/// Describes the tensors on the other ranks; the values are on rank 0.
impl TensorSource for Described {
    fn location(&self) -> &Path {
        &self.location
    }

    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.tensors.keys().chain(self.unreadable.keys()).map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.unreadable.get(name).map(String::as_str)
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let (shape, dtype) = self.tensors.get(name)?.clone();
        Some(TensorInfo { shape, dtype })
    }

    fn read(&self, name: &str, _: &Region, _: DType, _: &Device) -> Result<Tensor> {
        let message = format!("tensor `{name}`: its values are on rank 0, which sends them");
        Err(Error::checkpoint(&self.location, message))
    }

    fn filtered(&self) -> Option<&str> {
        self.filtered.as_deref()
    }
}

fn dtype_of(name: &str, info: &TensorInfo) -> Result<DType> {
    loadable_dtype(info.dtype).ok_or_else(|| {
        Error::other(format!("tensor `{name}`: values of dtype {} cannot be loaded", info.dtype))
    })
}

/// Whether values of this dtype can be received directly into their memory.
fn is_plain(values: &Tensor, dtype: DType) -> bool {
    values.dtype() == dtype && values.device().is_cpu() && values.is_contiguous()
}

/// Copies the elements that a window and a part share into the part.
///
/// The window begins at element `start` of the whole tensor; `runs` are the part's runs.
fn keep(part: &Tensor, runs: &[Run], window: &Tensor, start: usize) -> Result<()> {
    let width = window.dtype().size_in_bytes();
    let end = start + window.elem_count();
    let first = runs.partition_point(|run| run.outer + run.len <= start);
    storage::with_bytes(window, |window| {
        storage::with_bytes_mut(part, |part| {
            for run in runs[first..].iter().take_while(|run| run.outer < end) {
                let (from, to) = (run.outer.max(start), (run.outer + run.len).min(end));
                let inner = run.inner + (from - run.outer);
                part[inner * width..(inner + to - from) * width]
                    .copy_from_slice(&window[(from - start) * width..(to - start) * width]);
            }
        })
    })?
}
