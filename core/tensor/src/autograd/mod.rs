//! Extensions of candle's autograd, built from its custom ops: functions with a hand-written
//! backward ([`function`]), tensors whose storage is freed and refilled ([`storage`]), [`no_grad`]
//! and [`detect_anomaly`].

mod anomaly;
mod cast;
mod direct;
mod function;
mod functions;
mod grad_mode;
mod graph_start;
mod saved;
pub mod storage;
mod sum;
mod variables;
mod wrong_gradients;

#[doc(hidden)]
pub use crate::execution::grad_mode::GradMode;
#[doc(hidden)]
pub use anomaly::anomaly;
pub use anomaly::detect_anomaly;
pub use anomaly::is_on as detects_anomalies;
#[doc(hidden)]
pub use direct::graph_id;
#[doc(hidden)]
pub use function::Backward;
pub use function::function;
#[doc(hidden)]
pub use function::{is_constant, leaf};
#[doc(hidden)]
pub use functions::functions;
pub use grad_mode::{is_grad_enabled, no_grad};
pub use graph_start::GraphStart;
#[doc(hidden)]
pub use saved::collect_saved;
pub use saved::save_for_backward;
#[doc(hidden)]
pub use sum::{add_into, add_to, copy, scale, sum};
pub use variables::refuse_variables;
pub use wrong_gradients::refuse_wrong_gradients;
