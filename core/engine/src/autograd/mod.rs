//! What candle's autograd lacks, built from its custom ops: functions with a hand-written backward
//! ([`function`]), storage that comes and goes under a living tensor ([`storage`]), and a switch
//! that keeps no graph ([`no_grad`]).

mod function;
mod grad_mode;
pub mod storage;

pub(crate) use crate::execution::GradMode;
pub(crate) use function::leaf;
pub use function::{Backward, function};
pub use grad_mode::{is_grad_enabled, no_grad};
