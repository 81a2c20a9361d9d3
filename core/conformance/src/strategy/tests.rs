//! Tests that the suite finds faults.

use std::sync::Arc;

use fulgurite_test_message::assert_says;
use serde::{Deserialize, Serialize};

use super::reference::OneRank;
use super::{Equivalence, strategy};
use crate::Result;
use fulgurite_engine::collective::{ProcessGroup, Solo};
use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::strategy::{
    BuildContext, Capabilities, StepTotals, Strategy, StrategyConfig, StrategyContext,
};

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Fault {
    None,
    OtherSeed,
    LosesGradient,
    WrongScale,
}

#[derive(Debug, Serialize, Deserialize)]
struct Faulty {
    fault: Fault,
}

#[typetag::serde(name = "faulty")]
impl StrategyConfig for Faulty {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(FaultyStrategy { fault: self.fault, whole: OneRank::default() }))
    }
}

fulgurite_core::register_plugin!(
    fulgurite_config::registry::kind::STRATEGY,
    "faulty",
    "a strategy with faults",
    ""
);

#[derive(Debug, Serialize, Deserialize)]
struct Unregistered {}

#[typetag::serde(name = "unregistered")]
impl StrategyConfig for Unregistered {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        Ok(Box::new(OneRank::default()))
    }
}

struct FaultyStrategy {
    fault: Fault,
    whole: OneRank,
}

impl Strategy for FaultyStrategy {
    fn name(&self) -> &str {
        "faulty"
    }

    fn capabilities(&self) -> Capabilities {
        self.whole.capabilities()
    }

    fn device_mesh(&self, world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh> {
        self.whole.device_mesh(world)
    }

    fn setup_module(&mut self, tree: &mut ModuleTree, mesh: &DeviceMesh, seed: u64) -> Result<()> {
        self.whole.setup_module(tree, mesh, seed + u64::from(self.fault == Fault::OtherSeed))
    }

    fn reduce_gradients(&mut self, context: StrategyContext<'_>) -> Result<()> {
        self.whole.reduce_gradients(context)?;
        if self.fault == Fault::LosesGradient
            && let Some(slot) =
                context.slots.iter().find(|slot| slot.fqn() == "blocks.1.mlp.up_proj.bias")
        {
            slot.set_local_grad(None);
        }
        Ok(())
    }

    fn grad_scale(&self, totals: &StepTotals, local_count: f64) -> Result<f64> {
        let factor = if self.fault == Fault::WrongScale { 1.01 } else { 1.0 };
        Ok(self.whole.grad_scale(totals, local_count)? * factor)
    }
}

fn run(config: &impl StrategyConfig) -> Result<()> {
    let world: Arc<dyn ProcessGroup> = Arc::new(Solo::new("world", 0));
    strategy(config, &world, Equivalence::OneRank)
}

fn finding(fault: Fault) -> String {
    run(&Faulty { fault }).unwrap_err().to_string()
}

#[test]
fn correct_strategy_passes() {
    run(&Faulty { fault: Fault::None }).unwrap();
}

#[test]
fn faults_are_found() {
    assert_says!(finding(Fault::OtherSeed), "conformance … `entry.weight`: its initial values …");
    assert_says!(
        finding(Fault::LosesGradient),
        "conformance … `blocks.1.mlp.up_proj.bias`: local_grad() … not set for what is trained …"
    );
    let error = finding(Fault::WrongScale);
    assert!(error.contains("the gradient norm of step 1 is "), "{error}");
    let error = run(&Unregistered {}).unwrap_err().to_string();
    assert!(error.starts_with("unknown strategy `unregistered`; available: faulty"), "{error}");
}
