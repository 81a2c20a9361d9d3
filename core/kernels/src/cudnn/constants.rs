//! Constants of cuDNN's backend API, from `cudnn_graph.h` of cuDNN 9.

use std::ffi::c_int;

/// `cudnnBackendDescriptorType_t`: the kind of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    DeviceProperties = 38,
    SdpaForwardOperation = 41,
    DiagonalBandMaskOperation = 44,
    SoftmaxOperation = 45,
}

/// `cudnnBackendAttributeName_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    HeuristicsDevice = 204,
    PlanHandle = 400,
    PlanEngineConfig = 401,
    PlanWorkspaceBytes = 402,
    PlanJson = 405,
    PlanDevice = 407,
    PointwiseOperationPointwise = 750,
    PointwiseOperationX = 751,
    PointwiseOperationB = 752,
    PointwiseOperationY = 753,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    MatmulPrecision = 1500,
    MatmulOperationA = 1520,
    MatmulOperationB = 1521,
    MatmulOperationC = 1522,
    MatmulOperationMatmul = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    ReductionOperationX = 1610,
    ReductionOperationY = 1611,
    ReductionOperationReduction = 1612,
    ReshapeOperationX = 2200,
    ReshapeOperationY = 2201,
    DeviceJson = 2702,
    SdpaQ = 2800,
    SdpaK = 2801,
    SdpaV = 2802,
    SdpaO = 2803,
    SdpaScale = 2805,
    SdpaSubgraph = 2811,
    SdpaSubgraphInput = 2812,
    SdpaSubgraphOutput = 2813,
    SdpaSoftmax = 2814,
    BandMaskX = 3000,
    BandMaskKeys = 3001,
    BandMaskQueries = 3002,
    BandMaskLeftBound = 3003,
    BandMaskFill = 3005,
    BandMaskY = 3006,
    BandMaskComparison = 3007,
    SoftmaxX = 3100,
    SoftmaxY = 3101,
    SoftmaxStats = 3102,
}

/// `cudnnDataType_t`: the type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum DataType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 2,
    /// A signed 32-bit integer.
    I32 = 4,
    /// The upper half of [`F32`](Self::F32).
    Bf16 = 9,
}

impl DataType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// `cudnnPointwiseMode_t`: an operation on each element, or a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum PointwiseMode {
    /// `x * b`
    Mul = 1,
    /// `x - b`
    Sub = 9,
    /// `exp(x)`
    Exp = 13,
    /// `x`, in the type of the output.
    Identity = 21,
    /// `x > b`
    Greater = 302,
    /// `x >= b`
    GreaterEqual = 303,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum ReduceOperator {
    Add = 0,
}

/// `cudnnBackendHeurMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum HeuristicsMode {
    A = 3,
}

/// `CUDNN_STATUS_SUCCESS`.
pub(super) const SUCCESS: c_int = 0;
