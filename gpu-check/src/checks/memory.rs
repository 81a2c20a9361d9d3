//! Empty tensors, copies, and memory that the allocator keeps.

use candle_core::{DType, Device, Tensor};
use fulgurite::core::autograd::storage;
use fulgurite::core::execution::transfer;
use fulgurite_error::Result;

use crate::compare::{difference, numbers, randn};
use crate::findings::Findings;
use crate::target::Target;

/// A view of a tensor.
type View = fn(&Tensor) -> candle_core::Result<Tensor>;

const FLOATS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// Requests of empty shards, and of units that are freed and allocated again.
pub(super) fn empty(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for dtype in FLOATS {
        let none = Tensor::zeros(0, dtype, &device)?;
        for other in FLOATS {
            findings.require(storage::cast(&none, other)?.elem_count() == 0, || {
                format!("a cast of nothing from {dtype:?} to {other:?} has elements")
            });
        }
        storage::copy_from(&none, &Tensor::zeros(0, dtype, &device)?)?;
        findings.require(numbers(&none)?.is_empty(), || {
            format!("nothing in {dtype:?} was read as something")
        });

        // Memory of a unit: freed, allocated again, written.
        let tensor = randn("unit", &[3, 5])?.to_dtype(dtype)?.to_device(&device)?;
        let expected = numbers(&tensor)?;
        let copy = tensor.copy()?;
        storage::release(&tensor)?;
        findings.require(storage::is_released(&tensor), || {
            format!("{dtype:?}: memory was not given back")
        });
        storage::allocate(&tensor)?;
        storage::copy_from(&tensor, &copy)?;
        let difference = difference(&numbers(&tensor)?, &expected);
        findings.difference(
            &format!("{dtype:?} after release, allocate and copy"),
            difference,
            0.0,
        );
    }
    Ok(findings)
}

/// Copies to the device and back, of many sizes, dtypes and views; every bit must survive.
pub(super) fn copies(target: &Target) -> Result<Findings> {
    let (device, mut findings) = (target.device()?, Findings::default());
    for n in [1, 3, 4097, (1 << 20) + 1, (1 << 24) + 5] {
        let values = randn("copies", &[n])?;
        let values = ((values * 100.)? + 128.)?.clamp(0f64, 255f64)?;
        for dtype in
            [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64]
        {
            let there = values.to_dtype(dtype)?;
            let back = transfer::to_host(&transfer::to_device(&there, &device, "check")?, "check")?;
            let apart = difference(&numbers(&back)?, &numbers(&there)?);
            findings.difference(&format!("{n} elements of {dtype:?}"), apart, 0.0);
        }
    }
    // Start all copies first; wait after their sources are dropped and the memory is reused.
    let begin = |n: usize| -> Result<_> {
        let values = randn("begun", &[n])?;
        let computed = (transfer::to_device(&values, &device, "check")? * 2.)?;
        Ok((values, transfer::begin_to_host(&computed, "check")?))
    };
    let begun = [5, 1 << 20, 77, (3 << 20) + 1, 1 << 20].map(begin);
    for (i, begun) in begun.into_iter().enumerate() {
        let (values, copy) = begun?;
        let apart = difference(&numbers(&copy.wait()?)?, &numbers(&(values * 2.)?)?);
        findings.difference(&format!("begun, number {i}"), apart, 0.0);
    }
    for dtype in [DType::I16, DType::I32, DType::I64] {
        let whole = storage::zeros(3, dtype, &device)?;
        let values = Tensor::new(&[1f32, -2., 3.], &device)?;
        storage::copy_from(&whole, &values)?;
        let apart = difference(&numbers(&transfer::to_host(&whole, "check")?)?, &[1., -2., 3.]);
        findings.difference(&format!("copied into {dtype:?}"), apart, 0.0);
    }
    // Many small copies, which share pinned memory, before the first result is read.
    let small = (0..300).map(|i| -> Result<_> {
        let values = randn(&format!("small {i}"), &[1 + i % 37])?;
        Ok((transfer::to_device(&values, &device, "check")?, values))
    });
    for (i, small) in small.collect::<Result<Vec<_>>>()?.into_iter().enumerate() {
        let (there, values) = small;
        let back = numbers(&there)?;
        findings.require(back == numbers(&values)?, || format!("small copy {i} has other values"));
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64] {
        let apart = together(dtype, &device)?;
        findings.difference(&format!("parts of {dtype:?} together"), apart, 0.0);
    }
    let matrix = randn("views", &[129, 65])?;
    let on_device = transfer::to_device(&matrix, &device, "check")?;
    let views: [(&str, View); 3] = [
        ("transposed", Tensor::t),
        ("rows", |x| x.narrow(0, 7, 100)),
        ("columns", |x| x.narrow(1, 3, 50)?.t()),
    ];
    for (name, view) in views {
        let back = transfer::to_host(&view(&on_device)?, "check")?;
        findings.difference(name, difference(&numbers(&back)?, &numbers(&view(&matrix)?)?), 0.0);
        let there = transfer::to_device(&view(&matrix)?, &device, "check")?;
        findings.difference(
            &format!("{name}, to the device"),
            difference(&numbers(&there)?, &numbers(&view(&matrix)?)?),
            0.0,
        );
    }
    Ok(findings)
}

/// Copies slices of odd lengths between odd offsets, one of them empty and one with gaps. Returns
/// the difference of the whole target from its expected contents, including elements outside the
/// slices.
fn together(dtype: DType, device: &Device) -> Result<f64> {
    const LENGTHS: [usize; 6] = [1, 7, 0, 1021, 70_001, 64];
    let whole: usize = LENGTHS.iter().map(|length| length + 3).sum();
    let source = (randn("together", &[2 * whole])? * 50.)?.to_dtype(dtype)?;
    let target = Tensor::zeros(whole, dtype, device)?;
    let source_there = source.to_device(device)?;
    let (mut parts, mut expected, mut at) = (Vec::new(), vec![0.0; whole], 1);
    let all = numbers(&source)?;
    for (i, length) in LENGTHS.into_iter().enumerate() {
        let from = 2 * at + i;
        // The last slice takes every second element.
        let step = 1 + i / (LENGTHS.len() - 1);
        let part = source_there.narrow(0, from, step * length)?;
        let part = part.reshape((length, step))?.narrow(1, 0, 1)?.squeeze(1)?;
        parts.push((target.narrow(0, at, length)?, part));
        (0..length).for_each(|k| expected[at + k] = all[from + k * step]);
        at += length + 2;
    }
    let parts: Vec<_> = parts.iter().map(|(target, source)| (target, source)).collect();
    storage::copy_all(&parts)?;
    Ok(difference(&numbers(&target)?, &expected))
}

/// Allocates and frees memory repeatedly.
pub(super) fn pool(target: &Target) -> Result<Findings> {
    const BYTES: usize = 64 << 20;
    let (accelerator, mut findings) = (target.open()?, Findings::default());
    let device: &Device = accelerator.device();
    let before = accelerator.memory()?;
    for _ in 0..100 {
        let tensor = Tensor::zeros(BYTES / 4, DType::F32, device)?;
        drop((&tensor + 1.)?);
    }
    device.synchronize()?;
    let (Some(before), Some(after)) = (before, accelerator.memory()?) else { return Ok(findings) };
    findings.figure("held_before_bytes", before.held_bytes as f64);
    findings.figure("held_after_bytes", after.held_bytes as f64);
    findings.figure("peak_bytes", after.peak_bytes as f64);
    findings.require(after.held_bytes < before.held_bytes + BYTES as u64, || {
        format!("what was freed is still held: {before:?}, {after:?}")
    });
    findings.require(after.peak_bytes >= before.held_bytes + BYTES as u64, || {
        format!("the peak does not have the tensors that there were: {before:?}, {after:?}")
    });
    // Two tensors are live at once; their memory must be reused.
    findings.require(after.peak_bytes < before.peak_bytes + 4 * BYTES as u64, || {
        format!("freed memory was not used again: {before:?}, {after:?}")
    });

    // More than the device has: the error must be recognised, and the device must keep working.
    let too_much = usize::try_from(after.total_bytes / 4).unwrap_or(usize::MAX) + 1;
    match Tensor::zeros(too_much, DType::F32, device) {
        Ok(_) => {
            findings.wrong.push("a tensor larger than the device's memory was made".to_owned())
        }
        Err(error) => {
            let error = error.into();
            findings.fact("out_of_memory", &error);
            findings.require(accelerator.is_out_of_memory(&error), || {
                format!("this was not known as an error for want of memory: {error}")
            });
        }
    }
    let ones = Tensor::ones(1000, DType::F32, device)?;
    let sum = numbers(&ones.sum_all()?)?;
    findings.require(sum == [1000.0], || {
        format!("after an error for want of memory 1000 ones are {sum:?}")
    });
    Ok(findings)
}
