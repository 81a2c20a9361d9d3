//! A model of unmodified candle_nn layers, and its data.

use candle_core::{D, Device, Module as _, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Embedding, LayerNorm, Linear, VarBuilder};
use fulgurite_core::Result;
use fulgurite_core::module::{ModuleBuilder, Unit};
use fulgurite_core::nn::{Loss, cross_entropy};

/// In the style of candle's examples: built from a `VarBuilder`, forward by candle's trait.
struct Patches {
    convolution: Conv2d,
    norm: LayerNorm,
}

impl Patches {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let config = Conv2dConfig { stride: 2, ..Default::default() };
        Ok(Self {
            convolution: candle_nn::conv2d(1, 5, 2, config, vb.pp("convolution"))?,
            // Without a bias, candle_nn uses differentiable operations.
            norm: candle_nn::layer_norm_no_bias(5, 1e-5, vb.pp("norm"))?,
        })
    }
}

impl candle_core::Module for Patches {
    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.convolution.forward(images)?.flatten_from(2)?.mean(D::Minus1)?;
        self.norm.forward(&y)
    }
}

struct Mixer {
    table: Embedding,
    up: Linear,
    down: Linear,
}

impl Mixer {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self {
            table: candle_nn::embedding(4, 5, vb.pp("table"))?,
            up: candle_nn::linear(5, 7, vb.pp("up"))?,
            down: candle_nn::linear_no_bias(7, 5, vb.pp("down"))?,
        })
    }

    fn mix(&self, x: &Tensor, ids: &Tensor) -> candle_core::Result<Tensor> {
        let x = (x + self.table.forward(ids)?)?;
        &x + self.down.forward(&self.up.forward(&x)?.gelu()?)?
    }
}

/// Two units and a head, all from candle_nn.
pub struct Classifier {
    patches: Unit<Patches>,
    mixer: Unit<Mixer>,
    head: Linear,
}

impl Classifier {
    pub fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            patches: b.unit("patches", |b| Ok(Patches::new(b.var_builder())?))?,
            mixer: b.unit("mixer", |b| Ok(Mixer::new(b.var_builder())?))?,
            head: candle_nn::linear(5, 3, b.var_builder().pp("head"))?,
        })
    }

    pub fn loss(&self, images: &Tensor, labels: &Tensor) -> Result<Loss> {
        let x = self.patches.call(images, |patches, x| Ok(patches.forward(x)?))?;
        let ids = labels.clone();
        let x = self.mixer.call(&x, move |mixer, x| Ok(mixer.mix(x, &ids)?))?;
        cross_entropy(&self.head.forward(&x)?, labels)
    }
}

/// Shard `index` of `parts` of a step's global batch: images and their classes.
pub fn images(step: usize, index: usize, parts: usize) -> Result<(Tensor, Tensor)> {
    const BATCH: usize = 12;
    let samples = index * BATCH / parts..(index + 1) * BATCH / parts;
    let n = samples.len();
    let pixel = |s: usize, i: usize| ((s * 7 + i * (s % 3 + 1) + step) % 11) as f32 * 0.1;
    let images = samples.clone().flat_map(|s| (0..36).map(move |i| pixel(s, i))).collect();
    let images = Tensor::from_vec(images, (n, 1, 6, 6), &Device::Cpu)?;
    let labels: Vec<u32> = samples.map(|s| (s % 3) as u32).collect();
    Ok((images, Tensor::from_vec(labels, n, &Device::Cpu)?))
}
