//! Text as training data.

mod text_data;
