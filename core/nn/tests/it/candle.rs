//! Checks which of candle's operations have correct gradients, as the book's page on candle_nn
//! states.

use candle_core::{D, DType, Device, Result, Tensor, Var};

use super::gradients::harness::{flat, randn};

type Operation = fn(&Tensor) -> Result<Tensor>;

/// The scalar whose gradient is compared.
fn scalar(y: &Tensor) -> Tensor {
    (y * randn("cotangent", y.dims())).unwrap().sum_all().unwrap()
}

/// The result of comparing candle's gradient of an operation with finite differences.
#[derive(Debug, PartialEq, Eq)]
enum Gradient {
    Right,
    Wrong,
    /// candle returns an error.
    Refused,
}

fn gradient(shape: &[usize], f: Operation) -> Gradient {
    // Positive, and all different.
    let x = (randn("x", shape).abs().unwrap() + 0.3).unwrap();
    let var = Var::from_tensor(&x).unwrap();
    let Ok(grads) = scalar(&f(&var).unwrap()).backward() else { return Gradient::Refused };
    let theirs = grads.get(&var).map_or_else(|| vec![0.0; x.elem_count()], flat);
    let values = flat(&x);
    let numeric = (0..values.len()).map(|i| {
        let at = |h: f64| {
            let mut values = values.clone();
            values[i] += h;
            let x = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            scalar(&f(&x).unwrap()).to_scalar::<f64>().unwrap()
        };
        (at(1e-5) - at(-1e-5)) / 2e-5
    });
    let close = |(a, b): (&f64, f64)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    if theirs.iter().zip(numeric).all(close) { Gradient::Right } else { Gradient::Wrong }
}

/// Checks that all operations are of one kind.
fn check(operations: &[(&str, &[usize], Operation)], want: Gradient) {
    let others = operations.iter().map(|(name, shape, f)| (*name, gradient(shape, *f)));
    let others: Vec<_> = others.filter(|(_, gradient)| *gradient != want).collect();
    assert_eq!(others, [], "not {want:?}");
}

fn ids(ids: &[u32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(ids, shape, &Device::Cpu).unwrap()
}

const IMAGE: &[usize] = &[2, 2, 4, 6];

/// Operations with the shapes of their inputs.
const RIGHT: &[(&str, &[usize], Operation)] = &[
    ("add", &[3, 4], |x| x.broadcast_add(&x.narrow(0, 0, 1)?)),
    ("sub", &[3, 4], |x| x.broadcast_sub(&x.narrow(1, 1, 1)?)),
    ("mul", &[3, 4], |x| x.broadcast_mul(&x.narrow(0, 1, 1)?)),
    ("div", &[3, 4], |x| x.broadcast_div(&x.narrow(1, 0, 1)?)),
    ("maximum", &[3, 4], |x| x.maximum(&x.affine(-1.0, 1.5)?)),
    ("minimum", &[3, 4], |x| x.minimum(&x.affine(-1.0, 1.5)?)),
    ("matmul", &[2, 3, 4], |x| x.matmul(&x.t()?)),
    ("broadcast_matmul", &[2, 3, 4], |x| x.broadcast_matmul(&x.narrow(0, 0, 1)?.squeeze(0)?.t()?)),
    ("sum", &[3, 4], |x| x.sum(1)),
    ("mean", &[3, 4], |x| x.mean_keepdim(0)),
    ("var", &[3, 4], |x| x.var(1)),
    ("max", &[3, 4], |x| x.max(1)),
    ("min", &[3, 4], |x| x.min_keepdim(0)),
    ("exp", &[3, 4], Tensor::exp),
    ("log", &[3, 4], Tensor::log),
    ("sin", &[3, 4], Tensor::sin),
    ("cos", &[3, 4], Tensor::cos),
    ("tanh", &[3, 4], Tensor::tanh),
    ("abs", &[3, 4], |x| (x - 1.0)?.abs()),
    ("neg", &[3, 4], Tensor::neg),
    ("recip", &[3, 4], Tensor::recip),
    ("sqr", &[3, 4], Tensor::sqr),
    ("sqrt", &[3, 4], Tensor::sqrt),
    ("erf", &[3, 4], Tensor::erf),
    ("gelu", &[3, 4], |x| (x - 1.0)?.gelu()),
    ("gelu_erf", &[3, 4], |x| (x - 1.0)?.gelu_erf()),
    ("relu", &[3, 4], |x| (x - 1.0)?.relu()),
    ("silu", &[3, 4], |x| (x - 1.0)?.silu()),
    ("elu", &[3, 4], |x| (x - 1.0)?.elu(0.7)),
    ("powf", &[3, 4], |x| x.powf(1.7)),
    ("pow", &[3, 4], |x| x.pow(&x.affine(0.5, 1.0)?)),
    ("floor, ceil, round, sign", &[3, 4], |x| x.floor()? + x.ceil()? + x.round()? + x.sign()?),
    ("cumsum", &[3, 4], |x| x.cumsum(1)),
    ("gather", &[3, 4], |x| x.gather(&ids(&[0, 0, 3, 1, 2, 2], &[3, 2]), 1)),
    ("index_select", &[3, 4], |x| x.index_select(&ids(&[2, 0, 2], &[3]), 0)),
    ("index_add", &[3, 4], |x| x.index_add(&ids(&[2, 0, 2], &[3]), &x.sqr()?, 0)),
    ("scatter_add, of the source", &[3, 4], |x| {
        x.zeros_like()?.detach().scatter_add(
            &ids(&[0, 1, 3, 2, 1, 2, 0, 3, 2, 3, 1, 0], &[3, 4]),
            &x.sqr()?,
            1,
        )
    }),
    ("slice_scatter", &[3, 4], |x| x.slice_scatter(&x.sqr()?.narrow(1, 0, 2)?, 1, 1)),
    ("slice_assign", &[3, 4], |x| {
        x.slice_assign(&[0..2, 1..3], &x.sqr()?.narrow(0, 1, 2)?.narrow(1, 0, 2)?)
    }),
    ("where_cond", &[3, 4], |x| x.gt(1.0)?.where_cond(&x.sqr()?, x)),
    ("cat", &[3, 4], |x| Tensor::cat(&[x, &x.sqr()?], 1)),
    ("stack", &[3, 4], |x| Tensor::stack(&[x, &x.sqr()?], 1)),
    ("narrow", &[3, 4], |x| x.narrow(1, 1, 2)),
    ("transpose, permute, reshape", &[2, 3, 4], |x| {
        x.permute((2, 0, 1))?.transpose(0, 1)?.reshape((4, 6))
    }),
    ("flip, roll", &[3, 4], |x| x.flip(&[1])?.roll(1, 0)),
    ("repeat, broadcast", &[3, 4], |x| x.repeat((2, 1))?.broadcast_as((2, 6, 4))),
    ("pad", &[3, 4], |x| x.pad_with_zeros(1, 1, 2)?.pad_with_same(0, 1, 1)),
    ("log_sum_exp", &[3, 4], |x| x.log_sum_exp(1)),
    ("sort", &[3, 4], |x| Ok(x.sort_last_dim(true)?.0)),
    ("to_dtype", &[3, 4], |x| x.to_dtype(DType::F64)),
    ("candle_nn softmax", &[3, 4], |x| candle_nn::ops::softmax(x, D::Minus1)),
    ("candle_nn log_softmax", &[3, 4], |x| candle_nn::ops::log_softmax(x, 1)),
    ("candle_nn sigmoid", &[3, 4], candle_nn::ops::sigmoid),
    ("candle_nn leaky_relu", &[3, 4], |x| candle_nn::ops::leaky_relu(&(x - 1.0)?, 0.1)),
    ("candle_nn hard_sigmoid", &[3, 4], candle_nn::ops::hard_sigmoid),
    ("candle_nn mish", &[3, 4], candle_nn::ops::mish),
    ("candle_nn swiglu", &[3, 4], candle_nn::ops::swiglu),
    ("candle_nn rms_norm_slow", &[3, 4], |x| candle_nn::ops::rms_norm_slow(x, &x.i_row()?, 1e-5)),
    ("candle_nn layer_norm_slow", &[3, 4], |x| {
        candle_nn::ops::layer_norm_slow(x, &x.i_row()?, &x.i_row()?, 1e-5)
    }),
    ("candle_nn rope_slow", &[1, 1, 3, 4], |x| {
        let angles = Tensor::from_slice(&[0.1f64, 0.5, 0.2, 0.7, 0.3, 0.9], (3, 2), &Device::Cpu)?;
        candle_nn::rotary_emb::rope_slow(x, &angles.cos()?, &angles.sin()?)
    }),
    ("candle_nn pixel_shuffle", &[1, 4, 2, 3], |x| candle_nn::ops::pixel_shuffle(x, 2)),
    ("conv1d", &[2, 4, 7], |x| {
        x.conv1d(
            &x.narrow(0, 0, 1)?
                .narrow(2, 0, 3)?
                .repeat((2, 1, 1))?
                .narrow(1, 0, 2)?
                .contiguous()?,
            1,
            2,
            2,
            2,
        )
    }),
    ("conv2d", &[2, 2, 5, 6], |x| {
        x.conv2d(&x.narrow(2, 0, 3)?.narrow(3, 1, 2)?.contiguous()?, 1, 2, 1, 1)
    }),
    ("conv_transpose2d", &[2, 2, 3, 4], |x| {
        x.conv_transpose2d(&x.narrow(3, 1, 3)?.contiguous()?, 1, 1, 2, 1)
    }),
    ("avg_pool2d", IMAGE, |x| x.avg_pool2d((2, 3))),
    ("upsample_nearest1d", &[2, 2, 3], |x| x.upsample_nearest1d(6)),
    ("upsample_nearest2d", &[1, 2, 2, 3], |x| x.upsample_nearest2d(4, 6)),
];

/// The first row, as a vector.
trait FirstRow {
    fn i_row(&self) -> Result<Tensor>;
}

impl FirstRow for Tensor {
    fn i_row(&self) -> Result<Tensor> {
        self.narrow(0, 0, 1)?.flatten_all()
    }
}

const WRONG: &[(&str, &[usize], Operation)] = &[
    ("max_pool2d", IMAGE, |x| x.max_pool2d(2)),
    ("avg_pool2d on remainders", &[1, 1, 5, 6], |x| x.avg_pool2d(2)),
    ("upsample_nearest1d of a tensor that is used twice", &[2, 2, 3], |x| {
        let x = x.sqr()?;
        x.upsample_nearest1d(6)?.sum_keepdim(2)? + x.sum_keepdim(2)?
    }),
    ("upsample_nearest2d of a tensor that is used twice", &[1, 2, 2, 3], |x| {
        let x = x.sqr()?;
        x.upsample_nearest2d(4, 6)?.sum_keepdim(3)?.sum_keepdim(2)?
            + x.sum_keepdim(3)?.sum_keepdim(2)?
    }),
    ("scatter, of what it writes into", &[3, 4], |x| {
        x.scatter(&ids(&[0, 0, 3, 2, 1, 2, 0, 3, 2, 3, 1, 0], &[3, 4]), &x.ones_like()?.detach(), 1)
    }),
    ("scatter_add, of what it adds to", &[3, 4], |x| {
        x.scatter_add(
            &ids(&[0, 1, 3, 2, 1, 2, 0, 3, 2, 3, 1, 0], &[3, 4]),
            &x.ones_like()?.detach(),
            1,
        )
    }),
    ("max of equal elements", &[3, 1], |x| x.broadcast_as((3, 4))?.contiguous()?.max(1)),
    ("min of equal elements", &[3, 1], |x| x.broadcast_as((3, 4))?.contiguous()?.min(1)),
    ("a fused softmax", &[3, 4], candle_nn::ops::softmax_last_dim),
];

const REFUSED: &[(&str, &[usize], Operation)] = &[
    ("conv_transpose1d", &[2, 2, 3], |x| x.conv_transpose1d(&x.contiguous()?, 0, 0, 1, 1, 1)),
    ("upsample_bilinear2d", &[1, 1, 2, 2], |x| x.upsample_bilinear2d(4, 4, false)),
    ("max_pool2d with overlaps", IMAGE, |x| x.max_pool2d_with_stride(2, 1)),
    ("avg_pool2d with overlaps", IMAGE, |x| x.avg_pool2d_with_stride(2, 1)),
    ("scatter_add of fewer than it adds to", &[3, 4], |x| {
        let few = x.narrow(1, 0, 2)?.contiguous()?;
        x.scatter_add(&ids(&[0, 1, 3, 1, 2, 0], &[3, 2]), &few, 1)
    }),
    ("upsample_nearest2d by a fraction", &[1, 1, 2, 2], |x| x.upsample_nearest2d(3, 3)),
];

#[test]
fn most_gradients_of_candle_are_right() {
    check(RIGHT, Gradient::Right);
}

/// If one is correct after an update of candle, remove it from the book and from
/// `refuse_wrong_gradients`.
#[test]
fn gradients_that_the_book_calls_wrong_are_wrong() {
    check(WRONG, Gradient::Wrong);
    check(REFUSED, Gradient::Refused);
}
