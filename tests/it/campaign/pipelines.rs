//! Pipelines of random models, meshes, schedules and options: each trains as the same mesh does
//! without stages.

use fastrand::Rng;
use fulgurite_strategies::schedule::pipeline::{Schedule, Type};

use super::trials::trials;
use crate::pipeline::training::{
    Keys, assert_same, assert_within, keys, pipelined, random_lists, train,
};

/// Keys of a mesh besides the pipeline, its ranks, and how many of them have batches of their own.
const MESHES: [(&str, usize, usize); 8] = [
    ("", 1, 1),
    ("", 1, 1),
    ("data_parallel_replicate_size = 2, data_parallel_shard_size = 1", 2, 2),
    ("data_parallel_shard_size = 2", 2, 2),
    ("data_parallel_shard_size = 2, reshard_after_forward = true", 2, 2),
    ("context_parallel_size = 2, tensor_parallel_size = 1", 2, 1),
    // Not for latent attention.
    ("tensor_parallel_size = 2, data_parallel_shard_size = 1", 2, 1),
    // Not for experts either.
    (
        "tensor_parallel_size = 2, data_parallel_shard_size = 1, \
         parallelize = { type = 'llama', sequence_parallel = true }",
        2,
        1,
    ),
];

/// Model families, with the keys that they have besides Llama's.
const FAMILIES: [(&str, &str); 9] = [
    ("llama", ""),
    ("mistral", "sliding_window = 5\n"),
    ("qwen3", ""),
    ("olmo2", ""),
    ("smollm3", ""),
    ("mixtral", "num_local_experts = 4\nnum_experts_per_tok = 2\nexpert_capacity_factor = 0.8\n"),
    // With the loss that balances experts, whose sums go from stage to stage.
    (
        "qwen3_moe",
        "num_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\n\
         mlp_only_layers = [0]\noutput_router_logits = true\nrouter_aux_loss_coef = 0.1\n",
    ),
    (
        "glm4_moe",
        "n_routed_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\n\
         expert_bias_update_rate = 0.01\n",
    ),
    (
        "deepseek_v3",
        "n_routed_experts = 4\nnum_experts_per_tok = 2\nn_group = 2\ntopk_group = 1\n\
         first_k_dense_replace = 1\nmoe_intermediate_size = 8\nq_lora_rank = 8\nkv_lora_rank = 8\n\
         qk_nope_head_dim = 4\nqk_rope_head_dim = 4\nv_head_dim = 4\n\
         expert_bias_update_rate = 0.01\n",
    ),
];

/// The mesh with experts on ranks of their own.
const EXPERT_MESH: (&str, usize, usize) =
    ("tensor_parallel_size = 1, expert_parallel_size = 2", 2, 2);

/// A random pipeline.
#[derive(Debug)]
struct Case {
    /// Keys of the mesh without stages.
    mesh: &'static str,
    /// Ranks of that mesh.
    others: usize,
    /// Ranks of the pipeline.
    stage_ranks: usize,
    /// Further keys of the pipeline.
    pipeline: Vec<String>,
    /// The lists, if they come from a file.
    lists: Option<String>,
    model: String,
    data: String,
    trainer: String,
    optimizer: &'static str,
    /// Whether gradients add up in the same order.
    is_bitwise: bool,
}

impl Case {
    fn new(rng: &mut Rng) -> Self {
        let (family, more_keys) = one_of(rng, &FAMILIES);
        let has_experts = more_keys.contains("experts");
        let (mesh, others, data_ranks) = match has_experts && rng.u8(0..3) == 0 {
            true => EXPERT_MESH,
            false if family == "deepseek_v3" => one_of(rng, &MESHES[..6]),
            false if has_experts => one_of(rng, &MESHES[..7]),
            false => one_of(rng, &MESHES),
        };
        let stage_ranks = rng.usize(2..=4);
        let accumulate = rng.usize(1..=8);
        let parts = if rng.u8(0..4) == 0 { 2 } else { 1 };
        let micro_batches = accumulate * parts;
        let (pipeline, stages, lists) = schedule(rng, stage_ranks, micro_batches);
        let layers = stages + rng.usize(0..=3);
        let mut pipeline: Vec<String> = pipeline.into_iter().collect();
        match rng.u8(0..6) {
            0 | 1 => pipeline.push(format!("pipeline_units = {:?}", units(rng, stages, layers))),
            2 => pipeline.push("pipeline_units = 'balanced'".to_owned()),
            _ => {}
        }

        let tied = rng.u8(0..4) == 0;
        let model = format!(
            "model_type = '{family}'\nvocab_size = 24\nhidden_size = 16\nintermediate_size = 24\n\
             num_hidden_layers = {layers}\nnum_attention_heads = 4\nnum_key_value_heads = {}\n\
             head_dim = 4\nmax_position_embeddings = 16\npad_token_id = 0\n\
             tie_word_embeddings = {tied}\nattention_dropout = {}\n{more_keys}",
            if family == "deepseek_v3" { 4 } else { one_of(rng, &[2, 4]) },
            one_of(rng, &["0.0", "0.1"]),
        );

        // A batch of a rank, divided into `parts`.
        let batch = parts * one_of(rng, &[1, 2]) * (2 / data_ranks);
        let lengths_vary = parts == 1 && others == 1 && rng.bool();
        let data = format!("batch_size = {batch}\nlengths_vary = {lengths_vary}\n");

        let mut trainer = format!("accumulate_grad_batches = {accumulate}\n");
        if parts > 1 {
            trainer += &format!("micro_batch_size = {}\n", batch / parts);
        }
        let mut options = vec![
            "precision = 'bf16-mixed'",
            "precision = '16-mixed'",
            "activation_checkpointing = 'full'",
            "ema_decay = 0.9",
            "freeze = ['model.embed_tokens', 'model.layers.0']",
            "detect_anomaly = true",
        ];
        if !has_experts {
            options.push("adapters = { rank = 2, targets = 'all-linear' }");
        }
        // Some schedules exist for some numbers of micro-batches only.
        let takes_any = pipeline.iter().any(|key| key.contains("'1f1b'"));
        if parts == 1 && takes_any {
            options.push("last_batch = 'partial'\nlimit_train_batches = 5");
        }
        rng.shuffle(&mut options);
        for option in &options[..rng.usize(0..=2)] {
            if !(option.contains("precision") && trainer.contains("precision")) {
                trainer += option;
                trainer += "\n";
            }
        }
        // Muon takes no adapters.
        let optimizers = ["muon", "adamw", "adamw", "sgd", "lion"];
        let optimizer = one_of(rng, &optimizers[usize::from(trainer.contains("adapters"))..]);
        let is_bitwise = !tied && optimizer != "muon";
        Self {
            mesh,
            others,
            stage_ranks,
            pipeline,
            lists,
            model,
            data,
            trainer,
            optimizer,
            is_bitwise,
        }
    }

    fn run(&self) {
        let keys = Keys {
            model: &self.model,
            optimizer: self.optimizer,
            ..keys(&self.data, &self.trainer)
        };
        let whole = format!("{{ type = 'model_parallel', {} }}", self.mesh);
        let keys = if self.mesh.is_empty() { keys } else { Keys { strategy: &whole, ..keys } };
        let expected = train(self.others, keys).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        assert!(expected.has_trained(), "{self:?}");

        let folder = tempfile::tempdir().unwrap();
        let mut options = vec![format!("pipeline_parallel_size = {}", self.stage_ranks)];
        options.extend(self.pipeline.iter().cloned());
        if let Some(lists) = &self.lists {
            let path = folder.path().join("lists.csv");
            std::fs::write(&path, lists).unwrap();
            options.push(format!("pipeline_schedule = {path:?}"));
        }
        options.extend((!self.mesh.is_empty()).then(|| self.mesh.to_owned()));
        let run = pipelined(self.others * self.stage_ranks, &options.join(", "), keys);
        let run = run.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let what = format!("{self:?}");
        match (self.is_bitwise, self.trainer.contains("16-mixed")) {
            (true, _) => assert_same(&what, &run, &expected),
            (false, true) => assert_within(2e-3, &what, &run, &expected),
            (false, false) => assert_within(2e-5, &what, &run, &expected),
        }
    }
}

fn one_of<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    choices[rng.usize(..choices.len())]
}

/// The keys of a schedule that exists for these sizes, or random lists; and the number of stages.
fn schedule(
    rng: &mut Rng,
    ranks: usize,
    micro_batches: usize,
) -> (Option<String>, usize, Option<String>) {
    loop {
        if rng.u8(0..4) == 0 {
            let lists = random_lists(rng, ranks, micro_batches);
            let stages = Schedule::from_csv(&lists).unwrap().stages();
            return (None, stages, Some(lists));
        }
        let kind = one_of(rng, &Type::ALL);
        let of_rank = rng.usize(1..=2);
        if Schedule::new(kind, ranks, of_rank, micro_batches).is_ok() {
            let keys = format!(
                "pipeline_schedule = '{}', pipeline_stages_per_rank = {of_rank}",
                kind.name()
            );
            return (Some(keys), ranks * of_rank, None);
        }
    }
}

/// The units of each stage, at least one.
fn units(rng: &mut Rng, stages: usize, units: usize) -> Vec<usize> {
    let mut counts = vec![1; stages];
    (stages..units).for_each(|_| counts[rng.usize(..stages)] += 1);
    counts
}

// checklist: NeMo: pipeline parallelism
#[test]
fn random_pipelines_change_no_bit() {
    trials(40, |trial| {
        let case = Case::new(&mut trial.rng);
        eprintln!("{}: {case:?}", trial.seed);
        case.run();
    });
}
