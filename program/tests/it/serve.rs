//! `fulgurite serve` in real processes, with real connections.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use fulgurite_test_message::assert_says;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::generate::trained;
use crate::tasks::fixture;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The longest time that a test waits for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    program.args(args).current_dir(dir).stdin(Stdio::null());
    program.stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RAYON_NUM_THREADS"] {
        program.env_remove(name);
    }
    program
}

/// A server that runs.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(model: &Path, more: &[&str]) -> Self {
        let model = model.display().to_string();
        let args = ["serve", "--model", &model, "--name", "tiny", "--port", "0"];
        let mut process = command(Path::new("."), &[&args, more].concat()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("tiny at http://").and_then(|rest| rest.split('/').next());
        let Some(address) = address.map(str::to_owned) else {
            let mut errors = String::new();
            process.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
            panic!("{line}{errors}");
        };
        Self { process, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes, and returns the status, the header fields and the body of the answer.
    fn send(&self, bytes: &[u8]) -> (u16, String, String) {
        let mut stream = self.connect();
        // The server may answer before it has read all.
        let _ = stream.write_all(bytes);
        answer(stream)
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address);
        let (status, _, body) = self.send(request.as_bytes());
        (status, serde_json::from_str(&body).unwrap())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.send(&post(path, body));
        (status, serde_json::from_str(&body).unwrap())
    }

    /// The answer to a request that succeeds.
    #[track_caller]
    fn complete(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{body}: {answer}");
        answer
    }

    /// The status and the error of a request that fails: its parameter or code, and its message.
    #[track_caller]
    fn refusal(&self, path: &str, body: &Value) -> String {
        let (status, answer) = self.post(path, body);
        refused(status, &answer)
    }

    /// The events of a stream.
    fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, head, body) = self.send(&post(path, body));
        assert_eq!(status, 200, "{body}");
        assert!(head.contains("text/event-stream") && head.contains("chunked"), "{head}");
        let mut events = String::new();
        let mut rest = body.as_str();
        loop {
            let (length, more) = rest.split_once("\r\n").unwrap();
            let length = usize::from_str_radix(length, 16).unwrap();
            events.push_str(&more[..length]);
            rest = more[length..].strip_prefix("\r\n").unwrap();
            if length == 0 {
                break;
            }
        }
        assert_eq!(rest, "");
        let mut events: Vec<&str> = events.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"));
        let parse = |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap());
        events.into_iter().map(|event| parse(event).unwrap()).collect()
    }

    /// Waits until a request is being answered, or none is, and this number of requests wait.
    fn wait_for(&self, computing: bool, waiting: usize) {
        let health = json!({"status": "ok", "computing": computing, "waiting": waiting});
        let start = Instant::now();
        while self.get("/health").1 != health {
            assert!(start.elapsed() < PATIENCE, "expected {health}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn interrupt(&self) {
        kill_process(Pid::from_child(&self.process), Signal::INT).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn post(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: me\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    (head + &body).into_bytes()
}

/// Reads an answer until the connection closes.
fn answer(mut stream: TcpStream) -> (u16, String, String) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

#[track_caller]
fn refused(status: u16, answer: &Value) -> String {
    let error = &answer["error"];
    assert!(status >= 400, "{answer}");
    let text = |key: &str| error[key].as_str().unwrap_or("-").to_owned();
    format!("{status} {} {} {}: {}", text("type"), text("param"), text("code"), text("message"))
}

/// The choices of an answer.
fn choices(answer: &Value) -> &Vec<Value> {
    answer["choices"].as_array().unwrap()
}

fn texts(answer: &Value) -> Vec<&str> {
    choices(answer).iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[test]
fn completions_equal_generate() {
    let prompts = [vec![7u32, 3, 11], vec![5], vec![1, 2, 3, 4, 5, 6, 8]];
    let ids =
        prompts.each_ref().map(|ids| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
    for name in ["llama", "gpt2"] {
        let model = fixture(name);
        let server = Server::start(&model, &[]);
        let model = model.display().to_string();
        let sampled = ["--temperature", "1.1", "--top-p", "0.9", "--n", "2", "--seed", "7"];
        let greedy = ["--temperature", "0", "--n", "1", "--seed", "1"];
        let sampled_body = json!({"temperature": 1.1, "top_p": 0.9, "n": 2, "seed": 7});
        let greedy_body = json!({"temperature": 0});
        for (options, body) in [(&greedy[..], greedy_body), (&sampled[..], sampled_body)] {
            let mut args =
                vec!["generate", "--model", &model, "--output", "json", "--max-new-tokens", "9"];
            args.extend(options);
            ids.iter().for_each(|ids| args.extend(["--prompt-ids", ids]));
            let Output { stdout, .. } = command(Path::new("."), &args).output().unwrap();
            let expected: Vec<(Value, Value)> = String::from_utf8(stdout)
                .unwrap()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .map(|answer: Value| {
                    let end = if answer["end"] == "length" { "length" } else { "stop" };
                    (answer["ids"].clone(), json!(end))
                })
                .collect();
            assert_eq!(expected.len(), prompts.len() * if options == sampled { 2 } else { 1 });
            let mut body = body;
            body["prompt"] = json!(prompts);
            body["max_tokens"] = json!(9);
            body["return_token_ids"] = json!(true);
            let answer = server.complete(COMPLETIONS, &body);
            let found: Vec<(Value, Value)> = choices(&answer)
                .iter()
                .map(|choice| (choice["token_ids"].clone(), choice["finish_reason"].clone()))
                .collect();
            assert_eq!(found, expected, "{name} {body}");
            let new: usize = expected.iter().map(|(ids, _)| ids.as_array().unwrap().len()).sum();
            assert_eq!(
                answer["usage"],
                json!({"prompt_tokens": 11, "completion_tokens": new, "total_tokens": 11 + new})
            );
        }
    }
}

/// The log-softmax of the recorded logits `[batch, time, vocabulary]`, and the ids.
fn recorded(name: &str) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f64>>>) {
    let file = fixture(name).join("expected.safetensors");
    let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let convert = |tensor: &Tensor, dtype| tensor.to_dtype(dtype).unwrap();
    let ids = convert(&tensors["input_ids"], DType::U32).to_vec2().unwrap();
    let mut logits: Vec<Vec<Vec<f64>>> = convert(&tensors["logits"], DType::F64).to_vec3().unwrap();
    for row in logits.iter_mut().flatten() {
        let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
        row.iter_mut().for_each(|logit| *logit -= sum.ln());
    }
    (ids, logits)
}

fn greatest(row: &[f64]) -> f64 {
    row.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

#[test]
fn echoed_logprobs_equal_transformers() {
    for name in ["llama", "gpt2", "gemma2", "qwen3"] {
        let (ids, expected) = recorded(name);
        let server = Server::start(&fixture(name), &[]);
        for max_tokens in [0, 1] {
            let body = json!({
                "prompt": ids, "echo": true, "max_tokens": max_tokens, "logprobs": 3, "temperature": 0,
                "seed": 1234, "model": "tiny", "ignore_eos": true,
            });
            let answer = server.complete(COMPLETIONS, &body);
            assert_eq!(choices(&answer).len(), ids.len());
            for ((choice, ids), expected) in choices(&answer).iter().zip(&ids).zip(&expected) {
                let found = &choice["logprobs"];
                let length = ids.len() + max_tokens;
                for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                    assert_eq!(found[key].as_array().unwrap().len(), length, "{key}");
                }
                assert_eq!(
                    (&found["token_logprobs"][0], &found["top_logprobs"][0]),
                    (&Value::Null, &Value::Null)
                );
                for place in 1..length {
                    let row = &expected[place - 1];
                    // A new token is the most likely one.
                    let wanted = ids.get(place).map_or(greatest(row), |id| row[*id as usize]);
                    let own = found["token_logprobs"][place].as_f64().unwrap();
                    assert!((own - wanted).abs() < 2e-5, "{name} {place}: {own} {wanted}");
                    let top = found["top_logprobs"][place].as_object().unwrap();
                    assert!(top.len() == 3 || top.len() == 4, "{top:?}");
                    let best = top.values().map(|value| value.as_f64().unwrap());
                    let best = best.fold(f64::NEG_INFINITY, f64::max);
                    assert!((best - greatest(row)).abs() < 2e-5, "{name} {place}");
                    let token = found["tokens"][place].as_str().unwrap();
                    assert_eq!(top[token], found["token_logprobs"][place]);
                    for (token, value) in top {
                        let id: usize = token.trim_matches(['<', '>']).parse().unwrap();
                        assert!((value.as_f64().unwrap() - row[id]).abs() < 2e-5, "{name} {token}");
                    }
                }
            }
        }
    }
}

#[test]
fn new_logprobs_ignore_the_temperature() {
    let (ids, expected) = recorded("llama");
    let server = Server::start(&fixture("llama"), &[]);
    let body = |temperature: f64| {
        json!({
            "prompt": ids[0], "max_tokens": 1, "logprobs": 0, "temperature": temperature,
            "repetition_penalty": 1.5, "seed": 3, "return_token_ids": true,
        })
    };
    for temperature in [0.0, 0.5, 3.0] {
        let answer = server.complete(COMPLETIONS, &body(temperature));
        let choice = &choices(&answer)[0];
        let id = choice["token_ids"][0].as_u64().unwrap();
        let wanted = expected[0].last().unwrap()[id as usize];
        let own = choice["logprobs"]["token_logprobs"][0].as_f64().unwrap();
        assert!((own - wanted).abs() < 2e-5, "{temperature}: {own} {wanted}");
    }
}

#[test]
fn texts_streams_and_chats_agree() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&trained(dir.path()), &["--chat-template", "chatml"]);
    let idle = json!({"status": "ok", "computing": false, "waiting": 0});
    assert_eq!(server.get("/health"), (200, idle));
    let (status, models) = server.get("/v1/models");
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("tiny")));
    assert_eq!(server.get("/v1/models/tiny").1["object"], "model");

    let prompt = json!({"prompt": "añb ", "max_tokens": 20, "temperature": 0});
    let with = |more: Value| {
        let mut body = prompt.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = server.complete(COMPLETIONS, &prompt);
    assert_eq!(texts(&answer), ["çd ✓ añb çd ✓"]);
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("tiny")));
    let stopped = server.complete(COMPLETIONS, &with(json!({"stop": "✓", "logprobs": 0})));
    assert_eq!(texts(&stopped), ["çd "]);
    assert_eq!(choices(&stopped)[0]["finish_reason"], "stop");
    let tokens = choices(&stopped)[0]["logprobs"]["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 4, "without the stop text's: {tokens:?}");
    assert_eq!(stopped["usage"]["completion_tokens"], 7);

    // Characters of several tokens, and the prompt.
    let whole = server.complete(COMPLETIONS, &with(json!({"echo": true, "logprobs": 2})));
    assert_eq!(texts(&whole), ["añb çd ✓ añb çd ✓"]);
    let logprobs = &choices(&whole)[0]["logprobs"];
    let offsets: Vec<u64> = serde_json::from_value(logprobs["text_offset"].clone()).unwrap();
    assert_eq!(offsets[..12], [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 7]);
    assert_eq!(offsets.len(), 25);

    for more in [
        json!({}),
        json!({"echo": true, "logprobs": 2, "return_token_ids": true}),
        json!({"stop": ["✓", "zz"], "logprobs": 1}),
        json!({"prompt": ["añb ", "✓ a"], "n": 5, "temperature": 1.5, "seed": 4}),
        json!({"echo": true, "logprobs": 1, "max_tokens": 0}),
    ] {
        let whole = server.complete(COMPLETIONS, &with(more.clone()));
        let mut streamed = with(more.clone());
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let mut events = server.stream(COMPLETIONS, &streamed);
        assert_eq!(events.pop().unwrap()["usage"], whole["usage"], "{more}");
        for (index, choice) in choices(&whole).iter().enumerate() {
            assert_eq!(choice["index"], index);
            let own = || {
                events.iter().map(|event| &event["choices"][0]).filter(|own| own["index"] == index)
            };
            let text: String = own().map(|own| own["text"].as_str().unwrap()).collect();
            assert_eq!(choice["text"], text, "{more}");
            assert_eq!(own().next_back().unwrap()["finish_reason"], choice["finish_reason"]);
            for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let parts = own().filter_map(|own| own["logprobs"][key].as_array());
                let all: Vec<Value> = parts.flatten().cloned().collect();
                let expected = choice["logprobs"][key].as_array().cloned().unwrap_or_default();
                assert_eq!(all, expected, "{more} {key}");
            }
            let ids = own().filter_map(|own| own["token_ids"].as_array()).flatten().cloned();
            let expected = choice["token_ids"].as_array().cloned().unwrap_or_default();
            assert_eq!(ids.collect::<Vec<_>>(), expected, "{more}");
        }
        let pieces = events.iter().filter(|event| event["choices"][0]["text"] != "").count();
        assert!(more["max_tokens"] == 0 || pieces > 2, "{more}: {pieces} pieces");
    }

    // The template's text, continued.
    let messages = json!([{"role": "user", "content": "añb"}]);
    let text = "<|im_start|>user\nañb<|im_end|>\n<|im_start|>assistant\n";
    let options = json!({"max_tokens": 12, "temperature": 0});
    let mut expected = options.clone();
    expected["prompt"] = json!(text);
    let expected = server.complete(COMPLETIONS, &expected);
    let mut chat = options;
    chat["messages"] = messages;
    chat["logprobs"] = json!(true);
    chat["top_logprobs"] = json!(2);
    let answer = server.complete(CHAT, &chat);
    let message = &choices(&answer)[0]["message"];
    assert_eq!(message, &json!({"role": "assistant", "content": texts(&expected)[0]}));
    assert_eq!(answer["usage"], expected["usage"]);
    let content = choices(&answer)[0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    assert!(content.iter().all(|token| token["top_logprobs"][0]["logprob"] == token["logprob"]));
    for token in content {
        let text = token["token"].as_str().unwrap();
        let bytes = if text == "\u{fffd}" { Value::Null } else { json!(text.as_bytes()) };
        assert_eq!(token["bytes"], bytes);
    }
    assert!(content.iter().any(|token| token["bytes"].is_null()), "{content:?}");
    chat["stream"] = json!(true);
    let events = server.stream(CHAT, &chat);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let delta = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    assert_eq!(events.iter().filter_map(delta).collect::<String>(), texts(&expected)[0]);
    // Without a seed, requests differ.
    let random = with(json!({"temperature": 3.0}));
    let first = server.complete(COMPLETIONS, &random);
    assert_ne!(texts(&first), texts(&server.complete(COMPLETIONS, &random)));
}

#[test]
fn wrong_requests_are_explained() {
    let server = Server::start(
        &fixture("llama"),
        &["--max-request-bytes", "2000", "--request-seconds", "1"],
    );
    let of = |body: Value| server.refusal(COMPLETIONS, &body);
    assert_says!(of(json!({})), "400 invalid_request_error prompt -: `prompt` is missing");
    assert_says!(of(json!({"prompt": "a"})), "400 invalid_request_error prompt - … no tokenizer …");
    assert_says!(of(json!({"prompt": [99]})), "400 invalid_request_error prompt -: token 99 …");
    assert_says!(
        of(json!({"prompt": [[1], []]})),
        "400 invalid_request_error … prompt 1 … empty …"
    );
    assert_says!(
        of(json!({"prompt": vec![1; 60], "max_tokens": 9})),
        "400 invalid_request_error prompt … 60 tokens … 64 positions … at most 5 …"
    );
    assert_says!(of(json!({"prompt": [1], "max_tokens": 2000})), "400 … `max_tokens` … found 2000");
    assert_says!(of(json!({"prompt": [1], "stop": "a"})), "400 … `stop` needs a tokenizer …");
    assert_says!(of(json!({"prompt": [1], "tempratur": 1})), "400 … tempratur … not supported …");
    assert_says!(of(json!({"prompt": [1], "temperature": -1})), "400 … temperature … 1e6 … -1");
    assert_says!(of(json!({"prompt": [1], "model": "gpt-4"})), r#"404 … no model "gpt-4" here …"#);
    assert_says!(of(json!({"prompt": vec![[1]; 65], "n": 2})), "400 … 65 prompts … than 128 …");
    assert_says!(of(json!([])), "400 invalid_request_error - invalid_json … must be an object …");
    let messages = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_says!(server.refusal(CHAT, &messages), "400 … messages … no tokenizer … --tokenizer");
    let (status, body) = server.get("/v1/embeddings");
    assert_says!(refused(status, &body), "404 … unknown_path … nothing at /v1/embeddings …");
    let (status, body) = server.get("/v1/models/other");
    assert_says!(refused(status, &body), r#"404 … model_not_found … no model "other" … "tiny""#);
    let raw = |request: &str| {
        let (status, head, body) = server.send(request.as_bytes());
        (refused(status, &serde_json::from_str(&body).unwrap()), head)
    };
    let (error, head) = raw("GET /v1/completions HTTP/1.1\r\n\r\n");
    assert_says!(error, "405 … method_not_allowed: /v1/completions takes POST, not GET");
    assert!(head.contains("\r\nAllow: POST"), "{head}");
    let json = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n";
    assert_says!(
        raw(&format!("{json}Content-Length: 3\r\n\r\n{{]}}")).0,
        "400 invalid_request_error - invalid_json … is not JSON … line 1 column 2"
    );
    assert_says!(
        raw(&format!("{json}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")).0,
        "400 … malformed_request: `Transfer-Encoding` is not supported … `Content-Length`"
    );
    assert_says!(
        raw(&format!("{json}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}")).0,
        "400 … malformed_request: `Content-Length` is not one number"
    );
    assert_says!(
        raw("POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}").0,
        "400 … unsupported_content_type: send JSON … `Content-Type: application/json`"
    );
    assert_says!(raw("nonsense\r\n\r\n").0, "400 … malformed_request … no request of HTTP …");
    // Too large, too slow.
    let large = format!("{json}Content-Length: 3000000\r\n\r\n{}", " ".repeat(3_000_000));
    assert_says!(raw(&large).0, "413 … request_too_large … 3000000 bytes … most is 2000");
    let endless = format!("GET /health HTTP/1.1\r\nX: {}", "x".repeat(40_000));
    assert_says!(raw(&endless).0, "413 … request_too_large … header fields … 16384 bytes");
    assert_says!(
        raw(&format!("{json}Content-Length: 100\r\n\r\n{{")).0,
        "408 invalid_request_error - request_timeout … did not come in time"
    );
    assert_eq!(server.get("/health").0, 200);
}

/// A request of 64,000 tokens, which takes seconds.
fn long() -> Value {
    json!({
        "prompt": vec!["añb "; 8], "n": 8, "max_tokens": 1000, "temperature": 1.0, "seed": 1, "ignore_eos": true,
    })
}

#[test]
fn client_that_hangs_up_frees_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&trained(dir.path()), &["--max-waiting", "1"]);
    let mut body = long();
    let start = Instant::now();
    let answer = server.complete(COMPLETIONS, &body);
    let whole = start.elapsed();
    assert_eq!(answer["usage"]["completion_tokens"], 64_000);
    for stream in [false, true] {
        body["stream"] = json!(stream);
        server.wait_for(false, 0);
        let mut client = server.connect();
        client.write_all(&post(COMPLETIONS, &body)).unwrap();
        let waiting = thread::scope(|scope| {
            server.wait_for(true, 0);
            // One waits, and no more.
            let waiting = scope
                .spawn(|| server.complete(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 1})));
            server.wait_for(true, 1);
            let refusal = server.refusal(COMPLETIONS, &json!({"prompt": "a"}));
            assert_eq!(
                refusal,
                "429 rate_limit_error - server_busy: 1 requests wait already; try again later"
            );
            assert_eq!(server.get("/health").0, 200);
            drop(client);
            let start = Instant::now();
            waiting.join().unwrap();
            start.elapsed()
        });
        assert!(waiting < whole / 2, "{waiting:?} of {whole:?}");
    }
}

#[test]
fn interrupt_ends_the_server_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let model = trained(dir.path());
    let idle = |mut server: Server| {
        server.interrupt();
        let status = server.process.wait().unwrap();
        let mut errors = String::new();
        server.process.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (status.code(), errors)
    };
    assert_eq!(idle(Server::start(&model, &[])), (Some(0), String::new()));
    let server = Server::start(&model, &[]);
    let mut clients: Vec<TcpStream> = (0..2).map(|_| server.connect()).collect();
    for (waiting, client) in clients.iter_mut().enumerate() {
        client.write_all(&post(COMPLETIONS, &long())).unwrap();
        server.wait_for(true, waiting);
    }
    assert_eq!(idle(server), (Some(0), String::new()));
    for client in clients {
        let (status, _, body) = answer(client);
        let error = refused(status, &serde_json::from_str(&body).unwrap());
        assert_eq!(
            error,
            "503 server_error - server_ending: the server ends; send the request to another one"
        );
    }
}

#[test]
fn unusable_arguments_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refusal_of = |model: &str, args: &[&str]| {
        let model = fixture(model).display().to_string();
        let args = [&["serve", "--model", &model], args].concat();
        let output = command(dir.path(), &args).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}");
        String::from_utf8(output.stderr).unwrap().trim_end().to_owned()
    };
    let refusal = |args: &[&str]| refusal_of("llama", args);
    let free = ["--port", "0"];
    assert_says!(refusal_of("t5_gated", &free), r#"error: `model.type` … "t5" … another kind …"#);
    let with = |more: &[&str]| refusal(&[&free, more].concat());
    assert_says!(with(&["--set", "trainer.devices=2"]), "error: `fulgurite serve` … rank, and 2 …");
    assert_says!(
        with(&["--set", "trainer.devices=auto"]),
        r#"error: --set trainer.devices: `fulgurite serve` needs 1 device, found "auto""#
    );
    assert_says!(
        with(&["--set", "data.temperature=0.5"]),
        "error: --set data.… takes `tokenizer`, `chat_template` … requests have the other options"
    );
    assert_says!(with(&["--chat-template", "missing.jinja"]), "error: … no file missing.jinja …");
    assert_says!(with(&["--tokenizer", "missing.json"]), "error: data … no file missing.json …");
    assert_says!(with(&["--set", "trainer.devicse=1"]), "error: … unknown key `trainer.devicse` …");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = refusal(&["--port", &port]).replace(&port, "PORT");
    assert_says!(error, "error: --host 127.0.0.1 --port PORT: cannot listen … already in use …");
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none(), "a server writes no files");
}
