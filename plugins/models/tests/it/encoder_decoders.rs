//! Encoder-decoders against transformers.

use candle_core::IndexOp as _;
use fulgurite::core::checkpoint::{self, TensorSource};
use fulgurite::core::nn::force_portable;
use fulgurite::core::shard::Region;
use fulgurite::prelude::*;
use fulgurite_models::{
    Answer, Architecture, BeamSearch, EncoderDecoder, ExportedSource, Generation, MappedSource,
    Sampling, SourceTexts, WeightLayout,
};

use crate::fixtures::{SEQ2SEQ, assert_same, fixture, tensors};
use crate::transformers::{assert_gradients, config, ids, single};

struct Loaded {
    fabric: Fabric,
    model: EncoderDecoder,
    layout: WeightLayout,
}

fn load(name: &str) -> Loaded {
    let description = config(name).describe().unwrap();
    let Architecture::EncoderDecoder(own) = &description.architecture else { panic!("{name}") };
    // Modules find out by the weights that the head is its own.
    let own = fulgurite_models::EncoderDecoderConfig { tied: name != "t5_gated", ..*own.clone() };
    let mut fabric = single();
    let model = fabric.setup_module(|b| EncoderDecoder::new(&own, b)).unwrap();
    let source = checkpoint::open(fixture(name)).unwrap();
    let source = MappedSource::new(source, &description.weights).unwrap();
    checkpoint::load_into(&source, fabric.module_tree().unwrap(), true).unwrap();
    fabric.checkpoints().finish_load().unwrap();
    Loaded { fabric, model, layout: description.weights }
}

#[test]
fn losses_and_gradients_equal_transformers() {
    for name in SEQ2SEQ {
        let expected = tensors(name, "expected.safetensors");
        let Loaded { mut fabric, model, layout } = load(name);
        let inputs = ids(&expected["input_ids"]);
        let mask = expected["mask"].to_dtype(DType::U8).unwrap();
        let source = SourceTexts { ids: &inputs, mask: Some(&mask) };
        let targets = &expected["targets"];
        let logits = model.forward(source, targets).unwrap();
        assert_same(&format!("{name}: logits"), &logits, &expected["logits"]);
        let (evaluated, _) = model.evaluate(source, targets).unwrap();
        let loss = model.loss(source, targets).unwrap();
        assert_eq!(evaluated.mean().unwrap(), loss.mean().unwrap(), "{name}");
        let mean = Tensor::new(loss.mean().unwrap(), &Device::Cpu).unwrap();
        assert_same(&format!("{name}: loss"), &mean, &expected["loss"]);
        assert_gradients(name, &mut fabric, &loss, &layout);
    }
}

#[test]
fn steps_of_encoder_decoders_match() {
    for name in SEQ2SEQ {
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
        let mask = expected["mask"].to_dtype(DType::U8).unwrap();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..10 {
            let inputs = ids(&expected["train_ids"].i(step).unwrap());
            let targets = expected["train_targets"].i(step).unwrap();
            let source = SourceTexts { ids: &inputs, mask: Some(&mask) };
            let loss = model.loss(source, &targets).unwrap();
            losses.push(loss.mean().unwrap());
            fabric.backward(&loss).unwrap();
            norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0).unwrap());
            optimizer.step().unwrap();
        }
        for (key, found) in [("losses", losses), ("grad_norms", norms)] {
            let found = Tensor::new(found, &Device::Cpu).unwrap();
            assert_same(&format!("{name}: {key}"), &found, &expected[key]);
        }
    }
}

#[test]
fn written_texts_equal_transformers() {
    for name in SEQ2SEQ {
        let expected = tensors(name, "expected.safetensors");
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let inputs = ids(&expected["input_ids"]);
        let mask = expected["mask"].to_dtype(DType::U8).unwrap();
        let source = SourceTexts { ids: &inputs, mask: Some(&mask) };
        let written = |generation: &Generation| -> Vec<Vec<u32>> {
            let ids = |answer: Answer| answer.ids;
            let greedy = BeamSearch::default();
            model.generate(source, generation, &greedy).unwrap().into_iter().map(ids).collect()
        };
        for (key, repetition_penalty) in [("written", 1.0), ("penalised", 1.7)] {
            let sampling = Sampling { repetition_penalty, ..Sampling::default() };
            let all = Generation { max_new_tokens: 14, sampling, ..Generation::default() };
            let wanted: Vec<Vec<u32>> = ids(&expected[key]).to_vec2().unwrap();
            assert_eq!(written(&all), wanted, "{name}: {key}");
            let portable = force_portable();
            assert_eq!(written(&all), wanted, "{name}: {key}, portable");
            drop(portable);
            // A text that ends leaves the other one as it is.
            let end = wanted[0][2];
            let some = written(&Generation { end_tokens: vec![end], ..all });
            for (some, wanted) in some.iter().zip(&wanted) {
                let until = wanted.iter().position(|id| *id == end).map_or(14, |at| at + 1);
                assert_eq!(some, &wanted[..until], "{name}: {key}");
            }
        }
    }
}

#[test]
fn beams_equal_those_of_transformers() {
    for name in SEQ2SEQ {
        let expected = tensors(name, "expected.safetensors");
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let inputs = ids(&expected["input_ids"]);
        let mask = expected["mask"].to_dtype(DType::U8).unwrap();
        let source = SourceTexts { ids: &inputs, mask: Some(&mask) };
        let end = expected["end"].to_scalar::<i64>().unwrap() as u32;
        for (key, num_beams, length_penalty, repetition_penalty) in
            [("beams", 3, 1.0, 1.0), ("long", 4, 2.5, 1.3)]
        {
            let generation = Generation {
                max_new_tokens: 14,
                end_tokens: vec![end],
                sampling: Sampling { repetition_penalty, ..Sampling::default() },
                ..Generation::default()
            };
            let search = BeamSearch { num_beams, length_penalty };
            let found = model.generate(source, &generation, &search).unwrap();
            let wanted: Vec<Vec<i64>> = expected[key].to_vec2().unwrap();
            for (found, wanted) in found.iter().zip(wanted) {
                // Behind its end a text is padded.
                let length = wanted.iter().position(|id| *id == i64::from(end));
                let length = length.map_or(wanted.len(), |at| at + 1);
                let wanted: Vec<u32> = wanted[..length].iter().map(|id| *id as u32).collect();
                assert_eq!(found.ids, wanted, "{name}: {key}");
            }
        }
    }
}

#[test]
fn beam_searches_refuse_samples() {
    let Loaded { fabric: _fabric, model, .. } = load("t5");
    let inputs = Tensor::new(&[[5u32, 6]], &Device::Cpu).unwrap();
    let source = SourceTexts { ids: &inputs, mask: None };
    let refused = |generation: Generation, num_beams| {
        let search = BeamSearch { num_beams, ..BeamSearch::default() };
        model.generate(source, &generation, &search).unwrap_err().to_string()
    };
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let sampled = Generation { sampling, ..Generation::default() };
    assert!(refused(sampled, 2).contains("`num_beams`"));
    assert!(refused(Generation::default(), 0).contains("`num_beams`"));
    assert!(refused(Generation { samples: 2, ..Generation::default() }, 2).contains("`num_beams`"));
    // Without beams texts are sampled, and the same ones again.
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let sampled = Generation { samples: 3, sampling, seed: 5, ..Generation::default() };
    let write = || model.generate(source, &sampled, &BeamSearch::default()).unwrap();
    let (first, again) = (write(), write());
    assert_eq!(first, again);
    assert_eq!(first.iter().map(|answer| answer.sample).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(first[0].ids != first[1].ids || first[1].ids != first[2].ids);
}

#[test]
fn weights_of_encoder_decoders_come_back() {
    for name in SEQ2SEQ {
        let description = config(name).describe().unwrap();
        let file = || checkpoint::open(fixture(name)).unwrap();
        let mapped = MappedSource::new(file(), &description.weights).unwrap();
        let exported = ExportedSource::new(mapped, &description.weights).unwrap();
        let file = file();
        assert_eq!(exported.names(), file.names(), "{name}");
        for tensor in file.names() {
            let whole = Region::full(&file.info(tensor).unwrap().shape);
            let read = |source: &dyn TensorSource| {
                let values = source.read(tensor, &whole, DType::F32, &Device::Cpu).unwrap();
                values.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            assert_eq!(read(&exported), read(&*file), "{name}: {tensor}");
        }
    }
}
