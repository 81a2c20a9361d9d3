//! Finding an optimizer's state dict in a pickle, and its parameter groups.

use super::optimizer_kind::{Setting, Settings};
use super::pickle::{Heap, Id, Object};
use super::state_dict::{get, keys_of, tensor};

/// The keys under which scripts and Lightning save an optimizer's state dict.
const PLACES: [&str; 3] = ["optimizer", "optimizer_state_dict", "optimizer_states"];

/// An optimizer's state dict.
#[derive(Debug)]
pub(super) struct Found {
    /// Its path, for messages: `optimizer_states[0]`; empty for the root.
    pub(super) place: String,
    pub(super) state: Id,
    pub(super) groups: Id,
    /// Whether the file has only this one.
    pub(super) only: bool,
}

/// Finds the state dict under `keys` or, without keys, at the root or in one of [`PLACES`].
pub(super) fn find(heap: &Heap, keys: &[&str]) -> Result<Found, String> {
    let (mut at, mut place) = (heap.root, String::new());
    for key in keys {
        at = step(heap, at, key).ok_or_else(|| no_such(heap, at, &place, key))?;
        place = joined(&place, key);
    }
    if let Some(found) = found(heap, at, &place) {
        return Ok(found);
    }
    if keys.is_empty() {
        for key in PLACES {
            let Some(inside) = get(heap, at, key) else { continue };
            if let Some(found) = found(heap, inside, key) {
                return Ok(found);
            }
            if let Some(several) = optimizers(heap, inside) {
                return match several {
                    [] => Err(format!("`{key}` has no optimizer's state in it")),
                    [one] => found(heap, *one, &format!("{key}[0]"))
                        .ok_or_else(|| format!("`{key}[0]` is no state of an optimizer")),
                    several => Err(format!(
                        "`{key}` has the states of {} optimizers; say which with \
                         `TorchOptimizer::open_at(path, &[{key:?}, \"0\"])`",
                        several.len()
                    )),
                };
            }
        }
    }
    let has = match place.as_str() {
        "" => format!("It has: {}", keys_of(heap, at).join(", ")),
        place => format!("`{place}` has: {}", keys_of(heap, at).join(", ")),
    };
    Err(format!(
        "there is no optimizer's state in it, which is a dict of `state` and `param_groups`; expected it {} \
         {}. {has}",
        if keys.is_empty() { "there or in" } else { "at" },
        match keys {
            [] => PLACES.map(|key| format!("`{key}`")).join(", "),
            _ => format!("`{place}`"),
        },
    ))
}

fn found(heap: &Heap, at: Id, place: &str) -> Option<Found> {
    let (state, groups) = (get(heap, at, "state")?, get(heap, at, "param_groups")?);
    let only = place.is_empty()
        || PLACES.contains(&place)
        || (place.ends_with("[0]")
            && step(heap, heap.root, place.trim_end_matches("[0]"))
                .and_then(|list| optimizers(heap, list))
                .is_some_and(|list| list.len() == 1));
    Some(Found { place: place.to_owned(), state, groups, only })
}

fn optimizers(heap: &Heap, id: Id) -> Option<&[Id]> {
    heap.sequence(id)
}

fn step(heap: &Heap, at: Id, key: &str) -> Option<Id> {
    get(heap, at, key).or_else(|| {
        let items = heap.sequence(at)?;
        items.get(key.parse::<usize>().ok()?).copied()
    })
}

fn joined(place: &str, key: &str) -> String {
    match (place, key.parse::<usize>()) {
        ("", _) => key.to_owned(),
        (place, Ok(index)) => format!("{place}[{index}]"),
        (place, Err(_)) => format!("{place}.{key}"),
    }
}

fn no_such(heap: &Heap, at: Id, place: &str, key: &str) -> String {
    let of = if place.is_empty() { "it".to_owned() } else { format!("`{place}`") };
    match heap.sequence(at) {
        Some(items) => format!("there is no `{key}` in {of}, a list of {}", items.len()),
        None => format!("there is no `{key}` in {of}; there is: {}", keys_of(heap, at).join(", ")),
    }
}

/// A parameter group of the file.
#[derive(Debug)]
pub(super) struct Group {
    /// The keys of its parameters.
    pub(super) params: Vec<Key>,
    /// Their names, if the optimizer was made of named parameters.
    pub(super) names: Option<Vec<String>>,
    pub(super) settings: Settings,
}

/// The key of a parameter's state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Index(usize),
    Name(String),
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Returns the object as a key.
pub(super) fn key(heap: &Heap, id: Id) -> Option<Key> {
    let name = || heap.text(id).map(|name| Key::Name(name.to_owned()));
    heap.count(id).map(Key::Index).or_else(name)
}

/// Returns the parameter groups; `read` returns the value of a tensor of one element.
pub(super) fn groups(
    heap: &Heap,
    groups: Id,
    read: &dyn Fn(Id) -> Result<f64, String>,
) -> Result<Vec<Group>, String> {
    let groups = heap.sequence(groups).ok_or("is damaged: `param_groups` is no list")?;
    let group = |(index, &group): (usize, &Id)| {
        let damaged = |what: &str| format!("is damaged: its parameter group {index} {what}");
        let items = heap.items(group).ok_or_else(|| damaged("is no dict"))?;
        let params = get(heap, group, "params").and_then(|params| heap.sequence(params));
        let params = params.ok_or_else(|| damaged("has no list of `params`"))?;
        let params: Option<Vec<Key>> = params.iter().map(|&id| key(heap, id)).collect();
        let params =
            params.ok_or_else(|| damaged("has `params` that are no indices and no names"))?;
        let names = get(heap, group, "param_names").and_then(|names| heap.sequence(names));
        let names: Option<Vec<String>> = names
            .and_then(|names| names.iter().map(|&id| heap.text(id).map(str::to_owned)).collect());
        if names.as_ref().is_some_and(|names| names.len() != params.len()) {
            return Err(damaged("has not as many `param_names` as `params`"));
        }
        let options = items.iter().filter_map(|(name, value)| Some((heap.text(*name)?, *value)));
        let options = options.filter(|(name, _)| !["params", "param_names"].contains(name));
        let settings = options
            .map(|(name, value)| Ok((name.to_owned(), setting(heap, value, read)?)))
            .collect::<Result<_, String>>()?;
        Ok(Group { params, names, settings })
    };
    groups.iter().enumerate().map(group).collect()
}

fn setting(
    heap: &Heap,
    id: Id,
    read: &dyn Fn(Id) -> Result<f64, String>,
) -> Result<Setting, String> {
    Ok(match heap.get(id) {
        Object::None => Setting::None,
        Object::Bool(flag) => Setting::Flag(*flag),
        // A learning rate may be a tensor.
        Object::Call { .. } if tensor(heap, id)?.is_some() => Setting::Number(read(id)?),
        _ => match (heap.number(id), heap.sequence(id)) {
            (Some(number), _) => Setting::Number(number),
            (None, Some(items)) => match items.iter().map(|&id| heap.number(id)).collect() {
                Some(numbers) => Setting::Numbers(numbers),
                None => Setting::Other,
            },
            (None, None) => Setting::Other,
        },
    })
}
