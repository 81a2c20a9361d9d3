//! A real server that speaks S3's protocol.
//!
//! ```sh
//! python3 -m venv /tmp/moto && /tmp/moto/bin/pip install 'moto[server]'
//! FULGURITE_MOTO=/tmp/moto/bin/moto_server cargo test -p fulgurite-object-store --test it s3:: -- --ignored
//! ```
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::checkpoint::{
    CheckpointIO, DistributedCheckpoint, latest, load_into, staging_name,
};
use fulgurite_object_store::ObjectStoreIO;
use fulgurite_object_store::object_store::aws::AmazonS3Builder;
use fulgurite_test_support::checkpoints::{self, bytes, model, ranks, save_model};

struct Server {
    process: Child,
    address: String,
}

impl Server {
    /// Starts the server on a port that it chooses, with an empty bucket.
    fn start() -> Self {
        let program = std::env::var("FULGURITE_MOTO").unwrap_or_else(|_| "moto_server".to_owned());
        let mut process = Command::new(&program)
            .args(["-H", "127.0.0.1", "-p", "0"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{program}: {e}; see this file's beginning"));
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines
            .find_map(|line| Some(line.unwrap().split_once("http://")?.1.trim().to_owned()))
            .expect("the server tells its address");
        // The server would block if its output was not read.
        std::thread::spawn(move || lines.for_each(drop));
        let mut request = TcpStream::connect(&address).unwrap();
        write!(request, "PUT /bucket HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").unwrap();
        let mut answer = String::new();
        request.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(" 200 "), "{answer}");
        Self { process, address }
    }

    fn place(&self, url: &str) -> Arc<dyn CheckpointIO> {
        let store = AmazonS3Builder::new()
            .with_endpoint(format!("http://{}", self.address))
            .with_allow_http(true)
            .with_region("us-east-1")
            .with_bucket_name("bucket")
            .with_access_key_id("somebody")
            .with_secret_access_key("something")
            .build()
            .unwrap();
        let io = ObjectStoreIO::new(Arc::new(store), url).unwrap();
        Arc::new(io.with_parts(5 << 20, 3))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "needs moto_server"]
fn checkpoints_round_trip_through_s3() {
    let server = Server::start();
    let io = server.place("s3://bucket/runs/one");
    assert_eq!(io.list("").unwrap(), []);
    assert_eq!(latest(&*io).unwrap(), None);
    // Three parts in both directions, the last one short.
    let large: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
    let staged = staging_name("large");
    io.save(&format!("{staged}/model/x"), &large).unwrap();
    assert!(io.load(&format!("{staged}/model/x")).unwrap() == large);
    io.remove(&staged).unwrap();
    assert_eq!(io.list("").unwrap(), []);

    let save = |mesh, step, seed| {
        // Every rank has its own client, as in separate processes.
        let saved = ranks(checkpoints::world_size(mesh), |group| {
            let io = server.place("s3://bucket/runs/one");
            save_model(&*io, group, "last", mesh, step, seed)
        });
        for place in saved {
            assert_eq!(place.unwrap(), Path::new("s3://bucket/runs/one/last"));
        }
    };
    save([1, 2, 1], 1, 1);
    save([1, 2, 2], 2, 2);
    let names: Vec<_> = io.list("").unwrap().into_iter().map(|e| e.name).collect();
    assert_eq!(names, ["last"]);
    assert_eq!(latest(&*io).unwrap().unwrap().step, 2);
    let checkpoint = DistributedCheckpoint::open_with(&io, "last").unwrap();
    checkpoint.verify().unwrap();
    let (tree, expected) =
        (model([1, 3, 1], 1, None, DType::F32), model([1, 3, 1], 1, Some(2), DType::F32));
    load_into(&checkpoint, &tree, true).unwrap();
    for (a, b) in tree.parameters().iter().zip(expected.parameters()) {
        assert_eq!(bytes(&a.local().unwrap().values), bytes(&b.local().unwrap().values));
    }

    // The pointer is written conditionally: a second writer that has seen the same pointer fails.
    let (a, b) = (server.place("s3://bucket/two"), server.place("s3://bucket/two"));
    let staged = [staging_name("x"), staging_name("x")];
    for staged in &staged {
        a.save(&format!("{staged}/manifest.json"), b"{}").unwrap();
    }
    let results = std::thread::scope(|scope| {
        let first = scope.spawn(|| a.commit(&staged[0], "x"));
        let second = scope.spawn(|| b.commit(&staged[1], "x"));
        [first.join().unwrap(), second.join().unwrap()]
    });
    assert!(results.iter().any(Result::is_ok));
    io.remove("last").unwrap();
    assert_eq!(io.list("").unwrap(), []);
}
