//! Launches as data: typed arguments, tables and scratch memory.

use std::marker::PhantomData;

use crate::{Float, Product, Source};

/// The target of a pointer argument.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// An address on the device; 0 for none.
    Address(u64),
    /// A table of the plan, by its index.
    Table(usize),
    /// Scratch memory of the plan, by its index.
    Scratch(usize),
}

/// One argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// A pointer.
    Pointer(Target),
    /// A number, as its bits. A 32-bit number is in the lower half.
    Number(u64),
}

/// A type of kernel parameters, as in the table of kernels.
pub trait Parameter {
    /// The type in the kernel's C declaration.
    fn c_type() -> String;
    /// The type in PTX.
    const PTX: &'static str;
    /// Converts the value to a launch argument.
    fn argument(self) -> Argument;
}

/// A type that kernels point to.
pub trait Pointee {
    /// Its name in C.
    const C_NAME: &'static str;
}

/// A pointer that a kernel reads from.
#[derive(Debug, PartialEq)]
pub struct In<T>(Target, PhantomData<fn(T)>);

/// A pointer that a kernel writes to.
#[derive(Debug, PartialEq)]
pub struct Out<T>(Target, PhantomData<fn(T)>);

macro_rules! pointers {
    ($($name:ident => $end:literal),*) => {$(
        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $name<T> {}

        impl<T> $name<T> {
            /// A pointer to an address on the device. The element type is not checked.
            pub fn at(address: u64) -> Self {
                Self(Target::Address(address), PhantomData)
            }

            /// No pointer.
            pub fn null() -> Self {
                Self::at(0)
            }
        }

        impl<T: Pointee> Parameter for $name<T> {
            fn c_type() -> String {
                format!($end, T::C_NAME)
            }
            const PTX: &'static str = "u64";
            fn argument(self) -> Argument {
                Argument::Pointer(self.0)
            }
        }
    )*};
}
pointers!(In => "const {} *", Out => "{} *");

impl<T> Out<T> {
    /// Returns the pointer's target.
    pub fn target(self) -> Target {
        self.0
    }

    /// Returns a read pointer to the same memory, for a later kernel.
    pub fn read(self) -> In<T> {
        In(self.0, PhantomData)
    }
}

/// The element type of bf16 in memory.
#[derive(Debug, Clone, Copy)]
pub struct Bf16 {
    _bits: u16,
}
/// The element type of f16 in memory.
#[derive(Debug, Clone, Copy)]
pub struct F16 {
    _bits: u16,
}

/// The target of a `void` pointer.
#[derive(Debug, Clone, Copy)]
pub struct Unknown;

macro_rules! pointees {
    ($($ty:ty => $name:literal),*) => {$(impl Pointee for $ty {
        const C_NAME: &'static str = $name;
    })*};
}
pointees!(
    f32 => "float", f64 => "double", u8 => "u8", u32 => "u32", u64 => "u64", Bf16 => "bf16", F16 => "f16", Unknown => "void"
);

/// An element type with compiled kernels.
pub trait Element: Pointee {
    /// Its dtype.
    const FLOAT: Float;
}

macro_rules! elements {
    ($($ty:ty => $float:ident),*) => {$(impl Element for $ty {
        const FLOAT: Float = Float::$float;
    })*};
}
elements!(f32 => F32, Bf16 => Bf16, F16 => F16);

/// A 16-bit element type that tensor cores multiply without rounding.
pub trait Half: Element {}
impl Half for Bf16 {}
impl Half for F16 {}

macro_rules! numbers {
    ($($ty:ty => $name:literal, $ptx:literal, |$x:ident| $bits:expr;)*) => {$(
        impl Parameter for $ty {
            fn c_type() -> String {
                $name.to_owned()
            }
            const PTX: &'static str = $ptx;
            fn argument(self) -> Argument {
                let $x = self;
                Argument::Number($bits)
            }
        }
    )*};
}
numbers! {
    u32 => "u32", "u32", |x| u64::from(x);
    u64 => "u64", "u64", |x| x;
    f32 => "float", "f32", |x| u64::from(x.to_bits());
    f64 => "double", "f64", |x| x.to_bits();
}

/// The type of a row's field.
pub trait FieldType {
    /// The type's name in C.
    const C_NAME: &'static str;
    /// Whether the type is an address on the device.
    const IS_ADDRESS: bool = false;
    /// Appends the field's bytes.
    fn write(&self, bytes: &mut Vec<u8>);
}

/// An address on the device, as the field of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Address(pub u64);

impl FieldType for Address {
    const C_NAME: &'static str = "void *";
    const IS_ADDRESS: bool = true;
    fn write(&self, bytes: &mut Vec<u8>) {
        self.0.write(bytes);
    }
}

macro_rules! field_types {
    ($($ty:ty => $name:literal),*) => {$(impl FieldType for $ty {
        const C_NAME: &'static str = $name;
        fn write(&self, bytes: &mut Vec<u8>) {
            bytes.extend_from_slice(&self.to_le_bytes());
        }
    })*};
}
field_types!(u32 => "u32", u64 => "u64", f32 => "float");

/// A field of a row, for comparison with the struct in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Offset from the row's start, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
    /// Whether the field is an address on the device.
    pub is_address: bool,
}

/// A row of a table that a kernel reads. A struct in C has the same name and fields.
pub trait Row: Pointee {
    /// Returns the fields, in order.
    fn fields() -> Vec<Field>;
    /// Appends the row's bytes.
    fn write(&self, bytes: &mut Vec<u8>);
}

/// Defines rows.
macro_rules! rows {
    ($($(#[$attribute:meta])* pub struct $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $ty:ty,)*
    })*) => {$(
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $name {
            $($(#[$doc])* pub $field: $ty,)*
        }

        impl $crate::plan::Pointee for $name {
            const C_NAME: &'static str = stringify!($name);
        }

        impl $crate::plan::Row for $name {
            fn fields() -> Vec<$crate::plan::Field> {
                let mut offset = 0;
                let mut fields = Vec::new();
                $(
                    fields.push($crate::plan::Field {
                        name: stringify!($field),
                        offset,
                        size: size_of::<$ty>(),
                        is_address: <$ty as $crate::plan::FieldType>::IS_ADDRESS,
                    });
                    offset += size_of::<$ty>();
                )*
                let _ = offset;
                fields
            }

            fn write(&self, bytes: &mut Vec<u8>) {
                $($crate::plan::FieldType::write(&self.$field, bytes);)*
            }
        }
    )*};
}
pub(crate) use rows;

/// A launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The file of the kernel.
    pub source: Source,
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of each block, in bytes.
    pub shared_bytes: u32,
    /// The arguments, in order.
    pub arguments: Vec<Argument>,
}

/// A step of a plan.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A launch of a kernel.
    Launch(Call),
    /// A product of matrices.
    Product(Product),
}

/// A table: its bytes, and the offsets of the addresses in them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    pub(crate) bytes: Vec<u8>,
    pub(crate) addresses: Vec<usize>,
}

impl Table {
    /// Returns the bytes to copy to the device.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offsets of the addresses in the bytes.
    pub fn addresses(&self) -> &[usize] {
        &self.addresses
    }
}

/// Launches and products in order, with their tables and scratch memory. It may be empty.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    work: Vec<Work>,
    tables: Vec<Table>,
    scratch: Vec<usize>,
}

impl Plan {
    /// Returns the launches and products, in order.
    pub fn work(&self) -> &[Work] {
        &self.work
    }

    /// Returns the launches only.
    pub fn calls(&self) -> Vec<&Call> {
        self.work
            .iter()
            .filter_map(|work| match work {
                Work::Launch(call) => Some(call),
                Work::Product(_) => None,
            })
            .collect()
    }

    /// Returns the tables, by index.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Returns the size of each scratch buffer in bytes, by index. They are needed while the plan
    /// runs.
    pub fn scratch_bytes(&self) -> &[usize] {
        &self.scratch
    }

    /// Adds a table of rows.
    pub fn table<T: Row>(&mut self, rows: impl IntoIterator<Item = T>) -> In<T> {
        let offsets: Vec<usize> =
            T::fields().iter().filter(|f| f.is_address).map(|f| f.offset).collect();
        let mut table = Table::default();
        for row in rows {
            let start = table.bytes.len();
            row.write(&mut table.bytes);
            table.addresses.extend(offsets.iter().map(|offset| start + offset));
        }
        self.tables.push(table);
        In(Target::Table(self.tables.len() - 1), PhantomData)
    }

    /// Adds a table of numbers.
    pub fn numbers<T: FieldType>(&mut self, numbers: &[T]) -> In<T> {
        let mut table = Table::default();
        numbers.iter().for_each(|number| number.write(&mut table.bytes));
        self.tables.push(table);
        In(Target::Table(self.tables.len() - 1), PhantomData)
    }

    /// Asks for uninitialised scratch memory for `count` elements.
    pub fn scratch<T>(&mut self, count: usize) -> Out<T> {
        self.scratch.push(count * size_of::<T>());
        Out(Target::Scratch(self.scratch.len() - 1), PhantomData)
    }

    /// Adds a launch, unless its number of blocks is 0, which CUDA refuses.
    pub fn call(&mut self, call: Call) {
        if call.blocks > 0 {
            self.work.push(Work::Launch(call));
        }
    }

    /// Adds a product, unless its result is empty.
    pub fn product(&mut self, product: Product) {
        if product.m > 0 && product.n > 0 && product.batch > 0 {
            self.work.push(Work::Product(product));
        }
    }
}
