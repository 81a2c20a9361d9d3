//! Copies of the tensors that a rank saves, in reused memory.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::ShardTensor;
use super::shard_file::on_host;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;

/// Bytes that one thread copies at a time.
const BLOCK: usize = 1 << 20;

/// Copies in host memory of the tensors that a rank saves. The memory is reused by the next
/// [`take`](Self::take).
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) model: Vec<ShardTensor>,
    pub(super) optimizer: Vec<ShardTensor>,
}

impl Snapshot {
    /// Copies these tensors over the previous copies.
    ///
    /// # Errors
    /// If values are not in memory. The copies are undefined until the next successful `take`.
    pub(super) fn take(&mut self, model: &[ShardTensor], optimizer: &[ShardTensor]) -> Result<()> {
        copy_all(&mut self.model, model)?;
        copy_all(&mut self.optimizer, optimizer)
    }

    /// Whether no memory is allocated yet.
    pub(super) fn is_empty(&self) -> bool {
        self.model.is_empty() && self.optimizer.is_empty()
    }

    /// Allocates memory for copies of these tensors.
    ///
    /// Its pages are touched, so that [`take`](Self::take) causes no page faults.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub(super) fn reserve(model: &[ShardTensor], optimizer: &[ShardTensor]) -> Result<Self> {
        let all = |tensors: &[ShardTensor]| tensors.iter().map(touched).collect::<Result<_>>();
        Ok(Self { model: all(model)?, optimizer: all(optimizer)? })
    }
}

fn empty(tensor: &ShardTensor) -> Result<Tensor> {
    let (count, dtype) = (tensor.values.elem_count(), tensor.values.dtype());
    Ok(Tensor::zeros(count, dtype, &Device::Cpu)?)
}

fn touched(tensor: &ShardTensor) -> Result<ShardTensor> {
    let values = empty(tensor)?;
    storage::with_bytes_mut(&values, |bytes| bytes.fill(0))?;
    Ok(ShardTensor { values, ..tensor.clone() })
}

fn copy_all(copies: &mut Vec<ShardTensor>, tensors: &[ShardTensor]) -> Result<()> {
    copies.truncate(tensors.len());
    for (i, tensor) in tensors.iter().enumerate() {
        if !tensor.region.is_empty() && storage::is_released(&tensor.values) {
            let message = format!("saving tensor `{}`: its values are not in memory", tensor.name);
            return Err(Error::other(message));
        }
        let like = |copy: &&ShardTensor| {
            copy.values.dtype() == tensor.values.dtype()
                && copy.values.elem_count() == tensor.values.elem_count()
        };
        let values = match copies.get(i).filter(like) {
            Some(copy) => copy.values.clone(),
            None => empty(tensor)?,
        };
        copy(&values, &tensor.values)?;
        let copy = ShardTensor {
            name: tensor.name.clone(),
            values,
            region: tensor.region.clone(),
            shape: tensor.shape.clone(),
        };
        match copies.get_mut(i) {
            Some(place) => *place = copy,
            None => copies.push(copy),
        }
    }
    Ok(())
}

/// One pass over the memory, on all compute threads.
fn copy(target: &Tensor, source: &Tensor) -> Result<()> {
    if source.elem_count() == 0 {
        return Ok(());
    }
    let source = on_host(source)?;
    storage::with_bytes_mut(target, |to| {
        storage::with_bytes(&source, |from| {
            if to.len() <= BLOCK {
                to.copy_from_slice(from);
            } else {
                let parts = to.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
                parts.for_each(|(to, from)| to.copy_from_slice(from));
            }
        })
    })?
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_engine::shard::Region;

    fn part(name: &str, values: &Tensor) -> ShardTensor {
        let shape = values.dims().to_vec();
        let region = Region::full(&shape);
        ShardTensor { name: name.to_owned(), values: values.clone(), region, shape }
    }

    fn address(part: &ShardTensor) -> usize {
        storage::with_bytes(&part.values, |bytes| bytes.as_ptr() as usize).unwrap()
    }

    #[test]
    fn copies_are_complete_and_reuse_memory() {
        // More than a block, and not a multiple of it.
        let n = BLOCK / 4 * 3 + 7;
        let large = Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap();
        let view = large.narrow(0, 5, 3).unwrap();
        let mut snapshot = Snapshot::default();
        let parts = [part("large", &large), part("view", &view)];
        snapshot.take(&parts, &parts[1..]).unwrap();
        let floats = |part: &ShardTensor| part.values.to_vec1::<f32>().unwrap();
        assert_eq!(floats(&snapshot.model[0]), large.to_vec1::<f32>().unwrap());
        assert_eq!(floats(&snapshot.optimizer[0]), [5., 6., 7.]);
        assert_eq!(snapshot.optimizer[0].name, "view");

        // Later changes of the tensors do not reach the copies.
        let places: Vec<_> = snapshot.model.iter().map(address).collect();
        storage::copy_from(
            &view,
            &Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap(),
        )
        .unwrap();
        assert_eq!(floats(&snapshot.model[1]), [5., 6., 7.]);
        snapshot.take(&parts, &[]).unwrap();
        assert_eq!(floats(&snapshot.model[1]), [0.; 3]);
        assert_eq!(snapshot.model.iter().map(address).collect::<Vec<_>>(), places);
        assert!(snapshot.optimizer.is_empty());
    }

    #[test]
    fn copies_use_reserved_memory() {
        let values = Tensor::arange(0f32, 7.0, &Device::Cpu).unwrap();
        let parts = [part("a", &values), part("b", &values)];
        let mut snapshot = Snapshot::reserve(&parts[..1], &parts[1..]).unwrap();
        let places = [address(&snapshot.model[0]), address(&snapshot.optimizer[0])];
        snapshot.take(&parts[..1], &parts[1..]).unwrap();
        assert_eq!([address(&snapshot.model[0]), address(&snapshot.optimizer[0])], places);
        for copy in [&snapshot.model[0], &snapshot.optimizer[0]] {
            assert_eq!(copy.values.to_vec1::<f32>().unwrap(), [0., 1., 2., 3., 4., 5., 6.]);
        }
    }
}
