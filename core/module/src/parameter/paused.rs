//! Parameters that are paused while another optimizer trains.

use super::Parameter;

/// While it lives, forwards treat its parameters as constants and no gradient is computed for them,
/// as after `toggle_optimizer` in PyTorch Lightning. Dropping it restores the previous state. All
/// ranks must pause the same parameters, from before the forward until after the backward.
///
/// candle layers that hold a parameter's tensor (`var_builder`) still record it. A gradient that
/// arrives while the parameter is paused is dropped.
#[must_use = "gradients are computed again as soon as it is dropped"]
#[derive(Debug)]
pub struct PausedGradients(Vec<Parameter>);

impl PausedGradients {
    /// Pauses the parameters. Already paused parameters stay paused when it is dropped.
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
