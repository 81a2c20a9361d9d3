//! What a step can access besides its batch.

use fulgurite::core::collective::{Collective, ReduceOp};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::data::TextData;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{NoKeys, Numbers, SAMPLES};

struct Double(Unit<Linear>);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("net.double", |b| Linear::new(b, 1, 1))?))
    }

    /// Logs the number of samples of all ranks, which it adds up itself.
    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        let data = ctx.data::<Numbers>().expect("the module's data");
        assert_eq!(data.len(Split::Train), SAMPLES);
        assert!(ctx.data::<TextData>().is_none());
        assert_eq!(ctx.process_group().size(), ctx.world_size);
        assert_eq!(ctx.device_mesh().rank(), ctx.rank);
        let samples = Tensor::new(&[x.dim(0)? as f64], &Device::Cpu)?;
        let group = ctx.device_mesh().group("data_parallel")?;
        group.run(Collective::all_reduce(&samples, ReduceOp::Sum))?;
        let samples = samples.to_vec1::<f64>()?[0];
        ctx.log("samples", samples);
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

#[test]
fn steps_reach_ranks_and_data() {
    for (ranks, strategy) in [(1, "single_device"), (2, "ddp"), (2, "fsdp")] {
        let dir = tempfile::tempdir().unwrap();
        let all = run_ranks(ranks, |world| {
            let text = format!(
                "trainer.default_root_dir = {:?}\ntrainer.strategy = '{strategy}'\n\
                 trainer.devices = {ranks}\ntrainer.loggers = []\ntrainer.log_every_n_steps = 1\n\
                 trainer.enable_progress_bar = false\ntrainer.max_steps = 1\n\
                 checkpoint.save_last = false\n",
                dir.path()
            );
            let run: RunConfig<NoKeys, NoKeys> =
                RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)?;
            let trained = Trainer::new(world).fit::<Double>(&run)?;
            Ok(trained.outcome().metrics["samples"])
        });
        for samples in all.unwrap() {
            assert_eq!(samples, 2.0 * ranks as f64, "{strategy}");
        }
    }
}
