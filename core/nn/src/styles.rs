//! The tensor-parallel styles that the layers of this crate support, and their shardings.

use super::{QkNormScope, dora, lora};
use crate::Result;
use fulgurite_engine::parallel::{
    Colwise, InputCast, LayerSharding, LayerStyles, Layout, ParallelLayer, ParallelStyle,
    PrepareModuleInput, PrepareModuleOutput, Rowwise, SequenceParallel,
};

const REPLICATE: Layout = Layout::Replicate;
const SEQUENCE: Layout = Layout::SEQUENCE;
const LAST: Layout = Layout::LAST;
const PARTIAL: Layout = Layout::Partial;

/// Returns the sharding of a layer that computes positions independently, under a style that leaves
/// its parameters whole. `inputs` and `outputs` are the sizes of the last dimension of input and
/// output.
fn by_position(
    layer: &impl ParallelLayer,
    styles: &LayerStyles<'_>,
    [inputs, outputs]: [usize; 2],
) -> Result<LayerSharding> {
    let sharding = LayerSharding::default().widths(inputs, outputs);
    // If the layer computes with a shard of its input, its parameters' gradients are partial sums.
    let computes_with = |sharding: LayerSharding, layout| match layout {
        REPLICATE => sharding,
        _ => sharding.replicate_all(true),
    };
    match styles.own() {
        Some(ParallelStyle::PrepareModuleInput(PrepareModuleInput { input, desired })) => {
            styles.expect(layer, "input", input, &[REPLICATE, SEQUENCE, LAST])?;
            styles.expect(layer, "desired layout", desired, &[REPLICATE, SEQUENCE])?;
            Ok(computes_with(sharding.input(input, desired).output(desired, desired), desired))
        }
        Some(ParallelStyle::PrepareModuleOutput(PrepareModuleOutput { output, desired })) => {
            styles.expect(layer, "output", output, &[REPLICATE, SEQUENCE])?;
            styles.expect(layer, "desired layout", desired, &[REPLICATE, SEQUENCE])?;
            Ok(computes_with(sharding.input(output, output).output(output, desired), output))
        }
        Some(ParallelStyle::ReplicatedWithGradAllreduce) => Ok(LayerSharding::on_parts()),
        _ => Err(styles.cannot_take(layer)),
    }
}

/// The styles of [`Linear`](super::Linear).
#[derive(Debug)]
pub(super) struct LinearStyles {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) cast: InputCast,
}

impl ParallelLayer for LinearStyles {
    fn kind(&self) -> &'static str {
        "Linear"
    }

    fn input_cast(&self) -> InputCast {
        self.cast
    }

    fn takes(&self) -> &'static str {
        "it takes colwise, rowwise, prepare_module_input, prepare_module_output and \
         replicated_with_grad_allreduce"
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        let sharding = LayerSharding::default().widths(self.inputs, self.outputs);
        match styles.own() {
            Some(ParallelStyle::Colwise(Colwise { input, output, loss_parallel })) => {
                styles.expect(self, "input", input, &[REPLICATE, SEQUENCE])?;
                styles.expect(self, "output", output, &[REPLICATE, LAST])?;
                if loss_parallel && output != REPLICATE {
                    return Err(styles.error(NO_LOGITS));
                }
                let sharding = cut_outputs(sharding, 1);
                Ok(sharding.input(input, PARTIAL).output(LAST, output).loss_parallel(loss_parallel))
            }
            Some(ParallelStyle::Rowwise(Rowwise { input, output })) => {
                styles.expect(self, "input", input, &[REPLICATE, LAST])?;
                styles.expect(self, "output", output, &[REPLICATE, SEQUENCE])?;
                let sharding = cut_inputs(sharding, output);
                Ok(sharding.input(input, LAST).output(PARTIAL, output))
            }
            _ => by_position(self, styles, [self.inputs, self.outputs]),
        }
    }
}

/// Shards the outputs, with each shard on `replicas` ranks. These ranks compute different things
/// with the adapter's `A`.
fn cut_outputs(sharding: LayerSharding, replicas: usize) -> LayerSharding {
    let [a, b] = lora::LINEAR;
    let sharding = sharding.cut_shared("weight", 0, replicas).cut_shared("bias", 0, replicas);
    let sharding = sharding.cut_shared("weight_scale", 0, replicas);
    let sharding = sharding.cut_shared(dora::MAGNITUDE, 0, replicas);
    sharding.replicate(a, true).cut_shared(b, 0, replicas)
}

/// Shards the inputs. The bias is added after the reduction; the adapter's `B` and magnitudes take
/// part in it.
fn cut_inputs(sharding: LayerSharding, output: Layout) -> LayerSharding {
    let [a, b] = lora::LINEAR;
    let sharding = sharding.cut("weight", 1).replicate("bias", output != REPLICATE);
    sharding.cut(a, 1).replicate(b, true).replicate(dora::MAGNITUDE, true)
}

const NO_LOGITS: &str = "loss_parallel is for a Linear that gives logits, with output replicate";

/// The styles of [`Embedding`](super::Embedding).
#[derive(Debug)]
pub(super) struct EmbeddingStyles {
    pub(super) width: usize,
}

impl ParallelLayer for EmbeddingStyles {
    fn kind(&self) -> &'static str {
        "Embedding"
    }

    fn is_embedding(&self) -> bool {
        true
    }

    fn input_cast(&self) -> InputCast {
        InputCast::None
    }

    fn takes(&self) -> &'static str {
        "it takes rowwise (rows, the vocabulary), colwise and replicated_with_grad_allreduce"
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        let sharding = LayerSharding::default().widths(0, self.width);
        match styles.own() {
            Some(ParallelStyle::Colwise(Colwise { input, output, loss_parallel })) => {
                styles.expect(self, "input", input, &[REPLICATE])?;
                styles.expect(self, "output", output, &[REPLICATE, LAST])?;
                if loss_parallel {
                    return Err(styles.error(NO_LOGITS));
                }
                let [a, b] = lora::EMBEDDING;
                let sharding = sharding.cut("weight", 1).replicate(a, true).cut(b, 0);
                Ok(sharding.output(LAST, output))
            }
            Some(ParallelStyle::Rowwise(Rowwise { input, output })) => {
                styles.expect(self, "input", input, &[REPLICATE, LAST])?;
                styles.expect(self, "output", output, &[REPLICATE, SEQUENCE])?;
                let [a, b] = lora::EMBEDDING;
                let sharding = sharding.cut("weight", 0).cut(a, 1).replicate(b, true);
                Ok(sharding.output(PARTIAL, output))
            }
            // The ids belong to this rank's share of the sequence.
            Some(ParallelStyle::ReplicatedWithGradAllreduce) => {
                let [a, b] = lora::EMBEDDING;
                let sharding =
                    sharding.replicate("weight", true).replicate(a, true).replicate(b, true);
                Ok(sharding.output(SEQUENCE, SEQUENCE))
            }
            _ => Err(styles.cannot_take(self)),
        }
    }
}

/// The styles of [`RmsNorm`](super::RmsNorm) and [`LayerNorm`](super::LayerNorm).
#[derive(Debug)]
pub(super) struct NormStyles {
    pub(super) kind: &'static str,
    pub(super) width: usize,
}

impl ParallelLayer for NormStyles {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn takes(&self) -> &'static str {
        "it takes sequence_parallel, prepare_module_input, prepare_module_output and \
         replicated_with_grad_allreduce"
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        match styles.own() {
            Some(ParallelStyle::SequenceParallel(SequenceParallel { input, output })) => {
                styles.expect(self, "input", input, &[SEQUENCE, REPLICATE])?;
                styles.expect(self, "output", output, &[SEQUENCE, REPLICATE])?;
                let sharding = LayerSharding::default().replicate_all(true);
                Ok(sharding.input(input, SEQUENCE).output(SEQUENCE, output))
            }
            _ => by_position(self, styles, [self.width; 2]),
        }
    }
}

/// A layer that plans leave whole, with its kind.
#[derive(Debug)]
pub(super) struct WholeLayer(pub(super) &'static str);

impl ParallelLayer for WholeLayer {
    fn kind(&self) -> &'static str {
        self.0
    }
}

/// A [`MixtureOfExperts`](super::MixtureOfExperts) or a part of it, with its kind. No plan cuts it:
/// every rank computes all experts with the whole input.
#[derive(Debug)]
pub(super) struct ExpertStyles(pub(super) &'static str);

impl ParallelLayer for ExpertStyles {
    fn kind(&self) -> &'static str {
        self.0
    }

    fn takes(&self) -> &'static str {
        "it takes none: every tensor-parallel rank computes all experts with the whole input"
    }

    /// The mixture casts the input of the experts' weights, which have the mixture's dtype.
    fn input_cast(&self) -> InputCast {
        if self.0 == "Experts" { InputCast::None } else { InputCast::Own }
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        Err(styles.cannot_take(self))
    }
}

/// A [`LatentAttention`](super::LatentAttention), which no plan cuts.
#[derive(Debug)]
pub(super) struct LatentStyles;

impl ParallelLayer for LatentStyles {
    fn kind(&self) -> &'static str {
        "LatentAttention"
    }

    fn input_cast(&self) -> InputCast {
        InputCast::None
    }

    fn takes(&self) -> &'static str {
        "it takes none, nor do its projections: every tensor-parallel rank computes it whole"
    }

    fn parts(&self) -> &'static [&'static str] {
        &[
            "q_proj",
            "q_a_proj",
            "q_a_layernorm",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_a_layernorm",
            "kv_b_proj",
            "o_proj",
        ]
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        Err(styles.cannot_take(self))
    }
}

/// The styles of [`Dropout`](super::Dropout).
#[derive(Debug)]
pub(super) struct DropoutStyles {
    /// The probability.
    pub(super) p: f64,
}

impl ParallelLayer for DropoutStyles {
    fn kind(&self) -> &'static str {
        "Dropout"
    }

    fn input_cast(&self) -> InputCast {
        InputCast::None
    }

    fn takes(&self) -> &'static str {
        "it takes sequence_parallel and prepare_module_input"
    }

    fn returns_input(&self) -> bool {
        self.p == 0.0
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        let sharding = LayerSharding::default();
        match styles.own() {
            Some(ParallelStyle::SequenceParallel(SequenceParallel { input, output })) => {
                styles.expect(self, "input", input, &[SEQUENCE])?;
                styles.expect(self, "output", output, &[SEQUENCE])?;
                Ok(sharding.input(SEQUENCE, SEQUENCE).output(SEQUENCE, SEQUENCE))
            }
            Some(ParallelStyle::PrepareModuleInput(PrepareModuleInput { input, desired })) => {
                styles.expect(self, "input", input, &[REPLICATE, SEQUENCE, LAST])?;
                // The layer does not know the size of the last dimension, so it cannot gather that
                // dimension.
                let inside: &[Layout] =
                    if input == LAST { &[LAST] } else { &[REPLICATE, SEQUENCE, LAST] };
                styles.expect(self, "desired layout", desired, inside)?;
                Ok(sharding.input(input, desired).output(desired, desired))
            }
            _ => Err(styles.cannot_take(self)),
        }
    }
}

/// The styles of blocks, which have several projections but are one operation in the graph.
#[derive(Debug, Clone)]
pub(super) struct BlockStyles {
    kind: &'static str,
    /// All projections; the output projection is the last.
    projections: &'static [&'static str],
    /// The projections and, in attention, the norms of queries and keys.
    parts: &'static [&'static str],
    heads: Option<Heads>,
    norms: Option<QkNormScope>,
    /// Whether the block has the parameter [`SINKS`], one number for each head.
    sinks: bool,
}

/// The name of attention's sinks.
pub(super) const SINKS: &str = "sinks";

const SWIGLU: &[&str] = &["gate_proj", "up_proj", "down_proj"];
const GELU: &[&str] = &["up_proj", "down_proj"];
const ATTENTION: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj"];
const NORMED_ATTENTION: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"];
const NORMS: [&str; 2] = ["q_norm", "k_norm"];

impl BlockStyles {
    pub(super) const SWIGLU: Self = Self {
        kind: "GatedMlp",
        projections: SWIGLU,
        parts: SWIGLU,
        heads: None,
        norms: None,
        sinks: false,
    };

    pub(super) const GELU: Self = Self {
        kind: "Mlp",
        projections: GELU,
        parts: GELU,
        heads: None,
        norms: None,
        sinks: false,
    };

    pub(super) fn attention(
        num_heads: usize,
        num_kv_heads: usize,
        hidden_size: usize,
        norms: Option<QkNormScope>,
    ) -> Self {
        Self {
            kind: "CausalSelfAttention",
            projections: ATTENTION,
            parts: if norms.is_some() { NORMED_ATTENTION } else { ATTENTION },
            heads: Some(Heads { num_heads, num_kv_heads, hidden_size }),
            norms,
            sinks: false,
        }
    }

    pub(super) fn with_sinks(self) -> Self {
        Self { sinks: true, ..self }
    }

    /// Checks the styles of the norms, which follow from the projections'. `is_cut`: whether the
    /// projections have styles.
    fn check_norms(&self, styles: &LayerStyles<'_>, is_cut: bool) -> Result<()> {
        for name in NORMS {
            let Some(style) = styles.part(name).filter(|_| self.norms.is_some()) else { continue };
            let message = match (self.norms, style) {
                (_, _) if !is_cut => format!(
                    "{name} is {} and the projections have no styles, so each rank has the whole \
                     gradient of its weight; leave {name} out of the plan, or make the projections \
                     colwise and rowwise",
                    style.name()
                ),
                (Some(QkNormScope::Head), ParallelStyle::ReplicatedWithGradAllreduce) => continue,
                (Some(QkNormScope::Head), style) => format!(
                    "{name} is {}; a norm of single heads takes replicated_with_grad_allreduce, which \
                     it also is without a style",
                    style.name()
                ),
                (_, style) => format!(
                    "{name} is {}; a norm of all heads is cut like its projection and takes no style: \
                     leave it out of the plan",
                    style.name()
                ),
            };
            return Err(styles.error(message));
        }
        Ok(())
    }

    /// Adds the sharding of the norms of a cut attention.
    fn with_norms(&self, sharding: LayerSharding, kv_replicas: usize) -> LayerSharding {
        let whole = || LayerSharding::default().replicate("weight", true);
        let cut = |replicas| LayerSharding::default().cut_shared("weight", 0, replicas);
        let [q, k] = NORMS;
        match self.norms {
            None => sharding,
            Some(QkNormScope::Head) => sharding.part(q, whole()).part(k, whole()),
            Some(QkNormScope::Projection) => sharding.part(q, cut(1)).part(k, cut(kv_replicas)),
        }
    }

    /// Returns the styles of the input and output projections, or `None` if none has a style.
    fn projection_styles(&self, styles: &LayerStyles<'_>) -> Result<Option<(Colwise, Rowwise)>> {
        let found: Vec<_> = self.projections.iter().map(|name| (name, styles.part(name))).collect();
        if found.iter().all(|(_, style)| style.is_none()) {
            return Ok(None);
        }
        if let [inputs @ .., (_, Some(ParallelStyle::Rowwise(rowwise)))] = &found[..]
            && let Some((_, Some(ParallelStyle::Colwise(colwise)))) = inputs.first()
            && inputs.iter().all(|(_, style)| *style == Some((*colwise).into()))
            && (colwise.output, colwise.loss_parallel) == (LAST, false)
            && [REPLICATE, SEQUENCE].contains(&colwise.input)
            && rowwise.input == LAST
            && [REPLICATE, SEQUENCE].contains(&rowwise.output)
        {
            return Ok(Some((*colwise, *rowwise)));
        }
        let (output, inputs) = self.projections.split_last().expect("a block has projections");
        let found: Vec<String> = found
            .iter()
            .map(|(name, style)| match style {
                Some(
                    ParallelStyle::Colwise(Colwise { input, output, .. })
                    | ParallelStyle::Rowwise(Rowwise { input, output }),
                ) => {
                    let style = style.map_or("", |style| style.name());
                    format!("{name} is {style} from {input} to {output}")
                }
                Some(style) => format!("{name} is {}", style.name()),
                None => format!("{name} has no style"),
            })
            .collect();
        Err(styles.error(format!(
            "computes as one: its plan must make {} colwise, with one input layout and output \
             shard(-1), and {output} rowwise, with input shard(-1); here {}",
            inputs.join(", "),
            found.join(", ")
        )))
    }
}

impl ParallelLayer for BlockStyles {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn takes(&self) -> &'static str {
        "it takes prepare_module_input and prepare_module_output; colwise and rowwise are for its \
         projections"
    }

    fn parts(&self) -> &'static [&'static str] {
        self.parts
    }

    fn shard(&self, styles: &LayerStyles<'_>) -> Result<LayerSharding> {
        // For the input, [outside, inside] of the block; for the output, [inside, outside].
        let (mut input, mut output) = ([REPLICATE; 2], [REPLICATE; 2]);
        match styles.own() {
            Some(ParallelStyle::PrepareModuleInput(prepare)) => {
                styles.expect(self, "input", prepare.input, &[REPLICATE, SEQUENCE])?;
                styles.expect(self, "desired layout", prepare.desired, &[REPLICATE])?;
                input = [prepare.input, prepare.desired];
            }
            Some(ParallelStyle::PrepareModuleOutput(prepare)) => {
                styles.expect(self, "output", prepare.output, &[REPLICATE])?;
                styles.expect(self, "desired layout", prepare.desired, &[REPLICATE, SEQUENCE])?;
                output = [prepare.output, prepare.desired];
            }
            Some(_) => return Err(styles.cannot_take(self)),
            None => {}
        }
        let sharding = LayerSharding::default();
        let projections = self.projection_styles(styles)?;
        self.check_norms(styles, projections.is_some())?;
        let Some((colwise, rowwise)) = projections else {
            return Ok(sharding.input(input[0], input[1]).output(output[0], output[1]));
        };
        let unprepared = |what: &str, projections: &str, expected: Layout, got: Layout| {
            Err(styles.error(format!(
                "prepares its {what} as if it were {expected} within, and its {projections} {got}; \
                 make that {expected}, or leave the block's own style out"
            )))
        };
        match styles.own() {
            Some(ParallelStyle::PrepareModuleInput(_)) if colwise.input != input[1] => {
                return unprepared("input", "colwise projections take", input[1], colwise.input);
            }
            Some(ParallelStyle::PrepareModuleInput(_)) => output[1] = rowwise.output,
            Some(ParallelStyle::PrepareModuleOutput(_)) if rowwise.output != output[0] => {
                return unprepared("output", "rowwise projection gives", output[0], rowwise.output);
            }
            Some(ParallelStyle::PrepareModuleOutput(_)) => input[0] = colwise.input,
            _ => (input[0], output[1]) = (colwise.input, rowwise.output),
        }
        let kv_replicas = match self.heads {
            Some(heads) => heads.kv_replicas(styles)?,
            None => 1,
        };
        let mut sharding = sharding.input(input[0], PARTIAL).output(PARTIAL, output[1]);
        if self.sinks {
            sharding = sharding.cut(SINKS, 0);
        }
        let (last, inputs) = self.projections.split_last().expect("a block has projections");
        for &name in inputs {
            let replicas = if matches!(name, "k_proj" | "v_proj") { kv_replicas } else { 1 };
            sharding = sharding.part(name, cut_outputs(LayerSharding::default(), replicas));
        }
        let part = cut_inputs(LayerSharding::default(), output[1]).output(PARTIAL, PARTIAL);
        Ok(self.with_norms(sharding.part(last, part), kv_replicas))
    }
}

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    hidden_size: usize,
}

impl Heads {
    /// Returns the number of neighbouring ranks that hold each key and value head.
    ///
    /// # Errors
    /// If the ranks do not divide the heads, the key and value heads, or the hidden size; one
    /// message for each, like torchtune's `prepare_mha_for_tp`. Fewer key and value heads than
    /// ranks are allowed if they divide the ranks: neighbouring ranks then hold the same heads.
    fn kv_replicas(self, styles: &LayerStyles<'_>) -> Result<usize> {
        let Self { num_heads, num_kv_heads, hidden_size } = self;
        let ranks = styles.ranks();
        if !num_heads.is_multiple_of(ranks) {
            return Err(styles.error(format!(
                "{num_heads} attention heads are not divisible by tensor_parallel_size {ranks}; \
                 choose a size that divides them"
            )));
        }
        if !num_kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(num_kv_heads) {
            return Err(styles.error(format!(
                "{num_kv_heads} key and value heads are not divisible by tensor_parallel_size \
                 {ranks}, nor does their number divide it, so that ranks could share them; choose \
                 another size"
            )));
        }
        if !hidden_size.is_multiple_of(ranks) {
            return Err(styles.error(format!(
                "the hidden size {hidden_size} is not divisible by tensor_parallel_size {ranks}; \
                 choose a size that divides it"
            )));
        }
        Ok(ranks.div_ceil(num_kv_heads).max(1))
    }
}
