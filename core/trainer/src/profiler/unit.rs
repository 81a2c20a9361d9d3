//! Units that record their forward and backward, and show them to NVIDIA's tools.

use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::recorder::Moment;
use super::{Profiler, SpanKind};
use crate::Result;
use fulgurite_engine::accelerator::ranges::{self, Range};
use fulgurite_engine::execution;
use fulgurite_engine::module::{UnitHandle, UnitHooks};

/// Hooks that wrap the strategy's hooks.
struct ProfiledUnit {
    inner: Option<Arc<dyn UnitHooks>>,
    profiler: Option<Profiler>,
    name: String,
    /// The running forwards, a stack because a unit may call itself.
    forwards: Mutex<Vec<Forward>>,
}

/// A running forward.
struct Forward {
    from: Option<Moment>,
    range: Option<Range>,
}

/// The range of the unit backward that runs in an execution context. The next unit's backward or
/// the end of the phase ends it.
#[derive(Default)]
struct BackwardRange(Mutex<Option<Range>>);

impl BackwardRange {
    fn set(range: Option<Range>) {
        let open = execution::shared::<Self>();
        *open.0.lock().expect("no panic while recording") = range;
    }
}

/// Ends the range of a unit's backward, if one is open.
pub(super) fn end_backward_range() {
    if ranges::is_watched() {
        BackwardRange::set(None);
    }
}

/// Records the forward and backward of these units, for a profiler and for an attached tool.
///
/// Called after the strategy has set its hooks.
pub(crate) fn watch_units(profiler: Option<&Profiler>, units: &[UnitHandle]) -> Result<()> {
    if profiler.is_none() && !ranges::is_watched() {
        return Ok(());
    }
    units.iter().try_for_each(|unit| {
        unit.set_hooks(Arc::new(ProfiledUnit {
            inner: unit.hooks(),
            profiler: profiler.cloned(),
            name: format!("forward {}", unit.path()),
            forwards: Mutex::default(),
        }))
    })
}

impl UnitHooks for ProfiledUnit {
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()> {
        let from = self.profiler.as_ref().map(Profiler::moment);
        let forward = Forward { from, range: ranges::begin(&self.name) };
        self.forwards.lock().expect("no panic while recording").push(forward);
        self.inner.as_ref().map_or(Ok(()), |inner| inner.pre_forward(unit))
    }

    fn post_forward(&self, unit: &UnitHandle) -> Result<()> {
        self.inner.as_ref().map_or(Ok(()), |inner| inner.post_forward(unit))?;
        let forward = self.forwards.lock().expect("no panic while recording").pop();
        let Some(Forward { from, range }) = forward else { return Ok(()) };
        drop(range);
        if let (Some(profiler), Some(from)) = (&self.profiler, from) {
            profiler.span(SpanKind::Unit, self.name.clone(), from);
        }
        Ok(())
    }

    fn pre_backward(&self, unit: &UnitHandle) -> Result<()> {
        if let Some(profiler) = &self.profiler {
            profiler.begin_backward(Some(unit.path()));
        }
        if ranges::is_watched() {
            end_backward_range();
            BackwardRange::set(ranges::begin(&format!("backward {}", unit.path())));
        }
        self.inner.as_ref().map_or(Ok(()), |inner| inner.pre_backward(unit))
    }

    fn casts_inputs(&self) -> bool {
        self.inner.as_ref().is_none_or(|inner| inner.casts_inputs())
    }

    fn output_dtype(&self) -> Option<DType> {
        self.inner.as_ref()?.output_dtype()
    }
}
