//! A reward model that scores answers while another model learns.

use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use fulgurite_checkpoint::{self as checkpoint, TensorSource};
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;
use fulgurite_data::PaddedTexts;
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::Solo;
use fulgurite_engine::execution::read;
use fulgurite_engine::module::ModuleInit;
use fulgurite_engine::strategy::{BuildContext, StrategyConfig};
use fulgurite_error::{Error, Result};
use fulgurite_trainer::fabric::Fabric;
use fulgurite_trainer::trainer::LightningModule as _;

use super::common::{self, TextSizes};
use super::reward::{KEYS, Reward};
use crate::config::ModelConfig;
use crate::encoder::InputConfig;
use crate::families::Architecture;

/// A reward model on one device, which does not take part in the run that uses it.
pub(super) struct FrozenReward {
    config: ModelConfig,
    /// The longest text, in tokens; `None` if the model has no limit.
    positions: Option<usize>,
    loaded: Option<(Fabric, Reward)>,
}

impl FrozenReward {
    /// Reads the configuration of a Hugging Face directory, for texts of a tokenizer with `ids`
    /// ids.
    ///
    /// # Errors
    /// If the model does not score texts of these ids, or its weights or their head are missing.
    pub(super) fn open(directory: &Path, ids: usize) -> Result<Self> {
        let mut config = ModelConfig::default();
        config.start_from(directory);
        let sizes = TextSizes { ids, seq_len: 1, segments: 1, padding: None };
        common::fit_to_texts(&mut config, KEYS, sizes)?;
        let positions = match config.describe_for(KEYS)?.architecture {
            Architecture::Decoder(decoder) => Some(decoder.max_positions),
            Architecture::Encoder(encoder) => match encoder.input {
                InputConfig::Text(text) => text.max_positions(),
                InputConfig::Patches(_) => None,
            },
            Architecture::EncoderDecoder(_) => return Err(common::no_encoder_decoder(&config)),
        };
        let frozen = Self { config, positions, loaded: None };
        let source = frozen.weights()?;
        let is_head =
            |name: &&str| source.info(name).is_some_and(|info| info.shape.first() == Some(&1));
        if !["score.weight", "classifier.out_proj.weight"].iter().any(is_head) {
            return Err(Error::Config(format!(
                "{} has no head of one number; name a reward model, such as one that `module.type` = \"reward\" trained",
                source.location().display()
            )));
        }
        Ok(frozen)
    }

    fn weights(&self) -> Result<Box<dyn TensorSource>> {
        let path = self.config.weights().unwrap_or_default();
        Reward::map_weights(&self.config, checkpoint::open(path)?)
    }

    /// The longest text, in tokens; `None` if the model has no limit.
    pub(super) fn positions(&self) -> Option<usize> {
        self.positions
    }

    /// The scores of texts, f32 `[batch]`. The first call loads the weights.
    ///
    /// # Errors
    /// If a text is too long, or the weights cannot be loaded.
    pub(super) fn score(&mut self, texts: &PaddedTexts, device: &Device) -> Result<Vec<f32>> {
        let (fabric, reward) = match &mut self.loaded {
            Some(loaded) => loaded,
            None => {
                let loaded = self.load(device)?;
                self.loaded.insert(loaded)
            }
        };
        let _scope = fabric.forward_scope(false, 0, 0);
        let _no_grad = no_grad();
        read::vec1(&reward.forward(texts)?, "scores")
    }

    fn load(&self, device: &Device) -> Result<(Fabric, Reward)> {
        let single: Box<dyn StrategyConfig> =
            PluginValue::new("single_device").build(kind::STRATEGY, "the reward's strategy")?;
        let init = ModuleInit { device: device.clone(), ..ModuleInit::default() };
        let world = Arc::new(Solo::new("reward", 0));
        let strategy = single.build(&BuildContext::default())?;
        let mut fabric = Fabric::new(world, strategy, init, 0)?;
        let reward = fabric.setup_module(|b| Reward::configure_model(&self.config, b))?;
        checkpoint::load_into(&*self.weights()?, fabric.module_tree()?, true)?;
        fabric.checkpoints().finish_load()?;
        Ok((fabric, reward))
    }
}
