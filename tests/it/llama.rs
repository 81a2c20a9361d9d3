//! A small Llama on the layers: names, gradients, and a training run.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::{no_grad, storage};
use fulgurite_core::module::{ForwardScope, ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::nn::cross_entropy;
use fulgurite_core::parameter::{GradReducer, LocalGrads, ParameterSlot};
use fulgurite_core::shard::Region;
use fulgurite_models::{Decoder, DecoderConfig, ModelConfig};
use fulgurite_test_message::assert_says;

fn small(tied: bool) -> DecoderConfig {
    let mut config: ModelConfig = toml::from_str(
        "type = 'llama'
        vocab_size = 11
        hidden_size = 8
        intermediate_size = 10
        num_hidden_layers = 2
        num_attention_heads = 4
        num_key_value_heads = 2
        head_dim = 4
        initializer_range = 0.3
        rms_norm_eps = 1e-5",
    )
    .unwrap();
    config.set("tie_word_embeddings", tied).unwrap();
    config.decoder().unwrap()
}

struct Trained {
    model: Decoder,
    tree: ModuleTree,
    slots: Vec<ParameterSlot>,
    grads: Arc<LocalGrads>,
}

fn build(cfg: &DecoderConfig, dtype: DType) -> Trained {
    let init = ModuleInit { dtype, compute_dtype: dtype, ..ModuleInit::default() };
    let b = ModuleBuilder::new(init);
    let model = Decoder::new(cfg, &b).unwrap();
    let mut tree = b.finish().unwrap();
    let slots = tree.slots();
    let grads = Arc::new(LocalGrads::default());
    for p in &slots {
        let (shape, device) = (p.global_shape(), p.device());
        let region = Region::full(shape);
        let values = p.init().values(3, p.fqn(), shape, &region, dtype, device).unwrap();
        storage::allocate(p.compute().unwrap()).unwrap();
        storage::copy_from(p.compute().unwrap(), &values).unwrap();
        p.set_reducer(grads.clone());
    }
    Trained { model, tree, slots, grads }
}

fn ids(rows: &[[u32; 6]]) -> (Tensor, Tensor) {
    let at = |from: usize| {
        let rows: Vec<&[u32]> = rows.iter().map(|row| &row[from..from + 5]).collect();
        Tensor::new(rows, &Device::Cpu).unwrap()
    };
    (at(0), at(1))
}

// checklist: PyTorch: name prefixes, clean_tensor_name
#[test]
fn names_are_hugging_face_names() {
    let names = |tied| {
        let tree = build(&small(tied), DType::F32).tree;
        tree.parameters().iter().map(|p| p.fqn().to_owned()).collect::<Vec<_>>()
    };
    let layer = |i: usize| {
        [
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ]
        .map(|name| format!("model.layers.{i}.{name}.weight"))
    };
    let mut want = vec!["model.embed_tokens.weight".to_owned()];
    want.extend(layer(0));
    want.extend(layer(1));
    want.push("model.norm.weight".to_owned());
    assert_eq!(names(true), want);
    want.push("lm_head.weight".to_owned());
    assert_eq!(names(false), want);
    let tree = build(&small(true), DType::F32).tree;
    let aliases: Vec<_> = tree.aliases().collect();
    assert_eq!(aliases, [("lm_head.weight", "model.embed_tokens.weight")]);
    assert_eq!(tree.units().len(), 2);
    assert_eq!(tree.unit_parameters(Some(1)).len(), 9);
}

#[test]
fn every_gradient_equals_finite_differences() {
    for tied in [false, true] {
        let t = build(&small(tied), DType::F64);
        let (inputs, targets) = ids(&[[1, 5, 0, 10, 2, 3], [7, 7, 7, 4, 9, 1]]);
        let loss = || {
            let loss = cross_entropy(&t.model.forward(&inputs)?, &targets)?;
            Ok::<_, fulgurite_core::Error>(loss.sum().clone())
        };
        loss().unwrap().backward().unwrap();
        let _no_grad = no_grad();
        for p in &t.slots {
            assert!(p.finish_backward().unwrap(), "{} got no gradient", p.fqn());
            let grad = t.grads.buffer(p).unwrap().to_vec1::<f64>().unwrap();
            for j in (0..p.elem_count()).step_by(7) {
                let at = |h: f64| {
                    let compute = p.compute().unwrap();
                    storage::with_host_mut(compute, |x: &mut [f64]| x[j] += h).unwrap();
                    let loss = loss().unwrap().to_scalar::<f64>().unwrap();
                    storage::with_host_mut(compute, |x: &mut [f64]| x[j] -= h).unwrap();
                    loss
                };
                let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
                let scale = numeric.abs().max(1.0);
                assert!((grad[j] - numeric).abs() < 1e-6 * scale, "{} {j}", p.fqn());
            }
        }
    }
}

#[test]
fn attention_is_causal() {
    let t = build(&small(false), DType::F64);
    let (a, _) = ids(&[[1, 5, 0, 10, 2, 3]]);
    let (b, _) = ids(&[[1, 5, 0, 10, 8, 3]]);
    let logits = |ids: &Tensor| t.model.forward(ids).unwrap();
    let head =
        |x: Tensor| x.narrow(1, 0, 4).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(head(logits(&a)), head(logits(&b)));
    assert_eq!(logits(&a).dims(), [1, 5, 11]);
}

#[test]
fn llama_learns_a_sentence() {
    let t = build(&DecoderConfig { residual_dropout: 0.02, ..small(true) }, DType::F32);
    let (inputs, targets) = ids(&[[1, 5, 0, 10, 2, 3], [7, 3, 8, 4, 9, 1]]);
    let mut losses = vec![];
    for step in 0..60 {
        let _scope = ForwardScope { training: true, step, ..ForwardScope::default() }.enter();
        let loss = cross_entropy(&t.model.forward(&inputs).unwrap(), &targets).unwrap();
        losses.push(loss.mean().unwrap());
        loss.sum().backward().unwrap();
        for p in &t.slots {
            p.finish_backward().unwrap();
            let grad = t.grads.buffer(p).unwrap().to_vec1::<f32>().unwrap();
            storage::with_host_mut(p.compute().unwrap(), |x: &mut [f32]| {
                x.iter_mut().zip(&grad).for_each(|(x, g)| *x -= 0.02 * g);
            })
            .unwrap();
            p.clear_accumulated();
        }
    }
    assert!(losses[59] < 0.3 * losses[0], "{losses:?}");
}

#[test]
fn wrong_configurations_are_explained() {
    let b = || ModuleBuilder::new(ModuleInit::default());
    let error = |cfg: DecoderConfig| Decoder::new(&cfg, &b()).err().unwrap();
    assert_says!(
        error(DecoderConfig { num_kv_heads: 3, ..small(false) }),
        "module `model.layers.0.self_attn`: 4 attention heads cannot share 3 key …"
    );
    let model = build(&DecoderConfig { max_positions: 4, ..small(false) }, DType::F32).model;
    assert_says!(model.forward(&ids(&[[0; 6]]).0).unwrap_err(), "a sequence of 5 … 4 positions …");
    let unknown = toml::from_str::<ModelConfig>("hiden_size = 4").unwrap_err().to_string();
    assert!(unknown.contains("unknown field `hiden_size`"), "{unknown}");
}
