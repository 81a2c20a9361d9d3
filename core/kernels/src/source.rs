//! The source code of the kernels.

/// A file of kernels; each is one NVRTC program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The squared norm of many tensors.
    GradNorm,
    /// Optimizers and averages of weights, over many tensors.
    Optimizer,
    /// Copies of many parts of memory.
    Copies,
    /// Copies of views.
    Views,
    /// Norms, SwiGLU and rotary position embedding.
    Rows,
    /// Softmax of attention scores, also with a mask or a bias.
    Attention,
    /// Attention without scores in memory, for heads of up to 128 elements.
    Flash,
    /// Attention without scores in memory, for heads of up to 256 elements.
    FlashWide,
    /// [`Flash`](Self::Flash) with bounded scores, and without order in windows and documents.
    FlashGeneral,
    /// [`FlashGeneral`](Self::FlashGeneral) for heads of up to 256 elements.
    FlashWideGeneral,
    /// Dropout.
    Dropout,
    /// Cross entropy, and the gradient of an embedding.
    Loss,
    /// Pooling over two dimensions.
    Pooling,
    /// Steps of a GRU or an LSTM.
    Recurrent,
}

impl Source {
    /// All files.
    pub const ALL: [Self; 14] = [
        Self::GradNorm,
        Self::Optimizer,
        Self::Copies,
        Self::Views,
        Self::Rows,
        Self::Attention,
        Self::Flash,
        Self::FlashWide,
        Self::FlashGeneral,
        Self::FlashWideGeneral,
        Self::Dropout,
        Self::Loss,
        Self::Pooling,
        Self::Recurrent,
    ];

    /// Returns the file's name without its extension.
    pub fn name(self) -> &'static str {
        match self {
            Self::GradNorm => "grad_norm",
            Self::Optimizer => "optimizer",
            Self::Copies => "copies",
            Self::Views => "views",
            Self::Rows => "rows",
            Self::Attention => "attention",
            Self::Flash => "flash",
            Self::FlashWide => "flash_wide",
            Self::FlashGeneral => "flash_general",
            Self::FlashWideGeneral => "flash_wide_general",
            Self::Dropout => "dropout",
            Self::Loss => "loss",
            Self::Pooling => "pooling",
            Self::Recurrent => "recurrent",
        }
    }

    /// Returns the code to compile: the common code, the code for packs if the file uses them, and
    /// the file.
    pub fn text(self) -> String {
        macro_rules! flash {
            () => {
                concat!(
                    include_str!("../kernels/flash_tiles.cu"),
                    include_str!("../kernels/flash.cu")
                )
            };
        }
        let text = match self {
            Self::GradNorm => include_str!("../kernels/grad_norm.cu"),
            Self::Optimizer => include_str!("../kernels/optimizer.cu"),
            Self::Copies => include_str!("../kernels/copies.cu"),
            Self::Views => include_str!("../kernels/views.cu"),
            Self::Rows => include_str!("../kernels/rows.cu"),
            Self::Attention => include_str!("../kernels/attention.cu"),
            Self::Flash => flash!(),
            Self::FlashWide => concat!("#define WIDE\n", flash!()),
            Self::FlashGeneral => concat!("#define GENERAL\n", flash!()),
            Self::FlashWideGeneral => concat!("#define WIDE\n#define GENERAL\n", flash!()),
            Self::Dropout => include_str!("../kernels/dropout.cu"),
            Self::Loss => include_str!("../kernels/loss.cu"),
            Self::Pooling => include_str!("../kernels/pooling.cu"),
            Self::Recurrent => include_str!("../kernels/recurrent.cu"),
        };
        let packs = match self {
            Self::Rows | Self::Loss => include_str!("../kernels/packs.cu"),
            _ => "",
        };
        [include_str!("../kernels/common.cu"), packs, text].concat()
    }
}

/// Options of NVRTC besides the architecture. Multiplications and additions are not fused, so
/// optimizers give the same bits as on the CPU. Optimizers wait for memory, not for arithmetic.
pub const NVRTC_OPTIONS: [&str; 2] = ["--fmad=false", "--std=c++17"];
