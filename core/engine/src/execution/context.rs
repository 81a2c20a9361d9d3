//! The context of a thread, and what changes it.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::GradMode;

type Value = Arc<dyn Any + Send + Sync>;

/// At most one value of each type.
#[derive(Clone, Default)]
struct TypeMap(Vec<(TypeId, Value)>);

impl TypeMap {
    const fn new() -> Self {
        Self(Vec::new())
    }

    /// The value of a type.
    fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let id = TypeId::of::<T>();
        let (_, value) = self.0.iter().find(|(other, _)| *other == id)?;
        value.clone().downcast().ok()
    }

    /// Puts a value, which is a `T`, in the place of the one of that type.
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

/// What is in force on a thread: the gradient mode, and at most one value of each type that code
/// further down reads, such as the [forward scope](crate::module::ForwardScope).
///
/// Cloning is cheap and shares the values, so what a layer notes on a worker thread, for instance
/// that a checkpointed unit used a parameter, is noted for all threads in the same context.
#[derive(Clone, Default)]
pub struct ExecutionContext {
    grad_mode: GradMode,
    values: TypeMap,
}

impl ExecutionContext {
    /// What is in force on this thread, to be entered on another or later.
    pub fn current() -> Self {
        THREAD.with_borrow(|thread| thread.current.clone())
    }

    /// The value of a type.
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.values.get()
    }

    /// The same context with this value in place of the one of its type, if there is one.
    #[must_use]
    pub fn with<T: Any + Send + Sync>(mut self, value: T) -> Self {
        self.values.insert(Arc::new(value));
        self
    }

    /// Puts this context in force on this thread, in place of all that was, until the guard is
    /// dropped.
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

/// The value of a type that is in force on this thread.
pub fn value<T: Any + Send + Sync>() -> Option<Arc<T>> {
    THREAD.with_borrow(|thread| thread.current.get())
}

/// The value of a type that is in force on this thread. If there is none, a new one is in force from
/// now on in all contexts of the thread that have none of their own: for what code that computes in one
/// context tells each other, on whatever threads.
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

/// Puts a value in force on this thread, in place of the one of its type, until the guard is dropped.
pub fn enter<T: Any + Send + Sync>(value: T) -> ContextGuard {
    push(Change::Value(TypeId::of::<T>(), Arc::new(value)))
}

/// Ends one change of a thread's context. Guards may be dropped in any order: what the others changed
/// stays in force.
#[must_use = "what was entered is in force until the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    id: u64,
    /// A guard ends a change of the thread that it was made on.
    _not_send: PhantomData<*const ()>,
}

/// One change of a thread's context.
pub(super) enum Change {
    GradMode(GradMode),
    Value(TypeId, Value),
    All(ExecutionContext),
}

impl Change {
    fn apply(&self, context: &mut ExecutionContext, base: &TypeMap) {
        match self {
            Self::GradMode(mode) => context.grad_mode = *mode,
            Self::Value(id, value) => context.values.set(*id, value.clone()),
            Self::All(all) => {
                context.grad_mode = all.grad_mode;
                context.values.clone_from(base);
                all.values.0.iter().for_each(|(id, value)| context.values.set(*id, value.clone()));
            }
        }
    }
}

struct Thread {
    /// All of `changes`, one after the other, and what they leave of `base`.
    current: ExecutionContext,
    /// Values that are in force where no change brings one of their type.
    base: TypeMap,
    /// Those whose guards live, with the numbers of the guards.
    changes: Vec<(u64, Change)>,
    next_id: u64,
}

thread_local! {
    static THREAD: RefCell<Thread> = const {
        RefCell::new(Thread {
            current: ExecutionContext { grad_mode: GradMode::Enabled, values: TypeMap::new() },
            base: TypeMap::new(),
            changes: Vec::new(),
            next_id: 0,
        })
    };
}

/// The gradient mode in force on this thread.
pub(super) fn grad_mode() -> GradMode {
    THREAD.with_borrow(|thread| thread.current.grad_mode)
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
        // Values are dropped when the thread's context can be used again: their own code may read it.
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
    fn a_context_is_entered_on_another_thread_and_ends_there() {
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
    fn a_shared_value_is_the_same_in_nested_contexts_and_on_threads_that_enter_them() {
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
    fn a_context_ends_when_what_runs_in_it_panics() {
        let context = ExecutionContext::default().with(Step(1));
        let in_step = || context.run(|| panic!("in a step"));
        assert!(std::panic::catch_unwind(AssertUnwindSafe(in_step)).is_err());
        assert_eq!(step(), None);
    }

    #[test]
    fn a_value_may_read_the_context_when_it_is_dropped() {
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
