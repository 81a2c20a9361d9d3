//! [`ApiError`].

use std::fmt::Display;

use serde_json::{Value, json};

/// An error in the form of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    /// The HTTP status.
    pub(super) status: u16,
    message: String,
    /// The field of the request that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// A request that cannot be answered, because of its field `param`.
    pub(super) fn field(param: &str, message: impl Display) -> Self {
        let param = Some(param.to_owned());
        Self { status: 400, message: message.to_string(), param, code: None }
    }

    /// A request that cannot be answered.
    pub(super) fn request(status: u16, code: &'static str, message: impl Display) -> Self {
        Self { status, message: message.to_string(), param: None, code: Some(code) }
    }

    /// A mistake of the server.
    pub(super) fn internal(message: impl Display) -> Self {
        Self::request(500, "internal_error", message)
    }

    /// The answer while the server ends.
    pub(super) fn ending() -> Self {
        Self::request(503, "server_ending", "the server ends; send the request to another one")
    }

    /// The same error of the field `param`.
    pub(super) fn of_field(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// The body of the answer.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let Self { message, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}
