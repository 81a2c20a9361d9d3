//! PowerSGD on two ranks.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite as _; // `ddp`
use fulgurite_core::Result;
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::config;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module, ModuleInit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::Sgd;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::strategy::{BuildContext, StrategyConfig};
use fulgurite_local_sgd as _;
use fulgurite_transports::run_ranks;

const IN: usize = 24;
const OUT: usize = 16;

/// Returns the losses of fitting `y = x W` with a full-rank `W`, and this rank's bytes over the
/// replicas in the last step.
fn train(world: Arc<dyn ProcessGroup>, compression: &str, steps: usize) -> Result<(Vec<f64>, u64)> {
    let counter = Counter::default();
    let world: Arc<dyn ProcessGroup> = counter.watch(world);
    let (rank, ranks) = (world.rank(), world.size());
    let table: toml::Table = toml::from_str(compression).expect("this is TOML");
    let strategy: Box<dyn StrategyConfig> = config::parse(table)?;
    let strategy = strategy.build(&BuildContext::default())?;
    let mut fabric = Fabric::new(world, strategy, ModuleInit::default(), 5)?;
    let optimizer = Sgd { lr: 0.2, ..Sgd::default() };
    let (model, mut optimizer) =
        fabric.setup(|b| Linear::new(&b.pp("only"), IN, OUT), &optimizer)?;
    let random = |what: &str, index: usize, rows: usize, columns: usize| -> Result<Tensor> {
        let mut values = vec![0.0; rows * columns];
        Stream::new(1, Purpose::Sample, what).child(index as u64).fill_normal(0, &mut values);
        Ok(Tensor::from_vec(values, (rows, columns), &Device::Cpu)?.to_dtype(DType::F32)?)
    };
    let weight = random("weight", 0, IN, OUT)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        // Each rank has its own samples.
        let x = random("x", step * ranks + rank, 8, IN)?;
        let wrong = (model.forward(&x)? - x.matmul(&weight)?)?;
        counter.reset();
        fabric.backward(&Loss::new(wrong.sqr()?.sum_all()?, (8 * OUT) as f64))?;
        losses.push(fabric.step_totals(&[])?.mean());
        optimizer.step()?;
    }
    let bytes = counter.get("data_parallel_replicate", "all_reduce").bytes;
    Ok((losses, bytes))
}

fn on_two_ranks(compression: &str, steps: usize) -> (Vec<f64>, u64) {
    let runs = run_ranks(2, |world| train(world, compression, steps)).unwrap();
    assert_eq!(runs[0], runs[1]);
    runs.into_iter().next().expect("there are two")
}

fn power_sgd(rank: usize, start_after: usize) -> String {
    format!(
        "type = 'ddp'\n[gradient_compression]\ntype = 'power_sgd'\nrank = {rank}\nstart_after = {start_after}"
    )
}

/// Bytes of the all-reduce of loss and count.
const TOTALS: u64 = 16;

#[test]
fn converges_with_fewer_bytes() {
    const STEPS: usize = 400;
    let (whole, whole_bytes) = on_two_ranks("type = 'ddp'", STEPS);
    let (losses, bytes) = on_two_ranks(&power_sgd(2, 3), STEPS);
    let last = STEPS - 1;
    assert_eq!(whole_bytes - TOTALS, 4 * (IN * OUT) as u64);
    assert_eq!(bytes - TOTALS, 4 * 2 * (IN + OUT) as u64);
    // Gradients are sent whole at first, then as factors.
    assert_eq!(losses[..4], whole[..4]);
    assert_ne!(losses[4..], whole[4..]);
    assert!(whole[last] < 1e-3 * whole[0], "{} to {}", whole[0], whole[last]);
    assert!(losses[last] < 1e-2 * losses[0], "{} to {}", losses[0], losses[last]);
}

/// Two factors are not less than half of these gradients' size.
#[test]
fn small_gradients_are_sent_whole() {
    assert_eq!(on_two_ranks(&power_sgd(5, 0), 20), on_two_ranks("type = 'ddp'", 20));
}

#[test]
fn rank_zero_factors_are_refused() {
    let error = run_ranks(2, |world| train(world, &power_sgd(0, 0), 1)).unwrap_err().to_string();
    assert_eq!(error, "`trainer.strategy.gradient_compression.rank` = 0: expected at least 1");
}
