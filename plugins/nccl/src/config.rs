//! [`Nccl`], the configuration.

use std::path::PathBuf;
use std::sync::Arc;

use fulgurite_config::PluginValue;
use fulgurite_config::register_process_group;
use fulgurite_config::registry::kind;
use fulgurite_engine::collective::{GroupContext, GroupMemory, ProcessGroup, ProcessGroupConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::library::Library;

/// `process_group.type = "nccl"`: NCCL for NVIDIA GPU tensors, another process group for host ones.
///
/// Needs the cargo feature `cuda`, and NCCL 2.18 or newer where the ranks run. It has run on
/// emulated GPUs with a library in NCCL's place, and never on a GPU.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Nccl {
    /// The path of NCCL. By default `libnccl.so.2`, wherever the dynamic loader finds it
    /// (`LD_LIBRARY_PATH`).
    pub library: Option<PathBuf>,
    /// The process group for tensors of the host: a name such as `"tcp"`, or a table with its
    /// options.
    #[default(PluginValue::new("auto"))]
    pub host: PluginValue,
}

register_process_group!(
    "nccl",
    Nccl,
    "NCCL between GPUs of NVIDIA, and another process group for tensors of the host",
    "{ type = \"nccl\", host = \"auto\" }"
);

impl Nccl {
    /// Builds the configuration of the host's process group.
    fn host(&self) -> Result<Box<dyn ProcessGroupConfig>> {
        if self.host.name == "nccl" {
            return Err(Error::Config(
                "trainer.process_group.host is `nccl`; it must be a process group for tensors of the host, such as \
                 \"auto\""
                    .to_owned(),
            ));
        }
        let host: Box<dyn ProcessGroupConfig> =
            self.host.build(kind::PROCESS_GROUP, "trainer.process_group.host")?;
        host.check()?;
        Ok(host)
    }
}

#[typetag::serde(name = "nccl")]
impl ProcessGroupConfig for Nccl {
    fn check(&self) -> Result<()> {
        if cfg!(not(feature = "cuda")) {
            return Err(Error::Config(
                "trainer.process_group.type is \"nccl\", but this program was built without CUDA. Build it with the \
                 cargo feature `cuda` of `fulgurite` (or of `fulgurite-nccl`), or set trainer.process_group = \"auto\""
                    .to_owned(),
            ));
        }
        self.host().map(drop)
    }

    fn memory(&self, ranks: usize) -> GroupMemory {
        self.host().map_or_else(|_| GroupMemory::default(), |host| host.memory(ranks))
    }

    fn device_kind(&self) -> Option<&'static str> {
        cfg!(feature = "cuda").then_some("cuda")
    }

    fn available(&self) -> Result<()> {
        Library::open(self.library.as_deref()).map(drop)
    }

    fn over(
        &self,
        host: Arc<dyn ProcessGroup>,
        context: &GroupContext,
    ) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        build(self, host, context)
    }

    fn build(&self, context: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        let host = self.host()?.build(context)?;
        build(self, host, context)
    }
}

#[cfg(feature = "cuda")]
fn build(
    config: &Nccl,
    host: Arc<dyn ProcessGroup>,
    context: &GroupContext,
) -> Result<Arc<dyn ProcessGroup>> {
    crate::connect(crate::Parts {
        host,
        library: config.library.clone(),
        streams: Arc::new(crate::Cuda),
        store: context.store.clone(),
        timeout: context.timeout,
    })
}

#[cfg(not(feature = "cuda"))]
fn build(_: &Nccl, host: Arc<dyn ProcessGroup>, _: &GroupContext) -> Result<Arc<dyn ProcessGroup>> {
    unreachable!("`check` refuses it: {}", host.name())
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn config(json: &str) -> Nccl {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn options_are_checked() {
        let error = |json| config(json).host().unwrap_err().to_string();
        config("{}").host().unwrap();
        config(r#"{ "host": { "type": "tcp", "interface": "lo" } }"#).host().unwrap();
        assert_says!(error(r#"{ "host": "nccl" }"#), "trainer.process_group.host is `nccl` …");
        assert_says!(error(r#"{ "host": "mpo" }"#), "unknown process_group `mpo`; available: …");
        assert!(serde_json::from_str::<Nccl>(r#"{ "libary": "x" }"#).is_err());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn check_refuses_builds_without_cuda() {
        assert_says!(
            config("{}").check().unwrap_err(),
            r#"trainer.process_group.type is "nccl" … built without CUDA … `cuda` … "auto""#
        );
    }
}
