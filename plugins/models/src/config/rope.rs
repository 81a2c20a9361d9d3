//! The rotary embedding that the keys of `transformers` 4 and 5 describe.

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
        }
    }
}

/// The types of layers that may have tables of their own.
const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

impl<'a> Reader<'a> {
    /// Returns the rotary embedding of a model, or of one type of its layers.
    ///
    /// The table `rope_scaling` of version 4 overrides `rope_parameters`, as in `transformers`.
    pub(crate) fn rope(&self, defaults: RopeDefaults<'_>) -> Result<RopeConfig> {
        let theta = self.optional_number(defaults.theta_key)?.unwrap_or(defaults.theta);
        let partial = match defaults.partial_key {
            Some(key) => self.number_or(key, defaults.partial)?,
            None => defaults.partial,
        };
        let scaling = self.table("rope_scaling")?.filter(|table| !table.is_empty());
        let scaling = scaling.filter(|_| defaults.takes_scaling);
        let parameters = self.table("rope_parameters")?.filter(|table| !table.is_empty());
        let (name, table) = match (scaling, parameters) {
            (Some(table), _) => ("rope_scaling", Some(table)),
            (None, table) => ("rope_parameters", table),
        };
        let nested = table.filter(|table| LAYER_TYPES.iter().any(|kind| table.contains_key(*kind)));
        let table = match (nested, defaults.layer_type) {
            (None, Some(_)) if name == "rope_parameters" && table.is_some() => {
                return Err(
                    self.wrong(name, "expected one table for each type of layer, found one table")
                );
            }
            (None, _) => table,
            (Some(tables), Some(kind)) => tables.get(kind).and_then(Value::as_object),
            (Some(_), None) => {
                return Err(
                    self.wrong(name, "expected one table, found one for each type of layer")
                );
            }
        };
        let table = RopeTable { reader: self, name, table };
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
}

/// The table of a rotary embedding, if there is one.
struct RopeTable<'a, 'r> {
    reader: &'r Reader<'a>,
    name: &'static str,
    table: Option<&'a Map<String, Value>>,
}

impl<'a> RopeTable<'a, '_> {
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.table.and_then(|table| table.get(key)).filter(|value| !value.is_null())
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
        if let Some(positions) = self.reader.optional_size("original_max_position_embeddings")? {
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
