//! Copies of views against the elements of the views.

use fulgurite_kernels::Work;
use fulgurite_kernels::plans::{View, dense, pick_rows};
use proptest::prelude::*;

use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// Returns the elements of a view of `values`, the last dimension first.
fn expected<T: Copy>(values: &[T], start: usize, sizes: [usize; 4], strides: [usize; 4]) -> Vec<T> {
    let mut all = Vec::new();
    for a in 0..sizes[0] {
        for b in 0..sizes[1] {
            for c in 0..sizes[2] {
                for d in 0..sizes[3] {
                    let places = [a, b, c, d];
                    let at: usize =
                        places.iter().zip(strides).map(|(place, step)| place * step).sum();
                    all.push(values[start + at]);
                }
            }
        }
    }
    all
}

/// Copies a view at an offset to `shift` elements after an aligned address. Returns the kernel's
/// name.
fn check<T: Dtype>(
    start: usize,
    sizes: [usize; 4],
    strides: [usize; 4],
    shift: usize,
) -> &'static str {
    let most: usize =
        sizes.iter().zip(strides).map(|(size, step)| size.saturating_sub(1) * step).sum();
    let values: Vec<T> = normal("view", start + most + 1);
    let n: usize = sizes.iter().product();
    let mut m = Machine::default();
    let (x, y) = (m.put(&values), m.garbage::<T>(n + shift));
    let size = size_of::<T>();
    let view = View {
        address: x + (start * size) as u64,
        element: size as u64,
        sizes: sizes.map(|n| n as u64),
        strides: strides.map(|n| n as u64),
    };
    let plan = dense(view, y + (shift * size) as u64).unwrap();
    m.run(&plan);
    let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
    assert_eq!(
        bits(&m.get::<T>(y)[shift..]),
        bits(&expected(&values, start, sizes, strides)),
        "{sizes:?} {strides:?} from {start} to {shift}"
    );
    match plan.work() {
        [Work::Launch(call)] => call.kernel,
        _ => "none",
    }
}

/// `[batch, time, heads, width]` as `[batch, heads, time, width]`, for attention.
#[test]
fn views_are_copied_in_the_widest_words() {
    let heads_first = |width: usize| ([2, 3, 70, width], [70 * 3 * width, width, 3 * width, 1]);
    let (sizes, strides) = heads_first(64);
    assert_eq!(check::<half::bf16>(0, sizes, strides, 0), "dense_16");
    assert_eq!(check::<f32>(8, sizes, strides, 4), "dense_16");
    assert_eq!(check::<half::bf16>(2, sizes, strides, 0), "dense_4");
    assert_eq!(check::<half::bf16>(0, sizes, strides, 1), "dense_2");
    let (sizes, strides) = heads_first(12);
    assert_eq!(check::<half::f16>(0, sizes, strides, 4), "dense_8");
    let (sizes, strides) = heads_first(7);
    assert_eq!(check::<half::bf16>(0, sizes, strides, 0), "dense_2");
    assert_eq!(check::<f32>(0, sizes, strides, 0), "dense_4");
    assert_eq!(check::<f64>(0, sizes, strides, 0), "dense_8");
}

#[test]
fn the_last_dimension_may_have_gaps_or_one_value() {
    assert_eq!(check::<f32>(1, [3, 1, 5, 67], [1, 0, 3, 15], 0), "dense_4");
    assert_eq!(check::<half::bf16>(0, [1, 1, 4, 8], [0, 0, 1, 0], 0), "dense_2");
    assert_eq!(check::<f32>(0, [2, 0, 3, 4], [12, 12, 4, 1], 0), "none");
}

fn picks<T: Dtype>(width: usize, shift: usize, ids: &[u32]) {
    let table: Vec<T> = normal("table", shift + 9 * width);
    let mut m = Machine::default();
    let (x, y) = (m.put(&table), m.garbage::<T>(ids.len() * width));
    let size = size_of::<T>();
    let at = m.put(ids);
    m.run(&pick_rows(at, x + (shift * size) as u64, y, ids.len() as u64, (width * size) as u64));
    let row = |&id: &u32| match id {
        u32::MAX => vec![T::from_f64(0.0); width],
        id => table[shift + id as usize * width..][..width].to_vec(),
    };
    assert_eq!(m.get::<T>(y), ids.iter().flat_map(row).collect::<Vec<_>>());
}

#[test]
fn missing_rows_are_zeros() {
    let ids = [3, 0, u32::MAX, 8, 8, 1];
    for (width, shift) in [(64, 0), (64, 2), (6, 0), (7, 0), (7, 1), (1, 0)] {
        picks::<half::bf16>(width, shift, &ids);
        picks::<f32>(width, shift, &ids);
        picks::<f64>(width, shift, &ids);
    }
    let many: Vec<u32> = (0..2000).map(|i| i * 7 % 9).collect();
    picks::<half::f16>(33, 0, &many);
    picks::<f32>(33, 0, &[]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_view(
        sizes in prop::array::uniform4(1usize..6),
        strides in prop::array::uniform4(0usize..9),
        start in 0usize..5,
        shift in 0usize..3,
        wide in 1usize..40,
    ) {
        let sizes = [sizes[0], sizes[1], sizes[2], sizes[3] * wide];
        check::<half::bf16>(start, sizes, strides, shift);
        check::<f64>(start, sizes, [strides[0], strides[1], strides[2], 1], shift);
    }
}
