//! Small data sets, and a sink that records events.

#![allow(unreachable_pub, reason = "what other modules use reads best with plain `pub`")]

use std::sync::{Arc, Mutex};

use fulgurite::core::trainer::{Event, EventSink, RunStatus};
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};

/// Samples in each split of [`Numbers`].
pub const SAMPLES: u64 = 7;

/// A table without keys.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NoKeys {}

/// The values 0 to 6, divided by 10; plus 1 for tests, plus 2 for predictions.
pub struct Numbers;

impl DataModule for Numbers {
    type Config = NoKeys;
    type Batch = Tensor;

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        2
    }

    fn len(&self, _: Split) -> u64 {
        SAMPLES
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let shift = match split {
            Split::Test => 1.0,
            Split::Predict => 2.0,
            _ => 0.0,
        };
        let numbers: Vec<f32> = indices.iter().map(|&i| shift + i as f32 / 10.0).collect();
        Ok(Tensor::from_vec(numbers, (indices.len(), 1), device)?)
    }
}

/// Features per row of [`Rows`].
pub const WIDTH: usize = 8;

/// 24 rows in batches of 4.
pub struct Rows;

impl DataModule for Rows {
    type Config = NoKeys;
    type Batch = Tensor;

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        4
    }

    fn len(&self, _: Split) -> u64 {
        24
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let value = |row: u64, column| ((row * 31 + column * 7) % 23) as f32 / 23.0 - 0.5;
        let rows = indices.iter().flat_map(|&row| (0..WIDTH as u64).map(move |c| value(row, c)));
        Ok(Tensor::from_vec(rows.collect::<Vec<_>>(), (indices.len(), WIDTH), device)?)
    }
}

/// All events, in order.
#[derive(Clone, Default)]
pub struct Events(pub Arc<Mutex<Vec<Event>>>);

impl EventSink for Events {
    fn event(&mut self, event: &Event) -> Result<()> {
        self.0.lock().unwrap().push(event.clone());
        Ok(())
    }
    fn finish(&mut self, _: RunStatus) -> Result<()> {
        Ok(())
    }
}
