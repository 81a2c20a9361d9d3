//! `forward_residual` of the norms.

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{
    ActivationCheckpointing, ActivationOffload, Module, ModuleBuilder, ModuleInit, Unit,
};
use fulgurite_core::nn::{LayerNorm, RmsNorm, force_portable};
use fulgurite_test_message::assert_says;

use super::harness::{Params, analytic, assert_same, builder, check, randn};

const WIDTH: usize = 5;
const SHAPE: [usize; 3] = [2, 3, WIDTH];

enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    fn new(b: &ModuleBuilder, kind: usize) -> Self {
        let b = &b.pp("norm");
        match kind {
            0 => Self::Rms(RmsNorm::new(b, WIDTH, 1e-5).unwrap()),
            1 => Self::Layer(LayerNorm::new(b, WIDTH, 1e-5).unwrap()),
            2 => Self::Rms(RmsNorm::with_unit_offset(b, WIDTH, 1e-5).unwrap()),
            _ => Self::Layer(LayerNorm::without_bias(b, WIDTH, 1e-5).unwrap()),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }

    fn of_sum(&self, x: &[Tensor]) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Rms(norm) => norm.forward_residual(&x[0], &x[1]),
            Self::Layer(norm) => norm.forward_residual(&x[0], &x[1]),
        }
    }

    /// The same by two operations.
    fn apart(&self, x: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let sum = (&x[0] + &x[1])?;
        Ok((self.forward(&sum)?, sum))
    }
}

/// Both outputs, or one of them.
fn joined(which: usize, (y, sum): (Tensor, Tensor)) -> Result<Tensor> {
    Ok(match which {
        0 => Tensor::cat(&[y, sum], 2)?,
        1 => y,
        _ => sum,
    })
}

fn inputs() -> [Tensor; 2] {
    ["x", "residual"].map(|what| randn(what, &SHAPE))
}

#[test]
fn gradients() {
    for kind in 0..4 {
        let b = builder(DType::F64);
        let (norm, params) = (Norm::new(&b, kind), Params::new(&b));
        for which in 0..2 {
            check(&inputs(), &params, &|x| joined(which, norm.of_sum(x)?));
        }
        // With one input outside the graph.
        for i in 0..2 {
            check(&[randn("x", &SHAPE)], &params, &|x| {
                let mut both = inputs();
                both[i] = x[0].clone();
                joined(0, norm.of_sum(&both)?)
            });
        }
        // With gradients for the parameters only.
        let alone = analytic(&[], &params, &|_| joined(0, norm.of_sum(&inputs())?));
        assert!(alone.params.iter().all(Option::is_some));
    }
}

#[test]
fn matches_sum_and_norm_to_the_bit() {
    let half = |dtype| ModuleInit {
        compute_dtype: dtype,
        keep_in_fp32: vec!["norm".to_owned()],
        ..ModuleInit::default()
    };
    for portable in [false, true] {
        let _portable = portable.then(force_portable);
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            for kind in 0..4 {
                let mut builders = vec![builder(dtype)];
                if matches!(dtype, DType::BF16 | DType::F16) {
                    builders.push(ModuleBuilder::new(half(dtype)));
                }
                for b in builders {
                    let (norm, params) = (Norm::new(&b, kind), Params::new(&b));
                    let x = inputs().map(|x| x.to_dtype(dtype).unwrap());
                    for which in 0..3 {
                        let apart = analytic(&x, &params, &|x| joined(which, norm.apart(x)?));
                        let one = analytic(&x, &params, &|x| joined(which, norm.of_sum(x)?));
                        assert_same("the norm of a sum", &one, &apart, 0.0);
                    }
                }
            }
        }
    }
}

/// A sum of a tensor with itself: one operation gives two gradients to one tensor.
#[test]
fn an_input_may_be_its_own_residual() {
    let b = builder(DType::F64);
    let (norm, params) = (Norm::new(&b, 1), Params::new(&b));
    check(&[randn("x", &SHAPE)], &params, &|x| {
        joined(0, norm.of_sum(&[x[0].clone(), x[0].clone()])?)
    });
}

/// Recomputation in backward, and offload of the tensors that the graph keeps.
#[test]
fn units_may_be_computed_again_or_offloaded() {
    let run = |init: ModuleInit| {
        let b =
            ModuleBuilder::new(ModuleInit { dtype: DType::F64, compute_dtype: DType::F64, ..init });
        let unit: Unit<Norm> = b.unit("block", |b| Ok(Norm::new(b, 0))).unwrap();
        let params = Params::new(&b);
        analytic(&inputs(), &params, &|x| {
            // The sum stays within the unit, or is one of its outputs.
            let (y, sum) = unit.call(&(x[0].clone(), x[1].clone()), |norm, (x, residual)| {
                let (y, sum) = norm.of_sum(&[x.clone(), residual.clone()])?;
                Ok(((&y * &sum)?, sum))
            })?;
            joined(0, (y, sum))
        })
    };
    let plain = run(ModuleInit::default());
    let offload = Some(ActivationOffload::Disk);
    for how in [
        ActivationCheckpointing::full(),
        ActivationCheckpointing { offload, ..ActivationCheckpointing::full() },
        ActivationCheckpointing { offload, ..ActivationCheckpointing::default() },
    ] {
        let what = format!("{how:?}");
        let init = ModuleInit { activation_checkpointing: how, ..ModuleInit::default() };
        assert_same(&what, &run(init), &plain, 0.0);
    }
}

#[test]
fn inputs_that_differ_are_refused() {
    let b = builder(DType::F64);
    let norm = Norm::new(&b, 0);
    let [x, residual] = inputs();
    assert_says!(
        norm.of_sum(&[x.clone(), residual.narrow(1, 0, 2).unwrap()]).unwrap_err(),
        "module `norm` … residual … must be alike … [2, 3, 5] F64 … [2, 2, 5] F64"
    );
    // Floats are cast; integers are not.
    let whole = residual.to_dtype(DType::U32).unwrap();
    assert_says!(norm.of_sum(&[x, whole]).unwrap_err(), "module `norm` … casts to F64, got U32 …");
}
