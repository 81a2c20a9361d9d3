//! The families of models: how each maps its `config.json` and the names of its weights.
//!
//! A family's file reads its keys with the defaults of `transformers`, says what differs from
//! Llama, and lists the tensors whose names or shapes differ. Adding one is a file, a line in
//! [`FAMILIES`], and a row of the tests' table.

mod bert;
mod common;
mod deepseek;
mod experts;
mod gemma;
mod glm;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod llama;
mod mixtral;
mod modernbert;
mod olmo2;
mod packing;
mod phi3;
mod qwen;
mod smollm3;
mod t5;
mod vit;

use std::path::Path;

use fulgurite_checkpoint::TensorSource as _;
use fulgurite_error::{Error, Result};
use serde_json::Value;

use crate::config::{AUTO, ModelConfig, Reader};
use crate::decoder::DecoderConfig;
use crate::encoder::EncoderConfig;
use crate::encoder_decoder::EncoderDecoderConfig;
use crate::weights::{MappedSource, REFERENCE, WeightLayout};

/// The description of a model.
#[derive(Debug, Clone)]
pub struct Description {
    /// Its layers.
    pub architecture: Architecture,
    /// The correspondence of a Hugging Face file's tensors and the model's.
    pub weights: WeightLayout,
    /// The key and the value of a dropout of attention's probabilities, which is not applied.
    pub unapplied_dropout: Option<(&'static str, f64)>,
    /// The pattern of the head of a token classification, which a file has as `classifier`.
    token_head: Option<&'static str>,
}

impl Description {
    fn new(architecture: Architecture, weights: WeightLayout) -> Self {
        Self { architecture, weights, unapplied_dropout: None, token_head: None }
    }

    fn decoder(config: DecoderConfig, weights: WeightLayout) -> Self {
        Self::new(Architecture::Decoder(Box::new(config)), weights)
    }

    fn encoder(config: EncoderConfig, weights: WeightLayout) -> Self {
        Self::new(Architecture::Encoder(Box::new(config)), weights)
    }

    /// The correspondence of tensors for the module of this name. Some classes of `transformers`
    /// for token classification name their head otherwise than those for whole texts.
    pub(crate) fn weights_of(&self, module: &str) -> WeightLayout {
        if ["preference", "kto", "grpo"].contains(&module) {
            return self.weights.clone().leave_out(REFERENCE);
        }
        match self.token_head.filter(|_| module == "token_classification") {
            Some(head) => self.weights.clone().rename(head, "classifier.*"),
            None => self.weights.clone(),
        }
    }

    /// Warns of a dropout in the configuration that the model does not apply.
    pub(crate) fn warn_of_dropout(&self) {
        if let Some((key, dropout)) = self.unapplied_dropout {
            tracing::warn!(
                "`model.{key}` is {dropout}, and dropout of attention's probabilities is not applied; 0 takes this \
                 warning away"
            );
        }
    }
}

/// The layers of a model.
#[derive(Debug, Clone)]
pub enum Architecture {
    /// A decoder, from token ids to logits.
    Decoder(Box<DecoderConfig>),
    /// An encoder, from token ids or pictures to hidden states.
    Encoder(Box<EncoderConfig>),
    /// A decoder that attends to an encoder, from token ids to logits.
    EncoderDecoder(Box<EncoderDecoderConfig>),
}

/// A kind of model.
pub struct Family {
    /// Its `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The beginning of its classes' names in `transformers`.
    class: &'static str,
    read: fn(&Reader<'_>) -> Result<Description>,
}

const fn family(
    model_type: &'static str,
    class: &'static str,
    read: fn(&Reader<'_>) -> Result<Description>,
) -> Family {
    Family { model_type, class, read }
}

/// All families, by `model_type`.
pub const FAMILIES: &[Family] = &[
    family("llama", "Llama", llama::llama),
    family("mistral", "Mistral", llama::mistral),
    family("mixtral", "Mixtral", mixtral::mixtral),
    family("qwen2", "Qwen2", qwen::qwen2),
    family("qwen2_moe", "Qwen2Moe", qwen::qwen2_moe),
    family("qwen3", "Qwen3", qwen::qwen3),
    family("qwen3_moe", "Qwen3Moe", qwen::qwen3_moe),
    family("glm4_moe", "Glm4Moe", glm::glm4_moe),
    family("deepseek_v3", "DeepseekV3", deepseek::deepseek_v3),
    family("gpt_oss", "GptOss", gpt_oss::gpt_oss),
    family("gemma", "Gemma", gemma::gemma),
    family("gemma2", "Gemma2", gemma::gemma2),
    family("gemma3_text", "Gemma3Text", gemma::gemma3),
    family("gpt2", "GPT2", gpt2::gpt2),
    family("phi3", "Phi3", phi3::phi3),
    family("olmo2", "Olmo2", olmo2::olmo2),
    family("smollm3", "SmolLM3", smollm3::smollm3),
    family("gpt_neox", "GPTNeoX", gpt_neox::gpt_neox),
    family("bert", "Bert", bert::bert),
    family("roberta", "Roberta", bert::roberta),
    family("xlm-roberta", "XLMRoberta", bert::roberta),
    family("modernbert", "ModernBert", modernbert::modernbert),
    family("t5", "T5", t5::t5),
    family("mt5", "MT5", t5::mt5),
    family("vit", "ViT", vit::vit),
];

/// Returns the class of `transformers` that loads a model of this type as the module trains it;
/// `None` if there is none.
pub(crate) fn class_name(model_type: &str, module: &str) -> Option<String> {
    let class = FAMILIES.iter().find(|family| family.model_type == model_type)?.class;
    let task = match module {
        "causal_lm" | "chat" | "preference" | "kto" | "grpo" if class == "Gemma3Text" => {
            return Some("Gemma3ForCausalLM".to_owned());
        }
        "token_classification" if ["Gemma3Text", "Olmo2"].contains(&class) => return None,
        "sequence_classification" | "reward" | "token_classification" if class == "Glm4Moe" => {
            return None;
        }
        "causal_lm" | "chat" | "preference" | "kto" | "grpo" if class == "GPT2" => "LMHeadModel",
        "causal_lm" | "chat" | "preference" | "kto" | "grpo" => "ForCausalLM",
        _ if ["T5", "MT5"].contains(&class) => match module {
            "seq2seq_lm" => "ForConditionalGeneration",
            _ => return None,
        },
        "masked_lm" => "ForMaskedLM",
        "sequence_classification" | "reward" => "ForSequenceClassification",
        "token_classification" => "ForTokenClassification",
        "image_classification" => "ForImageClassification",
        "embedding" => "Model",
        _ => return None,
    };
    Some(format!("{class}{task}"))
}

impl ModelConfig {
    /// Describes the model, after reading `config.json` if the configuration names a directory.
    ///
    /// # Errors
    /// If the file is missing or damaged, if the type is unknown, or if a key is missing, has a
    /// value that the family does not support, or would be ignored although it changes the results.
    pub fn describe(&mut self) -> Result<Description> {
        self.describe_for(&[])
    }

    /// [`describe`](Self::describe) for a module that takes these keys itself.
    pub(crate) fn describe_for(&mut self, keys: &[&str]) -> Result<Description> {
        self.read_file()?;
        let reader = Reader::new(self);
        for key in keys {
            reader.value(key);
        }
        let family = self.family()?;
        let mut description = (family.read)(&reader)?;
        description.weights = description.weights.packed(packing::packing(&reader)?);
        if reader.value("dropout").is_some() {
            let dropout = reader.probability("dropout", 0.0)?;
            match &mut description.architecture {
                Architecture::Decoder(decoder) => decoder.residual_dropout = dropout,
                Architecture::Encoder(encoder) => encoder.residual_dropout = dropout,
                Architecture::EncoderDecoder(model) => model.dropout = dropout,
            }
        }
        reader.finish()?;
        description.unapplied_dropout = reader.unapplied_dropout();
        Ok(description)
    }

    /// Describes a model that must be a decoder.
    ///
    /// Head and embedding are not tied if the weights to start from have both, with different
    /// values, as in `transformers` 5; the configuration says so from then on.
    ///
    /// # Errors
    /// As [`describe`](Self::describe), and if the model is an encoder.
    pub fn decoder(&mut self) -> Result<DecoderConfig> {
        self.decoder_for(&[])
    }

    /// [`decoder`](Self::decoder), with keys that a module takes itself.
    pub(crate) fn decoder_for(&mut self, keys: &[&str]) -> Result<DecoderConfig> {
        let Description { architecture, weights, .. } = self.describe_for(keys)?;
        let Architecture::Decoder(mut decoder) = architecture else {
            return Err(self.is_no("a decoder that continues texts, such as \"llama\""));
        };
        let directory = self.directory().ok().flatten().filter(|_| decoder.tied);
        if let Some(directory) = directory
            && has_two_heads(&directory, &weights)?
        {
            warn_of_two_heads(&directory);
            self.set("tie_word_embeddings", false)?;
            decoder.tied = false;
        }
        Ok(*decoder)
    }

    /// Describes a model that must be an encoder-decoder, for a module that takes `keys` itself.
    ///
    /// Head and embedding are tied unless the weights to start from have both, with different
    /// values, as in `transformers` 5; the configuration says so from then on.
    ///
    /// # Errors
    /// As [`describe`](Self::describe), and if the model is of another kind.
    pub(crate) fn encoder_decoder(&mut self, keys: &[&str]) -> Result<EncoderDecoderConfig> {
        let Description { architecture, weights, .. } = self.describe_for(keys)?;
        let Architecture::EncoderDecoder(mut model) = architecture else {
            return Err(self.is_no("a decoder that attends to an encoder, such as \"t5\""));
        };
        let directory = self.directory().ok().flatten();
        if let Some(directory) = directory {
            let tied = !has_two_heads(&directory, &weights)?;
            let wanted = self.get("tie_word_embeddings").and_then(Value::as_bool);
            if wanted.is_some_and(|wanted| wanted != tied) {
                let have = if tied { "one matrix" } else { "two matrices" };
                return Err(Error::Config(format!(
                    "`model.tie_word_embeddings`: the weights in {} have {have} for head and embedding; leave the key \
                     out",
                    directory.display()
                )));
            }
            if model.tied && !tied {
                warn_of_two_heads(&directory);
            }
            model.tied = tied;
            // Without the key, scaling follows from the ties that the file names.
            self.set("scale_decoder_outputs", model.scale_outputs)?;
            self.set("tie_word_embeddings", tied)?;
        }
        Ok(*model)
    }

    /// The error of a model of another kind than a module needs.
    pub(crate) fn is_no(&self, wanted: &str) -> Error {
        Error::Config(format!(
            "`model.type`: a model of type \"{}\" is of another kind than this `module.type` needs: {wanted}; choose \
             another model, or another `module.type`",
            self.model_type()
        ))
    }

    fn family(&self) -> Result<&'static Family> {
        let name = self.model_type();
        FAMILIES.iter().find(|family| family.model_type == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
            let known = known.join(", ");
            match self.file() {
                _ if name == AUTO => Error::Config(format!(
                    "`model.type`: a model without `model.from_pretrained` needs a type: {known}"
                )),
                Some((file, _)) => Error::Config(format!(
                    "{}: `model_type`: models of type \"{name}\" are not known; known are {known}",
                    file.display()
                )),
                None => Error::Config(format!(
                    "`model.type`: models of type \"{name}\" are not known; known are {known}"
                )),
            }
        })
    }
}

/// Whether the weights have a head and an embedding with different values.
fn has_two_heads(directory: &Path, layout: &WeightLayout) -> Result<bool> {
    let [head, embedding] = ["lm_head.weight", "model.embed_tokens.weight"];
    let source = MappedSource::new(fulgurite_checkpoint::open(directory)?, layout)?;
    let has_both = [head, embedding].iter().all(|name| source.info(name).is_some());
    Ok(has_both && !fulgurite_checkpoint::same_values(&source, head, embedding)?)
}

fn warn_of_two_heads(directory: &Path) {
    tracing::warn!(
        "{}: config.json says `tie_word_embeddings`, and the weights of head and embedding differ: they are not tied. \
         Set it to false",
        directory.display()
    );
}
