//! Support of layers for tensor-parallel plans.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::DType;

use super::{LayerSharding, Layout, ParallelStyle};
use crate::{Error, Result};

/// The styles of tensor-parallel plans
/// ([`parallelize_module`](crate::module::ModuleTree::parallelize_module)) that a kind of layer
/// supports, and how they shard it. A layer passes it to
/// [`ModuleBuilder::declare`](crate::module::ModuleBuilder::declare) when it is built. It gets a
/// [`LayerHandle`](super::LayerHandle), with which it computes as the plan says.
///
/// ```
/// use fulgurite_core::Result;
/// use fulgurite_core::parallel::{
///     LayerSharding, LayerStyles, Layout, ParallelLayer, ParallelStyle,
/// };
///
/// /// A layer with a `weight` of `[out, in]` that may be cut along its outputs.
/// #[derive(Debug)]
/// struct Projection;
///
/// impl ParallelLayer for Projection {
///     fn kind(&self) -> &'static str {
///         "Projection"
///     }
///
///     fn takes(&self) -> &'static str {
///         "it takes colwise"
///     }
///
///     fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
///         match styles.own() {
///             Some(ParallelStyle::Colwise(style)) => Ok(LayerSharding::default()
///                 .cut("weight", 0)
///             // Each rank computes different outputs from the whole input, so it has a
///             // partial sum of the input's gradient.
///                 .input(style.input, Layout::Partial)
///                 .output(Layout::LAST, style.output)),
///             _ => Err(styles.cannot_take(self)),
///         }
///     }
/// }
/// ```
pub trait ParallelLayer: fmt::Debug + Send + Sync + 'static {
    /// The name of the kind of layer, for messages: `Linear`.
    fn kind(&self) -> &'static str;

    /// The supported styles, for messages: "it takes colwise and rowwise".
    fn takes(&self) -> &'static str {
        "it takes replicated_with_grad_allreduce"
    }

    /// Names of inner layers that this layer computes itself as one operation, such as attention's
    /// projections. Plans give them styles, and this layer decides their sharding.
    fn parts(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether the layer returns its input in every forward, unless a plan redistributes it.
    /// Dropout with probability 0 does.
    fn returns_input(&self) -> bool {
        false
    }

    /// Whether the layer looks up rows of its parameters by id. Optimizers of whole matrices leave
    /// such parameters alone
    /// ([`Parameter::is_embedding_or_head`](crate::parameter::Parameter::is_embedding_or_head)).
    fn is_embedding(&self) -> bool {
        false
    }

    /// The cast of the layer's input. By default to the dtype of its own parameters.
    fn input_cast(&self) -> InputCast {
        InputCast::Own
    }

    /// Decides how the styles that a plan gives the layer and its parts cut the parameters and
    /// redistribute input and output. Called when a plan with such styles is applied. Returns the
    /// same on every rank and communicates nothing.
    ///
    /// # Errors
    /// If the layer does not support the style ([`LayerStyles::cannot_take`]) or one of its layouts
    /// ([`LayerStyles::expect`]), or its sizes do not divide ([`LayerStyles::error`]).
    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        match styles.own() {
            Some(ParallelStyle::ReplicatedWithGradAllreduce) => Ok(LayerSharding::on_parts()),
            _ => Err(styles.cannot_take(self)),
        }
    }
}

/// How a layer casts an input of floating-point numbers, which may come in another dtype.
/// [`LayerHandle::redistribute_input`](super::LayerHandle::redistribute_input) casts it, and casts
/// the gradient back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputCast {
    /// To the dtype of the parameters that the layer declares. Such a layer can be
    /// [kept](crate::module::ModuleInit::keep_in_fp32) in f32.
    Own,
    /// To the dtype of a parameter that another layer declares.
    To(DType),
    /// Not at all: the layer takes integers, or computes in any dtype.
    None,
}

/// The style of each path named by a plan.
pub(crate) type Styles = BTreeMap<String, ParallelStyle>;

/// The styles that a plan gives a layer and its parts.
pub struct LayerStyles<'a> {
    path: &'a str,
    styles: &'a Styles,
    ranks: usize,
}

impl<'a> LayerStyles<'a> {
    pub(crate) fn new(path: &'a str, styles: &'a Styles, ranks: usize) -> Self {
        Self { path, styles, ranks }
    }

    /// The layer's path.
    pub fn path(&self) -> &str {
        self.path
    }

    /// The layer's own style.
    pub fn own(&self) -> Option<ParallelStyle> {
        self.styles.get(self.path).copied()
    }

    /// The style of one of its [parts](ParallelLayer::parts).
    pub fn part(&self, name: &str) -> Option<ParallelStyle> {
        self.styles.get(&format!("{}.{name}", self.path)).copied()
    }

    /// Number of ranks that share the layers.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// An error that names the layer.
    pub fn error(&self, message: impl Into<String>) -> Error {
        Error::Module { path: self.path.to_owned(), message: message.into() }
    }

    /// The error that the layer does not support its own style.
    pub fn cannot_take(&self, layer: &(impl ParallelLayer + ?Sized)) -> Error {
        let style = self.own().map_or("cut", |style| style.name());
        self.error(format!("a layer of kind {} cannot be {style}; {}", layer.kind(), layer.takes()))
    }

    /// Checks a layout of the layer's own style. `what` is the key's name.
    ///
    /// # Errors
    /// If it is not one of `allowed`. The message lists them.
    pub fn expect(
        &self,
        layer: &(impl ParallelLayer + ?Sized),
        what: &str,
        got: Layout,
        allowed: &[Layout],
    ) -> Result<()> {
        if allowed.contains(&got) {
            return Ok(());
        }
        let allowed: Vec<String> = allowed.iter().map(Layout::to_string).collect();
        let style = self.own().map_or("this", |style| style.name());
        Err(self.error(format!(
            "{style} with {what} {got} does not exist for {}; use {}",
            layer.kind(),
            allowed.join(" or ")
        )))
    }
}

impl fmt::Debug for LayerStyles<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerStyles").field("path", &self.path).finish()
    }
}
