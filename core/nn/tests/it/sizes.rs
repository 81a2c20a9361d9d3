//! Errors of constructors and forwards about unsupported sizes, shapes and dtypes.

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_core::nn::*;
use fulgurite_core::parameter::Init;
use fulgurite_test_message::assert_says;

use super::gradients::harness::{Params, builder};

/// A constructor, with valid sizes.
struct Constructor {
    name: &'static str,
    sizes: &'static [usize],
    build: fn(&ModuleBuilder, &[usize]) -> Result<()>,
}

fn conv2d(b: &ModuleBuilder, s: &[usize]) -> Result<Conv2d> {
    let config = Conv2dConfig {
        stride: [s[4], 1],
        padding: [0, 1],
        dilation: [1, s[5]],
        groups: s[6],
        bias: true,
    };
    Conv2d::new(b, s[0], s[1], [s[2], s[3]], config)
}

fn causal(b: &ModuleBuilder, s: &[usize]) -> Result<CausalSelfAttention> {
    let config = AttentionConfig {
        num_kv_heads: s[2],
        head_dim: s[3],
        qkv_bias: true,
        ..AttentionConfig::new(s[0], s[1])
    };
    CausalSelfAttention::new(b, &config)
}

fn multi_head(b: &ModuleBuilder, s: &[usize]) -> Result<MultiHeadAttention> {
    let config = MultiHeadAttentionConfig {
        num_kv_heads: s[2],
        context_size: s[3],
        ..MultiHeadAttentionConfig::new(s[0], s[1])
    };
    MultiHeadAttention::new(b, &config)
}

/// Every layer constructor that takes sizes.
const CONSTRUCTORS: [Constructor; 19] = [
    Constructor {
        name: "Linear::new",
        sizes: &[3, 2],
        build: |b, s| Linear::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "Linear::with_init",
        sizes: &[3, 2],
        build: |b, s| Linear::with_init(b, s[0], s[1], Init::ONES).map(drop),
    },
    Constructor {
        name: "Linear::with_bias",
        sizes: &[3, 2],
        build: |b, s| Linear::with_bias(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "Embedding::new",
        sizes: &[3, 2],
        build: |b, s| Embedding::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "Embedding::with_init",
        sizes: &[3, 2],
        build: |b, s| Embedding::with_init(b, s[0], s[1], Init::ONES).map(drop),
    },
    Constructor {
        name: "Conv1d::new",
        sizes: &[4, 2, 3, 1, 1, 2],
        build: |b, s| {
            let config = Conv1dConfig {
                stride: s[3],
                dilation: s[4],
                groups: s[5],
                ..Conv1dConfig::default()
            };
            Conv1d::new(b, s[0], s[1], s[2], config).map(drop)
        },
    },
    Constructor {
        name: "Conv2d::new",
        sizes: &[4, 2, 3, 2, 1, 1, 2],
        build: |b, s| conv2d(b, s).map(drop),
    },
    Constructor {
        name: "RmsNorm::new",
        sizes: &[3],
        build: |b, s| RmsNorm::new(b, s[0], 1e-5).map(drop),
    },
    Constructor {
        name: "LayerNorm::new",
        sizes: &[3],
        build: |b, s| LayerNorm::new(b, s[0], 1e-5).map(drop),
    },
    Constructor {
        name: "LayerNorm::without_bias",
        sizes: &[3],
        build: |b, s| LayerNorm::without_bias(b, s[0], 1e-5).map(drop),
    },
    Constructor {
        name: "BatchNorm::new",
        sizes: &[3],
        build: |b, s| BatchNorm::new(b, s[0]).map(drop),
    },
    Constructor {
        name: "GroupNorm::new",
        sizes: &[2, 4],
        build: |b, s| GroupNorm::new(b, s[0], s[1], 1e-5).map(drop),
    },
    Constructor {
        name: "Gru::new",
        sizes: &[3, 2],
        build: |b, s| Gru::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "Lstm::new",
        sizes: &[3, 2],
        build: |b, s| Lstm::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "SwiGluMlp::new",
        sizes: &[3, 4],
        build: |b, s| SwiGluMlp::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "SwiGluMlp::with_init",
        sizes: &[3, 4],
        build: |b, s| SwiGluMlp::with_init(b, s[0], s[1], Init::ONES).map(drop),
    },
    Constructor {
        name: "GeluMlp::new",
        sizes: &[3, 4],
        build: |b, s| GeluMlp::new(b, s[0], s[1]).map(drop),
    },
    Constructor {
        name: "CausalSelfAttention::new",
        sizes: &[6, 4, 2, 3],
        build: |b, s| causal(b, s).map(drop),
    },
    Constructor {
        name: "MultiHeadAttention::new",
        sizes: &[8, 4, 2, 5],
        build: |b, s| multi_head(b, s).map(drop),
    },
];

/// Sizes that can be counted but exceed any machine's memory fail later, when memory is allocated.
#[test]
fn zero_and_overflowing_sizes_name_the_layer() {
    for Constructor { name, sizes, build } in CONSTRUCTORS {
        let b = builder(DType::F32);
        build(&b.pp("right"), sizes).unwrap_or_else(|error| panic!("{name}: {error}"));
        for at in 0..sizes.len() {
            for wrong in [0, usize::MAX, usize::MAX - 1, usize::MAX / 2, 1 << 62] {
                let mut sizes = sizes.to_vec();
                sizes[at] = wrong;
                let what = format!("{name} of {sizes:?}");
                let result = build(&builder(DType::F32).pp("layer"), &sizes);
                match result {
                    // A large stride only makes the output small.
                    Ok(()) => assert!(name.starts_with("Conv") && wrong > 0 && at > 2, "{what}"),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(error.contains("`layer"), "{what}: {error}");
                        let size = format!("{wrong}");
                        assert!(error.contains(&size) || wrong > 0, "{what}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn unusable_numbers_are_refused() {
    let b = builder(DType::F32);
    let at = |name: &str| b.pp(name);
    for eps in [-1e-5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
        let config = BatchNormConfig { eps, ..BatchNormConfig::default() };
        for error in [
            RmsNorm::new(&at("layer"), 3, eps).unwrap_err(),
            LayerNorm::new(&at("layer"), 3, eps).unwrap_err(),
            LayerNorm::without_bias(&at("layer"), 3, eps).unwrap_err(),
            GroupNorm::new(&at("layer"), 1, 3, eps).unwrap_err(),
            BatchNorm::with(&at("layer"), 3, config).unwrap_err(),
        ] {
            assert!(error.to_string().starts_with("module `layer`: the norm's epsilon"), "{error}");
        }
        let x = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
        functional::rms_norm(&x, &x, eps).unwrap_err();
        functional::layer_norm(&x, &x, None, eps).unwrap_err();
    }
    for p in [-0.1, 1.0, 1.5, f64::NAN, f64::INFINITY] {
        let error = Dropout::new(&at("layer"), p).unwrap_err().to_string();
        assert!(error.starts_with("module `layer`: dropout probability"), "{error}");
        let config = BatchNormConfig { momentum: Some(p), ..BatchNormConfig::default() };
        assert!(p == 1.0 || BatchNorm::with(&at("layer"), 3, config).is_err());
    }
    for theta in [0.0, -1e4, f64::NAN, f64::INFINITY] {
        assert!(Rope::new(4, theta).is_err(), "{theta}");
    }
    for head_dim in [0, 3, usize::MAX] {
        assert!(Rope::new(head_dim, 1e4).is_err(), "{head_dim}");
    }
    let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu).unwrap();
    let rope = Rope::new(4, 1e4).unwrap();
    for offset in [usize::MAX, usize::MAX - 1, 1 << 60, 1 << 24] {
        assert!(rope.forward(&x, offset).is_err(), "{offset}");
    }
    rope.forward(&x, 70_000).unwrap();
    for padding in [usize::MAX, 1 << 63] {
        let config = Conv2dConfig { padding: [1, padding], ..Conv2dConfig::default() };
        assert!(Conv2d::new(&at("layer"), 1, 1, [3, 3], config).is_err(), "{padding}");
    }
    for lengths in [&[usize::MAX, 2][..], &[1 << 40], &[0], &[3, 0]] {
        assert!(Documents::of_lengths(&[lengths]).is_err(), "{lengths:?}");
    }
    let config = MultiHeadAttentionConfig {
        rope: Some(Rope::new(2, 1e4).unwrap()),
        ..MultiHeadAttentionConfig::new(8, 2)
    };
    assert_says!(
        MultiHeadAttention::new(&at("layer"), &config).unwrap_err(),
        "module `layer`: the rotary embedding … heads of 2 elements … heads of 4"
    );
    assert_says!(
        causal(&at("layer"), &[8, 3, 2, 4]).unwrap_err(),
        "module `layer`: 3 attention heads cannot share 2 key and value heads …"
    );
    assert_says!(
        multi_head(&at("layer"), &[8, 3, 3, 8]).unwrap_err(),
        "module `layer`: 3 heads do not divide a hidden size of 8"
    );
    assert_says!(
        conv2d(&at("layer"), &[0, 2, 3, 3, 1, 1, 1]).unwrap_err(),
        "module `layer`: input channels must be at least 1, got 0"
    );
    assert_says!(
        conv2d(&at("layer"), &[2, 2, 3, usize::MAX, 1, 3, 1]).unwrap_err(),
        "module `layer`: kernel [3, 18446744073709551615] … larger than can be counted"
    );
    assert_says!(
        Linear::new(&at("layer"), 1 << 40, 1 << 40).unwrap_err(),
        "parameter `layer.weight` … [1099511627776, 1099511627776] … no machine …"
    );
}

/// Every layer, with inputs of each number of dimensions, of sizes that do not fit, and empty.
#[test]
fn unfit_inputs_give_errors_or_empty_outputs() {
    type Build = fn(&ModuleBuilder) -> Result<Box<dyn Module>>;
    let layers: [Build; 13] = [
        |b| Ok(Box::new(Linear::with_bias(b, 5, 2)?)),
        |b| Ok(Box::new(RmsNorm::new(b, 5, 1e-5)?)),
        |b| Ok(Box::new(LayerNorm::new(b, 5, 1e-5)?)),
        |b| Ok(Box::new(BatchNorm::new(b, 5)?)),
        |b| Ok(Box::new(GroupNorm::new(b, 1, 5, 1e-5)?)),
        |b| Ok(Box::new(Conv1d::new(b, 5, 2, 3, Conv1dConfig::default())?)),
        |b| Ok(Box::new(Conv2d::new(b, 5, 2, [3, 3], Conv2dConfig::default())?)),
        |b| Ok(Box::new(SwiGluMlp::new(b, 5, 2)?)),
        |b| Ok(Box::new(GeluMlp::new(b, 5, 2)?)),
        |b| Ok(Box::new(causal(b, &[5, 2, 1, 2])?)),
        |b| Ok(Box::new(multi_head(b, &[5, 1, 1, 5])?)),
        |b| Ok(Box::new(Embedding::new(b, 5, 2)?)),
        |b| Ok(Box::new(Dropout::new(b, 0.5)?)),
    ];
    let shapes: [&[usize]; 18] = [
        &[],
        &[0],
        &[5],
        &[3],
        &[2, 5],
        &[5, 2],
        &[0, 5],
        &[5, 0],
        &[2, 3, 5],
        &[2, 5, 3],
        &[0, 3, 5],
        &[2, 0, 5],
        &[2, 5, 0],
        &[2, 5, 4, 4],
        &[0, 5, 4, 4],
        &[2, 5, 0, 4],
        &[2, 5, 1, 1],
        &[1, 1, 1, 1, 5],
    ];
    for (at, build) in layers.into_iter().enumerate() {
        let b = builder(DType::F32);
        let layer = build(&b.pp("layer")).unwrap();
        if at == 12 {
            b.parameter("other", [1], Init::ONES).unwrap();
        }
        let params = Params::new(&b);
        for shape in shapes {
            for dtype in [DType::F32, DType::U32, DType::I64, DType::U8] {
                let x = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
                let what = format!("layer {at}, {shape:?} in {dtype:?}");
                let scope = ForwardScope { training: true, ..ForwardScope::default() };
                let compute = || -> Result<()> {
                    let y = layer.forward(&x)?;
                    if y.track_op() {
                        y.sum_all()?.backward()?;
                    }
                    Ok(())
                };
                for result in [scope.run(compute), {
                    let _no_grad = no_grad();
                    compute()
                }] {
                    if let Err(error) = result {
                        let error = error.to_string();
                        assert!(error.starts_with("module `layer"), "{what}: {error}");
                    }
                }
                params.slots.iter().for_each(|p| drop(params.take(p)));
            }
        }
    }
}

/// No function panics, in forward or backward.
#[test]
fn functions_take_or_refuse_every_shape() {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let functions: [Function; 12] = [
        functional::softmax_last_dim,
        functional::silu,
        functional::gelu,
        functional::gelu_tanh,
        |x| functional::swiglu(x, x),
        |x| functional::add(x, x),
        |x| functional::rms_norm(x, &Tensor::ones(4, x.dtype(), x.device())?, 1e-5),
        |x| functional::layer_norm(x, &Tensor::ones(4, x.dtype(), x.device())?, None, 1e-5),
        |x| functional::rope(x, &Tensor::ones((3, 2), x.dtype(), x.device())?, &x.ones_like()?),
        |x| Rope::new(4, 1e4)?.forward(x, 0),
        |x| functional::attention(x, x, x, 0.5, true),
        |x| {
            let mask = Tensor::ones((2, 3), DType::U8, x.device())?;
            functional::masked_attention(x, x, x, 0.5, &mask)
        },
    ];
    let shapes: [&[usize]; 10] = [
        &[],
        &[0],
        &[4],
        &[2, 0],
        &[0, 4],
        &[2, 3, 4],
        &[2, 0, 4],
        &[2, 1, 3, 4],
        &[0, 1, 3, 4],
        &[2, 1, 0, 4],
    ];
    for f in functions {
        for shape in shapes {
            for dtype in [DType::F32, DType::BF16, DType::U32, DType::U8] {
                let x = Var::ones(shape, dtype, &Device::Cpu).unwrap();
                if let Ok(y) = f(&x)
                    && y.track_op()
                {
                    let _ = y.sum_all().and_then(|y| y.backward());
                }
            }
        }
    }
}
