//! The arithmetic of meshes: names, sizes, coordinates. No communication.

use std::collections::HashMap;

use crate::{Error, Result};

/// A grid of ranks, row-major: the last dimension varies fastest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshLayout {
    names: Vec<String>,
    sizes: Vec<usize>,
}

impl MeshLayout {
    /// A layout from dimension names and sizes.
    ///
    /// # Errors
    /// If a name repeats, a size is zero, or the number of ranks overflows.
    pub fn new<N: Into<String>>(dims: impl IntoIterator<Item = (N, usize)>) -> Result<Self> {
        let (names, sizes): (Vec<String>, Vec<usize>) =
            dims.into_iter().map(|(name, size)| (name.into(), size)).unzip();
        for (i, (name, &size)) in names.iter().zip(&sizes).enumerate() {
            if size == 0 {
                return Err(Error::Mesh(format!("dimension `{name}` has size 0; use at least 1")));
            }
            if names[..i].contains(name) {
                return Err(Error::Mesh(format!("dimension `{name}` is given twice")));
            }
        }
        if sizes.iter().try_fold(1_usize, |ranks, &size| ranks.checked_mul(size)).is_none() {
            return Err(Error::Mesh(format!(
                "the sizes {sizes:?} multiplied are more ranks than can be counted"
            )));
        }
        Ok(Self { names, sizes })
    }

    /// A layout that infers sizes of `None` from the world size. The first takes all ranks left by
    /// the given sizes, the others are 1.
    ///
    /// # Errors
    /// If the given sizes do not divide, or do not multiply to, the world size.
    pub fn infer<N: Into<String>>(
        world_size: usize,
        dims: impl IntoIterator<Item = (N, Option<usize>)>,
    ) -> Result<Self> {
        let dims: Vec<(String, Option<usize>)> =
            dims.into_iter().map(|(name, size)| (name.into(), size)).collect();
        let given = dims
            .iter()
            .filter_map(|(_, size)| *size)
            .try_fold(1_usize, |product, size| product.checked_mul(size));
        let open = dims.iter().position(|(_, size)| size.is_none());
        let fitting = given.filter(|&given| {
            given > 0
                && if open.is_some() {
                    world_size.is_multiple_of(given)
                } else {
                    given == world_size
                }
        });
        let Some(fitting) = fitting else {
            let sizes = dims
                .iter()
                .map(|(name, size)| match size {
                    Some(size) => format!("`{name}_size={size}`"),
                    None => format!("`{name}_size=auto`"),
                })
                .collect::<Vec<_>>()
                .join(", ");
            let verb = if open.is_some() { "divide" } else { "equal" };
            let given = given.map_or("more than can be counted".to_owned(), |n| n.to_string());
            return Err(Error::Mesh(format!(
                "the sizes {sizes} multiplied ({given}) should {verb} the world size \
                 ({world_size}); change them, or `trainer.devices` × `trainer.num_nodes`"
            )));
        };
        Self::new(dims.into_iter().enumerate().map(|(i, (name, size))| {
            let inferred = if Some(i) == open { world_size / fitting } else { 1 };
            (name, size.unwrap_or(inferred))
        }))
    }

    /// This layout, repeated along a dimension of `size` that varies slowest.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn repeated(&self, name: &str, size: usize) -> Result<Self> {
        let own = self.names.iter().map(String::as_str).zip(self.sizes.iter().copied());
        Self::new([(name, size)].into_iter().chain(own))
    }

    /// The dimensions' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The dimensions' sizes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The index of a dimension.
    ///
    /// # Errors
    /// If the name is unknown. The message lists the known names.
    pub(super) fn dim(&self, name: &str) -> Result<usize> {
        self.names.iter().position(|n| n == name).ok_or_else(|| {
            Error::Mesh(format!("no dimension `{name}`; there are {}", self.names.join(", ")))
        })
    }

    /// A rank's coordinate.
    ///
    /// # Errors
    /// If the rank is not in the mesh.
    pub fn coordinate(&self, rank: usize) -> Result<Vec<usize>> {
        if rank >= self.world_size() {
            let size = self.world_size();
            return Err(Error::Mesh(format!("rank {rank} is outside a mesh of {size} ranks")));
        }
        let mut rest = rank;
        let mut coordinate: Vec<usize> = self
            .sizes
            .iter()
            .rev()
            .map(|size| {
                let index = rest % size;
                rest /= size;
                index
            })
            .collect();
        coordinate.reverse();
        Ok(coordinate)
    }

    /// The rank at a coordinate.
    ///
    /// # Errors
    /// If the coordinate has the wrong length or lies outside.
    pub fn rank(&self, coordinate: &[usize]) -> Result<usize> {
        let inside = coordinate.len() == self.sizes.len()
            && coordinate.iter().zip(&self.sizes).all(|(index, size)| index < size);
        if !inside {
            let sizes = &self.sizes;
            return Err(Error::Mesh(format!("{coordinate:?} is outside a mesh of {sizes:?}")));
        }
        Ok(coordinate.iter().zip(&self.sizes).fold(0, |rank, (index, size)| rank * size + index))
    }

    /// The sets of ranks along `dims` (flattened in mesh order): two ranks are in one set if they
    /// differ only in these dimensions.
    ///
    /// # Errors
    /// If a dimension does not exist.
    pub fn partition(&self, dims: &[&str]) -> Result<Vec<Vec<usize>>> {
        let along: Vec<usize> = dims.iter().map(|name| self.dim(name)).collect::<Result<_>>()?;
        let mut sets: Vec<Vec<usize>> = Vec::new();
        let mut place_of: HashMap<Vec<usize>, usize> = HashMap::new();
        for rank in 0..self.world_size() {
            let mut rest = self.coordinate(rank)?;
            along.iter().for_each(|&d| rest[d] = 0);
            let place = *place_of.entry(rest).or_insert(sets.len());
            if place == sets.len() {
                sets.push(Vec::new());
            }
            sets[place].push(rank);
        }
        Ok(sets)
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn ranks_and_coordinates_are_inverse() {
        let layout = MeshLayout::new([("a", 2), ("b", 3), ("c", 2)]).unwrap();
        for rank in 0..12 {
            assert_eq!(layout.rank(&layout.coordinate(rank).unwrap()).unwrap(), rank);
        }
        assert_eq!(layout.coordinate(7).unwrap(), [1, 0, 1]);
    }

    // checklist: torchtune: DeviceMesh, ParallelDims
    #[test]
    fn partitions_are_the_process_groups() {
        let layout = MeshLayout::new([("a", 2), ("b", 2), ("c", 2)]).unwrap();
        assert_eq!(layout.partition(&["c"]).unwrap(), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(layout.partition(&["a"]).unwrap(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(layout.partition(&["a", "b"]).unwrap(), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    }

    // checklist: torchtune: DeviceMesh, ParallelDims
    // checklist: NeMo: sizes inferred as the whole world
    #[test]
    fn open_sizes_are_inferred_jointly() {
        let infer = |world, dims: [(&str, Option<usize>); 3]| MeshLayout::infer(world, dims);
        let sizes = |dims| infer(8, dims).unwrap().sizes;
        assert_eq!(sizes([("dp", None), ("cp", None), ("tp", None)]), [8, 1, 1]);
        assert_eq!(sizes([("dp", None), ("cp", Some(2)), ("tp", Some(2))]), [2, 2, 2]);
        assert_eq!(sizes([("dp", Some(2)), ("cp", Some(1)), ("tp", None)]), [2, 1, 4]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let message =
            |dims: [(&str, Option<usize>); 2]| MeshLayout::infer(6, dims).unwrap_err().to_string();
        assert_says!(
            message([("data_parallel", Some(2)), ("tensor_parallel", Some(2))]),
            "device mesh … `data_parallel_size=2`, `tensor_parallel_size=2` … equal … (6) …"
        );
        assert_says!(
            message([("data_parallel", None), ("tensor_parallel", Some(4))]),
            "device mesh … `data_parallel_size=auto`, `tensor_parallel_size=4` … divide … 6 …"
        );
        assert_says!(
            message([("data_parallel", None), ("tensor_parallel", Some(0))]),
            "device mesh … `data_parallel_size=auto`, `tensor_parallel_size=0` … divide … 6 …"
        );
        assert_says!(
            message([("data_parallel", Some(1 << 62)), ("tensor_parallel", Some(1 << 62))]),
            "device mesh … `data_parallel_size=4611686018427387904` … can be counted … (6) …"
        );
        assert_says!(
            MeshLayout::new([("a", 1 << 62), ("b", 1 << 62)]).unwrap_err(),
            "device mesh … [4611686018427387904, 4611686018427387904] … more ranks than …"
        );
        let layout = MeshLayout::new([("dp", 2)]).unwrap();
        assert_says!(layout.dim("pp").unwrap_err(), "device mesh: no dimension `pp`; there are dp");
    }
}
