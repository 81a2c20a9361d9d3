//! The steps.

mod cases;
mod cudnn;
mod functions;
mod gradients;
mod memory;
mod nccl;
mod optimizers;
mod platform;
mod speed;
mod streams;
mod training;

use fulgurite_error::Result;

use crate::findings::Findings;
use crate::target::Target;

/// A step.
pub(crate) struct Step {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it shows.
    pub(crate) what: &'static str,
    /// Whether the step has nothing to run on a CPU.
    pub(crate) needs_gpu: bool,
    /// Environment variables of the step's process.
    pub(crate) environment: &'static [(&'static str, &'static str)],
    /// Runs the step, in its own process.
    pub(crate) run: fn(&Target) -> Result<Findings>,
}

const fn step(
    name: &'static str,
    what: &'static str,
    run: fn(&Target) -> Result<Findings>,
) -> Step {
    Step { name, what, needs_gpu: false, environment: &[], run }
}

const fn on_gpu(
    name: &'static str,
    what: &'static str,
    run: fn(&Target) -> Result<Findings>,
) -> Step {
    Step { name, what, needs_gpu: true, environment: &[], run }
}

/// A step on a GPU with attention by cuDNN.
const fn with_cudnn(
    name: &'static str,
    what: &'static str,
    run: fn(&Target) -> Result<Findings>,
) -> Step {
    Step { environment: &[("FULGURITE_ATTENTION", "cudnn")], ..on_gpu(name, what, run) }
}

/// All steps, the most basic first.
pub(crate) const STEPS: &[Step] = &[
    step("platform", "what there is: the device, its memory", platform::device),
    on_gpu("kernels.compile", "NVRTC compiles every kernel for this GPU", platform::kernels),
    step("memory.empty", "tensors without elements, and exchanged storage", memory::empty),
    step(
        "memory.copies",
        "copies between host and device, of every dtype and of views",
        memory::copies,
    ),
    step("memory.pool", "freed memory is kept and used again; the peak is known", memory::pool),
    step("streams.threads", "what one thread computes another one reads", streams::untracked),
    on_gpu(
        "streams.tracked",
        "the same with event tracking, which would hide a race",
        streams::tracked,
    ),
    step(
        "functions.activations",
        "against the CPU: activations and SwiGLU",
        functions::activations,
    ),
    step("functions.norms", "against the CPU: norms", functions::norms),
    step(
        "functions.attention",
        "against the CPU: attention, masked attention, rotary embedding, softmax",
        functions::attention,
    ),
    with_cudnn(
        "functions.cudnn",
        "against the CPU: attention by cuDNN, if it is there",
        cudnn::attention,
    ),
    step("functions.losses", "against the CPU: cross entropy, with a head too", functions::losses),
    step("functions.layers", "against the CPU: every layer", functions::layers),
    step(
        "functions.gradients",
        "without the CPU: gradients of all of these against differences of outputs in f64",
        functions::gradients,
    ),
    step("optimizers.norm", "against the CPU: the gradient's norm", optimizers::norm),
    step(
        "optimizers.adamw",
        "against the CPU: AdamW, with states in f32 and bf16",
        optimizers::adamw,
    ),
    step("optimizers.sgd", "against the CPU: SGD with momentum", optimizers::sgd),
    step(
        "optimizers.others",
        "against the CPU: Adam, RMSprop, Adagrad, Adafactor",
        optimizers::others,
    ),
    step("optimizers.averages", "against the CPU: averages of weights", optimizers::averages),
    step("optimizers.late", "steps whose loss and norm stay on the device", optimizers::late),
    step(
        "training.f32",
        "the first and the last loss of 20 steps of a decoder are the CPU's",
        training::f32,
    ),
    step("training.bf16", "the same in bf16-mixed", training::bf16),
    step(
        "training.ranks",
        "2 ranks on this one device, under ddp and fsdp, through the host",
        training::ranks,
    ),
    step(
        "training.offload",
        "so are those of fsdp with cpu_offload those without it",
        training::offload,
    ),
    on_gpu(
        "nccl.alone",
        "NCCL with one rank: it is loaded, connects, and every collective keeps the values",
        nccl::alone,
    ),
    on_gpu(
        "nccl.ranks",
        "NCCL with a rank on each of up to four GPUs: collectives and messages, of uneven parts too",
        nccl::ranks,
    ),
    step("speed.device", "launches, products and copies", speed::device),
    step("speed.functions", "functions, forward and backward", speed::functions),
    on_gpu(
        "speed.llama",
        "steps of a decoder of 1.24 billion parameters in bf16-mixed",
        training::llama,
    ),
    with_cudnn("speed.cudnn", "attention by cuDNN, as in speed.functions", cudnn::speed),
    with_cudnn("speed.cudnn_llama", "speed.llama with attention by cuDNN", cudnn::llama),
];
