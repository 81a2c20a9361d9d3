//! A program that passes a callback and a parallelize function to its command line in code. The
//! test starts itself as that program.

use std::process::{Command, ExitCode, Output};

use fulgurite::cli::Cli;
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};

struct Double(Unit<Linear>);

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

struct Numbers;

impl DataModule for Numbers {
    type Config = NoKeys;
    type Batch = Tensor;

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        2
    }

    fn len(&self, _: Split) -> u64 {
        8
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let numbers: Vec<f32> = indices.iter().map(|&i| i as f32 / 8.0).collect();
        Ok(Tensor::from_vec(numbers, (indices.len(), 1), device)?)
    }
}

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

#[derive(Default)]
struct SaysTheEnd;

impl Hooks for SaysTheEnd {
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        ctx.print(format!("the callback was there, on {} ranks", ctx.world_size));
        Ok(())
    }
}

impl Callback for SaysTheEnd {}

/// Set in the process that acts as the program.
const AS_PROGRAM: &str = "FULGURITE_TEST_CODE_IN_CLI";

/// Runs the program with these arguments.
fn run(directory: &std::path::Path, args: &[&str]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let common = ["--set", "trainer.max_steps=1", "--set", "trainer.devices=2"];
    command.env(AS_PROGRAM, "1").args(args).args(common).current_dir(directory).output().unwrap()
}

fn tests() {
    let directory = tempfile::tempdir().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let fit = run(directory.path(), &["fit", "--set", "trainer.strategy=fsdp"]);
    let stdout = text(&fit.stdout);
    assert!(fit.status.success(), "{}", text(&fit.stderr));
    assert!(stdout.contains("the callback was there, on 2 ranks"), "{stdout}");
    // The function is called, and may be refused, before ranks start.
    let checked = |strategy: &str| {
        let set = format!("trainer.strategy={strategy}");
        run(directory.path(), &["config", "check", "--set", &set])
    };
    assert!(checked("fsdp").status.success());
    let refused = checked("ddp");
    assert_eq!(refused.status.code(), Some(1));
    let stderr = text(&refused.stderr);
    assert!(stderr.contains("strategy `ddp` takes no parallelize function"), "{stderr}");
    println!("test result: ok");
}

fn main() -> ExitCode {
    if std::env::var_os(AS_PROGRAM).is_none() {
        tests();
        return ExitCode::SUCCESS;
    }
    Cli::new("double", "Learns to double")
        .with_callback(SaysTheEnd::default)
        .parallelize(|model: &mut ModuleTree, _: &DeviceMesh| {
            model.shard_model(&[&|unit: &str| unit == "double"], FullyShard::default())
        })
        .run::<Double>()
}
