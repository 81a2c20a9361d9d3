//! Strategies: how a model is spread over ranks.
