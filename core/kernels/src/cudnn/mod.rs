//! Attention by cuDNN 9: graphs of operations as data, and cuDNN's plans for them.
//!
//! **No plan has run on a GPU yet**, so cuDNN is off unless the environment variable
//! `FULGURITE_ATTENTION` is `cudnn`. Two checks need no GPU. The tests evaluate both graphs on the
//! CPU and compare the results with the formula. `.ci/cudnn` has cuDNN make plans of the graphs for
//! an H100, from a description of the device.
//!
//! [`Library::get`] loads cuDNN on first use. Calls go to its backend API. [`forward`] is one
//! operation; [`backward`] is a pattern of operations that cuDNN fuses into one kernel. Both graphs
//! are the same as in NVIDIA's cudnn-frontend.
//!
//! ```
//! use fulgurite_kernels::cudnn::{Operation, backward, forward, unsupported};
//! use fulgurite_kernels::{Float, plans::Attention};
//!
//! // Llama's attention: 32 heads of 64 elements, 8 heads of keys, 2048 positions.
//! let of = Attention {
//!     dtype: Float::Bf16, batch: 2, kv_heads: 8, group: 4, queries: 2048, keys: 2048, width: 64,
//!     causal: true, scale: 0.125, firsts: 0, ends: 0, window: None,
//!     first_query: None, softcap: None,
//! };
//! assert_eq!(unsupported(&of), None);
//! assert!(matches!(forward(&of).operations(), [Operation::Sdpa(_)]));
//! assert_eq!(backward(&of).operations().len(), 21);
//! // Other kernels compute heads of other widths.
//! assert!(unsupported(&Attention { width: 80, ..of }).is_some());
//! ```
//!
//! Forward keeps the same statistics as [`flash_attention`](crate::plans::flash_attention): the
//! natural logarithm of the sum of exponentials of each query's scaled scores. So either backward
//! may follow either forward.

mod backward;
mod choice;
mod constants;
mod descriptor;
mod forward;
mod graph;
mod library;
mod lower;
mod mask;
mod plan;
mod shape;

pub use backward::backward;
pub use choice::{AttentionKernels, VARIABLE};
pub use forward::forward;
pub use graph::{
    Argument, BandMask, DataType, Graph, Number, Operation, Place, PointwiseMode, Sdpa, Tensor,
    TensorId,
};
pub use library::{Fault, Handle, Library};
pub use plan::{Device, ExecutionPlan};
pub use shape::unsupported;
