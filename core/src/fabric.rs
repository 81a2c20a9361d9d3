//! Fabric: strategy, launcher and checkpoints without the loop.
