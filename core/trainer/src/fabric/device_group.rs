//! The default process group for the ranks' devices.

use std::sync::Arc;

use fulgurite_config::PluginValue;
use fulgurite_config::registry::{self, kind};
use fulgurite_engine::collective::{
    GroupContext, ProcessGroup, ProcessGroupConfig, all_gather_object,
};

use crate::Result;
use crate::run::TrainerConfig;

impl TrainerConfig {
    /// Returns the group in which ranks connected by `host` communicate. Collective.
    ///
    /// This is `host` itself, or a process group for the ranks' devices over `host`
    /// ([`ProcessGroupConfig::device_kind`]). The latter requires that `trainer.process_group`
    /// leaves the choice open. Every rank must have its own device of that kind, and must be able
    /// to use the group.
    ///
    /// If a rank cannot use the devices' group, all ranks use `host`, and rank 0 warns with the
    /// reason.
    ///
    /// # Errors
    /// If a configuration cannot be read, or the group cannot be built.
    pub fn over_devices(
        &self,
        host: Arc<dyn ProcessGroup>,
        context: &GroupContext,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let named = build(&self.process_group)?;
        if !named.leaves_devices_open() {
            return Ok(host);
        }
        // Found by name, so that all ranks of a program find the same groups. Programs for CPUs
        // find none.
        let mut groups = Vec::new();
        for name in registry::names(kind::PROCESS_GROUP) {
            let group = build(&PluginValue::new(name))?;
            if let Some(device) = group.device_kind() {
                groups.push((device, group));
            }
        }
        if groups.is_empty() {
            return Ok(host);
        }
        let accelerator = self.accelerator()?.filter(|accelerator| !accelerator.is_shared());
        let device = accelerator.as_ref().map(|accelerator| accelerator.typetag_name());
        let group = groups.into_iter().find(|(of, _)| Some(*of) == device).map(|(_, group)| group);
        let own = group.as_ref().map(|group| {
            let reason = group.available().err().map(|why| why.to_string());
            (group.typetag_name().to_owned(), reason)
        });
        let all = all_gather_object(&*host, &own)?;
        let (Some(group), true) = (group, all.iter().all(Option::is_some)) else {
            return Ok(host);
        };
        let reason = |(rank, of): (usize, &Option<(String, Option<String>)>)| {
            of.as_ref().and_then(|(_, reason)| Some((rank, reason.clone()?)))
        };
        match all.iter().enumerate().find_map(reason) {
            None => group.over(host, context),
            Some((rank, reason)) => {
                if host.rank() == 0 {
                    tracing::warn!(
                        "ranks copy tensors through the host to communicate, which is slow: rank {rank} cannot use \
                         `trainer.process_group` = \"{}\": {reason}",
                        group.typetag_name()
                    );
                }
                Ok(host)
            }
        }
    }
}

fn build(value: &PluginValue) -> Result<Box<dyn ProcessGroupConfig>> {
    value.build(kind::PROCESS_GROUP, "trainer.process_group")
}
