//! Units that record their forward and backward, and show them to NVIDIA's tools.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::recorder::Moment;
use super::{Profiler, SpanKind};
use crate::Result;
use fulgurite_engine::accelerator::ranges::{self, Range};
use fulgurite_engine::module::{UnitHandle, UnitHooks};

/// Hooks that wrap the strategy's hooks.
struct ProfiledUnit {
    inner: Option<Arc<dyn UnitHooks>>,
    profiler: Option<Profiler>,
    name: String,
    /// Starts of the running forwards, a stack because a unit may call itself.
    begun: Mutex<Vec<Moment>>,
}

thread_local! {
    /// The ranges of the running forwards.
    static FORWARD: RefCell<Vec<Option<Range>>> = const { RefCell::new(Vec::new()) };
    /// The range of the running unit backward. The next unit's backward or the end of the phase
    /// ends it.
    static BACKWARD: RefCell<Option<Range>> = const { RefCell::new(None) };
}

/// Ends the range of a unit's backward, if one is open.
pub(super) fn end_backward_range() {
    BACKWARD.with_borrow_mut(|range| *range = None);
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
            begun: Mutex::default(),
        }))
    })
}

impl UnitHooks for ProfiledUnit {
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()> {
        if let Some(profiler) = &self.profiler {
            let now = profiler.moment();
            self.begun.lock().expect("no panic while recording").push(now);
        }
        FORWARD.with_borrow_mut(|under_way| under_way.push(ranges::begin(&self.name)));
        self.inner.as_ref().map_or(Ok(()), |inner| inner.pre_forward(unit))
    }

    fn post_forward(&self, unit: &UnitHandle) -> Result<()> {
        self.inner.as_ref().map_or(Ok(()), |inner| inner.post_forward(unit))?;
        drop(FORWARD.with_borrow_mut(Vec::pop));
        let begun = self.begun.lock().expect("no panic while recording").pop();
        if let (Some(profiler), Some(from)) = (&self.profiler, begun) {
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
            let range = ranges::begin(&format!("backward {}", unit.path()));
            BACKWARD.with_borrow_mut(|under_way| *under_way = range);
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
