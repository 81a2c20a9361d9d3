//! Modules on the classifiers of `fixtures/make_models.py`.

use fulgurite::core::checkpoint;
use fulgurite::core::nn::Documents;
use fulgurite::core::shard::Region;
use fulgurite::core::trainer::LightningModule;
use fulgurite::prelude::*;
use fulgurite_data::{Labels, PaddedTexts, PreferenceBatch, RewardBatch, TextBatch, UnpairedBatch};
#[cfg(feature = "images")]
use fulgurite_models::ImageClassification;
use fulgurite_models::{
    CausalLm, Embedding, Export, Grpo, Kto, MaskedLm, ModelConfig, Preference, Reward,
    SampledAnswer, SequenceClassification, TokenClassification,
};

use serde_json::json;

use crate::fixtures::{DECODERS, assert_same, fixture, tensors};
use crate::transformers::{assert_gradients, config, ids, single};

/// The module with a fixture's weights, as a run starts from them.
fn load<M: LightningModule<Config = ModelConfig>>(
    config: &ModelConfig,
    name: &str,
) -> Result<(Fabric, M)> {
    let mut fabric = single();
    let module = fabric.setup_module(|b| M::configure_model(config, b))?;
    let source = M::map_weights(config, checkpoint::open(fixture(name))?)?;
    let options = checkpoint::LoadOptions {
        optional: M::new_parameters(config),
        ..checkpoint::LoadOptions::default()
    };
    checkpoint::load_into(&*source, fabric.module_tree()?, options)?;
    fabric.checkpoints().finish_load()?;
    Ok((fabric, module))
}

/// The texts of a fixture.
pub(crate) fn texts(name: &str) -> PaddedTexts {
    let expected = tensors(name, "expected.safetensors");
    let ids = ids(&expected["input_ids"]);
    let mask = expected["mask"].to_dtype(DType::U8).unwrap();
    let segments = match expected.get("segments") {
        Some(segments) => crate::transformers::ids(segments),
        None => ids.zeros_like().unwrap(),
    };
    let lengths = mask.to_dtype(DType::U32).unwrap().sum(1).unwrap().to_vec1::<u32>().unwrap();
    let lengths = lengths.into_iter().map(|length| length as usize).collect();
    PaddedTexts { ids, segments, mask, lengths }
}

fn batch(name: &str, labels: Labels) -> TextBatch {
    TextBatch { texts: texts(name), others: Vec::new(), labels, longest: 12 }
}

fn classes(name: &str) -> Labels {
    let targets = tensors(name, "expected.safetensors").remove("targets").unwrap();
    Labels::Classes(targets.flatten_all().unwrap().to_vec1().unwrap())
}

fn assert_mean(name: &str, loss: &Loss, expected: &Tensor) {
    assert_same(name, &Tensor::new(loss.mean().unwrap(), &Device::Cpu).unwrap(), expected);
}

#[test]
fn encoders_classify_as_in_transformers() {
    for name in ["bert_classes", "roberta_classes", "modernbert_classes"] {
        let expected = tensors(name, "expected.safetensors");
        let (mut fabric, module) = load::<SequenceClassification>(&config(name), name).unwrap();
        let logits = module.forward(&texts(name)).unwrap();
        assert_same(name, &logits, &expected["logits"]);
        let loss = module.loss(&batch(name, classes(name))).unwrap();
        assert_mean(name, &loss, &expected["loss"]);
        let layout = config(name).describe().unwrap().weights;
        assert_gradients(name, &mut fabric, &loss, &layout);
    }
}

#[test]
fn decoders_classify_as_in_transformers() {
    for name in ["llama_classes", "gpt2_classes"] {
        let expected = tensors(name, "expected.safetensors");
        let rows = |key: &str| expected[key].to_vec2::<f32>().unwrap();
        let sets = rows("sets")
            .into_iter()
            .map(|row| (0..5).filter(|class| row[*class as usize] > 0.5).collect::<Vec<u32>>());
        let problems = [
            ("multi_label_classification", Labels::Sets(sets.collect())),
            ("multi_label_classification", Labels::Numbers(rows("sets"))),
            ("regression", Labels::Numbers(rows("numbers"))),
            ("single_label_classification", classes(name)),
        ];
        for (problem, labels) in problems {
            let mut config = config(name);
            config.set("problem_type", problem).unwrap();
            let (mut fabric, module) = load::<SequenceClassification>(&config, name).unwrap();
            let logits = module.forward(&texts(name)).unwrap();
            assert_same(name, &logits, &expected["logits"]);
            let loss = module.loss(&batch(name, labels)).unwrap();
            assert_mean(&format!("{name}: {problem}"), &loss, &expected[problem]);
            if problem == "single_label_classification" {
                let layout = crate::transformers::config(name).describe().unwrap().weights;
                assert_gradients(name, &mut fabric, &loss, &layout);
            }
        }
    }
}

#[test]
fn words_are_tagged_as_in_transformers() {
    for (name, head) in [
        ("bert_tokens", None),
        ("modernbert_tokens", None),
        ("roberta_tokens", Some("classifier.out_proj.*")),
        ("gpt2_tokens", Some("score.*")),
        ("gpt_neox_tokens", Some("score.*")),
    ] {
        let expected = tensors(name, "expected.safetensors");
        let mut config = config(name);
        let (mut fabric, module) = load::<TokenClassification>(&config, name).unwrap();
        let loss = module.loss(&batch(name, classes(name))).unwrap();
        assert_mean(name, &loss, &expected["loss"]);
        let layout = config.describe().unwrap().weights;
        let layout = match head {
            Some(head) => layout.rename(head, "classifier.*"),
            None => layout,
        };
        assert_gradients(name, &mut fabric, &loss, &layout);

        let file = || checkpoint::open(fixture(name)).unwrap();
        let source = TokenClassification::map_weights(&config, file()).unwrap();
        let run = json!({ "module": "token_classification", "model": config, "data": {} });
        let export = Export::of_run(&run).unwrap().unwrap();
        assert_eq!(export.layout.view(&*source).unwrap().names(), file().names(), "{name}");
    }
}

/// A head of another task in the file is left out, and a new one starts from its initial values.
#[test]
fn heads_come_and_go() {
    let mut five = config("bert_masked");
    five.set("num_labels", 5).unwrap();
    load::<SequenceClassification>(&five, "bert_masked").unwrap();
    load::<TokenClassification>(&five, "bert_masked").unwrap();
    load::<Embedding>(&config("bert_masked"), "bert_masked").unwrap();
    load::<Embedding>(&config("llama"), "llama").unwrap();
    let mut five = config("modernbert_masked");
    five.set("num_labels", 5).unwrap();
    load::<SequenceClassification>(&five, "modernbert_masked").unwrap();
    let mut five = config("llama");
    five.set("num_labels", 5).unwrap();
    load::<SequenceClassification>(&five, "llama").unwrap();
    load::<TokenClassification>(&five, "llama").unwrap();
    let mut masked = config("roberta_classes");
    masked.set("mask_token_id", 3).unwrap();
    load::<MaskedLm>(&masked, "roberta_classes").unwrap();
    let mut other = config("bert_classes");
    other.set("num_labels", 3).unwrap();
    let error = load::<SequenceClassification>(&other, "bert_classes").err().unwrap().to_string();
    assert!(error.contains("classifier.out_proj.weight"), "{error}");
}

/// The pairs of the fixture `llama_preference`.
fn pairs(reference: bool) -> PreferenceBatch {
    let expected = tensors("llama_preference", "expected.safetensors");
    // In the file the rejected sequences are behind the chosen ones.
    let order = Tensor::new(&[0u32, 3, 1, 4, 2, 5], &Device::Cpu).unwrap();
    let inputs = expected["inputs"].index_select(&order, 0).unwrap();
    let targets = expected["targets"].index_select(&order, 0).unwrap();
    let rows = targets.to_vec2::<i64>().unwrap();
    let count = |row: &Vec<i64>| row.iter().filter(|target| **target >= 0).count();
    let logps = expected["reference"].to_vec1::<f32>().unwrap();
    PreferenceBatch {
        inputs: ids(&inputs),
        answer_tokens: rows.iter().map(count).collect(),
        targets,
        reference: reference.then(|| (0..3).map(|pair| [logps[pair], logps[pair + 3]]).collect()),
        keys: vec![[1, 2], [3, 4], [5, 6]],
    }
}

#[test]
fn preferences_cost_as_in_torch() {
    let name = "llama_preference";
    let expected = tensors(name, "expected.safetensors");
    for (key, loss, other) in [
        ("dpo", "dpo", None),
        ("smoothed", "dpo", Some(("label_smoothing", 0.1))),
        ("hinge", "hinge", None),
        ("ipo", "ipo", None),
        ("with_nll", "dpo", Some(("nll_weight", 0.5))),
        ("orpo", "orpo", None),
    ] {
        let mut config = config("llama");
        config.set("preference_loss", loss).unwrap();
        config.set("beta", 0.3).unwrap();
        if loss != "orpo" {
            config.set("reference", "data").unwrap();
        }
        if let Some((key, value)) = other {
            config.set(key, value).unwrap();
        }
        let (mut fabric, module) = load::<Preference>(&config, "llama").unwrap();
        let loss = module.loss(&pairs(true)).unwrap();
        assert_mean(key, &loss, &expected[key]);
        if key == "dpo" {
            let layout = crate::transformers::config("llama").describe().unwrap().weights;
            assert_gradients(name, &mut fabric, &loss, &layout);
        }
    }
}

#[test]
fn rewards_cost_as_in_trl() {
    for name in ["llama_reward", "bert_reward"] {
        let expected = tensors(name, "expected.safetensors");
        // In the file the rejected texts are behind the chosen ones.
        let order = Tensor::new(&[0u32, 3, 1, 4, 2, 5], &Device::Cpu).unwrap();
        let rows = |key: &str| expected[key].index_select(&order, 0).unwrap();
        let mask = rows("mask").to_dtype(DType::U8).unwrap();
        let lengths = mask.to_dtype(DType::U32).unwrap().sum(1).unwrap().to_vec1::<u32>().unwrap();
        let ids = ids(&rows("input_ids"));
        let texts = PaddedTexts {
            segments: ids.zeros_like().unwrap(),
            ids,
            mask,
            lengths: lengths.into_iter().map(|length| length as usize).collect(),
        };
        let margins = expected["margin"].to_vec1::<f32>().unwrap();
        let loss = |centre: f64, margins: &[f32]| {
            let mut config = config(name);
            config.set("center_rewards_coefficient", centre).unwrap();
            let (fabric, module) = load::<Reward>(&config, name).unwrap();
            let scores = module.forward(&texts).unwrap();
            assert_same(name, &scores, &rows("logits").flatten_all().unwrap());
            let batch =
                RewardBatch { texts: texts.clone(), margins: margins.to_vec(), is_paired: true };
            (fabric, module.loss(&batch).unwrap())
        };
        assert_mean("plain", &loss(0.0, &[0.0; 3]).1, &expected["plain"]);
        assert_mean("with margins", &loss(0.0, &margins).1, &expected["with_margin"]);
        let (mut fabric, centred) = loss(0.1, &margins);
        assert_mean("centred", &centred, &expected["centred"]);
        let layout = config(name).describe().unwrap().weights;
        assert_gradients(name, &mut fabric, &centred, &layout);
    }
}

/// The module with the weights of `llama`, and a reference with 1.1 of each weight.
fn load_with_reference<M: LightningModule<Config = ModelConfig>>(
    config: &ModelConfig,
) -> (Fabric, M) {
    let mut fabric = single();
    let module = fabric.setup_module(|b| M::configure_model(config, b)).unwrap();
    let source = M::map_weights(config, checkpoint::open(fixture("llama")).unwrap()).unwrap();
    let mut weights = Vec::new();
    for name in source.names() {
        let shape = source.info(name).unwrap().shape;
        let whole = source.read(name, &Region::full(&shape), DType::F32, &Device::Cpu).unwrap();
        let whole = whole.reshape(shape).unwrap();
        weights.push((format!("reference.{name}"), (&whole * 1.1).unwrap()));
        weights.push((name.to_owned(), whole));
    }
    let source = checkpoint::TensorMap::new(weights);
    checkpoint::load_into(&source, fabric.module_tree().unwrap(), true).unwrap();
    fabric.checkpoints().finish_load().unwrap();
    (fabric, module)
}

#[test]
fn kto_costs_as_in_torch() {
    let expected = tensors("llama_kto", "expected.safetensors");
    let label = expected["label"].to_vec1::<u8>().unwrap();
    let batch = UnpairedBatch {
        inputs: ids(&expected["own_inputs"]),
        targets: expected["own_targets"].clone(),
        is_desirable: label.iter().map(|label| *label == 1).collect(),
        mismatched_inputs: ids(&expected["mismatched_inputs"]),
        mismatched_targets: expected["mismatched_targets"].clone(),
        reference: None,
        keys: Vec::new(),
    };
    let mut config = config("llama");
    for (key, value) in [("beta", 0.3), ("desirable_weight", 1.5), ("undesirable_weight", 0.5)] {
        config.set(key, value).unwrap();
    }
    let (mut fabric, module) = load_with_reference::<Kto>(&config);
    let loss = module.loss(&batch).unwrap();
    assert_mean("kto", &loss, &expected["loss"]);
    let layout = crate::transformers::config("llama").describe().unwrap().weights;
    assert_gradients("llama_kto", &mut fabric, &loss, &layout);
    // Mismatched answers that the policy finds less likely than the reference do not count.
    let swapped = UnpairedBatch {
        mismatched_inputs: ids(&expected["negative_inputs"]),
        mismatched_targets: expected["negative_targets"].clone(),
        ..batch
    };
    assert_mean("clamped", &module.loss(&swapped).unwrap(), &expected["clamped"]);
}

#[test]
fn rewarded_answers_cost_as_in_trl() {
    let expected = tensors("llama_grpo", "expected.safetensors");
    let rows = |name: &str| ids(&expected[name]).to_vec2::<u32>().unwrap();
    let (prompts, answers) = (rows("prompt_ids"), rows("completion_ids"));
    let lengths = expected["lengths"].to_vec2::<i64>().unwrap();
    let sampled = expected["sampled"].to_vec2::<f32>().unwrap();
    let advantages = expected["advantages"].to_vec1::<f32>().unwrap();
    let answer = |i: usize| {
        let [prompt, ids] = [lengths[i][0] as usize, lengths[i][1] as usize];
        SampledAnswer {
            prompt: prompts[i][..prompt].to_vec(),
            ids: answers[i][..ids].to_vec(),
            log_probabilities: sampled[i][..ids].to_vec(),
            advantage: f64::from(advantages[i]),
            is_truncated: ids == 8,
        }
    };
    let batch: Vec<SampledAnswer> = (0..lengths.len()).map(answer).collect();
    let with = |loss: &str, beta: f64, keys: &serde_json::Value| {
        let mut config = config("llama");
        let mut grpo = json!({
            "rewards": ["answer"], "loss": loss, "beta": beta, "temperature": 0.8, "epsilon": 0.2,
            "epsilon_high": 0.3, "max_new_tokens": 8,
        });
        grpo.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config.set("grpo", grpo).unwrap();
        config
    };
    let config = |loss: &str, beta: f64| with(loss, beta, &json!({}));
    for name in ["dapo", "grpo", "dr_grpo"] {
        let (_fabric, module) = load::<Grpo>(&config(name, 0.0), "llama").unwrap();
        assert_mean(name, &module.loss(&batch).unwrap(), &expected[name]);
    }
    for (name, loss, keys) in [
        ("cispo", "cispo", json!({ "epsilon_high": 1.1 })),
        ("sequence", "grpo", json!({ "importance_sampling_level": "sequence" })),
        ("sequence_dapo", "dapo", json!({ "importance_sampling_level": "sequence" })),
        ("delta", "dapo", json!({ "delta": 1.35 })),
    ] {
        let (fabric, module) = load::<Grpo>(&with(loss, 0.0, &keys), "llama").unwrap();
        let loss = module.loss(&batch).unwrap();
        assert_mean(name, &loss, &expected[name]);
        fabric.backward(&loss).unwrap();
        let head = fabric.module_tree().unwrap().parameter("lm_head.weight").unwrap();
        let norm = head.local_grad().unwrap().sqr().unwrap().sum_all().unwrap();
        let norm = f64::from(norm.to_scalar::<f32>().unwrap()).sqrt() / loss.count();
        let wanted = f64::from(expected[&format!("{name}_norm")].to_scalar::<f32>().unwrap());
        assert!((norm / wanted - 1.0).abs() < 1e-4, "{name}: {norm}, expected {wanted}");
    }
    let (mut fabric, module) = load_with_reference::<Grpo>(&config("dapo", 0.5));
    let loss = module.loss(&batch).unwrap();
    assert_mean("with a divergence", &loss, &expected["with_kl"]);
    let layout = crate::transformers::config("llama").describe().unwrap().weights;
    assert_gradients("llama_grpo", &mut fabric, &loss, &layout);
}

/// A model that equals its reference is indifferent.
#[test]
fn reference_is_a_copy_of_the_weights() {
    let (_fabric, module) = load::<Preference>(&config("llama"), "llama").unwrap();
    let loss = module.loss(&pairs(false)).unwrap();
    assert_eq!(loss.mean().unwrap() as f32, 2f32.ln());
}

/// The hidden states of ids `[1, time]`.
type Hidden<'a> = &'a dyn Fn(&Tensor) -> Tensor;

/// Asserts that two documents in one sequence are computed as each alone.
fn assert_apart(name: &str, ids: &Tensor, hidden: Hidden<'_>) {
    let (whole, split) = (ids.narrow(0, 0, 1).unwrap(), 5);
    let length = whole.dim(1).unwrap();
    let parts = [(0, split), (split, length - split)];
    let lengths = parts.map(|(_, length)| length);
    let documents = Documents::of_lengths(&[lengths]).unwrap();
    let packed = documents.run(|| hidden(&whole));
    for (start, length) in parts {
        let alone = hidden(&whole.narrow(1, start, length).unwrap());
        assert_same(name, &packed.narrow(1, start, length).unwrap(), &alone);
    }
}

/// Models whose rotary embedding follows from the length of the sequence are left out.
#[test]
fn documents_are_computed_as_if_alone() {
    for name in DECODERS.into_iter().filter(|name| !["llama_dynamic", "phi3"].contains(name)) {
        let config = config(name);
        let (_fabric, module) = load::<CausalLm>(&config, name).unwrap();
        let ids = ids(&tensors(name, "expected.safetensors")["input_ids"]);
        assert_apart(name, &ids, &|ids| module.model().hidden(ids).unwrap());
    }
    for name in ["bert_masked", "roberta_masked", "modernbert_masked"] {
        let mut config = config(name);
        config.set("mask_token_id", 3).unwrap();
        let (_fabric, module) = load::<MaskedLm>(&config, name).unwrap();
        let ids = ids(&tensors(name, "expected.safetensors")["input_ids"]);
        assert_apart(name, &ids, &|ids| module.forward(ids).unwrap());
    }
}

/// The loss of pairs by its definition, from the embeddings.
#[test]
fn pairs_are_contrasted() {
    let name = "bert_classes";
    let mut config = config(name);
    config.set("temperature", 0.1).unwrap();
    let (_fabric, module) = load::<Embedding>(&config, name).unwrap();
    let anchors = texts(name);
    let mut positives = anchors.clone();
    positives.ids = ((positives.ids * 7.0).unwrap() + 3.0).unwrap();
    let rows = positives.ids.to_vec2::<u32>().unwrap();
    let rows: Vec<Vec<u32>> =
        rows.into_iter().map(|row| row.into_iter().map(|id| id % 43).collect()).collect();
    positives.ids = Tensor::new(rows, &Device::Cpu).unwrap();
    let embedded = |texts: &PaddedTexts| module.forward(texts).unwrap().to_vec2::<f32>().unwrap();
    let (a, p) = (embedded(&anchors), embedded(&positives));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    assert!((dot(&a[0], &a[0]) - 1.0).abs() < 1e-5);
    let score = |i: usize, j: usize| dot(&a[i], &p[j]) / 0.1;
    let of = |i: usize| (score(i, 0).exp() + score(i, 1).exp()).ln() - score(i, i);
    let wanted = (of(0) + of(1)) / 2.0;
    let batch =
        TextBatch { texts: anchors, others: vec![positives], labels: Labels::None, longest: 12 };
    let found = module.loss(&batch).unwrap().mean().unwrap();
    assert!((found - wanted).abs() < 1e-4, "{found} instead of {wanted}");
}

#[cfg(feature = "images")]
#[test]
fn pictures_are_normalised_and_classified() {
    let expected = tensors("vit", "expected.safetensors");
    let (_fabric, module) = load::<ImageClassification>(&config("vit"), "vit").unwrap();
    // The fixture's pictures are normalised.
    let pixels = ((&expected["pictures"] * 0.5).unwrap() + 0.5).unwrap();
    assert_same("vit", &module.forward(&pixels).unwrap(), &expected["logits"]);
}
