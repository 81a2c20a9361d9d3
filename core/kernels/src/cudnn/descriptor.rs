//! Descriptors of cuDNN's backend API, with typed attributes.
#![allow(unsafe_code)] // Calls of a C library.

use std::ffi::{c_int, c_void};

use super::constants::{Attribute, DataType, HeuristicsMode, Kind, PointwiseMode, ReduceOperator};
use super::library::{Fault, Handle, Library, RawDescriptor};

/// A value of an attribute.
///
/// # Safety
/// Values must have the layout that `cudnnBackendAttributeType_t` defines for [`TYPE`](Self::TYPE).
pub(super) unsafe trait Value: Copy {
    const TYPE: c_int;
}

/// A pointer that cuDNN keeps, and dereferences only when a plan runs.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Pointer(pub(super) *mut c_void);

macro_rules! values {
    ($($type:ty => $number:literal;)*) => {$(
        // SAFETY: the layout of this type in the API; C enums have 32 bits.
        unsafe impl Value for $type {
            const TYPE: c_int = $number;
        }
    )*};
}
values! {
    Handle => 0;
    DataType => 1;
    bool => 2;
    i64 => 3;
    Pointer => 6;
    HeuristicsMode => 8;
    PointwiseMode => 14;
    RawDescriptor => 15;
    ReduceOperator => 18;
    u8 => 24;
}

/// A finalized descriptor, destroyed on drop.
#[derive(Debug)]
pub(super) struct Descriptor {
    raw: RawDescriptor,
    kind: Kind,
    library: Shared,
}

/// A descriptor whose attributes are being set.
#[derive(Debug)]
pub(super) struct Builder(Descriptor);

#[derive(Clone, Copy)]
struct Shared(&'static Library);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.description())
    }
}

// SAFETY: a descriptor is not bound to the thread that made it, and is not `Sync`, so threads do
// not share it.
unsafe impl Send for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was made, and is destroyed once. An error could only say that it
        // was not made.
        let _ = unsafe { (self.library.0.destroy_descriptor)(self.raw) };
    }
}

impl Builder {
    /// An empty descriptor.
    pub(super) fn new(library: &'static Library, kind: Kind) -> Result<Self, Fault> {
        let mut raw = RawDescriptor(std::ptr::null_mut());
        // SAFETY: a pointer to a local variable, which cuDNN writes.
        let status = unsafe { (library.create_descriptor)(kind as c_int, &raw mut raw) };
        library.check(format_args!("making a descriptor of {kind:?}"), status)?;
        Ok(Self(Descriptor { raw, kind, library: Shared(library) }))
    }

    /// Sets an attribute to these values.
    pub(super) fn set<T: Value>(self, attribute: Attribute, values: &[T]) -> Result<Self, Fault> {
        let Descriptor { raw, kind, library } = self.0;
        let count = values.len() as i64;
        // SAFETY: the descriptor was made, and the memory holds `count` values of the type, which
        // cuDNN copies. cuDNN refuses a type that does not match the attribute.
        let status = unsafe {
            (library.0.set_attribute)(
                raw,
                attribute as c_int,
                T::TYPE,
                count,
                values.as_ptr().cast(),
            )
        };
        library.0.check(format_args!("setting {attribute:?} of {kind:?}"), status)?;
        Ok(self)
    }

    /// Sets an attribute to one value.
    pub(super) fn one<T: Value>(self, attribute: Attribute, value: T) -> Result<Self, Fault> {
        self.set(attribute, &[value])
    }

    /// Sets an attribute to other descriptors, which must outlive this one.
    pub(super) fn link(
        self,
        attribute: Attribute,
        descriptors: &[&Descriptor],
    ) -> Result<Self, Fault> {
        let raw: Vec<RawDescriptor> = descriptors.iter().map(|descriptor| descriptor.raw).collect();
        self.set(attribute, &raw)
    }

    /// Has cuDNN check the descriptor. Its attributes are fixed from now on.
    pub(super) fn finalize(self) -> Result<Descriptor, Fault> {
        let Descriptor { raw, kind, library } = &self.0;
        // SAFETY: a descriptor that was made.
        let status = unsafe { (library.0.finalize)(*raw) };
        library.0.check(format_args!("finalizing {kind:?}"), status)?;
        Ok(self.0)
    }
}

impl Descriptor {
    /// Returns the raw descriptor, for calls.
    pub(super) fn raw(&self) -> RawDescriptor {
        self.raw
    }

    /// Returns the library that made the descriptor.
    pub(super) fn library(&self) -> &'static Library {
        self.library.0
    }

    /// Reads values of an attribute into `room`. Returns how many values there are, possibly more
    /// than fit.
    fn read<T: Value>(&self, attribute: Attribute, room: &mut [T]) -> Result<usize, Fault> {
        let (library, kind, mut count) = (self.library.0, self.kind, 0_i64);
        let place = if room.is_empty() { std::ptr::null_mut() } else { room.as_mut_ptr().cast() };
        // SAFETY: a finalized descriptor, and room for as many values of the type as the call says.
        let status = unsafe {
            (library.get_attribute)(
                self.raw,
                attribute as c_int,
                T::TYPE,
                room.len() as i64,
                &raw mut count,
                place,
            )
        };
        library.check(format_args!("reading {attribute:?} of {kind:?}"), status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the only value of an attribute.
    pub(super) fn get<T: Value + Default>(&self, attribute: Attribute) -> Result<T, Fault> {
        let mut value = [T::default()];
        match self.read(attribute, &mut value)? {
            1 => Ok(value[0]),
            n => Err(Fault::without_status(
                format!("reading {attribute:?}"),
                "one value was expected",
                format!("there are {n}"),
            )),
        }
    }

    /// Returns a text attribute.
    pub(super) fn text(&self, attribute: Attribute) -> Result<String, Fault> {
        let mut bytes = vec![0_u8; self.read::<u8>(attribute, &mut [])?];
        let count = self.read(attribute, &mut bytes)?;
        bytes.truncate(count);
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// Returns the descriptors of an attribute, best first.
    pub(super) fn list(&self, attribute: Attribute, kind: Kind) -> Result<Vec<Self>, Fault> {
        let most = self.read::<RawDescriptor>(attribute, &mut [])?;
        // cuDNN fills descriptors that the caller has made.
        let made = (0..most).map(|_| Builder::new(self.library.0, kind));
        let mut made = made.collect::<Result<Vec<Builder>, Fault>>()?;
        let mut raw: Vec<RawDescriptor> = made.iter().map(|builder| builder.0.raw).collect();
        let count = self.read(attribute, &mut raw)?;
        made.truncate(count);
        Ok(made.into_iter().map(|builder| builder.0).collect())
    }
}
