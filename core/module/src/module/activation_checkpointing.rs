//! Activation checkpointing: chosen units drop their activations after forward, and backward
//! computes them again.
//!
//! ```
//! use fulgurite_core::module::{ActivationCheckpointing, ModuleBuilder, ModuleInit};
//! use fulgurite_core::nn::Linear;
//!
//! let init = ModuleInit {
//!     activation_checkpointing: ActivationCheckpointing::selective(2),
//!     ..ModuleInit::default()
//! };
//! let b = ModuleBuilder::new(init);
//! let blocks = (0..4).map(|i| b.unit(&format!("blocks.{i}"), |b| Linear::new(b, 8, 8)));
//! let blocks = blocks.collect::<fulgurite_core::Result<Vec<_>>>()?;
//! b.finish()?;
//! assert!(!blocks[0].handle().activation_checkpointing());
//! assert!(blocks[1].handle().activation_checkpointing());
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::collections::BTreeSet;
use std::fmt;

use candle_core::Device;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap as _, Serializer};
use serde::{Deserialize, Serialize};

use super::ActivationOffload;
use super::tree::ModuleTree;
use super::unit::UnitHandle;
use crate::{Error, Result};
use fulgurite_config::ConfigType;
use fulgurite_tensor::execution::transfer;

/// The number of checkpointed units: the values of `trainer.activation_checkpointing`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointMode {
    /// No unit: all keep their activations from forward to backward.
    #[default]
    None,
    /// Every unit keeps only its inputs.
    Full,
    /// Every n-th unit.
    Selective,
}

impl CheckpointMode {
    const NAMES: [&'static str; 3] = ["none", "full", "selective"];

    fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// The units that backward computes again: `trainer.activation_checkpointing`, a [`CheckpointMode`]
/// or a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActivationCheckpointing {
    /// The number of units to checkpoint.
    pub mode: CheckpointMode,
    /// For [`Selective`](CheckpointMode::Selective): `n` takes every n-th unit, in build order (2:
    /// the second, the fourth, …). `None` means 2.
    pub every: Option<usize>,
    /// Patterns of units. Units that match none of them are neither checkpointed nor counted.
    /// Empty: every unit matches.
    pub units: Vec<String>,
    /// Storage of activations from forward to backward. `None`: their device.
    ///
    /// With [`Full`](CheckpointMode::Full), the units' inputs are offloaded. An input that gets a
    /// gradient is offloaded only if it is the output of another checkpointed unit. With
    /// [`None`](CheckpointMode::None), all activations in the units' graphs are offloaded.
    pub offload: Option<ActivationOffload>,
}

impl ActivationCheckpointing {
    /// Checkpoints every unit.
    pub fn full() -> Self {
        Self { mode: CheckpointMode::Full, ..Self::default() }
    }

    /// Checkpoints every `every`-th unit.
    pub fn selective(every: usize) -> Self {
        Self { mode: CheckpointMode::Selective, every: Some(every), ..Self::default() }
    }

    /// Checks that the fields are consistent.
    ///
    /// # Errors
    /// If they are not. The message does not name the key.
    pub fn check(&self) -> Result<(), String> {
        match (self.mode, self.every) {
            (CheckpointMode::Selective, Some(0)) => Err("`every` must be at least 1, found 0; \
                 leave it out for every second unit"
                .to_owned()),
            (CheckpointMode::None | CheckpointMode::Full, Some(_)) => Err(format!(
                "`every` says which units `type = \"selective\"` takes; the type is \"{}\"",
                self.mode.name()
            )),
            (CheckpointMode::None, None) if !self.units.is_empty() && self.offload.is_none() => {
                Err("`units` names units and the type is \"none\"; choose \"full\" for all of them, or \
                     \"selective\", or `offload`"
                    .to_owned())
            }
            (CheckpointMode::Selective, _) if self.offload.is_some() => Err(
                "`offload` moves what is passed from one unit that is computed again to the next, and the \
                 type is \"selective\"; choose \"full\", or \"none\" to offload what all units keep"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// Checks that activations of a model on `device` can be offloaded.
    ///
    /// # Errors
    /// If they cannot.
    pub fn check_device(&self, device: &Device) -> Result<()> {
        match self.offload {
            Some(ActivationOffload::Host) if !transfer::has_own_memory(device) => Err(wrong(
                "offload = \"host\" moves activations from a GPU to the host's memory, and the model \
                 is there already; offload = \"disk\" moves them to files",
            )),
            _ => Ok(()),
        }
    }

    /// Turns checkpointing on for the chosen units of a model.
    ///
    /// # Errors
    /// If a pattern matches no unit, or no unit is chosen.
    pub(super) fn apply(&self, tree: &ModuleTree) -> Result<()> {
        self.check().map_err(|message| wrong(&message))?;
        let every = match self.mode {
            CheckpointMode::None if self.offload.is_none() => return Ok(()),
            CheckpointMode::None | CheckpointMode::Full => 1,
            CheckpointMode::Selective => self.every.unwrap_or(2),
        };
        let units = tree.units();
        if units.is_empty() {
            return Err(wrong(&format!(
                "\"{}\" is about the model's units, and it has none; build its blocks with \
                 `ModuleBuilder::unit`",
                self.mode.name()
            )));
        }
        let paths = || units.iter().map(UnitHandle::path).collect::<Vec<_>>().join(", ");
        let mut about = BTreeSet::new();
        for pattern in &self.units {
            let mut matching = tree.units_matching(pattern).peekable();
            if matching.peek().is_none() {
                return Err(wrong(&format!("no unit matches `{pattern}`; there are {}", paths())));
            }
            about.extend(matching.map(|unit| unit.path().to_owned()));
        }
        let about =
            units.iter().filter(|unit| self.units.is_empty() || about.contains(unit.path()));
        let mut chosen = about.skip(every - 1).step_by(every).peekable();
        if chosen.peek().is_none() {
            return Err(wrong(&format!(
                "every = {every} takes none of the units, of which there are too few; there are {}",
                paths()
            )));
        }
        chosen.try_for_each(|unit| {
            unit.set_activation_checkpointing(self.mode != CheckpointMode::None)?;
            unit.set_activation_offload(self.offload)
        })
    }
}

fn wrong(message: &str) -> Error {
    Error::Config(format!("`trainer.activation_checkpointing`: {message}"))
}

impl Serialize for ActivationCheckpointing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.every.is_none() && self.units.is_empty() && self.offload.is_none() {
            return self.mode.serialize(serializer);
        }
        let mut table = serializer.serialize_map(None)?;
        table.serialize_entry("type", &self.mode)?;
        if let Some(every) = self.every {
            table.serialize_entry("every", &every)?;
        }
        if !self.units.is_empty() {
            table.serialize_entry("units", &self.units)?;
        }
        if let Some(offload) = self.offload {
            table.serialize_entry("offload", &offload)?;
        }
        table.end()
    }
}

impl<'de> Deserialize<'de> for ActivationCheckpointing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            #[serde(rename = "type")]
            mode: CheckpointMode,
            #[serde(default)]
            every: Option<usize>,
            #[serde(default)]
            units: Vec<String>,
            #[serde(default)]
            offload: Option<ActivationOffload>,
        }

        struct WordOrTable;

        impl<'de> Visitor<'de> for WordOrTable {
            type Value = ActivationCheckpointing;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"none\", \"full\", \"selective\" or a table with a `type`")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Self::Value, E> {
                let mode = match word {
                    "none" => CheckpointMode::None,
                    "full" => CheckpointMode::Full,
                    "selective" => CheckpointMode::Selective,
                    _ => return Err(E::unknown_variant(word, &CheckpointMode::NAMES)),
                };
                Ok(ActivationCheckpointing { mode, ..ActivationCheckpointing::default() })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let Table { mode, every, units, offload } =
                    Table::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ActivationCheckpointing { mode, every, units, offload })
            }
        }

        deserializer.deserialize_any(WordOrTable)
    }
}

impl ConfigType for ActivationCheckpointing {
    fn describe() -> String {
        "`\"none\"`, `\"full\"`, `\"selective\"` or a table".to_owned()
    }
}
