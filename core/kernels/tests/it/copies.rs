//! Copies of many parts of memory against the CPU's.

use candle_core::{DType, Device, Tensor};
use fulgurite_kernels::Float;
use fulgurite_kernels::plans::{Copied, copies};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// A part of a source and its target, in elements.
#[derive(Debug, Clone, Copy)]
struct Part {
    from: usize,
    to: usize,
    length: usize,
}

/// Numbers that round, NaN, infinity, and numbers out of range for other dtypes.
fn numbers<T: Dtype>(what: &str, n: usize) -> Vec<T> {
    let mut values: Vec<T> = normal(what, n);
    let special =
        [f64::NAN, f64::INFINITY, -0.0, 65_519.9, 65_520.0, 1e-7, 3.1e38, 1.0 + 1.0 / 256.0];
    for (value, special) in values.iter_mut().step_by(5).zip(special.into_iter().cycle()) {
        *value = T::from_f64(special);
    }
    values
}

/// Casts `parts` of a tensor by candle; the rest of the target keeps the bytes 0xff.
fn expected<F: Dtype, T: Dtype>(source: &[F], parts: &[Part], length: usize) -> Vec<u8> {
    let cast = Tensor::from_slice(source, source.len(), &Device::Cpu).unwrap();
    let cast = cast.to_dtype(T::DTYPE).unwrap().to_vec1::<T>().unwrap();
    let mut bytes = vec![0xff; length * size_of::<T>()];
    for part in parts {
        let target = &mut bytes[part.to * size_of::<T>()..][..part.length * size_of::<T>()];
        target.copy_from_slice(bytemuck::cast_slice(&cast[part.from..][..part.length]));
    }
    bytes
}

/// Parts to cast, of lengths around a block's and a thread's word, from and to any element.
fn parts() -> Vec<Part> {
    let mut to = 0;
    let mut all = Vec::new();
    for (i, length) in [0, 1, 3, 4, 5, 255, 8191, 8192, 8193, 0, 20_003].into_iter().enumerate() {
        for (shift, from) in [(0, 0), (1, i), (3, 4)] {
            to = (to + 1_usize).next_multiple_of(4) + shift;
            all.push(Part { from, to, length });
            to += length;
        }
    }
    all
}

fn puts<F: Dtype, T: Dtype>(machine: &mut Machine, copied: &mut Vec<Copied>) -> (u64, Vec<u8>) {
    let parts = parts();
    let most = parts.iter().map(|part| part.from + part.length).max().unwrap();
    let length = parts.last().unwrap().to + parts.last().unwrap().length + 1;
    let values = numbers::<F>(&format!("{:?} {:?}", F::FLOAT, T::FLOAT), most);
    let (source, target) = (machine.put(&values), machine.garbage::<T>(length));
    copied.extend(parts.iter().map(|part| {
        let [to, from] = [part.to * size_of::<T>(), part.from * size_of::<F>()];
        let dtypes = [F::FLOAT, T::FLOAT];
        Copied::cast(target + to as u64, source + from as u64, part.length as u64, dtypes)
    }));
    (target, expected::<F, T>(&values, &parts, length))
}

/// Replaces all NaNs by one NaN, because their bits may differ.
fn without_nan<T: Dtype>(bytes: &[u8]) -> Vec<u8> {
    let mut values: Vec<T> =
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
    values.iter_mut().filter(|x| x.to_f64().is_nan()).for_each(|x| *x = T::from_f64(f64::NAN));
    bytemuck::cast_slice(&values).to_vec()
}

#[test]
fn casts_of_all_dtypes_match_the_cpu() {
    let mut machine = Machine::default();
    let mut copied = Vec::new();
    let all = [
        (DType::BF16, puts::<f32, bf16>(&mut machine, &mut copied)),
        (DType::F16, puts::<f32, f16>(&mut machine, &mut copied)),
        (DType::F32, puts::<bf16, f32>(&mut machine, &mut copied)),
        (DType::F32, puts::<f16, f32>(&mut machine, &mut copied)),
        (DType::F16, puts::<bf16, f16>(&mut machine, &mut copied)),
        (DType::BF16, puts::<f16, bf16>(&mut machine, &mut copied)),
        (DType::F64, puts::<f64, f64>(&mut machine, &mut copied)),
    ];
    let plan = copies(copied);
    assert_eq!(plan.calls().len(), 1);
    machine.run(&plan);
    for (dtype, (target, expected)) in all {
        let got = machine.get::<u8>(target);
        let (got, expected) = match dtype {
            DType::BF16 => (without_nan::<bf16>(&got), without_nan::<bf16>(&expected)),
            DType::F16 => (without_nan::<f16>(&got), without_nan::<f16>(&expected)),
            DType::F32 => (without_nan::<f32>(&got), without_nan::<f32>(&expected)),
            _ => (got, expected),
        };
        assert!(got == expected, "to {dtype:?}");
    }
}

#[test]
fn empty_copies_launch_nothing() {
    assert_eq!(copies([]).work(), []);
    let empty = [Copied::bytes(0, 0, 0), Copied::cast(0, 0, 0, [Float::F32, Float::Bf16])];
    assert_eq!(copies(empty).work(), []);
}

/// Parts of a flat buffer and of tensors, one after the other with gaps, as collectives copy them.
fn check_bytes(parts: &[(usize, usize, usize)]) {
    let mut machine = Machine::default();
    let mut copied = Vec::new();
    let (mut from, mut to) = (0, 0);
    let length: usize = parts.iter().map(|(gap, skip, bytes)| gap + skip + bytes).sum();
    let bytes: Vec<u8> = (0..length + 1).map(|i| (i % 251) as u8).collect();
    let (source, target) = (machine.put(&bytes), machine.garbage::<u8>(length + 1));
    let mut expected = vec![0xff; length + 1];
    for &(gap, skip, length) in parts {
        (from, to) = (from + skip, to + gap);
        copied.push(Copied::bytes(target + to as u64, source + from as u64, length as u64));
        expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
        (from, to) = (from + length, to + length);
    }
    machine.run(&copies(copied));
    assert!(machine.get::<u8>(target) == expected, "{parts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn bytes_are_copied_to_their_targets_only(
        parts in prop::collection::vec((0..20_usize, 0..20_usize, prop_oneof![
            Just(0_usize), 1..40_usize, 32_760..32_780_usize, Just(65_536_usize),
        ]), 1..8)
    ) {
        check_bytes(&parts);
    }
}
