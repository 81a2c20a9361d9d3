//! Gathering whole tensors on rank 0, one at a time.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::super::ShardTensor;
use super::super::chunks::check_cover;
use super::super::narrow::converted;
use super::super::shard_file::{describe, on_host};
use super::super::stored::loadable_dtype;
use super::layout::TensorMeta;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};
use fulgurite_engine::shard::Region;

/// Size of a message in bytes.
const WINDOW: usize = 8 << 20;

/// The ranks check for failures after this many bytes of tensors.
const CHECK_INTERVAL: u64 = 256 << 20;

/// Each rank's message before any tensor is sent.
#[derive(Debug, Serialize, Deserialize)]
struct Announcement {
    /// Hash of names, shapes and dtypes.
    digest: u64,
    /// This rank's part of each tensor; `None` without one.
    parts: Vec<Option<Region>>,
}

/// Tensors that all ranks have agreed to gather.
pub(super) struct Gather<'a> {
    group: &'a dyn ProcessGroup,
    /// This rank's parts of the tensors.
    parts: Vec<ShardTensor>,
    /// The whole tensors.
    pub(super) tensors: Vec<TensorMeta>,
    /// For each tensor, the ranks that have a part, and the regions of the parts.
    owners: Vec<Vec<(usize, Region)>>,
}

impl<'a> Gather<'a> {
    /// Exchanges the list of tensors to gather: this rank's parts, or its error.
    ///
    /// `convert` returns the dtype that a floating-point tensor is converted to. Collective.
    ///
    /// # Errors
    /// On every rank, if any rank has an error, the ranks list different tensors, or the parts do
    /// not cover a tensor.
    pub(super) fn agree(
        group: &'a dyn ProcessGroup,
        parts: Result<Vec<ShardTensor>>,
        convert: impl Fn(usize) -> Option<DType>,
    ) -> Result<Self> {
        let mut own_error = None;
        let listed = parts.and_then(|parts| {
            let described = describe(&parts)?;
            let tensors = described.into_iter().enumerate().map(|(i, piece)| {
                let wanted = convert(i).filter(|_| parts[i].values.dtype().is_float());
                let dtype = wanted.map_or(piece.dtype, Into::into);
                TensorMeta { name: piece.name, shape: piece.shape, dtype }
            });
            let tensors: Vec<_> = tensors.collect();
            Ok((parts, tensors))
        });
        let announced: Result<Announcement, String> = match &listed {
            Ok((parts, tensors)) => {
                let bytes = serde_json::to_vec(tensors).map_err(Error::other)?;
                let parts =
                    parts.iter().map(|part| (!part.region.is_empty()).then(|| part.region.clone()));
                Ok(Announcement { digest: XxHash3_64::oneshot(&bytes), parts: parts.collect() })
            }
            Err(error) => Err(error.to_string()),
        };
        let (parts, tensors) = listed.unwrap_or_else(|error| {
            own_error = Some(error);
            Default::default()
        });
        let mut owners: Vec<Vec<(usize, Region)>> = vec![Vec::new(); tensors.len()];
        let mut digests = Vec::with_capacity(group.size());
        for (rank, announced) in all_gather_object(group, &announced)?.into_iter().enumerate() {
            match announced {
                Err(message) => {
                    let rank = group.global_ranks()[rank];
                    return Err(own_error.unwrap_or(Error::PeerFailed { rank, message }));
                }
                Ok(announced) => {
                    digests.push(announced.digest);
                    for (owners, part) in owners.iter_mut().zip(announced.parts) {
                        owners.extend(part.map(|region| (rank, region)));
                    }
                }
            }
        }
        if let Some(other) = digests.iter().position(|digest| *digest != digests[0]) {
            let ranks = group.global_ranks();
            return Err(Error::other(format!(
                "gathering tensors: ranks {} and {} list different names, shapes or dtypes. All \
                 ranks must have the same model and give the same options; a filter must say the \
                 same of a name on all of them",
                ranks[0], ranks[other]
            )));
        }
        for (tensor, owners) in tensors.iter().zip(&owners) {
            let regions: Vec<_> = owners.iter().map(|(_, region)| region.clone()).collect();
            if let Err(message) = check_cover(&tensor.shape, &regions) {
                let message = format!("gathering tensor `{}`: it {message}", tensor.name);
                return Err(Error::other(message));
            }
        }
        Ok(Self { group, parts, tensors, owners })
    }

    /// Gathers the tensors `order`, in that order.
    ///
    /// Rank 0 calls `sink` for each with its index and its flat values on the host. Rank 0 holds
    /// one whole tensor and a few megabytes; the other ranks hold a few megabytes. Collective.
    ///
    /// # Errors
    /// On every rank, if anything fails on one, including `sink`.
    pub(super) fn run(
        &self,
        order: impl IntoIterator<Item = usize>,
        mut sink: impl FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut failure = None;
        let mut unchecked = 0;
        for i in order {
            if self.group.rank() == 0 {
                let whole = self.receive(i, &mut failure)?;
                if let (None, Some(whole)) = (&failure, whole) {
                    failure = sink(i, whole).err();
                }
            } else {
                self.send(i, &mut failure)?;
            }
            unchecked += self.tensors[i].bytes();
            if unchecked >= CHECK_INTERVAL {
                self.check(&mut failure)?;
                unchecked = 0;
            }
        }
        self.check(&mut failure)
    }

    /// Fails on all ranks if one has failed. Until this check a failed rank keeps sending and
    /// receiving, so that no other rank waits for it.
    fn check(&self, failure: &mut Option<Error>) -> Result<()> {
        let message = failure.as_ref().map(Error::to_string);
        let messages = all_gather_object(self.group, &message)?;
        let first = messages.into_iter().enumerate().find_map(|(rank, m)| Some((rank, m?)));
        match first {
            None => Ok(()),
            Some((rank, message)) => {
                let rank = self.group.global_ranks()[rank];
                Err(failure.take().unwrap_or(Error::PeerFailed { rank, message }))
            }
        }
    }

    /// The dtype that tensor `i` is gathered in.
    fn dtype(&self, i: usize) -> Result<DType> {
        let tensor = &self.tensors[i];
        loadable_dtype(tensor.dtype).ok_or_else(|| {
            Error::other(format!(
                "tensor `{}`: dtype {} cannot be saved",
                tensor.name, tensor.dtype
            ))
        })
    }

    /// Elements `start..start + len` of this rank's part of tensor `i`, on the host.
    fn window(&self, i: usize, dtype: DType, start: usize, len: usize) -> Result<Tensor> {
        let values = self.parts[i].values.flatten_all()?.narrow(0, start, len)?;
        on_host(&converted(Path::new("model"), &self.tensors[i].name, &values, dtype)?)
    }

    fn send(&self, i: usize, failure: &mut Option<Error>) -> Result<()> {
        let dtype = self.dtype(i)?;
        let Some((_, region)) = self.owners[i].iter().find(|(r, _)| *r == self.group.rank()) else {
            return Ok(());
        };
        for (start, len) in windows(region.elem_count(), dtype) {
            let window = match self.window(i, dtype, start, len) {
                Ok(window) => window,
                Err(error) => {
                    failure.get_or_insert(error);
                    Tensor::zeros(len, dtype, &Device::Cpu)?
                }
            };
            self.group.send(&window, 0)?.wait()?;
        }
        Ok(())
    }

    /// Receives the whole tensor. A failed rank receives too, so that the others go on, and returns
    /// `None`.
    fn receive(&self, i: usize, failure: &mut Option<Error>) -> Result<Option<Tensor>> {
        let (tensor, dtype) = (&self.tensors[i], self.dtype(i)?);
        let n: usize = tensor.shape.iter().product();
        let whole = match failure {
            None => Some(Tensor::zeros(n, dtype, &Device::Cpu)?),
            Some(_) => None,
        };
        for (rank, region) in &self.owners[i] {
            let runs = region.runs(&tensor.shape);
            for (start, len) in windows(region.elem_count(), dtype) {
                let straight = match (&whole, runs.as_slice()) {
                    (Some(whole), [run]) => Some(whole.narrow(0, run.outer + start, len)?),
                    _ => None,
                };
                let window = if *rank == self.group.rank() {
                    match self.window(i, dtype, start, len) {
                        Ok(window) => window,
                        Err(error) => {
                            failure.get_or_insert(error);
                            continue;
                        }
                    }
                } else {
                    let target = match &straight {
                        Some(target) => target.clone(),
                        None => Tensor::zeros(len, dtype, &Device::Cpu)?,
                    };
                    self.group.recv(&target, *rank)?.wait()?;
                    if straight.is_some() {
                        continue;
                    }
                    target
                };
                let placed = match (&whole, straight) {
                    (_, Some(target)) => storage::copy_from(&target, &window),
                    (Some(whole), None) => scatter(whole, &runs, &window, start),
                    (None, None) => Ok(()),
                };
                if let Err(error) = placed {
                    failure.get_or_insert(error);
                }
            }
        }
        Ok(whole)
    }
}

/// Copies a window of a region, from its element `start` on, into the whole tensor.
fn scatter(
    whole: &Tensor,
    runs: &[fulgurite_engine::shard::Run],
    window: &Tensor,
    start: usize,
) -> Result<()> {
    let width = whole.dtype().size_in_bytes();
    let end = start + window.elem_count();
    let first = runs.partition_point(|run| run.inner + run.len <= start);
    storage::with_bytes(window, |window| {
        storage::with_bytes_mut(whole, |whole| {
            for run in runs[first..].iter().take_while(|run| run.inner < end) {
                let (from, to) = (run.inner.max(start), (run.inner + run.len).min(end));
                let outer = run.outer + (from - run.inner);
                whole[outer * width..(outer + to - from) * width]
                    .copy_from_slice(&window[(from - start) * width..(to - start) * width]);
            }
        })
    })?
}

/// First element and number of elements of each message.
fn windows(n: usize, dtype: DType) -> impl Iterator<Item = (usize, usize)> {
    let step = WINDOW / dtype.size_in_bytes().max(1);
    (0..n).step_by(step).map(move |start| (start, step.min(n - start)))
}
