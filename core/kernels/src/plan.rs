//! Launches, as data: arguments with types, tables, and memory that is needed besides.

use std::marker::PhantomData;

use crate::{Float, Product, Source};

/// Where an argument points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// An address on the device; 0 for none.
    Address(u64),
    /// A table of the plan, by its number.
    Table(usize),
    /// Memory that the plan asks for, by its number.
    Scratch(usize),
}

/// One argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// A pointer.
    Pointer(Target),
    /// A number, as its bits. Those of one with 32 bits are the lower ones.
    Number(u64),
}

/// A parameter's type: what the table of kernels is written with.
pub trait Parameter {
    /// As the kernel in C declares it.
    fn c_type() -> String;
    /// As PTX declares it.
    const PTX: &'static str;
    /// The value, as it is given to a kernel.
    fn argument(self) -> Argument;
}

/// A type that kernels point to.
pub trait Pointee {
    /// Its name in C.
    const C_NAME: &'static str;
}

/// A pointer to what a kernel reads.
#[derive(Debug, PartialEq)]
pub struct In<T>(Target, PhantomData<fn(T)>);

/// A pointer to what a kernel writes, or changes.
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
            /// A pointer to an address on the device. The caller knows what is there.
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
    /// Where it points.
    pub fn target(self) -> Target {
        self.0
    }

    /// To read what another kernel has written.
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

/// What a pointer that says nothing of its elements points to.
#[derive(Debug, Clone, Copy)]
pub struct Unknown;

macro_rules! pointees {
    ($($ty:ty => $name:literal),*) => {$(impl Pointee for $ty {
        const C_NAME: &'static str = $name;
    })*};
}
pointees!(
    f32 => "float", f64 => "double", u32 => "u32", u64 => "u64", Bf16 => "bf16", F16 => "f16", Unknown => "void"
);

/// An element type that kernels are compiled for.
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

/// An element type that tensor cores multiply without rounding it first.
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
    /// Its name in C.
    const C_NAME: &'static str;
    /// Whether it is an address on the device.
    const IS_ADDRESS: bool = false;
    /// Appends its bytes.
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

/// A field of a row, to compare with the struct in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Bytes from the row's start.
    pub offset: usize,
    /// Bytes that it takes.
    pub size: usize,
    /// Whether it is an address on the device.
    pub is_address: bool,
}

/// A row of a table that a kernel reads; a struct in C with the same name and fields.
pub trait Row: Pointee {
    /// Its fields, in order.
    fn fields() -> Vec<Field>;
    /// Appends its bytes.
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

/// A launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The kernel's name.
    pub kernel: &'static str,
    /// The file that it is in.
    pub source: Source,
    /// Blocks, each of [`THREADS`](crate::THREADS) threads.
    pub blocks: u32,
    /// Bytes of shared memory for each block, besides what the kernel declares.
    pub shared_bytes: u32,
    /// Its arguments, in order.
    pub arguments: Vec<Argument>,
}

/// A piece of a plan's work.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A launch of a kernel.
    Launch(Call),
    /// A product of matrices.
    Product(Product),
}

/// A table: its bytes, and where there are addresses in them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    pub(crate) bytes: Vec<u8>,
    pub(crate) addresses: Vec<usize>,
}

impl Table {
    /// What is copied to the device.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Offsets of the addresses in it.
    pub fn addresses(&self) -> &[usize] {
        &self.addresses
    }
}

/// Launches and products in order, and what they need. A plan without any has nothing to do.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    work: Vec<Work>,
    tables: Vec<Table>,
    scratch: Vec<usize>,
}

impl Plan {
    /// What is done, in order.
    pub fn work(&self) -> &[Work] {
        &self.work
    }

    /// The launches among it.
    pub fn calls(&self) -> Vec<&Call> {
        self.work
            .iter()
            .filter_map(|work| match work {
                Work::Launch(call) => Some(call),
                Work::Product(_) => None,
            })
            .collect()
    }

    /// The tables, by number.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Bytes of each memory that is needed while the plan is carried out, by number.
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

    /// Asks for memory for `count` elements, which holds garbage.
    pub fn scratch<T>(&mut self, count: usize) -> Out<T> {
        self.scratch.push(count * size_of::<T>());
        Out(Target::Scratch(self.scratch.len() - 1), PhantomData)
    }

    /// Adds a launch, unless it has no blocks: CUDA refuses those.
    pub fn call(&mut self, call: Call) {
        if call.blocks > 0 {
            self.work.push(Work::Launch(call));
        }
    }

    /// Adds a product, unless it has no elements.
    pub fn product(&mut self, product: Product) {
        if product.m > 0 && product.n > 0 && product.batch > 0 {
            self.work.push(Work::Product(product));
        }
    }
}
