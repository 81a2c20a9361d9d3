//! The actions of a pipeline's ranks, and their text form.

use std::fmt;
use std::str::FromStr;

use fulgurite_error::{Error, Result};

/// The kinds of actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Computes the stage's output. `F`
    Forward,
    /// Computes the gradient of the stage's input, and leaves the weights' for later. `I`
    BackwardInput,
    /// Computes the gradients of the weights that were left. `W`
    BackwardWeight,
    /// Computes all gradients: `I` and `W` in one. `B`
    Backward,
    /// Gathers the stage's parameters, which FSDP has sharded. `UNSHARD`
    Unshard,
    /// Frees what was gathered. `RESHARD`
    Reshard,
    /// Reduces the stage's gradients over the replicas and shards. `REDUCE_GRAD`
    ReduceGradients,
    /// Sends the stage's output to the next stage. `SEND_F`
    SendForward,
    /// Receives the stage's input from the stage before. `RECV_F`
    ReceiveForward,
    /// Sends the gradient of the stage's input to the stage before. `SEND_B`
    SendBackward,
    /// Receives the gradient of the stage's output from the next stage. `RECV_B`
    ReceiveBackward,
}

impl Kind {
    const NAMES: [(Self, &'static str); 11] = [
        (Self::Forward, "F"),
        (Self::BackwardInput, "I"),
        (Self::BackwardWeight, "W"),
        (Self::Backward, "B"),
        (Self::Unshard, "UNSHARD"),
        (Self::Reshard, "RESHARD"),
        (Self::ReduceGradients, "REDUCE_GRAD"),
        (Self::SendForward, "SEND_F"),
        (Self::ReceiveForward, "RECV_F"),
        (Self::SendBackward, "SEND_B"),
        (Self::ReceiveBackward, "RECV_B"),
    ];

    /// The kind's name in text: `F`, `SEND_B`.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// Whether the action computes: `F`, `I`, `W` or `B`.
    pub fn computes(self) -> bool {
        matches!(self, Self::Forward | Self::BackwardInput | Self::BackwardWeight | Self::Backward)
    }

    /// Whether the action is one for all micro-batches of a step.
    fn is_of_stage(self) -> bool {
        matches!(self, Self::Unshard | Self::Reshard | Self::ReduceGradients)
    }
}

/// One entry of a rank's list, as `_Action` of PyTorch's pipelines.
///
/// In text: the stage, the kind, the micro-batch. Actions of a whole stage have no micro-batch.
///
/// ```
/// use fulgurite_strategies::schedule::pipeline::{Action, Kind};
///
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action, Action { stage: 2, kind: Kind::Forward, micro_batch: 0 });
/// assert_eq!(Action { kind: Kind::Unshard, ..action }.to_string(), "2UNSHARD");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The stage, from 0.
    pub stage: usize,
    /// The computation or communication.
    pub kind: Kind,
    /// The micro-batch, from 0. 0 for actions of a whole stage.
    pub micro_batch: usize,
}

impl Action {
    pub(super) const fn new(stage: usize, kind: Kind, micro_batch: usize) -> Self {
        Self { stage, kind, micro_batch }
    }

    /// The same stage and micro-batch with another kind.
    pub(super) const fn with(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.kind.name())?;
        if self.kind.is_of_stage() { Ok(()) } else { write!(f, "{}", self.micro_batch) }
    }
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Config(format!(
                "`{text}` is no action of a pipeline; expected stage, kind and micro-batch, as in `2F0`, with a kind of \
                 F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, or `2UNSHARD`, `2RESHARD`, `2REDUCE_GRAD`"
            ))
        };
        let is_digit = |c: char| c.is_ascii_digit();
        let kind_start = text.find(|c| !is_digit(c)).ok_or_else(wrong)?;
        let kind_end = text.rfind(|c| !is_digit(c)).ok_or_else(wrong)? + 1;
        let name = &text.get(kind_start..kind_end).ok_or_else(wrong)?;
        let (kind, _) =
            Kind::NAMES.into_iter().find(|(_, known)| known == name).ok_or_else(wrong)?;
        // Of 32 bits, so that no sum of such numbers overflows.
        let number = |digits: &str| digits.parse::<u32>().map(|n| n as usize).map_err(|_| wrong());
        let (stage, rest) = (number(&text[..kind_start])?, &text[kind_end..]);
        let micro_batch = match kind.is_of_stage() {
            true if rest.is_empty() => 0,
            true => return Err(wrong()),
            false => number(rest)?,
        };
        Ok(Self { stage, kind, micro_batch })
    }
}
