//! The stack machine of pickle, without calls.
//!
//! Objects are in one list and refer to each other by index. So objects can be shared, no depth of
//! nesting overflows the stack, and memory is a small multiple of the pickle's size.

use std::collections::HashMap;

/// The index of an object in a [`Heap`].
pub(super) type Id = usize;

/// An object of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Object {
    None,
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// A class or function, `module.name`.
    Global(String),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// The result of a call, which is not made, and the items set in it as in a dict.
    Call {
        callable: Id,
        args: Id,
        items: Vec<(Id, Id)>,
    },
    /// A reference to data outside of the pickle.
    Persistent(Id),
    /// Any other value: integers that are not small, bytes, sets.
    Other,
}

/// The objects of a pickle; `root` is the pickled one.
#[derive(Debug)]
pub(super) struct Heap {
    objects: Vec<Object>,
    pub(super) root: Id,
}

impl Heap {
    pub(super) fn get(&self, id: Id) -> &Object {
        &self.objects[id]
    }

    /// The items of a dict, or of a call that items were set in.
    pub(super) fn items(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Object::Dict(items) => Some(items),
            Object::Call { items, .. } if !items.is_empty() => Some(items),
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
            Object::Tuple(items) | Object::List(items) => Some(items),
            _ => None,
        }
    }

    /// An object that is an integer or a float.
    pub(super) fn number(&self, id: Id) -> Option<f64> {
        match self.get(id) {
            Object::Int(value) => Some(*value as f64),
            Object::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// An object that is a size or an offset.
    pub(super) fn count(&self, id: Id) -> Option<usize> {
        match self.get(id) {
            Object::Int(value) => usize::try_from(*value).ok(),
            _ => None,
        }
    }

    /// An object that is a list of sizes.
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
    let mut machine = Machine { rest: bytes, ..Machine::default() };
    let root = machine.run().map_err(|message| {
        let at = bytes.len() - machine.rest.len();
        format!("its pickle is damaged or not of a kind that is known: {message}, at byte {at}")
    })?;
    Ok(Heap { objects: machine.objects, root })
}

#[derive(Default)]
struct Machine<'a> {
    rest: &'a [u8],
    objects: Vec<Object>,
    stack: Vec<Id>,
    /// The open marks, as stack depths.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

type Step<T = ()> = Result<T, String>;

impl<'a> Machine<'a> {
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
            b'N' => self.push(Object::None),
            0x88 => self.push(Object::Bool(true)),
            0x89 => self.push(Object::Bool(false)),
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Object::Int(value.into()))
            }
            b'K' => {
                let value = self.array::<1>()?[0];
                self.push(Object::Int(value.into()))
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
                let line = String::from_utf8_lossy(self.line()?).into_owned();
                let text =
                    if op == b'S' { line.trim_matches(['\'', '"']).to_owned() } else { line };
                self.push(Object::Text(text))
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
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => match self.marks.last() {
                Some(&mark) if mark == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                _ => self.pop().map(drop),
            },
            b'1' => self.above_mark().map(drop),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
                Ok(())
            }
            b'q' | b'r' | b'p' | 0x94 => {
                let key = match op {
                    b'q' => self.array::<1>()?[0].into(),
                    b'r' => u32::from_le_bytes(self.array()?).into(),
                    b'p' => self.number()?,
                    _ => self.memo.len() as u64,
                };
                let top = self.top()?;
                self.memo.insert(key, top);
                Ok(())
            }
            b'h' | b'j' | b'g' => {
                let key = match op {
                    b'h' => self.array::<1>()?[0].into(),
                    b'j' => u32::from_le_bytes(self.array()?).into(),
                    _ => self.number()?,
                };
                let id = *self.memo.get(&key).ok_or("it refers to an object before it is made")?;
                self.stack.push(id);
                Ok(())
            }
            _ => self.compound(op),
        }
    }

    /// Opcodes of collections and calls.
    fn compound(&mut self, op: u8) -> Step {
        match op {
            b')' => self.push(Object::Tuple(Vec::new())),
            b't' => {
                let items = self.above_mark()?;
                self.push(Object::Tuple(items))
            }
            0x85..=0x87 => {
                let count = usize::from(op - 0x84);
                let from = self.floor(count)?;
                let items = self.stack.split_off(from);
                self.push(Object::Tuple(items))
            }
            b']' => self.push(Object::List(Vec::new())),
            b'l' => {
                let items = self.above_mark()?;
                self.push(Object::List(items))
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            b'e' => {
                let items = self.above_mark()?;
                self.append(items)
            }
            b'}' => self.push(Object::Dict(Vec::new())),
            b'd' => {
                let items = self.above_mark()?;
                let items = pairs(&items)?;
                self.push(Object::Dict(items))
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
            0x8f => self.push(Object::Other),
            0x90 => self.above_mark().map(drop),
            0x91 => {
                self.above_mark()?;
                self.push(Object::Other)
            }
            b'c' => {
                let module = String::from_utf8_lossy(self.line()?).into_owned();
                let name = String::from_utf8_lossy(self.line()?).into_owned();
                self.push(Object::Global(format!("{module}.{name}")))
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (&self.objects[module], &self.objects[name]) {
                    (Object::Text(module), Object::Text(name)) => {
                        let global = Object::Global(format!("{module}.{name}"));
                        self.push(global)
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
                let module = String::from_utf8_lossy(self.line()?).into_owned();
                let name = String::from_utf8_lossy(self.line()?).into_owned();
                let args = self.above_mark()?;
                let args = self.add(Object::Tuple(args));
                let callable = self.add(Object::Global(format!("{module}.{name}")));
                self.call(callable, args)
            }
            b'o' => {
                let mut args = self.above_mark()?;
                if args.is_empty() {
                    return Err("an object without a class".to_owned());
                }
                let callable = args.remove(0);
                let args = self.add(Object::Tuple(args));
                self.call(callable, args)
            }
            // Attributes, which are not needed: a state dict has only `_metadata`.
            b'b' => self.pop().map(drop),
            b'Q' => {
                let key = self.pop()?;
                self.push(Object::Persistent(key))
            }
            b'P' => {
                let key = Object::Text(String::from_utf8_lossy(self.line()?).into_owned());
                let key = self.add(key);
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

    fn add(&mut self, object: Object) -> Id {
        self.objects.push(object);
        self.objects.len() - 1
    }

    #[expect(clippy::unnecessary_wraps, reason = "an operation's last step, like the others")]
    fn push(&mut self, object: Object) -> Step {
        let id = self.add(object);
        self.stack.push(id);
        Ok(())
    }

    /// The depth below the topmost `count` objects, which must lie above the last mark.
    fn floor(&self, count: usize) -> Step<usize> {
        let from = self.stack.len().checked_sub(count);
        let from = from.filter(|from| self.marks.last().is_none_or(|mark| from >= mark));
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
        Ok(self.stack.split_off(mark))
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
        let text = String::from_utf8_lossy(self.take(len)?).into_owned();
        self.push(Object::Text(text))
    }

    fn bytes(&mut self, len: u64) -> Step {
        self.take(len)?;
        self.push(Object::Other)
    }

    fn append(&mut self, mut items: Vec<Id>) -> Step {
        let top = self.top()?;
        match &mut self.objects[top] {
            Object::List(list) => list.append(&mut items),
            Object::Call { .. } | Object::None | Object::Other => {}
            _ => return Err("it appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn set(&mut self, mut items: Vec<(Id, Id)>) -> Step {
        let top = self.top()?;
        match &mut self.objects[top] {
            Object::Dict(dict) | Object::Call { items: dict, .. } => dict.append(&mut items),
            _ => return Err("it puts items into what is no dict".to_owned()),
        }
        Ok(())
    }

    fn call(&mut self, callable: Id, args: Id) -> Step {
        let dict = matches!(
            &self.objects[callable],
            Object::Global(name) if matches!(
                name.as_str(),
                "collections.OrderedDict" | "collections.defaultdict" | "builtins.dict"
            )
        );
        let object = if dict {
            Object::Dict(Vec::new())
        } else {
            Object::Call { callable, args, items: Vec::new() }
        };
        self.push(object)
    }
}

fn pairs(items: &[Id]) -> Step<Vec<(Id, Id)>> {
    let (pairs, rest) = items.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a key without a value".to_owned());
    }
    Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn protocols_from_0_to_5_give_the_same() {
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
    fn numbers_flags_and_none_are_told_apart() {
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
    fn nothing_is_called_and_nesting_has_no_end() {
        let heap = parse(b"cos\nsystem\n(S'rm -rf /'\ntR.").unwrap();
        let Object::Call { callable, .. } = heap.get(heap.root) else { panic!() };
        assert_eq!(heap.global(*callable), Some("os.system"));
        let deep = [vec![b']'; 1 << 20], vec![b'a'; (1 << 20) - 1], vec![b'.']].concat();
        drop(parse(&deep).unwrap());
    }

    #[test]
    fn errors_say_where() {
        let error = |bytes: &[u8]| parse(bytes).unwrap_err();
        insta::assert_snapshot!(error(b"\x80\x02}q\x00(X\xff"), @"its pickle is damaged or not of a kind that is known: it ends too early, at byte 7");
        insta::assert_snapshot!(error(b"h\x07."), @"its pickle is damaged or not of a kind that is known: it refers to an object before it is made, at byte 2");
        insta::assert_snapshot!(error(b"(K\x01u."), @"its pickle is damaged or not of a kind that is known: a key without a value, at byte 4");
        insta::assert_snapshot!(error(b"]K\x01(\x85."), @"its pickle is damaged or not of a kind that is known: it takes more than there is, at byte 5");
        insta::assert_snapshot!(error(b"\xff"), @"its pickle is damaged or not of a kind that is known: unknown operation 0xff, at byte 1");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn no_operations_make_it_panic(
            ops in prop::collection::vec(prop::sample::select(&b"N()]}KtasudebRQ0120.\x81\x85\x86\x87\x94\x93\x8f\x90"[..]), 0..60),
        ) {
            let _ = parse(&ops);
        }
    }
}
