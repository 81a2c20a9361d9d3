//! The families of models: how each maps its `config.json` and the names of its weights.
//!
//! A family's file reads its keys with the defaults of `transformers`, says what differs from
//! Llama, and lists the tensors whose names or shapes differ. Adding one is a file, a line in
//! [`FAMILIES`], and a row of the tests' table.

mod bert;
mod common;
mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod modernbert;
mod olmo2;
mod phi3;
mod qwen;
mod smollm3;
mod vit;

use fulgurite_error::{Error, Result};

use crate::config::{AUTO, ModelConfig, Reader};
use crate::decoder::DecoderConfig;
use crate::encoder::EncoderConfig;
use crate::weights::WeightLayout;

/// The description of a model.
#[derive(Debug, Clone)]
pub struct Description {
    /// What it computes.
    pub architecture: Architecture,
    /// How the tensors of a Hugging Face file become the model's.
    pub weights: WeightLayout,
}

/// What a model computes.
#[derive(Debug, Clone)]
pub enum Architecture {
    /// A decoder, from token ids to logits.
    Decoder(Box<DecoderConfig>),
    /// An encoder, from token ids or pictures to hidden states.
    Encoder(Box<EncoderConfig>),
}

/// A kind of model.
pub struct Family {
    /// Its `model_type` in `config.json`.
    pub model_type: &'static str,
    read: fn(&Reader<'_>) -> Result<Description>,
}

const fn family(model_type: &'static str, read: fn(&Reader<'_>) -> Result<Description>) -> Family {
    Family { model_type, read }
}

/// All families, by `model_type`.
pub const FAMILIES: &[Family] = &[
    family("llama", llama::llama),
    family("mistral", llama::mistral),
    family("qwen2", qwen::qwen2),
    family("qwen3", qwen::qwen3),
    family("gemma", gemma::gemma),
    family("gemma2", gemma::gemma2),
    family("gemma3_text", gemma::gemma3),
    family("gpt2", gpt2::gpt2),
    family("phi3", phi3::phi3),
    family("olmo2", olmo2::olmo2),
    family("smollm3", smollm3::smollm3),
    family("gpt_neox", gpt_neox::gpt_neox),
    family("bert", bert::bert),
    family("roberta", bert::roberta),
    family("xlm-roberta", bert::roberta),
    family("modernbert", modernbert::modernbert),
    family("vit", vit::vit),
];

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
        let description = (family.read)(&reader)?;
        reader.finish()?;
        Ok(description)
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
