//! Cross entropy on logits that stay cut over tensor-parallel ranks, against whole logits.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::autograd::{no_grad, storage};
use fulgurite_core::collective::{Counter, ProcessGroup, Record, Solo};
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{ForwardScope, Module, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::{CrossEntropy, Linear, Loss, Reduction, cross_entropy, force_portable};
use fulgurite_core::parallel::{Colwise, Layout};
use fulgurite_core::parameter::{GradReducer, Init, LocalGrads, ParameterSlot};
use fulgurite_core::plan;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::strategy::materialize;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

const CLASSES: usize = 11;
const DIM: usize = 5;
const ROWS: usize = 6;

fn randn(what: &str, shape: &[usize]) -> Tensor {
    let mut values = vec![0f64; shape.iter().product()];
    Stream::new(11, Purpose::Sample, what).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn targets(values: &[i64; ROWS]) -> Tensor {
    Tensor::from_slice(values, (2, ROWS / 2), &Device::Cpu).unwrap()
}

#[track_caller]
fn assert_close(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-12 * w.abs().max(1.0), "{what}[{i}]: {g} is not {w}");
    }
}

/// An output head whose classes are cut over the ranks of a group; whole on a single rank.
struct Head {
    linear: Linear,
    slots: Vec<ParameterSlot>,
    grads: Arc<LocalGrads>,
    counter: Counter,
    /// dtype of its inputs.
    dtype: DType,
}

impl Head {
    fn new(world: Arc<dyn ProcessGroup>) -> Result<Self> {
        let (dtype, compute_dtype) = (DType::F64, DType::F64);
        Self::with_init(world, ModuleInit { dtype, compute_dtype, ..ModuleInit::default() })
    }

    fn with_init(world: Arc<dyn ProcessGroup>, init: ModuleInit) -> Result<Self> {
        let dtype = init.compute_dtype;
        let counter = Counter::default();
        let size = world.size();
        let world = counter.watch(world);
        let layout = DeviceMesh::layout_for(size, Some(1), Some(1), Some(1), Some(size))?;
        let mesh = DeviceMesh::new(layout, world)?;
        let b = ModuleBuilder::new(init);
        let init = Init::Normal { mean: 0.1, std: 0.7 };
        let linear =
            Linear::with_init(&b.pp("head"), DIM, CLASSES, init)?.add_bias(&b.pp("head"), init)?;
        let mut tree = b.finish()?;
        tree.parallelize_module(
            &mesh.get(TENSOR_PARALLEL)?,
            &plan! {
                "head" => Colwise {
                    output: Layout::Replicate,
                    loss_parallel: true,
                    ..Colwise::default()
                },
            },
        )?;
        let grads = Arc::new(LocalGrads::default());
        let slots = tree.slots();
        for p in &slots {
            let (shape, region) = (p.global_shape(), p.compute_region());
            let values =
                init.values(5, p.fqn(), shape, &region, p.compute_dtype(), &Device::Cpu)?;
            storage::allocate(p.compute()?)?;
            storage::copy_from(p.compute()?, &values)?;
            p.set_reducer(grads.clone());
        }
        counter.reset();
        Ok(Self { linear, slots, grads, counter, dtype })
    }

    /// This rank's classes.
    fn classes(&self) -> std::ops::Range<usize> {
        let region = self.linear.weight().compute_region();
        region.offsets[0]..region.offsets[0] + region.sizes[0]
    }

    fn run(&self, options: CrossEntropy, targets: &Tensor) -> Result<Run> {
        let x = Var::from_tensor(&randn("x", &[2, ROWS / 2, DIM]).to_dtype(self.dtype)?)?;
        let loss = options.loss(&self.linear.forward(&x)?, targets)?;
        let store = (loss.sum() / loss.count())?.backward()?;
        let mut params = Vec::new();
        for p in &self.slots {
            p.finish_backward()?;
            params.push(flat(&self.grads.buffer(p)?));
            p.clear_accumulated();
        }
        Ok(Run { loss, dx: flat(store.get(&x).unwrap()), params })
    }

    /// `(calls, bytes)` of all-reduces since the last call; checks that nothing else was sent.
    fn reduced(&self) -> Record {
        let record = self.counter.get(TENSOR_PARALLEL, "all_reduce");
        assert!(self.counter.snapshot().len() <= 1, "{:?}", self.counter.snapshot());
        self.counter.reset();
        record
    }
}

struct Run {
    loss: Loss,
    dx: Vec<f64>,
    params: Vec<Vec<f64>>,
}

/// The scope in which the loss works on parts.
fn scope() -> ForwardScope {
    ForwardScope { loss_parallel: true, ..ForwardScope::default() }
}

#[test]
fn equals_whole_logits_with_few_numbers_a_row() {
    let none = CrossEntropy::default();
    let ignoring = [4, -100, 0, 10, -100, 8];
    let cases = [
        (none, [4, 1, 0, 10, 7, 8]),
        (none, ignoring),
        (none.label_smoothing(0.1), ignoring),
        (none.label_smoothing(1.0), [3, 4, 5, 6, 7, 8]),
        (none.ignore_index(7).label_smoothing(0.3), [4, 7, 0, 10, 7, 8]),
    ];
    let solo = Head::new(Arc::new(Solo::new("world", 0))).unwrap();
    for (ranks, portable) in [(2, false), (2, true), (3, false), (3, true)] {
        let sums = run_ranks(ranks, |world| {
            let _portable = portable.then(force_portable);
            let head = Head::new(world)?;
            let _scope = scope().enter();
            let mut sums = Vec::new();
            for (options, classes) in &cases {
                let got = head.run(*options, &targets(classes))?;
                let numbers = if options.label_smoothing == 0.0 { 3 } else { 4 };
                let bytes = 8 * (numbers * ROWS + ROWS * DIM) as u64;
                assert_eq!(head.reduced(), Record { calls: 3, bytes });
                sums.push((got.loss.sum_value()?.to_bits(), got.loss.count().to_bits()));
                let want = solo_run(&solo, *options, classes);
                let what = format!("{options:?} on {ranks} ranks, portable {portable}");
                assert_eq!(got.loss.count(), want.loss.count());
                assert_close(&what, &[got.loss.sum_value()?], &[want.loss.sum_value()?]);
                assert_close(&format!("{what}: dx"), &got.dx, &want.dx);
                let mine = head.classes();
                let (weight, bias) = (&want.params[0], &want.params[1]);
                let weight = &weight[mine.start * DIM..mine.end * DIM];
                assert_close(&format!("{what}: weight"), &got.params[0], weight);
                assert_close(&format!("{what}: bias"), &got.params[1], &bias[mine]);
            }
            Ok(sums)
        })
        .unwrap();
        assert!(sums.iter().all(|sum| *sum == sums[0]), "ranks differ: {sums:?}");
    }
}

/// The ranks' threads share the whole head, but must not use it at the same time.
fn solo_run(solo: &Head, options: CrossEntropy, classes: &[i64; ROWS]) -> Run {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap();
    solo.run(options, &targets(classes)).unwrap()
}

#[test]
fn outside_the_scope_logits_are_whole() {
    let x = randn("x", &[2, ROWS / 2, DIM]);
    let want = Head::new(Arc::new(Solo::new("world", 0))).unwrap().linear.forward(&x).unwrap();
    run_ranks(3, |world| {
        let head = Head::new(world)?;
        let part = {
            let _scope = scope().enter();
            head.linear.forward(&x)?
        };
        assert!(head.counter.snapshot().is_empty());
        let mine = head.classes();
        assert_close("part", &flat(&part), &flat(&want.narrow(2, mine.start, mine.len())?));

        let whole = head.linear.forward(&x)?;
        assert_eq!(whole.dims(), want.dims());
        assert_close("whole", &flat(&whole), &flat(&want));
        assert_eq!(head.counter.get(TENSOR_PARALLEL, "all_gather_into").calls, 1);
        // The loss of whole logits communicates nothing, inside or outside of a scope.
        head.counter.reset();
        let t = targets(&[4, 1, 0, 10, 7, 8]);
        let loss = cross_entropy(&whole, &t)?.mean()?;
        let _scope = scope().enter();
        assert_eq!(cross_entropy(&whole, &t)?.mean()?.to_bits(), loss.to_bits());
        assert!(head.counter.snapshot().is_empty());
        Ok(())
    })
    .unwrap();
}

/// This rank's part of logits: the differentiated variable, and the loss's input.
struct Part {
    var: Var,
    logits: Tensor,
}

/// Runs `f` on 3 ranks with 4, 4 and 3 classes, with both implementations, in a head's scope. `f`
/// gets a function that makes this rank's part of logits from the head's output; the loss takes
/// other tensors for whole logits.
fn on_parts(f: impl Fn(&Head, &dyn Fn(&Tensor) -> Result<Part>) -> Result<()> + Sync) {
    for portable in [false, true] {
        run_ranks(3, |world| {
            let _portable = portable.then(force_portable);
            let head = Head::new(world)?;
            let _scope = scope().enter();
            let given = head.linear.forward(&randn("x", &[1, DIM]))?;
            #[expect(clippy::eq_op, reason = "zeros that come of what the head gave")]
            let zero = (&given - &given)?;
            let mine = head.classes();
            f(&head, &|whole| {
                let part = whole.narrow(1, mine.start, mine.len())?.contiguous()?;
                let var = Var::from_tensor(&part)?;
                let logits = var.broadcast_add(&zero.to_dtype(whole.dtype())?)?;
                Ok(Part { var, logits })
            })
        })
        .unwrap();
    }
}

/// Random logits (`[3, 11]`) with some elements replaced.
fn logits_with(changes: &[(usize, usize, f64)]) -> Tensor {
    let mut values = flat(&randn("logits", &[3, CLASSES]));
    for &(row, class, value) in changes {
        values[row * CLASSES + class] = value;
    }
    Tensor::from_vec(values, (3, CLASSES), &Device::Cpu).unwrap()
}

#[test]
fn infinities_in_ignored_rows_do_no_harm() {
    let t = Tensor::new(&[0i64, -100, 9], &Device::Cpu).unwrap();
    let bad: Vec<_> = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]
        .into_iter()
        .enumerate()
        .map(|(i, value)| (1, 3 * i, value))
        .collect();
    for options in [CrossEntropy::default(), CrossEntropy::default().label_smoothing(0.2)] {
        let want = options.loss(&logits_with(&[]), &t).unwrap().sum_value().unwrap();
        on_parts(|head, part| {
            let logits = part(&logits_with(&bad))?;
            let loss = options.loss(&logits.logits, &t)?;
            assert_eq!(loss.count(), 2.0);
            assert_close("sum", &[loss.sum_value()?], &[want]);
            let grad = flat(loss.sum().backward()?.get(&logits.var).unwrap());
            let columns = head.classes().len();
            assert!(grad.iter().all(|g| g.is_finite()), "{grad:?}");
            assert!(grad[columns..2 * columns].iter().all(|g| *g == 0.0), "{grad:?}");
            Ok(())
        });
    }
}

#[test]
fn classes_may_be_masked_out_also_all_of_a_rank() {
    let t = Tensor::new(&[0i64, 1, 9], &Device::Cpu).unwrap();
    // In row 0 rank 1 has no classes left, in row 1 rank 2 has only one.
    let masked: Vec<_> = [(0, 4), (0, 5), (0, 6), (0, 7), (0, 2), (1, 8), (1, 10)]
        .into_iter()
        .map(|(row, class)| (row, class, f64::NEG_INFINITY))
        .collect();
    let whole = Var::from_tensor(&logits_with(&masked)).unwrap();
    let loss = cross_entropy(&whole, &t).unwrap();
    let (want, grads) = (loss.sum_value().unwrap(), loss.sum().backward().unwrap());
    let want_grad = grads.get(&whole).unwrap();
    on_parts(|head, part| {
        let logits = part(&whole)?;
        let loss = cross_entropy(&logits.logits, &t)?;
        assert_close("sum", &[loss.sum_value()?], &[want]);
        let mine = head.classes();
        let grads = loss.sum().backward()?;
        let want = flat(&want_grad.narrow(1, mine.start, mine.len())?);
        assert_close("gradient", &flat(grads.get(&logits.var).unwrap()), &want);
        Ok(())
    });
}

#[test]
fn large_and_non_finite_logits() {
    let t = Tensor::new(&[0i64, 1, 9], &Device::Cpu).unwrap();
    let large = logits_with(&[(0, 0, 1e4), (1, 6, 2e4), (2, 9, -3e4)]);
    let want = cross_entropy(&large, &t).unwrap().sum_value().unwrap();
    on_parts(|_, part| {
        assert_close("sum", &[cross_entropy(&part(&large)?.logits, &t)?.sum_value()?], &[want]);
        for bad in [f64::NAN, f64::INFINITY] {
            let all_of_rank_1 = [(2, 4, bad), (2, 5, bad), (2, 6, bad), (2, 7, bad)];
            for changes in [&all_of_rank_1[..1], &all_of_rank_1] {
                let loss = cross_entropy(&part(&logits_with(changes))?.logits, &t)?;
                assert!(!loss.mean()?.is_finite(), "{bad}: {loss:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn half_precision_logits_go_over_the_wire_in_f32() {
    let t = Tensor::new(&[0i64, 5, 9], &Device::Cpu).unwrap();
    let whole = logits_with(&[]).to_dtype(DType::BF16).unwrap();
    let want = cross_entropy(&whole, &t).unwrap().mean().unwrap();
    on_parts(|head, part| {
        let logits = part(&whole)?;
        let _ = head.reduced();
        let loss = CrossEntropy::default().reduce(&logits.logits, &t, Reduction::Mean)?;
        assert_eq!(head.reduced(), Record { calls: 2, bytes: 4 * 3 * 3 });
        assert_eq!(loss.dtype(), DType::F32);
        assert!((f64::from(loss.to_scalar::<f32>()?) - want).abs() < 1e-6);
        let grads = loss.backward()?;
        assert_eq!(grads.get(&logits.var).unwrap().dtype(), DType::BF16);
        assert_eq!(head.reduced(), Record::default());
        Ok(())
    });
}

/// Of both, logits are rounded to bf16.
#[test]
fn head_kept_in_f32_has_the_same_loss() {
    let init = || ModuleInit {
        compute_dtype: DType::BF16,
        keep_in_fp32: vec!["head".to_owned()],
        ..ModuleInit::default()
    };
    let classes = [4, 1, 0, 10, 7, 8];
    let solo = Head::with_init(Arc::new(Solo::new("world", 0)), init()).unwrap();
    let want = solo_run(&solo, CrossEntropy::default(), &classes);
    let want = (want.loss.sum_value().unwrap(), want.dx);
    run_ranks(2, |world| {
        let head = Head::with_init(world, init())?;
        let _scope = scope().enter();
        let got = head.run(CrossEntropy::default(), &targets(&classes))?;
        assert_eq!(got.loss.sum().dtype(), DType::F32);
        assert!(
            (got.loss.sum_value()? - want.0).abs() <= 1e-5,
            "{} {}",
            got.loss.sum_value()?,
            want.0
        );
        // Two roundings of bf16, where a sum over the ranks is between.
        for (got, want) in got.dx.iter().zip(&want.1) {
            assert!((got - want).abs() <= 0.01, "{got} {want}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn validation_has_no_graph_and_the_same_loss() {
    let t = Tensor::new(&[0i64, 5, 9], &Device::Cpu).unwrap();
    let whole = logits_with(&[]);
    let want = cross_entropy(&whole, &t).unwrap().sum_value().unwrap();
    on_parts(|head, part| {
        let _no_grad = no_grad();
        let logits = part(&whole)?;
        let _ = head.reduced();
        let loss = cross_entropy(&logits.logits, &t)?;
        assert!(!loss.sum().track_op());
        assert_close("sum", &[loss.sum_value()?], &[want]);
        assert_eq!(head.reduced().calls, 2);
        Ok(())
    });
}

#[test]
fn targets_beyond_all_classes_are_refused() {
    on_parts(|head, part| {
        let logits = part(&logits_with(&[]))?.logits;
        // 4 and 10 are classes of other ranks.
        cross_entropy(&logits, &Tensor::new(&[4u32, 10, 0], &Device::Cpu)?)?;
        let _ = head.reduced();
        let t = Tensor::new(&[0i64, 11, 9], &Device::Cpu)?;
        assert_says!(cross_entropy(&logits, &t).unwrap_err(), "target 11 … the 11 classes …");
        assert_eq!(head.reduced(), Record::default());
        Ok(())
    });
}

/// Logits as wide as a part of other logits are still whole, and tensors derived from a part are
/// parts, with and without a graph.
#[test]
fn parts_are_known_by_their_origin() {
    let losses = |ranks: usize, graph: bool| {
        let runs = run_ranks(ranks, |world| {
            let size = world.size();
            let layout = DeviceMesh::layout_for(size, Some(1), Some(1), Some(1), Some(size))?;
            let mesh = DeviceMesh::new(layout, world)?;
            let b = ModuleBuilder::new(ModuleInit::default());
            // On two ranks, each part of the vocabulary is as wide as the small head.
            let head = Linear::new(&b.pp("head"), DIM, 256)?;
            let small = Linear::new(&b.pp("small"), DIM, 128)?;
            let mut tree = b.finish()?;
            let parts =
                Colwise { output: Layout::Replicate, loss_parallel: true, ..Colwise::default() };
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan! { "head" => parts })?;
            materialize::replicate(&tree.slots(), 3)?;
            let _no_grad = (!graph).then(no_grad);
            let _scope = scope().enter();
            let x = randn("x", &[2, 3, DIM]).to_dtype(DType::F32)?;
            let t = targets(&[4, 1, 0, 127, 7, 8]);
            let first = |x: &Tensor| x.narrow(1, 0, 2);
            let (logits, other) = (head.forward(&x)?, small.forward(&x)?);
            let capped = ((&logits / 5.0)?.tanh()? * 5.0)?;
            [
                cross_entropy(&logits, &t)?,
                cross_entropy(&other, &t)?,
                cross_entropy(&first(&logits)?, &first(&t)?.contiguous()?)?,
                cross_entropy(&first(&other)?, &first(&t)?.contiguous()?)?,
                cross_entropy(&capped.flatten_to(1)?, &t.flatten_all()?)?,
                cross_entropy(&(other * 2.0)?.flatten_to(1)?, &t.flatten_all()?)?,
            ]
            .iter()
            .map(Loss::mean)
            .collect::<Result<Vec<f64>>>()
        });
        runs.unwrap().swap_remove(0)
    };
    for graph in [true, false] {
        for (one, two) in losses(1, graph).into_iter().zip(losses(2, graph)) {
            assert!((one - two).abs() < 1e-6, "{one} and {two}");
        }
    }
}
