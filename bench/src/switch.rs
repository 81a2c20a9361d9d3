//! A process group whose collectives can be recorded or skipped.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fulgurite::prelude::*;
use fulgurite_core::collective::{
    AllGather, AllToAll, Collective, End, Intercepted, Interceptor, ProcessGroup, ReduceOp,
    ReduceScatter, Work,
};

/// Treatment of collectives by a [`Control`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Mode {
    /// Runs the collective.
    Run,
    /// Runs the collective and notes it.
    Note,
    /// Skips the collective and reports it as done at once. The rank continues with its own values,
    /// or with the buffer's old contents.
    LeaveOut,
}

/// The shared mode of a group and its subgroups, and the notes.
#[derive(Clone, Default)]
pub(super) struct Control {
    mode: Arc<AtomicU8>,
    notes: Arc<Mutex<Vec<Note>>>,
}

impl Control {
    pub(super) fn set(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::SeqCst);
    }

    fn is(&self, mode: Mode) -> bool {
        self.mode.load(Ordering::SeqCst) == mode as u8
    }

    /// Returns and clears the notes, in order.
    pub(super) fn take_notes(&self) -> Vec<Note> {
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The group, whose collectives do what this says, and so the groups that are split from it.
    pub(super) fn watch(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Intercepted::new(group, self.clone()))
    }

    /// The note of a collective, if notes are taken.
    fn note(&self, group: &Arc<dyn ProcessGroup>, collective: &Collective) -> Option<Note> {
        let noted = self.is(Mode::Note) && group.size() > 1;
        noted.then(|| Note::new(group, collective))
    }

    fn keep(&self, note: Option<Note>) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).extend(note);
    }
}

/// A started collective, without its tensors.
pub(super) struct Note {
    group: Arc<dyn ProcessGroup>,
    device: Device,
    shape: Shape,
    /// See [`Collective::bytes`].
    pub(super) bytes: usize,
}

/// Element counts and dtypes; for sharded collectives, the counts of each rank.
enum Shape {
    AllReduce(usize, DType, ReduceOp),
    AllGather(Vec<(Vec<usize>, DType)>),
    ReduceScatter(Vec<(Vec<usize>, DType)>, ReduceOp),
    Broadcast(usize, DType, usize),
    AllToAll([usize; 2], Option<Vec<Vec<usize>>>, DType),
    Barrier,
}

impl Note {
    fn new(group: &Arc<dyn ProcessGroup>, collective: &Collective) -> Self {
        let shape = match collective {
            Collective::AllReduce { tensor, op } => {
                Shape::AllReduce(tensor.elem_count(), tensor.dtype(), *op)
            }
            Collective::AllGatherInto(parts) => {
                let part = |part: &AllGather| (part.counts.clone(), part.output.dtype());
                Shape::AllGather(parts.iter().map(part).collect())
            }
            Collective::ReduceScatter { parts, op } => {
                let part = |part: &ReduceScatter| (part.counts.clone(), part.input.dtype());
                Shape::ReduceScatter(parts.iter().map(part).collect(), *op)
            }
            Collective::Broadcast { tensor, src } => {
                Shape::Broadcast(tensor.elem_count(), tensor.dtype(), *src)
            }
            Collective::AllToAll(AllToAll { input, output, counts }) => {
                let elements = [output.elem_count(), input.elem_count()];
                Shape::AllToAll(elements, counts.clone(), input.dtype())
            }
            Collective::Barrier => Shape::Barrier,
        };
        let device = match collective {
            Collective::AllReduce { tensor, .. } | Collective::Broadcast { tensor, .. } => {
                Some(tensor.device())
            }
            Collective::AllToAll(exchange) => Some(exchange.input.device()),
            Collective::AllGatherInto(parts) => parts.first().map(|part| part.output.device()),
            Collective::ReduceScatter { parts, .. } => {
                parts.first().map(|part| part.input.device())
            }
            Collective::Barrier => None,
        };
        let device = device.unwrap_or(&Device::Cpu).clone();
        Self { group: group.clone(), device, shape, bytes: collective.bytes() }
    }

    /// Returns the collective with new tensors in the transport's preferred memory, and its group.
    pub(super) fn again(&self) -> Result<(Arc<dyn ProcessGroup>, Collective)> {
        let group = &self.group;
        let tensor = |elements: usize, dtype: DType| -> Result<Tensor> {
            let tensor = group.empty(elements, dtype, &self.device)?;
            // Zeros, so that repeated sums stay finite.
            tensor.zero_set()?;
            Ok(tensor)
        };
        let two = |(counts, dtype): &(Vec<usize>, DType)| -> Result<(Tensor, Tensor)> {
            Ok((tensor(counts.iter().sum(), *dtype)?, tensor(counts[group.rank()], *dtype)?))
        };
        let collective = match &self.shape {
            Shape::AllReduce(elements, dtype, op) => {
                Collective::all_reduce(&tensor(*elements, *dtype)?, *op)
            }
            Shape::AllGather(parts) => {
                let part = |shape: &(Vec<usize>, DType)| -> Result<AllGather> {
                    let (output, input) = two(shape)?;
                    Ok(AllGather { output, input, counts: shape.0.clone() })
                };
                Collective::all_gather_into(parts.iter().map(part).collect::<Result<_>>()?)
            }
            Shape::ReduceScatter(parts, op) => {
                let part = |shape: &(Vec<usize>, DType)| -> Result<ReduceScatter> {
                    let (input, output) = two(shape)?;
                    Ok(ReduceScatter { input, output, counts: shape.0.clone() })
                };
                Collective::reduce_scatter(parts.iter().map(part).collect::<Result<_>>()?, *op)
            }
            Shape::Broadcast(elements, dtype, src) => {
                Collective::broadcast(&tensor(*elements, *dtype)?, *src)
            }
            Shape::AllToAll([output, input], counts, dtype) => Collective::AllToAll(AllToAll {
                output: tensor(*output, *dtype)?,
                input: tensor(*input, *dtype)?,
                counts: counts.clone(),
            }),
            Shape::Barrier => Collective::Barrier,
        };
        Ok((group.clone(), collective))
    }
}

// Strategies send no messages in a step: they are passed on.
impl Interceptor for Control {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        if self.is(Mode::LeaveOut) {
            return Ok(Work::ready());
        }
        self.keep(self.note(group, &collective));
        group.start(collective, overlap)
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        if self.is(Mode::LeaveOut) {
            return Ok(Some(Work::ready()));
        }
        let note = self.note(group, &collective);
        let work = group.start_after(end, collective)?;
        self.keep(note.filter(|_| work.is_some()));
        Ok(work)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.watch(part))
    }
}
