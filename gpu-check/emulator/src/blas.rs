//! cuBLAS matrix products, with the argument checks that its documentation requires.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_longlong, c_void};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use crate::machine::{self, State};
use crate::streams::Handle;

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;

/// The stream of each handle.
static HANDLES: Mutex<BTreeMap<usize, Handle>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(to: *mut usize) -> c_int {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = handles.last_key_value().map_or(1, |(last, _)| last + 1);
    handles.insert(handle, 0);
    // SAFETY: the caller's.
    unsafe { *to = handle };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(handle: usize) -> c_int {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    if handles.remove(&handle).is_some() { SUCCESS } else { NOT_INITIALIZED }
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(handle: usize, stream: Handle) -> c_int {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    match handles.get_mut(&handle) {
        Some(of_handle) => {
            *of_handle = stream;
            SUCCESS
        }
        None => NOT_INITIALIZED,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    Bf16,
    F64,
}

impl Kind {
    /// The kind of a `cudaDataType_t`.
    fn of(number: c_int) -> Option<Self> {
        match number {
            0 => Some(Self::F32),
            1 => Some(Self::F64),
            2 => Some(Self::F16),
            14 => Some(Self::Bf16),
            _ => None,
        }
    }

    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// One or several matrices in column-major order.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    start: usize,
    kind: Kind,
    leading: usize,
    stride: usize,
}

impl Matrix {
    /// Number of bytes from the first element to the last of `count` matrices of `rows` ×
    /// `columns`.
    fn bytes(&self, rows: usize, columns: usize, count: usize) -> usize {
        ((count - 1) * self.stride + (columns - 1) * self.leading + rows) * self.kind.size()
    }

    /// # Safety
    /// Element `at` must be allocated.
    unsafe fn read(&self, at: usize) -> f64 {
        let address = self.start + at * self.kind.size();
        // SAFETY: by this function's contract; candle aligns tensors to their elements.
        unsafe {
            match self.kind {
                Kind::F32 => f64::from(*(address as *const f32)),
                Kind::F64 => *(address as *const f64),
                Kind::F16 => f64::from(*(address as *const f16)),
                Kind::Bf16 => f64::from(*(address as *const bf16)),
            }
        }
    }

    /// # Safety
    /// As [`read`](Self::read).
    unsafe fn write(&self, at: usize, value: f64) {
        let address = self.start + at * self.kind.size();
        // SAFETY: as above. A sum in f32 is rounded to half precision once.
        unsafe {
            match self.kind {
                Kind::F32 => *(address as *mut f32) = value as f32,
                Kind::F64 => *(address as *mut f64) = value,
                Kind::F16 => *(address as *mut f16) = f16::from_f32(value as f32),
                Kind::Bf16 => *(address as *mut bf16) = bf16::from_f32(value as f32),
            }
        }
    }
}

/// `c = alpha a b + beta c`.
#[derive(Debug, Clone, Copy)]
struct Product {
    transposed: [bool; 2],
    m: usize,
    n: usize,
    k: usize,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    alpha: f64,
    beta: f64,
    count: usize,
}

impl Product {
    fn sides(&self) -> [(usize, usize); 3] {
        let turned = |is, (rows, columns)| if is { (columns, rows) } else { (rows, columns) };
        let [a, b] = self.transposed;
        [turned(a, (self.m, self.k)), turned(b, (self.k, self.n)), (self.m, self.n)]
    }

    fn is_valid(&self) -> bool {
        let matrices = [self.a, self.b, self.c];
        matrices.iter().zip(self.sides()).all(|(matrix, (rows, _))| matrix.leading >= rows.max(1))
    }

    fn carry_out(&self, state: &State) {
        if self.m == 0 || self.n == 0 || self.count == 0 {
            return;
        }
        for (matrix, (rows, columns)) in [self.a, self.b, self.c].iter().zip(self.sides()) {
            let bytes = if self.k == 0 { 0 } else { matrix.bytes(rows, columns, self.count) };
            if bytes > 0 && !state.memory.iter().any(|memory| memory.holds(matrix.start, bytes)) {
                crate::refuse(&format!(
                    "a product of {self:?}: {bytes} bytes at {:#x} are not allocated, or freed",
                    matrix.start
                ));
            }
        }
        // SAFETY: the check above found all elements allocated.
        unsafe {
            match self.c.kind {
                Kind::F64 => self.sums::<f64>(|x| x, |x| x),
                _ => self.sums::<f32>(|x| x as f32, f64::from),
            }
        }
    }

    /// # Safety
    /// All elements of the three matrices must be allocated.
    unsafe fn sums<T: 'static + Copy>(&self, to: fn(f64) -> T, from: fn(T) -> f64) {
        let [(a_rows, a_columns), (b_rows, b_columns), _] = self.sides();
        // SAFETY: the caller's.
        let dense = |matrix: &Matrix, rows: usize, columns: usize, index: usize| unsafe {
            let mut values = Vec::with_capacity(rows * columns);
            for column in 0..columns {
                for row in 0..rows {
                    values.push(to(
                        matrix.read(index * matrix.stride + column * matrix.leading + row)
                    ));
                }
            }
            values
        };
        let steps = |is, rows: usize| if is { (rows as isize, 1) } else { (1, rows as isize) };
        for index in 0..self.count {
            let a = dense(&self.a, a_rows, a_columns, index);
            let b = dense(&self.b, b_rows, b_columns, index);
            let mut out = vec![to(0.0); self.m * self.n];
            let ((a_row, a_column), (b_row, b_column)) =
                (steps(self.transposed[0], a_rows), steps(self.transposed[1], b_rows));
            // SAFETY: the three matrices have these sizes and strides.
            unsafe {
                gemm::gemm(
                    self.m,
                    self.n,
                    self.k,
                    out.as_mut_ptr(),
                    self.m as isize,
                    1,
                    false,
                    a.as_ptr(),
                    a_column,
                    a_row,
                    b.as_ptr(),
                    b_column,
                    b_row,
                    to(0.0),
                    to(1.0),
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
            for column in 0..self.n {
                for row in 0..self.m {
                    let at = index * self.c.stride + column * self.c.leading + row;
                    let sum = self.alpha * from(out[column * self.m + row]);
                    // SAFETY: the caller's. If `beta` is 0, the old value is not read: it may be
                    // NaN.
                    unsafe {
                        let old = if self.beta == 0.0 { 0.0 } else { self.beta * self.c.read(at) };
                        self.c.write(at, sum + old);
                    }
                }
            }
        }
    }
}

/// Queues a product on the handle's stream.
fn queue(handle: usize, product: Product) -> c_int {
    let stream = HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied();
    let Some(stream) = stream else { return NOT_INITIALIZED };
    if !product.is_valid() {
        return INVALID_VALUE;
    }
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "a product") else { return NOT_INITIALIZED };
        machine.state.calls.count("launch", 0);
        machine
            .state
            .calls
            .count(format!("product in {:?} to {:?}", product.a.kind, product.c.kind), 0);
        let work = move |state: &mut State| product.carry_out(state);
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        SUCCESS
    })
}

fn length(n: c_longlong) -> Option<usize> {
    usize::try_from(n).ok()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmStridedBatchedEx(
    handle: usize,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: usize,
    a_kind: c_int,
    a_leading: c_int,
    a_stride: c_longlong,
    b: usize,
    b_kind: c_int,
    b_leading: c_int,
    b_stride: c_longlong,
    beta: *const c_void,
    c: usize,
    c_kind: c_int,
    c_leading: c_int,
    c_stride: c_longlong,
    count: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> c_int {
    let kinds = (Kind::of(a_kind), Kind::of(b_kind), Kind::of(c_kind));
    let (Some(a_kind), Some(b_kind), Some(c_kind)) = kinds else { return NOT_SUPPORTED };
    // Known combinations: f16 summed in f16, f64 summed in f64, and sums in f32 with all matrices
    // of one dtype (not f64) or f32 output of half inputs.
    let is_known = match compute {
        64 => [a_kind, b_kind, c_kind] == [Kind::F16; 3],
        68 | 77 => {
            a_kind == b_kind && a_kind != Kind::F64 && (c_kind == a_kind || c_kind == Kind::F32)
        }
        70 => [a_kind, b_kind, c_kind] == [Kind::F64; 3],
        _ => false,
    };
    if !is_known {
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's; the factors have the dtype of the sum.
    let factor = |at: *const c_void| unsafe {
        match compute {
            64 => f64::from(*at.cast::<f16>()),
            70 => *at.cast::<f64>(),
            _ => f64::from(*at.cast::<f32>()),
        }
    };
    let matrix = |start, kind, leading: c_int, stride| {
        Some(Matrix { start, kind, leading: length(leading.into())?, stride: length(stride)? })
    };
    let product = || {
        Some(Product {
            transposed: [a_operation != 0, b_operation != 0],
            m: length(m.into())?,
            n: length(n.into())?,
            k: length(k.into())?,
            a: matrix(a, a_kind, a_leading, a_stride)?,
            b: matrix(b, b_kind, b_leading, b_stride)?,
            c: matrix(c, c_kind, c_leading, c_stride)?,
            alpha: factor(alpha),
            beta: factor(beta),
            count: length(count.into())?,
        })
    };
    product().map_or(INVALID_VALUE, |product| queue(handle, product))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmEx(
    handle: usize,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: usize,
    a_kind: c_int,
    a_leading: c_int,
    b: usize,
    b_kind: c_int,
    b_leading: c_int,
    beta: *const c_void,
    c: usize,
    c_kind: c_int,
    c_leading: c_int,
    compute: c_int,
    algorithm: c_int,
) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        cublasGemmStridedBatchedEx(
            handle,
            a_operation,
            b_operation,
            m,
            n,
            k,
            alpha,
            a,
            a_kind,
            a_leading,
            0,
            b,
            b_kind,
            b_leading,
            0,
            beta,
            c,
            c_kind,
            c_leading,
            0,
            1,
            compute,
            algorithm,
        )
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDgemmStridedBatched(
    handle: usize,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f64,
    a: usize,
    a_leading: c_int,
    a_stride: c_longlong,
    b: usize,
    b_leading: c_int,
    b_stride: c_longlong,
    beta: *const f64,
    c: usize,
    c_leading: c_int,
    c_stride: c_longlong,
    count: c_int,
) -> c_int {
    let (alpha, beta) = (alpha.cast(), beta.cast());
    // SAFETY: the caller's.
    unsafe {
        cublasGemmStridedBatchedEx(
            handle,
            a_operation,
            b_operation,
            m,
            n,
            k,
            alpha,
            a,
            1,
            a_leading,
            a_stride,
            b,
            1,
            b_leading,
            b_stride,
            beta,
            c,
            1,
            c_leading,
            c_stride,
            count,
            70,
            0,
        )
    }
}
