//! Tests against a server in this process that answers as MLflow does.

use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use fulgurite_test_message::assert_says;

use super::*;
use crate::test_server::{self, Answer, QUICK, Request};

/// The path of MLflow's interface.
const INTERFACE: &str = "/api/2.0/mlflow/";

/// Starts a server; returns its address and the received requests.
fn serve(mut answer: Answer) -> (String, Receiver<Request>) {
    test_server::serve(Box::new(move |path, body| answer(path.trim_start_matches(INTERFACE), body)))
}

/// The calls that a server has received, with their bodies.
fn calls(requests: &Receiver<Request>) -> impl Iterator<Item = (String, Json)> {
    requests.try_iter().map(|request| (request.path.replace(INTERFACE, ""), request.body))
}

/// The answers of a server on which the experiment does not exist yet.
fn usual(path: &str) -> (u16, Json) {
    match path.split('?').next().unwrap() {
        "experiments/get-by-name" => {
            (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none" }))
        }
        "experiments/create" => (200, json!({ "experiment_id": "7" })),
        "runs/create" => (200, json!({ "run": { "info": { "run_id": "abc" } } })),
        _ => (200, json!({})),
    }
}

fn start(uri: &str, on_error: OnError) -> Result<MlflowLogger> {
    let config = MlflowConfig {
        tracking_uri: Some(uri.to_owned()),
        experiment_name: "my llama".to_owned(),
        tags: [("who".to_owned(), "me".to_owned())].into(),
        on_error,
        ..MlflowConfig::default()
    };
    MlflowLogger::start(&config, Path::new("logs/version_3"), QUICK)
}

fn metrics(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
}

#[test]
fn a_run_is_made_filled_and_ended() {
    let (uri, requests) = serve(Box::new(|path, _| usual(path)));
    let mut logger = start(&uri, OnError::Error).unwrap();
    logger.log_hyperparams(&toml::toml! { optimizer = { lr = 0.5, betas = [0.9, 0.95] } }).unwrap();
    for step in 1..=1200 {
        logger.log_metrics(&metrics(&[("train loss", 0.5), ("a@b", f64::NAN)]), step).unwrap();
    }
    logger.after_save_checkpoint(Path::new("logs/step-9"), 9).unwrap();
    logger.finalize(RunStatus::Interrupted).unwrap();
    let mut requests = calls(&requests);
    let (path, _) = requests.next().unwrap();
    assert_eq!(path, "experiments/get-by-name?experiment_name=my%20llama");
    assert_eq!(requests.next().unwrap().1, json!({ "name": "my llama" }));
    let (path, run) = requests.next().unwrap();
    assert_eq!(
        (path.as_str(), &run["experiment_id"], &run["run_name"]),
        ("runs/create", &json!("7"), &json!("version_3"))
    );
    let (mut logged, mut params, mut tags) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = None;
    for (path, body) in requests {
        assert!(last.is_none(), "{path} after the end");
        assert_eq!(body["run_id"], "abc");
        match path.as_str() {
            "runs/log-batch" => {
                let add = |key: &str, to: &mut Vec<Json>, most: usize| {
                    let part = body[key].as_array().unwrap();
                    assert!(part.len() <= most);
                    to.extend(part.iter().cloned());
                };
                add("metrics", &mut logged, 1000);
                add("params", &mut params, 100);
                add("tags", &mut tags, 100);
            }
            "runs/update" => last = Some(body),
            other => panic!("{other}"),
        }
    }
    assert_eq!(last.unwrap()["status"], "KILLED");
    assert_eq!(logged.len(), 2400);
    assert_eq!((&logged[0]["key"], &logged[0]["value"]), (&json!("a_b"), &json!("NaN")));
    assert_eq!((&logged[2399]["key"], &logged[2399]["step"]), (&json!("train loss"), &json!(1200)));
    let betas = json!({ "key": "optimizer.betas", "value": "[0.9, 0.95]" });
    assert!(params.contains(&betas) && params.len() == 2, "{params:?}");
    assert!(tags.contains(&json!({ "key": "who", "value": "me" })));
    assert!(tags.iter().any(|tag| tag["value"] == "step 9: logs/step-9"));
}

#[test]
fn transient_failures_are_retried() {
    let mut refused = 0;
    let (uri, requests) = serve(Box::new(move |path, _| {
        if path == "runs/log-batch" && refused < 2 {
            refused += 1;
            return (503, json!({ "message": "busy" }));
        }
        usual(path)
    }));
    let mut logger = start(&uri, OnError::Error).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 1).unwrap();
    logger.finalize(RunStatus::Success).unwrap();
    let batches = calls(&requests).filter(|(path, _)| path == "runs/log-batch").count();
    assert!(batches >= 3, "two refused and one taken, at least");
}

#[test]
fn on_error_decides_if_a_dead_server_ends_a_run() {
    for on_error in [OnError::Warn, OnError::Error] {
        let (uri, _requests) = serve(Box::new(|path, _| match path {
            "runs/log-batch" => (500, json!({ "error_code": "INTERNAL_ERROR", "message": "disk" })),
            path => usual(path),
        }));
        let mut logger = start(&uri, on_error).unwrap();
        logger.log_metrics(&metrics(&[("x", 1.0)]), 1).ok();
        let end = logger.finalize(RunStatus::Success);
        match on_error {
            OnError::Warn => end.unwrap(),
            OnError::Error => {
                let error = end.unwrap_err().to_string().replace(&uri, "SERVER");
                assert_says!(error, r#"MLflow at SERVER: runs/log-batch: status 500: "disk""#);
            }
        }
    }
}

/// Returns the failure of a run whose server answers log calls with `status` and `said`.
fn failure_of(status: u16, said: Json) -> String {
    let (uri, _requests) = serve(Box::new(move |path, _| match path {
        "runs/log-batch" => (status, said.clone()),
        path => usual(path),
    }));
    let mut logger = start(&uri, OnError::Error).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 1).ok();
    logger.finalize(RunStatus::Success).unwrap_err().to_string().replace(&uri, "SERVER")
}

#[test]
fn only_an_api_answer_counts_as_delivered() {
    let page = json!("<html>please log in</html>");
    assert_says!(
        failure_of(200, page.clone()),
        "MLflow at SERVER: runs/log-batch … 200 … not an answer of MLflow's …"
    );
    assert_says!(failure_of(201, json!({})), r#"MLflow at SERVER: runs/log-batch … 201: "{}""#);
    assert_says!(failure_of(302, page), r#"MLflow at SERVER: … 302 … "http://localhost/login" …"#);
    let forged = json!({ "message": "oops\nerror: rank 2 failed: \u{1b}[2K" });
    assert_says!(failure_of(400, forged), r#"MLflow at SERVER: … 400: "oops\nerror: … \u{1b}[2K""#);
}

#[test]
fn taken_values_are_not_sent_again() {
    let mut calls_made = 0;
    let (uri, requests) = serve(Box::new(move |_, _| {
        calls_made += 1;
        if calls_made == 2 { (503, json!({ "message": "busy" })) } else { (200, json!({})) }
    }));
    let client = Client::new(&uri, &Credentials::default(), QUICK.request).unwrap();
    let run = Run { client, id: "abc".to_owned() };
    let param = |i: usize| Item::Param { key: format!("key {i}"), value: "1".to_owned() };
    let items: Vec<Item> = (0..150).map(param).collect();
    let failure = run.send(&items).unwrap_err();
    assert_eq!((failure.taken, failure.transient), (100, true));
    run.send(&items[failure.taken..]).unwrap();
    let sent = calls(&requests).map(|(_, body)| body["params"].as_array().unwrap().len());
    assert_eq!(sent.collect::<Vec<_>>(), [100, 50, 50]);
}

#[test]
fn the_end_of_a_run_does_not_wait_for_retries() {
    let (uri, _requests) = serve(Box::new(|path, _| match path {
        "runs/log-batch" => (503, json!({ "message": "busy" })),
        path => usual(path),
    }));
    let config = MlflowConfig { tracking_uri: Some(uri), ..MlflowConfig::default() };
    // An hour between attempts, but not at the end.
    let patience = Patience {
        pause: Duration::from_secs(3600),
        end: Duration::from_secs(3600),
        retry_at_end: Duration::ZERO,
        ..QUICK
    };
    let mut logger = MlflowLogger::start(&config, Path::new("run"), patience).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 1).unwrap();
    logger.finalize(RunStatus::Success).unwrap();
    assert_eq!(logger.queue.missing(), (1, 1));
}

#[test]
fn training_does_not_wait_for_a_hung_server() {
    let (release, released) = channel::<()>();
    let (uri, _requests) = serve(Box::new(move |path, _| {
        if path == "runs/log-batch" {
            // Blocks until the test ends.
            let _ = released.recv();
        }
        usual(path)
    }));
    let mut logger = start(&uri, OnError::Warn).unwrap();
    // More than the queue holds: each call returns although the server does not.
    for step in 0..30_000 {
        logger.log_metrics(&metrics(&[("x", 1.0)]), step).unwrap();
    }
    drop(release);
    logger.finalize(RunStatus::Success).unwrap();
}

#[test]
fn the_end_gives_up_on_a_hung_server() {
    let (_hold, held) = channel::<()>();
    let (uri, _requests) = serve(Box::new(move |path, _| {
        if path == "runs/log-batch" {
            let _ = held.recv();
        }
        usual(path)
    }));
    let config = MlflowConfig {
        tracking_uri: Some(uri),
        on_error: OnError::Error,
        ..MlflowConfig::default()
    };
    let patience = Patience { end: Duration::from_millis(50), ..QUICK };
    let mut logger = MlflowLogger::start(&config, Path::new("run"), patience).unwrap();
    logger.log_metrics(&metrics(&[("x", 1.0)]), 1).unwrap();
    let error = logger.finalize(RunStatus::Success).unwrap_err();
    assert_says!(error, "MLflow has not taken everything within 0.05 s of the end");
}

#[test]
fn a_continued_run_keeps_its_parameters() {
    let (uri, requests) = serve(Box::new(|path, _| usual(path)));
    let config = MlflowConfig {
        tracking_uri: Some(uri),
        run_id: Some("old".to_owned()),
        ..MlflowConfig::default()
    };
    let mut logger = MlflowLogger::start(&config, Path::new("run"), QUICK).unwrap();
    logger.log_hyperparams(&toml::toml! { seed = 1 }).unwrap();
    logger.finalize(RunStatus::Success).unwrap();
    let seen: Vec<(String, Json)> = calls(&requests).collect();
    assert_eq!(
        seen[0],
        ("runs/update".to_owned(), json!({ "run_id": "old", "status": "RUNNING" }))
    );
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert_eq!(seen[1].1["status"], "FINISHED");
}

#[test]
fn a_wrong_address_is_found_at_the_start() {
    let error = |uri: &str| start(uri, OnError::Warn).err().unwrap().to_string();
    assert_says!(error("localhost:5000"), "`trainer.loggers` … `tracking_uri` … the address …");
    // A port without a listener.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = error(&format!("http://{closed}")).replace(&closed.to_string(), "ADDRESS");
    assert!(refused.starts_with("MLflow at http://ADDRESS: "), "{refused}");
    let (uri, _requests) = serve(Box::new(|_, _| (200, json!("a web page"))));
    let page = error(&uri).replace(&uri, "SERVER");
    assert_says!(page, r#"MLflow at SERVER … status 200 … not an answer … "\"a web page\"""#);
    let (uri, _requests) = serve(Box::new(|_, _| (200, json!({}))));
    assert_says!(error(&uri), "MLflow: an answer without `experiment_id` … an MLflow server?");
}

#[test]
fn long_values_are_cut_where_a_character_ends() {
    let mut flat = Vec::new();
    let table = Table::from_iter([("text".to_owned(), Value::String("ü".repeat(4000)))]);
    flatten("", &table, &mut flat);
    assert_eq!(flat[0].1.len(), MAX_VALUE);
}
