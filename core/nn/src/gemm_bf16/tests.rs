//! Compares products with the chains of instructions that define them.

use fulgurite_engine::execution::dry_run::{DryRun, Happening};
use half::bf16;

use super::driver;
use super::model::{Instruction, Model, Tdpbf16ps, Vdpbf16ps, definition, fma};
use super::output::{Target, TargetKind};
use super::{Bf16Gemm, Kernel, bf16_products};
use crate::gemm::{Mat, Threads};

/// Pseudo-random bits.
fn random(seed: usize) -> impl FnMut() -> u32 {
    let mut state = seed as u64 * 2 + 1;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    }
}

/// Values of magnitude about one.
fn usual(count: usize, seed: usize) -> Vec<bf16> {
    let mut next = random(seed);
    (0..count).map(|_| bf16::from_f32(next() as f32 / (1u32 << 30) as f32 - 1.0)).collect()
}

/// Values whose products and sums overflow, vanish or are NaN.
fn unusual(count: usize, seed: usize) -> Vec<bf16> {
    let mut next = random(seed);
    let mut value = || {
        let bits = next();
        let mantissa_and_sign = bits & 0x807f;
        let exponent = match bits >> 16 & 0xff {
            0..10 => 0,                            // zero and denormals
            10 => 0xff,                            // infinities and NaN
            11..20 => 0xfe,                        // the largest
            _ => 0x7f - 0x45 + (bits >> 24 & 0xf), // products around the least normal number
        };
        bf16::from_bits((mantissa_and_sign | exponent << 7) as u16)
    };
    (0..count).map(|_| value()).collect()
}

/// Returns the bits, with one pattern for every NaN, because payloads may differ.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

fn bits16(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| if x.is_nan() { u16::MAX } else { x.to_bits() }).collect()
}

/// Checks that every kind of output has the bits of the definition.
fn compare<K: Kernel, I: Instruction>(
    kernel: K,
    a: Mat<bf16>,
    b: Mat<bf16>,
    threads: Threads,
    what: &str,
) {
    let (n, size) = (b.cols, a.rows * b.cols);
    let sums = definition::<I>(a, b);
    let run = |kind: TargetKind| {
        // SAFETY: all targets below have `size` elements, initialised.
        unsafe { driver::multiply(kernel, Target::new(kind, n), a, b, threads) }
    };

    let mut out = vec![f32::NAN; size];
    run(TargetKind::F32 { out: out.as_mut_ptr(), add: false });
    assert_eq!(bits(&out), bits(&sums), "{what}");

    let before: Vec<f32> = usual(size, 7).iter().map(|x| x.to_f32() * 1.001).collect();
    let mut out = before.clone();
    run(TargetKind::F32 { out: out.as_mut_ptr(), add: true });
    let expected: Vec<f32> = before.iter().zip(&sums).map(|(a, b)| a + b).collect();
    assert_eq!(bits(&out), bits(&expected), "{what}, added");

    let rounded = |values: Vec<f32>| -> Vec<u16> {
        bits16(&values.into_iter().map(bf16::from_f32).collect::<Vec<_>>())
    };
    let bias = usual(n, 8);
    for bias in [None, Some(&bias)] {
        let mut out = vec![bf16::NAN; size];
        let kind = TargetKind::Bf16 { out: out.as_mut_ptr(), bias: bias.map(Vec::as_slice) };
        run(kind);
        let biased = |(i, &sum): (usize, &f32)| bias.map_or(sum, |bias| sum + bias[i % n].to_f32());
        let expected = rounded(sums.iter().enumerate().map(biased).collect());
        assert_eq!(bits16(&out), expected, "{what}, bias: {}", bias.is_some());
    }

    let before = usual(size, 9);
    let mut out = before.clone();
    run(TargetKind::AddBf16 { out: out.as_mut_ptr() });
    let expected = rounded(before.iter().zip(&sums).map(|(a, b)| a.to_f32() + b).collect());
    assert_eq!(bits16(&out), expected, "{what}, added in bf16");
}

/// Compares products of many shapes, in all orientations, on one thread and on several.
fn compare_shapes<K: Kernel, I: Instruction>(kernel: K) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let shapes = [
        [1, 1, 1],
        [3, 0, 5],
        [1, 40, 70],
        [17, 33, 16],
        [33, 7, 1],
        [16, 64, 32],
        [50, 95, 49],
        [20, 550, 40],   // several panels
        [270, 20, 40],   // several pieces of rows
        [33, 20, 300],   // several pieces of columns
        [130, 130, 140], // for two threads
        [64, 544, 40],   // whole strips and blocks, in several panels
        [288, 32, 33],   // the same, in several pieces of rows
        [32, 1024, 40],  // rows that AMX does not read in place
        [40, 544, 96],   // few rows: columns are read in place if they are contiguous
    ];
    for [m, k, n] in shapes {
        for values in [usual, unusual] {
            // The first element makes both start at half a pair.
            let (left, right) = (values(m * k + 1, m + k), values(k * n + 1, k + n));
            let (left, right) = (&left[1..], &right[1..]);
            for [turn_left, turn_right] in
                [[false, false], [false, true], [true, false], [true, true]]
            {
                let a = if turn_left { Mat::new(left, k, m).t() } else { Mat::new(left, m, k) };
                let b = if turn_right { Mat::new(right, n, k).t() } else { Mat::new(right, k, n) };
                let what = format!("{m} x {k} x {n}, transposed: {turn_left} {turn_right}");
                pool.install(|| compare::<K, I>(kernel, a, b, Threads::All, &what));
                if [m, k, n] == [50, 95, 49] {
                    compare::<K, I>(kernel, a, b, Threads::One, &what);
                }
            }
        }
    }
}

#[test]
fn vdpbf16ps_model_matches_its_definition() {
    compare_shapes::<_, Vdpbf16ps>(Model::<Vdpbf16ps>::default());
}

#[test]
fn tdpbf16ps_model_matches_its_definition() {
    compare_shapes::<_, Tdpbf16ps>(Model::<Tdpbf16ps>::default());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_matches_the_model() {
    match super::avx512::Avx512::detect() {
        Some(kernel) => compare_shapes::<_, Vdpbf16ps>(kernel),
        None => eprintln!("skipped: this CPU has no AVX512-BF16"),
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn amx_matches_the_model() {
    match super::amx::Amx::detect() {
        Some(kernel) => compare_shapes::<_, Tdpbf16ps>(kernel),
        None => eprintln!("skipped: this CPU has no AMX, or the system does not allow it"),
    }
}

/// The shapes above are too small for several threads.
#[cfg(target_arch = "x86_64")]
#[test]
fn threads_change_no_bit_of_amx() {
    let Some(kernel) = super::amx::Amx::detect() else {
        return eprintln!("skipped: this CPU has no AMX, or the system does not allow it");
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let (left, right) = (usual(288 * 416, 1), usual(512 * 1024, 2));
    for (a, b) in [
        (Mat::new(&left, 288, 416), Mat::new(&right, 416, 250)),
        (Mat::new(&left, 416, 288).t(), Mat::new(&right, 416, 250)),
        // Few rows, whose product is computed as its transpose.
        (Mat::new(&left, 64, 1024), Mat::new(&right, 512, 1024).t()),
    ] {
        let (m, n) = (a.rows, b.cols);
        assert!(m * a.cols * n > 3 * super::amx::Amx::WORTH_A_THREAD);
        let product = |threads| {
            let mut out = vec![0f32; m * n];
            let target = Target::new(TargetKind::F32 { out: out.as_mut_ptr(), add: false }, n);
            // SAFETY: the target has `m * n` elements, initialised.
            pool.install(|| unsafe { driver::multiply(kernel, target, a, b, threads) });
            bits(&out)
        };
        assert_eq!(product(Threads::One), product(Threads::All));
    }
}

#[test]
fn denormals_are_zeros_and_results_flushed() {
    let [least, denormal] = [f32::MIN_POSITIVE, f32::from_bits(1)];
    assert_eq!(fma(denormal, 1e30, 2.0), 2.0);
    assert_eq!(fma(1.0, 1.0, f32::from_bits(0x7f_ffff)), 1.0);
    assert_eq!(fma(least, 0.5, 0.0).to_bits(), 0);
    assert_eq!(fma(least, -0.5, 0.0).to_bits(), (-0f32).to_bits());
    assert_eq!(fma(least, 1.5, -least).to_bits(), 0);
    assert_eq!(fma(least, 1.0, 0.0), least);
    // Just below the least normal number. A digit that only an unbounded exponent keeps decides
    // whether the result is rounded up to it or is a denormal.
    let below = |distance: i32| fma(-(2f32.powi(-100)), 2f32.powi(distance + 100), least);
    assert_eq!(below(-152), least);
    assert_eq!(below(-151), least, "half of the last place: to even");
    assert_eq!(below(-150), 0.0);
    assert!(fma(f32::INFINITY, 0.0, 1.0).is_nan());
}

#[test]
fn each_instruction_has_its_order() {
    // 2^24 absorbs an added 1, but not an added 2.
    let big = bf16::from_f32((1 << 12) as f32);
    let (one, zero) = (bf16::ONE, bf16::ZERO);
    let sum = |values: [bf16; 4]| {
        let other: Vec<bf16> = values.iter().map(|&x| if x == big { big } else { one }).collect();
        let (a, b) = (Mat::new(&values, 1, 4), Mat::new(&other, 4, 1));
        [definition::<Vdpbf16ps>(a, b)[0], definition::<Tdpbf16ps>(a, b)[0]]
            .map(|x| x - 16_777_216.0)
    };
    assert_eq!(sum([one, big, zero, one]), [0.0, 0.0]);
    assert_eq!(sum([big, one, one, zero]), [0.0, 0.0]);
    assert_eq!(sum([zero, one, big, one]), [2.0, 2.0]);
    assert_eq!(sum([one, zero, one, big]), [0.0, 2.0], "the odd element first, or odd ones apart");
}

#[test]
fn name_matches_the_instructions() {
    let expected = match Bf16Gemm::available() {
        None => "f32",
        Some(Bf16Gemm(super::Instructions::Skipped)) => unreachable!("nothing runs dry here"),
        #[cfg(target_arch = "x86_64")]
        Some(Bf16Gemm(super::Instructions::Amx(_))) => "amx",
        #[cfg(target_arch = "x86_64")]
        Some(Bf16Gemm(super::Instructions::Avx512(_))) => "avx512-bf16",
        Some(Bf16Gemm(super::Instructions::Model(_))) => {
            unreachable!("no test has asked for it here")
        }
    };
    assert_eq!(bf16_products(), expected);
    eprintln!("products of bf16 matrices: {expected}");
}

#[test]
fn plans_for_devices_have_their_products() {
    let run = DryRun::with_host();
    let _dry = run.enter();
    let products = Bf16Gemm::available().expect("the device's, on any CPU");
    let ones = vec![bf16::ONE; 8];
    let y = products.product(Mat::new(&ones, 2, 4), Mat::new(&ones, 4, 2), None, Threads::All);
    assert_eq!(y, [bf16::ZERO; 4]);
    let sizes = |happening: Happening| match happening {
        Happening::Product { sizes, .. } => Some(sizes),
        _ => None,
    };
    assert_eq!(run.take().into_iter().filter_map(sizes).collect::<Vec<_>>(), [[2, 4, 2]]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn register_transpose_matches_a_loop() {
    let Some(kernel) = super::avx512::Avx512::detect() else {
        return eprintln!("skipped: this CPU has no AVX512-BF16");
    };
    let mut next = random(3);
    let mut tile = [super::pack::Line::ZERO; 16];
    tile.iter_mut().flat_map(|line| &mut line.0).for_each(|x| *x = next());
    let mut expected = tile;
    Model::<Vdpbf16ps>::default().transpose(&mut expected);
    kernel.transpose(&mut tile);
    assert_eq!(tile, expected);
}

#[test]
fn a_variable_limits_the_instructions() {
    let allowed = |of_intel| {
        [None, Some("amx"), Some("avx512-bf16"), Some("f32"), Some("avx2")]
            .map(|name| super::allowed(name, of_intel))
    };
    let [both, amx, avx512, none] = [[true, true], [true, false], [false, true], [false, false]];
    assert_eq!(allowed(false), [both, both, avx512, none, both]);
    assert_eq!(allowed(true), [amx, amx, avx512, none, amx]);
}
