//! Device meshes.
