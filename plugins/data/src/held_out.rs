//! Rows of a source that are held out for validation.

use fulgurite_engine::random::{Purpose, Stream};

use crate::text_data::nothing_to_validate;

/// The rows of a source, in two parts.
pub(crate) struct HeldOut<T> {
    pub(crate) train: Vec<T>,
    pub(crate) validation: Vec<T>,
    /// That the fraction rounds to zero rows.
    pub(crate) warning: Option<String>,
}

/// Holds out a fraction of the rows, chosen at random, the same in every run. `purpose` is the name
/// of the random numbers.
pub(crate) fn hold_out<T>(rows: Vec<T>, fraction: f64, purpose: &str) -> HeldOut<T> {
    let total = rows.len() as u64;
    let count = (total as f64 * fraction) as u64;
    let warning = (count == 0 && fraction > 0.0).then(|| nothing_to_validate(fraction, total));
    let order = Stream::new(0, Purpose::Shuffle, purpose);
    let (mut train, mut validation) = (Vec::new(), Vec::new());
    for (i, row) in rows.into_iter().enumerate() {
        let is_chosen = order.permute(total, i as u64) < count;
        if is_chosen { &mut validation } else { &mut train }.push(row);
    }
    HeldOut { train, validation, warning }
}
