//! Tensors between the ranks of a pipeline.
//!
//! Each ordered pair of neighbours has a group of its own, in which the first only sends and the
//! second only receives. A thread receives what comes in a step, so a rank's sends never wait for
//! what the other computes, and no order of actions can make two ranks wait for each other's
//! messages. A message has a head of fixed size for each tensor, which says what follows, and the
//! tensor: lengths may differ from micro-batch to micro-batch. In a dry run nothing comes: the rank receives what
//! [`DryBorders`] says.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Label, ProcessGroup, Work};
use fulgurite_engine::execution::{self, ContextGuard, dry_run, read};
use fulgurite_engine::module::stage::{Border, BorderTensor};
use fulgurite_engine::parallel::Layout;
use fulgurite_engine::strategy::{BorderId, DryBorders};
use fulgurite_error::{Error, Result};

use super::assignment::pair;

/// The direction of a message: an activation, or a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// The identity of a message: direction, receiving stage, micro-batch.
pub(super) type Key = (Direction, usize, usize);

/// The groups between this rank and the others of the pipeline.
pub(super) struct Links {
    /// By receiver, and by sender.
    out: BTreeMap<usize, Arc<dyn ProcessGroup>>,
    incoming: BTreeMap<usize, Arc<dyn ProcessGroup>>,
    device: Device,
}

/// Numbers in a tensor's head.
const HEAD: usize = 16;
/// Dimensions of a tensor at most.
const MAX_DIMS: usize = 7;
const DTYPES: [DType; 6] =
    [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::I64];

impl Links {
    /// Makes the groups of neighbouring stages. Collective over the pipeline.
    pub(super) fn new(
        pipeline: &Arc<dyn ProcessGroup>,
        rank_of_stage: &[usize],
        device: &Device,
    ) -> Result<Self> {
        let neighbours = rank_of_stage.windows(2).map(|pair| [pair[0], pair[1]]);
        let mut pairs: Vec<[usize; 2]> =
            neighbours.flat_map(|[a, b]| [[a, b], [b, a]]).filter(|[a, b]| a != b).collect();
        pairs.sort_unstable();
        pairs.dedup();
        let (mut out, mut incoming) = (BTreeMap::new(), BTreeMap::new());
        for [from, to] in pairs {
            let group = pair(pipeline, [from, to], &format!("pipeline {from} to {to}"))?;
            if pipeline.rank() == from {
                out.insert(to, group);
            } else if pipeline.rank() == to {
                incoming.insert(from, group);
            }
        }
        Ok(Self { out, incoming, device: device.clone() })
    }

    /// The groups, for connecting them.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Arc<dyn ProcessGroup>> {
        self.out.values().chain(self.incoming.values())
    }

    /// Starts to send a message to a rank of the pipeline.
    pub(super) fn send(&self, to: usize, key: Key, border: &Border) -> Result<Sent> {
        let group = self.out.get(&to).ok_or_else(|| not_linked(to))?;
        let _label = label(key);
        let mut sent = Sent { works: Vec::new(), _held: Vec::new() };
        for (behind, of) in (0..border.tensors.len()).rev().zip(&border.tensors) {
            let head = Tensor::new(&head(key, of, behind)?, &Device::Cpu)?;
            for tensor in [head, of.tensor.detach().contiguous()?] {
                sent.works.push(group.send(&tensor, 1)?);
                sent._held.push(tensor);
            }
        }
        Ok(sent)
    }

    /// Waits for a message of a rank of the pipeline. Not while [`receive_all`](Self::receive_all)
    /// runs.
    pub(super) fn receive(&self, from: usize) -> Result<(Key, Border)> {
        let group = self.incoming.get(&from).ok_or_else(|| not_linked(from))?;
        receive(&**group, &self.device)
    }

    /// Receives on threads: this many messages of each rank. `step` counts the calls.
    pub(super) fn receive_all(
        &self,
        counts: &BTreeMap<usize, usize>,
        step: usize,
    ) -> Result<Inbox> {
        if let Some(borders) = dry_borders()? {
            let (incoming, device) = (self.incoming.clone(), self.device.clone());
            let messages = HashMap::new();
            return Ok(Inbox::Dry(DryInbox { borders, step, incoming, device, messages }));
        }
        let arrived = Arc::new(Arrived::default());
        let mut threads = Vec::new();
        for (from, &count) in counts {
            let group = self.incoming.get(from).ok_or_else(|| not_linked(*from))?.clone();
            let (arrived, device) = (arrived.clone(), self.device.clone());
            let receive = move || {
                for _ in 0..count {
                    let message = receive(&*group, &device);
                    let failed = message.is_err();
                    arrived.put(message);
                    if failed {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("from stage rank {from}"));
            threads.push(thread.spawn(receive).map_err(Error::other)?);
        }
        Ok(Inbox::Real { arrived, threads })
    }
}

/// A dry run's borders; `None` in a real run.
fn dry_borders() -> Result<Option<Arc<DryBorders>>> {
    if !dry_run::is_on() {
        return Ok(None);
    }
    let missing = || Error::other("a dry run of a pipeline needs `DryBorders` in its context");
    execution::value::<DryBorders>().ok_or_else(missing).map(Some)
}

fn not_linked(rank: usize) -> Error {
    Error::other(format!("no stage of rank {rank} of the pipeline is next to one of this rank"))
}

/// A message under way, and its memory.
pub(super) struct Sent {
    works: Vec<Work>,
    _held: Vec<Tensor>,
}

impl Sent {
    pub(super) fn wait(self) -> Result<()> {
        self.works.into_iter().try_for_each(Work::wait)
    }
}

/// Messages that have come, or will.
///
/// If the step fails, its threads end with their groups, which fail too.
pub(super) enum Inbox {
    Real { arrived: Arc<Arrived>, threads: Vec<JoinHandle<()>> },
    Dry(DryInbox),
}

/// Messages that come when a dry run expects them.
pub(super) struct DryInbox {
    borders: Arc<DryBorders>,
    step: usize,
    incoming: BTreeMap<usize, Arc<dyn ProcessGroup>>,
    device: Device,
    messages: HashMap<Key, (Vec<Work>, Border)>,
}

#[derive(Default)]
pub(super) struct Arrived {
    messages: Mutex<Messages>,
    changed: Condvar,
}

#[derive(Default)]
struct Messages {
    waiting: HashMap<Key, Border>,
    has_failed: bool,
    /// The first failure, until it is taken.
    error: Option<Error>,
}

impl Arrived {
    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().expect("no panic while it is held")
    }

    fn put(&self, message: Result<(Key, Border)>) {
        let mut messages = self.lock();
        match message {
            Ok((key, border)) => drop(messages.waiting.insert(key, border)),
            Err(error) if !messages.has_failed => {
                (messages.has_failed, messages.error) = (true, Some(error));
            }
            Err(_) => {}
        }
        drop(messages);
        self.changed.notify_all();
    }
}

impl Inbox {
    /// Tells other ranks' dry runs what this rank sends.
    pub(super) fn note_sent(&self, key: Key, border: &Border) {
        if let (Self::Dry(inbox), (Direction::Forward, stage, micro_batch)) = (self, key) {
            inbox.borders.note(BorderId { step: inbox.step, micro_batch, stage }, border);
        }
    }

    /// Receives a message early in a dry run, if it is known. A real run's threads do that.
    pub(super) fn expect(&mut self, key: Key, from: usize) -> Result<()> {
        match self {
            Self::Real { .. } => Ok(()),
            Self::Dry(inbox) => inbox.expect(key, from).map(drop),
        }
    }

    /// Waits for a message of a rank of the pipeline.
    pub(super) fn take(&mut self, key: Key, from: usize) -> Result<Border> {
        let arrived = match self {
            Self::Real { arrived, .. } => arrived,
            Self::Dry(inbox) => return inbox.take(key, from),
        };
        let mut messages = arrived.lock();
        loop {
            if let Some(border) = messages.waiting.remove(&key) {
                return Ok(border);
            }
            if messages.has_failed {
                let again = || Error::other("a stage of the pipeline has failed before");
                return Err(messages.error.take().unwrap_or_else(again));
            }
            messages = arrived.changed.wait(messages).expect("no panic while it is held");
        }
    }

    /// Waits for the threads, after all messages were taken.
    pub(super) fn finish(self) -> Result<()> {
        let Self::Real { threads, .. } = self else { return Ok(()) };
        for thread in threads {
            thread.join().map_err(|_| Error::other("a thread of the pipeline panicked"))?;
        }
        Ok(())
    }
}

impl DryInbox {
    /// Receives a message, if it is known what comes. Returns whether it is there.
    fn expect(&mut self, key: Key, from: usize) -> Result<bool> {
        if self.messages.contains_key(&key) {
            return Ok(true);
        }
        let (direction, stage, micro_batch) = key;
        // Gradients have the forms of what the next stage got.
        let is_forward = direction == Direction::Forward;
        let stage = if is_forward { stage } else { stage + 1 };
        let id = BorderId { step: self.step, micro_batch, stage };
        let Some(mut border) = self.borders.border(id, &self.device)? else { return Ok(false) };
        border.tensors.retain(|of| is_forward || of.has_gradient());
        let group = self.incoming.get(&from).ok_or_else(|| not_linked(from))?;
        let _label = label(key);
        let mut works = Vec::new();
        for of in &border.tensors {
            works.push(group.recv(&Tensor::zeros(HEAD, DType::F64, &Device::Cpu)?, 0)?);
            works.push(group.recv(&of.tensor, 0)?);
        }
        self.messages.insert(key, (works, border));
        Ok(true)
    }

    fn take(&mut self, key: Key, from: usize) -> Result<Border> {
        self.expect(key, from)?;
        let Some((works, border)) = self.messages.remove(&key) else {
            return Err(Error::Config(
                "`trainer.strategy.pipeline_schedule`: a plan begins with rank 0, which does not compute the first \
                 stage in this schedule; give the first line of the file stage 0"
                    .to_owned(),
            ));
        };
        works.into_iter().try_for_each(Work::wait)?;
        Ok(border)
    }
}

/// Names a message for records.
fn label((direction, stage, micro_batch): Key) -> ContextGuard {
    let what = if direction == Direction::Forward { "stage" } else { "gradient for stage" };
    Label::enter(format!("{what} {stage}, micro-batch {micro_batch}"))
}

/// The head of a tensor of a message, which has so many further tensors behind it.
fn head(
    (direction, stage, micro_batch): Key,
    BorderTensor { tensor, form }: &BorderTensor,
    behind: usize,
) -> Result<[f64; HEAD]> {
    let (dims, dtype) = (tensor.dims(), tensor.dtype());
    let known = DTYPES.iter().position(|known| *known == dtype);
    let Some(known) = known.filter(|_| dims.len() <= MAX_DIMS) else {
        return Err(Error::other(format!(
            "stages of a pipeline pass on tensors of up to {MAX_DIMS} dimensions in {DTYPES:?}, got {dims:?} in \
             {dtype:?}"
        )));
    };
    let (layout, dim, sequence) = match *form {
        None => (0.0, 0.0, 0),
        Some((Layout::Replicate, sequence)) => (1.0, 0.0, sequence),
        Some((Layout::Shard(dim), sequence)) => (2.0, dim as f64, sequence),
        Some((Layout::Partial, _)) => {
            return Err(Error::other("a partial sum cannot go to another stage of a pipeline"));
        }
    };
    let direction = f64::from(u8::from(direction == Direction::Backward));
    let fixed = [direction, stage as f64, micro_batch as f64, known as f64, layout, dim];
    let mut head = [0.0; HEAD];
    head[..6].copy_from_slice(&fixed);
    head[6] = sequence as f64;
    head[7] = behind as f64;
    head[8] = dims.len() as f64;
    for (place, dim) in head[9..].iter_mut().zip(dims) {
        *place = *dim as f64;
    }
    Ok(head)
}

fn receive(group: &dyn ProcessGroup, device: &Device) -> Result<(Key, Border)> {
    let mut tensors = Vec::new();
    loop {
        let head = Tensor::zeros(HEAD, DType::F64, &Device::Cpu)?;
        group.recv(&head, 0)?.wait()?;
        let head = read::host::<f64>(&head)?;
        let number = |place: usize| head[place] as usize;
        let direction = if head[0] == 0.0 { Direction::Forward } else { Direction::Backward };
        let (rank, dtype) = (number(8).min(MAX_DIMS), DTYPES[number(3).min(DTYPES.len() - 1)]);
        let dims: Vec<usize> = (0..rank).map(|dim| number(9 + dim)).collect();
        let form = match number(4) {
            0 => None,
            1 => Some((Layout::Replicate, number(6))),
            _ => Some((Layout::Shard(head[5] as isize), number(6))),
        };
        let tensor = storage::unset(dims, dtype, device)?;
        group.recv(&tensor, 0)?.wait()?;
        tensors.push(BorderTensor { tensor, form });
        if number(7) == 0 {
            return Ok(((direction, number(1), number(2)), Border { tensors }));
        }
    }
}
