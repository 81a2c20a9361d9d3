//! Changes buffers after each step, and makes them equal on data-parallel ranks.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_config::ConfigType;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::read;
use serde::{Deserialize, Serialize};

use super::StrategyRuntime;
use crate::Result;

/// Synchronisation of data-parallel ranks' buffers after each optimizer step
/// (`trainer.sync_buffers`). One collective covers all buffers; a model without buffers skips it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncBuffers {
    /// All ranks get the buffers of the first data-parallel rank (`broadcast_buffers` of PyTorch's
    /// DDP).
    #[default]
    Broadcast,
    /// All ranks get the mean, which is rounded for integers.
    Mean,
    /// Each rank keeps its own buffers. Checkpoints save rank 0's.
    None,
}

impl ConfigType for SyncBuffers {
    fn describe() -> String {
        "`\"broadcast\"`, `\"mean\"` or `\"none\"`".to_owned()
    }
}

impl StrategyRuntime {
    /// Calls the layers' [work after a step](fulgurite_engine::module::AfterStep), with sums over
    /// the ranks of `group`. Collective over these ranks if the model has such layers.
    pub(super) fn after_step(&self, group: &Arc<dyn ProcessGroup>) -> Result<()> {
        let layers = self.tree()?.after_step();
        if layers.is_empty() {
            return Ok(());
        }
        let own: Vec<Vec<f64>> = layers.iter().map(|layer| layer.take()).collect();
        let mut sums = own.concat();
        if group.size() > 1 {
            let packed = Tensor::from_slice(&sums, sums.len(), &Device::Cpu)?;
            group.run(Collective::all_reduce(&packed, ReduceOp::Sum))?;
            sums = read::host(&packed)?;
        }
        let mut start = 0;
        for (layer, own) in layers.iter().zip(&own) {
            layer.update(&sums[start..start + own.len()])?;
            start += own.len();
        }
        Ok(())
    }

    /// Makes buffers equal over the ranks along `dim`: all data-parallel ranks (`DP_CP`), or the
    /// ranks of one replica (`DP_SHARD_CP`). Collective over these ranks if the model has buffers.
    pub(super) fn synchronise_buffers(&self, dim: &str) -> Result<()> {
        let buffers = self.tree()?.buffers();
        let group = self.mesh().group(dim)?;
        if buffers.is_empty() || group.size() == 1 {
            return Ok(());
        }
        let on_host = |tensor: &Tensor| -> Result<Tensor> {
            Ok(tensor.flatten_all()?.contiguous()?.to_device(&Device::Cpu)?)
        };
        match self.sync_buffers() {
            SyncBuffers::None => Ok(()),
            SyncBuffers::Broadcast => {
                let mut bytes = Vec::new();
                if group.rank() == 0 {
                    for buffer in buffers {
                        let values = on_host(&buffer.value()?)?;
                        storage::with_bytes(&values, |own| bytes.extend_from_slice(own))?;
                    }
                } else {
                    let len: u64 = buffers.iter().map(|buffer| buffer.bytes()).sum();
                    bytes.resize(len as usize, 0);
                }
                let len = bytes.len();
                let packed = Tensor::from_vec(bytes, len, &Device::Cpu)?;
                group.run(Collective::broadcast(&packed, 0))?;
                if group.rank() == 0 {
                    return Ok(());
                }
                let mut start = 0;
                for buffer in buffers {
                    let len = buffer.bytes() as usize;
                    let own = packed.narrow(0, start, len)?;
                    start += len;
                    let values = Tensor::zeros(buffer.shape(), buffer.dtype(), &Device::Cpu)?;
                    storage::with_bytes(&own, |from| {
                        storage::with_bytes_mut(&values, |to| to.copy_from_slice(from))
                    })??;
                    buffer.overwrite(&values.to_device(buffer.value()?.device())?)?;
                }
                Ok(())
            }
            SyncBuffers::Mean => {
                let all = buffers
                    .iter()
                    .map(|buffer| Ok(on_host(&buffer.value()?)?.to_dtype(DType::F64)?));
                let packed = Tensor::cat(&all.collect::<Result<Vec<_>>>()?, 0)?;
                group.run(Collective::all_reduce(&packed, ReduceOp::Sum))?;
                let mean = (packed / group.size() as f64)?;
                let mut start = 0;
                for buffer in buffers {
                    let values = mean.narrow(0, start, buffer.elem_count())?;
                    start += buffer.elem_count();
                    let values = if buffer.dtype().is_float() { values } else { values.round()? };
                    let values = values.to_dtype(buffer.dtype())?.reshape(buffer.shape())?;
                    buffer.overwrite(&values.to_device(buffer.value()?.device())?)?;
                }
                Ok(())
            }
        }
    }
}
