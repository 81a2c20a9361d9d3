//! Llama's plan.

use fulgurite_core::Result;
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::ModuleTree;
use fulgurite_core::parallel::{Colwise, Layout, Plan, Rowwise, SequenceParallel};
use fulgurite_core::strategy::{ParallelizeConfig, ParallelizeFn};
use serde::{Deserialize, Serialize};

/// `parallelize = "llama"`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Llama {
    /// Whether norms and dropout compute on parts of the sequence.
    pub sequence_parallel: bool,
    /// Whether the loss is computed from parts of the logits.
    pub loss_parallel: bool,
}

#[typetag::serde(name = "llama")]
impl ParallelizeConfig for Llama {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        Ok(Box::new(self.clone()))
    }
}

impl ParallelizeFn for Llama {
    fn parallelize(&self, model: &mut ModuleTree, mesh: &DeviceMesh) -> Result<()> {
        let stream = if self.sequence_parallel { Layout::SEQUENCE } else { Layout::Replicate };
        let input = Colwise { input: stream, ..Colwise::default() };
        let output = Rowwise { output: stream, ..Rowwise::default() };
        let mut plan = Plan::new()
            .with("model.embed_tokens", Rowwise { output: stream, ..Rowwise::default() })
            .with("model.layers.*.self_attn.q_proj", input)
            .with("model.layers.*.self_attn.k_proj", input)
            .with("model.layers.*.self_attn.v_proj", input)
            .with("model.layers.*.self_attn.o_proj", output)
            .with("model.layers.*.mlp.gate_proj", input)
            .with("model.layers.*.mlp.up_proj", input)
            .with("model.layers.*.mlp.down_proj", output)
            .with(
                "lm_head",
                Colwise {
                    input: stream,
                    output: Layout::Replicate,
                    loss_parallel: self.loss_parallel,
                },
            );
        if self.sequence_parallel {
            plan = plan
                .with("model.layers.*.input_layernorm", SequenceParallel {})
                .with("model.layers.*.post_attention_layernorm", SequenceParallel {})
                .with("model.norm", SequenceParallel {});
            for (path, info) in model.modules() {
                if info.kind == "Dropout" && path.starts_with("model.") {
                    plan = plan.with(path.clone(), SequenceParallel {});
                }
            }
        }
        model.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
    }
}
