//! The MPI calls in use, with errors as values.
#![allow(unsafe_code)] // A C library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use mpi_sys as ffi;

/// An error of MPI.
#[derive(Debug)]
pub(crate) struct Fault {
    /// Whether a message was longer than the memory for it.
    pub(crate) truncated: bool,
    /// MPI's description.
    pub(crate) text: String,
}

/// MPI, initialised, with the communicator of this process.
pub(crate) struct Library {
    pub(crate) comm: ffi::MPI_Comm,
    /// Held during each call if MPI allows only one thread at a time.
    lock: Option<Mutex<()>>,
}

// SAFETY: any thread may use a communicator. Several may at a time if MPI allows it; otherwise the
// lock serialises them.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Facts from MPI about this process and the library.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The highest tag.
    pub(crate) last_tag: usize,
    /// `Open MPI v4.1.4, …`
    pub(crate) version: String,
    /// The host's name.
    pub(crate) host: String,
    /// Whether the program has initialised MPI, and must finalise it.
    pub(crate) of_program: bool,
}

/// A request under way, or the null request.
#[derive(Clone, Copy, PartialEq)]
#[repr(transparent)]
pub(crate) struct Request(ffi::MPI_Request);

// SAFETY: any thread may use the handle, one at a time.
unsafe impl Send for Request {}

impl Request {
    /// The null request, which a request becomes when it is done.
    pub(crate) fn none() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_REQUEST_NULL })
    }
}

/// Output buffers for testing requests.
#[derive(Default)]
pub(crate) struct Tested {
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

/// A finished message.
pub(crate) struct Done {
    /// Index of its request.
    pub(crate) index: usize,
    pub(crate) fault: Option<Fault>,
    /// Number of received bytes.
    pub(crate) bytes: usize,
}

impl Library {
    /// Initialises MPI, unless the program has. Blocks until all processes of the MPI job do the
    /// same.
    pub(crate) fn start() -> Result<(Self, Facts), String> {
        let (mut before, mut after) = (0, 0);
        // SAFETY: both functions may be called at any time; the pointers are to integers.
        unsafe {
            ffi::MPI_Initialized(&mut before);
            ffi::MPI_Finalized(&mut after);
        }
        if after != 0 {
            return Err("the program has finalised MPI, which cannot be started again".to_owned());
        }
        let of_program = before != 0;
        let mut level = 0;
        // SAFETY: until this returns, only one thread calls MPI, unless the program has initialised
        // MPI itself. Null pointers are allowed in place of the program's arguments.
        let code = unsafe {
            match of_program {
                true => ffi::MPI_Query_thread(&mut level),
                false => ffi::MPI_Init_thread(
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    ffi::RSMPI_THREAD_MULTIPLE,
                    &mut level,
                ),
            }
        };
        // SAFETY: constants of the library.
        let (multiple, serialized, world) = unsafe {
            (ffi::RSMPI_THREAD_MULTIPLE, ffi::RSMPI_THREAD_SERIALIZED, ffi::RSMPI_COMM_WORLD)
        };
        check(code).map_err(|fault| format!("MPI_Init_thread: {}", fault.text))?;
        if level < serialized {
            return Err(
                "the MPI library was built for one thread (MPI_THREAD_SINGLE or MPI_THREAD_FUNNELED), but \
                 messages are exchanged by several: it must be built with MPI_THREAD_MULTIPLE"
                    .to_owned(),
            );
        }
        let lock = (level < multiple).then(Mutex::default);
        let library = Self { comm: world, lock };
        let facts = library.facts(of_program).map_err(|fault| fault.text)?;
        Ok((library, facts))
    }

    fn facts(&self, of_program: bool) -> Result<Facts, Fault> {
        let (mut rank, mut size, mut found) = (0, 0, 0);
        let mut last_tag: *mut c_int = std::ptr::null_mut();
        let out = (&raw mut last_tag).cast::<c_void>();
        // SAFETY: a valid communicator and valid pointers to the results. The attribute is the
        // address of an integer.
        self.call(|| unsafe { ffi::MPI_Comm_rank(self.comm, &mut rank) })?;
        // SAFETY: as above.
        self.call(|| unsafe { ffi::MPI_Comm_size(self.comm, &mut size) })?;
        let tag_bound = ffi::MPI_TAG_UB as c_int;
        // SAFETY: as above.
        self.call(|| unsafe { ffi::MPI_Comm_get_attr(self.comm, tag_bound, out, &mut found) })?;
        // Every library allows at least this tag.
        let mut last = 32767;
        if found != 0 && !last_tag.is_null() {
            // SAFETY: MPI has set the pointer to an integer that lives as long as the communicator.
            last = unsafe { *last_tag };
        }
        // SAFETY: the function writes at most the number of bytes in its constant, which is below
        // the buffer's size.
        let version = self.text(|text, len| unsafe { ffi::MPI_Get_library_version(text, len) })?;
        // SAFETY: as above.
        let host = self.text(|text, len| unsafe { ffi::MPI_Get_processor_name(text, len) })?;
        Ok(Facts {
            rank: rank as usize,
            size: size as usize,
            last_tag: last as usize,
            version: version.lines().next().unwrap_or_default().trim().to_owned(),
            host,
            of_program,
        })
    }

    /// Returns the text that an MPI function writes.
    fn text(&self, call: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> Result<String, Fault> {
        // MPICH's longest is 8192.
        let mut text = vec![0u8; 16384];
        let mut len = 0;
        self.call(|| call(text.as_mut_ptr().cast(), &mut len))?;
        let text = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy);
        Ok(text.map(String::from).unwrap_or_default())
    }

    /// Calls MPI. If MPI allows only one thread at a time, the lock is held meanwhile.
    pub(crate) fn call(&self, call: impl FnOnce() -> c_int) -> Result<(), Fault> {
        let guard = self.lock.as_ref();
        // The lock guards no data of ours.
        let _guard = guard.map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        check(call())
    }

    /// Makes the communicator return errors instead of ending the process. With `all`, also the
    /// world and self communicators.
    pub(crate) fn return_errors(&self, all: bool) -> Result<(), Fault> {
        // SAFETY: constants of the library.
        let (handler, world, own) =
            unsafe { (ffi::RSMPI_ERRORS_RETURN, ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF) };
        let others = if all { &[world, own][..] } else { &[] };
        for &comm in [self.comm].iter().chain(others) {
            // SAFETY: a communicator and an error handler.
            self.call(|| unsafe { ffi::MPI_Comm_set_errhandler(comm, handler) })?;
        }
        Ok(())
    }

    /// Begins to duplicate the communicator. The duplicate is usable when the request is done.
    /// Collective.
    pub(crate) fn duplicate(&self) -> Result<(Box<Duplicate>, Request), Fault> {
        // SAFETY: a constant of the library. The box keeps the address until the request is done.
        let mut duplicate = Box::new(Duplicate(unsafe { ffi::RSMPI_COMM_NULL }));
        let mut request = Request::none();
        // SAFETY: valid pointers to the results. The caller keeps the box, and so the first result,
        // until the request is done.
        self.call(|| unsafe { ffi::MPI_Comm_idup(self.comm, &mut duplicate.0, &mut request.0) })?;
        Ok((duplicate, request))
    }

    /// Returns this library with a finished duplicate as its communicator.
    pub(crate) fn with(self, duplicate: &Duplicate) -> Self {
        Self { comm: duplicate.0, lock: self.lock }
    }

    /// Begins a barrier. Collective.
    pub(crate) fn barrier(&self) -> Result<Request, Fault> {
        let mut request = Request::none();
        // SAFETY: a valid communicator and a valid pointer to the result.
        self.call(|| unsafe { ffi::MPI_Ibarrier(self.comm, &mut request.0) })?;
        Ok(request)
    }

    /// Lets MPI continue accepted messages.
    pub(crate) fn progress(&self) -> Result<(), Fault> {
        let mut flag = 0;
        // SAFETY: constants of the library.
        let (any, tag, ignore) =
            unsafe { (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG, ffi::RSMPI_STATUS_IGNORE) };
        // SAFETY: a valid communicator and a valid pointer to the result. A probe receives no data.
        self.call(|| unsafe { ffi::MPI_Iprobe(any, tag, self.comm, &mut flag, ignore) })
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The memory is valid, and is not written to until the request is done.
    pub(crate) unsafe fn send(
        &self,
        bytes: *const [u8],
        to: usize,
        tag: usize,
    ) -> Result<Request, Fault> {
        let (mut request, len) = (Request::none(), bytes.len() as c_int);
        // SAFETY: as the caller promises; a valid pointer to the result.
        self.call(|| unsafe {
            let (to, tag) = (to as c_int, tag as c_int);
            ffi::MPI_Isend(
                bytes.cast(),
                len,
                ffi::RSMPI_UINT8_T,
                to,
                tag,
                self.comm,
                &mut request.0,
            )
        })?;
        Ok(request)
    }

    /// Begins to receive.
    ///
    /// # Safety
    /// The memory is valid, and no thread accesses it until the request is done.
    pub(crate) unsafe fn receive(
        &self,
        bytes: *mut [u8],
        from: usize,
        tag: usize,
    ) -> Result<Request, Fault> {
        let (mut request, len) = (Request::none(), bytes.len() as c_int);
        // SAFETY: as the caller promises; a valid pointer to the result.
        self.call(|| unsafe {
            let (from, tag) = (from as c_int, tag as c_int);
            let bytes = bytes.cast::<c_void>();
            ffi::MPI_Irecv(bytes, len, ffi::RSMPI_UINT8_T, from, tag, self.comm, &mut request.0)
        })?;
        Ok(request)
    }

    /// Returns the requests that are done since the last test. They become null requests.
    pub(crate) fn test<'a>(
        &'a self,
        requests: &mut [Request],
        tested: &'a mut Tested,
    ) -> Result<impl Iterator<Item = Done> + 'a, Fault> {
        let Tested { indices, statuses } = tested;
        if indices.len() < requests.len() {
            indices.resize(requests.len(), 0);
            // SAFETY: a struct of integers, for which all zero bits are valid.
            statuses.resize(requests.len(), unsafe { std::mem::zeroed() });
        }
        let mut count = 0;
        let result = self.call(|| {
            // SAFETY: the arrays are at least as long as `requests`, and each request is under way
            // or null.
            unsafe {
                ffi::MPI_Testsome(
                    requests.len() as c_int,
                    requests.as_mut_ptr().cast(),
                    &mut count,
                    indices.as_mut_ptr(),
                    statuses.as_mut_ptr(),
                )
            }
        });
        let each_says = match result {
            Ok(()) => false,
            Err(_) if count > 0 => true,
            Err(fault) => return Err(fault),
        };
        // Negative (MPI_UNDEFINED) if all requests were null.
        let count = usize::try_from(count).unwrap_or(0);
        Ok(indices[..count].iter().zip(&statuses[..count]).map(move |(&index, status)| {
            let fault = if each_says { self.call(|| status.MPI_ERROR).err() } else { None };
            let mut bytes = 0;
            // SAFETY: a status written by MPI, and a valid pointer to the result.
            let counted =
                self.call(|| unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) });
            let fault = fault.or(counted.err());
            Done { index: index as usize, fault, bytes: usize::try_from(bytes).unwrap_or(0) }
        }))
    }

    /// Cancels a receive if that is still possible. Does not wait.
    pub(crate) fn cancel(&self, request: &mut Request) {
        // SAFETY: the request is under way. An error is harmless, as the memory stays valid.
        let _ = self.call(|| unsafe { ffi::MPI_Cancel(&mut request.0) });
    }

    /// Finalises MPI, on the thread that started it. Collective, and blocks.
    pub(crate) fn finalize(&self) -> Result<(), Fault> {
        // SAFETY: no thread is in a call of MPI, or calls it again.
        self.call(|| unsafe { ffi::MPI_Finalize() })
    }
}

/// A communicator that MPI is making.
pub(crate) struct Duplicate(ffi::MPI_Comm);

/// Converts a result code to an error.
fn check(code: c_int) -> Result<(), Fault> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut class = 0;
    let mut text = vec![0u8; 2 * ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: valid pointers to the results, with the length of the constant. Any thread may call
    // both functions.
    unsafe {
        ffi::MPI_Error_class(code, &mut class);
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len);
    }
    let text = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy);
    Err(Fault {
        truncated: class == ffi::MPI_ERR_TRUNCATE as c_int,
        text: text.map(|text| text.trim().to_owned()).unwrap_or_default(),
    })
}
