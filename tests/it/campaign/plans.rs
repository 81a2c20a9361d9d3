//! Plans of random runs: each run takes the bytes and the memory that were planned at its start.

use fastrand::Rng;

use super::trials::trials;
use crate::program::Scratch;

/// A random run, as settings. Some exclude each other, and are refused.
fn settings(rng: &mut Rng) -> Vec<String> {
    let one = |rng: &mut Rng, of: &[&str]| of[rng.usize(..of.len())].to_owned();
    let chance = |rng: &mut Rng, of: usize| rng.usize(..of) == 0;
    let mut all = Vec::new();
    let mut set = |text: String| all.push(text);

    let family = one(rng, &["llama", "llama", "qwen2", "qwen3", "gemma2", "gpt2", "mixtral"]);
    let heads = 2 * rng.usize(1..5);
    let head_dim = 8 * rng.usize(2..6);
    let hidden = heads * head_dim;
    let layers = rng.usize(1..5);
    set(format!("model.type={family}"));
    match family.as_str() {
        "gpt2" => {
            set(format!("model.n_embd={hidden}"));
            set(format!("model.n_layer={layers}"));
            set(format!("model.n_head={heads}"));
            set("model.n_positions=128".to_owned());
        }
        _ => {
            set(format!("model.hidden_size={hidden}"));
            set(format!("model.intermediate_size={}", rng.usize(133..700)));
            set(format!("model.num_hidden_layers={layers}"));
            set(format!("model.num_attention_heads={heads}"));
            set(format!("model.num_key_value_heads={}", if chance(rng, 2) { heads } else { 2 }));
            set(format!("model.head_dim={head_dim}"));
            set("model.max_position_embeddings=128".to_owned());
            set(format!("model.tie_word_embeddings={}", chance(rng, 3)));
        }
    }
    if family == "mixtral" {
        set("model.num_local_experts=4".to_owned());
    }
    set(format!("model.vocab_size={}", rng.usize(53..400)));
    set(format!("data.seq_len={}", rng.usize(24..100)));
    set(format!("data.batch_size={}", 2 * rng.usize(1..5)));

    let (devices, strategies): (usize, &[&str]) = match rng.usize(..6) {
        0 | 1 => (1, &["single_device", "fsdp"]),
        2 | 3 => (
            2,
            &[
                "ddp",
                "fsdp",
                "{ type = 'fsdp', reshard_after_forward = false }",
                "{ type = 'ddp', gradient_compression = 'bf16' }",
                "diloco",
                "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }",
                "{ type = 'model_parallel', context_parallel_size = 2 }",
            ],
        ),
        4 => (3, &["ddp", "fsdp"]),
        _ => (
            4,
            &[
                "fsdp",
                "{ type = 'hsdp', data_parallel_shard_size = 2 }",
                "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }",
                "{ type = 'model_parallel', context_parallel_size = 2, data_parallel_shard_size = 2 }",
            ],
        ),
    };
    set(format!("trainer.devices={devices}"));
    set(format!("trainer.strategy={}", one(rng, strategies)));
    set(format!("trainer.accumulate_grad_batches={}", one(rng, &["1", "1", "2", "3"])));
    set(format!(
        "trainer.precision={}",
        one(rng, &["32-true", "32-true", "bf16-mixed", "bf16-true"])
    ));
    let recomputation = ["none", "full", "selective", "{ type = 'full', offload = 'disk' }"];
    set(format!("trainer.activation_checkpointing={}", one(rng, &recomputation)));
    let optimizers =
        ["adamw", "sgd", "lion", "adafactor", "{ type = 'adamw', state_dtype = 'bf16' }"];
    set(format!("optimizer={}", one(rng, &optimizers)));
    if chance(rng, 4) {
        set("trainer.adapters={ targets = 'all-linear', rank = 4 }".to_owned());
        if chance(rng, 2) {
            set("trainer.quantization={}".to_owned());
        }
    } else if chance(rng, 4) {
        set("trainer.ema_decay=0.9".to_owned());
    }
    if chance(rng, 4) {
        set("trainer.micro_batch_size=1".to_owned());
    }
    all
}

/// Bytes are equal. Planned memory is at most 5 % too low, and at most 5 % and 1.25 MiB too high. A
/// thread keeps a buffer for products once it has taken part in one. A plan's threads take part in
/// others.
#[test]
fn random_runs_take_what_was_planned() {
    let (mut compared, mut refused) = (0, 0);
    let mut errors = Vec::new();
    trials(8, |trial| {
        let scratch = Scratch::new();
        let mut ids = Rng::with_seed(trial.seed);
        scratch.tokens("tokens.u16", (0..40_000).map(|_| ids.u16(..53)));
        let sets = settings(&mut trial.rng);
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let job = scratch
            .job(&["fit", "--output", "json"])
            .set(&[
                "data.type=tokens",
                "data.path=tokens.u16",
                "data.shuffle=false",
                "trainer.max_steps=4",
                "trainer.log_every_n_steps=100",
                "checkpoint.save_last=false",
            ])
            .set(&sets)
            // Each thread keeps a megabyte for its products, once it has taken part in one.
            .env("RAYON_NUM_THREADS", 1);
        let run = job.run();
        if run.code() != Some(0) {
            // Not every combination can run, such as parts of a sequence and a window.
            let is_refused = !run.stdout.contains("\"step\"") && run.stderr.contains("error: ");
            assert!(is_refused, "{sets:?}: {}{}", run.stdout, run.stderr);
            refused += 1;
            return;
        }
        let summary = run.events_of("summary").pop().expect("a summary");
        let plan = &summary["plan"];
        let of = |key: &str| {
            plan[key].as_f64().unwrap_or_else(|| panic!("{sets:?}: no {key} in {plan}"))
        };
        let bytes =
            ["traffic_bytes_per_step", "measured_traffic_bytes_per_step"].map(|key| &plan[key]);
        assert_eq!(bytes[0], bytes[1], "{sets:?}");
        let (planned, taken) = (of("peak_bytes"), of("measured_peak_bytes"));
        errors.push(planned / taken - 1.0);
        let range = 0.95 * taken..1.05 * taken + 1_310_720.0;
        assert!(range.contains(&planned), "{sets:?}: {plan}");
        compared += 1;
    });
    errors.sort_by(f64::total_cmp);
    let at = |share: usize| errors.get(errors.len() * share / 100).copied().unwrap_or(f64::NAN);
    let [least, low, middle, high] = [0, 10, 50, 90].map(at);
    let most = errors.last().copied().unwrap_or(f64::NAN);
    eprintln!(
        "{compared} runs compared, {refused} refused; planned memory to taken: least {least:+.3}, a tenth below \
         {low:+.3}, half below {middle:+.3}, a tenth above {high:+.3}, most {most:+.3}"
    );
    assert!(compared > refused, "{compared} runs compared, {refused} refused");
}
