//! Differentiable functions and layers: compared with the CPU, and gradients with output
//! differences.

use candle_core::{D, DType, Device, Tensor};
use fulgurite::core::module::{Module as _, ModuleBuilder};
use fulgurite::nn::layer_table::LAYERS;
use fulgurite::nn::{
    Activation, AttentionConfig, CausalSelfAttention, CrossEntropy, Documents, GatedMlp, LayerNorm,
    Linear, MlpConfig, QkNorm, QkNormScope, RmsNorm, Rope, RopeConfig, cross_entropy, functional,
    linear_cross_entropy, residual,
};
use fulgurite_error::Result;

use super::cases::{Case, Function, Of, compare, compare_in, mild};
use super::{cudnn, gradients};
use crate::findings::Findings;
use crate::target::Target;

/// Every case.
fn all_cases() -> Vec<Case> {
    [activation_cases(), norm_cases(), attention_cases(), loss_cases(), layer_cases()]
        .into_iter()
        .flatten()
        .collect()
}

pub(super) fn activations(target: &Target) -> Result<Findings> {
    compare(&activation_cases(), &target.device()?)
}

pub(super) fn norms(target: &Target) -> Result<Findings> {
    compare(&norm_cases(), &target.device()?)
}

pub(super) fn attention(target: &Target) -> Result<Findings> {
    compare(&attention_cases(), &target.device()?)
}

/// Attention in the dtypes and shapes that cuDNN supports. cuDNN must compute it, except for
/// gradients of heads with 256 elements: most GPUs have no kernel for them.
pub(super) fn attention_by_cudnn(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for case in cudnn_cases() {
        let before = cudnn::runs();
        let name = case.name;
        let found = compare_in(&[DType::BF16, DType::F16], &[case], &device)?;
        findings.wrong.extend(found.wrong);
        findings.figures.extend(found.figures);
        let [forward, backward] = [0, 1].map(|i| cudnn::runs()[i] - before[i]);
        findings.figure(format!("{name}: runs of forward"), forward as f64);
        findings.figure(format!("{name}: runs of backward"), backward as f64);
        findings.require(forward > 0, || format!("{name}: cuDNN has not computed the output"));
        findings.require(backward > 0 || name.contains("256"), || {
            format!("{name}: cuDNN has not computed the gradients")
        });
    }
    Ok(findings)
}

pub(super) fn losses(target: &Target) -> Result<Findings> {
    compare(&loss_cases(), &target.device()?)
}

pub(super) fn layers(target: &Target) -> Result<Findings> {
    compare(&layer_cases(), &target.device()?)
}

pub(super) fn gradients(target: &Target) -> Result<Findings> {
    gradients::check(&all_cases(), &target.device()?)
}

/// Joins two outputs into one.
fn joined((y, sum): (Tensor, Tensor)) -> Result<Tensor> {
    Ok(Tensor::cat(&[y, sum], D::Minus1)?)
}

/// Ids below `below`; `-100` at every seventh position if `ignore`.
fn ids(shape: &[usize], below: usize, ignore: bool, device: &Device) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let id = |i: usize| match ignore && i % 7 == 3 {
        true => -100,
        false => (i * 7919 % below) as i64,
    };
    Ok(Tensor::from_vec((0..n).map(id).collect::<Vec<_>>(), shape, device)?)
}

fn activation_cases() -> Vec<Case> {
    const ODD: &[&[usize]] = &[&[3, 7, 129]];
    vec![
        Case { name: "silu", inputs: ODD, of: Of::Function(|x| functional::silu(&x[0])) },
        Case { name: "gelu", inputs: ODD, of: Of::Function(|x| functional::gelu(&x[0])) },
        Case { name: "gelu_tanh", inputs: ODD, of: Of::Function(|x| functional::gelu_tanh(&x[0])) },
        Case {
            name: "swiglu",
            inputs: &[&[3, 7, 129], &[3, 7, 129]],
            of: Of::Function(|x| functional::swiglu(&x[0], &x[1])),
        },
        gated_mlp("GatedMlp with GELU", Of::Layer(|b| gated(b, Activation::Gelu))),
        gated_mlp("GatedMlp with GELU's tanh form", Of::Layer(|b| gated(b, Activation::GeluTanh))),
        gated_mlp("GatedMlp with ReLU", Of::Layer(|b| gated(b, Activation::Relu))),
    ]
}

fn gated_mlp(name: &'static str, of: Of) -> Case {
    Case { name, inputs: &[&[3, 7, 48]], of }
}

fn gated(b: &ModuleBuilder, activation: Activation) -> Result<Function> {
    let (hidden_size, intermediate_size) = (48, 67);
    let config = MlpConfig { hidden_size, intermediate_size, activation, bias: true, init: None };
    let mlp = GatedMlp::with_config(&b.pp("mlp"), &config)?;
    Ok(Box::new(move |x| mlp.forward(&x[0])))
}

fn norm_cases() -> Vec<Case> {
    vec![
        Case {
            name: "rms_norm",
            inputs: &[&[5, 67], &[67]],
            of: Of::Function(|x| functional::rms_norm(&x[0], &x[1], 1e-5)),
        },
        Case {
            name: "rms_norm of wide rows",
            inputs: &[&[2, 3, 2048], &[2048]],
            of: Of::Function(|x| functional::rms_norm(&x[0], &x[1], 1e-5)),
        },
        Case {
            name: "layer_norm",
            inputs: &[&[5, 67], &[67], &[67]],
            of: Of::Function(|x| functional::layer_norm(&x[0], &x[1], Some(&x[2]), 1e-5)),
        },
        Case {
            name: "layer_norm without bias",
            inputs: &[&[2, 3, 2048], &[2048]],
            of: Of::Function(|x| functional::layer_norm(&x[0], &x[1], None, 1e-5)),
        },
        Case {
            name: "RmsNorm with a residual, and the sum",
            inputs: &[&[9, 33], &[9, 33]],
            of: Of::Layer(|b| {
                let norm = RmsNorm::new(&b.pp("norm"), 33, 1e-5)?;
                Ok(Box::new(move |x| joined(norm.forward_residual(&x[0], &x[1])?)))
            }),
        },
        Case {
            name: "LayerNorm with a residual, and the sum",
            inputs: &[&[2, 3, 1030], &[2, 3, 1030]],
            of: Of::Layer(|b| {
                let norm = LayerNorm::new(&b.pp("norm"), 1030, 1e-5)?;
                Ok(Box::new(move |x| joined(norm.forward_residual(&x[0], &x[1])?)))
            }),
        },
    ]
}

fn attention_cases() -> Vec<Case> {
    fn angles(time: usize, half: usize, device: &Device, dtype: DType) -> Result<[Tensor; 2]> {
        let angle = |i: usize| (i / half) as f64 / 10f64.powf((i % half) as f64 / half as f64);
        let angles: Vec<f64> = (0..time * half).map(angle).collect();
        let angles = Tensor::from_vec(angles, (time, half), &Device::Cpu)?;
        let on_device = |t: Tensor| t.to_dtype(dtype)?.to_device(device);
        Ok([on_device(angles.cos()?)?, on_device(angles.sin()?)?])
    }
    vec![
        Case {
            name: "softmax",
            inputs: &[&[3, 5, 67]],
            of: Of::Function(|x| functional::softmax_last_dim(&x[0])),
        },
        Case {
            name: "rope",
            inputs: &[&[2, 3, 17, 24]],
            of: Of::Function(|x| {
                let [cos, sin] = angles(17, 12, x[0].device(), x[0].dtype())?;
                functional::rope(&x[0], &cos, &sin)
            }),
        },
        Case {
            name: "attention",
            inputs: &[&[2, 3, 37, 16], &[2, 3, 37, 16], &[2, 3, 37, 16]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.25, false)),
        },
        Case {
            name: "causal attention of groups",
            inputs: &[&[2, 6, 65, 32], &[2, 2, 65, 32], &[2, 2, 65, 32]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.2, true)),
        },
        Case {
            name: "causal attention to earlier keys",
            inputs: &[&[1, 4, 9, 8], &[1, 2, 21, 8], &[1, 2, 21, 8]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.3, true)),
        },
        Case {
            name: "causal attention of 700 positions",
            inputs: &[&[1, 2, 700, 64], &[1, 2, 700, 64], &[1, 2, 700, 64]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.125, true)),
        },
        Case {
            name: "causal attention of 128 elements to earlier keys, in groups",
            inputs: &[&[2, 6, 200, 128], &[2, 2, 333, 128], &[2, 2, 333, 128]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.09, true)),
        },
        Case {
            name: "attention of 40 elements",
            inputs: &[&[3, 4, 150, 40], &[3, 4, 131, 40], &[3, 4, 131, 40]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.16, false)),
        },
        Case {
            name: "attention of 256 elements, causal",
            inputs: &[&[1, 4, 150, 256], &[1, 2, 170, 256], &[1, 2, 170, 256]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.06, true)),
        },
        Case {
            name: "attention in a window",
            inputs: &[&[2, 4, 333, 64], &[2, 2, 400, 64], &[2, 2, 400, 64]],
            of: Of::Function(|x| {
                functional::sliding_window_attention(&x[0], &x[1], &x[2], 0.125, 100)
            }),
        },
        // In every dtype a length that tensor cores only take after copying single elements.
        Case {
            name: "causal attention of 7 elements",
            inputs: &[&[2, 4, 70, 7], &[2, 2, 70, 7], &[2, 2, 70, 7]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.3, true)),
        },
        // More scores than fit in memory at once, in the dtypes that materialise scores.
        Case {
            name: "causal attention of 4200 positions",
            inputs: &[&[1, 4, 4200, 8], &[1, 2, 4200, 8], &[1, 2, 4200, 8]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.3, true)),
        },
        Case {
            name: "masked attention",
            inputs: &[&[2, 2, 13, 8], &[2, 2, 13, 8], &[2, 2, 13, 8]],
            of: Of::Function(|x| {
                let mask: Vec<u8> = (0..26u8).map(|i| u8::from(i % 5 != 3)).collect();
                let mask = Tensor::from_vec(mask, (2, 13), x[0].device())?;
                functional::masked_attention(&x[0], &x[1], &x[2], 0.3, &mask)
            }),
        },
        Case {
            name: "CausalSelfAttention",
            inputs: &[&[2, 19, 48]],
            of: Of::Layer(|b| {
                let module = self_attention(b)?;
                Ok(Box::new(move |x| module.forward(&mild(&x[0])?)))
            }),
        },
        Case {
            name: "residual of RmsNorm and CausalSelfAttention",
            inputs: &[&[2, 19, 48]],
            of: Of::Layer(|b| {
                let (norm, branch) = (RmsNorm::new(&b.pp("norm"), 48, 1e-5)?, self_attention(b)?);
                Ok(Box::new(move |x| residual(&x[0], &norm, &branch)))
            }),
        },
        Case {
            name: "CausalSelfAttention within documents",
            inputs: &[&[2, 45, 48]],
            of: Of::Layer(|b| {
                let module = self_attention(b)?;
                let documents = Documents::of_lengths(&[&[3, 1, 40, 1][..], &[33, 12]])?;
                Ok(Box::new(move |x| documents.run(|| module.forward(&mild(&x[0])?))))
            }),
        },
        Case {
            name: "CausalSelfAttention with every option",
            inputs: &[&[2, 45, 48]],
            of: Of::Layer(|b| {
                let module = attention_with_options(b, true)?;
                let documents = Documents::of_lengths(&[&[3, 1, 40, 1][..], &[33, 12]])?;
                Ok(Box::new(move |x| documents.run(|| module.forward(&mild(&x[0])?))))
            }),
        },
        Case {
            name: "an encoder of 64 elements, bounded, in documents of 300 positions",
            inputs: &[&[2, 300, 128]],
            of: Of::Layer(|b| {
                let config = AttentionConfig {
                    causal: false,
                    softcap: Some(2.0),
                    window: Some(70),
                    ..AttentionConfig::new(128, 2)
                };
                let module = CausalSelfAttention::new(&b.pp("attention"), &config)?;
                let documents = Documents::of_lengths(&[&[3, 200, 97][..], &[300]])?;
                Ok(Box::new(move |x| documents.run(|| module.forward(&mild(&x[0])?))))
            }),
        },
        Case {
            name: "CausalSelfAttention of an encoder with every option",
            inputs: &[&[2, 45, 48]],
            of: Of::Layer(|b| {
                let module = attention_with_options(b, false)?;
                let documents = Documents::of_lengths(&[&[3, 1, 40, 1][..], &[33, 12]])?;
                Ok(Box::new(move |x| documents.run(|| module.forward(&mild(&x[0])?))))
            }),
        },
    ]
}

/// Each width, causal and not, with fewer key heads, with earlier keys, and with windows.
fn cudnn_cases() -> Vec<Case> {
    vec![
        Case {
            name: "causal attention of 64 elements",
            inputs: &[&[2, 2, 700, 64], &[2, 2, 700, 64], &[2, 2, 700, 64]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.125, true)),
        },
        Case {
            name: "attention of 64 elements without order, in groups",
            inputs: &[&[2, 6, 150, 64], &[2, 2, 331, 64], &[2, 2, 331, 64]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.125, false)),
        },
        Case {
            name: "causal attention of 128 elements to earlier keys, in groups",
            inputs: &[&[2, 6, 200, 128], &[2, 2, 333, 128], &[2, 2, 333, 128]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.09, true)),
        },
        Case {
            name: "causal attention of 128 elements",
            inputs: &[&[1, 4, 512, 128], &[1, 4, 512, 128], &[1, 4, 512, 128]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.09, true)),
        },
        Case {
            name: "causal attention of 256 elements, in groups",
            inputs: &[&[1, 4, 300, 256], &[1, 2, 300, 256], &[1, 2, 300, 256]],
            of: Of::Function(|x| functional::attention(&x[0], &x[1], &x[2], 0.06, true)),
        },
        Case {
            name: "attention in a window",
            inputs: &[&[2, 4, 400, 64], &[2, 2, 400, 64], &[2, 2, 400, 64]],
            of: Of::Function(|x| {
                functional::sliding_window_attention(&x[0], &x[1], &x[2], 0.125, 100)
            }),
        },
        Case {
            name: "attention in a window of earlier keys",
            inputs: &[&[2, 4, 333, 128], &[2, 2, 400, 128], &[2, 2, 400, 128]],
            of: Of::Function(|x| {
                functional::sliding_window_attention(&x[0], &x[1], &x[2], 0.09, 100)
            }),
        },
    ]
}

fn self_attention(b: &ModuleBuilder) -> Result<CausalSelfAttention> {
    let config = AttentionConfig {
        num_kv_heads: 2,
        head_dim: 8,
        qkv_bias: true,
        rope: Some(Rope::new(8, 10_000.0)?),
        ..AttentionConfig::new(48, 6)
    };
    CausalSelfAttention::new(&b.pp("attention"), &config)
}

fn attention_with_options(b: &ModuleBuilder, causal: bool) -> Result<CausalSelfAttention> {
    let rope = RopeConfig { rotary_dim: 4, ..RopeConfig::new(8, 10_000.0) };
    let config = AttentionConfig {
        num_kv_heads: 2,
        head_dim: 8,
        causal,
        output_bias: true,
        rope: Some(Rope::with_config(&rope)?),
        scale: Some(0.5),
        softcap: Some(2.0),
        qk_norm: Some(QkNorm { eps: 1e-3, scope: QkNormScope::Head, unit_offset: true }),
        window: Some(7),
        ..AttentionConfig::new(48, 6)
    };
    CausalSelfAttention::new(&b.pp("attention"), &config)
}

fn loss_cases() -> Vec<Case> {
    vec![
        Case {
            name: "cross entropy",
            inputs: &[&[23, 1031]],
            of: Of::Function(|x| {
                let targets = ids(&[23], 1031, true, x[0].device())?;
                Ok(cross_entropy(&x[0], &targets)?.sum().clone())
            }),
        },
        Case {
            name: "cross entropy, smoothed",
            inputs: &[&[2, 9, 50]],
            of: Of::Function(|x| {
                let targets = ids(&[2, 9], 50, true, x[0].device())?;
                let loss = CrossEntropy::default().label_smoothing(0.1).loss(&x[0], &targets)?;
                Ok(loss.sum().clone())
            }),
        },
        Case {
            name: "linear cross entropy",
            inputs: &[&[2, 33, 24]],
            of: Of::Layer(|b| {
                let head = Linear::new(&b.pp("head"), 24, 307)?;
                Ok(Box::new(move |x| {
                    let targets = ids(&[2, 33], 307, true, x[0].device())?;
                    Ok(linear_cross_entropy(&head, &x[0], &targets)?.sum().clone())
                }))
            }),
        },
    ]
}

/// Every layer of the table, and a layer that is called twice.
fn layer_cases() -> Vec<Case> {
    let twice = Case {
        name: "Linear, called twice",
        inputs: &[&[3, 17, 24]],
        of: Of::Layer(|b| {
            let linear = Linear::new(&b.pp("linear"), 24, 40)?;
            // The second gradient is added to the first.
            Ok(Box::new(move |x| Ok((linear.forward(&x[0])? + linear.forward(&(&x[0] * 2.0)?)?)?)))
        }),
    };
    LAYERS.iter().map(Case::of_row).chain([twice]).collect()
}
