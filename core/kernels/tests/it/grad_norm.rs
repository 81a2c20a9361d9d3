//! The squared norm against the CPU's.

use fulgurite_kernels::plans::{Values, squared_norm};
use half::{bf16, f16};

use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// Puts `skip` elements, then `n` elements that count.
fn put<T: Dtype>(machine: &mut Machine, skip: usize, n: usize, total: &mut f64) -> Values {
    let values: Vec<T> = normal(&format!("{n} {skip}"), skip + n);
    *total += values[skip..].iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>();
    let address = machine.put(&values) + (skip * size_of::<T>()) as u64;
    Values { address, length: n as u64, dtype: T::FLOAT }
}

#[test]
fn many_tensors_in_one_sum() {
    let mut machine = Machine::default();
    let mut expected = 0.0;
    let mut all = Vec::new();
    for (skip, n) in [(0, 1), (3, 8192), (1, 8193), (0, 0), (5, 20_011), (0, 31), (7, 255)] {
        all.push(put::<f32>(&mut machine, skip, n, &mut expected));
        all.push(put::<bf16>(&mut machine, skip, n, &mut expected));
        all.push(put::<f16>(&mut machine, skip, n, &mut expected));
        all.push(put::<f64>(&mut machine, skip, n, &mut expected));
    }
    let total = machine.garbage::<f64>(1);
    machine.run(&squared_norm(&all, total));
    let got = machine.get::<f64>(total)[0];
    assert!((got - expected).abs() <= 1e-13 * expected, "{got} {expected}");
}

#[test]
fn norm_of_no_elements_is_zero() {
    for tensors in [vec![], vec![Values { address: 0, length: 0, dtype: f32::FLOAT }]] {
        let mut machine = Machine::default();
        let total = machine.garbage::<f64>(1);
        machine.run(&squared_norm(&tensors, total));
        assert_eq!(machine.get::<f64>(total), [0.0]);
    }
}

#[test]
fn norm_shows_nan_and_infinity() {
    for (bad, dtype) in [(f32::NAN, "nan"), (f32::INFINITY, "inf")] {
        let mut machine = Machine::default();
        let mut values: Vec<f32> = normal(dtype, 9000);
        values[8999] = bad;
        let address = machine.put(&values);
        let total = machine.garbage::<f64>(1);
        machine.run(&squared_norm(&[Values { address, length: 9000, dtype: f32::FLOAT }], total));
        assert!(!machine.get::<f64>(total)[0].is_finite());
    }
}
