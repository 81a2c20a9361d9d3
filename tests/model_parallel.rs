//! Meshes of real processes: the losses of one device, checkpoints that go from mesh to mesh, plans
//! from configuration files, and what is said when sizes do not fit.

mod program;

use program::{Job, Scratch, assert_close};

/// Strategy, ranks, and ranks that see different data.
const MESHES: [(&str, usize, usize); 9] = [
    ("tp", 2, 1),
    ("hsdp.data_parallel_replicate_size=2", 4, 4),
    ("model_parallel.tensor_parallel_size=2", 4, 2),
    ("model_parallel.context_parallel_size=2,tensor_parallel_size=1", 2, 1),
    ("model_parallel.context_parallel_size=2,tensor_parallel_size=2", 4, 1),
    ("fsdp_tp.parallelize={ type = \"llama\", sequence_parallel = true }", 4, 2),
    ("fsdp_tp.parallelize={ type = \"llama\", loss_parallel = true }", 4, 2),
    ("tp.parallelize={ type = \"llama\", sequence_parallel = true, loss_parallel = true }", 2, 1),
    ("fsdp_tp.parallelize=\"hf\"", 4, 2),
];

/// `name.key=value,key=value` as a table.
fn table(strategy: &str) -> String {
    let (name, options) = strategy.split_once('.').unwrap_or((strategy, ""));
    let comma = if options.is_empty() { "" } else { ", " };
    let options = match options.contains('{') {
        true => options.to_owned(),
        false => options.replace(',', ", "),
    };
    format!("{{ type = \"{name}\"{comma}{options} }}")
}

/// A model whose sizes 2 ranks divide, and what they leave another 2 do not.
fn job(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "model.vocab_size=54",
        "model.hidden_size=20",
        "model.intermediate_size=38",
        "model.dropout=0.1",
        "data.seq_len=8",
        "data.shuffle=true",
        "trainer.gradient_clip_val=0.3",
    ])
}

#[test]
fn every_mesh_has_the_losses_of_one_device() {
    let scratch = Scratch::with_tokens();
    let expected = job(&scratch).on("single_device", 1, 8).succeed();
    for (strategy, devices, replicas) in MESHES {
        for accumulate in [1, 2] {
            let accumulated = format!("trainer.accumulate_grad_batches={accumulate}");
            let run = job(&scratch)
                .on(&table(strategy), devices, 8 / replicas / accumulate)
                .set(&[&accumulated])
                .succeed();
            assert_eq!(run.summary()["world_size"], devices, "{strategy}");
            assert_close(&run.losses(), &expected.losses(), 1e-5);
            assert_close(&run.steps("grad_norm"), &expected.steps("grad_norm"), 1e-4);
        }
    }
}

#[test]
fn odd_sizes_are_cut_unevenly() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["data.seq_len=8"]);
    let expected = job.clone().on("single_device", 1, 4).succeed();
    // 53 tokens and an MLP of 37 over 2 ranks.
    for options in ["", ".parallelize={ type = \"llama\", loss_parallel = true }"] {
        let run = job.clone().on(&table(&format!("tp{options}")), 2, 4).succeed();
        assert_close(&run.losses(), &expected.losses(), 1e-5);
    }
}

#[test]
fn a_plan_in_a_configuration_file() {
    let scratch = Scratch::with_tokens();
    scratch.file(
        "plan.toml",
        r#"
[trainer]
devices = 4

[trainer.strategy]
type = "model_parallel"
tensor_parallel_size = 2

[trainer.strategy.parallelize]
type = "plan"

[trainer.strategy.parallelize.plan]
"model.embed_tokens" = "rowwise_rep"
"model.layers.*.self_attn.q_proj" = "colwise"
"model.layers.*.self_attn.k_proj" = "colwise"
"model.layers.*.self_attn.v_proj" = "colwise"
"model.layers.*.self_attn.o_proj" = { type = "rowwise", output = "replicate" }
"model.layers.*.mlp.gate_proj" = "colwise"
"model.layers.*.mlp.up_proj" = "colwise"
"model.layers.*.mlp.down_proj" = "rowwise"
"lm_head" = "colwise_rep"
"#,
    );
    let job = job(&scratch);
    let expected = job.clone().on("single_device", 1, 4).succeed();
    let mut args = scratch.job(&["fit", "--output", "json", "--config", "plan.toml"]);
    args = args.set(&job.assignments("trainer.strategy", "trainer.devices"));
    let run = args.set(&["data.batch_size=2"]).succeed();
    assert_eq!(run.summary()["strategy"], "model_parallel");
    assert_close(&run.losses(), &expected.losses(), 1e-5);
}

#[test]
fn a_run_goes_on_on_another_mesh() {
    let scratch = Scratch::with_tokens();
    let job = job(&scratch).set(&["checkpoint.every_n_steps=4", "checkpoint.dir=kept"]);
    let whole = job.clone().on(&table(MESHES[5].0), 4, 4).succeed();
    let resume = job.set(&["trainer.ckpt_path=kept/step-00000004", "checkpoint.every_n_steps=100"]);
    let rest = whole.losses().split_off(&5);
    let again = resume.clone().on(&table(MESHES[5].0), 4, 4).succeed();
    assert_eq!(again.losses(), rest, "on the same mesh, to the bit");
    for (strategy, devices, replicas) in
        [("single_device", 1, 1), ("fsdp", 2, 2), MESHES[0], MESHES[1], MESHES[4]]
    {
        let resumed = resume.clone().on(&table(strategy), devices, 8 / replicas).succeed();
        assert_close(&resumed.losses(), &rest, 1e-5);
    }
}

#[test]
fn text_is_written_under_every_plan() {
    let scratch = Scratch::new();
    scratch.file("text.txt", "the quick brown fox jumps over the lazy dog; ".repeat(40));
    let text = |strategy: &str, devices| {
        let run = scratch
            .job(&["fit"])
            .set(&[
                "model.num_hidden_layers=1",
                "model.hidden_size=32",
                "model.intermediate_size=64",
                "data.type=text",
                "data.path=text.txt",
                "data.seq_len=32",
                "trainer.max_steps=2",
                "checkpoint.save_last=false",
            ])
            .on(strategy, devices, 4)
            .succeed();
        let output = format!("{}{}", run.stdout, run.stderr);
        output.split_once("── continuation").map(|(_, text)| text.to_owned()).unwrap_or_default()
    };
    let expected = text("single_device", 1);
    assert!(!expected.is_empty());
    for options in [
        "tp",
        "tp.parallelize={ type = \"llama\", sequence_parallel = true, loss_parallel = true }",
        "model_parallel.context_parallel_size=2,tensor_parallel_size=1",
    ] {
        assert_eq!(text(&table(options), 2).lines().next(), expected.lines().next(), "{options}");
    }
}

#[test]
fn sizes_that_do_not_fit() {
    let scratch = Scratch::with_tokens();
    let error = |strategy: &str, devices, more: &[&str]| {
        job(&scratch).on(&table(strategy), devices, 2).set(more).fail()
    };
    insta::assert_snapshot!(error("model_parallel.data_parallel_size=2,tensor_parallel_size=2", 3, &[]), @"");
    insta::assert_snapshot!(error("model_parallel.tensor_parallel_size=2", 3, &[]), @"");
    insta::assert_snapshot!(error("model_parallel.data_parallel_size=2,data_parallel_shard_size=2", 4, &[]), @"");
    insta::assert_snapshot!(error("hsdp", 2, &[]), @"");
    insta::assert_snapshot!(error("model_parallel.tensor_paralel_size=2", 2, &[]), @"");
    insta::assert_snapshot!(error("tp.tensor_parallel_size=\"all\"", 2, &[]), @"");
    insta::assert_snapshot!(error("tp", 3, &[]), @"");
    let odd = ["data.seq_len=7"];
    insta::assert_snapshot!(error(MESHES[7].0, 2, &odd), @"");
    insta::assert_snapshot!(error(MESHES[3].0, 2, &odd), @"");
    insta::assert_snapshot!(error("fsdp_tp", 4, &["model.vocab_size=53"]), @"");
}
