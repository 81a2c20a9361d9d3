//! Connects process groups before the first step.

use std::sync::Arc;

use candle_core::Device;
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::mesh::{
    CONTEXT_PARALLEL, DATA_PARALLEL_REPLICATE, DP_CP, DP_SHARD_CP, DeviceMesh, TENSOR_PARALLEL,
};
use fulgurite_error::Result;

/// Connects the groups whose collectives take tensors on `device` in a step. Must run early: later,
/// steps have filled the device's memory. `others` are groups outside the mesh. Collective over the
/// mesh.
pub(super) fn connect(
    mesh: &DeviceMesh,
    device: &Device,
    shards: bool,
    others: impl IntoIterator<Item = Arc<dyn ProcessGroup>>,
) -> Result<()> {
    // The world and the data-parallel ranks sum losses and gradient norms.
    let mut groups = vec![mesh.world().clone(), mesh.group(DP_CP)?.clone()];
    if shards {
        groups.push(mesh.group(DP_SHARD_CP)?.clone());
    }
    for dim in [DATA_PARALLEL_REPLICATE, TENSOR_PARALLEL, CONTEXT_PARALLEL] {
        groups.push(mesh.group(dim)?.clone());
    }
    groups.extend(others);
    // Views may share a group.
    let mut connected: Vec<*const ()> = Vec::new();
    for group in groups {
        let address = Arc::as_ptr(&group).cast::<()>();
        if group.size() > 1 && !connected.contains(&address) {
            group.connect(device)?;
            connected.push(address);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use candle_core::Tensor;
    use fulgurite_engine::collective::{Collective, Solo, Work};

    use super::*;

    /// A group of four ranks that records its connected parts.
    struct Noted {
        name: String,
        ranks: Vec<usize>,
        connected: Arc<Mutex<Vec<String>>>,
    }

    impl ProcessGroup for Noted {
        fn name(&self) -> &str {
            &self.name
        }

        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            self.ranks.len()
        }

        fn global_ranks(&self) -> &[usize] {
            &self.ranks
        }

        fn connect(&self, _: &Device) -> Result<()> {
            self.connected.lock().unwrap().push(self.name.clone());
            Ok(())
        }

        fn start(&self, _: Collective, _: bool) -> Result<Work> {
            panic!("nothing is communicated")
        }

        fn send(&self, _: &Tensor, _: usize) -> Result<Work> {
            panic!("nothing is communicated")
        }

        fn recv(&self, _: &Tensor, _: usize) -> Result<Work> {
            panic!("nothing is communicated")
        }

        fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
            let (ranks, connected) = (partition[0].clone(), self.connected.clone());
            Ok(Arc::new(Self { name: name.to_owned(), ranks, connected }))
        }

        fn abort(&self, _: &str) {}
    }

    fn connected(sizes: [Option<usize>; 4], shards: bool) -> String {
        let noted = Arc::new(Mutex::default());
        let world =
            Noted { name: "world".to_owned(), ranks: vec![0, 1, 2, 3], connected: noted.clone() };
        let [replicate, shard, context, tensor] = sizes;
        let layout = DeviceMesh::layout_for(4, replicate, shard, context, tensor).unwrap();
        let mesh = DeviceMesh::new(layout, Arc::new(world)).unwrap();
        let alone: Arc<dyn ProcessGroup> = Arc::new(Solo::new("parts", 0));
        connect(&mesh, &Device::Cpu, shards, [alone]).unwrap();
        let noted = noted.lock().unwrap();
        noted.join(" ")
    }

    #[test]
    fn groups_of_a_step_connect_once() {
        let (ddp, fsdp) = ([None, Some(1), Some(1), Some(1)], [Some(1), None, Some(1), Some(1)]);
        assert_eq!(connected(ddp, false), "world data_parallel_replicate");
        assert_eq!(connected(fsdp, true), "world data_parallel_shard");
        let hsdp = [Some(2), Some(2), Some(1), Some(1)];
        assert_eq!(
            connected(hsdp, true),
            "world dp_cp data_parallel_shard data_parallel_replicate"
        );
        let with_tensor = [Some(1), Some(2), Some(1), Some(2)];
        assert_eq!(connected(with_tensor, true), "world data_parallel_shard tensor_parallel");
    }
}
