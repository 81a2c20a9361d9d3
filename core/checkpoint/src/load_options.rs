//! How a model or an optimizer is filled from a tensor source.

use super::{Filter, NameRules};

/// How [`load_into`](super::load_into) and its relatives load.
///
/// `true` and `false` turn into the default options with that [`strict`](Self::strict).
///
/// ```
/// use fulgurite_core::checkpoint::{Filter, LoadOptions, NameRules};
///
/// // A Lightning checkpoint's encoder, into a model that has more than that.
/// let options = LoadOptions {
///     strict: false,
///     filter: Some(Filter::matching(["encoder"])),
///     names: NameRules { clean: true, prefix_strip: Some("model.".into()), ..Default::default() },
///     ..LoadOptions::default()
/// };
/// assert!(options.verify && !options.weights_only);
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Whether a source that does not fit is refused, before anything is changed. Otherwise what
    /// fits is loaded, the rest keeps its values (newly added parameters, their optimizer state), and
    /// the report says what that was. The default is `true`.
    pub strict: bool,
    /// Which parameters are loaded, by their names in the model; all if `None`. The others keep
    /// their values, and are neither missing nor unexpected.
    pub filter: Option<Filter>,
    /// How names in the source become the model's. By default they are the same.
    pub names: NameRules,
    /// What becomes of values that are stored in another dtype than the model's.
    pub dtypes: DtypePolicy,
    /// Whether a stored part that is read whole is compared with its checksum, where the source has
    /// any. The default is `true`.
    pub verify: bool,
    /// Whether the optimizer keeps its state where model and optimizer are loaded together
    /// ([`restore`](super::restore)).
    pub weights_only: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            strict: true,
            filter: None,
            names: NameRules::default(),
            dtypes: DtypePolicy::default(),
            verify: true,
            weights_only: false,
        }
    }
}

impl From<bool> for LoadOptions {
    fn from(strict: bool) -> Self {
        Self { strict, ..Self::default() }
    }
}

impl From<&LoadOptions> for LoadOptions {
    fn from(options: &LoadOptions) -> Self {
        options.clone()
    }
}

/// What becomes of values that are stored in another dtype than the one they are loaded into.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DtypePolicy {
    /// They are converted.
    #[default]
    Convert,
    /// They do not fit: [`LoadReport::mismatched`](super::LoadReport::mismatched) lists them.
    Exact,
}
