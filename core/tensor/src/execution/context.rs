//! A thread's execution context, and the guards that change it.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::GradMode;
use super::dry_run::DryRun;

type Value = Arc<dyn Any + Send + Sync>;

/// At most one value of each type.
#[derive(Clone, Default)]
struct TypeMap(Vec<(TypeId, Value)>);

impl TypeMap {
    const fn new() -> Self {
        Self(Vec::new())
    }

    /// The value of type `T`.
    fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let id = TypeId::of::<T>();
        let (_, value) = self.0.iter().find(|(other, _)| *other == id)?;
        value.clone().downcast().ok()
    }

    /// Replaces the value of type `T`.
    fn insert<T: Any + Send + Sync>(&mut self, value: Arc<T>) {
        self.set(TypeId::of::<T>(), value);
    }

    fn set(&mut self, id: TypeId, value: Value) {
        match self.0.iter_mut().find(|(other, _)| *other == id) {
            Some((_, old)) => *old = value,
            None => self.0.push((id, value)),
        }
    }
}

/// A thread's gradient mode and at most one value of each type, such as the
/// forward scope.
///
/// Clones are cheap and share the values. For example, if a layer on another thread records that a
/// checkpointed unit used a parameter, all threads in the same context see the record.
#[derive(Clone, Default)]
pub struct ExecutionContext {
    grad_mode: GradMode,
    detects_anomalies: bool,
    dry_run: Option<DryRun>,
    values: TypeMap,
}

impl ExecutionContext {
    /// This thread's context, for use later or on another thread.
    pub fn current() -> Self {
        THREAD.with_borrow(|thread| thread.current.clone())
    }

    /// The value of type `T`.
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.values.get()
    }

    /// Adds a value, replacing any value of the same type.
    #[must_use]
    pub fn with<T: Any + Send + Sync>(mut self, value: T) -> Self {
        self.values.insert(Arc::new(value));
        self
    }

    /// Makes this the thread's whole context until the guard is dropped.
    pub fn enter(&self) -> ContextGuard {
        push(Change::All(self.clone()))
    }

    /// Calls `f` in this context.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        let _guard = self.enter();
        f()
    }
}

impl fmt::Debug for ExecutionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutionContext")
            .field("grad_mode", &self.grad_mode)
            .field("values", &self.values.0.len())
            .finish()
    }
}

/// The thread's value of type `T`.
pub fn value<T: Any + Send + Sync>() -> Option<Arc<T>> {
    THREAD.with_borrow(|thread| thread.current.get())
}

/// The thread's value of type `T`. If there is none, makes one and also adds it to every context of
/// this thread that has no value of this type. For state shared by all code in one context, on any
/// thread.
pub fn shared<T: Any + Default + Send + Sync>() -> Arc<T> {
    value().unwrap_or_else(|| {
        let new = Arc::new(T::default());
        THREAD.with_borrow_mut(|thread| {
            thread.base.insert(new.clone());
            thread.current.values.insert(new.clone());
        });
        new
    })
}

/// Makes `value` the thread's value of its type until the guard is dropped.
pub fn enter<T: Any + Send + Sync>(value: T) -> ContextGuard {
    push(Change::Value(TypeId::of::<T>(), Arc::new(value)))
}

/// Undoes one change of a thread's context when dropped. Guards may be dropped in any order;
/// changes of other guards stay.
#[must_use = "what was entered is in force until the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    id: u64,
    /// Makes the guard `!Send`: it undoes a change of the thread that made it.
    _not_send: PhantomData<*const ()>,
}

/// One change of a thread's context.
pub(super) enum Change {
    GradMode(GradMode),
    DetectAnomalies,
    DryRun(DryRun),
    Value(TypeId, Value),
    All(ExecutionContext),
}

impl Change {
    fn apply(&self, context: &mut ExecutionContext, base: &TypeMap) {
        match self {
            Self::GradMode(mode) => context.grad_mode = *mode,
            Self::DetectAnomalies => context.detects_anomalies = true,
            Self::DryRun(run) => context.dry_run = Some(run.clone()),
            Self::Value(id, value) => context.values.set(*id, value.clone()),
            Self::All(all) => {
                context.grad_mode = all.grad_mode;
                context.detects_anomalies = all.detects_anomalies;
                context.dry_run.clone_from(&all.dry_run);
                context.values.clone_from(base);
                all.values.0.iter().for_each(|(id, value)| context.values.set(*id, value.clone()));
            }
        }
    }
}

struct Thread {
    /// `base` with all `changes` applied in order.
    current: ExecutionContext,
    /// Values of [`shared`], in force where no change sets a value of their type.
    base: TypeMap,
    /// Changes whose guards are alive, by the guards' ids.
    changes: Vec<(u64, Change)>,
    next_id: u64,
}

thread_local! {
    static THREAD: RefCell<Thread> = const {
        RefCell::new(Thread {
            current: ExecutionContext {
                grad_mode: GradMode::Enabled,
                detects_anomalies: false,
                dry_run: None,
                values: TypeMap::new(),
            },
            base: TypeMap::new(),
            changes: Vec::new(),
            next_id: 0,
        })
    };
}

/// This thread's gradient mode.
pub(super) fn grad_mode() -> GradMode {
    THREAD.with_borrow(|thread| thread.current.grad_mode)
}

/// Whether layers on this thread check their values for anomalies.
pub(crate) fn detects_anomalies() -> bool {
    THREAD.with_borrow(|thread| thread.current.detects_anomalies)
}

/// Calls `f` with this thread's dry run, if it runs dry.
pub(super) fn dry_run<R>(f: impl FnOnce(Option<&DryRun>) -> R) -> R {
    THREAD.with_borrow(|thread| f(thread.current.dry_run.as_ref()))
}

/// Turns anomaly checks on for this thread until the guard is dropped.
pub(crate) fn detect_anomalies() -> ContextGuard {
    push(Change::DetectAnomalies)
}

/// Makes a change that lasts until the guard is dropped.
pub(super) fn push(change: Change) -> ContextGuard {
    THREAD.with_borrow_mut(|thread| {
        let id = thread.next_id;
        thread.next_id += 1;
        change.apply(&mut thread.current, &thread.base);
        thread.changes.push((id, change));
        ContextGuard { id, _not_send: PhantomData }
    })
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let ended = THREAD.try_with(|thread| {
            let mut thread = thread.borrow_mut();
            let at = thread.changes.iter().rposition(|(id, _)| *id == self.id)?;
            let change = thread.changes.remove(at);
            let base = &thread.base;
            let mut context =
                ExecutionContext { values: base.clone(), ..ExecutionContext::default() };
            thread.changes.iter().for_each(|(_, change)| change.apply(&mut context, base));
            Some((change, std::mem::replace(&mut thread.current, context)))
        });
        // Values are dropped after the borrow has ended: their `drop` may read the context.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use super::*;
    use crate::autograd::{is_grad_enabled, no_grad};

    #[derive(Debug, PartialEq)]
    struct Step(u64);

    fn step() -> Option<u64> {
        value::<Step>().map(|step| step.0)
    }

    #[test]
    fn guards_may_be_dropped_in_any_order() {
        let (first, second, third) = (no_grad(), enter(Step(1)), no_grad());
        let fourth = enter(Step(2));
        drop(first);
        assert!(!is_grad_enabled(), "of the third");
        drop(fourth);
        assert_eq!(step(), Some(1));
        drop(third);
        assert!(is_grad_enabled());
        drop(second);
        assert_eq!(step(), None);
        THREAD.with_borrow(|thread| assert!(thread.changes.is_empty()));
    }

    #[test]
    fn context_moves_to_another_thread() {
        let guards = (no_grad(), enter(Step(1)));
        let context = ExecutionContext::current();
        let with_another = context.clone().with(Step(2));
        drop(guards);
        assert_eq!((is_grad_enabled(), step()), (true, None));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let _inner = enter(Step(3));
                context.run(|| assert_eq!((is_grad_enabled(), step()), (false, Some(1))));
                with_another.run(|| assert_eq!((is_grad_enabled(), step()), (false, Some(2))));
                assert_eq!((is_grad_enabled(), step()), (true, Some(3)));
            });
        });
        assert_eq!(context.get::<Step>().as_deref(), Some(&Step(1)));
    }

    #[test]
    fn shared_value_spans_contexts_and_threads() {
        #[derive(Default)]
        struct Notes;
        let before = ExecutionContext::current();
        let notes = before.run(shared::<Notes>);
        let same = || Arc::ptr_eq(&notes, &shared::<Notes>());
        assert!(same() && before.run(same));
        let context = ExecutionContext::current();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                assert!(!same(), "this thread's own");
                assert!(context.run(same));
            });
        });
    }

    #[test]
    fn context_ends_on_panic() {
        let context = ExecutionContext::default().with(Step(1));
        let in_step = || context.run(|| panic!("in a step"));
        assert!(std::panic::catch_unwind(AssertUnwindSafe(in_step)).is_err());
        assert_eq!(step(), None);
    }

    #[test]
    fn value_drop_may_read_context() {
        struct Reads;
        impl Drop for Reads {
            fn drop(&mut self) {
                assert_eq!(step(), Some(1));
                drop(no_grad());
            }
        }
        let _step = enter(Step(1));
        drop(enter(Reads));
    }
}
