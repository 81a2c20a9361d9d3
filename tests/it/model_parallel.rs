//! Meshes of real processes: the losses of one device, checkpoints between meshes, plans from
//! configuration files, and errors for misfit sizes.

use fulgurite_test_message::assert_says;

use crate::program::{Job, Scratch, assert_close};

/// Strategy, number of ranks, and number of ranks with different data.
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

/// Parses `name.key=value,key=value` as a table.
fn table(strategy: &str) -> String {
    let (name, options) = strategy.split_once('.').unwrap_or((strategy, ""));
    let comma = if options.is_empty() { "" } else { ", " };
    let options = match options.contains('{') {
        true => options.to_owned(),
        false => options.replace(',', ", "),
    };
    format!("{{ type = \"{name}\"{comma}{options} }}")
}

/// A model whose vocabulary and MLP width are divisible by 2, but not by 4.
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

// checklist: Lightning: data_parallel_size, tensor_parallel_size, "auto"
// checklist: NeMo: dp_size, tp_size, cp_size
// checklist: NeMo: parallelize: Llama's plan, plans by Hugging Face's strings, globs
#[test]
fn every_mesh_matches_one_device() {
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
    // 53 tokens and an MLP width of 37 over 2 ranks.
    for options in ["", ".parallelize={ type = \"llama\", loss_parallel = true }"] {
        let run = job.clone().on(&table(&format!("tp{options}")), 2, 4).succeed();
        assert_close(&run.losses(), &expected.losses(), 1e-5);
        // FSDP shards the remainder: 27 and 26 rows, 19 and 18.
        let run = job.clone().on(&table(&format!("fsdp_tp{options}")), 4, 2).succeed();
        assert_close(&run.losses(), &expected.losses(), 1e-5);
        assert_close(&run.steps("grad_norm"), &expected.steps("grad_norm"), 1e-4);
    }
}

/// Parameters cut unevenly in two dimensions load on the same mesh and on other meshes.
#[test]
fn odd_sizes_go_from_mesh_to_mesh() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["data.seq_len=8", "checkpoint.dir=out"]);
    let saved = job.clone().set(&["checkpoint.every_n_steps=4"]);
    let whole = saved.on(&table("fsdp_tp"), 4, 2).succeed();
    let resume = job.set(&["trainer.ckpt_path=out/step-00000004"]);
    let rest = whole.losses().split_off(&5);
    let again = resume.clone().on(&table("fsdp_tp"), 4, 2).succeed();
    assert_eq!(again.losses(), rest, "on the same mesh, to the bit");
    for (strategy, devices, batch) in [("single_device", 1, 4), ("fsdp", 2, 2), ("tp", 2, 4)] {
        let run = resume.clone().on(&table(strategy), devices, batch).succeed();
        assert_close(&run.losses(), &rest, 1e-5);
    }
}

#[test]
fn ranks_share_key_and_value_heads() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&[
        "model.vocab_size=56",
        "model.hidden_size=16",
        "model.intermediate_size=40",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "data.seq_len=8",
    ]);
    let expected = job.clone().on("single_device", 1, 4).succeed();
    for sequence_parallel in [false, true] {
        let plan = format!("{{ type = \"llama\", sequence_parallel = {sequence_parallel} }}");
        let run = job.clone().on(&table(&format!("tp.parallelize={plan}")), 4, 4).succeed();
        assert_close(&run.losses(), &expected.losses(), 1e-5);
        assert_close(&run.steps("grad_norm"), &expected.steps("grad_norm"), 1e-4);
    }
}

// checklist: NeMo: parallelize: Llama's plan, plans by Hugging Face's strings, globs
#[test]
fn plan_from_configuration_file() {
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
fn run_resumes_on_another_mesh() {
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

// checklist: Lightning: save_distributed_checkpoint=False
#[test]
fn full_checkpoints_resume() {
    let scratch = Scratch::with_tokens();
    let job = job(&scratch).set(&["checkpoint.every_n_steps=4", "checkpoint.dir=kept"]);
    let mesh = table("fsdp_tp.save_distributed_checkpoint=false");
    let whole = job.clone().on(&mesh, 4, 4).succeed();
    assert!(scratch.path().join("kept/step-00000004/model.safetensors").is_file());
    let rest = whole.losses().split_off(&5);
    let from = |path: &str| job.clone().set(&[&format!("trainer.ckpt_path={path}")]);
    let again = from("kept/step-00000004").on(&mesh, 4, 4).succeed();
    assert_eq!(again.losses(), rest, "on the same mesh, to the bit");
    let resumed = from("kept/step-00000004").on("ddp", 2, 4).succeed();
    assert_close(&resumed.losses(), &rest, 1e-5);
    // The checkpoint of the other kind is replaced again; then the resumed one is kept.
    let kept = || {
        let entries = std::fs::read_dir(scratch.path().join("kept")).unwrap().flatten();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        entries.map(name).collect::<std::collections::BTreeSet<_>>()
    };
    let one = job.clone().on(&mesh, 4, 4).set(&["checkpoint.keep_last=1"]);
    let from = |path: &str| one.clone().set(&[&format!("trainer.ckpt_path={path}")]);
    from("kept/step-00000004").succeed();
    assert_eq!(kept(), ["last", "step-00000004", "step-00000008"].map(str::to_owned).into());
    let more = ["trainer.max_steps=10", "checkpoint.save_last=true"];
    let last = from("kept/step-00000008").set(&more).succeed();
    assert_eq!(last.losses().keys().copied().collect::<Vec<_>>(), [9, 10]);
    assert_eq!(kept(), ["last", "step-00000008", "step-00000010"].map(str::to_owned).into());
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

// checklist: Lightning: sizes that do not fit the world
#[test]
fn sizes_that_do_not_fit() {
    let scratch = Scratch::with_tokens();
    let error = |strategy: &str, devices, more: &[&str]| {
        let error = job(&scratch).on(&table(strategy), devices, 2).set(more).fail();
        let line = error.lines().find_map(|line| line.strip_prefix("error: ")).unwrap();
        // Any of the failing ranks may be reported first.
        match line.strip_prefix("rank ").and_then(|rest| rest.split_once(" failed: ")) {
            Some((_, message)) => format!("a rank failed: {message}"),
            None => line.to_owned(),
        }
    };
    let odd = ["data.seq_len=7"];
    assert_says!(
        error("model_parallel.data_parallel_size=2,tensor_parallel_size=2", 3, &[]),
        "device mesh … multiplied (4) should equal … size (3) … `trainer.devices` …"
    );
    assert_says!(
        error("model_parallel.tensor_parallel_size=2", 3, &[]),
        "device mesh … multiplied (2) should divide … size (3) … `trainer.devices` …"
    );
    assert_says!(
        error("model_parallel.data_parallel_size=2,data_parallel_shard_size=2", 4, &[]),
        "`trainer.strategy` has both `data_parallel_size` … `data_parallel_shard_size` …"
    );
    assert_says!(error("hsdp", 2, &[]), "strategy `hsdp` needs `data_parallel_replicate_size` …");
    assert_says!(
        error("model_parallel.tensor_paralel_size=2", 2, &[]),
        "unknown key `trainer.strategy.tensor_paralel_size` … `tensor_parallel_size`?"
    );
    assert_says!(
        error("tp.tensor_parallel_size=\"all\"", 2, &[]),
        r#"`trainer.strategy.tensor_parallel_size` … "auto" or "rest" … string "all""#
    );
    assert_says!(error("tp", 3, &[]), "module `model.layers.0.self_attn`: 2 … not divisible … 3 …");
    assert_says!(error(MESHES[7].0, 2, &odd), "a rank failed … sequence parallelism … of 7 …");
    assert_says!(error(MESHES[3].0, 2, &odd), "a rank failed: data … context parallelism … of 7 …");
}

#[test]
fn redundant_ranks_are_a_warning() {
    let scratch = Scratch::with_tokens();
    let warning = "the 2 tensor-parallel ranks compute the same";
    let uncut = job(&scratch).on(&table("model_parallel.parallelize=\"none\""), 2, 2).succeed();
    assert!(uncut.stderr.contains(warning), "{}", uncut.stderr);
    let cut = job(&scratch).on("model_parallel", 2, 2).succeed();
    assert!(!cut.stderr.contains(warning), "{}", cut.stderr);
}
