//! Units whose forward and backward are recorded.

use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::recorder::Moment;
use super::{Profiler, SpanKind};
use crate::Result;
use fulgurite_engine::module::{UnitHandle, UnitHooks};

/// Hooks around those of the strategy.
struct ProfiledUnit {
    inner: Option<Arc<dyn UnitHooks>>,
    profiler: Profiler,
    name: String,
    /// When the forwards under way began: a unit may call itself.
    begun: Mutex<Vec<Moment>>,
}

impl Profiler {
    /// Records the forward and backward of these units from now on. Called when the strategy has set its
    /// hooks.
    pub(crate) fn watch_units(&self, units: &[UnitHandle]) {
        for unit in units {
            unit.set_hooks(Arc::new(ProfiledUnit {
                inner: unit.hooks(),
                profiler: self.clone(),
                name: format!("forward {}", unit.path()),
                begun: Mutex::default(),
            }));
        }
    }
}

impl UnitHooks for ProfiledUnit {
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()> {
        let now = self.profiler.moment();
        self.begun.lock().expect("no panic while recording").push(now);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.pre_forward(unit))
    }

    fn post_forward(&self, unit: &UnitHandle) -> Result<()> {
        self.inner.as_ref().map_or(Ok(()), |inner| inner.post_forward(unit))?;
        let begun = self.begun.lock().expect("no panic while recording").pop();
        if let Some(from) = begun {
            self.profiler.span(SpanKind::Unit, self.name.clone(), from);
        }
        Ok(())
    }

    fn pre_backward(&self, unit: &UnitHandle) -> Result<()> {
        self.profiler.begin_backward(Some(unit.path()));
        self.inner.as_ref().map_or(Ok(()), |inner| inner.pre_backward(unit))
    }

    fn casts_inputs(&self) -> bool {
        self.inner.as_ref().is_none_or(|inner| inner.casts_inputs())
    }

    fn output_dtype(&self) -> Option<DType> {
        self.inner.as_ref()?.output_dtype()
    }
}
