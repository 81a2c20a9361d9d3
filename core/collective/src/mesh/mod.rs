//! Device meshes: grids of ranks with named dimensions.
//!
//! ```
//! use fulgurite_core::mesh::MeshLayout;
//!
//! let layout = MeshLayout::new([("data_parallel_shard", 3), ("tensor_parallel", 2)])?;
//! assert_eq!(layout.coordinate(5)?, [2, 1]); // row-major: the last dimension is fastest
//! assert_eq!(layout.rank(&[2, 1])?, 5);
//!
//! // Sizes left open are inferred jointly from the world size.
//! let sizes = [("data_parallel_shard", None), ("tensor_parallel", Some(2))];
//! let layout = MeshLayout::infer(8, sizes)?;
//! assert_eq!(layout.sizes(), [4, 2]);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod device_mesh;
mod layout;

pub use device_mesh::DeviceMesh;
pub use layout::MeshLayout;

/// The mesh dimension whose ranks compute different stages of the model, on the same data. A mesh
/// has it only if there are several stages.
pub const PIPELINE_PARALLEL: &str = "pipeline_parallel";
/// The mesh dimension whose ranks hold the same shards and see different data.
pub const DATA_PARALLEL_REPLICATE: &str = "data_parallel_replicate";
/// The mesh dimension over which FSDP cuts parameters; its ranks see different data.
pub const DATA_PARALLEL_SHARD: &str = "data_parallel_shard";
/// The mesh dimension that cuts the sequence.
pub const CONTEXT_PARALLEL: &str = "context_parallel";
/// The mesh dimension that cuts layers.
pub const TENSOR_PARALLEL: &str = "tensor_parallel";
/// The flattened view of replicate and shard: ranks that see different data.
pub const DATA_PARALLEL: &str = "data_parallel";
/// The flattened view of replicate, shard and context parallel: ranks whose gradients are summed.
pub const DP_CP: &str = "dp_cp";
/// The flattened view of shard and context parallel: the ranks that FSDP cuts parameters over.
pub const DP_SHARD_CP: &str = "dp_shard_cp";
/// The flattened view of pipeline, replicate, shard and context parallel, of a mesh with a
/// pipeline: ranks whose losses are summed.
pub(crate) const PP_DP_CP: &str = "pp_dp_cp";
/// The flattened view of all dimensions but the pipeline, of a mesh with one: a stage's ranks.
pub(crate) const STAGE: &str = "stage";
