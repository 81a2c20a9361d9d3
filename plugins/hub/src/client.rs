//! Requests to a server of the Hub.

use std::time::Duration;

use fulgurite_error::{Error, Result, quoted};
use serde::Deserialize;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::Repository;
use crate::cache::{home, variable};

/// Most redirects of a request.
const MOST_REDIRECTS: usize = 8;
/// Most bytes of a repository's list of files.
const MOST_LISTED_BYTES: u64 = 64 << 20;

/// A server of the Hub. Without `Debug`, so that no message contains the token.
pub struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pub(crate) pauses: Vec<Duration>,
    /// A connection that sends a file is given up after this time, and the rest of the file is
    /// asked for. So a silent server is left, and a slow one goes on.
    body_timeout: Duration,
}

/// A repository at a commit.
#[derive(Deserialize)]
pub(crate) struct Listing {
    pub(crate) sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Listing {
    pub(crate) fn files(self) -> Vec<String> {
        self.siblings.into_iter().map(|file| file.rfilename).collect()
    }
}

/// A file of a repository at a commit.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) repository: &'a Repository,
    pub(crate) commit: &'a str,
    pub(crate) file: &'a str,
}

/// What the server says of a file before it sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileHead {
    /// Names the contents. Of large files their SHA-256.
    pub(crate) etag: String,
    pub(crate) bytes: u64,
}

/// Why a request failed.
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Whether it may succeed when tried again.
    pub(crate) transient: bool,
    /// Whether it brought more of a file before it failed.
    pub(crate) progress: bool,
}

impl Failure {
    pub(crate) fn transient(error: Error) -> Self {
        Self { error, transient: true, progress: false }
    }

    pub(crate) fn lasting(error: Error) -> Self {
        Self { error, transient: false, progress: false }
    }
}

impl Hub {
    /// The server `$HF_ENDPOINT`, by default `https://huggingface.co`, with the token of `$HF_TOKEN`
    /// or of `hf auth login`.
    ///
    /// # Errors
    /// If `$HF_HUB_OFFLINE` forbids the network, if the address is malformed, or if it is one of
    /// https:// and this program was built without the feature `https`.
    pub fn from_environment() -> Result<Self> {
        let text = |name| variable(name).and_then(|value| value.into_string().ok());
        if let Some(offline) = text("HF_HUB_OFFLINE")
            && ["1", "ON", "YES", "TRUE"].contains(&offline.to_uppercase().as_str())
        {
            let message = format!("HF_HUB_OFFLINE is {offline}, so nothing is downloaded");
            return Err(Error::Config(message));
        }
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let saved = || {
            let path = variable("HF_TOKEN_PATH").map_or_else(|| home().join("token"), Into::into);
            std::fs::read_to_string(path).ok()
        };
        let token = text("HF_TOKEN").or_else(saved).map(|token| token.trim().to_owned());
        Self::new(&endpoint, token.filter(|token| !token.is_empty()))
    }

    /// A server at an address such as `https://huggingface.co`.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment).
    pub fn new(endpoint: &str, token: Option<String>) -> Result<Self> {
        let wrong = |what: &str| Err(Error::Config(format!("HF_ENDPOINT is {endpoint:?}: {what}")));
        match endpoint.split_once("://") {
            Some(("http", host)) if !host.is_empty() => {}
            Some(("https", host)) if !host.is_empty() && cfg!(feature = "https") => {}
            Some(("https", _)) => {
                return wrong(
                    "this program was built without HTTPS; build it with the feature `https`, or name a mirror of http://",
                );
            }
            _ => return wrong("expected the address of a server, such as https://huggingface.co"),
        }
        let config = Agent::config_builder()
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .http_status_as_error(false)
            // Followed here: the token is for the Hub alone.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent("fulgurite");
        let agent = config.build().into();
        let pauses = [0, 1, 2, 4, 8].map(Duration::from_secs).to_vec();
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Ok(Self { agent, endpoint, token, pauses, body_timeout: Duration::from_secs(300) })
    }

    /// Other pauses before the attempts after a failed one; by default 0, 1, 2, 4 and 8 seconds.
    pub fn with_pauses(self, pauses: impl IntoIterator<Item = Duration>) -> Self {
        Self { pauses: pauses.into_iter().collect(), ..self }
    }

    /// Another time after which a connection that sends a file is given up and the rest of the file
    /// asked for; by default five minutes.
    pub fn with_body_timeout(self, body_timeout: Duration) -> Self {
        Self { body_timeout, ..self }
    }

    /// The files of a repository, and its commit.
    pub(crate) fn list(&self, repository: &Repository, revision: &str) -> Result<Listing, Failure> {
        let kind = if repository.is_dataset() { "datasets" } else { "models" };
        let name = repository.name();
        let url = format!("{}/api/{kind}/{name}/revision/{}", self.endpoint, escaped(revision));
        let mut answer = self.get(&url, None)?;
        let said = |error: &dyn std::fmt::Display| {
            Failure::transient(Error::other(format!(
                "{url}: not a repository's list of files: {error}"
            )))
        };
        let body = answer.body_mut().with_config().limit(MOST_LISTED_BYTES);
        let text = body.read_to_string().map_err(|error| said(&error))?;
        serde_json::from_str(&text).map_err(|error| said(&error))
    }

    fn address(&self, Wanted { repository, commit, file }: Wanted<'_>) -> String {
        let file: Vec<_> = file.split('/').map(escaped).collect();
        format!("{}/{repository}/resolve/{commit}/{}", self.endpoint, file.join("/"))
    }

    /// Asks the Hub for a file's name by contents and its length, both without compression. The
    /// server that sends large files knows less.
    pub(crate) fn head(&self, wanted: Wanted<'_>) -> Result<FileHead, Failure> {
        let mut url = self.address(wanted);
        let mut head = None;
        for _ in 0..MOST_REDIRECTS {
            let mut request = self.agent.head(&url).header("Accept-Encoding", "identity");
            if let Some(token) = self.token_for(&url) {
                request = request.header("Authorization", token);
            }
            let answer = request.call().map_err(|error| unreachable_server(&url, &error))?;
            let header =
                |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
            let etag = header("x-linked-etag").or_else(|| header("etag"));
            let bytes = header("x-linked-size").or_else(|| header("content-length"));
            let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
            let is_name = |etag: &String| {
                !etag.is_empty() && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            };
            let linked = header("x-linked-etag").is_some() || answer.status().is_success();
            if let (Some(etag), Some(bytes), true) =
                (etag.filter(is_name), bytes.and_then(|bytes| bytes.parse().ok()), linked)
            {
                head = Some(FileHead { etag, bytes });
                break;
            }
            match next(&url, &answer) {
                Some(to) => url = to,
                None => {
                    check(&url, answer.status().as_u16(), "")?;
                    break;
                }
            }
        }
        head.ok_or_else(|| {
            let message = format!(
                "{url}: the server gives no name and size of this file (ETag, Content-Length)"
            );
            Failure::lasting(Error::other(message))
        })
    }

    /// Starts to receive a file, from an offset on if the server can.
    pub(crate) fn open(&self, wanted: Wanted<'_>, offset: u64) -> Result<Response<Body>, Failure> {
        let range = (offset > 0).then(|| format!("bytes={offset}-"));
        self.get(&self.address(wanted), range.as_deref())
    }

    fn get(&self, url: &str, range: Option<&str>) -> Result<Response<Body>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MOST_REDIRECTS {
            let request = self.agent.get(&url).config().timeout_recv_body(Some(self.body_timeout));
            let mut request = request.build().header("Accept-Encoding", "identity");
            if let Some(token) = self.token_for(&url) {
                request = request.header("Authorization", token);
            }
            if let Some(range) = range {
                request = request.header("Range", range);
            }
            let mut answer = request.call().map_err(|error| unreachable_server(&url, &error))?;
            if let Some(to) = next(&url, &answer) {
                url = to;
                continue;
            }
            let status = answer.status().as_u16();
            if status != 200 && status != 206 {
                let said = answer.body_mut().with_config().limit(1 << 16).read_to_string();
                check(&url, status, &said.unwrap_or_default())?;
            }
            return Ok(answer);
        }
        Err(Failure::lasting(Error::other(format!("{url}: more than {MOST_REDIRECTS} redirects"))))
    }

    /// The header with the token, for addresses of the Hub itself.
    fn token_for(&self, url: &str) -> Option<String> {
        let own = url.strip_prefix(&self.endpoint).is_some_and(|rest| rest.starts_with('/'));
        self.token.as_ref().filter(|_| own).map(|token| format!("Bearer {token}"))
    }
}

/// Where a redirect leads.
fn next(url: &str, answer: &Response<Body>) -> Option<String> {
    if !answer.status().is_redirection() {
        return None;
    }
    let to = answer.headers().get("location")?.to_str().ok()?;
    if !to.starts_with('/') {
        return Some(to.to_owned());
    }
    let base: Uri = url.parse().ok()?;
    Some(format!("{}://{}{to}", base.scheme_str()?, base.authority()?))
}

/// A part of a path as it stands in an address.
fn escaped(text: &str) -> String {
    let keeps = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let escape =
        |byte| if keeps(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

fn unreachable_server(url: &str, error: &ureq::Error) -> Failure {
    Failure::transient(Error::other(format!("{url}: {error}")))
}

/// An error if a status is not one of success.
fn check(url: &str, status: u16, said: &str) -> Result<(), Failure> {
    let advice = match status {
        200..300 => return Ok(()),
        401 | 403 => {
            "; if the repository is private or gated, ask for access on its page and set HF_TOKEN"
        }
        404 => {
            "; there is no such repository, revision or file, or it is private: then set HF_TOKEN"
        }
        _ => "",
    };
    let said = if said.is_empty() { String::new() } else { format!(": {}", quoted(said, 300)) };
    let error = Error::other(format!("{url}: status {status}{said}{advice}"));
    let transient = status >= 500 || status == 429 || status == 408;
    Err(Failure { error, transient, progress: false })
}
