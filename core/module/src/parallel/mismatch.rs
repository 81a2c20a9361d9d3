//! Advice for candle's errors about operands that do not match.

use super::activations;
use crate::Error;

/// Adds advice to candle's errors about mismatched operands. If shapes differ, names the last
/// layouts of a tensor-parallel plan's layers, because one operand may be sharded. If dtypes
/// differ, explains their origin. Returns other errors unchanged.
pub fn explain_mismatch(error: Error) -> Error {
    let Error::Candle(candle, at) = &error else { return error };
    let text = candle.to_string();
    let text = text.lines().next().unwrap_or_default();
    if text.starts_with("dtype mismatch") {
        return Error::other(format!(
            "{text} (at {}:{}): candle's operations take operands of one dtype. Layers give their output in \
             the dtype that they compute in (`trainer.precision`), whatever that of their input is: cast one \
             of the two with `to_dtype`, for a loss the output to that of the targets",
            at.file(),
            at.line()
        ));
    }
    match activations::latest() {
        [Some(last), Some(other)] if text.contains("shape mismatch") => Error::other(format!(
            "{text} (at {}:{})\nUnder tensor parallelism, what an operation puts together must be held by \
             the ranks in one way; the plan's layers gave last {} and, before, {}",
            at.file(),
            at.line(),
            last.describe(),
            other.describe()
        )),
        _ => error,
    }
}
