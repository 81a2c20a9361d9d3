//! Options of loading.

use super::{NameRules, ParameterFilter};

/// Options of [`load_into`](super::load_into) and the other functions that load.
///
/// A `bool` converts into the default options with that [`strict`](Self::strict).
///
/// ```
/// use fulgurite_core::checkpoint::{ParameterFilter, LoadOptions, NameRules};
///
/// // A Lightning checkpoint's encoder, into a model that has more than that.
/// let options = LoadOptions {
///     strict: false,
///     filter: Some(ParameterFilter::matching(["encoder"])),
///     names: NameRules { clean: true, prefix_strip: Some("model.".into()), ..Default::default() },
///     ..LoadOptions::default()
/// };
/// assert!(options.verify && !options.weights_only);
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Whether a source with differences is refused before anything is changed. Otherwise the
    /// tensors that fit are loaded, the others (new parameters, their optimizer state) keep their
    /// values, and the report lists them; a source of which nothing fits is refused all the same. The
    /// default is `true`.
    pub strict: bool,
    /// The parameters to load, by their names in the model; `None` for all. The others keep their
    /// values and are reported neither as missing nor as unexpected. A pattern of it that matches no
    /// parameter and no tensor is an error.
    pub filter: Option<ParameterFilter>,
    /// How names in the source become those of the model. By default they are equal. A pattern of
    /// [`rename`](NameRules::rename) that matches no tensor is an error.
    pub names: NameRules,
    /// What happens to values that are stored in another dtype than the model's.
    pub dtypes: DtypePolicy,
    /// Whether a chunk that is read whole is compared with its checksum, if the source has
    /// checksums. The default is `true`.
    pub verify: bool,
    /// Whether [`restore`](super::restore), which loads model and optimizer, leaves the optimizer
    /// out.
    pub weights_only: bool,
    /// Whether rank 0 alone reads, and sends tensor by tensor to the others, as torch's
    /// `broadcast_from_rank0`: for a source that the other ranks do not have. The methods of `Fabric` do so;
    /// [`load_into`](super::load_into) and the other functions here, which are not collective, refuse it, see
    /// [`RankZeroSource`](super::RankZeroSource).
    pub broadcast_from_rank0: bool,
    /// What an error about differences says is to be done; by default that these options exist.
    pub advice: Option<&'static str>,
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
            broadcast_from_rank0: false,
            advice: None,
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

/// What happens to values that are stored in another dtype than that of their target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DtypePolicy {
    /// They are converted.
    #[default]
    Convert,
    /// They are a difference, listed in [`LoadReport::mismatched`](super::LoadReport::mismatched).
    Exact,
}
