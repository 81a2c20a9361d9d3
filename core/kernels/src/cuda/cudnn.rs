//! Attention by cuDNN's plans, on the tensors' stream.
#![allow(unsafe_code)] // plans run on memory of tensors

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr as _, sys};
use candle_core::{CudaDevice, DType, Shape, Tensor};
use fulgurite_error::{Error, Result};

use super::layers::output;
use super::run::asked_for;
use super::{address, make_current, unset};
use crate::cudnn::{
    Argument, AttentionKernels, Device, ExecutionPlan, Fault, Graph, Handle, Library, VARIABLE,
    backward, forward, unsupported,
};
use crate::plans::Attention;

/// The most plans of a stream. Other kernels compute any further shapes, because plans take time to
/// make, and memory.
const MOST_PLANS: usize = 256;

/// Number of runs of plans so far, forward and backward.
static RUNS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Returns how often this process has run cuDNN's attention: forward, and backward.
pub fn cudnn_runs() -> [u64; 2] {
    RUNS.each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// Checks the value of `FULGURITE_ATTENTION`. If it chooses cuDNN, loads cuDNN and returns its
/// version and file.
///
/// # Errors
/// If the variable is neither `flash` nor `cudnn`, or cuDNN cannot be loaded.
pub fn check_attention_kernels() -> Result<Option<String>> {
    match AttentionKernels::chosen()? {
        AttentionKernels::Flash => Ok(None),
        AttentionKernels::Cudnn => Ok(Some(library()?.description())),
    }
}

/// Returns cuDNN. It must match the CUDA version of this program, because it loads the cuBLAS of
/// its own CUDA version and ends the process without one.
fn library() -> Result<&'static Library> {
    let cuda = sys::CUDA_VERSION as usize / 1000;
    let checked = Library::get().map_err(str::to_owned).and_then(|library| {
        let its = library.cuda_major();
        if its == cuda {
            return Ok(library);
        }
        let name = library.description();
        Err(format!("{name} is for CUDA {its}, and this program for CUDA {cuda}"))
    });
    checked.map_err(|why| {
        Error::Config(format!(
            "the environment variable {VARIABLE} is `cudnn`, but {why}. Install cuDNN 9.21 or newer (`pip install \
             nvidia-cudnn-cu{cuda}`), name its folder in LD_LIBRARY_PATH, or unset {VARIABLE}"
        ))
    })
}

/// The two graphs of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Direction {
    Forward,
    Backward,
}

impl Direction {
    fn graph(self, of: &Attention) -> Graph {
        match self {
            Self::Forward => forward(of),
            Self::Backward => backward(of),
        }
    }
}

/// The properties that distinguish the plans of one device.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    direction: Direction,
    dtype: u32,
    sizes: [usize; 6],
    causal: bool,
    window: Option<usize>,
    scale: u32,
}

impl Key {
    fn of(direction: Direction, of: &Attention) -> Self {
        Self {
            direction,
            dtype: of.dtype as u32,
            sizes: [of.batch, of.kv_heads, of.group, of.queries, of.keys, of.width],
            causal: of.causal,
            window: of.window,
            scale: of.scale.to_bits(),
        }
    }
}

/// cuDNN on one stream, with its plans. `None` marks a shape that cuDNN has refused.
struct OnStream {
    handle: Handle,
    plans: HashMap<Key, Option<ExecutionPlan>>,
}

impl OnStream {
    /// Returns cuDNN on the stream that computes this device's tensors.
    fn of_tensors(device: &CudaDevice) -> Result<Arc<Mutex<Self>>> {
        /// Keyed by the address of the stream. Streams and handles live as long as the process.
        static ALL: Mutex<Vec<(usize, Arc<Mutex<OnStream>>)>> = Mutex::new(Vec::new());
        let library = library()?;
        let stream = device.cuda_stream();
        make_current(stream.context()).w()?;
        let raw = stream.cu_stream();
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = all.iter().find(|(other, _)| *other == raw as usize) {
            return Ok(found.clone());
        }
        // SAFETY: the context was made current above; the device's stream lives as long as the
        // process.
        let handle = unsafe { library.handle(raw.cast()) };
        let handle = handle.map_err(|fault| {
            Error::other(format!("{} does not start: {fault}", library.description()))
        })?;
        tracing::info!("attention by {}", library.description());
        let made = Arc::new(Mutex::new(Self { handle, plans: HashMap::new() }));
        all.push((raw as usize, made.clone()));
        Ok(made)
    }

    /// Returns the plan of this attention, which is made on first use. `None` if cuDNN refuses.
    fn plan(&mut self, direction: Direction, of: &Attention) -> Result<Option<&ExecutionPlan>> {
        let (library, handle, count) = (library()?, self.handle, self.plans.len());
        match self.plans.entry(Key::of(direction, of)) {
            Entry::Occupied(entry) => Ok(entry.into_mut().as_ref()),
            Entry::Vacant(_) if count >= MOST_PLANS => {
                left_to_others(of, &format!("there are plans for {MOST_PLANS} shapes already"));
                Ok(None)
            }
            Entry::Vacant(entry) => {
                let plan = ExecutionPlan::new(library, &direction.graph(of), Device::Of(handle));
                let plan = plan.map_err(|fault| refused(direction, of, &fault)).ok();
                Ok(entry.insert(plan).as_ref())
            }
        }
    }
}

/// Logs that cuDNN has made no plan.
fn refused(direction: Direction, of: &Attention, fault: &Fault) {
    left_to_others(of, &format!("it makes no plan of {direction:?}: {fault}"));
}

/// Warns that another kernel computes the attention, once per reason.
fn left_to_others(of: &Attention, why: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() < MOST_PLANS && said.insert(why.to_owned()) {
        tracing::warn!(
            "cuDNN does not compute the attention of {}: {why}. The kernels of Fulgurite compute it",
            described(of)
        );
    }
}

/// Describes the shape of an attention for messages.
fn described(of: &Attention) -> String {
    let Attention { batch, kv_heads, group, queries, keys, width, .. } = *of;
    let mask = match (of.causal, of.window) {
        (true, Some(window)) => format!("causal in a window of {window}"),
        (true, None) => "causal".to_owned(),
        (false, _) => "not causal".to_owned(),
    };
    format!(
        "{batch} x {} heads ({kv_heads} of keys) of {width}, {queries} queries, {keys} keys, {}, {mask}",
        kv_heads * group,
        of.dtype.name()
    )
}

/// Runs the plan of this attention on contiguous tensors. Returns false if cuDNN refuses the shape.
fn run(
    direction: Direction,
    of: &Attention,
    device: &CudaDevice,
    tensors: &[(Argument, &Tensor)],
) -> Result<bool> {
    if let Some(why) = unsupported(of) {
        left_to_others(of, why);
        return Ok(false);
    }
    let on_stream = OnStream::of_tensors(device)?;
    let mut on_stream = on_stream.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = on_stream.handle;
    let Some(plan) = on_stream.plan(direction, of)? else { return Ok(false) };
    let mut addresses = Vec::with_capacity(tensors.len());
    for &(argument, tensor) in tensors {
        addresses.push((argument, address(tensor)?));
    }
    let at = |argument: Argument| {
        let found = addresses.iter().find(|(other, _)| *other == argument);
        found.expect("each argument of the graph is given").1
    };
    let (bytes, stream) = (plan.memory_bytes(), device.cuda_stream());
    // SAFETY: cuDNN writes this memory before it reads it.
    let memory = unsafe { stream.alloc::<u8>(bytes.max(1)) }.w();
    let memory = memory.map_err(|error| asked_for(bytes, error))?;
    // SAFETY: the plan is for this handle's device, and both are used under a lock. The tensors
    // have the sizes of the attention, and the caller holds them. The memory is freed in stream
    // order.
    let run = unsafe { plan.run(handle, at, memory.device_ptr(&stream).0) };
    run.map_err(|fault| {
        Error::other(format!(
            "cuDNN's attention of {}, {direction:?}: {fault}. Unset {VARIABLE} to use other kernels",
            described(of)
        ))
    })?;
    RUNS[direction as usize].fetch_add(1, Ordering::Relaxed);
    Ok(true)
}

/// Logs why cuDNN does not compute an attention that this crate's kernels without scores do not
/// support either. `major` is the GPU's major compute capability.
pub(super) fn not_asked(of: &Attention, major: i32) {
    let why = match unsupported(of) {
        Some(why) => why,
        None if major < 8 => "it is asked on GPUs of compute capability 8.0 and newer alone",
        None => "it is asked for a positive scale alone",
    };
    left_to_others(of, why);
}

/// Whether cuDNN is tried first.
pub(super) fn is_wanted() -> Result<bool> {
    Ok(AttentionKernels::chosen()? == AttentionKernels::Cudnn)
}

/// Computes the output and the log-sum-exp of contiguous tensors `[batch, time, heads, width]`.
/// Returns `None` if cuDNN makes no plan.
pub(super) fn attention(
    of: &Attention,
    device: &CudaDevice,
    [q, k, v]: [&Tensor; 3],
) -> Result<Option<(Tensor, Tensor)>> {
    let y = output(q)?;
    let (batch, queries, heads, _) = q.dims4()?;
    let lse = unset(&Shape::from((batch, heads, queries)), DType::F32, device)?;
    let tensors = [
        (Argument::Q, q),
        (Argument::K, k),
        (Argument::V, v),
        (Argument::Output, &y),
        (Argument::Lse, &lse),
    ];
    Ok(run(Direction::Forward, of, device, &tensors)?.then_some((y, lse)))
}

/// Computes the gradients of queries, keys and values. Returns `None` if cuDNN makes no plan.
pub(super) fn attention_backward(
    of: &Attention,
    device: &CudaDevice,
    [q, k, v]: [&Tensor; 3],
    [y, lse, grad]: [&Tensor; 3],
) -> Result<Option<[Tensor; 3]>> {
    let (dq, dk, dv) = (output(q)?, output(k)?, output(v)?);
    let tensors = [
        (Argument::Q, q),
        (Argument::K, k),
        (Argument::V, v),
        (Argument::Output, y),
        (Argument::Lse, lse),
        (Argument::OutputGrad, grad),
        (Argument::QGrad, &dq),
        (Argument::KGrad, &dk),
        (Argument::VGrad, &dv),
    ];
    Ok(run(Direction::Backward, of, device, &tensors)?.then_some([dq, dk, dv]))
}
