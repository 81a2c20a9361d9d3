//! AdamW and SGD with state in bf16.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::optim::{
    AdamW, GradScale, Optimizer, OptimizerConfig, Sgd, StateDtype, StateTensor,
};
use fulgurite_core::parameter::{Init, LocalShard, ParameterSlot};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::registry::kind;
use fulgurite_core::run::RunConfig;
use fulgurite_core::shard::{Cut, Placement, Region, ShardSpec};
use fulgurite_test_message::assert_says;
use toml::Table;

const SHAPE: [usize; 2] = [120, 300];
const COUNT: usize = SHAPE[0] * SHAPE[1];
const BETAS: (f64, f64) = (0.9, 0.999);
const MOMENTUM: f64 = 0.9;

fn adamw() -> AdamW {
    AdamW { betas: BETAS, state_dtype: StateDtype::Bf16, ..AdamW::default() }
}

fn sgd() -> Sgd {
    Sgd { momentum: MOMENTUM, lr: 0.01, state_dtype: StateDtype::Bf16, ..Sgd::default() }
}

/// Numbers for the whole parameter: its values for step 0, its gradients for later steps.
fn numbers(step: u64) -> Vec<f32> {
    let stream = Stream::new(4, Purpose::Sample, "w").child(step);
    (0..COUNT as u64).map(|i| stream.normal(i) as f32).collect()
}

/// Returns the shard of the whole parameter in `region`.
fn part(whole: &[f32], region: &Region) -> Tensor {
    let runs = region.runs(&SHAPE);
    let values: Vec<f32> =
        runs.iter().flat_map(|run| whole[run.outer..run.outer + run.len].to_vec()).collect();
    let n = values.len();
    Tensor::from_vec(values, n, &Device::Cpu).unwrap()
}

/// A rank's parameter and its optimizer.
struct Rank {
    parameter: ParameterSlot,
    region: Region,
    optimizer: Box<dyn Optimizer>,
}

impl Rank {
    fn new(config: &dyn OptimizerConfig, region: Region, dtype: DType, seed: u64) -> Self {
        let b = ModuleBuilder::new(ModuleInit { dtype, ..ModuleInit::default() });
        b.parameter("w", SHAPE, Init::ZEROS).unwrap();
        let parameter = b.finish().unwrap().slots().remove(0);
        let values = part(&numbers(0), &region).to_dtype(dtype).unwrap();
        parameter.set_local(LocalShard { values, region: region.clone() });
        let mut optimizer = config.build(std::slice::from_ref(parameter.parameter())).unwrap();
        optimizer.set_seed(seed);
        Self { parameter, region, optimizer }
    }

    fn whole(config: &dyn OptimizerConfig) -> Self {
        Self::new(config, Region::full(&SHAPE), DType::F32, 1)
    }

    fn step(&mut self, gradient: &[f32]) {
        self.parameter.set_local_grad(Some(part(gradient, &self.region)));
        self.optimizer.step(&GradScale::default()).unwrap();
    }

    fn train(&mut self, steps: std::ops::RangeInclusive<u64>) {
        steps.for_each(|step| self.step(&numbers(step)));
    }

    fn states(&mut self) -> Vec<StateTensor> {
        self.optimizer.state_tensors().unwrap()
    }

    /// Returns values and state as f64, which represents them exactly.
    fn all(&mut self) -> Vec<Vec<f64>> {
        let states = self.states().into_iter().map(|state| state.values);
        let tensors = [self.parameter.local().unwrap().values].into_iter().chain(states);
        tensors.map(|t| t.to_dtype(DType::F64).unwrap().to_vec1().unwrap()).collect()
    }
}

/// Returns the spacing of bf16 numbers around `x`.
fn unit(x: f64) -> f64 {
    2f64.powf(x.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor() - 7.0)
}

/// In every step, the stored value is one of the two bf16 neighbours of the f64 result from the
/// previous stored values. The mean of the errors is zero.
#[test]
fn every_step_rounds_the_formulas_without_bias() {
    let (beta1, beta2) = BETAS;
    type Formula<'a> = &'a dyn Fn(u64, f64, f64) -> f64;
    let exp_avg: Formula = &|_, m, g| beta1 * m + (1.0 - beta1) * g;
    let exp_avg_sq: Formula = &|_, v, g| beta2 * v + (1.0 - beta2) * g * g;
    let momentum: Formula = &|step, m, g| if step == 1 { g } else { MOMENTUM * m + g };
    let cases: [(&dyn OptimizerConfig, &[Formula]); 2] =
        [(&adamw(), &[exp_avg, exp_avg_sq]), (&sgd(), &[momentum])];
    for (config, formulas) in cases {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let mut rank = Rank::new(config, Region::full(&SHAPE), dtype, 1);
            for step in 1..=6 {
                let gradient = numbers(step);
                let before = rank.all();
                if dtype == DType::F64 {
                    let values = Tensor::from_slice(&gradient, COUNT, &Device::Cpu).unwrap();
                    rank.parameter.set_local_grad(Some(values.to_dtype(DType::F64).unwrap()));
                    rank.optimizer.step(&GradScale::default()).unwrap();
                } else {
                    rank.step(&gradient);
                }
                let after = rank.all();
                for (i, formula) in formulas.iter().enumerate() {
                    let mut errors = 0.0;
                    for (k, g) in gradient.iter().enumerate() {
                        let (old, g) = (before[i + 1][k], f64::from(*g));
                        let exact = formula(step, old, g);
                        // Where numbers cancel, f32 rounding counts too.
                        let unit = unit(exact).max(1e-6 * (old.abs() + g.abs()));
                        let error = (after[i + 1][k] - exact) / unit;
                        assert!(error.abs() < 1.2, "{config:?} {step}: {exact}, off by {error}");
                        errors += error;
                    }
                    let mean = errors / COUNT as f64;
                    // Five standard deviations of an error that is at most one half on average.
                    assert!(mean.abs() < 5.0 * 0.5 / (COUNT as f64).sqrt(), "{config:?}: {mean}");
                }
            }
        }
    }
}

/// Each increment is less than half a unit in the last place, so rounding to nearest would lose
/// them all.
#[test]
fn small_increments_are_not_lost() {
    const STEPS: u64 = 1000;
    let gradient = vec![1.0; COUNT];
    let mut rank = Rank::whole(&adamw());
    (0..STEPS).for_each(|_| rank.step(&gradient));
    let expected = 1.0 - BETAS.1.powi(STEPS as i32);
    let kept = &rank.all()[2];
    let mean = kept.iter().sum::<f64>() / COUNT as f64;
    assert!((mean / expected - 1.0).abs() < 1e-3, "{mean}, expected {expected}");
    // No single value is far off either.
    assert!(kept.iter().all(|v| (v / expected - 1.0).abs() < 0.25));

    let nearest = (0..STEPS).fold(half::bf16::ZERO, |v, _| {
        half::bf16::from_f64(BETAS.1 * v.to_f64() + (1.0 - BETAS.1))
    });
    assert!(nearest.to_f64() < 0.5 * expected, "{nearest} would have done");
}

#[test]
fn shards_are_updated_like_the_whole() {
    let configs: [&dyn OptimizerConfig; 2] = [&adamw(), &sgd()];
    for config in configs {
        let mut whole = Rank::whole(config);
        whole.train(1..=3);
        let whole = whole.all();
        let cut = |dim: &str, size, along| Cut::new(dim, size, Placement::Shard(along));
        let spec = || ShardSpec::new(SHAPE.to_vec());
        let cuts = [
            spec().with_cut(cut("a", 2, 0)),
            spec().with_cut(cut("a", 4, 0)),
            // No shard begins at a round offset.
            spec().with_cut(cut("a", 7, 1)),
            spec().with_cut(cut("a", 7, 1)).with_cut(cut("b", 11, 0)),
            spec().with_cut(cut("a", 3, 0)).with_cut(cut("b", 7, 1)).with_cut(cut("c", 2, 1)),
        ];
        for spec in cuts {
            let sizes: Vec<usize> = spec.cuts.iter().map(|cut| cut.size).collect();
            for rank in 0..sizes.iter().product::<usize>() {
                let (a, b, c) = (
                    rank % sizes[0],
                    rank / sizes[0] % sizes.get(1).unwrap_or(&1),
                    rank / sizes[0] / sizes.get(1).unwrap_or(&1),
                );
                let region = spec.region(|dim| match dim {
                    "a" => a,
                    "b" => b,
                    _ => c,
                });
                let mut rank = Rank::new(config, region.clone(), DType::F32, 1);
                rank.train(1..=3);
                for (part, whole) in rank.all().iter().zip(&whole) {
                    let runs = region.runs(&SHAPE);
                    let expected: Vec<f64> = runs
                        .iter()
                        .flat_map(|run| whole[run.outer..run.outer + run.len].to_vec())
                        .collect();
                    assert_eq!(*part, expected, "{config:?} at {region:?}");
                }
            }
        }
    }
}

#[test]
fn bits_depend_on_the_seed_but_not_on_threads() {
    let with = |threads, seed| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut rank = Rank::new(&adamw(), Region::full(&SHAPE), DType::F32, seed);
        pool.install(|| rank.train(1..=3));
        rank.all()
    };
    let one = with(1, 1);
    assert_eq!(one, with(5, 1));
    assert_ne!(one, with(1, 2));
}

#[test]
fn resumed_runs_have_the_same_bits() {
    let configs: [&dyn OptimizerConfig; 2] = [&adamw(), &sgd()];
    for config in configs {
        let mut first = Rank::whole(config);
        first.train(1..=4);
        let mut second = Rank::whole(config);
        second.optimizer.load_scalars(&first.optimizer.scalars()).unwrap();
        for (to, from) in second.states().iter().zip(first.states()) {
            assert_eq!((to.values.dtype(), to.name), (DType::BF16, from.name));
            storage::copy_from(&to.values, &from.values).unwrap();
        }
        let values = |rank: &Rank| rank.parameter.local().unwrap().values;
        storage::copy_from(&values(&second), &values(&first)).unwrap();
        first.train(5..=6);
        second.train(5..=6);
        assert_eq!(first.all(), second.all());
    }
}

#[test]
fn configured_by_name() {
    let read = |text: &str| {
        let layers = ConfigLayers::new().text("run.toml", text).unwrap();
        let optimizer = RunConfig::<Table, Table>::from_layers(layers).unwrap().optimizer;
        optimizer.build::<Box<dyn OptimizerConfig>>(kind::OPTIMIZER, "optimizer")
    };
    let dtypes = |text| {
        let config = read(text).unwrap();
        let mut rank = Rank::new(&*config, Region::full(&SHAPE), DType::F32, 1);
        rank.states().iter().map(|state| state.values.dtype()).collect::<Vec<_>>()
    };
    let text = "optimizer = { type = 'sgd', momentum = 0.9, state_dtype = 'bf16' }";
    assert_eq!(dtypes(text), [DType::BF16]);
    assert_eq!(dtypes("optimizer.state_dtype = 'bf16'"), [DType::BF16; 2]);
    assert_eq!(dtypes("optimizer.state_dtype = 'f32'"), [DType::F32; 2]);
    assert_eq!(dtypes(""), [DType::F32; 2]);
    assert_says!(
        read("optimizer.state_dtype = 'fp8'").unwrap_err(),
        r#"`optimizer.state_dtype` … "f32" or "bf16", found "fp8""#
    );
}
