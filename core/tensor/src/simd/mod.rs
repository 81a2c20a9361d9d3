//! Loops that run with the widest vector instructions of the CPU at run time.

mod half;
mod map;

/// Defines functions that run with the widest vector instructions of the CPU at run time,
/// regardless of the build target.
///
/// Functions that they call use these instructions only if inlined: mark helpers
/// `#[inline(always)]`. Floating-point operations are neither contracted nor reordered, so results
/// are the same on every CPU.
///
/// Generic parameters are written in brackets and must all appear in the arguments' types. The
/// result must not borrow.
///
/// ```ignore
/// vectorized! {
///     /// `out += x`.
///     fn add[T: Float](out: &mut [T], x: &[T]) {
///         out.iter_mut().zip(x).for_each(|(out, &x)| *out += x);
///     }
/// }
/// ```
// A macro, not a function that takes a closure: closures cannot be marked `#[inline(always)]`.
#[macro_export]
macro_rules! vectorized {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident[$($generics:tt)*]($($argument:ident: $ty:ty),* $(,)?)
            $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $visibility fn $name<$($generics)*>($($argument: $ty),*) $(-> $result)? {
            #[allow(non_camel_case_types)] // an argument's name is its type parameter's
            struct Call<$($argument),*>($($argument),*);
            impl<$($generics)*> $crate::__private::pulp::WithSimd for Call<$($ty),*> {
                type Output = $crate::simd::vectorized!(@result $($result)?);
                #[inline(always)]
                fn with_simd<S: $crate::__private::pulp::Simd>(self, _: S) -> Self::Output {
                    let Self($($argument),*) = self;
                    $body
                }
            }
            $crate::__private::pulp::Arch::new().dispatch(Call($($argument),*))
        }
    )*};
    (@result) => { () };
    (@result $result:ty) => { $result };
}
pub use vectorized;

pub use half::Half;
pub use map::{TwoOfThree, map, map2, map3_2, update};
