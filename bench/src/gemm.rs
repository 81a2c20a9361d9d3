//! Only matrix products, in floating-point operations per second and core.

use std::str::FromStr;
use std::time::Instant;

use clap::{Args, ValueEnum};
use fulgurite_core::nn::bf16_products;
use fulgurite_core::nn::gemm::{
    Mat, Threads, gemm, gemm_bf16, instructions, product, product_bf16,
};
use half::bf16;
use serde::Serialize;
use serde_json::json;

use super::ranks::{at_least_one, median};
use fulgurite::cli::print;
use fulgurite::prelude::*;

/// The options of `fulgurite bench gemm`.
#[derive(Debug, Clone, Args)]
pub struct GemmBench {
    /// Rows of the input, its width and the width of the output, such as 1024,512,1408; may be
    /// repeated [default: the layers of the workloads 30m and tiny, and squares]
    #[arg(long, value_name = "TOKENS,IN,OUT")]
    size: Vec<Size>,
    /// The dtype of the matrices; sums are f32
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Threads of a product
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    threads: usize,
    /// How often to measure each; the median counts
    #[arg(long, default_value_t = 7, value_parser = at_least_one)]
    repeat: usize,
    /// As JSON on standard output, a line for each product
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
}

/// The sizes of a linear layer with its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    tokens: usize,
    inputs: usize,
    outputs: usize,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes: Option<Vec<usize>> =
            text.split(',').map(|size| size.trim().parse().ok().filter(|size| *size > 0)).collect();
        match sizes.as_deref() {
            Some(&[tokens, inputs, outputs]) => Ok(Self { tokens, inputs, outputs }),
            _ => Err("give three positive numbers, such as 1024,512,1408".to_owned()),
        }
    }
}

/// Layers of `30m` and of `tiny`, and squares.
const SIZES: [[usize; 3]; 9] = [
    [1024, 512, 512],
    [1024, 512, 1408],
    [1024, 1408, 512],
    [1024, 512, 4096],
    [256, 128, 128],
    [256, 128, 384],
    [256, 128, 512],
    [1024, 1024, 1024],
    [2048, 2048, 2048],
];

/// Least duration of one measurement: short products are repeated to fill it.
const MEASURED_SECS: f64 = 0.02;

/// One product's figures.
#[derive(Serialize)]
struct Report {
    bench: &'static str,
    dtype: &'static str,
    instructions: &'static str,
    threads: usize,
    tokens: usize,
    inputs: usize,
    outputs: usize,
    product: &'static str,
    seconds: f64,
    gflops_per_core: f64,
}

/// Runs the benchmark, in this process.
///
/// # Errors
/// If threads cannot be started, or the memory overflows.
pub(crate) fn run(options: &GemmBench) -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build();
    let pool = pool.map_err(|error| Error::other(format!("starting threads: {error}")))?;
    let sizes = match options.size.is_empty() {
        true => SIZES.map(|[tokens, inputs, outputs]| Size { tokens, inputs, outputs }).to_vec(),
        false => options.size.clone(),
    };
    if !options.json {
        print(&format!(
            "products with {}, {} threads; Gflop/s a core\n{:>18}  {:>7}  {:>10}  {:>11}\n",
            match options.dtype {
                Dtype::F32 => instructions(),
                Dtype::Bf16 => bf16_products(),
            },
            options.threads,
            "tokens, in, out",
            "forward",
            "input grad",
            "weight grad"
        ))?;
    }
    for size in sizes {
        let reports = pool.install(|| match options.dtype {
            Dtype::F32 => measure(
                options,
                size,
                ("f32", instructions()),
                0.01f32,
                |a, b| drop(product(a, b, Threads::All)),
                |out, a, b| gemm(out, a, b, false, Threads::All),
            ),
            Dtype::Bf16 => measure(
                options,
                size,
                ("bf16", bf16_products()),
                bf16::from_f32(0.01),
                |a, b| drop(product_bf16(a, b, Threads::All)),
                |out, a, b| gemm_bf16(out, a, b, false, Threads::All),
            ),
        })?;
        if options.json {
            for report in &reports {
                print(&format!("{}\n", json!(report)))?;
            }
            continue;
        }
        let Size { tokens, inputs, outputs } = size;
        let [forward, input, weight] = reports.map(|report| report.gflops_per_core);
        let size = format!("{tokens}, {inputs}, {outputs}");
        print(&format!("{size:>18}  {forward:7.1}  {input:10.1}  {weight:11.1}\n"))?;
    }
    Ok(())
}

/// Runs a linear layer's three products alternately, as the layer computes them: the results of
/// `product` are new matrices, and gradients of weights are f32.
fn measure<T: Copy>(
    options: &GemmBench,
    size: Size,
    (dtype, instructions): (&'static str, &'static str),
    value: T,
    product: impl Fn(Mat<T>, Mat<T>),
    weight_grad: impl Fn(&mut [f32], Mat<T>, Mat<T>),
) -> Result<[Report; 3]> {
    let Size { tokens, inputs, outputs } = size;
    let elements = |a: usize, b: usize| {
        let len = a.checked_mul(b).filter(|len| *len < isize::MAX as usize / size_of::<f32>());
        len.ok_or_else(|| Error::other(format!("a matrix of {a} x {b} is too large")))
    };
    let memory = |a, b| Ok::<_, Error>(vec![value; elements(a, b)?]);
    let (x, y, weight) =
        (memory(tokens, inputs)?, memory(tokens, outputs)?, memory(outputs, inputs)?);
    let mut gradient = vec![0f32; elements(outputs, inputs)?];
    let x = Mat::new(&x, tokens, inputs);
    let y = Mat::new(&y, tokens, outputs);
    let weight = Mat::new(&weight, outputs, inputs);
    let products =
        [("forward", x, weight.t()), ("input_grad", y, weight), ("weight_grad", y.t(), x)];
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..options.repeat {
        for ((name, a, b), times) in products.iter().zip(&mut times) {
            let mut multiply = || match *name {
                "weight_grad" => weight_grad(&mut gradient, *a, *b),
                _ => product(*a, *b),
            };
            multiply();
            let (start, mut count) = (Instant::now(), 0u32);
            while count == 0 || start.elapsed().as_secs_f64() < MEASURED_SECS {
                multiply();
                count += 1;
            }
            times.push(start.elapsed().as_secs_f64() / f64::from(count));
        }
    }
    let operations = 2.0 * tokens as f64 * inputs as f64 * outputs as f64;
    let report = |i: usize| {
        let seconds = median(&times[i]);
        Report {
            bench: "gemm",
            dtype,
            instructions,
            threads: options.threads,
            tokens,
            inputs,
            outputs,
            product: products[i].0,
            seconds,
            gflops_per_core: operations / seconds / options.threads as f64 / 1e9,
        }
    };
    Ok([report(0), report(1), report(2)])
}
