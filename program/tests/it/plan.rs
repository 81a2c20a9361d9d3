//! `fulgurite plan`: what it says beside what runs take, and what it refuses.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A small decoder on this repository's README.
const MODEL: [&str; 15] = [
    "module.type=causal_lm",
    "model.model_type=llama",
    "model.hidden_size=128",
    "model.intermediate_size=344",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=261",
    "model.max_position_embeddings=128",
    "data.type=text",
    "data.tokenizer=bytes",
    "data.seq_len=64",
    "data.batch_size=8",
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=100",
];

fn fulgurite(command: &str, dir: &Path, sets: &[&str], more: &[&str]) -> Output {
    let readme = concat!("data.path=\"", env!("CARGO_MANIFEST_DIR"), "/../README.md\"");
    let logs = format!("trainer.default_root_dir={:?}", dir.join("logs"));
    let own = MODEL.iter().copied().chain([readme, logs.as_str()]).chain(sets.iter().copied());
    Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .arg(command)
        .args(own.flat_map(|set| ["--set", set]))
        .args(more)
        // Each thread keeps a megabyte for its products, once it has taken part in one.
        .env("RAYON_NUM_THREADS", "1")
        .current_dir(dir)
        .output()
        .expect("the program starts")
}

fn last_object(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_else(|| panic!("nothing was printed; {errors}"));
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))
}

/// A rank that is killed while it plans has no file to leave.
#[test]
fn plans_write_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["plan", "--json"])
        .args(MODEL.into_iter().flat_map(|set| ["--set", set]))
        .args(["--set", concat!("data.path=\"", env!("CARGO_MANIFEST_DIR"), "/../README.md\"")])
        .current_dir(dir.path())
        .env("TMPDIR", dir.path())
        .output()
        .expect("the program starts");
    assert!(last_object(&output)["peak_bytes"].as_u64() > Some(0));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Runs on real processes, and compares with the plan that the run made at its start.
#[test]
fn runs_take_what_was_planned() {
    let dir = tempfile::tempdir().unwrap();
    let fsdp = r#"trainer.strategy={type="fsdp",reshard_after_forward=false}"#;
    let pipeline = r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2}"#;
    let halves = r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2,pipeline_schedule="zb_h1"}"#;
    let cases: [&[&str]; 17] = [
        &[],
        &["trainer.precision=bf16-mixed", "trainer.ema_decay=0.9"],
        &["trainer.activation_checkpointing=full", "trainer.accumulate_grad_batches=2"],
        &["trainer.devices=2", "trainer.strategy=ddp", "optimizer=muon"],
        &["trainer.devices=2", fsdp, "trainer.accumulate_grad_batches=2"],
        &["trainer.devices=3", "trainer.strategy=fsdp"],
        &["trainer.devices=2", r#"trainer.strategy={type="ddp",gradient_compression="bf16"}"#],
        &["trainer.devices=2", "trainer.strategy=diloco"],
        &[
            "trainer.devices=2",
            "trainer.strategy=fsdp",
            r#"trainer.adapters={rank=4,targets=["q_proj"]}"#,
        ],
        &[
            "trainer.devices=2",
            "trainer.strategy=fsdp",
            r#"trainer.adapters={rank=4,targets="all-linear"}"#,
            r#"trainer.quantization={format="nf4",block_size=8}"#,
        ],
        &[
            "trainer.devices=4",
            r#"trainer.strategy={type="model_parallel",tensor_parallel_size=2,parallelize="llama"}"#,
        ],
        &[
            "trainer.devices=2",
            pipeline,
            "trainer.accumulate_grad_batches=3",
            "model.tie_word_embeddings=true",
        ],
        &[
            "trainer.devices=2",
            halves,
            "trainer.accumulate_grad_batches=4",
            "model.num_hidden_layers=4",
        ],
        &["trainer.devices=2", pipeline],
        // The pipeline's two ranks of a stage share its parameters.
        &["trainer.devices=4", pipeline, "trainer.accumulate_grad_batches=2"],
        &["trainer.devices=2", pipeline, "trainer.precision=16-mixed"],
        // The sums of routers and the loads of experts go to the next stage too.
        &[
            "trainer.devices=2",
            pipeline,
            "trainer.accumulate_grad_batches=2",
            "model.model_type=qwen3_moe",
            "model.num_experts=4",
            "model.num_experts_per_tok=2",
            "model.moe_intermediate_size=64",
            "model.output_router_logits=true",
        ],
    ];
    for case in cases {
        let run = fulgurite("fit", dir.path(), case, &["--output", "json"]);
        let plan = &last_object(&run)["plan"];
        let of = |key: &str| {
            plan[key].as_f64().unwrap_or_else(|| panic!("{case:?}: no {key} in {plan}"))
        };
        assert_eq!(
            plan["traffic_bytes_per_step"], plan["measured_traffic_bytes_per_step"],
            "{case:?}"
        );
        let error = of("peak_bytes") / of("measured_peak_bytes") - 1.0;
        // Messages between stages may come earlier than planned.
        let has_stages = case.iter().any(|set| set.contains("pipeline_parallel_size"));
        let most = if has_stages { 0.05 } else { 0.02 };
        assert!(error.abs() < most, "{case:?}: {plan}");
        if case.iter().any(|set| set.starts_with("trainer.devices")) {
            assert!(of("traffic_bytes_per_step") > 0.0, "{case:?}");
        }
    }
}

/// The other ranks of a plan choose no tokens.
#[test]
fn plans_of_pipelines_leave_samples_out() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [
        "trainer.devices=2",
        r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2}"#,
        r#"trainer.callbacks=[{type="samples",prompts=["a"],every_n_steps=1,max_new_tokens=1}]"#,
    ];
    let planned = |sets: &[&str]| last_object(&fulgurite("plan", dir.path(), sets, &["--json"]));
    assert_eq!(
        planned(&sets)["traffic_bytes_per_step"],
        planned(&sets[..2])["traffic_bytes_per_step"]
    );
}

/// Stages get what was given in the same step.
#[test]
fn stages_take_samples_of_any_length() {
    let dir = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        let (prompt, completion) = ("a".repeat(5 + 7 * i % 40), "b".repeat(3 + 11 * i % 60));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
    };
    std::fs::write(dir.path().join("chat.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
    let of_model = MODEL.iter().filter(|set| set.starts_with("model."));
    let sets = [
        "module.type=chat",
        "data.path=chat.jsonl",
        "data.tokenizer=bytes",
        "data.seq_len=128",
        "data.packing=false",
        "data.batch_size=2",
        "trainer.max_steps=4",
        "trainer.devices=2",
        "trainer.accumulate_grad_batches=2",
        r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2}"#,
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["plan", "--json"])
        .args(of_model.copied().chain(sets).flat_map(|set| ["--set", set]))
        .current_dir(dir.path())
        .output()
        .expect("the program starts");
    let plan = last_object(&output);
    assert_eq!(plan["ranks"].as_array().unwrap().len(), 2);
    assert!(plan["traffic_bytes_per_step"].as_u64() > Some(0), "{plan}");
}

#[test]
fn thousands_of_ranks_cost_as_much_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let strategy = r#"trainer.strategy={type="hsdp",data_parallel_shard_size=8}"#;
    let more = ["--world", "4096", "--nodes", "512", "--json", "--hardware", "h100"];
    let plan = last_object(&fulgurite("plan", dir.path(), &[strategy], &more));
    assert_eq!((plan["world_size"].as_u64(), plan["nodes"].as_u64()), (Some(4096), Some(512)));
    let ranks = plan["ranks"].as_array().unwrap();
    let counted: u64 = ranks.iter().map(|class| class["count"].as_u64().unwrap()).sum();
    assert!(counted == 4096 && ranks.len() <= 8, "{} classes", ranks.len());
    let collectives = plan["collectives"].as_array().unwrap();
    let sum = |key: &str| collectives.iter().map(|one| one[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(Some(sum("bytes")), plan["traffic_bytes_per_step"].as_u64());
    // Shards are gathered within a host, gradients of replicas are reduced between hosts.
    let gathers = collectives.iter().find(|one| one["op"] == "all_gather_into").unwrap();
    assert_eq!(gathers["between_hosts"], false, "{gathers}");
    assert!(collectives.iter().any(|one| one["between_hosts"] == true));
    assert!(plan["outlook"]["step_s"].as_f64().unwrap() > 0.0);
    assert!(!dir.path().join("logs").exists(), "a plan leaves no files");
}

#[test]
fn copies_in_memory_are_planned() {
    let dir = tempfile::tempdir().unwrap();
    let plan = |strategy: &str, nodes: &str| {
        let strategy = format!("trainer.strategy={strategy}");
        let elastic =
            "trainer.elastic={ enabled = true, replicas = 1, replicate_every_n_steps = 3 }";
        let more = ["--world", "4", "--nodes", nodes, "--json"];
        last_object(&fulgurite("plan", dir.path(), &[&strategy, elastic], &more))
    };
    let of = |plan: &Value, key: &str| plan["copies"][key].as_u64().unwrap();
    let here = plan("fsdp", "1");
    let state = here["outlook"]["checkpoint_bytes"].as_u64().unwrap();
    assert_eq!(of(&here, "every_n_steps"), 3);
    // Two copies, and the buffers of all ranks.
    assert_eq!((of(&here, "sent_bytes"), of(&here, "host_bytes")), (0, 3 * state));
    for strategy in [
        "fsdp",
        "{ type = \"hsdp\", data_parallel_replicate_size = 2 }",
        "{ type = \"model_parallel\", pipeline_parallel_size = 2 }",
    ] {
        let apart = plan(strategy, "2");
        assert_eq!(of(&apart, "sent_bytes"), state, "{strategy}");
        // Each host has the other's part too.
        let most = of(&apart, "host_bytes");
        assert!(most > 2 * state && most < 3 * state, "{strategy}: {most} of {state}");
    }
    assert_eq!(plan("ddp", "2")["copies"], Value::Null, "each rank has everything");
}

#[test]
fn uneven_shards_are_classes() {
    let dir = tempfile::tempdir().unwrap();
    let sets = ["trainer.strategy=fsdp", "trainer.devices=3", "model.vocab_size=262"];
    let plan = last_object(&fulgurite("plan", dir.path(), &sets, &["--json"]));
    let ranks = plan["ranks"].as_array().unwrap();
    assert!(ranks.len() > 1, "262 rows are no multiple of 3");
    let most = ranks.iter().map(|class| class["peak_bytes"].as_u64().unwrap()).max();
    assert_eq!(most, plan["peak_bytes"].as_u64());
}

#[test]
fn budgets_and_pages() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tight.toml"), "peak_bytes = 1000\n").unwrap();
    std::fs::write(dir.path().join("wide.toml"), "peak_bytes = 1000000000\n").unwrap();
    std::fs::write(dir.path().join("wrong.toml"), "peak = 1\n").unwrap();
    let page = ["--page", "plan.html", "--check", "wide.toml"];
    let plan = fulgurite("plan", dir.path(), &[], &page);
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    let html = std::fs::read_to_string(dir.path().join("plan.html")).unwrap();
    assert!(html.contains("<svg") && html.contains("optimizer state") && !html.contains("http"));
    for (budget, wanted) in
        [("tight.toml", "`peak_bytes` is"), ("wrong.toml", "unknown field `peak`")]
    {
        let refused = fulgurite("plan", dir.path(), &[], &["--check", budget]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains(wanted), "{text}");
    }
}

#[test]
fn a_run_that_does_not_fit_gets_advice() {
    let dir = tempfile::tempdir().unwrap();
    let plan = |memory_bytes: u64| {
        let table = format!(
            "name = \"a small device\"\ndevices_per_host = 2\nmemory_bytes = {memory_bytes}\n\
             flops = {{ f32 = 1e12 }}\nmemory_bytes_per_s = 1e11\n\
             within_hosts = {{ latency_s = 1e-6, bytes_per_s = 1e10 }}\n\
             between_hosts = {{ latency_s = 1e-6, bytes_per_s = 1e9 }}\n"
        );
        std::fs::write(dir.path().join("device.toml"), table).unwrap();
        let more = ["--world", "2", "--hardware", "device.toml"];
        let output = fulgurite("plan", dir.path(), &["trainer.strategy=ddp"], &more);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let peak = |text: &str| {
        let line = text.lines().find(|line| line.contains("at most")).unwrap().to_owned();
        let mib = line.split("at most ").nth(1).unwrap().split(" MiB").next().unwrap().to_owned();
        mib.parse::<f64>().unwrap()
    };
    let fits = plan(1 << 40);
    assert!(fits.contains("it fits into a device") && !fits.contains("--set"), "{fits}");
    let tight = plan((peak(&fits) * 0.9 * f64::from(1 << 20)) as u64);
    let (_, advice) = tight.split_once("it fits with").unwrap_or_else(|| panic!("{tight}"));
    let changes: Vec<_> = advice.lines().filter(|line| line.contains(": ")).collect();
    assert_eq!(changes.len(), 3, "{advice}");
    assert!(changes.iter().all(|line| peak(&line.replace(": ", ": at most ")) < peak(&fits)));
    assert!(plan(1000).contains("no change that `plan` knows makes it fit"));
}

#[test]
fn search_finds_what_none_beats() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--search", "--hardware", "h100", "--world", "2", "--json"];
    let output = fulgurite("plan", dir.path(), &[], &more);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("WARN"), "a candidate's warning: {errors}");
    let found = last_object(&output);
    let front = found["front"].as_array().unwrap();
    assert!(!front.is_empty() && found["planned"].as_u64().unwrap() > front.len() as u64);
    let numbers =
        |key: &str| front.iter().map(|one| one[key].as_f64().unwrap()).collect::<Vec<_>>();
    assert!(numbers("items_per_s").is_sorted_by(|a, b| a >= b), "the fastest first");
    // Within half a percent two are alike.
    let smaller = |a: &f64, b: &f64| *a >= 0.995 * b;
    assert!(numbers("peak_bytes").is_sorted_by(smaller), "each slower one is smaller: {front:?}");
    let items = 2 * 8 * 64; // of 2 ranks
    assert!(numbers("items_per_step").iter().all(|&of| of as u64 == items), "{front:?}");
    // The smallest has small micro-batches. Whether it also has its weights on the host has
    // differed between CPUs.
    let sets: Vec<String> = front.iter().map(|one| one["set"].to_string()).collect();
    assert!(sets[sets.len() - 1].contains("data.batch_size=2"), "{sets:?}");
    let offloaded = ["data.batch_size=2", "trainer.accumulate_grad_batches=4", "cpu_offload"];
    let has_offloaded = sets.iter().any(|set| offloaded.iter().all(|change| set.contains(change)));
    assert!(has_offloaded, "{sets:?}");
}

/// A device with memory of its own, beside its host's.
const DEVICE: &str = r#"
    name = "a device"
    flops = { f32 = 1e12 }
    memory_bytes_per_s = 1e11
    host = { memory_bytes = 1_000_000_000, memory_bytes_per_s = 1e10, link = { latency_s = 0, bytes_per_s = 1e9 } }
    within_hosts = { latency_s = 0, bytes_per_s = 1e10 }
    between_hosts = { latency_s = 0, bytes_per_s = 1e10 }
"#;

#[test]
fn offloaded_memory_is_the_hosts() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("device.toml"), DEVICE).unwrap();
    let small = DEVICE.replace("1_000_000_000", "1_000");
    std::fs::write(dir.path().join("small.toml"), small).unwrap();
    let more = ["--hardware", "device.toml", "--json"];
    let plan = |set: &str| {
        let sets = [set, "model.num_hidden_layers=8"];
        let plan = last_object(&fulgurite("plan", dir.path(), &sets, &more));
        let kind = |of: &str, kind: &str| plan["ranks"][0][of][kind].as_u64().unwrap_or(0);
        (plan.clone(), kind("host_by_kind", "activations"), kind("peak_by_kind", "activations"))
    };
    let number = |plan: &Value, key: &str| plan[key].as_f64().unwrap();
    let (plain, _, activations) = plan("trainer.strategy=single_device");
    assert!(number(&plain, "host_bytes") < 0.01 * number(&plain, "peak_bytes"), "data alone");

    let offload = r#"trainer.activation_checkpointing={type="none",offload="host"}"#;
    let (offloaded, on_host, rest) = plan(offload);
    // Copies of the last units are under way, whose memory is the device's still.
    assert!(on_host > activations / 2, "{on_host} of {activations}");
    assert!(rest < 3 * activations / 5, "{rest} of {activations}");
    // Each byte goes there and back, at 1 GB/s.
    let copied = 2.0 * on_host as f64 / 1e9;
    let more_s = number(&offloaded, "step_s") - number(&plain, "step_s");
    assert!((0.6 * copied..1.1 * copied).contains(&more_s), "{more_s} s for {copied} s of copies");

    let sharded = r#"trainer.strategy={type="fsdp",cpu_offload=true}"#;
    let (sharded, ..) = plan(sharded);
    let of = |kind: &str| sharded["ranks"][0]["host_by_kind"][kind].as_u64().unwrap_or(0);
    let parameters = sharded["parameters"].as_u64().unwrap();
    // In f32. Blocks below 256 bytes are not counted, and lists of tensors are.
    for (kind, bytes) in [("parameters", 4), ("gradients", 4), ("optimizer state", 8)] {
        let all = bytes * parameters;
        assert!(of(kind).abs_diff(all) < all / 100, "{kind}: {} of {all}", of(kind));
    }
    assert!(sharded["ranks"][0]["peak_by_kind"]["optimizer state"].is_null());
    let tight = fulgurite("plan", dir.path(), &[], &["--hardware", "small.toml"]);
    let text = String::from_utf8_lossy(&tight.stdout).into_owned();
    assert!(text.contains("does NOT fit into the host's memory"), "{text}");
    // On the host's own cores there is nothing to offload to.
    let refused = fulgurite("plan", dir.path(), &[offload], &[]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("by --hardware (h100, or a table with `host`)"), "{text}");
}

/// The optimizer of offloaded shards has its matrices on the host, between its ranks too.
#[test]
fn matrices_of_muon_are_beside_the_shards() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("device.toml"), DEVICE).unwrap();
    let more = ["--hardware", "device.toml", "--json", "--world", "2"];
    let host = |optimizer: &str| {
        let strategy = r#"trainer.strategy={type="fsdp",cpu_offload=true}"#;
        let plan = last_object(&fulgurite("plan", dir.path(), &[strategy, optimizer], &more));
        plan["ranks"][0]["host_by_kind"]["activations"].as_u64().unwrap_or(0)
    };
    // Of a round, at least a matrix of 344 rows and 128 columns.
    let (muon, adamw) = (host("optimizer=muon"), host("optimizer=adamw"));
    assert!(muon > adamw + 4 * 344 * 128, "{muon} and {adamw}");
}

/// The operations of a mixture are those of a row's experts.
#[test]
fn operations_of_experts_are_those_of_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let operations = |sets: &[&str]| {
        let more = ["--json", "--hardware", "h100"];
        let plan = last_object(&fulgurite("plan", dir.path(), sets, &more));
        let outlook = &plan["outlook"];
        outlook["mfu"].as_f64().unwrap() * outlook["step_s"].as_f64().unwrap()
    };
    let mixture = |experts: &'static str| {
        ["model.model_type=mixtral", experts, "model.num_experts_per_tok=2"]
    };
    let [two, eight] = ["model.num_local_experts=2", "model.num_local_experts=8"]
        .map(|experts| operations(&mixture(experts)));
    // The router has 6 rows more, of 128 columns, in 2 layers.
    let (dense, layer) = (operations(&[]), 2.0 * 3.0 * 128.0 * 344.0);
    let one = (two - dense) / (layer + 2.0 * 2.0 * 128.0);
    assert!((eight - two - one * 2.0 * 6.0 * 128.0).abs() < 1e-3 * two, "{two} {eight} {dense}");
    let trained = operations(&[r#"trainer.adapters={rank=4,targets=["q_proj"]}"#]);
    assert!((0.65..0.68).contains(&(trained / dense)), "4 for each frozen parameter, not 6");
}

#[test]
fn nonsense_is_refused_as_by_a_run() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("slow.toml"),
        "name = \"x\"\nflops = { f32 = 1e9 }\nmemory_bytes_per_s = 0\n\
         within_hosts = { latency_s = 0, bytes_per_s = 1 }\n\
         between_hosts = { latency_s = 0, bytes_per_s = 1 }\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("turned.csv"), "1F0,1B0\n0F0,0B0\n").unwrap();
    let turned = r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2,pipeline_schedule="turned.csv"}"#;
    let unreachable = DEVICE.replace("bytes_per_s = 1e9 } }", "bytes_per_s = 0 } }");
    std::fs::write(dir.path().join("unreachable.toml"), unreachable).unwrap();
    let cases: [(&[&str], &[&str], &str); 11] = [
        (&["trainer.devices=2", turned], &[], "a plan begins with rank 0"),
        (&["trainer.plan_hardware=abacus"], &[], "`trainer.plan_hardware` abacus"),
        (&[], &["--search", "--page", "plan.html"], "cannot be used with"),
        (&[], &["--print-config"], "--print-config is for a run"),
        (&["trainer.strategie=ddp"], &[], "unknown key `trainer.strategie`"),
        (&["model.num_attention_heads=5"], &[], "num_attention_heads"),
        (&[], &["--world", "0"], "--world 0"),
        (&[], &["--world", "7", "--nodes", "2"], "--world 7"),
        (&[], &["--hardware", "abacus"], "--hardware abacus"),
        (&[], &["--hardware", "unreachable.toml"], "`host.link.bytes_per_s` must be above 0"),
        (&[], &["--hardware", "slow.toml"], "`memory_bytes_per_s` must be above 0"),
    ];
    for (sets, more, wanted) in cases {
        let refused = fulgurite("plan", dir.path(), sets, more);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains(wanted), "{wanted}: {text}");
    }
    let refused = fulgurite("fit", dir.path(), &["trainer.plan_hardware=abacus"], &[]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("`trainer.plan_hardware` abacus"), "{text}");
}
