//! The rotary embedding that the keys of `transformers` 4 and 5 describe.

use std::collections::BTreeMap;

use fulgurite_error::Result;
use fulgurite_nn::{RopeConfig, RopeScaling};
use serde_json::{Map, Value};

use super::reader::Reader;

/// The family's defaults and keys of its rotary embedding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeDefaults<'a> {
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// The base without a key for it.
    pub(crate) theta: f64,
    /// The key of the base in version 4.
    pub(crate) theta_key: &'a str,
    /// The rotated part of a head without a key for it.
    pub(crate) partial: f64,
    /// The key of that part in version 4.
    pub(crate) partial_key: Option<&'a str>,
    /// The type of layer whose table is read, where there is one for each.
    pub(crate) layer_type: Option<&'a str>,
    /// Whether `rope_scaling` of version 4 is about it.
    pub(crate) takes_scaling: bool,
    /// The longest sequence before scaling, where a table's own does not count.
    pub(crate) original_max_positions: Option<usize>,
}

impl RopeDefaults<'_> {
    pub(crate) fn new(head_dim: usize, theta: f64) -> Self {
        Self {
            head_dim,
            theta,
            theta_key: "rope_theta",
            partial: 1.0,
            partial_key: None,
            layer_type: None,
            takes_scaling: true,
            original_max_positions: None,
        }
    }
}

/// The table of version 4.
const SCALING: &str = "rope_scaling";
/// The table of version 5.
const PARAMETERS: &str = "rope_parameters";

/// The types of layers that may have tables of their own.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

fn is_nested(table: &Map<String, Value>) -> bool {
    [FULL, SLIDING].iter().any(|kind| table.contains_key(*kind))
}

/// Keys of a table that say nothing about scaling.
const BASE: &str = "rope_theta";
const PART: &str = "partial_rotary_factor";

/// Keys beside the tables, the key of a table that means the same, and the table's type of layer.
const BESIDE_TABLES: [(&str, &str, &str); 7] = [
    ("rope_theta", BASE, FULL),
    ("rotary_emb_base", BASE, FULL),
    ("global_rope_theta", BASE, FULL),
    ("rope_local_base_freq", BASE, SLIDING),
    ("local_rope_theta", BASE, SLIDING),
    ("partial_rotary_factor", PART, FULL),
    ("rotary_pct", PART, FULL),
];

/// Makes the keys of the rotary embedding in `[model]` (`set`) count over those of `config.json`,
/// whichever version's names either has.
///
/// A table of `[model]` replaces the file's scaling. What it lacks of bases and rotated parts stays
/// as in the file.
pub(super) fn overlay(set: &mut BTreeMap<&'static str, Value>, file: &mut Map<String, Value>) {
    for (key, inner, layer) in BESIDE_TABLES {
        let Some(value) = set.get(key) else { continue };
        for name in [SCALING, PARAMETERS] {
            let table = match file.get_mut(name) {
                Some(Value::Object(tables)) if is_nested(tables) => tables.get_mut(layer),
                table => table,
            };
            if let Some(place) = table.and_then(|table| table.get_mut(inner)) {
                *place = value.clone();
            }
        }
    }
    let named: Vec<&'static str> =
        [SCALING, PARAMETERS].into_iter().filter(|name| set.contains_key(name)).collect();
    if named.is_empty() {
        return;
    }
    let of_file = [SCALING, PARAMETERS].map(|name| file.remove(name));
    let of_file = of_file.into_iter().flatten().find_map(|table| match table {
        Value::Object(table) if !table.is_empty() => Some(table),
        _ => None,
    });
    let (Some(mut old), &[name]) = (of_file, &named[..]) else { return };
    let new = set[name].as_object().cloned().unwrap_or_default();
    match (is_nested(&old), is_nested(&new)) {
        // One scaling over tables for types of layers. Under the other name it is an error.
        (true, false) if !new.is_empty() => {
            if name == SCALING {
                old.insert(FULL.to_owned(), with_base_of(old.get(FULL), Map::new()).into());
                file.insert(PARAMETERS.to_owned(), old.into());
            }
        }
        (true, _) => {
            let tables = [FULL, SLIDING].map(|kind| {
                let new = new.get(kind).and_then(Value::as_object).cloned();
                let table = with_base_of(old.get(kind), new.unwrap_or_default());
                (kind.to_owned(), table.into())
            });
            set.insert(PARAMETERS, Map::from_iter(tables).into());
        }
        (false, true) => {}
        (false, false) => {
            let table = with_base_of(Some(&old.into()), new);
            if !table.is_empty() {
                set.insert(name, table.into());
            }
        }
    }
}

/// The new table, with the old one's base and rotated part if it lacks them.
fn with_base_of(old: Option<&Value>, new: Map<String, Value>) -> Map<String, Value> {
    let kept = [BASE, PART].into_iter().filter_map(|key| {
        let value = old?.get(key)?.clone();
        Some((key.to_owned(), value))
    });
    let mut table: Map<String, Value> = kept.collect();
    table.extend(new);
    table
}

impl<'a> Reader<'a> {
    /// Returns the rotary embedding of a model, or of one type of its layers.
    pub(crate) fn rope(&self, defaults: RopeDefaults<'_>) -> Result<RopeConfig> {
        let theta = self.optional_number(defaults.theta_key)?.unwrap_or(defaults.theta);
        let partial = match defaults.partial_key {
            Some(key) => self.number_or(key, defaults.partial)?,
            None => defaults.partial,
        };
        let (name, values) = self.rope_table(&defaults)?;
        let original = defaults.original_max_positions;
        let table = RopeTable { reader: self, name, values, original };
        let theta = table.number("rope_theta")?.unwrap_or(theta);
        let of_table = table.number("partial_rotary_factor")?;
        // `transformers` has the key in its tables for all models, and some models ignore it.
        if let Some(factor) = of_table.filter(|f| *f != 1.0 && defaults.partial_key.is_none()) {
            let message = format!(
                "`partial_rotary_factor` is {factor}, and a model of type \"{}\" rotates whole heads; leave it out",
                self.model_type()
            );
            return Err(self.wrong(name, message));
        }
        let partial = of_table.unwrap_or(partial);
        if theta <= 0.0 {
            return Err(self.wrong(defaults.theta_key, format!("must be above 0, found {theta:?}")));
        }
        let rotary_dim = (defaults.head_dim as f64 * partial) as usize;
        if !(0.0..=1.0).contains(&partial) || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(self.wrong(
                defaults.partial_key.unwrap_or("head_dim"),
                format!(
                    "the rotary embedding rotates {rotary_dim} elements of heads of {}; it takes an even number of at \
                     least 2",
                    defaults.head_dim
                ),
            ));
        }
        let scaling = table.scaling()?;
        Ok(RopeConfig { head_dim: defaults.head_dim, theta, rotary_dim, scaling })
    }

    /// Returns the key and the table of the rotary embedding, as `transformers` does:
    /// `rope_scaling` of version 4 replaces the one table of `rope_parameters`, and updates the
    /// tables of types of layers.
    fn rope_table(
        &self,
        defaults: &RopeDefaults<'_>,
    ) -> Result<(&'static str, Map<String, Value>)> {
        let scaling = self.table(SCALING)?.filter(|table| !table.is_empty());
        let parameters = self.table(PARAMETERS)?.filter(|table| !table.is_empty());
        if scaling.is_some_and(is_nested) {
            return Err(self.wrong(SCALING, "expected one table, found one for each type of layer"));
        }
        let expected = match (defaults.layer_type, parameters.map(is_nested)) {
            (Some(_), Some(false)) => "expected one table for each type of layer, found one table",
            (None, Some(true)) => "expected one table, found one for each type of layer",
            _ => "",
        };
        if !expected.is_empty() {
            return Err(self.wrong(PARAMETERS, expected));
        }
        let of_layers = |kind| parameters.and_then(|tables| tables.get(kind)?.as_object());
        Ok(match (defaults.layer_type.map(of_layers), scaling) {
            (None, Some(scaling)) => (SCALING, scaling.clone()),
            (None, None) => (PARAMETERS, parameters.cloned().unwrap_or_default()),
            (Some(table), Some(scaling)) if defaults.takes_scaling => {
                let mut table = table.cloned().unwrap_or_default();
                // `type` is the older name.
                table.remove("rope_type");
                table.extend(scaling.clone());
                (SCALING, table)
            }
            (Some(table), _) => (PARAMETERS, table.cloned().unwrap_or_default()),
        })
    }
}

/// The table of a rotary embedding, empty if there is none.
struct RopeTable<'a, 'r> {
    reader: &'r Reader<'a>,
    name: &'static str,
    values: Map<String, Value>,
    original: Option<usize>,
}

impl RopeTable<'_, '_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str) -> fulgurite_error::Error {
        match self.value(key) {
            Some(value) => {
                self.reader.wrong(self.name, format!("`{key}`: expected {expected}, found {value}"))
            }
            None => {
                self.reader.wrong(self.name, format!("`{key}` is missing; expected {expected}"))
            }
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, "a number")),
            },
        }
    }

    fn required(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.wrong(key, "a number"))
    }

    fn factor(&self) -> Result<f64> {
        let factor = self.required("factor")?;
        if factor > 0.0 { Ok(factor) } else { Err(self.wrong("factor", "a number above 0")) }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    fn factors(&self, key: &str) -> Result<Vec<f64>> {
        let list = self.value(key).and_then(Value::as_array);
        let numbers = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        numbers.ok_or_else(|| self.wrong(key, "a list of numbers"))
    }

    /// The longest sequence.
    fn max_positions(&self) -> Result<usize> {
        self.reader.size_or("max_position_embeddings", 2048)
    }

    /// The longest sequence before scaling. The model's key goes before the table's, as in
    /// `transformers`.
    fn original_max_positions(&self) -> Result<usize> {
        let of_model = self.reader.optional_size("original_max_position_embeddings")?;
        if let Some(positions) = of_model.or(self.original) {
            return Ok(positions);
        }
        let key = "original_max_position_embeddings";
        match self.value(key) {
            None => self.max_positions(),
            Some(value) => match value.as_u64().filter(|positions| *positions > 0) {
                Some(positions) => Ok(positions as usize),
                None => Err(self.wrong(key, "an integer of at least 1")),
            },
        }
    }

    fn scaling(&self) -> Result<RopeScaling> {
        let kind = self.value("rope_type").or_else(|| self.value("type"));
        let kind = match kind {
            None => "default",
            Some(Value::String(kind)) => kind.as_str(),
            Some(_) => return Err(self.wrong("rope_type", "a string")),
        };
        Ok(match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.factor()? },
            "dynamic" => RopeScaling::Dynamic {
                factor: self.factor()?,
                max_positions: self.max_positions()?,
            },
            "yarn" => RopeScaling::Yarn {
                factor: self.factor()?,
                original_max_positions: self.original_max_positions()?,
                beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
                attention_factor: self.number("attention_factor")?,
                mscale: self.number("mscale")?,
                mscale_all_dim: self.number("mscale_all_dim")?,
                truncate: self.flag("truncate", true)?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: self.factor()?,
                low_freq_factor: self.required("low_freq_factor")?,
                high_freq_factor: self.required("high_freq_factor")?,
                original_max_positions: self.original_max_positions()?,
            },
            // The older names of Phi-3.
            "longrope" | "su" => RopeScaling::LongRope {
                short_factor: self.factors("short_factor")?,
                long_factor: self.factors("long_factor")?,
                factor: self.number("factor")?,
                max_positions: self.max_positions()?,
                original_max_positions: self.original_max_positions()?,
                attention_factor: self.number("attention_factor")?,
            },
            _ => {
                return Err(self.wrong(
                    "rope_type",
                    "\"default\", \"linear\", \"dynamic\", \"yarn\", \"llama3\" or \"longrope\"",
                ));
            }
        })
    }
}
