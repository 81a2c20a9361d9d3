//! Parameters that are trained by another optimizer than the one whose turn it is.

use super::Parameter;

/// While it lives, no gradient is computed for the parameters it was made of, and forwards record none:
/// they take part as constants, as after `toggle_optimizer` in PyTorch Lightning. Its drop restores what was
/// before. All ranks pause the same parameters, before the forward and until after the backward.
///
/// What a candle layer computes with a parameter's tensor that it holds itself (`var_builder`) is recorded
/// all the same, and its gradient dropped if it arrives while the parameter is paused.
#[must_use = "gradients are computed again as soon as it is dropped"]
#[derive(Debug)]
pub struct PausedGradients(Vec<Parameter>);

impl PausedGradients {
    /// Pauses the parameters; those that are paused already stay so when it is dropped.
    pub fn of<'a>(parameters: impl IntoIterator<Item = &'a Parameter>) -> Self {
        let fresh = parameters.into_iter().filter(|parameter| !parameter.set_paused(true));
        Self(fresh.cloned().collect())
    }
}

impl Drop for PausedGradients {
    fn drop(&mut self) {
        self.0.iter().for_each(|parameter| {
            parameter.set_paused(false);
        });
    }
}
