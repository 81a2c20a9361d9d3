//! Loops in the best vector instructions of the CPU that the program runs on.

/// Defines functions that are compiled for the widest vector instructions that the CPU at hand has,
/// whatever the program was built for.
///
/// What they call is compiled so only where it is inlined: helpers are `#[inline(always)]`. The
/// arithmetic is that of the source on every CPU, nothing is contracted or reordered, so results do
/// not depend on the instructions.
///
/// Generic parameters are written in brackets, and all of them appear in the arguments' types; the
/// result borrows nothing.
///
/// ```ignore
/// vectorized! {
///     /// `out += x`.
///     fn add[T: Float](out: &mut [T], x: &[T]) {
///         out.iter_mut().zip(x).for_each(|(out, &x)| *out += x);
///     }
/// }
/// ```
// A function item and not one that takes a closure: closures cannot be made to be inlined.
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
