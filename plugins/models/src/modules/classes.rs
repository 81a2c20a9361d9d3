//! The classes of a model, and of its data.

use std::collections::BTreeMap;

use candle_core::Tensor;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::ConfusionMatrix;
use fulgurite_trainer::trainer::StepContext;
use serde_json::{Map, Value};

use crate::config::{ModelConfig, Reader};

/// The keys of `[model]` that classifications take.
pub(super) const KEYS: &[&str] = &["num_labels", "id2label", "problem_type"];

/// A confusion matrix of more classes is not logged.
const MAX_IN_MATRIX: usize = 100;

/// The classes of the data.
pub(super) struct DataClasses<'a> {
    /// Their names, if they have any.
    pub(super) names: Option<Vec<&'a str>>,
    /// Their number.
    pub(super) count: usize,
    /// The file and line of the first row with a class.
    pub(super) place: &'a dyn Fn(usize) -> Option<String>,
}

/// Returns the names of the model's classes by `id2label`; `None` without names, or with the names
/// `LABEL_0`, `LABEL_1`, … that `transformers` gives.
///
/// # Errors
/// If the key does not name each class from 0 on.
pub(super) fn names(config: &ModelConfig) -> Result<Option<Vec<String>>> {
    let Some(names) = listed(config)? else { return Ok(None) };
    let is_generic = names.iter().enumerate().all(|(i, name)| *name == format!("LABEL_{i}"));
    // A number in `[model]` is for a new head.
    let is_other = config.get("id2label").is_none()
        && number(config)?.is_some_and(|number| number != names.len());
    Ok(Some(names).filter(|_| !is_generic && !is_other))
}

fn listed(config: &ModelConfig) -> Result<Option<Vec<String>>> {
    let reader = Reader::new(config);
    let Some(table) = reader.table("id2label")? else { return Ok(None) };
    let wrong = |message: String| reader.wrong("id2label", message);
    let mut names = BTreeMap::new();
    for (key, value) in table {
        let index: usize = key
            .parse()
            .map_err(|_| wrong(format!("expected class numbers as keys, found {key:?}")))?;
        let name = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        names.insert(index, name);
    }
    match names.keys().copied().eq(0..names.len()) {
        true => {
            Ok(Some(names.into_values().collect()).filter(|names: &Vec<String>| !names.is_empty()))
        }
        false => Err(wrong("expected a name for each class from 0 on".to_owned())),
    }
}

/// The key `num_labels`.
fn number(config: &ModelConfig) -> Result<Option<usize>> {
    Reader::new(config).optional_size("num_labels")
}

/// Number of the model's classes, or of the numbers that it predicts.
///
/// # Errors
/// If the keys are wrong, or none says it.
pub(super) fn count(config: &ModelConfig) -> Result<usize> {
    let listed = listed(config)?.map(|names| names.len());
    number(config)?.or(listed).ok_or_else(|| {
        Error::Config(
            "`model.num_labels`: it is missing, and the number of classes follows from it; set it"
                .to_owned(),
        )
    })
}

/// Gives the model the classes of the data, unless it has its own, which must include them.
///
/// # Errors
/// If the data has a class that the model lacks.
pub(super) fn settle(config: &mut ModelConfig, data: &DataClasses<'_>) -> Result<()> {
    let declared = match number(config)? {
        Some(number) => Some(number),
        None => listed(config)?.map(|names| names.len()),
    };
    let at = |class: usize| (data.place)(class).unwrap_or_else(|| "the data".to_owned());
    let known = names(config)?;
    let final_count = match (&known, &data.names) {
        (Some(known), Some(names)) => {
            let unknown = names.iter().position(|name| !known.iter().any(|known| known == name));
            if let Some(class) = unknown {
                return Err(Error::Data(format!(
                    "{} has the label {:?}, which is none of the model's classes {} (`id2label`); correct the label, or \
                     begin a new head: set model.num_labels to the number of classes, and checkpoint.load.exclude to \
                     [\"classifier\"] (for a decoder [\"score\"])",
                    at(class),
                    names[class],
                    known.join(", ")
                )));
            }
            known.len()
        }
        (None, Some(names)) => {
            if let Some(declared) = declared.filter(|declared| *declared != names.len()) {
                return Err(Error::Config(format!(
                    "`model.num_labels` is {declared}, and the data has {} classes: {}; set it to that, or name the \
                     model's classes with model.id2label",
                    names.len(),
                    names.join(", ")
                )));
            }
            let table: Map<String, Value> = names
                .iter()
                .enumerate()
                .map(|(class, name)| (class.to_string(), Value::from(*name)))
                .collect();
            config.set("id2label", table)?;
            names.len()
        }
        (known, None) => {
            let declared = known.as_ref().map(Vec::len).or(declared);
            if let Some(declared) = declared.filter(|declared| data.count > *declared) {
                let class = data.count - 1;
                return Err(Error::Data(format!(
                    "{} has the class {class}, and the model has {declared} classes, from 0 on (`model.num_labels`)",
                    at(class)
                )));
            }
            declared.unwrap_or(data.count)
        }
    };
    config.set("num_labels", final_count)
}

/// Logs `val_confusion`, unless there are more than [`MAX_IN_MATRIX`] classes.
///
/// # Errors
/// As [`ConfusionMatrix::of`].
pub(super) fn log_confusion(
    ctx: &mut StepContext,
    names: Option<&[String]>,
    (logits, targets): (&Tensor, &Tensor),
) -> Result<()> {
    if logits.dims().last().is_some_and(|classes| *classes <= MAX_IN_MATRIX) {
        let matrix = ConfusionMatrix::of(logits, targets)?;
        let matrix = names.map_or(Ok(matrix.clone()), |names| matrix.with_names(names))?;
        ctx.log("val_confusion", matrix);
    }
    Ok(())
}

/// The model's class of each class of the data.
#[derive(Debug, Default)]
pub(super) struct ClassMap(Option<Vec<u32>>);

impl ClassMap {
    /// The map between classes of equal names; classes without names have equal numbers.
    pub(super) fn new(model: Option<&[String]>, data: Option<&[&str]>) -> Self {
        let (Some(model), Some(data)) = (model, data) else { return Self(None) };
        let class = |name: &&str| model.iter().position(|known| known == name).map(|i| i as u32);
        Self(data.iter().map(class).collect())
    }

    /// The model's class; a negative one is ignored and stays.
    pub(super) fn of(&self, class: i64) -> i64 {
        match (&self.0, usize::try_from(class)) {
            (Some(map), Ok(index)) => map.get(index).map_or(class, |class| i64::from(*class)),
            _ => class,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_matched_by_name() {
        let model = ["pos", "neg", "other"].map(str::to_owned);
        let map = ClassMap::new(Some(&model), Some(&["neg", "pos"]));
        assert_eq!([0, 1, -100].map(|class| map.of(class)), [1, 0, -100]);
        let same = ClassMap::new(Some(&model), None);
        assert_eq!([0, 2].map(|class| same.of(class)), [0, 2]);
    }
}
