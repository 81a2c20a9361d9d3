//! Splits a collective between NCCL and the host's group.

use candle_core::{Device, Tensor};
use fulgurite_engine::collective::{Collective, ProcessGroup};
use fulgurite_error::Result;

use crate::streams::Streams;

/// The parts of a collective; at least one is set. All ranks agree on them if each tensor is on the
/// same kind of device on all ranks.
pub(crate) struct Routes {
    pub(crate) on_host: Option<Collective>,
    pub(crate) on_device: Option<(Collective, Device)>,
}

impl Routes {
    /// Routes device tensors over NCCL. One call may mix tensors of both kinds, but a tensor's
    /// input and output must match.
    pub(crate) fn of(
        group: &dyn ProcessGroup,
        collective: Collective,
        streams: &dyn Streams,
    ) -> Result<Self> {
        let op = collective.name();
        let mut device = None;
        let mut reached = |tensors: &[&Tensor]| {
            let on_device = tensors.iter().filter(|tensor| streams.reaches(tensor)).count();
            if on_device > 0 && on_device < tensors.len() {
                let message = "its input is on the device and its output on the host, or the other way round; both must \
                               be on one";
                return Err(group.error(op, message));
            }
            if on_device > 0 {
                device.get_or_insert_with(|| tensors[0].device().clone());
            }
            Ok(on_device > 0)
        };
        let (on_host, on_device) = match collective {
            Collective::AllGatherInto(parts) => {
                let (mut host, mut device) = (Vec::new(), Vec::new());
                for part in parts {
                    let all = [&part.output, &part.input];
                    if reached(&all)? { &mut device } else { &mut host }.push(part);
                }
                let some =
                    |parts: Vec<_>| (!parts.is_empty()).then_some(Collective::AllGatherInto(parts));
                (some(host), some(device))
            }
            Collective::ReduceScatter { parts, op } => {
                let (mut host, mut device) = (Vec::new(), Vec::new());
                for part in parts {
                    let all = [&part.input, &part.output];
                    if reached(&all)? { &mut device } else { &mut host }.push(part);
                }
                let some = |parts: Vec<_>| {
                    (!parts.is_empty()).then_some(Collective::ReduceScatter { parts, op })
                };
                (some(host), some(device))
            }
            other => {
                let tensors: Vec<&Tensor> = match &other {
                    Collective::AllReduce { tensor, .. } | Collective::Broadcast { tensor, .. } => {
                        vec![tensor]
                    }
                    Collective::AllToAll(exchange) => vec![&exchange.output, &exchange.input],
                    _ => vec![],
                };
                match reached(&tensors)? {
                    true => (None, Some(other)),
                    false => (Some(other), None),
                }
            }
        };
        Ok(Self { on_host, on_device: on_device.zip(device) })
    }
}
