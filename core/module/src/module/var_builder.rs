//! candle_nn's view of a [`ModuleBuilder`].

use candle_core::{DType, Device, Shape, Tensor};

use super::ModuleBuilder;
use super::builder::Origin;
use crate::parameter::{BufferInit, BufferOptions, Parameter, init};

/// Answers a `VarBuilder` with compute tensors that have no memory yet.
pub(super) struct Recorder(pub(super) ModuleBuilder);

impl Recorder {
    fn find(&self, name: &str) -> Option<Parameter> {
        self.0.tree().parameter(name).cloned()
    }

    /// The compute tensor of an existing parameter.
    fn share(&self, parameter: &Parameter) -> candle_core::Result<Tensor> {
        self.0.expose_tensor(parameter)?;
        Ok(parameter.compute()?.clone())
    }
}

impl candle_nn::var_builder::SimpleBackend for Recorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        hint: candle_nn::Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        if dtype != self.0.compute_dtype() {
            candle_core::bail!(
                "parameter `{name}` is asked for as {dtype:?}; this run computes in {:?}",
                self.0.compute_dtype()
            );
        }
        let last = name.rsplit_once('.').map_or(name, |(_, last)| last);
        if last == "running_mean" || last == "running_var" {
            // `batch_norm` makes a `Var` from the tensor. If the tensor is a variable already, both
            // share memory.
            let init = BufferInit::Init(init::from_candle(hint, &shape));
            let options = BufferOptions::dtype(dtype);
            let buffer = self.0.add_buffer(name, shape.into_dims(), init, options, true)?;
            self.0.expose_buffer(&buffer)?;
            return Ok(buffer.tensor().clone());
        }
        if let Some(parameter) = self.find(name) {
            if parameter.global_shape() != shape.dims() {
                candle_core::bail!(
                    "parameter `{name}` has shape {:?} and is asked for as {:?}",
                    parameter.global_shape(),
                    shape.dims()
                );
            }
            return self.share(&parameter);
        }
        let init = init::from_candle(hint, &shape);
        let parameter = self.0.add_parameter(name, shape.into_dims(), init, Origin::VarBuilder)?;
        self.0.expose_tensor(&parameter)?;
        Ok(parameter.compute()?.clone())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.find(name) {
            Some(parameter) => self.share(&parameter),
            None => candle_core::bail!(
                "parameter `{name}` is asked for without a shape; only one that exists can be"
            ),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
}
