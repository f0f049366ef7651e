//! [`LinearOps`] on the GPU: cuBLASLt, bf16 in, f32 sums.
//!
//! A row-major matrix is its transpose to the column-major library: `y[T, N] = x wᵀ` is asked for as `yᵀ = w xᵀ`. What the library
//! advises for a shape is kept. It must not know which layer a product belongs to.

use super::args::Op;
use super::driver::Handle;
use super::{Cuda, lock};
use crate::DType::{Bf16, F32};
use crate::ops::linear::{Columns, Epilogue, LinearOps, Write};
use crate::{Error, Stream, Tensor};
use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::Mutex;

/// A column-major operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Size {
    rows: usize,
    columns: usize,
    /// Elements from one column to the next: the rows, or more where the operand is part of a larger matrix.
    leading: usize,
}

impl From<(usize, usize)> for Size {
    fn from((rows, columns): (usize, usize)) -> Self {
        Self { rows, columns, leading: rows }
    }
}

impl Size {
    /// In a matrix of so many rows.
    fn within(self, leading: usize) -> Self {
        Self { leading, ..self }
    }
}

/// Everything the library's advice depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    a: Size,
    b: Size,
    d: Size,
    transpose_a: bool,
    transpose_b: bool,
    bias: bool,
    f32_out: bool,
    /// Largest power of two, up to 256, that divides all addresses.
    alignment: u64,
}

/// A product as the library wants it described.
struct Product {
    description: Handle<sys::cublasLtMatmulDesc_t>,
    a: Handle<sys::cublasLtMatrixLayout_t>,
    b: Handle<sys::cublasLtMatrixLayout_t>,
    d: Handle<sys::cublasLtMatrixLayout_t>,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library's handle and the products it has been asked for.
pub(super) struct Products {
    handle: Handle<sys::cublasLtHandle_t>,
    known: Mutex<HashMap<Key, Product>>,
}

impl Products {
    /// Opens the library; a context is current.
    pub(super) fn new() -> Result<Self, String> {
        let handle = lt::create_handle().map_err(|error| format!("cuBLASLt does not start: {error}"))?;
        Ok(Self { handle: Handle(handle), known: Mutex::default() })
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // Nobody is left to tell of a failure.
        for (_, product) in lock(&self.known).drain() {
            // SAFETY: each was created once and is destroyed once; the device is idle.
            unsafe {
                let _ = lt::destroy_matmul_desc(product.description.0);
                for layout in [product.a, product.b, product.d] {
                    let _ = lt::destroy_matrix_layout(layout.0);
                }
            }
        }
        // SAFETY: created once, destroyed once.
        let _ = unsafe { lt::destroy_handle(self.handle.0) };
    }
}

/// Addresses of a product `d = alpha a b + beta c`.
struct Operands {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    bias: Option<u64>,
    alpha: f32,
    beta: f32,
}

impl Cuda {
    fn product(&self, op: &'static str, mut key: Key, operands: &Operands) {
        let all = operands.a | operands.b | operands.c | operands.d | operands.bias.unwrap_or(0);
        key.alignment = 1 << all.trailing_zeros().min(8);
        key.bias = operands.bias.is_some();
        self.attempt(op, || {
            let failed = |error: CublasError| {
                let sizes = format!("{:?} x {:?} -> {:?}", key.a, key.b, key.d);
                Error::Failed { op: op.to_owned(), detail: format!("cuBLASLt: {error} for {sizes}") }
            };
            let products = &self.shared.products;
            let mut known = lock(&products.known);
            let product = match known.entry(key) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(describe(products.handle, &key, operands.bias).map_err(failed)?)
                }
            };
            if let Some(bias) = operands.bias {
                set(product.description, sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
                    .map_err(failed)?;
            }
            let (workspace, bytes) = self.matrix_workspace();
            // SAFETY: the layouts describe checked tensors at these addresses; scalars are read before the call returns; the
            // workspace is used in compute-stream order.
            unsafe {
                lt::matmul(
                    products.handle.0,
                    product.description.0,
                    from_ref(&operands.alpha).cast(),
                    from_ref(&operands.beta).cast(),
                    operands.a as *const c_void,
                    product.a.0,
                    operands.b as *const c_void,
                    product.b.0,
                    operands.c as *const c_void,
                    product.d.0,
                    operands.d as *mut c_void,
                    product.d.0,
                    from_ref(&product.algorithm),
                    workspace as *mut c_void,
                    bytes as usize,
                    self.stream(Stream::Compute).0.cast(),
                )
            }
            .map_err(failed)
        });
    }
}

fn set<T>(
    description: Handle<sys::cublasLtMatmulDesc_t>,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: the attribute has the type of `value`, which the library copies.
    unsafe { lt::set_matmul_desc_attribute(description.0, attribute, from_ref(value).cast(), size_of::<T>()) }
}

fn describe(handle: Handle<sys::cublasLtHandle_t>, key: &Key, bias: Option<u64>) -> Result<Product, CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
    let description = Handle(lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?);
    for (attribute, transpose) in
        [(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a), (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b)]
    {
        set(description, attribute, &i32::from(transpose))?;
    }
    if let Some(bias) = bias {
        let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
    }
    let layout = |size: Size, dtype| {
        lt::create_matrix_layout(dtype, size.rows as u64, size.columns as u64, size.leading as i64).map(Handle)
    };
    let (a, b) = (layout(key.a, CUDA_R_16BF)?, layout(key.b, CUDA_R_16BF)?);
    let d = layout(key.d, if key.f32_out { CUDA_R_32F } else { CUDA_R_16BF })?;
    let preference = lt::create_matmul_pref()?;
    // SAFETY: the preference is alive; each attribute has the type of its value; the layouts and the description are alive.
    let advice = unsafe {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let number = |attribute, value: &dyn AsRef<[u8]>| {
            let bytes = value.as_ref();
            lt::set_matmul_pref_attribute(preference, attribute, bytes.as_ptr().cast(), bytes.len())
        };
        let workspace = (super::MATRIX_BYTES as usize).to_ne_bytes();
        let alignment = (key.alignment as u32).to_ne_bytes();
        let set = number(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)
            .and_then(|()| number(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment))
            .and_then(|()| number(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment))
            .and_then(|()| number(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment))
            .and_then(|()| number(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment));
        let advice = set.and_then(|()| lt::get_matmul_algo_heuristic(handle.0, description.0, a.0, b.0, d.0, d.0, preference));
        lt::destroy_matmul_pref(preference)?;
        advice?
    };
    Ok(Product { description, a, b, d, algorithm: advice.algo })
}

impl LinearOps for Cuda {
    fn linear_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, epilogue: Epilogue<'_, Self>) {
        let op = self.op("linear_forward");
        let (t, n, k) = (x.rows(), w.rows(), w.dim(1));
        let d = op.at("y", y, Bf16, &[t, n]);
        let (a, b) = (op.at("w", w, Bf16, &[n, k]), op.at("x", x, Bf16, &[t, k]));
        let (c, bias, beta) = match epilogue {
            Epilogue::None => (d, None, 0.0),
            Epilogue::Bias(bias) => (d, Some(op.at("bias", bias, Bf16, &[n])), 0.0),
            Epilogue::Residual(residual) => (op.at("residual", residual, Bf16, &[t, n]), None, 1.0),
        };
        let key = Key { transpose_a: true, transpose_b: false, ..key((k, n), (k, t), (n, t)) };
        self.product(op.name, key, &Operands { a, b, c, d, bias, alpha: 1.0, beta });
    }

    fn linear_backward_input(&self, dx: &mut Tensor<Self>, dy: &Tensor<Self>, w: &Tensor<Self>, write: Write) {
        let op = self.op("linear_backward_input");
        let (t, n, k) = (dy.rows(), w.rows(), w.dim(1));
        let d = op.at("dx", dx, Bf16, &[t, k]);
        let (a, b) = (op.at("w", w, Bf16, &[n, k]), op.at("dy", dy, Bf16, &[t, n]));
        self.product(
            op.name,
            key((k, n), (n, t), (k, t)),
            &Operands { a, b, c: d, d, bias: None, alpha: 1.0, beta: beta_of(write) },
        );
    }

    fn linear_backward_weight(&self, dw: &mut Tensor<Self>, dy: &Tensor<Self>, x: &Tensor<Self>, write: Write) {
        let op = self.op("linear_backward_weight");
        let (t, n, k) = (dy.rows(), dy.dim(1), x.dim(1));
        let d = op.at("dw", dw, F32, &[n, k]);
        let (a, b) = (op.at("x", x, Bf16, &[t, k]), op.at("dy", dy, Bf16, &[t, n]));
        let key = Key { transpose_b: true, f32_out: true, ..key((k, t), (n, t), (k, n)) };
        self.product(op.name, key, &Operands { a, b, c: d, d, bias: None, alpha: 1.0, beta: beta_of(write) });
    }

    fn linear_backward_bias(&self, dbias: &mut Tensor<Self>, dy: &Tensor<Self>) {
        let op = self.op("linear_backward_bias");
        let (t, n) = (dy.rows(), dy.dim(1));
        let out = op.at("dbias", dbias, F32, &[n]);
        self.add_columns(op.name, out, op.at("dy", dy, Bf16, &[t, n]), t, n);
    }

    fn linear_columns_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, columns: &Columns) {
        let op = self.op("linear_columns_forward");
        let (t, k, n, width) = (x.rows(), x.dim(1), columns.range.len(), y.dim(1));
        let d = op.columns("y", y, t, columns);
        let (a, b) = (op.at("w", w, Bf16, &[n, k]), op.at("x", x, Bf16, &[t, k]));
        let key = Key { transpose_a: true, ..key((k, n), (k, t), Size::from((n, t)).within(width)) };
        self.product(op.name, key, &Operands { a, b, c: d, d, bias: None, alpha: columns.scale, beta: 1.0 });
    }

    fn linear_columns_backward(
        &self,
        dx: &mut Tensor<Self>,
        dw: &mut Tensor<Self>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        w: &Tensor<Self>,
        columns: &Columns,
    ) {
        let op = self.op("linear_columns_backward");
        let (t, k, n) = (x.rows(), x.dim(1), columns.range.len());
        let (alpha, gradient) = (columns.scale, Size::from((n, t)).within(dy.dim(1)));
        let (b, x) = (op.columns("dy", dy, t, columns), op.at("x", x, Bf16, &[t, k]));
        let d = op.at("dw", dw, F32, &[n, k]);
        let to_weight = Key { transpose_b: true, f32_out: true, ..key((k, t), gradient, (k, n)) };
        self.product(op.name, to_weight, &Operands { a: x, b, c: d, d, bias: None, alpha, beta: 1.0 });
        let (d, a) = (op.at("dx", dx, Bf16, &[t, k]), op.at("w", w, Bf16, &[n, k]));
        self.product(op.name, key((k, n), gradient, (k, t)), &Operands { a, b, c: d, d, bias: None, alpha, beta: 0.0 });
    }
}

impl Op<'_> {
    /// The address of the first of some columns of a matrix with `rows` rows.
    fn columns(&self, argument: &str, tensor: &Tensor<Cuda>, rows: usize, columns: &Columns) -> u64 {
        let width = tensor.dim(1);
        let fits = columns.range.start < columns.range.end && columns.range.end <= width;
        assert!(fits, "{}: {argument} is {tensor:?}, wanted [T, N] with columns {:?}", self.name, columns.range);
        self.at(argument, tensor, Bf16, &[rows, width]) + 2 * columns.range.start as u64
    }
}

/// The factor of what the output holds.
fn beta_of(write: Write) -> f32 {
    match write {
        Write::Overwrite => 0.0,
        Write::Accumulate => 1.0,
    }
}

fn key(a: impl Into<Size>, b: impl Into<Size>, d: impl Into<Size>) -> Key {
    let (a, b, d) = (a.into(), b.into(), d.into());
    Key { a, b, d, transpose_a: false, transpose_b: false, bias: false, f32_out: false, alignment: 1 }
}
