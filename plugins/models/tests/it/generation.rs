//! Generation with the decoders of `fixtures/make_models.py`, against `fixtures/generation.json`.

use std::collections::BTreeMap;

use fulgurite::core::autograd::no_grad;
use fulgurite::core::nn::{KvCache, RowTokens, force_portable};
use fulgurite::prelude::*;
use fulgurite_models::{Answer, Decoder, End, Generation, Sampling};
use serde::Deserialize;

use crate::fixtures::{DECODERS, assert_same, fixture};
use crate::transformers::{Loaded, config, load};

/// The prompts of a model, and the ids that transformers generates.
#[derive(Deserialize)]
pub(crate) struct Recorded {
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) new: Vec<Vec<u32>>,
    penalised: Option<Vec<Vec<u32>>>,
}

pub(crate) fn recorded(name: &str) -> Recorded {
    let text = std::fs::read_to_string(fixture("generation.json")).unwrap();
    let mut all: BTreeMap<String, Recorded> = serde_json::from_str(&text).unwrap();
    all.remove(name).unwrap()
}

fn greedy() -> Generation {
    Generation { max_new_tokens: 8, ..Generation::default() }
}

fn ids(answers: &[Answer]) -> Vec<Vec<u32>> {
    answers.iter().map(|answer| answer.ids.clone()).collect()
}

#[test]
fn greedy_ids_equal_transformers() {
    for name in DECODERS {
        let Recorded { prompts, new, .. } = recorded(name);
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let answers = model.generate(&prompts, &greedy()).unwrap();
        assert_eq!(ids(&answers), new, "{name}");
        assert!(answers.iter().all(|answer| answer.end == End::Length));
        let _portable = force_portable();
        assert_eq!(ids(&model.generate(&prompts, &greedy()).unwrap()), new, "{name}, portable");
    }
}

#[test]
fn repetition_penalty_equals_transformers() {
    let Recorded { prompts, penalised, .. } = recorded("llama");
    let Loaded { fabric: _fabric, model, .. } = load("llama");
    let sampling = Sampling { repetition_penalty: 1.4, ..Sampling::default() };
    let answers = model.generate(&prompts, &Generation { sampling, ..greedy() }).unwrap();
    assert_eq!(ids(&answers), penalised.unwrap());
}

/// The logits of the last `count` tokens of each prompt, computed one by one after the others.
fn decoded(model: &Decoder, prompts: &[Vec<u32>], count: usize) -> Vec<Tensor> {
    let _no_grad = no_grad();
    let tensor = |ids: Vec<u32>| {
        let n = ids.len();
        Tensor::from_vec(ids, (1, n), &Device::Cpu).unwrap()
    };
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let mut cache = KvCache::new(&lengths).unwrap();
    let tokens: Vec<RowTokens> =
        (0..prompts.len()).map(|row| RowTokens { row, count: lengths[row] - count }).collect();
    let begun = prompts.iter().flat_map(|ids| &ids[..ids.len() - count]).copied().collect();
    cache.forward(&tokens, 0, || model.hidden(&tensor(begun))).unwrap();
    let mut logits = vec![Vec::new(); prompts.len()];
    for place in (1..=count).rev() {
        let tokens: Vec<RowTokens> =
            (0..prompts.len()).map(|row| RowTokens { row, count: 1 }).collect();
        let next = prompts.iter().map(|ids| ids[ids.len() - place]).collect();
        // A token of padding changes nothing.
        let ids = Tensor::cat(&[tensor(next), tensor(vec![0])], 1).unwrap();
        let found = cache.forward(&tokens, 1, || model.forward(&ids)).unwrap();
        for (row, logits) in logits.iter_mut().enumerate() {
            logits.push(found.narrow(1, row, 1).unwrap());
        }
    }
    logits.iter().map(|logits| Tensor::cat(logits, 1).unwrap()).collect()
}

#[test]
fn decoding_equals_whole_forward() {
    for name in DECODERS {
        let Recorded { prompts, new, .. } = recorded(name);
        let sequences: Vec<Vec<u32>> =
            prompts.iter().zip(new).map(|(a, b)| [&a[..], &b[..7]].concat()).collect();
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let found = decoded(&model, &sequences, 7);
        for (i, (ids, found)) in sequences.iter().zip(&found).enumerate() {
            let ids = Tensor::new(&ids[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let whole = model.forward(&ids).unwrap();
            let last = whole.narrow(1, whole.dim(1).unwrap() - 7, 7).unwrap();
            assert_same(&format!("{name}: {i}"), found, &last);
        }
        // The same bits without the other sequences.
        let alone = decoded(&model, &sequences[4..5], 7);
        let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(bits(&alone[0]), bits(&found[4]), "{name}");
    }
}

#[test]
fn sampled_tokens_do_not_depend_on_the_batch() {
    let Recorded { prompts, .. } = recorded("llama");
    let Loaded { fabric: _fabric, model, .. } = load("llama");
    let sampling = Sampling { temperature: 1.0, top_k: 30, top_p: 0.95, ..Sampling::default() };
    let generation = Generation { sampling, seed: 3, samples: 3, ..greedy() };
    let answers = model.generate(&prompts, &generation).unwrap();
    assert_eq!(answers.len(), 60);
    let places: Vec<(u64, usize)> = answers.iter().map(|a| (a.prompt, a.sample)).collect();
    assert_eq!(places[..5], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]);
    let few = model.generate(&prompts[..2], &generation).unwrap();
    assert_eq!(few, answers[..6]);
    let one = model.generate(&prompts, &Generation { samples: 1, ..generation.clone() }).unwrap();
    assert!(one.iter().zip(answers.iter().step_by(3)).all(|(one, three)| one == three));
    let different: std::collections::BTreeSet<_> = ids(&answers[..3]).into_iter().collect();
    assert_eq!(different.len(), 3, "samples differ");
    let other = model.generate(&prompts, &Generation { seed: 4, ..generation }).unwrap();
    assert_ne!(ids(&other), ids(&answers));
}

#[test]
fn end_token_ends_an_answer() {
    let Recorded { prompts, new, .. } = recorded("mistral");
    let Loaded { fabric: _fabric, model, .. } = load("mistral");
    let end = new[0][3];
    let generation = Generation { end_tokens: vec![end, 1000], ..greedy() };
    let answers = model.generate(&prompts, &generation).unwrap();
    let mut ended = 0;
    for (answer, new) in answers.iter().zip(&new) {
        let at = new.iter().position(|id| *id == end);
        let wanted = at.map_or(&new[..], |at| &new[..=at]);
        assert_eq!(answer.ids, wanted);
        assert_eq!(answer.end, if at.is_some() { End::EndToken } else { End::Length });
        ended += usize::from(at.is_some());
    }
    assert!((1..20).contains(&ended), "{ended}");
}

#[test]
fn cache_takes_the_bytes_of_its_formula() {
    for name in ["llama", "gpt2", "gemma3_text"] {
        let decoder = config(name).decoder().unwrap();
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let _no_grad = no_grad();
        let mut cache = KvCache::new(&[9, 4]).unwrap();
        let ids = Tensor::new(&[[5u32, 6, 7]], &Device::Cpu).unwrap();
        let tokens = [RowTokens { row: 1, count: 1 }, RowTokens { row: 0, count: 2 }];
        cache.forward(&tokens, 0, || model.hidden(&ids)).unwrap();
        assert_eq!(cache.bytes(), decoder.cache_bytes(13, 4, 1), "{name}");
        cache.free(0);
        assert_eq!(cache.bytes(), decoder.cache_bytes(4, 4, 1), "{name}");
    }
}

#[test]
fn unusable_prompts_are_refused() {
    let refusal = |name: &str, prompt: Vec<u32>, max_new_tokens| {
        let generation = Generation { max_new_tokens, ..Generation::default() };
        let Loaded { fabric: _fabric, model, .. } = load(name);
        let error = model.generate(&[vec![5], prompt.clone()], &generation).unwrap_err();
        let early = config(name).decoder().unwrap().check_prompt(&prompt, max_new_tokens);
        let early = early.unwrap_err().to_string();
        assert_eq!(error.to_string(), early.replacen("data: ", "data: prompt 1: ", 1));
        early
    };
    assert!(refusal("llama", vec![], 1).ends_with("a model continues at least one token"));
    assert!(refusal("llama", vec![5, 43], 1).contains("token 43 is not of the model"));
    let message = refusal("gpt2", vec![5; 30], 4);
    assert!(message.ends_with("or ask for at most 3 new tokens"), "{message}");
    let message = refusal("phi3", vec![5; 6], 4);
    assert!(message.ends_with("ask for at most 3 new tokens"), "{message}");
    let message = refusal("llama_dynamic", vec![5; 8], 2);
    assert!(message.ends_with("ask for at most 1 new token"), "{message}");
}

/// A row of `sampling.json`.
#[derive(Deserialize)]
struct Sampled {
    options: BTreeMap<String, f64>,
    logits: Vec<f32>,
    probabilities: Vec<f64>,
    before: Vec<u32>,
}

#[test]
fn sampling_probabilities_equal_transformers() {
    let text = std::fs::read_to_string(fixture("sampling.json")).unwrap();
    let rows: Vec<Sampled> = serde_json::from_str(&text).unwrap();
    for Sampled { options, logits, probabilities, before } in rows {
        let of = |key: &str, default: f64| options.get(key).copied().unwrap_or(default);
        let sampling = Sampling {
            temperature: of("temperature", 0.0),
            top_k: of("top_k", 0.0) as usize,
            top_p: of("top_p", 1.0),
            min_p: of("min_p", 0.0),
            repetition_penalty: of("repetition_penalty", 1.0),
        };
        let draws = 200_000;
        let mut found = vec![0.0; logits.len()];
        for i in 0..draws {
            let uniform = (f64::from(i) + 0.5) / f64::from(draws);
            let token = sampling.choose(&mut logits.clone(), &before, uniform);
            found[token as usize] += 1.0 / f64::from(draws);
        }
        for (token, (found, expected)) in found.iter().zip(&probabilities).enumerate() {
            assert!((found - expected).abs() < 2e-5, "{options:?}: {token}: {found}, {expected}");
        }
    }
}
