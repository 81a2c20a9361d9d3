//! Random cases.

use fulgurite_core::nn::QkNormScope;
use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
use fulgurite_core::random::{Purpose, Stream};

use super::model::Shape;

/// Random choices derived from a seed.
pub(crate) struct Dice {
    stream: Stream,
    thrown: u64,
}

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self { stream: Stream::new(seed, Purpose::Sample, "plans"), thrown: 0 }
    }

    fn below(&mut self, n: usize) -> usize {
        self.thrown += 1;
        self.stream.word(self.thrown) as usize % n
    }

    /// True once in `n` times.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A model, a plan for it, and a mesh.
#[derive(Debug)]
pub(crate) struct Case {
    /// Sizes of replicate, shard and tensor.
    pub(crate) mesh: [usize; 3],
    pub(crate) shape: Shape,
    pub(crate) frozen: Vec<String>,
    pub(crate) checkpointing: bool,
    pub(crate) plan: Plan,
}

const REPLICATE: Layout = Layout::Replicate;
const SEQUENCE: Layout = Layout::SEQUENCE;
const LAST: Layout = Layout::LAST;

impl Case {
    pub(crate) fn new(dice: &mut Dice) -> Self {
        let shape = Shape {
            layers: 1 + dice.below(2),
            kv_heads: dice.one_of(&[None, Some(1), Some(2), Some(4)]),
            qk_norm: dice.one_of(&[
                None,
                None,
                Some(QkNormScope::Head),
                Some(QkNormScope::Projection),
            ]),
            encoder: dice.once_in(3),
            mlp: dice.below(3),
            bias: dice.once_in(2),
            tied: dice.once_in(3),
            dropout: dice.one_of(&[0.0, 0.2]),
            embedding_dropout: dice.once_in(2),
            positions: if dice.once_in(2) { 0 } else { dice.below(3) },
            scale: dice.once_in(3),
            fused: dice.once_in(2),
            units: !dice.once_in(3),
            score: dice.once_in(3).then(|| (dice.one_of(&[3, 6, 12]), dice.once_in(2))),
            fused_loss: dice.once_in(3),
            shifted: dice.once_in(3),
            edges: false,
        };
        let mut frozen =
            vec!["embedding.weight", "layers.*.norm.weight", "layers.0.*.*", "norm.weight"];
        if shape.kv_heads.is_some() {
            frozen.extend(["layers.*.self_attn.q_proj.*", "layers.*.self_attn.k_proj.*"]);
            if shape.qk_norm.is_some() {
                frozen.push("layers.*.self_attn.k_norm.*");
            }
        }
        if !shape.tied {
            frozen.push("lm_head.weight");
        }
        let frozen = frozen.into_iter().filter(|_| dice.once_in(8)).map(str::to_owned).collect();
        let mesh = dice.one_of(&[[1, 1, 2], [1, 1, 2], [1, 1, 4], [1, 2, 2], [2, 1, 2]]);
        let checkpointing = shape.units && dice.once_in(4);
        let plan = plan(dice, &shape);
        let shape = Shape { edges: dice.once_in(2), ..shape };
        Self { mesh, shape, frozen, checkpointing, plan }
    }

    /// A case with only this model and plan.
    pub(crate) fn on_two_ranks(shape: Shape, plan: Plan) -> Self {
        Self { mesh: [1, 1, 2], shape, frozen: Vec::new(), checkpointing: false, plan }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    pub(crate) fn strategy(&self) -> String {
        let [replicate, shard, tensor] = self.mesh;
        format!(
            r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
                "data_parallel_shard_size": {shard}, "context_parallel_size": 1,
                "tensor_parallel_size": {tensor}, "allow_root_only": true}}"#
        )
    }
}

/// The layers of a model, as patterns: with the blocks' projections, or the blocks only.
fn layers(shape: &Shape, projections: bool) -> Vec<String> {
    let mut layers = vec!["embedding", "embedding_dropout", "norm", "lm_head"];
    layers.extend(["layers.*.norm", "layers.*.dropout", "layers.*.post_norm"]);
    let attention =
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let mut inside: Vec<&str> = Vec::new();
    if shape.kv_heads.is_some() {
        layers.push("layers.*.self_attn");
        inside.extend(attention);
        if shape.qk_norm.is_some() {
            inside.extend(["self_attn.q_norm", "self_attn.k_norm"]);
        }
    }
    match shape.mlp {
        0 => inside.extend(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        1 => inside.extend(["mlp.up_proj", "mlp.down_proj"]),
        _ => layers.extend(["layers.*.mlp.up", "layers.*.mlp.dropout", "layers.*.mlp.down"]),
    }
    if shape.mlp < 2 {
        layers.push("layers.*.mlp");
    }
    if shape.scale {
        layers.push("layers.*");
    }
    match shape.positions {
        1 => layers.push("position_table"),
        2 => layers.push("positions"),
        _ => {}
    }
    if shape.score.is_some() {
        layers.push("score");
    }
    let inside = inside.iter().filter(|_| projections).map(|name| format!("layers.*.{name}"));
    layers.into_iter().map(str::to_owned).chain(inside).collect()
}

/// A plan that mostly fits the model, with a few random changes.
fn plan(dice: &mut Dice, shape: &Shape) -> Plan {
    let mut styles = match dice.below(8) {
        0 => Vec::new(),
        1 => {
            let layers = layers(shape, false).into_iter();
            layers.filter(|_| dice.once_in(4)).map(|layer| (layer, None)).collect()
        }
        _ => template(dice, shape),
    };
    let changes = if styles.is_empty() { 1 + dice.below(3) } else { dice.below(3) };
    for _ in 0..changes {
        let layers = layers(shape, dice.once_in(10));
        let layer = &layers[dice.below(layers.len())];
        styles.retain(|(other, _)| other != layer);
        if !dice.once_in(3) {
            styles.push((layer.clone(), None));
        }
    }
    if dice.once_in(4) {
        // Only one of two layers.
        for (layer, _) in &mut styles {
            let inside = ["_proj", "q_norm", "k_norm"].iter().any(|name| layer.ends_with(name));
            if dice.once_in(10) && !inside {
                *layer = layer.replace('*', "0");
            }
        }
    }
    let style = |dice: &mut Dice, layer: &str, style: Option<ParallelStyle>| {
        style.unwrap_or_else(|| random_style(dice, layer))
    };
    styles.into_iter().map(|(layer, s)| (layer.clone(), style(dice, &layer, s))).collect()
}

type Styles = Vec<(String, Option<ParallelStyle>)>;

/// NeMo's plan for Llama, or a part of it.
fn template(dice: &mut Dice, shape: &Shape) -> Styles {
    let sequence_parallel = dice.once_in(2);
    let stream = if sequence_parallel { SEQUENCE } else { REPLICATE };
    let colwise = Colwise { input: stream, ..Colwise::default() };
    let rowwise = Rowwise { output: stream, ..Rowwise::default() };
    let mut styles = Styles::new();
    let mut add = |layer: &str, style: ParallelStyle| styles.push((layer.to_owned(), Some(style)));
    let whole = sequence_parallel || shape.tied;
    if whole || dice.once_in(2) {
        add("embedding", rowwise.into());
    }
    if shape.kv_heads.is_some() && (sequence_parallel || !dice.once_in(4)) {
        let prepared = sequence_parallel && dice.once_in(4);
        for name in ["q_proj", "k_proj", "v_proj"] {
            let input = if prepared { Colwise::default() } else { colwise };
            add(&format!("layers.*.self_attn.{name}"), input.into());
        }
        if prepared {
            let prepare = PrepareModuleInput { input: SEQUENCE, desired: REPLICATE };
            add("layers.*.self_attn", prepare.into());
        }
        add("layers.*.self_attn.o_proj", rowwise.into());
        if shape.qk_norm == Some(QkNormScope::Head) && dice.once_in(2) {
            for name in ["q_norm", "k_norm"] {
                let style = ParallelStyle::ReplicatedWithGradAllreduce;
                add(&format!("layers.*.self_attn.{name}"), style);
            }
        }
    }
    if sequence_parallel || !dice.once_in(4) {
        match shape.mlp {
            0 => {
                add("layers.*.mlp.gate_proj", colwise.into());
                add("layers.*.mlp.up_proj", colwise.into());
                add("layers.*.mlp.down_proj", rowwise.into());
            }
            1 => {
                add("layers.*.mlp.up_proj", colwise.into());
                add("layers.*.mlp.down_proj", rowwise.into());
            }
            _ => {
                add("layers.*.mlp.up", colwise.into());
                add(
                    "layers.*.mlp.dropout",
                    PrepareModuleInput { input: LAST, desired: LAST }.into(),
                );
                add("layers.*.mlp.down", rowwise.into());
            }
        }
    }
    let loss_parallel = dice.once_in(2);
    if whole || dice.once_in(2) {
        let output = if dice.once_in(8) { LAST } else { REPLICATE };
        let loss_parallel = loss_parallel && output == REPLICATE;
        add("lm_head", Colwise { input: stream, output, loss_parallel }.into());
    }
    if sequence_parallel {
        let mut parts = vec!["layers.*.norm", "layers.*.post_norm", "norm"];
        if shape.dropout > 0.0 {
            parts.push("layers.*.dropout");
        }
        if shape.dropout > 0.0 && shape.embedding_dropout {
            parts.push("embedding_dropout");
        }
        parts.iter().for_each(|layer| add(layer, SequenceParallel::default().into()));
        if shape.scale {
            add("layers.*", ParallelStyle::ReplicatedWithGradAllreduce);
        }
        if shape.score.is_some() {
            let style = match dice.below(3) {
                0 => PrepareModuleInput { input: SEQUENCE, desired: REPLICATE }.into(),
                1 => PrepareModuleOutput { output: SEQUENCE, desired: REPLICATE }.into(),
                _ => ParallelStyle::Colwise(Colwise { output: REPLICATE, ..colwise }),
            };
            add("score", style);
        }
    }
    styles
}

/// Mostly a style that the layer takes, in random layouts.
fn random_style(dice: &mut Dice, layer: &str) -> ParallelStyle {
    let layouts = [REPLICATE, SEQUENCE, LAST];
    let loss_parallel = dice.once_in(3);
    let (one, other) = (dice.one_of(&layouts), dice.one_of(&layouts));
    let whole_or_part = [REPLICATE, SEQUENCE];
    let (first, second) = (dice.one_of(&whole_or_part), dice.one_of(&whole_or_part));
    let partial = ParallelStyle::ReplicatedWithGradAllreduce;
    let name = layer.rsplit('.').next().unwrap_or(layer);
    let colwise = || Colwise { input: first, output: dice_output(other), loss_parallel }.into();
    let rowwise = || Rowwise { input: dice_input(one), output: second }.into();
    let choices: Vec<ParallelStyle> = match name {
        "embedding" | "positions" => vec![
            Colwise { input: REPLICATE, output: dice_output(other), loss_parallel: false }.into(),
            rowwise(),
            partial,
        ],
        "norm" | "post_norm" | "q_norm" | "k_norm" => vec![
            SequenceParallel { input: first, output: second }.into(),
            PrepareModuleInput { input: one, desired: second }.into(),
            PrepareModuleOutput { output: first, desired: second }.into(),
            partial,
        ],
        "dropout" | "embedding_dropout" => vec![
            SequenceParallel::default().into(),
            PrepareModuleInput { input: one, desired: other }.into(),
        ],
        "*" | "0" | "position_table" => vec![partial],
        "self_attn" | "mlp" => vec![
            PrepareModuleInput { input: first, desired: REPLICATE }.into(),
            PrepareModuleOutput { output: REPLICATE, desired: second }.into(),
        ],
        _ => vec![
            colwise(),
            rowwise(),
            PrepareModuleInput { input: one, desired: second }.into(),
            PrepareModuleOutput { output: first, desired: second }.into(),
            partial,
        ],
    };
    dice.one_of(&choices)
}

/// The possible output of a colwise layer.
fn dice_output(layout: Layout) -> Layout {
    if layout == SEQUENCE { REPLICATE } else { layout }
}

/// The possible input of a rowwise layer.
fn dice_input(layout: Layout) -> Layout {
    if layout == SEQUENCE { LAST } else { layout }
}
