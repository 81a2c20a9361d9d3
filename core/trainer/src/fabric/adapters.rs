//! Saving and loading adapters with Fabric.

use std::path::{Path, PathBuf};

use super::{Checkpoints, Fabric};
use crate::{Error, Result};
use fulgurite_checkpoint as checkpoint;
use fulgurite_engine::module::Adapters;

impl Fabric {
    /// Returns the adapters that the model is built with, if any.
    pub(crate) fn adapters(&self) -> Option<&Adapters> {
        self.init.adapters.as_ref()
    }

    /// Directory of the adapter loaded last, or to load once the model is set up.
    pub(super) fn adapter_from(&self) -> Option<PathBuf> {
        self.adapter_from.lock().expect("nobody panics while holding it").clone()
    }

    fn require_adapters(&self) -> Result<&Adapters> {
        self.adapters().ok_or_else(|| {
            Error::other(
                "the model has no adapters: build it with `[trainer.adapters]`, or `ModuleInit::adapters`",
            )
        })
    }
}

impl Checkpoints<'_> {
    /// Writes the model's adapters to the directory `dir`, in PEFT's format. Collective.
    ///
    /// Modules trained with the adapters are written too. The files are `adapter_model.safetensors`
    /// and `adapter_config.json`, which `PeftModel.from_pretrained` loads. Rank 0 gathers the
    /// tensors and writes.
    ///
    /// # Errors
    /// If the model was built without adapters, or the directory cannot be written.
    pub fn save_adapter(&self, dir: impl AsRef<Path>) -> Result<PathBuf> {
        let adapters = self.0.require_adapters()?;
        self.0.runtime.prepare_save()?;
        let (mesh, tree) = (self.0.device_mesh(), self.0.module_tree()?);
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let labels = checkpoint::AdapterLabels {
            base_model: self.0.base_model.as_deref(),
            task_type: self.0.peft_task_type,
        };
        let world = &**self.0.world();
        checkpoint::save_adapter(dir.as_ref(), world, tree, coordinate, adapters, labels)
    }

    /// Fills the adapters, and the modules trained with them, from a PEFT directory. Collective.
    ///
    /// A base loaded afterwards leaves them unchanged.
    ///
    /// # Errors
    /// If the model was built without adapters, or with other adapters than in the directory.
    /// Nothing is changed then.
    pub fn load_adapter(&self, dir: impl AsRef<Path>) -> Result<()> {
        let tree = self.0.module_tree()?;
        let report = checkpoint::load_adapter(dir.as_ref(), tree, self.0.require_adapters()?)?;
        let is_adapter = |fqn: &str| tree.parameter(fqn).is_some_and(|p| p.is_adapter());
        let beside = report.loaded.into_iter().filter(|fqn| !is_adapter(fqn)).collect();
        *self.0.beside_adapter.lock().expect("nobody panics while holding it") = beside;
        *self.0.adapter_from.lock().expect("nobody panics while holding it") =
            Some(dir.as_ref().to_owned());
        self.0.runtime.finish_load()
    }
}
