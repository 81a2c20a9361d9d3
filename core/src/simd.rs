//! Loops in the best vector instructions of the CPU that the program runs on.

/// Calls `f`, compiled for the widest vector instructions that this CPU has, whatever the program was
/// built for. What `f` calls is compiled so only where it is inlined, and numbers that `f` has by
/// reference may be read again for each element: it should have them by value.
///
/// The arithmetic is that of the source on every CPU: nothing is contracted or reordered, so
/// results do not depend on the instructions.
#[inline(always)]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
