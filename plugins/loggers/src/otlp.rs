//! The logger `otlp`: metrics for an OpenTelemetry collector, over HTTP in JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Logger, LoggerConfig, RunStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use ureq::Agent;

use crate::remote::{
    AddressKey, Answer, Failure, OnError, Patience, Queue, Receiving, agent, number,
};

/// `trainer.loggers = [{ type = "otlp", endpoint = "http://127.0.0.1:4318" }]`: metrics for an
/// OpenTelemetry collector, such as one of Grafana, Datadog or Honeycomb. Each metric is a gauge
/// called `fulgurite.train_loss`, with the attribute `step`. The resource has `service.name` and
/// `service.instance.id`, the run's name. `fulgurite.run.status` is logged at the end: 0 for a
/// success, 1 for an interruption, 2 for a failure.
///
/// Headers such as a token come from the variable `OTEL_EXPORTER_OTLP_METRICS_HEADERS` or
/// `OTEL_EXPORTER_OTLP_HEADERS`, as `name=value,name=value`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct OtlpConfig {
    /// The collector; metrics are sent to `/v1/metrics` there. By default the variable
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`, else `http://127.0.0.1:4318`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The name of the service; by default the variable `OTEL_SERVICE_NAME`, else `fulgurite`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Further attributes of the resource.
    pub attributes: BTreeMap<String, String>,
    /// The reaction to a collector that cannot be reached, also at the start of the run.
    pub on_error: OnError,
}

#[typetag::serde(name = "otlp")]
impl LoggerConfig for OtlpConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        let run = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
        Ok(Box::new(OtlpLogger::start(
            self,
            &run,
            &Variables::from_environment(),
            Patience::default(),
        )?))
    }

    fn check(&self) -> Result<()> {
        let variables = Variables::from_environment();
        headers(&variables.headers)?;
        agent(&self.server(&variables), ADDRESS, Patience::default().request).map(drop)
    }
}

fulgurite_config::register_logger!(
    "otlp",
    OtlpConfig,
    "metrics for an OpenTelemetry collector, over HTTP",
    "{ type = \"otlp\", endpoint = \"http://127.0.0.1:4318\", service_name = \"pretrain\" }"
);

const ADDRESS: AddressKey = AddressKey {
    of: "otlp's",
    key: "endpoint",
    example: "http://127.0.0.1:4318",
    credentials: "set OTEL_EXPORTER_OTLP_HEADERS to `authorization=…`",
};

/// The variables of OpenTelemetry's own exporters.
#[derive(Default)]
struct Variables {
    endpoint: Option<String>,
    service_name: Option<String>,
    headers: String,
}

impl Variables {
    fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let headers = variable("OTEL_EXPORTER_OTLP_METRICS_HEADERS");
        Self {
            endpoint: variable("OTEL_EXPORTER_OTLP_ENDPOINT"),
            service_name: variable("OTEL_SERVICE_NAME"),
            headers: headers.or_else(|| variable("OTEL_EXPORTER_OTLP_HEADERS")).unwrap_or_default(),
        }
    }
}

/// Reads `name=value,name=value`, where values may have percent signs for other characters.
fn headers(text: &str) -> Result<Vec<(String, String)>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let read = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let (name, value) = (name.trim(), decoded(value.trim())?);
        let is_token = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_plain = value.chars().all(|c| (' '..='~').contains(&c));
        let fits = !name.is_empty() && name.chars().all(is_token) && is_plain;
        fits.then(|| (name.to_owned(), value))
    };
    let wrong = || {
        // The value may be a secret.
        Error::Config(
            "OTEL_EXPORTER_OTLP_HEADERS: expected `name=value` or several with commas between them"
                .to_owned(),
        )
    };
    pairs.map(|pair| read(pair).ok_or_else(wrong)).collect()
}

/// Decodes `%20` and the like; `None` if this is no such text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

impl OtlpConfig {
    fn server(&self, variables: &Variables) -> String {
        let given = self.endpoint.clone().or_else(|| variables.endpoint.clone());
        given.unwrap_or_else(|| "http://127.0.0.1:4318".to_owned())
    }
}

/// A value of a metric at a step.
struct Point {
    name: String,
    value: f64,
    step: Option<u64>,
    /// Nanoseconds since 1970.
    time: u128,
}

impl Point {
    fn now(name: &str, value: f64, step: Option<u64>) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        Self { name: format!("fulgurite.{name}"), value, step, time }
    }

    /// As a `Metric` of OTLP.
    fn to_json(&self) -> Value {
        let step = self.step.map(|step| {
            // Integers of 64 bits are strings in the JSON of Protocol Buffers.
            json!({ "key": "step", "value": { "intValue": step.to_string() } })
        });
        json!({
            "name": self.name,
            "gauge": { "dataPoints": [{
                "timeUnixNano": self.time.to_string(),
                "asDouble": number(self.value),
                "attributes": step.into_iter().collect::<Vec<_>>(),
            }] },
        })
    }
}

/// A collector.
struct Collector {
    agent: Agent,
    url: String,
    /// Never part of a message.
    headers: Vec<(String, String)>,
    /// The resource, as in OTLP.
    resource: Value,
}

impl Receiving for Collector {
    type Item = Point;

    const NAME: &'static str = "OTLP";
    const MAX_ITEMS: usize = 1000;

    fn send(&self, items: &[Point]) -> Result<(), Failure> {
        let metrics: Vec<Value> = items.iter().map(Point::to_json).collect();
        let body = json!({ "resourceMetrics": [{
            "resource": self.resource,
            "scopeMetrics": [{ "scope": { "name": "fulgurite" }, "metrics": metrics }],
        }] });
        let mut request = self.agent.post(&self.url).content_type("application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let failed =
            |message: String, transient| Failure { message, code: None, transient, taken: 0 };
        let unreached = |error: &dyn std::fmt::Display| {
            failed(format!("the collector at {}: {error}", self.url), true)
        };
        let answer = Answer::of(request.send(body.to_string()), unreached)?;
        let said: Value = serde_json::from_str(&answer.text).unwrap_or_default();
        if !(200..300).contains(&answer.status) {
            let said = answer.said(said["message"].as_str(), ADDRESS.key);
            let message =
                format!("the collector at {}: status {}: {said}", self.url, answer.status);
            return Err(failed(message, answer.is_transient()));
        }
        // A number, or a text as in the JSON of Protocol Buffers.
        let rejected = &said["partialSuccess"]["rejectedDataPoints"];
        let rejected = rejected.as_u64().or_else(|| rejected.as_str()?.parse().ok());
        match rejected {
            Some(rejected @ 1..) => {
                let why = said["partialSuccess"]["errorMessage"].as_str().unwrap_or_default();
                let said = answer.said(Some(why), ADDRESS.key);
                let url = &self.url;
                let taken = items.len().saturating_sub(rejected as usize);
                let message = format!("the collector at {url} left out {rejected} values: {said}");
                Err(Failure { taken, ..failed(message, false) })
            }
            _ => Ok(()),
        }
    }

    fn end(&self, status: RunStatus, _: u64) -> Result<(), Failure> {
        let value = match status {
            RunStatus::Success => 0.0,
            RunStatus::Interrupted => 1.0,
            RunStatus::Failed => 2.0,
        };
        self.send(&[Point::now("run.status", value, None)])
    }
}

struct OtlpLogger {
    queue: Queue<Collector>,
}

impl OtlpLogger {
    fn start(
        config: &OtlpConfig,
        run: &str,
        variables: &Variables,
        patience: Patience,
    ) -> Result<Self> {
        let server = config.server(variables);
        let service = config.service_name.clone().or_else(|| variables.service_name.clone());
        let own = [
            ("service.name", service.unwrap_or_else(|| "fulgurite".to_owned())),
            ("service.instance.id", run.to_owned()),
        ];
        let attribute =
            |(key, value): (&str, &str)| json!({ "key": key, "value": { "stringValue": value } });
        let own = own.iter().map(|(key, value)| (*key, &**value));
        let given = config.attributes.iter().map(|(key, value)| (&**key, &**value));
        let attributes: Vec<Value> = own.chain(given).map(attribute).collect();
        let collector = Collector {
            agent: agent(&server, ADDRESS, patience.request)?,
            url: format!("{}/v1/metrics", server.trim_end_matches('/')),
            headers: headers(&variables.headers)?,
            resource: json!({ "attributes": attributes }),
        };
        Ok(Self { queue: Queue::start(collector, config.on_error, patience)? })
    }
}

impl Logger for OtlpLogger {
    fn name(&self) -> &str {
        "otlp"
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        let points = metrics.iter().map(|(name, &value)| Point::now(name, value, Some(step)));
        points.into_iter().try_for_each(|point| self.queue.put(point))
    }

    /// Does nothing: the queue's thread sends the logged values.
    fn save(&mut self) -> Result<()> {
        Ok(())
    }

    fn finalize(&mut self, status: RunStatus) -> Result<()> {
        self.queue.finish(status)
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::test_server::{QUICK, serve};

    fn config(text: &str) -> OtlpConfig {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn metrics_arrive_as_gauges() {
        let (address, requests) = serve(Box::new(|_, _| (200, json!({}))));
        let text = format!("endpoint = {address:?}\nattributes = {{ team = \"a\" }}");
        let variables = Variables { headers: "api-key=a%20b".to_owned(), ..Variables::default() };
        let mut logger = OtlpLogger::start(&config(&text), "version_3", &variables, QUICK).unwrap();
        logger.log_metrics(&[("train_loss".to_owned(), 1.5)].into(), 7).unwrap();
        logger.log_metrics(&[("grad_norm".to_owned(), f64::INFINITY)].into(), 7).unwrap();
        logger.finalize(RunStatus::Interrupted).unwrap();
        assert_eq!(logger.queue.missing(), (0, 2));
        let mut points = BTreeMap::new();
        for request in requests.try_iter() {
            assert_eq!(request.path, "/v1/metrics");
            assert!(request.headers.contains(&("api-key".to_owned(), "a b".to_owned())));
            let all = &request.body["resourceMetrics"][0];
            let attributes = all["resource"]["attributes"].as_array().unwrap();
            let text = |at: usize| attributes[at]["value"]["stringValue"].as_str().unwrap();
            assert_eq!([text(0), text(1), text(2)], ["fulgurite", "version_3", "a"]);
            for metric in all["scopeMetrics"][0]["metrics"].as_array().unwrap() {
                let point = &metric["gauge"]["dataPoints"][0];
                let time: u128 = point["timeUnixNano"].as_str().unwrap().parse().unwrap();
                assert!(time > 1_700_000_000_000_000_000);
                let step = point["attributes"][0]["value"]["intValue"].as_str().map(str::to_owned);
                let name = metric["name"].as_str().unwrap().to_owned();
                points.insert(name, (point["asDouble"].clone(), step));
            }
        }
        let seven = Some("7".to_owned());
        let expected = [
            ("fulgurite.grad_norm", json!("Infinity"), seven.clone()),
            ("fulgurite.run.status", json!(1.0), None),
            ("fulgurite.train_loss", json!(1.5), seven),
        ];
        let expected = expected.map(|(name, value, step)| (name.to_owned(), (value, step)));
        assert_eq!(points, BTreeMap::from(expected));
    }

    #[test]
    fn rejected_values_are_reported() {
        let partial =
            json!({ "partialSuccess": { "rejectedDataPoints": "1", "errorMessage": "old" } });
        for (status, body, expected) in [
            (200, partial, "left out 1 values: \"old\""),
            (400, json!({ "message": "no such tenant" }), "status 400: \"no such tenant\""),
        ] {
            let (address, _requests) = serve(Box::new(move |_, _| (status, body.clone())));
            let text = format!("endpoint = {address:?}\non_error = \"error\"");
            let variables = Variables::default();
            let mut logger = OtlpLogger::start(&config(&text), "r", &variables, QUICK).unwrap();
            let _ = logger.log_metrics(&[("loss".to_owned(), 1.0)].into(), 1);
            let error = logger.finalize(RunStatus::Success).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn headers_are_pairs() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(headers(" a=b , c=d%3D").unwrap(), [pair("a", "b"), pair("c", "d=")]);
        assert!(headers("").unwrap().is_empty());
        for wrong in ["secret", "=secret", "a b=secret", "a=%secret", "a=%0A"] {
            let error = headers(wrong).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn wrong_addresses_are_refused() {
        let check = |endpoint: &str| config(&format!("endpoint = {endpoint:?}")).check();
        check("http://127.0.0.1:4318").unwrap();
        assert_says!(check("collector:4317").unwrap_err(), "`trainer.loggers` … `endpoint` …");
        assert_says!(
            check("http://me:secret@collector").unwrap_err(),
            "`trainer.loggers`: otlp's `endpoint` has … a password … OTEL_EXPORTER_OTLP_HEADERS …"
        );
    }
}
