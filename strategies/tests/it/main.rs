//! Tests of the strategies, with ranks as threads.

#![allow(clippy::disallowed_methods, reason = "tests read tensors")]

mod activation_checkpointing;
mod adapters;
mod anomaly;
mod attention_options;
mod bf16_state;
mod buffers;
mod candle_nn;
mod checkpoints;
mod collectives;
mod communication;
mod conformance;
mod cpu_offload;
mod diloco;
mod dora;
mod dtype_overrides;
mod errors;
mod expert_parallel;
mod fabric_collectives;
mod full_checkpoint;
mod gradient_compression;
mod ignored;
mod keep_in_fp32;
mod layers;
mod loss_parallel;
mod loss_scale;
mod mesh;
mod mesh_communication;
mod mesh_randomness;
mod model_parallel;
mod named_optimizers;
mod parity;
mod planned;
mod plans;
mod plans_at_work;
mod precision;
mod quantized;
mod random_plans;
mod sampling;
mod schedule;
mod several_optimizers;
mod state_dicts;
mod step_counts;
mod steps;
mod torch_optimizer;
mod units;
mod units_log;

use fulgurite_transports::SharedMemory;

/// The allocator for collectives on tensors in shared memory.
#[global_allocator]
static ALLOCATOR: SharedMemory<std::alloc::System> = SharedMemory(std::alloc::System);
