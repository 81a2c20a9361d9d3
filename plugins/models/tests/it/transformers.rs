//! Logits, losses, gradients and trainings of the models against transformers.

use candle_core::IndexOp as _;
use fulgurite::core::checkpoint::{self, SafetensorsSource, TensorSource};
use fulgurite::core::shard::Region;
use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_models::{
    Architecture, Classifier, Decoder, Encoder, EncoderConfig, EncoderInput, MappedSource,
    MaskedLmHead, ModelConfig, WeightLayout,
};

use crate::fixtures::{DECODERS, ENCODERS, assert_same, fixture, tensors};

/// A fixture's model with its weights, on one device.
pub(crate) struct Loaded {
    pub(crate) fabric: Fabric,
    pub(crate) model: Decoder,
    layout: WeightLayout,
}

pub(crate) fn config(name: &str) -> ModelConfig {
    let mut config = ModelConfig::default();
    config.start_from(fixture(name));
    config
}

pub(crate) fn single() -> Fabric {
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    Fabric::single(strategy, 1).unwrap()
}

pub(crate) fn load(name: &str) -> Loaded {
    let description = config(name).describe().unwrap();
    let Architecture::Decoder(decoder) = &description.architecture else { panic!("a decoder") };
    let mut fabric = single();
    let model = fabric.setup_module(|b| Decoder::new(decoder, b)).unwrap();
    let source = checkpoint::open(fixture(name)).unwrap();
    let source = MappedSource::new(source, &description.weights).unwrap();
    checkpoint::load_into(&source, fabric.module_tree().unwrap(), true).unwrap();
    fabric.checkpoints().finish_load().unwrap();
    Loaded { fabric, model, layout: description.weights }
}

pub(crate) fn ids(tensor: &Tensor) -> Tensor {
    tensor.to_dtype(DType::U32).unwrap()
}

#[test]
fn decoders_match_transformers() {
    for name in DECODERS {
        let expected = tensors(name, "expected.safetensors");
        let Loaded { mut fabric, model, layout } = load(name);
        let inputs = ids(&expected["input_ids"]);
        let logits = model.forward(&inputs).unwrap();
        assert_same(&format!("{name}: logits"), &logits, &expected["logits"]);
        let loss = model.loss(&inputs, &expected["targets"]).unwrap();
        let mean = Tensor::new(loss.mean().unwrap(), &Device::Cpu).unwrap();
        assert_same(&format!("{name}: loss"), &mean, &expected["loss"]);

        assert_gradients(name, &mut fabric, &loss, &layout);
    }
}

/// Asserts that the gradients of all parameters equal the fixture's.
pub(crate) fn assert_gradients(
    name: &str,
    fabric: &mut Fabric,
    loss: &Loss,
    layout: &WeightLayout,
) {
    fabric.backward(loss).unwrap();
    let scale = fabric.step_totals(&[]).unwrap().grad_scale();
    // Gradients have the layout of the weights.
    let grads = SafetensorsSource::open(fixture(name).join("grads.safetensors")).unwrap();
    let grads = MappedSource::new(grads, layout).unwrap();
    let tree = fabric.module_tree().unwrap();
    let trained = || tree.parameters().iter().filter(|p| !p.fqn().starts_with("reference."));
    let mut found: Vec<&str> = trained().map(|p| p.fqn()).collect();
    found.sort_unstable();
    assert_eq!(found, grads.names(), "{name}");
    for parameter in trained() {
        let shape = parameter.global_shape();
        let whole = Region::full(shape);
        let wanted = grads.read(parameter.fqn(), &whole, DType::F32, &Device::Cpu).unwrap();
        let grad = parameter.local_grad().expect("a gradient").reshape(shape).unwrap();
        let grad = (grad * scale).unwrap();
        let wanted = wanted.reshape(shape).unwrap();
        assert_same(&format!("{name}: {}", parameter.fqn()), &grad, &wanted);
    }
}

/// An encoder with the head that a fixture has.
enum Head {
    Masked(Encoder, MaskedLmHead),
    Classes(Encoder, Classifier),
    Tokens(Encoder, Classifier),
}

impl Head {
    fn new(name: &str, config: &EncoderConfig, b: &ModuleBuilder) -> Result<Self> {
        let encoder = Encoder::new(config, b)?;
        if name.ends_with("masked") {
            let tokens = encoder.token_weight()?.clone();
            let head = MaskedLmHead::new(b, config, config.masked_lm.unwrap(), &tokens)?;
            Ok(Self::Masked(encoder, head))
        } else if name.ends_with("tokens") {
            let head = Classifier::new(b, config, config.token_classifier, 5)?;
            Ok(Self::Tokens(encoder, head))
        } else {
            Ok(Self::Classes(encoder, Classifier::new(b, config, config.classifier, 5)?))
        }
    }

    fn logits(&self, input: EncoderInput<'_>, mask: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Masked(encoder, head) => head.forward(&encoder.forward(input)?),
            Self::Classes(encoder, head) => head.classify(&encoder.forward(input)?, mask),
            Self::Tokens(encoder, head) => head.forward(&encoder.forward(input)?),
        }
    }
}

#[test]
fn encoders_match_transformers() {
    for name in ENCODERS {
        let expected = tensors(name, "expected.safetensors");
        let description = config(name).describe().unwrap();
        let Architecture::Encoder(encoder) = &description.architecture else { panic!("{name}") };
        let mut fabric = single();
        let model = fabric.setup_module(|b| Head::new(name, encoder, b)).unwrap();
        let source = checkpoint::open(fixture(name)).unwrap();
        let source = MappedSource::new(source, &description.weights).unwrap();
        checkpoint::load_into(&source, fabric.module_tree().unwrap(), true).unwrap();
        fabric.checkpoints().finish_load().unwrap();

        let [tokens, segments] = ["input_ids", "segments"].map(|key| expected.get(key).map(ids));
        let mask = expected.get("mask");
        let input = match &tokens {
            Some(ids) => EncoderInput::Text { ids, segments: segments.as_ref(), mask },
            None => EncoderInput::Pictures(&expected["pictures"]),
        };
        let logits = model.logits(input, mask).unwrap();
        // The logits of padding are not compared.
        let seen = |logits: &Tensor| match mask.filter(|_| logits.rank() == 3) {
            None => logits.clone(),
            Some(mask) => {
                let mask = mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
                logits.broadcast_mul(&mask).unwrap()
            }
        };
        let wanted = seen(&expected["logits"]);
        assert_same(&format!("{name}: logits"), &seen(&logits), &wanted);
        let loss = cross_entropy(&logits, &expected["targets"]).unwrap();
        let mean = Tensor::new(loss.mean().unwrap(), &Device::Cpu).unwrap();
        assert_same(&format!("{name}: loss"), &mean, &expected["loss"]);
        assert_gradients(name, &mut fabric, &loss, &description.weights);
    }
}

#[test]
fn ten_steps_match_transformers() {
    for name in DECODERS {
        let expected = tensors(name, "expected.safetensors");
        let Loaded { fabric, model, .. } = load(name);
        let adamw = AdamW {
            lr: 1e-3,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            ..AdamW::default()
        };
        let mut optimizer = fabric.setup_optimizer(&adamw).unwrap();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..10 {
            let batch = expected["train_ids"].i(step).unwrap();
            let inputs = ids(&batch.narrow(1, 0, 12).unwrap());
            let targets = batch.narrow(1, 1, 12).unwrap();
            let loss = model.loss(&inputs, &targets).unwrap();
            losses.push(loss.mean().unwrap());
            fabric.backward(&loss).unwrap();
            norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0).unwrap());
            optimizer.step().unwrap();
        }
        let found = Tensor::new(losses, &Device::Cpu).unwrap();
        assert_same(&format!("{name}: losses"), &found, &expected["losses"]);
        let found = Tensor::new(norms, &Device::Cpu).unwrap();
        assert_same(&format!("{name}: gradient norms"), &found, &expected["grad_norms"]);
    }
}

#[test]
fn weights_are_exported_as_they_came() {
    for name in DECODERS.into_iter().chain(ENCODERS) {
        let description = config(name).describe().unwrap();
        let file = || checkpoint::open(fixture(name)).unwrap();
        let mapped = MappedSource::new(file(), &description.weights).unwrap();
        let exported = fulgurite_models::ExportedSource::new(mapped, &description.weights).unwrap();
        let file = file();
        assert_eq!(exported.names(), file.names(), "{name}");
        for tensor in file.names() {
            let info = file.info(tensor).unwrap();
            assert_eq!(exported.info(tensor), Some(info.clone()), "{name}: {tensor}");
            let read = |source: &dyn TensorSource| {
                let whole = Region::full(&info.shape);
                let values = source.read(tensor, &whole, DType::F32, &Device::Cpu).unwrap();
                values.to_vec1::<f32>().unwrap()
            };
            assert_eq!(read(&exported), read(&*file), "{name}: {tensor}");
        }
    }
}
