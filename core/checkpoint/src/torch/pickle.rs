//! The stack machine of pickle, without calls.
//!
//! Objects are in one list and refer to each other by index. So objects can be shared, and deep
//! nesting cannot overflow the stack. Memory is counted: parsing fails before it takes more than a
//! small multiple of the pickle's size.

use std::collections::HashMap;

/// The index of an object in a [`Heap`].
pub(super) type Id = u32;

/// Maximum bytes of a pickle's objects.
const MAX_MEMORY: usize = 512 << 20;
/// Bytes that objects may take for one byte of the pickle. State dicts take about 3.
const PER_BYTE: usize = 16;
/// Bytes that objects may take in addition.
const SPARE: usize = 16 << 20;
/// Bytes of an entry of the memo.
const MEMO: usize = 32;

/// An object of a pickle. An empty collection takes no extra memory.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Object {
    None,
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(Box<str>),
    /// A class or function, by its module and its name.
    Global(Box<str>),
    Tuple(Box<[Id]>),
    List(Vec<Id>),
    Dict(Option<Box<Items>>),
    /// The result of a call, which is not executed, and the items set in it as in a dict.
    Call {
        callable: Id,
        args: Id,
        items: Option<Box<Items>>,
    },
    /// A reference to data outside of the pickle.
    Persistent(Id),
    /// Any other value: large integers, bytes, sets.
    Other,
}

/// The items of a dict.
type Items = Vec<(Id, Id)>;

/// Immutable objects that exist only once.
///
/// They are `None`, the two flags, the empty tuple, [`Object::Other`], and from [`BYTES`] on the
/// integers from 0 to 255.
const NONE: Id = 0;
const FLAGS: [Id; 2] = [1, 2];
const EMPTY: Id = 3;
const OTHER: Id = 4;
const BYTES: Id = 5;

/// The objects of a pickle; `root` is the pickled one.
#[derive(Debug)]
pub(super) struct Heap {
    objects: Vec<Object>,
    pub(super) root: Id,
}

impl Heap {
    pub(super) fn get(&self, id: Id) -> &Object {
        &self.objects[id as usize]
    }

    /// Returns the items of a dict, or of a call that items were set in.
    pub(super) fn items(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Object::Dict(items) => Some(items.as_ref().map_or(&[][..], |items| items)),
            Object::Call { items: Some(items), .. } => Some(items),
            _ => None,
        }
    }

    pub(super) fn text(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Object::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn global(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Object::Global(name) => Some(name),
            _ => None,
        }
    }

    pub(super) fn sequence(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Object::Tuple(items) => Some(items),
            Object::List(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the value of an integer or a float.
    pub(super) fn number(&self, id: Id) -> Option<f64> {
        match self.get(id) {
            Object::Int(value) => Some(*value as f64),
            Object::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the value of a size or an offset.
    pub(super) fn count(&self, id: Id) -> Option<usize> {
        match self.get(id) {
            Object::Int(value) => usize::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Returns the values of a list of sizes.
    pub(super) fn counts(&self, id: Id) -> Option<Vec<usize>> {
        let items = match self.get(id) {
            // `torch.Size`, which some versions write as a call.
            Object::Call { callable, args, .. } if self.global(*callable) == Some("torch.Size") => {
                *self.sequence(*args)?.first()?
            }
            _ => id,
        };
        self.sequence(items)?.iter().map(|&id| self.count(id)).collect()
    }
}

/// Runs a pickle. The error is a message without the file's name.
pub(super) fn parse(bytes: &[u8]) -> Result<Heap, String> {
    let mut machine = Machine::new(bytes);
    let root = machine.run().map_err(|message| {
        let at = bytes.len() - machine.rest.len();
        format!("its pickle is damaged or not of a kind that is known: {message}, at byte {at}")
    })?;
    Ok(Heap { objects: machine.objects, root })
}

struct Machine<'a> {
    rest: &'a [u8],
    objects: Vec<Object>,
    stack: Vec<Id>,
    /// The open marks, as stack depths.
    marks: Vec<u32>,
    memo: HashMap<u64, Id>,
    /// Bytes that objects may still take.
    memory: usize,
    /// The largest number of objects and marks on the stack so far.
    highest: usize,
}

type Step<T = ()> = Result<T, String>;

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let empty = Object::Tuple(Box::default());
        let once = [Object::None, Object::Bool(false), Object::Bool(true), empty, Object::Other];
        Self {
            rest: bytes,
            objects: once.into_iter().chain((0..256).map(Object::Int)).collect(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            memory: MAX_MEMORY.min(SPARE.saturating_add(bytes.len().saturating_mul(PER_BYTE))),
            highest: 0,
        }
    }

    /// Counts memory that is taken.
    fn take_memory(&mut self, bytes: usize) -> Step {
        let left = self.memory.checked_sub(bytes);
        self.memory =
            left.ok_or("its objects need far more memory than those of a state dict of this size")?;
        Ok(())
    }

    fn run(&mut self) -> Step<Id> {
        loop {
            let op = self.array::<1>()?[0];
            if op == b'.' {
                return self.pop();
            }
            self.step(op)?;
        }
    }

    fn step(&mut self, op: u8) -> Step {
        match op {
            // Protocol and frames.
            0x80 => self.take(1).map(drop),
            0x95 => self.take(8).map(drop),
            // Simple values.
            b'N' => self.push_id(NONE),
            0x88 => self.push_id(FLAGS[1]),
            0x89 => self.push_id(FLAGS[0]),
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Object::Int(value.into()))
            }
            b'K' => {
                let value = Id::from(self.array::<1>()?[0]);
                self.push_id(BYTES + value)
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push(Object::Int(value.into()))
            }
            0x8a => {
                let len = self.array::<1>()?[0].into();
                self.long(len)
            }
            0x8b => {
                let len = u32::from_le_bytes(self.array()?).into();
                self.long(len)
            }
            b'I' | b'L' => {
                let line = self.line()?;
                let digits = std::str::from_utf8(line).unwrap_or_default().trim_end_matches('L');
                let object = match digits.parse() {
                    Ok(_) if op == b'I' && line == b"00" => Object::Bool(false),
                    Ok(_) if op == b'I' && line == b"01" => Object::Bool(true),
                    Ok(value) => Object::Int(value),
                    Err(_) => Object::Other,
                };
                self.push(object)
            }
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                self.push(Object::Float(value))
            }
            b'F' => {
                let line = std::str::from_utf8(self.line()?).unwrap_or_default();
                let object = line.parse().map_or(Object::Other, Object::Float);
                self.push(object)
            }
            // Texts and bytes.
            b'X' | b'T' => {
                let len = u32::from_le_bytes(self.array()?).into();
                self.text(len)
            }
            0x8c | b'U' => {
                let len = self.array::<1>()?[0].into();
                self.text(len)
            }
            0x8d => {
                let len = u64::from_le_bytes(self.array()?);
                self.text(len)
            }
            b'V' | b'S' => {
                let line = String::from_utf8_lossy(self.line()?);
                let text = if op == b'S' { line.trim_matches(['\'', '"']) } else { &line };
                let text = text.into();
                self.push_text(text)
            }
            b'B' => {
                let len = u32::from_le_bytes(self.array()?).into();
                self.bytes(len)
            }
            b'C' => {
                let len = self.array::<1>()?[0].into();
                self.bytes(len)
            }
            0x8e | 0x96 => {
                let len = u64::from_le_bytes(self.array()?);
                self.bytes(len)
            }
            // The stack and the memo.
            b'(' => {
                self.marks.push(self.stack.len() as u32);
                self.count_stack()
            }
            b'0' => match self.marks.last() {
                Some(&mark) if mark as usize == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                _ => self.pop().map(drop),
            },
            b'1' => self.above_mark().map(drop),
            b'2' => {
                let top = self.top()?;
                self.push_id(top)
            }
            b'q' | b'r' | b'p' | 0x94 => {
                let key = match op {
                    b'q' => self.array::<1>()?[0].into(),
                    b'r' => u32::from_le_bytes(self.array()?).into(),
                    b'p' => self.number()?,
                    _ => self.memo.len() as u64,
                };
                let top = self.top()?;
                match self.memo.insert(key, top) {
                    None => self.take_memory(MEMO),
                    Some(_) => Ok(()),
                }
            }
            b'h' | b'j' | b'g' => {
                let key = match op {
                    b'h' => self.array::<1>()?[0].into(),
                    b'j' => u32::from_le_bytes(self.array()?).into(),
                    _ => self.number()?,
                };
                let id = *self.memo.get(&key).ok_or("it refers to an object before it is made")?;
                self.push_id(id)
            }
            _ => self.compound(op),
        }
    }

    /// Opcodes of collections and calls.
    fn compound(&mut self, op: u8) -> Step {
        match op {
            b')' => self.push_id(EMPTY),
            b't' => {
                let items = self.above_mark()?;
                self.push_tuple(items)
            }
            0x85..=0x87 => {
                let count = usize::from(op - 0x84);
                let from = self.floor(count)?;
                let items = self.stack.split_off(from);
                self.push_tuple(items)
            }
            b']' => self.push(Object::List(Vec::new())),
            b'l' => {
                let items = self.above_mark()?;
                self.push(Object::List(Vec::new()))?;
                self.append(items)
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            b'e' => {
                let items = self.above_mark()?;
                self.append(items)
            }
            b'}' => self.push(Object::Dict(None)),
            b'd' => {
                let items = self.above_mark()?;
                self.push(Object::Dict(None))?;
                self.set(pairs(&items)?)
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(vec![(key, value)])
            }
            b'u' => {
                let items = self.above_mark()?;
                self.set(pairs(&items)?)
            }
            0x8f => self.push_id(OTHER),
            0x90 => self.above_mark().map(drop),
            0x91 => {
                self.above_mark()?;
                self.push_id(OTHER)
            }
            b'c' => {
                let global = self.named()?;
                self.stack.push(global);
                self.count_stack()
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.object(module), self.object(name)) {
                    (Object::Text(module), Object::Text(name)) => {
                        let global = self.global(format!("{module}.{name}"))?;
                        self.push_id(global)
                    }
                    _ => Err("a name that is no text".to_owned()),
                }
            }
            b'R' | 0x81 => {
                let args = self.pop()?;
                let callable = self.pop()?;
                self.call(callable, args)
            }
            0x92 => {
                self.pop()?;
                let args = self.pop()?;
                let callable = self.pop()?;
                self.call(callable, args)
            }
            b'i' => {
                let callable = self.named()?;
                let args = self.above_mark()?;
                let args = self.tuple(args)?;
                self.call(callable, args)
            }
            b'o' => {
                let mut args = self.above_mark()?;
                if args.is_empty() {
                    return Err("an object without a class".to_owned());
                }
                let callable = args.remove(0);
                let args = self.tuple(args)?;
                self.call(callable, args)
            }
            // Attributes are ignored: a state dict has only `_metadata`.
            b'b' => self.pop().map(drop),
            b'Q' => {
                let key = self.pop()?;
                self.push(Object::Persistent(key))
            }
            b'P' => {
                let key = String::from_utf8_lossy(self.line()?).into();
                self.push_text(key)?;
                let key = self.pop()?;
                self.push(Object::Persistent(key))
            }
            op => Err(format!("unknown operation 0x{op:02x}")),
        }
    }

    fn take(&mut self, len: u64) -> Step<&'a [u8]> {
        let parts = usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len));
        let (bytes, rest) = parts.ok_or("it ends too early")?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        let bytes = self.take(N as u64)?;
        bytes.try_into().map_err(|_| "it ends too early".to_owned())
    }

    fn line(&mut self) -> Step<&'a [u8]> {
        let len = self.rest.iter().position(|&b| b == b'\n').ok_or("it ends too early")?;
        let line = self.take(len as u64)?;
        self.take(1)?;
        Ok(line.strip_suffix(b"\r").unwrap_or(line))
    }

    fn number(&mut self) -> Step<u64> {
        let line = std::str::from_utf8(self.line()?).unwrap_or_default();
        line.parse().map_err(|_| format!("`{line}` is no number"))
    }

    fn object(&self, id: Id) -> &Object {
        &self.objects[id as usize]
    }

    fn add(&mut self, object: Object) -> Step<Id> {
        self.take_memory(size_of::<Object>())?;
        // The memory limit is reached long before the index overflows.
        let id = Id::try_from(self.objects.len()).map_err(|_| "it has too many objects")?;
        self.objects.push(object);
        Ok(id)
    }

    fn push(&mut self, object: Object) -> Step {
        let id = self.add(object)?;
        self.push_id(id)
    }

    fn push_id(&mut self, id: Id) -> Step {
        self.stack.push(id);
        self.count_stack()
    }

    /// Counts the memory of the stack, if it is higher than ever before.
    fn count_stack(&mut self) -> Step {
        if self.stack.len() + self.marks.len() > self.highest {
            self.highest += 1;
            self.take_memory(size_of::<Id>())?;
        }
        Ok(())
    }

    fn push_text(&mut self, text: Box<str>) -> Step {
        self.take_memory(text.len())?;
        self.push(Object::Text(text))
    }

    fn tuple(&mut self, items: Vec<Id>) -> Step<Id> {
        if items.is_empty() {
            return Ok(EMPTY);
        }
        self.take_memory(size_of_val(&items[..]))?;
        self.add(Object::Tuple(items.into()))
    }

    fn push_tuple(&mut self, items: Vec<Id>) -> Step {
        let tuple = self.tuple(items)?;
        self.push_id(tuple)
    }

    /// A class or function whose module and name are the next two lines.
    fn named(&mut self) -> Step<Id> {
        let module = String::from_utf8_lossy(self.line()?);
        let name = String::from_utf8_lossy(self.line()?);
        let name = format!("{module}.{name}");
        self.global(name)
    }

    fn global(&mut self, name: String) -> Step<Id> {
        self.take_memory(name.len())?;
        self.add(Object::Global(name.into()))
    }

    /// Returns the depth below the topmost `count` objects, which must lie above the last mark.
    fn floor(&self, count: usize) -> Step<usize> {
        let from = self.stack.len().checked_sub(count);
        let from = from.filter(|from| self.marks.last().is_none_or(|mark| *from >= *mark as usize));
        from.ok_or_else(|| "it takes more than there is".to_owned())
    }

    fn top(&self) -> Step<Id> {
        Ok(self.stack[self.floor(1)?])
    }

    fn pop(&mut self) -> Step<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn above_mark(&mut self) -> Step<Vec<Id>> {
        let mark = self.marks.pop().ok_or("it takes more than there is")?;
        Ok(self.stack.split_off(mark as usize))
    }

    fn long(&mut self, len: u64) -> Step {
        let bytes = self.take(len)?;
        let object = if bytes.len() > 8 {
            Object::Other
        } else {
            let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
            let mut value = [fill; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            Object::Int(i64::from_le_bytes(value))
        };
        self.push(object)
    }

    fn text(&mut self, len: u64) -> Step {
        let text = String::from_utf8_lossy(self.take(len)?).into();
        self.push_text(text)
    }

    fn bytes(&mut self, len: u64) -> Step {
        self.take(len)?;
        self.push_id(OTHER)
    }

    fn append(&mut self, mut items: Vec<Id>) -> Step {
        self.take_memory(size_of_val(&items[..]))?;
        let top = self.top()?;
        match &mut self.objects[top as usize] {
            Object::List(list) => list.append(&mut items),
            Object::Call { .. } | Object::None | Object::Other => {}
            _ => return Err("it appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn set(&mut self, mut items: Items) -> Step {
        self.take_memory(size_of_val(&items[..]))?;
        let top = self.top()?;
        match &mut self.objects[top as usize] {
            Object::Dict(_) | Object::Call { .. } if items.is_empty() => {}
            Object::Dict(dict) | Object::Call { items: dict, .. } => {
                dict.get_or_insert_default().append(&mut items);
            }
            _ => return Err("it puts items into what is no dict".to_owned()),
        }
        Ok(())
    }

    fn call(&mut self, callable: Id, args: Id) -> Step {
        let dict = matches!(
            self.object(callable),
            Object::Global(name) if matches!(
                &**name,
                "collections.OrderedDict" | "collections.defaultdict" | "builtins.dict"
            )
        );
        let object =
            if dict { Object::Dict(None) } else { Object::Call { callable, args, items: None } };
        self.push(object)
    }
}

fn pairs(items: &[Id]) -> Step<Items> {
    let (pairs, rest) = items.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a key without a value".to_owned());
    }
    Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    #[test]
    fn protocols_0_to_5_agree() {
        // pickle.dumps({"a": (1, -2, 70000, True), "b": [[], 2**70]}, protocol)
        let pickles: [&[u8]; 3] = [
            b"(dp0\nVa\np1\n(I1\nI-2\nI70000\nI01\ntp2\nsVb\np3\n(lp4\n(lp5\naL1180591620717411303424L\nas.",
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01(K\x01J\xfe\xff\xff\xffJp\x11\x01\x00\x88tq\x02X\x01\x00\x00\x00bq\x03]q\x04(]q\x05\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40eu.",
            b"\x80\x05\x95\x2e\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94(K\x01J\xfe\xff\xff\xffJp\x11\x01\x00\x88t\x94\x8c\x01b\x94]\x94(]\x94\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40eu.",
        ];
        for pickle in pickles {
            let heap = parse(pickle).unwrap();
            let items = heap.items(heap.root).unwrap();
            let keys: Vec<_> = items.iter().map(|(key, _)| heap.text(*key).unwrap()).collect();
            assert_eq!(keys, ["a", "b"]);
            let first: Vec<_> =
                heap.sequence(items[0].1).unwrap().iter().map(|&i| heap.get(i)).collect();
            use Object::{Bool, Int};
            assert_eq!(first, [&Int(1), &Int(-2), &Int(70000), &Bool(true)]);
            let second = heap.sequence(items[1].1).unwrap();
            assert_eq!(heap.sequence(second[0]), Some(&[][..]));
            assert_eq!(heap.get(second[1]), &Object::Other);
        }
    }

    #[test]
    fn numbers_flags_and_none_are_distinct() {
        // pickle.dumps([0.1, -2.5, None, False, 3], protocol)
        let pickles: [&[u8]; 2] = [
            b"(lp0\nF0.1\naF-2.5\naNaI00\naI3\na.",
            b"\x80\x02]q\x00(G?\xb9\x99\x99\x99\x99\x99\x9aG\xc0\x04\x00\x00\x00\x00\x00\x00N\x89K\x03e.",
        ];
        for pickle in pickles {
            let heap = parse(pickle).unwrap();
            let items = heap.sequence(heap.root).unwrap();
            let numbers: Vec<_> = items.iter().map(|&id| heap.number(id)).collect();
            assert_eq!(numbers, [Some(0.1), Some(-2.5), None, None, Some(3.0)]);
            assert_eq!(heap.get(items[2]), &Object::None);
            assert_eq!(heap.get(items[3]), &Object::Bool(false));
        }
    }

    #[test]
    fn calls_are_inert_and_nesting_is_unlimited() {
        let heap = parse(b"cos\nsystem\n(S'rm -rf /'\ntR.").unwrap();
        let Object::Call { callable, .. } = heap.get(heap.root) else { panic!() };
        assert_eq!(heap.global(*callable), Some("os.system"));
        let deep = [vec![b']'; 1 << 20], vec![b'a'; (1 << 20) - 1], vec![b'.']].concat();
        drop(parse(&deep).unwrap());
    }

    #[test]
    fn memory_is_bounded_by_the_pickle() {
        assert_eq!(size_of::<Object>(), 24);
        // Each opcode is one byte that creates an object, a stack entry or a mark.
        for op in b"})](N" {
            let many = [vec![*op; 4 << 20], vec![b'.']].concat();
            let parsed = parse(&many);
            if let Ok(heap) = &parsed {
                assert!(heap.objects.len() < 300, "{}", *op as char);
            }
            let says = |error: &String| error.contains("need far more memory");
            assert_eq!(parsed.as_ref().err().is_some_and(says), b"}]".contains(op));
        }
        // A list that is repeatedly extended from the stack.
        let grown = [b"](".to_vec(), b"NNNNNNNNe(".repeat(1 << 20), b"t.".to_vec()].concat();
        assert!(parse(&grown).is_ok());
    }

    #[test]
    fn errors_give_the_position() {
        let error = |bytes: &[u8]| parse(bytes).unwrap_err();
        assert_says!(error(b"\x80\x02}q\x00(X\xff"), "its pickle is damaged … too early … byte 7");
        assert_says!(error(b"h\x07."), "its pickle is damaged … before it is made, at byte 2");
        assert_says!(error(b"(K\x01u."), "its pickle is damaged … key without a value, at byte 4");
        assert_says!(error(b"]K\x01(\x85."), "its pickle is damaged … takes more … at byte 5");
        assert_says!(error(b"\xff"), "its pickle is damaged … unknown operation 0xff, at byte 1");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn arbitrary_opcodes_never_panic(
            ops in prop::collection::vec(prop::sample::select(&b"N()]}KtasudebRQ0120.\x81\x85\x86\x87\x94\x93\x8f\x90"[..]), 0..60),
        ) {
            let _ = parse(&ops);
        }
    }
}
