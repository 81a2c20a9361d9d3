//! Cases of steps in loops over a `Fabric`: late reads, faults, f16 and several optimizers.

use candle_core::DType;
use fulgurite_core::optim::LossScale;

use crate::case::{Case, Clip, Fabricated, Loop, Resume, Several};
use crate::cases::{BF16_STATE, BOTH, DDP, FSDP, PLAIN, case, decoder, mesh, transformer, with};
use crate::fault::{Fault, FaultAt};

const SINGLE: &str = r#"{"type": "single_device"}"#;
const CPU_OFFLOAD: &str = r#"{"type": "fsdp", "cpu_offload": true}"#;
const F16: &str =
    r#"{"type": "fsdp", "mixed_precision": {"param_dtype": "f16", "reduce_dtype": "f32"}}"#;

pub(crate) fn all() -> Vec<Case> {
    [late(), faults(), f16(), several()].concat()
}

/// Also records the optimizer's scalars.
fn noted(case: Fabricated) -> Fabricated {
    Fabricated { scalars: true, ..case }
}

fn late_steps(case: Fabricated) -> Fabricated {
    noted(Fabricated { late: true, ..case })
}

/// Steps whose loss and norm are read one step late.
fn late() -> Vec<Case> {
    let momentum = r#"{"type": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}"#;
    let bf16 = r#""mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "f32"}"#;
    let with_averages = |case| late_steps(Fabricated { ema: Some(0.8), ..case });
    let resume = Resume { ranks: 2, strategy: FSDP.to_owned(), variant: PLAIN, full: false };
    vec![
        case("late, single_device", 1, late_steps(transformer(SINGLE))),
        case(
            "late, ddp 2, averages, 2 micro-batches",
            2,
            with_averages(Fabricated { accumulate: 2, ..transformer(DDP) }),
        ),
        case(
            "late, fsdp 2, SGD, clipped by value",
            2,
            late_steps(Fabricated {
                optimizer: Some(momentum),
                clip: Clip::Value(0.02),
                ..transformer(FSDP)
            }),
        ),
        case(
            "late, fsdp 2, bf16 state, averages, not clipped",
            2,
            with_averages(Fabricated {
                optimizer: Some(BF16_STATE),
                clip: Clip::No,
                ..transformer(FSDP)
            }),
        ),
        case(
            "late, fsdp 2, mean of the weights",
            2,
            late_steps(Fabricated { swa: true, ..transformer(FSDP) }),
        ),
        case(
            "late, fsdp 2, bf16, 2 micro-batches",
            2,
            late_steps(Fabricated { accumulate: 2, ..transformer(with(FSDP, bf16)) }),
        ),
        case("late, shard 2, tp 2, averages", 4, with_averages(decoder(BOTH, mesh([1, 2, 1, 2])))),
        case(
            "fsdp 2, clipped every second step",
            2,
            noted(Fabricated { clip_every: 2, ..transformer(FSDP) }),
        ),
        case(
            "late, ddp 2, clipped by value every second step",
            2,
            late_steps(Fabricated { clip: Clip::Value(0.02), clip_every: 2, ..transformer(DDP) }),
        ),
        case("late, cpu_offload, fsdp 2", 2, with_averages(transformer(CPU_OFFLOAD))),
        case(
            "cpu_offload, fsdp 2, clipped by value, 2 micro-batches",
            2,
            noted(Fabricated {
                accumulate: 2,
                clip: Clip::Value(0.02),
                ..transformer(CPU_OFFLOAD)
            }),
        ),
        case(
            "late, resumed, fsdp 2",
            2,
            with_averages(Fabricated { resume: Some(resume), ..decoder(PLAIN, FSDP) }),
        ),
    ]
}

/// Ignored steps, and losses and gradients that are not finite.
fn faults() -> Vec<Case> {
    let at = |step, fault, case: Fabricated| {
        let fault = Some(FaultAt { step, fault });
        noted(Fabricated { fault, ema: Some(0.8), ..case })
    };
    vec![
        case("ignored step, ddp 2", 2, at(3, Fault::Ignored, transformer(DDP))),
        case("late, ignored step, ddp 2", 2, late_steps(at(3, Fault::Ignored, transformer(DDP)))),
        case(
            "late, ignored first step, fsdp 2",
            2,
            late_steps(at(1, Fault::Ignored, transformer(FSDP))),
        ),
        case("loss not finite, fsdp 2", 2, at(3, Fault::Loss, transformer(FSDP))),
        case("late, loss not finite, fsdp 2", 2, late_steps(at(3, Fault::Loss, transformer(FSDP)))),
        case("gradient not finite, ddp 2", 2, at(3, Fault::Gradient, transformer(DDP))),
        case(
            "late, gradient not finite, ddp 2, 2 micro-batches",
            2,
            late_steps(at(3, Fault::Gradient, Fabricated { accumulate: 2, ..transformer(DDP) })),
        ),
    ]
}

/// Steps with a loss scale, including an overflow.
fn f16() -> Vec<Case> {
    let overflow = Some(FaultAt { step: 3, fault: Fault::Overflow });
    let scale = LossScale::default().with_init_scale(512.0).with_growth_interval(2);
    let scaled = |case| {
        let loss_scale = Some(scale);
        noted(Fabricated { fault: overflow, loss_scale, ema: Some(0.8), ..case })
    };
    let ddp = Fabricated { compute_dtype: DType::F16, ..transformer(DDP) };
    vec![
        case(
            "f16, ddp 2, not clipped, overflow",
            2,
            scaled(Fabricated { clip: Clip::No, ..ddp.clone() }),
        ),
        case(
            "f16, ddp 2, clipped by value, 2 micro-batches, overflow",
            2,
            scaled(Fabricated { clip: Clip::Value(0.02), accumulate: 2, ..ddp }),
        ),
        case("f16, fsdp 2, overflow", 2, scaled(transformer(F16))),
        case("late, f16, fsdp 2, overflow", 2, late_steps(scaled(transformer(F16)))),
    ]
}

/// Two optimizers.
fn several() -> Vec<Case> {
    let pair = |strategy: &str| Several {
        strategy: strategy.to_owned(),
        accumulate: 1,
        clip: Clip::Norm(0.5),
        late: false,
        turns: true,
    };
    let case = |name, ranks, case| Case { name, ranks, driver: Loop::Several(case), half: false };
    vec![
        case("two optimizers, ddp 2", 2, pair(DDP)),
        case(
            "two optimizers, fsdp 2, clipped by value, 2 micro-batches",
            2,
            Several { accumulate: 2, clip: Clip::Value(0.1), ..pair(FSDP) },
        ),
        case(
            "two optimizers, single_device, without turns, not clipped",
            1,
            Several { turns: false, clip: Clip::No, ..pair(SINGLE) },
        ),
        case("late, two optimizers, fsdp 2", 2, Several { late: true, ..pair(FSDP) }),
    ]
}
