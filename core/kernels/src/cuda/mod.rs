//! Runs plans on a GPU. **Tested on an emulated GPU (`.ci/gpu`), never on a real one.**

mod activations;
mod attention;
mod compile;
mod context;
mod copies;
mod cudnn;
mod dropout;
mod layers;
mod masked_softmax;
mod pooling;
mod products;
mod queue;
mod recurrent;
mod run;
mod tables;
mod views;

pub use activations::{
    activation, activation_backward, gated, gated_backward, swiglu, swiglu_backward,
};
pub use attention::{
    Attend, DocumentKeys, attention, attention_backward, flash_attention, flash_attention_backward,
    takes_flash,
};
pub use compile::{compiled, nvrtc_version};
pub use context::{check_versions, make_current};
pub use copies::{casts, copy_all};
pub use cudnn::{check_attention_kernels, cudnn_runs};
pub use dropout::dropout;
pub use layers::{
    Normalized, add, cross_entropy, cross_entropy_backward, embedding_grad, layer_norm,
    layer_norm_backward, rms_norm, rms_norm_backward, rope, takes,
};
pub use masked_softmax::{masked_softmax, masked_softmax_backward};
pub use pooling::{PoolWindows, max_pool, max_pool_backward, mean_pool, mean_pool_backward};
pub use products::{add_input_grad, weight_grad};
pub use queue::Queue;
pub use recurrent::{
    RecurrentStep, RecurrentStepBackward, gru_step, gru_step_backward, lstm_step,
    lstm_step_backward, takes_recurrent,
};
pub use run::{address, run, total_memory};
use views::unset;
pub use views::{contiguous, dense, pick_rows, unset_storage};
