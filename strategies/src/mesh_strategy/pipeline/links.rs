//! Tensors between the ranks of a pipeline.
//!
//! Each ordered pair of neighbours has a group of its own, in which the first only sends and the
//! second only receives. A thread receives what comes in a step, so a rank's sends never wait for
//! what the other computes, and no order of actions can make two ranks wait for each other's
//! messages. A message is a head of fixed size, which says what follows, and tensors: lengths may
//! differ from micro-batch to micro-batch. The head describes the first tensor. If there are
//! others, a second head describes those. Heads are tensors of the host: a GPU waits for a message
//! only when its head has come, and so the message is under way. In a dry run nothing comes: the
//! rank receives what [`DryBorders`] says.

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
    /// This rank of the pipeline.
    own: usize,
    /// By receiver, and by sender.
    out: BTreeMap<usize, Arc<dyn ProcessGroup>>,
    incoming: BTreeMap<usize, Arc<dyn ProcessGroup>>,
    device: Device,
}

/// Numbers that say which message it is, and of how many tensors.
const IDENTITY: usize = 4;
/// Numbers that describe a tensor.
const DESCRIPTION: usize = 12;
/// Dimensions of a tensor at most.
const MAX_DIMS: usize = 6;
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
        Ok(Self { own: pipeline.rank(), out, incoming, device: device.clone() })
    }

    /// The groups, in one order on all ranks: ranks that connect them one after the other would
    /// else wait for each other.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Arc<dyn ProcessGroup>> {
        let own = self.own;
        let out = self.out.iter().map(|(to, group)| ([own, *to], group));
        let incoming = self.incoming.iter().map(|(from, group)| ([*from, own], group));
        out.chain(incoming).collect::<BTreeMap<_, _>>().into_values()
    }

    /// Starts to send a message to a rank of the pipeline.
    pub(super) fn send(&self, to: usize, key: Key, border: &Border) -> Result<Sent> {
        let group = self.out.get(&to).ok_or_else(|| not_linked(to))?;
        let _label = label(key);
        let mut sent = Sent { works: Vec::new(), _held: Vec::new() };
        let tensors = border.tensors.iter().map(|of| of.tensor.detach().contiguous());
        let tensors = tensors.collect::<candle_core::Result<Vec<_>>>()?;
        let heads = heads(key, border)?;
        // Once a head has come, the receiver's device waits for the tensors before it computes on.
        // They must be under way by then: if this device first waited for a message of the
        // receiver, both would wait for each other.
        let tensors_first = heads.iter().all(|head| group.travels_apart(head));
        // Both ranks begin each head alone, and the tensors together.
        let mut parts: Vec<Vec<Tensor>> = heads.into_iter().map(|head| vec![head]).collect();
        parts.insert(if tensors_first { 0 } else { parts.len() }, tensors);
        for together in parts {
            for tensor in together {
                sent.works.push(group.send(&tensor, 1)?);
                sent._held.push(tensor);
            }
            group.begin_messages()?;
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
        border.tensors.retain(|of| is_forward || of.takes_gradient);
        let group = self.incoming.get(&from).ok_or_else(|| not_linked(from))?;
        let _label = label(key);
        let tensors = border.tensors.iter().map(|of| of.tensor.clone());
        let received = heads(key, &border)?.into_iter().chain(tensors);
        let works = received.map(|tensor| group.recv(&tensor, 0)).collect::<Result<Vec<_>>>()?;
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

/// The heads of a message: one, or two if it has several tensors.
fn heads((direction, stage, micro_batch): Key, border: &Border) -> Result<Vec<Tensor>> {
    let direction = f64::from(u8::from(direction == Direction::Backward));
    let count = border.tensors.len();
    let mut head = vec![direction, stage as f64, micro_batch as f64, count as f64];
    for of in &border.tensors {
        head.extend(described(of)?);
    }
    head.resize(head.len().max(IDENTITY + DESCRIPTION), 0.0);
    let others = head.split_off(IDENTITY + DESCRIPTION);
    let heads = [head, others].into_iter().filter(|head| !head.is_empty());
    let tensor = |head: Vec<f64>| Ok(Tensor::new(head, &Device::Cpu)?);
    heads.map(tensor).collect()
}

fn described(of: &BorderTensor) -> Result<[f64; DESCRIPTION]> {
    let BorderTensor { tensor, form, takes_gradient } = of;
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
    let gradient = f64::from(u8::from(*takes_gradient));
    let mut numbers = [0.0; DESCRIPTION];
    let fixed = [known as f64, layout, dim, sequence as f64, gradient, dims.len() as f64];
    numbers[..fixed.len()].copy_from_slice(&fixed);
    for (place, dim) in numbers[fixed.len()..].iter_mut().zip(dims) {
        *place = *dim as f64;
    }
    Ok(numbers)
}

/// Memory for a tensor of this description.
fn tensor_of(numbers: &[f64], device: &Device) -> Result<BorderTensor> {
    let number = |place: usize| numbers[place] as usize;
    let dims: Vec<usize> = (0..number(5).min(MAX_DIMS)).map(|dim| number(6 + dim)).collect();
    let form = match number(1) {
        0 => None,
        1 => Some((Layout::Replicate, number(3))),
        _ => Some((Layout::Shard(numbers[2] as isize), number(3))),
    };
    let tensor = storage::unset(dims, DTYPES[number(0).min(DTYPES.len() - 1)], device)?;
    Ok(BorderTensor { tensor, form, takes_gradient: numbers[4] != 0.0 })
}

fn receive(group: &dyn ProcessGroup, device: &Device) -> Result<(Key, Border)> {
    let receive_head = |len: usize| -> Result<Vec<f64>> {
        let head = Tensor::zeros(len, DType::F64, &Device::Cpu)?;
        group.recv(&head, 0)?.wait()?;
        read::host::<f64>(&head)
    };
    let mut head = receive_head(IDENTITY + DESCRIPTION)?;
    let number = |place: usize| head[place] as usize;
    let direction = if head[0] == 0.0 { Direction::Forward } else { Direction::Backward };
    let (key, count) = ((direction, number(1), number(2)), number(3));
    if count > 1 {
        head.extend(receive_head((count - 1) * DESCRIPTION)?);
    }
    let described = head[IDENTITY..].chunks_exact(DESCRIPTION).take(count);
    let tensors =
        described.map(|numbers| tensor_of(numbers, device)).collect::<Result<Vec<_>>>()?;
    let works = tensors.iter().map(|of| group.recv(&of.tensor, 0)).collect::<Result<Vec<_>>>()?;
    works.into_iter().try_for_each(Work::wait)?;
    Ok((key, Border { tensors }))
}
