//! Client for the calls of MLflow's REST interface that the logger needs.

use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fulgurite_error::Result;
use serde_json::{Value, json};
use ureq::Agent;

use crate::remote::{AddressKey, Answer, Failure, agent};

const ADDRESS: AddressKey = AddressKey {
    of: "mlflow's",
    key: "tracking_uri",
    example: "http://127.0.0.1:5000",
    credentials: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
};

/// A connection to a server.
pub(super) struct Client {
    agent: Agent,
    base: String,
    /// The header `Authorization`; never part of a message.
    authorization: Option<String>,
}

/// Credentials for the server, from the same environment variables as MLflow's own client. Without
/// `Debug`, so that no message contains them.
#[derive(Default)]
pub(super) struct Credentials {
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) token: Option<String>,
}

impl Credentials {
    /// Reads the variables `MLFLOW_TRACKING_USERNAME`, `_PASSWORD` and `_TOKEN`.
    pub(super) fn from_environment() -> Self {
        let variable = |name: &str| {
            let value = std::env::var(format!("MLFLOW_TRACKING_{name}")).ok();
            value.filter(|value| !value.is_empty())
        };
        Self {
            username: variable("USERNAME"),
            password: variable("PASSWORD"),
            token: variable("TOKEN"),
        }
    }

    /// The header; user and password take precedence over a token.
    fn header(&self) -> Option<String> {
        match (&self.username, &self.password, &self.token) {
            (Some(username), Some(password), _) => {
                Some(format!("Basic {}", BASE64.encode(format!("{username}:{password}"))))
            }
            (_, _, Some(token)) => Some(format!("Bearer {token}")),
            _ => None,
        }
    }
}

impl Client {
    /// Creates a client for the server at this address. Sends nothing yet.
    pub(super) fn new(uri: &str, credentials: &Credentials, timeout: Duration) -> Result<Self> {
        let agent = agent(uri, ADDRESS, timeout)?;
        Ok(Self {
            agent,
            base: uri.trim_end_matches('/').to_owned(),
            authorization: credentials.header(),
        })
    }

    /// Makes a call: a GET with a query, or a POST with a body. Any answer other than status 200
    /// with a JSON object is a failure, such as a proxy's login page.
    fn call(
        &self,
        path: &str,
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Value, Failure> {
        let url = format!("{}/api/2.0/mlflow/{path}", self.base);
        let failed = |error: &dyn fmt::Display| Failure {
            message: format!("MLflow at {}: {error}", self.base),
            code: None,
            transient: true,
            taken: 0,
        };
        let sent = match body {
            None => {
                let mut request = self.agent.get(&url).query_pairs(query.iter().copied());
                if let Some(authorization) = &self.authorization {
                    request = request.header("Authorization", authorization);
                }
                request.call()
            }
            Some(body) => {
                let mut request = self.agent.post(&url).content_type("application/json");
                if let Some(authorization) = &self.authorization {
                    request = request.header("Authorization", authorization);
                }
                request.send(body.to_string())
            }
        };
        let answer = Answer::of(sent, failed)?;
        let (status, text) = (answer.status, &answer.text);
        let value: Value = serde_json::from_str(text).unwrap_or_default();
        if status == 200 && value.is_object() {
            return Ok(value);
        }
        let code = value["error_code"].as_str().map(str::to_owned);
        let said = answer.said(value["message"].as_str(), ADDRESS.key);
        let said = match status {
            200 => format!("this is not an answer of MLflow's interface: {said}"),
            _ => said,
        };
        Err(Failure {
            message: format!("MLflow at {}: {path}: status {status}: {said}", self.base),
            code,
            transient: answer.is_transient(),
            taken: 0,
        })
    }

    /// Returns the id of the experiment with this name; creates the experiment if it does not
    /// exist.
    pub(super) fn experiment(&self, name: &str) -> Result<String, Failure> {
        let get = || self.call("experiments/get-by-name", &[("experiment_name", name)], None);
        let is = |failure: &Failure, code: &str| failure.code.as_deref() == Some(code);
        let found = match get() {
            Err(failure) if is(&failure, "RESOURCE_DOES_NOT_EXIST") => {
                match self.call("experiments/create", &[], Some(&json!({ "name": name }))) {
                    Ok(made) => return text(&made, "experiment_id"),
                    // Another run created it first.
                    Err(failure) if is(&failure, "RESOURCE_ALREADY_EXISTS") => get()?,
                    Err(failure) => return Err(failure),
                }
            }
            found => found?,
        };
        text(&found["experiment"], "experiment_id")
    }

    /// Creates a run and returns its id.
    pub(super) fn create_run(
        &self,
        experiment: &str,
        name: &str,
        start_time: u64,
    ) -> Result<String, Failure> {
        let body = json!({
            "experiment_id": experiment, "run_name": name, "start_time": start_time,
            "tags": [{ "key": "mlflow.source.type", "value": "LOCAL" }],
        });
        let made = self.call("runs/create", &[], Some(&body))?;
        text(&made["run"]["info"], "run_id")
    }

    /// Marks a run as running again.
    pub(super) fn resume_run(&self, run: &str) -> Result<(), Failure> {
        let body = json!({ "run_id": run, "status": "RUNNING" });
        self.call("runs/update", &[], Some(&body)).map(drop)
    }

    /// Logs metrics, parameters and tags of a run.
    pub(super) fn log_batch(&self, batch: &Value) -> Result<(), Failure> {
        self.call("runs/log-batch", &[], Some(batch)).map(drop)
    }

    /// Ends a run.
    pub(super) fn end_run(&self, run: &str, status: &str, end_time: u64) -> Result<(), Failure> {
        let body = json!({ "run_id": run, "status": status, "end_time": end_time });
        self.call("runs/update", &[], Some(&body)).map(drop)
    }
}

/// Reads a string from an answer.
fn text(answer: &Value, key: &str) -> Result<String, Failure> {
    answer[key].as_str().map(str::to_owned).ok_or_else(|| Failure {
        message: format!(
            "MLflow: an answer without `{key}`: is this the address of an MLflow server?"
        ),
        code: None,
        transient: false,
        taken: 0,
    })
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn credentials_match_mlflows_header() {
        let header = |username: &str, password: &str, token: &str| {
            let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            let [username, password, token] = [username, password, token].map(some);
            Credentials { username, password, token }.header()
        };
        let basic = Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(header("Aladdin", "open sesame", "").as_deref(), basic);
        assert_eq!(header("Aladdin", "open sesame", "abc").as_deref(), basic);
        assert_eq!(header("Aladdin", "", "abc").as_deref(), Some("Bearer abc"));
        assert_eq!(header("Aladdin", "", ""), None);
    }

    #[test]
    fn password_in_the_address_is_refused() {
        let uri = "http://Aladdin:sesame@127.0.0.1:5000";
        let client = Client::new(uri, &Credentials::default(), Duration::from_secs(1));
        let error = client.err().unwrap().to_string();
        assert_says!(error, "`trainer.loggers`: … `tracking_uri` has … MLFLOW_TRACKING_PASSWORD");
    }
}
