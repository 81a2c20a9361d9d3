//! Recognises errors that report exhausted GPU memory.

/// Returns whether an error's text reports exhausted GPU memory. candle wraps the codes of the
/// driver, cuBLAS and cuRAND as text; NCCL reports text only.
pub(crate) fn says_out_of_memory(text: &str) -> bool {
    let codes = [
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CURAND_STATUS_ALLOCATION_FAILED",
    ];
    // NCCL's last error: `Cuda failure 'out of memory'`; some versions put the code before the
    // text.
    let of_nccl = || text.contains("Cuda failure") && text.contains("'out of memory'");
    codes.iter().any(|code| text.contains(code)) || of_nccl()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_libraries_are_known() {
        for text in [
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            "CublasError(CUBLAS_STATUS_ALLOC_FAILED)",
            "rank 0, process group `world`, all_reduce: ncclCommInitRankConfig: unhandled cuda error (run with \
             NCCL_DEBUG=INFO for details) (Cuda failure 'out of memory')",
            "a communicator: unhandled cuda error (Cuda failure 2 'out of memory')",
        ] {
            assert!(says_out_of_memory(text), "{text}");
        }
        for text in [
            "DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access was encountered\")",
            "ncclAllReduce: unhandled cuda error (Cuda failure 700 'an illegal memory access was encountered')",
            "the file says that the host is 'out of memory'",
        ] {
            assert!(!says_out_of_memory(text), "{text}");
        }
    }
}
