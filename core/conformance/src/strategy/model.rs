//! Model and data of the tests: small, with all cases that strategies get wrong.

use candle_core::{Device, Tensor};

use crate::Result;
use fulgurite_engine::module::{Module, ModuleBuilder, Unit};
use fulgurite_engine::parameter::{Init, Parameter};
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_nn::{GeluMlp, Linear, Loss};

const INPUTS: usize = 6;
const OUTPUTS: usize = 3;
/// Not divisible by small world sizes.
const HIDDEN: usize = 7;
/// A parameter that only the last replica uses.
pub(super) const USED_BY_ONE_REPLICA: &str = "sometimes";
/// Micro-batches in a step.
pub(super) const MICRO_BATCHES: usize = 2;

/// The test model.
///
/// It has units, parameters outside of units, and a weight shared by both. It has fewer rows than
/// ranks, a frozen layer, and a parameter that some ranks do not use in a step.
pub(super) struct Probe {
    entry: Linear,
    shared: Linear,
    blocks: Vec<Unit<Block>>,
    fixed: Linear,
    scale: Parameter,
    sometimes: Parameter,
    head: Linear,
}

struct Block {
    mlp: GeluMlp,
    shared: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok((x + self.shared.forward(&self.mlp.forward(x)?)?)?)
    }
}

/// A variant of the model.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Variant {
    /// A parameter `never` that the loss does not depend on.
    pub(super) unused: bool,
    /// Additional outputs, to make the ranks' models differ.
    pub(super) extra_outputs: usize,
}

impl Probe {
    pub(super) fn new(b: &ModuleBuilder, variant: Variant) -> Result<Self> {
        let entry = Linear::with_bias(&b.pp("entry"), INPUTS, HIDDEN)?;
        let shared = Linear::new(&b.pp("shared"), HIDDEN, HIDDEN)?;
        let block = |i: usize| {
            b.unit(&format!("blocks.{i}"), |b| {
                let mlp = GeluMlp::new(&b.pp("mlp"), HIDDEN, HIDDEN + 4)?;
                Ok(Block { mlp, shared: Linear::tied(&b.pp("shared"), shared.weight())? })
            })
        };
        let blocks = (0..3).map(block).collect::<Result<_>>()?;
        if variant.unused {
            b.parameter("never", [HIDDEN, 2], Init::ONES)?;
        }
        Ok(Self {
            blocks,
            fixed: Linear::new(&b.pp("fixed").frozen(), HIDDEN, HIDDEN)?,
            scale: b.parameter("scale", [1], Init::ONES)?,
            sometimes: b.parameter(USED_BY_ONE_REPLICA, [HIDDEN], Init::ZEROS)?,
            head: Linear::with_bias(&b.pp("head"), HIDDEN, OUTPUTS + variant.extra_outputs)?,
            entry,
            shared,
        })
    }

    /// Returns the squared error on one micro-batch, summed over its rows.
    pub(super) fn loss(&self, batch: &Batch) -> Result<Loss> {
        let x = batch.inputs.to_dtype(self.entry.weight().compute_dtype())?;
        let mut x = self.shared.forward(&self.entry.forward(&x)?)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        x = (self.fixed.forward(&x)? + &x)?.broadcast_mul(&self.scale.tensor()?)?;
        if batch.sometimes {
            x = x.broadcast_add(&self.sometimes.tensor()?)?;
        }
        let error = (self.head.forward(&x)?.to_dtype(batch.targets.dtype())? - &batch.targets)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, batch.inputs.dim(0)? as f64))
    }
}

/// Rows of one replica in one micro-batch.
pub(super) struct Batch {
    inputs: Tensor,
    targets: Tensor,
    /// Whether the parameter `sometimes` is used.
    sometimes: bool,
}

impl Batch {
    /// Returns the rows of `replica` of `replicas`; their number depends on replica and
    /// micro-batch.
    ///
    /// Every step has the same batches, so that the loss of a learning model falls.
    pub(super) fn new(
        replica: usize,
        replicas: usize,
        micro_batch: usize,
        device: &Device,
    ) -> Result<Self> {
        let rows = if micro_batch == 0 { 2 + replica } else { 1 + replicas - replica };
        let random = Stream::new(7, Purpose::Sample, "conformance")
            .child((replica * MICRO_BATCHES + micro_batch) as u64);
        let numbers = |start: usize, columns: usize| {
            let mut values = vec![0f64; rows * columns];
            random.fill_normal(start as u64, &mut values);
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            Tensor::from_vec(values, (rows, columns), device)
        };
        Ok(Self {
            inputs: numbers(0, INPUTS)?,
            targets: numbers(rows * INPUTS, OUTPUTS)?,
            sometimes: replica + 1 == replicas,
        })
    }
}
