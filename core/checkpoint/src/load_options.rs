//! Options of loading.

use super::{NameRules, ParameterFilter};

/// Options of [`load_into`](super::load_into) and the other load functions.
///
/// A `bool` converts into the default options with [`strict`](Self::strict) set to it.
///
/// ```
/// use fulgurite_core::checkpoint::{ParameterFilter, LoadOptions, NameRules};
///
/// // A Lightning checkpoint's encoder, into a larger model.
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
    /// Whether a source with differences is refused before anything is changed. The default is
    /// `true`.
    ///
    /// If `false`, the tensors that fit are loaded and the report lists the others, which keep
    /// their values: new parameters and their optimizer state. A source without any fitting tensor
    /// is refused in both cases.
    pub strict: bool,
    /// The parameters to load, by their names in the model; `None` for all. The others keep their
    /// values and are reported neither as missing nor as unexpected. A filter pattern that matches
    /// no parameter and no tensor is an error.
    pub filter: Option<ParameterFilter>,
    /// Patterns of the parameters that a source may lack, such as a new head, as
    /// [`pattern_matches`](fulgurite_engine::module::pattern_matches) defines them. They keep their
    /// initial values, and the report lists them as [`new`](super::LoadReport::new).
    pub optional: Vec<String>,
    /// The mapping from names in the source to names in the model. By default they are equal. A
    /// pattern of [`rename`](NameRules::rename) that matches no tensor is an error.
    pub names: NameRules,
    /// The treatment of values that are stored in another dtype than the model's.
    pub dtypes: DtypePolicy,
    /// Whether a chunk that is read whole is compared with its checksum, if the source has
    /// checksums. The default is `true`.
    pub verify: bool,
    /// Whether [`restore`](super::restore) loads only the model and leaves the optimizer out.
    pub weights_only: bool,
    /// Whether only rank 0 reads, and sends tensor by tensor to the others, as torch's
    /// `broadcast_from_rank0`.
    ///
    /// It is for sources that the other ranks cannot reach. The methods of `Fabric` support it.
    /// [`load_into`](super::load_into) and the other functions of this crate refuse it, since they
    /// are not collective; see [`RankZeroSource`](super::RankZeroSource).
    pub broadcast_from_rank0: bool,
    /// Advice for the error about differences; by default it points to these options.
    pub advice: Option<&'static str>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            strict: true,
            filter: None,
            optional: Vec::new(),
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

/// The treatment of values that are stored in another dtype than their target's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DtypePolicy {
    /// They are converted.
    #[default]
    Convert,
    /// They are a difference, listed in [`LoadReport::mismatched`](super::LoadReport::mismatched).
    Exact,
}
