//! [`TorchOptimizer`]: the state of a PyTorch optimizer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};

use super::archive::Archive;
use super::optimizer_groups::{self as groups, Found, Group, Key};
use super::optimizer_kind::{Kind, Setting, Settings, find};
use super::pickle::{self, Heap, Id, Object};
use super::rekeyed::RekeyedOptimizer;
use super::source::TorchSource;
use super::state_dict::{TensorView, get, tensor, tensors};
use crate::{Error, RenamedSource, Result, TensorSource, optimizer_key};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::optim::ParamGroup;
use fulgurite_engine::shard::Region;

/// The state of a PyTorch optimizer, in a file of `torch.save`.
///
/// It is an `AdamW`, `Adam`, `SGD`, `RMSprop` or `Adagrad` of `torch.optim`.
///
/// `optimizer.state_dict()` numbers the parameters instead of naming them. [`rekey`](Self::rekey)
/// gives them their names, as `FSDP.rekey_optim_state_dict` does. Opening reads the pickle and the
/// numbers of steps; it executes nothing. Not collective.
///
/// ```no_run
/// use fulgurite_core::checkpoint::TorchOptimizer;
/// # fn load() -> fulgurite_core::Result<()> {
/// let optimizer = TorchOptimizer::open("last.ckpt")?;
/// // The order of `torch.optim.AdamW(model.parameters())`, for a model without buffers.
/// let names: Vec<String> = optimizer.model_names().map(str::to_owned).collect();
/// let state = optimizer.rekey(&names)?;
/// assert!(state.param_groups()[0].options["lr"] > 0.0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TorchOptimizer {
    path: PathBuf,
    kind: Kind,
    groups: Vec<TorchGroup>,
    /// By [`optimizer_key`] of the parameters' keys.
    tensors: TorchSource,
    /// The keys of parameters with state.
    has_state: BTreeSet<Key>,
    steps: u64,
    /// The model's tensors in the same file, in its order.
    model: Vec<(String, Vec<usize>)>,
    warning: Option<String>,
}

/// A parameter group, with its options under our names.
#[derive(Debug)]
struct TorchGroup {
    params: Vec<Key>,
    names: Option<Vec<String>>,
    options: BTreeMap<String, f64>,
}

impl TorchOptimizer {
    /// Opens the optimizer's state dict in a file.
    ///
    /// The state dict is the saved object, or lies in it under `optimizer`, `optimizer_state_dict`
    /// or, as in Lightning's `.ckpt`, as the only item of `optimizer_states`.
    ///
    /// # Errors
    /// If there is not exactly one. If it is another kind of optimizer, or has unsupported options
    /// (`amsgrad`, `maximize`, `betas` by group). If a parameter lacks its moments, or parameters
    /// have done different numbers of steps.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(path, &[])
    }

    /// Opens the state dict under these nested keys; indices stand for list items.
    ///
    /// An example is `["optimizer_states", "1"]`.
    ///
    /// # Errors
    /// As [`open`](Self::open); if a key does not exist, naming the existing keys.
    pub fn open_at(path: impl AsRef<Path>, keys: &[&str]) -> Result<Self> {
        let path = path.as_ref();
        let archive = Archive::read(path)?;
        let heap =
            pickle::parse(&archive.pickle).map_err(|message| Error::checkpoint(path, message))?;
        let file = File { path, archive: &archive, heap: &heap };
        let found =
            groups::find(&heap, keys).map_err(|message| Error::checkpoint(path, message))?;
        file.optimizer(&found).map_err(|message| {
            let place = match found.place.as_str() {
                "" => "the optimizer's state".to_owned(),
                place => format!("the optimizer's state in `{place}`"),
            };
            Error::checkpoint(path, format!("{place}: {message}"))
        })
    }

    /// Returns the number of parameters in all groups.
    pub fn len(&self) -> usize {
        self.groups.iter().map(|group| group.params.len()).sum()
    }

    /// Whether it has no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of parameters in each group.
    pub fn group_sizes(&self) -> Vec<usize> {
        self.groups.iter().map(|group| group.params.len()).collect()
    }

    /// Returns the file's own names of the optimizer's parameters, in their order.
    ///
    /// A file has them if the optimizer was made with `AdamW(model.named_parameters())`, or from
    /// `get_optimizer_state_dict` and FSDP.
    pub fn names(&self) -> Option<Vec<&str>> {
        let mut names = Vec::with_capacity(self.len());
        for group in &self.groups {
            for (i, key) in group.params.iter().enumerate() {
                names.push(match (key, &group.names) {
                    (Key::Name(name), _) => name.as_str(),
                    (Key::Index(_), Some(names)) => names[i].as_str(),
                    (Key::Index(_), None) => return None,
                });
            }
        }
        Some(names)
    }

    /// Returns the names of the model's state dict in the same file, in its order.
    ///
    /// Tied names occur once. Without a state dict there are no names. The order is
    /// `model.parameters()`, but with the persistent buffers among them.
    pub fn model_names(&self) -> impl Iterator<Item = &str> {
        self.model.iter().map(|(name, _)| name.as_str())
    }

    /// Renames the state to the file's own [`names`](Self::names).
    ///
    /// # Errors
    /// If the file has no names, as with `AdamW(model.parameters())`; as [`rekey`](Self::rekey).
    pub fn by_name(self) -> Result<RekeyedOptimizer> {
        let names = self.names().map(|names| names.into_iter().map(str::to_owned).collect());
        let names: Vec<String> = names.ok_or_else(|| {
            self.fail(format!(
                "its {} parameters are numbered and have no names; give them with `rekey`",
                self.len()
            ))
        })?;
        self.rekey(&names)
    }

    /// Renames the state to the parameters' names.
    ///
    /// `names` are in the order in which the optimizer numbers its parameters:
    /// `model.named_parameters()`, or with several groups one group after the other. If the state
    /// dict has names already, `names` must be the same, in any order.
    ///
    /// Names are compared with the model's state dict, if it is in the same file.
    ///
    /// # Errors
    /// If there are more or fewer names than parameters, or one twice; if the state of a parameter
    /// does not have the shape of the tensor of its name.
    pub fn rekey<S: AsRef<str>>(self, names: &[S]) -> Result<RekeyedOptimizer> {
        let given: BTreeSet<&str> = names.iter().map(AsRef::as_ref).collect();
        if given.len() != names.len() {
            let mut seen = BTreeSet::new();
            let twice = names.iter().map(AsRef::as_ref).find(|name| !seen.insert(*name));
            let twice = twice.unwrap_or_default();
            return Err(self.fail(format!("the name `{twice}` was given twice")));
        }
        let by_key = self.names_by_key(names, &given)?;
        for (key, name) in by_key.iter().filter(|(key, _)| self.has_state.contains(key)) {
            self.check_shape(key, name)?;
        }
        let Self { kind, groups, tensors, has_state, steps, warning, .. } = self;
        let by_text: BTreeMap<String, &String> =
            by_key.iter().map(|(key, name)| (key.to_string(), name)).collect();
        let tensors = RenamedSource::with(tensors, |old| {
            let parsed = crate::parse_optimizer_key(old);
            let renamed =
                parsed.and_then(|(key, state)| Some(vec![optimizer_key(by_text.get(key)?, state)]));
            renamed.ok_or_else(|| Error::other(format!("the tensor `{old}` is of no parameter")))
        })?;
        let named = |group: TorchGroup| ParamGroup {
            params: group.params.iter().map(|key| by_key[key].clone()).collect(),
            options: group.options,
        };
        let groups = groups.into_iter().map(named).collect();
        let buffers = !has_state.is_empty() && !kind.states().is_empty();
        Ok(RekeyedOptimizer::new(tensors, kind, groups, steps, buffers, warning))
    }

    fn fail(&self, message: String) -> Error {
        Error::checkpoint(&self.path, message)
    }

    /// Returns the name of each parameter.
    fn names_by_key<S: AsRef<str>>(
        &self,
        names: &[S],
        given: &BTreeSet<&str>,
    ) -> Result<BTreeMap<Key, String>> {
        let keys: Vec<&Key> = self.groups.iter().flat_map(|group| &group.params).collect();
        let own: BTreeSet<&str> = keys
            .iter()
            .filter_map(|key| match key {
                Key::Name(name) => Some(name.as_str()),
                Key::Index(_) => None,
            })
            .collect();
        if own.len() == keys.len() {
            let list = |names: Vec<&&str>| {
                let more = if names.len() > 5 { ", …" } else { "" };
                let names: Vec<String> = names.iter().take(5).map(|n| format!("`{n}`")).collect();
                format!("{}{more}", names.join(", "))
            };
            let without: Vec<_> = given.difference(&own).collect();
            let others: Vec<_> = own.difference(given).collect();
            if !without.is_empty() {
                return Err(self.fail(format!(
                    "its parameters are by name, and it has none called {}; it has {}",
                    list(without),
                    list(own.iter().collect())
                )));
            }
            if !others.is_empty() {
                return Err(self.fail(format!(
                    "its parameters are by name, and it has more than the names given: {}",
                    list(others)
                )));
            }
            return Ok(keys.into_iter().map(|key| (key.clone(), key.to_string())).collect());
        }
        if names.len() != keys.len() {
            let sizes: Vec<String> = self.group_sizes().iter().map(usize::to_string).collect();
            let what = match sizes.as_slice() {
                [_] => String::new(),
                sizes => format!(" in groups of {}", sizes.join(" and ")),
            };
            return Err(self.fail(format!(
                "its optimizer has {} parameters{what}, and {} names were given; they are those of the \
                 parameters that the optimizer was made with, without buffers, frozen ones only if it was given \
                 them, tied ones once, and group by group",
                keys.len(),
                names.len()
            )));
        }
        let name = |key: &Key| match key {
            Key::Index(index) => {
                names.get(*index).map(|name| (key.clone(), name.as_ref().to_owned()))
            }
            Key::Name(_) => None,
        };
        let by_key: Option<BTreeMap<_, _>> = keys.into_iter().map(name).collect();
        by_key.filter(|by_key| by_key.len() == names.len()).ok_or_else(|| {
            self.fail(format!("its parameters are not numbered from 0 to {}", names.len() - 1))
        })
    }

    /// Compares the shapes of a parameter's state with the model's tensor of this name.
    fn check_shape(&self, key: &Key, name: &str) -> Result<()> {
        let Some((_, expected)) = self.model.iter().find(|(known, _)| known == name) else {
            return Ok(());
        };
        for state in self.kind.states() {
            let Some(info) = self.tensors.info(&optimizer_key(&key.to_string(), state)) else {
                continue;
            };
            if info.shape != *expected {
                let message = format!(
                    "the parameter {key} would be `{name}`, which is {expected:?} in the model's state dict, \
                     and its `{state}` is {:?}: the names are in another order than the optimizer's \
                     parameters",
                    info.shape
                );
                return Err(self.fail(message));
            }
        }
        Ok(())
    }
}

/// A file that was read.
struct File<'a> {
    path: &'a Path,
    archive: &'a Archive,
    heap: &'a Heap,
}

impl File<'_> {
    fn optimizer(&self, found: &Found) -> Result<TorchOptimizer, String> {
        let heap = self.heap;
        let read = |id: Id| self.number(id);
        let groups = groups::groups(heap, found.groups, &read)?;
        let settings: Vec<_> = groups.iter().map(|group| &group.settings).collect();
        let kind = Kind::of(&settings)?;
        // Older versions do not distinguish Adam and AdamW; without decay they are equal.
        let ambiguous = |settings: &&Settings| {
            find(settings, "decoupled_weight_decay").is_none()
                && find(settings, "weight_decay") != Some(&Setting::Number(0.0))
        };
        let warning = (kind == Kind::AdamW && settings.iter().any(ambiguous)).then(|| {
            "this version of torch does not say whether the state is of AdamW or of Adam; it is taken \
             for AdamW's, whose weight decay is not added to the gradient"
                .to_owned()
        });
        let groups = groups
            .into_iter()
            .enumerate()
            .map(|(index, Group { params, names, settings })| {
                Ok(TorchGroup { params, names, options: kind.options(index, &settings)? })
            })
            .collect::<Result<Vec<_>, String>>()?;
        kind.check_common(groups.iter().map(|group| &group.options))?;
        let known: BTreeSet<&Key> = groups.iter().flat_map(|group| &group.params).collect();
        let state = heap.items(found.state).unwrap_or_default();
        let (mut views, mut has_state, mut steps) = (Vec::new(), BTreeSet::new(), None);
        for (id, entry) in state {
            let key =
                groups::key(heap, *id).ok_or("it has a state that is by no index and no name")?;
            if !known.contains(&key) {
                return Err(format!("it has the state of a parameter {key}, which no group has"));
            }
            let own = self.state_of(kind, &key, *entry)?;
            if own.is_empty() {
                continue;
            }
            views.extend(own);
            if kind.counts_steps() {
                let found = get(heap, *entry, "step")
                    .ok_or_else(|| format!("the state of parameter {key} has no `step`"))?;
                let found = count(self.number(found)?)?;
                match &steps {
                    Some((other, first)) if *first != found => {
                        return Err(format!(
                            "parameter {other} has done {first} steps and parameter {key} {found}; optimizers \
                             here count one number for all"
                        ));
                    }
                    _ => steps = Some((key.clone(), found)),
                }
            }
            has_state.insert(key);
        }
        if has_state.is_empty() && !kind.states().is_empty() {
            return Err(
                "it has no state of any parameter: its optimizer had done no step".to_owned()
            );
        }
        // SGD's state does not count steps; Lightning counts the steps of all optimizers together.
        let global = get(heap, heap.root, "global_step").filter(|_| found.only);
        let steps = match (steps, global.and_then(|id| heap.count(id))) {
            (Some((_, steps)), _) => steps,
            (None, Some(global)) => global as u64,
            (None, None) => u64::from(!has_state.is_empty()),
        };
        let tensors = TorchSource::of_views(self.path, self.archive, views)
            .map_err(|error| error.to_string())?;
        let (path, model) = (self.path.to_owned(), self.model());
        Ok(TorchOptimizer { path, kind, groups, tensors, has_state, steps, model, warning })
    }

    /// Returns the state tensors of a parameter; empty if it had no gradient yet.
    fn state_of(
        &self,
        kind: Kind,
        key: &Key,
        entry: Id,
    ) -> Result<Vec<(String, TensorView)>, String> {
        let mut own = Vec::new();
        let mut missing = Vec::new();
        for name in kind.states() {
            let found = get(self.heap, entry, name);
            let found = found.filter(|id| *self.heap.get(*id) != Object::None);
            let view = found.map(|id| tensor(self.heap, id)).transpose();
            match view
                .map_err(|message| format!("`{name}` of parameter {key} {message}"))?
                .flatten()
            {
                Some(view) => own.push((optimizer_key(&key.to_string(), name), view)),
                None => missing.push(format!("`{name}`")),
            }
        }
        let has: Vec<String> = self
            .heap
            .items(entry)
            .unwrap_or_default()
            .iter()
            .filter_map(|(name, _)| self.heap.text(*name))
            .map(|name| format!("`{name}`"))
            .collect();
        let never = !kind.counts_steps() || has.is_empty();
        if missing.is_empty() || (own.is_empty() && never) {
            return Ok(own);
        }
        Err(format!(
            "the state of parameter {key} has no {}; it has {}",
            missing.join(" and no "),
            has.join(", ")
        ))
    }

    /// Returns a number, or the value of a tensor of one element.
    fn number(&self, id: Id) -> Result<f64, String> {
        if let Some(number) = self.heap.number(id) {
            return Ok(number);
        }
        let Some(view) = tensor(self.heap, id)? else {
            return Err("it has a value that is no number where there should be one".to_owned());
        };
        let shape = view.shape.clone();
        if shape.iter().product::<usize>() != 1 {
            return Err(format!(
                "it has a tensor of shape {shape:?} where there should be a number"
            ));
        }
        let read = || {
            let source =
                TorchSource::of_views(self.path, self.archive, vec![("number".to_owned(), view)])?;
            let value = source.read("number", &Region::full(&shape), DType::F64, &Device::Cpu)?;
            storage::with_bytes(&value, |bytes| {
                bytes.try_into().map_or(f64::NAN, f64::from_ne_bytes)
            })
        };
        read().map_err(|error| error.to_string())
    }

    /// Returns the model's state dict, tied tensors once; empty if the file has none.
    fn model(&self) -> Vec<(String, Vec<usize>)> {
        let mut seen = BTreeSet::new();
        let tensors = tensors(self.heap, &[]).unwrap_or_default().into_iter();
        tensors
            .filter_map(|(name, tensor)| Some((name, tensor.ok()?)))
            .filter(|(_, view)| {
                seen.insert((
                    view.storage.clone(),
                    view.offset,
                    view.shape.clone(),
                    view.strides.clone(),
                ))
            })
            .map(|(name, view)| (name, view.shape))
            .collect()
    }
}

fn count(steps: f64) -> Result<u64, String> {
    if steps >= 0.0 && steps.fract() == 0.0 {
        return Ok(steps as u64);
    }
    Err(format!("it has a `step` of {steps}, which is no number of steps"))
}
