//! Reading `config.json` and `[model]`.
