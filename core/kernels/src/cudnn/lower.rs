//! Converts graphs to cuDNN's descriptors.

use std::collections::HashMap;

use super::constants::{Attribute, DataType, Kind, PointwiseMode, ReduceOperator};
use super::descriptor::{Builder, Descriptor};
use super::graph::{BandMask, Graph, Operation, Place, Sdpa, Tensor, TensorId};
use super::library::{Fault, Handle, Library};

/// The alignment of tensors in memory, in bytes.
pub(super) const ALIGNMENT: i64 = 16;

/// Returns cuDNN's number of a tensor.
pub(super) fn unique_id(index: usize) -> i64 {
    index as i64 + 1
}

/// An operation graph, and the descriptors that it refers to.
pub(super) struct Lowered {
    pub(super) graph: Descriptor,
    pub(super) kept: Vec<Descriptor>,
}

/// Makes the descriptors of a graph, for the device of a handle or for a device that is given
/// later. Attributes with default values are not set, such as pointwise factors of 1 and view-only
/// reshapes.
pub(super) fn lower(
    library: &'static Library,
    graph: &Graph,
    handle: Option<Handle>,
) -> Result<Lowered, Fault> {
    let mut lowering = Lowering { library, graph, tensors: HashMap::new(), kept: Vec::new() };
    let operations = lowering.operations(graph.operations())?;
    let lowered = lowering.operation_graph(&operations, handle)?;
    let Lowering { tensors, mut kept, .. } = lowering;
    kept.extend(operations);
    kept.extend(tensors.into_values());
    Ok(Lowered { graph: lowered, kept })
}

struct Lowering<'a> {
    library: &'static Library,
    graph: &'a Graph,
    tensors: HashMap<TensorId, Descriptor>,
    /// Descriptors that operations refer to, besides tensors.
    kept: Vec<Descriptor>,
}

impl Lowering<'_> {
    fn new_descriptor(&self, kind: Kind) -> Result<Builder, Fault> {
        Builder::new(self.library, kind)
    }

    fn operations(&mut self, operations: &[Operation]) -> Result<Vec<Descriptor>, Fault> {
        operations.iter().map(|operation| self.operation(operation)).collect()
    }

    fn operation_graph(
        &self,
        operations: &[Descriptor],
        handle: Option<Handle>,
    ) -> Result<Descriptor, Fault> {
        let operations: Vec<&Descriptor> = operations.iter().collect();
        let graph = self.new_descriptor(Kind::OperationGraph)?;
        let graph = graph.link(Attribute::GraphOperations, &operations)?;
        match handle {
            Some(handle) => graph.one(Attribute::GraphHandle, handle)?.finalize(),
            None => graph.finalize(),
        }
    }

    /// Makes the missing tensor descriptors.
    fn declare(&mut self, ids: &[TensorId]) -> Result<(), Fault> {
        for &id in ids {
            if !self.tensors.contains_key(&id) {
                let tensor = self.tensor(id, &self.graph.tensors()[id.index()])?;
                self.tensors.insert(id, tensor);
            }
        }
        Ok(())
    }

    fn tensor(&self, id: TensorId, tensor: &Tensor) -> Result<Descriptor, Fault> {
        let builder = self
            .new_descriptor(Kind::Tensor)?
            .one(Attribute::TensorType, tensor.data_type)?
            .set(Attribute::TensorDimensions, &tensor.dims)?
            .set(Attribute::TensorStrides, &tensor.strides)?
            .one(Attribute::TensorId, unique_id(id.index()))?
            .one(Attribute::TensorAlignment, ALIGNMENT)?;
        let builder = match tensor.place {
            Place::Virtual => builder.one(Attribute::TensorIsVirtual, true)?,
            Place::Number(_) => builder.one(Attribute::TensorIsByValue, true)?,
            Place::Argument(_) | Place::Scratch => builder,
        };
        builder.finalize()
    }

    /// Makes an operation on these tensors; `rest` sets its other attributes.
    fn build(
        &mut self,
        kind: Kind,
        tensors: &[(Attribute, TensorId)],
        rest: impl FnOnce(Builder) -> Result<Builder, Fault>,
    ) -> Result<Descriptor, Fault> {
        let ids: Vec<TensorId> = tensors.iter().map(|&(_, id)| id).collect();
        self.declare(&ids)?;
        let mut builder = rest(self.new_descriptor(kind)?)?;
        for (attribute, id) in tensors {
            builder = builder.link(*attribute, &[&self.tensors[id]])?;
        }
        builder.finalize()
    }

    fn operation(&mut self, operation: &Operation) -> Result<Descriptor, Fault> {
        match operation {
            Operation::Pointwise { mode, x, b, y } => {
                let pointwise = self
                    .new_descriptor(Kind::Pointwise)?
                    .one(Attribute::PointwiseMode, *mode)?
                    .one(Attribute::PointwisePrecision, DataType::F32)?
                    .finalize()?;
                let mut tensors = vec![(Attribute::PointwiseOperationX, *x)];
                tensors.extend(b.map(|b| (Attribute::PointwiseOperationB, b)));
                tensors.push((Attribute::PointwiseOperationY, *y));
                let attribute = Attribute::PointwiseOperationPointwise;
                self.with(Kind::PointwiseOperation, attribute, pointwise, &tensors)
            }
            Operation::Matmul { a, b, c } => {
                let matmul = self
                    .new_descriptor(Kind::Matmul)?
                    .one(Attribute::MatmulPrecision, DataType::F32)?
                    .finalize()?;
                let tensors = [
                    (Attribute::MatmulOperationA, *a),
                    (Attribute::MatmulOperationB, *b),
                    (Attribute::MatmulOperationC, *c),
                ];
                let attribute = Attribute::MatmulOperationMatmul;
                self.with(Kind::MatmulOperation, attribute, matmul, &tensors)
            }
            Operation::Sum { x, y } => {
                let reduction = self
                    .new_descriptor(Kind::Reduction)?
                    .one(Attribute::ReductionPrecision, DataType::F32)?
                    .one(Attribute::ReductionOperator, ReduceOperator::Add)?
                    .finalize()?;
                let tensors =
                    [(Attribute::ReductionOperationX, *x), (Attribute::ReductionOperationY, *y)];
                let attribute = Attribute::ReductionOperationReduction;
                self.with(Kind::ReductionOperation, attribute, reduction, &tensors)
            }
            Operation::Transpose { x, y } => {
                let tensors =
                    [(Attribute::ReshapeOperationX, *x), (Attribute::ReshapeOperationY, *y)];
                self.build(Kind::ReshapeOperation, &tensors, Ok)
            }
            Operation::BandMask(mask) => self.band_mask(mask),
            Operation::Sdpa(sdpa) => self.sdpa(sdpa),
        }
    }

    /// Makes an operation that refers to a descriptor of its own.
    fn with(
        &mut self,
        kind: Kind,
        attribute: Attribute,
        own: Descriptor,
        tensors: &[(Attribute, TensorId)],
    ) -> Result<Descriptor, Fault> {
        let operation = self.build(kind, tensors, |builder| builder.link(attribute, &[&own]))?;
        self.kept.push(own);
        Ok(operation)
    }

    fn band_mask(&mut self, mask: &BandMask) -> Result<Descriptor, Fault> {
        let mut tensors =
            vec![(Attribute::BandMaskX, mask.x), (Attribute::BandMaskFill, mask.fill)];
        if let Some([queries, keys]) = mask.sizes {
            tensors.push((Attribute::BandMaskQueries, queries));
            tensors.push((Attribute::BandMaskKeys, keys));
        }
        tensors.extend(mask.left.map(|left| (Attribute::BandMaskLeftBound, left)));
        tensors.push((Attribute::BandMaskY, mask.y));
        let comparison = match mask.left {
            Some(_) => PointwiseMode::Greater,
            None => PointwiseMode::GreaterEqual,
        };
        self.build(Kind::DiagonalBandMaskOperation, &tensors, |builder| {
            builder.one(Attribute::BandMaskComparison, comparison)
        })
    }

    fn sdpa(&mut self, sdpa: &Sdpa) -> Result<Descriptor, Fault> {
        let [scores, probabilities] = sdpa.softmax;
        let softmax = [
            (Attribute::SoftmaxX, scores),
            (Attribute::SoftmaxY, probabilities),
            (Attribute::SoftmaxStats, sdpa.lse),
        ];
        let softmax = self.build(Kind::SoftmaxOperation, &softmax, Ok)?;
        let subgraph = match &sdpa.mask {
            None => None,
            Some((input, output, operations)) => {
                let operations = self.operations(operations)?;
                let subgraph = self.operation_graph(&operations, None)?;
                self.kept.extend(operations);
                Some((subgraph, [*input, *output].map(|id| unique_id(id.index()))))
            }
        };
        let tensors = [
            (Attribute::SdpaQ, sdpa.q),
            (Attribute::SdpaK, sdpa.k),
            (Attribute::SdpaV, sdpa.v),
            (Attribute::SdpaO, sdpa.output),
            (Attribute::SdpaScale, sdpa.scale),
        ];
        let operation = self.build(Kind::SdpaForwardOperation, &tensors, |builder| {
            let builder = builder.link(Attribute::SdpaSoftmax, &[&softmax])?;
            let Some((subgraph, [input, output])) = &subgraph else { return Ok(builder) };
            builder
                .link(Attribute::SdpaSubgraph, &[subgraph])?
                .one(Attribute::SdpaSubgraphInput, *input)?
                .one(Attribute::SdpaSubgraphOutput, *output)
        })?;
        self.kept.push(softmax);
        self.kept.extend(subgraph.map(|(subgraph, _)| subgraph));
        Ok(operation)
    }
}
