//! The thread that runs network requests.

use std::future::Future;
use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use fulgurite_error::{Error, Result};

/// A tokio runtime of one thread, on which uploads continue while the caller computes.
#[derive(Debug)]
pub(crate) struct Driver {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The future result of a request.
#[derive(Debug)]
pub(crate) struct Pending<T>(mpsc::Receiver<object_store::Result<T>>);

impl<T> Pending<T> {
    /// Waits for the result.
    pub(crate) fn wait(self) -> object_store::Result<T> {
        self.0.recv().unwrap_or_else(|_| {
            Err(object_store::Error::Generic {
                store: "fulgurite",
                source: "the request was dropped before it was done".into(),
            })
        })
    }
}

impl Driver {
    pub(crate) fn start() -> Result<Self> {
        let failed = || Error::io("starting", "the thread for requests to the object store");
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed())?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("object-store".to_owned())
            .spawn(move || {
                // An error means that the driver was dropped too.
                let _ = runtime.block_on(stopped);
            })
            .map_err(failed())?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Starts a request.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.handle.spawn(async move {
            // After an earlier failure the result is not awaited.
            let _ = sender.send(request.await);
        });
        Pending(receiver)
    }

    /// Starts a request and waits for it.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> object_store::Result<T> {
        self.spawn(request).wait()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The interrupted request has reported the thread's panic.
            let _ = thread.join();
        }
    }
}
