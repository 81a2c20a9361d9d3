//! Texts that a decoder writes, token by token.

use candle_core::Tensor;
use fulgurite_engine::module::Unit;
use fulgurite_error::Result;
use fulgurite_nn::KeysValues;

use super::layer::{Context, Layer};

/// Texts that are being written, with the keys and values of what was read and written.
#[derive(Debug)]
pub struct DecodedTexts {
    memory: Tensor,
    mask: Option<Tensor>,
    /// For each layer, of the tokens so far and of the encoder's output.
    layers: Vec<Option<[KeysValues; 2]>>,
}

impl DecodedTexts {
    pub(super) fn new(memory: Tensor, mask: Option<Tensor>, layers: usize) -> Self {
        Self { memory, mask, layers: vec![None; layers] }
    }

    /// The texts, each several times in a row. Before anything is written.
    pub(super) fn repeated(self, times: usize) -> Result<Self> {
        let count = self.len();
        let rows = (0..count).flat_map(|row| std::iter::repeat_n(row as u32, times));
        let rows = Tensor::from_vec(rows.collect(), count * times, self.memory.device())?;
        let memory = self.memory.contiguous()?.index_select(&rows, 0)?;
        let mask = self.mask.map(|mask| mask.contiguous()?.index_select(&rows, 0)).transpose()?;
        Ok(Self { memory, mask, layers: self.layers })
    }

    /// Gives each row what another row has written, in order of `rows`. Both have the same source.
    pub(super) fn take_rows(&mut self, rows: Vec<u32>) -> Result<()> {
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, self.memory.device())?;
        for [own, _] in self.layers.iter_mut().flatten() {
            *own = own.rows(&rows)?;
        }
        Ok(())
    }

    /// Number of texts.
    pub(super) fn len(&self) -> usize {
        self.memory.dims()[0]
    }

    /// Number of tokens of each text so far.
    pub(super) fn written(&self) -> usize {
        self.layers.first().and_then(Option::as_ref).map_or(0, |[own, _]| own.count())
    }

    /// Computes one layer for the next tokens, `[batch, 1, hidden_size]`.
    pub(super) fn compute(
        &mut self,
        index: usize,
        layer: &Unit<Layer>,
        x: Tensor,
        bias: &Tensor,
    ) -> Result<Tensor> {
        let mask = self.mask.clone();
        let inputs = (x, bias.clone(), self.memory.clone(), self.layers[index].take());
        let (y, keys) = layer.call(&inputs, move |layer, (x, bias, memory, earlier)| {
            let (own, of_memory) = match earlier {
                None => (None, layer.keys_of(memory)?),
                Some([own, of_memory]) => (Some(own), of_memory.clone()),
            };
            let context = Context { keys: &of_memory, mask: mask.as_ref() };
            let (y, own) = layer.forward(x, bias, own, None, Some(context))?;
            Ok((y, [own, of_memory]))
        })?;
        self.layers[index] = Some(keys);
        Ok(y)
    }
}
