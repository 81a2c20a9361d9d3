//! Inputs and outputs of units: [`Activations`].

use candle_core::Tensor;

use crate::Result;

/// Inputs or outputs of a [`Unit`](super::Unit): a tensor, or several in a tuple, an array, a
/// `Vec`, an `Option` or a struct. Numbers and texts beside them are constants.
///
/// A user's struct implements it field by field:
///
/// ```
/// use candle_core::Tensor;
/// use fulgurite_core::Result;
/// use fulgurite_core::module::Activations;
///
/// struct State { hidden: Tensor, cell: Option<Tensor>, depth: usize }
///
/// impl Activations for State {
///     fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
///         Ok(Self {
///             hidden: self.hidden.map_tensors(f)?,
///             cell: self.cell.map_tensors(f)?,
///             depth: self.depth,
///         })
///     }
/// }
/// ```
pub trait Activations: Sized {
    /// Maps each tensor through `f` and keeps the rest. Calls `f` once for each tensor, always in
    /// the same order.
    ///
    /// # Errors
    /// If `f` fails.
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;
}

/// The tensors, in order. They share memory with `activations`.
pub(super) fn tensors(activations: &impl Activations) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::new();
    activations.map_tensors(&mut |tensor| {
        tensors.push(tensor.clone());
        Ok(tensor.clone())
    })?;
    Ok(tensors)
}

/// `like` with its tensors replaced by `tensors`, in order.
pub(super) fn with_tensors<A: Activations>(like: &A, tensors: Vec<Tensor>) -> Result<A> {
    let mut tensors = tensors.into_iter();
    like.map_tensors(&mut |tensor| Ok(tensors.next().unwrap_or_else(|| tensor.clone())))
}

impl Activations for Tensor {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
}

impl<A: Activations> Activations for Option<A> {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.as_ref().map(|activations| activations.map_tensors(f)).transpose()
    }
}

impl<A: Activations> Activations for Vec<A> {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|activations| activations.map_tensors(f)).collect()
    }
}

impl<A: Activations, const N: usize> Activations for [A; N] {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let all: Vec<A> =
            self.iter().map(|activations| activations.map_tensors(f)).collect::<Result<_>>()?;
        Ok(all.try_into().unwrap_or_else(|_| unreachable!("as many as there were")))
    }
}

macro_rules! of_tuples {
    ($(($($name:ident $index:tt),*))*) => {$(
        impl<$($name: Activations),*> Activations for ($($name,)*) {
            fn map_tensors(&self, _f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(($(self.$index.map_tensors(_f)?,)*))
            }
        }
    )*};
}

of_tuples! {
    ()
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}

macro_rules! constants {
    ($($type:ty)*) => {$(
        impl Activations for $type {
            fn map_tensors(&self, _: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(self.clone())
            }
        }
    )*};
}

constants! { bool u8 u32 u64 usize i32 i64 f32 f64 String &'static str }
