//! Connections: each has a thread, which waits for the one that computes.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::compute::{Event, Job};
use super::error::ApiError;
use super::format::Form;
use super::http::{Connection, Limits, NoRequest, Request};
use super::request::{Api, TextRequest};

/// The most connections in addition to waiting requests.
const MORE_CONNECTIONS: usize = 32;

/// The time between two looks whether a client has hung up.
const LOOK: Duration = Duration::from_millis(100);

/// The time after a failure to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// The paths of the server, with their methods.
const PATHS: [(&str, &str); 4] = [
    ("/health", "GET"),
    ("/v1/models", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
];

/// State that connections share.
pub(super) struct Server {
    /// The model's name.
    pub(super) model: String,
    /// Seconds since 1970 at the start.
    pub(super) started: u64,
    pub(super) limits: Limits,
    /// The most tokens of an answer.
    pub(super) max_new_tokens: usize,
    pub(super) max_waiting: usize,
    pub(super) queue: SyncSender<Job>,
    /// Requests in the queue.
    pub(super) waiting: AtomicUsize,
    /// Whether a request is being answered.
    pub(super) computing: AtomicBool,
    pub(super) connections: AtomicUsize,
    pub(super) answered: AtomicU64,
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Accepts connections until the process ends.
pub(super) fn accept(listener: &TcpListener, server: &Arc<Server>) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Too many open files, say.
            thread::sleep(PAUSE);
            continue;
        };
        let open = Open::new(server.clone());
        if server.connections.load(Ordering::Relaxed) > server.max_waiting + MORE_CONNECTIONS {
            if let Ok(connection) = Connection::new(stream) {
                let error = busy("there are too many connections");
                connection.refuse(error.status, &error.body());
            }
            continue;
        }
        let handle = move || handle(stream, &open.0);
        // Without a thread the connection closes.
        let _ = thread::Builder::new().name("connection".to_owned()).spawn(handle);
    }
}

/// Counts a connection.
struct Open(Arc<Server>);

impl Open {
    fn new(server: Arc<Server>) -> Self {
        server.connections.fetch_add(1, Ordering::Relaxed);
        Self(server)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn busy(what: &str) -> ApiError {
    ApiError::request(429, "server_busy", format!("{what}; try again later"))
}

/// Answers the request of a connection. Failures to write mean that the client is gone.
fn handle(stream: TcpStream, server: &Server) {
    let Ok(mut connection) = Connection::new(stream) else {
        return;
    };
    let request = match connection.read(server.limits) {
        Ok(request) => request,
        Err(NoRequest::Gone) => return,
        Err(NoRequest::Refused(error)) => return fail(connection, &error),
    };
    match server.route(&request) {
        Ok(Route::Value(value)) => drop(connection.answer(200, &[], &value)),
        Ok(Route::Text(api)) => server.continue_text(api, &request, connection),
        Err((error, method)) => {
            let allow = method.map(|method| ("Allow", method));
            drop(connection.answer(error.status, allow.as_slice(), &error.body()));
        }
    }
}

fn fail(connection: Connection, error: &ApiError) {
    let retry = (error.status == 429).then_some(("Retry-After", "1"));
    drop(connection.answer(error.status, retry.as_slice(), &error.body()));
}

/// The kind of answer to a request.
enum Route {
    Value(Value),
    Text(Api),
}

impl Server {
    /// The route of a request, or an error with the path's method.
    fn route(&self, request: &Request) -> Result<Route, (ApiError, Option<&'static str>)> {
        let Request { method, path, is_json, .. } = request;
        let one = path.strip_prefix("/v1/models/");
        let known = match one {
            Some(_) => Some("GET"),
            None => PATHS.iter().find(|(known, _)| known == path).map(|(_, method)| *method),
        };
        let Some(allowed) = known else {
            let paths = PATHS.map(|(path, _)| path).join(", ");
            let what = format!("there is nothing at {path}; the paths are {paths}");
            return Err((ApiError::request(404, "unknown_path", what), None));
        };
        if method != allowed {
            let what = format!("{path} takes {allowed}, not {method}");
            return Err((ApiError::request(405, "method_not_allowed", what), Some(allowed)));
        }
        if allowed == "POST" && !is_json {
            // A page in a browser cannot send this type to another site.
            let what = "send JSON, with `Content-Type: application/json`";
            return Err((ApiError::request(400, "unsupported_content_type", what), None));
        }
        let model = || json!({ "id": self.model, "object": "model", "created": self.started, "owned_by": "fulgurite" });
        match (path.as_str(), one) {
            (_, Some(name)) if name == self.model => Ok(Route::Value(model())),
            (_, Some(name)) => {
                let what = format!("there is no model {name:?} here; it is {:?}", self.model);
                Err((ApiError::request(404, "model_not_found", what), None))
            }
            ("/v1/models", _) => Ok(Route::Value(json!({ "object": "list", "data": [model()] }))),
            ("/v1/completions", _) => Ok(Route::Text(Api::Completions)),
            ("/v1/chat/completions", _) => Ok(Route::Text(Api::Chat)),
            _ => Ok(Route::Value(self.health())),
        }
    }

    fn health(&self) -> Value {
        let computing = self.computing.load(Ordering::Relaxed);
        let waiting = self.waiting.load(Ordering::Relaxed);
        json!({ "status": "ok", "computing": computing, "waiting": waiting })
    }

    /// Lets the thread that computes continue a text.
    fn continue_text(&self, api: Api, request: &Request, connection: Connection) {
        let parsed = TextRequest::parse(api, &request.body, &self.model, self.max_new_tokens);
        let request = match parsed {
            Ok(request) => request,
            Err(error) => return fail(connection, &error),
        };
        let number = self.answered.fetch_add(1, Ordering::Relaxed);
        let id = match api {
            Api::Completions => format!("cmpl-{number}"),
            Api::Chat => format!("chatcmpl-{number}"),
        };
        let form = Form { api, id, model: self.model.clone(), created: now() };
        let (events, receiver) = channel();
        let gone = Arc::new(AtomicBool::new(false));
        let stream = request.stream;
        let job = Job { request, form, events, gone: gone.clone() };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(refused) = self.queue.try_send(job) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let error = match refused {
                TrySendError::Full(_) => {
                    busy(&format!("{} requests wait already", self.max_waiting))
                }
                TrySendError::Disconnected(_) => ApiError::ending(),
            };
            return fail(connection, &error);
        }
        deliver(&receiver, connection, stream);
        gone.store(true, Ordering::Relaxed);
    }
}

/// Writes an answer as it comes, until it ends or the client hangs up.
fn deliver(receiver: &Receiver<Event>, mut connection: Connection, stream: bool) {
    let mut begun = false;
    loop {
        let event = match receiver.recv_timeout(LOOK) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if connection.is_gone() => return,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => Event::Failed(ApiError::ending()),
        };
        let event = match event {
            Event::Whole(value) if !stream => return drop(connection.answer(200, &[], &value)),
            Event::Failed(error) if !begun => return fail(connection, &error),
            event => event,
        };
        if !std::mem::replace(&mut begun, true) && connection.begin_events().is_err() {
            return;
        }
        let (data, ends) = match event {
            Event::Piece(value) => (value, false),
            Event::Whole(value) => (value, true),
            Event::Failed(error) => {
                let _ = connection.event(&error.body().to_string());
                return drop(connection.end_events());
            }
        };
        if !data.is_null() && connection.event(&data.to_string()).is_err() {
            return;
        }
        if ends {
            if connection.event("[DONE]").is_ok() {
                let _ = connection.end_events();
            }
            return;
        }
    }
}
