//! Downloads from a server of this process, which redirects, fails and lies.

mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use fulgurite_hub::{Cache, Event, Hub, Repository, Selection};

use server::{COMMIT, Fault, Server};

const WEIGHTS: usize = 3 << 20;

fn weights() -> Vec<u8> {
    (0..WEIGHTS).map(|i| (i * 7 % 251) as u8).collect()
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", b"{}".to_vec()),
        ("empty.txt", Vec::new()),
        ("model.safetensors", weights()),
        ("pytorch_model.bin", vec![1; 100]),
        ("1_Pooling/con fig#1.json", b"[1]".to_vec()),
    ]
}

fn repository() -> Repository {
    "owner/name".parse().unwrap()
}

fn download(
    server: &Server,
    cache: &Path,
) -> (fulgurite_error::Result<std::path::PathBuf>, Vec<Event>) {
    let hub = Hub::new(&server.address(), Some("secret".to_owned())).unwrap();
    download_by(&hub.with_pauses([Duration::ZERO; 5]), cache)
}

fn download_by(
    hub: &Hub,
    cache: &Path,
) -> (fulgurite_error::Result<std::path::PathBuf>, Vec<Event>) {
    let mut events = Vec::new();
    let (cache, selection) = (Cache::new(cache), Selection::default());
    let done =
        hub.download(&cache, &repository(), "main", &selection, &mut |event| events.push(event));
    (done, events)
}

#[test]
fn repositories_come_into_the_cache() {
    let server = Server::start(files(), Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    assert_eq!(cache.find(&repository(), "main"), None);
    let (snapshot, events) = download(&server, folder.path());
    let snapshot = snapshot.unwrap();
    assert_eq!(events[0], Event::Listed { files: 4, present: 0 });
    assert_eq!(snapshot, folder.path().join("models--owner--name/snapshots").join(COMMIT));
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read(snapshot.join("1_Pooling/con fig#1.json")).unwrap(), b"[1]");
    assert!(fs::read(snapshot.join("empty.txt")).unwrap().is_empty());
    assert!(!snapshot.join("pytorch_model.bin").exists());
    for revision in ["main", COMMIT] {
        assert_eq!(cache.find(&repository(), revision).as_ref(), Some(&snapshot));
    }
    let link = fs::read_link(snapshot.join("1_Pooling/con fig#1.json")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    // The token goes to the Hub and not to the server of large files.
    let requests = server.requests();
    assert!(requests.iter().any(|request| request.starts_with("GET /cdn/")), "{requests:?}");
    for request in requests {
        let has_token = request.contains("Bearer secret");
        assert_eq!(has_token, !request.starts_with("GET /cdn/"), "{request}");
    }
    // Nothing is received again.
    let (again, events) = download(&server, folder.path());
    assert_eq!(again.unwrap(), snapshot);
    assert_eq!(events, [Event::Listed { files: 4, present: 4 }]);
}

#[test]
fn cut_and_failed_answers_are_taken_up_again() {
    let faults =
        vec![Fault::Status(503), Fault::Cut(1 << 20), Fault::Status(500), Fault::Cut(2 << 20)];
    let server = Server::start(files(), faults);
    let folder = tempfile::tempdir().unwrap();
    let (snapshot, events) = download(&server, folder.path());
    assert_eq!(fs::read(snapshot.unwrap().join("model.safetensors")).unwrap(), weights());
    let retries = events.iter().filter(|event| matches!(event, Event::Retries(_))).count();
    assert_eq!(retries, 4, "{events:?}");
    let received: u64 =
        events.iter().map(|e| if let Event::Received(n) = e { *n } else { 0 }).sum();
    assert_eq!(received, WEIGHTS as u64 + 5, "no byte twice");
    assert!(server.requests().iter().any(|request| request.contains("bytes=1048576-")));
}

#[test]
fn a_silent_server_is_left() {
    let server = Server::start(files(), vec![Fault::Silence(1 << 20)]);
    let folder = tempfile::tempdir().unwrap();
    let hub = Hub::new(&server.address(), None).unwrap().with_pauses([Duration::ZERO; 5]);
    let hub = hub.with_body_timeout(Duration::from_millis(500));
    let (snapshot, events) = download_by(&hub, folder.path());
    assert_eq!(fs::read(snapshot.unwrap().join("model.safetensors")).unwrap(), weights());
    assert!(
        events.iter().any(|event| matches!(event, Event::Retries(why) if why.contains("timeout"))),
        "{events:?}"
    );
}

#[test]
fn attempts_count_only_without_progress() {
    // Eight cuts, each a little further, are more than the five attempts.
    let cuts = (1..=8).map(|n| Fault::Cut(n * 200_000)).collect();
    let server = Server::start(files(), cuts);
    let folder = tempfile::tempdir().unwrap();
    download(&server, folder.path()).0.unwrap();
    let server = Server::start(files(), vec![Fault::Cut(0); 6]);
    let folder = tempfile::tempdir().unwrap();
    assert!(download(&server, folder.path()).0.is_err());
}

#[test]
fn interrupted_downloads_go_on() {
    let folder = tempfile::tempdir().unwrap();
    // The server goes away in the middle.
    let server = Server::start(files(), vec![Fault::Cut(1 << 20), Fault::Status(404)]);
    let (failed, _) = download(&server, folder.path());
    assert!(failed.unwrap_err().to_string().contains("status 404"));
    assert_eq!(Cache::new(folder.path()).find(&repository(), "main"), None, "not complete");
    let server = Server::start(files(), Vec::new());
    let (done, events) = download(&server, folder.path());
    done.unwrap();
    let begins = Event::Begins {
        file: "model.safetensors".to_owned(),
        bytes: WEIGHTS as u64,
        received: 1 << 20,
    };
    assert!(events.contains(&begins), "{events:?}");
    // A server that cannot go on sends all.
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(files(), vec![Fault::Cut(1 << 20), Fault::IgnoredRange]);
    let (done, _) = download(&server, folder.path());
    assert_eq!(fs::read(done.unwrap().join("model.safetensors")).unwrap(), weights());
}

#[test]
fn wrong_contents_do_not_enter_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(files(), vec![Fault::Flipped; 6]);
    let (done, events) = download(&server, folder.path());
    let message = done.unwrap_err().to_string();
    assert!(message.contains("model.safetensors") && message.contains("SHA-256"), "{message}");
    assert_eq!(events.iter().filter(|event| matches!(event, Event::Retries(_))).count(), 5);
    assert_eq!(Cache::new(folder.path()).find(&repository(), "main"), None);
    let server = Server::start(files(), vec![Fault::FlippedSmall; 6]);
    let message = download(&server, folder.path()).0.unwrap_err().to_string();
    assert!(message.contains("Git hash"), "{message}");
    // One wrong answer is made good by the next.
    let server = Server::start(files(), vec![Fault::Flipped]);
    let (done, _) = download(&server, folder.path());
    assert_eq!(fs::read(done.unwrap().join("model.safetensors")).unwrap(), weights());
}

#[test]
fn servers_cannot_write_outside_the_cache() {
    for name in ["../evil", "/etc/evil", "a/../../evil", "a\\b", ""] {
        let server = Server::start(vec![(name, b"x".to_vec())], Vec::new());
        let folder = tempfile::tempdir().unwrap();
        let message = download(&server, folder.path()).0.unwrap_err().to_string();
        assert!(message.contains("no path within a repository"), "{name}: {message}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    for (status, said) in [(401, "set HF_TOKEN"), (403, "gated"), (404, "no such repository")] {
        let server = Server::start(Vec::new(), vec![Fault::List(status)]);
        let message = download(&server, folder.path()).0.unwrap_err().to_string();
        assert!(
            message.contains(&format!("status {status}")) && message.contains(said),
            "{message}"
        );
        assert!(!message.contains("secret"), "{message}");
    }
    let message =
        |endpoint| Hub::new(endpoint, None).err().map_or_else(String::new, |e| e.to_string());
    assert!(message("ftp://x").contains("expected the address of a server"));
    if !cfg!(feature = "https") {
        assert!(message("https://huggingface.co").contains("the feature `https`"));
    }
}

#[test]
fn a_file_comes_once_for_all() {
    let server = Server::start(files(), Vec::new());
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| download(&server, folder.path()).0.unwrap());
        }
    });
    let sent = server.requests().iter().filter(|request| request.starts_with("GET /cdn/")).count();
    assert_eq!(sent, 1);
    let left = fs::read_dir(folder.path().join("models--owner--name/blobs")).unwrap();
    let left: Vec<_> =
        left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| !name.ends_with(".incomplete")), "{left:?}");
}
