//! Kernels of layers against their formulas in f64, in every dtype.

use fulgurite_core::random::{Purpose, Stream};
use fulgurite_kernels::plans::{
    CrossEntropy, Dropout, IGNORED, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, Rope,
    add, cross_entropy, cross_entropy_backward, dropout, embedding_grad, layer_norm,
    layer_norm_backward, rms_norm, rms_norm_backward, rope,
};
use half::{bf16, f16};

use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// Memory whose elements begin `skip` elements after an allocation's start.
pub(crate) struct View {
    allocation: u64,
    skip: usize,
    size: usize,
}

impl View {
    pub(crate) fn put<T: Dtype>(machine: &mut Machine, skip: usize, values: &[T]) -> Self {
        let mut all = vec![T::from_f64(7.0); skip];
        all.extend_from_slice(values);
        Self { allocation: machine.put(&all), skip, size: size_of::<T>() }
    }

    pub(crate) fn garbage<T: Dtype>(machine: &mut Machine, skip: usize, n: usize) -> Self {
        Self { allocation: machine.garbage::<T>(skip + n), skip, size: size_of::<T>() }
    }

    pub(crate) fn address(&self) -> u64 {
        self.allocation + (self.skip * self.size) as u64
    }

    pub(crate) fn get<T: Dtype>(&self, machine: &Machine) -> Vec<T> {
        machine.get(self.allocation)[self.skip..].to_vec()
    }
}

fn wide<T: Dtype>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// Compares with a tolerance of one rounding of the dtype and a few f32 roundings of numbers about
/// `size`.
pub(crate) fn close<T: Dtype>(what: &str, got: &[T], expected: &[f64], size: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let rounding = match T::FLOAT.name() {
        "bf16" => 1.0 / 256.0,
        "f16" => 1.0 / 2048.0,
        _ => 0.0,
    };
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let off = (got.to_f64() - expected).abs();
        let most = expected.abs() * rounding + 4e-6 * (size + expected.abs()) + 1e-7 * rounding;
        assert!(off <= most, "{what}, {} element {i}: {got:?}, not {expected}", T::FLOAT.name());
    }
}

macro_rules! in_every_dtype {
    ($($test:ident($f:ident);)*) => {$(
        #[test]
        fn $test() {
            $f::<f32>();
            $f::<bf16>();
            $f::<f16>();
        }
    )*};
}
pub(crate) use in_every_dtype;

in_every_dtype! {
    rms_norm_has_its_formula_and_gradient(norms);
    layer_norm_has_its_formula_and_gradient(centred);
    sums_are_added_in_place(added);
    positions_are_rotated_and_rotated_back(rotated);
    dropout_has_the_mask_of_the_cpu(dropped);
    cross_entropy_has_its_loss_and_gradient(losses);
    the_gradient_of_an_embedding_has_the_bits_of_a_sum_in_order(embedded);
}

/// Adds in f32 and rounds.
fn summed<T: Dtype>(x: &[T], residual: &[T]) -> Vec<T> {
    let sum = |(a, b): (&T, &T)| T::from_f64(f64::from((a.to_f64() + b.to_f64()) as f32));
    x.iter().zip(residual).map(sum).collect()
}

fn norms<T: Dtype>() {
    for (rows, n, skip, with_residual) in [
        (3, 7, 1, true),
        (67, 300, 0, false),
        (2, 1025, 3, true),
        (0, 5, 0, true),
        (2, 8456, 0, true),
    ] {
        let mut m = Machine::default();
        let count = rows * n;
        let [x, residual, grad, more] =
            ["x", "residual", "grad", "more"].map(|what| normal::<T>(what, count));
        let weight: Vec<f32> = normal("weight", n);
        let start: Vec<f32> = normal("start", n);
        let at = [&x, &residual, &grad, &more].map(|v| View::put(&mut m, skip, v));
        let [sum, y, dx] = [(); 3].map(|()| View::garbage::<T>(&mut m, skip, count));
        let (weight_at, dweight) = (m.put(&weight), m.put(&start));
        let rstd = m.garbage::<f32>(rows);
        let eps = 1e-5;
        m.run(&rms_norm(RmsNorm {
            dtype: T::FLOAT,
            x: at[0].address(),
            residual: if with_residual { at[1].address() } else { 0 },
            weight: weight_at,
            sum: if with_residual { sum.address() } else { 0 },
            y: y.address(),
            rstd,
            rows: rows as u32,
            n: n as u32,
            eps,
        }));
        let summed = if with_residual { summed(&x, &residual) } else { x.clone() };
        if with_residual {
            assert!(sum.get::<T>(&m) == summed);
        }
        let normalised = if with_residual { &sum } else { &at[0] };
        m.run(&rms_norm_backward(RmsNormBackward {
            dtype: T::FLOAT,
            x: normalised.address(),
            weight: weight_at,
            rstd,
            grad: at[2].address(),
            more: if with_residual { at[3].address() } else { 0 },
            dx: dx.address(),
            dweight,
            rows: rows as u32,
            n: n as u32,
        }));
        let (mut expected_y, mut expected_dx) = (Vec::new(), Vec::new());
        let mut expected_dw = wide(&start);
        for row in 0..rows {
            let [x, g, more] = [&summed, &grad, &more].map(|v| wide(&v[row * n..][..n]));
            let scale =
                1.0 / (x.iter().map(|x| x * x).sum::<f64>() / n as f64 + f64::from(eps)).sqrt();
            let along =
                (0..n).map(|i| g[i] * f64::from(weight[i]) * x[i] * scale).sum::<f64>() / n as f64;
            for i in 0..n {
                let w = f64::from(weight[i]);
                expected_y.push(x[i] * scale * w);
                let d = scale * (g[i] * w - x[i] * scale * along);
                expected_dx.push(if with_residual { d + more[i] } else { d });
                expected_dw[i] += g[i] * x[i] * scale;
            }
        }
        close("y", &y.get::<T>(&m), &expected_y, 1.0);
        close("dx", &dx.get::<T>(&m), &expected_dx, 1.0);
        close("dweight", &m.get::<f32>(dweight), &expected_dw, 10.0);
    }
}

fn centred<T: Dtype>() {
    for (rows, n, skip, with_bias, with_residual) in [
        (3, 7, 1, true, true),
        (67, 300, 0, true, false),
        (2, 1025, 3, false, true),
        (2, 8456, 0, true, true),
        (3, 9, 2, false, false),
        (0, 5, 0, true, true),
    ] {
        let mut m = Machine::default();
        let count = rows * n;
        // Far from zero, where a variance from squares would lose all precision.
        let x: Vec<T> =
            normal::<T>("x", count).iter().map(|x| T::from_f64(x.to_f64() + 30.0)).collect();
        let [residual, grad, more] =
            ["residual", "grad", "more"].map(|what| normal::<T>(what, count));
        let [weight, bias, start]: [Vec<f32>; 3] =
            ["weight", "bias", "start"].map(|what| normal(what, n));
        let [x_at, residual_at, grad_at, more_at] =
            [&x, &residual, &grad, &more].map(|v| View::put(&mut m, skip, v));
        let [sum, y, dx] = [(); 3].map(|()| View::garbage::<T>(&mut m, skip, count));
        let [weight_at, bias_at, dweight, dbias] =
            [&weight, &bias, &start, &start].map(|v| m.put(v));
        let [mean, rstd] = [(); 2].map(|()| m.garbage::<f32>(rows));
        let (dtype, eps, rows_of, n_of) = (T::FLOAT, 1e-5, rows as u32, n as u32);
        let bias_at = if with_bias { bias_at } else { 0 };
        m.run(&layer_norm(LayerNorm {
            dtype,
            x: x_at.address(),
            residual: if with_residual { residual_at.address() } else { 0 },
            weight: weight_at,
            bias: bias_at,
            sum: if with_residual { sum.address() } else { 0 },
            y: y.address(),
            mean,
            rstd,
            rows: rows_of,
            n: n_of,
            eps,
        }));
        let x = if with_residual { summed(&x, &residual) } else { x };
        if with_residual {
            assert!(sum.get::<T>(&m) == x);
        }
        m.run(&layer_norm_backward(LayerNormBackward {
            dtype,
            x: if with_residual { sum.address() } else { x_at.address() },
            weight: weight_at,
            mean,
            rstd,
            grad: grad_at.address(),
            more: if with_residual { more_at.address() } else { 0 },
            dx: dx.address(),
            dweight,
            dbias: if with_bias { dbias } else { 0 },
            rows: rows_of,
            n: n_of,
        }));
        let (mut expected_y, mut expected_dx) = (Vec::new(), Vec::new());
        let (mut expected_dw, mut expected_db) = (wide(&start), wide(&start));
        for row in 0..rows {
            let [x, grad, more] = [&x, &grad, &more].map(|v| wide(&v[row * n..][..n]));
            let count = n as f64;
            let middle = x.iter().sum::<f64>() / count;
            let variance = x.iter().map(|x| (x - middle).powi(2)).sum::<f64>() / count;
            let scale = 1.0 / (variance + f64::from(eps)).sqrt();
            let xhat: Vec<f64> = x.iter().map(|x| (x - middle) * scale).collect();
            let g: Vec<f64> = grad.iter().zip(&weight).map(|(g, w)| g * f64::from(*w)).collect();
            let along = g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / count;
            let level = g.iter().sum::<f64>() / count;
            for i in 0..n {
                let bias = if with_bias { f64::from(bias[i]) } else { 0.0 };
                expected_y.push(xhat[i] * f64::from(weight[i]) + bias);
                let d = scale * (g[i] - level - xhat[i] * along);
                expected_dx.push(if with_residual { d + more[i] } else { d });
                expected_dw[i] += grad[i] * xhat[i];
                expected_db[i] += if with_bias { grad[i] } else { 0.0 };
            }
        }
        // The mean of numbers about 30 is off by one of their roundings.
        close("y", &y.get::<T>(&m), &expected_y, 3.0);
        close("dx", &dx.get::<T>(&m), &expected_dx, 3.0);
        close("dweight", &m.get::<f32>(dweight), &expected_dw, 10.0);
        close("dbias", &m.get::<f32>(dbias), &expected_db, 3.0);
    }
}

fn added<T: Dtype>() {
    for (n, skip) in [(1, 1), (8193, 3), (0, 0), (8256, 0)] {
        let mut m = Machine::default();
        let [sum, x] = ["sum", "x"].map(|what| normal::<T>(what, n));
        let [sum_at, x_at] = [&sum, &x].map(|v| View::put(&mut m, skip, v));
        m.run(&add(T::FLOAT, sum_at.address(), x_at.address(), n as u64));
        assert!(sum_at.get::<T>(&m) == summed(&sum, &x), "{} of {n}", T::FLOAT.name());
    }
}

fn rotated<T: Dtype>() {
    for (batch, positions, inner, width, skip) in
        [(2, 5, 1, 6, 1), (1, 33, 3, 130, 0), (0, 3, 2, 4, 0), (2, 67, 3, 64, 0)]
    {
        let mut m = Machine::default();
        let rows = batch * positions * inner;
        let x = normal::<T>("x", rows * width);
        let angles: Vec<f32> = normal("angles", positions * width / 2);
        let [cosine, sine] =
            [f32::cos, f32::sin].map(|f| m.put(&angles.iter().map(|a| f(*a)).collect::<Vec<_>>()));
        let at = View::put(&mut m, skip, &x);
        let y = View::garbage::<T>(&mut m, skip, rows * width);
        let op = Rope {
            dtype: T::FLOAT,
            x: at.address(),
            y: y.address(),
            cosine,
            sine,
            rows: rows as u64,
            width: width as u32,
            positions: positions as u32,
            inner: inner as u32,
            inverse: false,
        };
        m.run(&rope(op));
        let mut expected = vec![0.0; rows * width];
        for row in 0..rows {
            let position = row / inner % positions;
            for i in 0..width / 2 {
                let angle = angles[position * width / 2 + i];
                let (c, s) = (f64::from(angle.cos()), f64::from(angle.sin()));
                let (first, second) = (row * width + i, row * width + i + width / 2);
                let (a, b) = (x[first].to_f64(), x[second].to_f64());
                (expected[first], expected[second]) = (a * c - b * s, b * c + a * s);
            }
        }
        let rotated = y.get::<T>(&m);
        close("y", &rotated, &expected, 1.0);
        // Rotates back, in place. The result is off by the roundings.
        m.run(&rope(Rope { x: y.address(), inverse: true, ..op }));
        let tolerance = if T::FLOAT.name() == "f32" { 1e-5 } else { 0.03 };
        for (got, expected) in y.get::<T>(&m).iter().zip(&x) {
            assert!((got.to_f64() - expected.to_f64()).abs() <= tolerance, "{got:?} {expected:?}");
        }
    }
}

fn dropped<T: Dtype>() {
    let stream = Stream::new(5, Purpose::Dropout, "layer").child(9);
    // Rows with gaps, at offsets that are not multiples of four, and beyond 2^32; also rows of one
    // element.
    let rows: [(usize, Vec<u64>); 3] = [
        (2_731, vec![3, 100_001, (1 << 34) + 2, 7]),
        (1, (0..9).map(|i| 5 * i + 2).collect()),
        (3, vec![]),
    ];
    for (width, starts) in rows {
        for p in [0.0, 0.1, 0.5] {
            let mut m = Machine::default();
            let n = width * starts.len();
            let x = normal::<T>("x", n);
            let (at, y) = (View::put(&mut m, 1, &x), View::garbage::<T>(&mut m, 1, n));
            let of = Dropout {
                key: stream.key(),
                high: stream.high(),
                width: width as u64,
                starts: &starts,
                p,
            };
            m.run(&dropout(T::FLOAT, at.address(), y.address(), n as u64, of));
            // Like `nn::Dropout` on the CPU: arithmetic in f32, equal to the bit.
            let expected: Vec<T> = (0..n)
                .map(|i| {
                    let u = stream.uniform(starts[i / width] + (i % width) as u64);
                    let kept = x[i].to_f64() as f32 * ((1.0 / (1.0 - p)) as f32);
                    T::from_f64(f64::from(if u < p { 0.0 } else { kept }))
                })
                .collect();
            assert!(y.get::<T>(&m) == expected, "{width} {p}");
        }
    }
}

fn losses<T: Dtype>() {
    for (rows, classes, smoothing, skip) in
        [(3, 5, 0.0, 1), (4, 704, 0.0, 0), (2, 2176, 0.1, 0), (2, 257, 0.1, 1), (0, 3, 0.1, 0)]
    {
        let mut m = Machine::default();
        let mut logits = normal::<T>("logits", rows * classes);
        if rows > 2 {
            // Masked classes (minus infinity): all that some threads see, and the first that others
            // see.
            logits[classes] = T::from_f64(f64::NEG_INFINITY);
            logits[2 * classes + 1] = T::from_f64(f64::NEG_INFINITY);
            logits[classes + 3] = T::from_f64(60.0);
        }
        let targets: Vec<u32> =
            (0..rows as u32).map(|row| if row == 2 { IGNORED } else { row * 2 + 1 }).collect();
        let logits_at = View::put(&mut m, skip, &logits);
        let (targets_at, lse, grad) = (m.put(&targets), m.garbage::<f32>(rows), m.put(&[0.5f32]));
        let total = m.garbage::<f64>(1);
        let of = CrossEntropy {
            dtype: T::FLOAT,
            logits: logits_at.address(),
            targets: targets_at,
            lse,
            rows: rows as u32,
            classes: classes as u32,
            smoothing,
        };
        m.run(&cross_entropy(of, total));
        assert!(logits_at.get::<T>(&m).iter().zip(&logits).all(|(a, b)| a.to_f64() == b.to_f64()));
        m.run(&cross_entropy_backward(of, grad, 0, classes as u32));
        let (mut loss, mut expected_lse, mut expected_grad) = (0.0, Vec::new(), Vec::new());
        for row in 0..rows {
            if targets[row] == IGNORED {
                expected_lse.push(0.0);
                expected_grad.extend(vec![0.0; classes]);
                continue;
            }
            let (z, target) = (wide(&logits[row * classes..][..classes]), targets[row] as usize);
            let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log_sum = most + z.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
            loss += log_sum - (1.0 - smoothing) * z[target];
            if smoothing > 0.0 {
                loss -= smoothing * z.iter().sum::<f64>() / classes as f64;
            }
            expected_lse.push(log_sum);
            expected_grad.extend((0..classes).map(|i| {
                let hit = if i == target { 1.0 - smoothing } else { 0.0 };
                0.5 * ((z[i] - log_sum).exp() - smoothing / classes as f64 - hit)
            }));
        }
        let got = m.get::<f64>(total)[0];
        assert!((got - loss).abs() <= 1e-6 * loss.abs(), "{got} {loss}");
        close("lse", &m.get::<f32>(lse), &expected_lse, 1.0);
        close("gradient", &logits_at.get::<T>(&m), &expected_grad, 1.0);
    }
}

#[test]
fn target_beyond_the_classes_gives_nan() {
    let mut m = Machine::default();
    // The row ends where its memory ends, so a read past it would be found.
    let (logits, targets) = (m.put(&[1f32, 2.0, 3.0]), m.put(&[3u32]));
    let (lse, total) = (m.garbage::<f32>(1), m.put(&[0f64]));
    let (dtype, rows, classes, smoothing) = (f32::FLOAT, 1, 3, 0.0);
    let of = CrossEntropy { dtype, logits, targets, lse, rows, classes, smoothing };
    m.run(&cross_entropy(of, total));
    assert!(m.get::<f64>(total)[0].is_nan());
}

#[test]
fn smoothing_counts_classes_of_all_ranks() {
    let (rows, classes, smoothing) = (2, 10, 0.2);
    let logits: Vec<f32> = normal("logits", rows * classes);
    let targets = [7u32, 2];
    let mut whole = Machine::default();
    let run = |m: &mut Machine,
               logits: &[f32],
               lse: Option<&[f32]>,
               first: u32|
     -> (Vec<f32>, Vec<f32>, f64) {
        let columns = (logits.len() / rows) as u32;
        let (at, targets, grad, total) =
            (m.put(logits), m.put(&targets), m.put(&[1f32]), m.put(&[0f64]));
        let lse_at = match lse {
            Some(lse) => m.put(lse),
            None => m.garbage::<f32>(rows),
        };
        let of = CrossEntropy {
            dtype: f32::FLOAT,
            logits: at,
            targets,
            lse: lse_at,
            rows: rows as u32,
            classes: columns,
            smoothing,
        };
        if lse.is_none() {
            m.run(&cross_entropy(of, total));
        }
        m.run(&cross_entropy_backward(of, grad, first, classes as u32));
        (m.get(at), m.get(lse_at), m.get(total)[0])
    };
    let (expected, lse, loss) = run(&mut whole, &logits, None, 0);
    let mut by_hand = 0.0;
    for row in 0..rows {
        let z = wide(&logits[row * classes..][..classes]);
        let mean = z.iter().sum::<f64>() / classes as f64;
        let log_sum = z.iter().map(|z| z.exp()).sum::<f64>().ln();
        by_hand += log_sum - (1.0 - smoothing) * z[targets[row] as usize] - smoothing * mean;
    }
    assert!((loss - by_hand).abs() < 1e-6 * by_hand, "{loss} {by_hand}");
    let cut = |range: std::ops::Range<usize>, all: &[f32]| -> Vec<f32> {
        (0..rows).flat_map(|row| all[row * classes..][range.clone()].to_vec()).collect()
    };
    for range in [0..4, 4..10] {
        let part = cut(range.clone(), &logits);
        let (got, ..) = run(&mut Machine::default(), &part, Some(&lse), range.start as u32);
        assert_eq!(got, cut(range, &expected));
    }
}

fn embedded<T: Dtype>() {
    for (ids, width, skip) in
        [(vec![3u32, 1, 3, IGNORED, 3, 0, 1], 300, 1), (vec![2; 70], 7, 0), (vec![], 4, 0)]
    {
        let mut m = Machine::default();
        let grad = normal::<T>("grad", ids.len() * width);
        let mut expected: Vec<f32> = normal("start", 5 * width);
        let out = m.put(&expected);
        let at = View::put(&mut m, skip, &grad);
        m.run(&embedding_grad(T::FLOAT, at.address(), &ids, width as u32, out));
        for (row, &id) in ids.iter().enumerate().filter(|(_, id)| **id != IGNORED) {
            for i in 0..width {
                expected[id as usize * width + i] += grad[row * width + i].to_f64() as f32;
            }
        }
        assert_eq!(m.get::<f32>(out), expected);
    }
}
