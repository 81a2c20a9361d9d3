//! Instructions.

use super::function::Scopes;
use super::types::{TYPES, compare, cpp, identifier, list, rounding, size, twice, word};
use crate::ptx::Instruction;

impl Scopes<'_, '_> {
    pub(super) fn instruction(&mut self, instruction: &Instruction) -> Result<String, String> {
        let parts: Vec<&str> = instruction.name.iter().map(String::as_str).collect();
        let kinds: Vec<&str> = parts[1..].iter().copied().filter(|p| TYPES.contains(p)).collect();
        let modifiers: Vec<&str> =
            parts[1..].iter().copied().filter(|p| !TYPES.contains(p)).collect();
        let operands: Vec<&str> = instruction.operands.iter().map(String::as_str).collect();
        let has = |modifier: &str| modifiers.contains(&modifier);
        let kind = kinds.first().copied().unwrap_or("b32");
        let at = |index: usize| operands.get(index).copied().ok_or("too few operands");
        match parts[0] {
            "mov" => self.mov(kind, at(0)?, at(1)?),
            "cvta" if has("shared") => {
                self.all.needs_fibers = true;
                let value = self.value(at(1)?, kind)?;
                let value = match has("to") {
                    true => format!("({})(u32)({value})", cpp(kind)),
                    false => format!("({})window((u32)({value}))", cpp(kind)),
                };
                self.set(at(0)?, kind, &value)
            }
            "cvta" => self.mov(kind, at(0)?, at(1)?),
            "ld" | "ldu" | "st" => self.memory(parts[0], kind, &modifiers, at(0)?, at(1)?),
            "add" | "addc" | "sub" | "subc" if has("cc") || parts[0].ends_with('c') => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let carry = if parts[0].ends_with('c') { "CC" } else { "false" };
                let with = if parts[0].starts_with("add") { "add_carry" } else { "sub_borrow" };
                let out = if has("cc") { "CC" } else { "ignored" };
                let value = format!("{with}<{}>({a}, {b}, {carry}, {out})", word(kind));
                let set = self.set(at(0)?, &word(kind), &value)?;
                Ok(format!("{{ bool ignored; (void)ignored; {set} }}"))
            }
            "mad" | "madc" if has("cc") || parts[0] == "madc" => {
                let half = if has("hi") { "mul_hi" } else { "mul" };
                let ty = cpp(kind);
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let c = self.value(at(3)?, kind)?;
                let carry = if parts[0] == "madc" { "CC" } else { "false" };
                let out = if has("cc") { "CC" } else { "ignored" };
                let value = format!(
                    "add_carry<{}>({half}<{ty}>({a}, {b}), {c}, {carry}, {out})",
                    word(kind)
                );
                let set = self.set(at(0)?, &word(kind), &value)?;
                Ok(format!("{{ bool ignored; (void)ignored; {set} }}"))
            }
            "mul" if has("hi") => self.apply(&format!("mul_hi<{}>", cpp(kind)), kind, &operands, 2),
            "mul" if has("wide") => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let ty = cpp(kind);
                self.set(at(0)?, &twice(kind), &format!("mul_wide<{ty}>({a}, {b})"))
            }
            "mad" if has("wide") => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let (wide, ty) = (twice(kind), cpp(kind));
                let c = self.value(at(3)?, &wide)?;
                self.set(
                    at(0)?,
                    &wide,
                    &format!("add<{}>(mul_wide<{ty}>({a}, {b}), {c})", cpp(&wide)),
                )
            }
            "mad" if !kind.starts_with('f') => {
                let half = if has("hi") { "mul_hi" } else { "mul" };
                let ty = cpp(kind);
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let c = self.value(at(3)?, kind)?;
                self.set(at(0)?, kind, &format!("add<{ty}>({half}<{ty}>({a}, {b}), {c})"))
            }
            "add" | "sub" | "mul" | "div" | "fma" | "mad" => {
                let name = if parts[0] == "mad" { "fma" } else { parts[0] };
                let function = format!("{name}<{}, {}>", cpp(kind), rounding(&modifiers));
                let function = match has("sat") {
                    true => format!("saturated({function}"),
                    false => function,
                };
                let count = if name == "fma" { 3 } else { 2 };
                let line = self.apply(&function, kind, &operands, count)?;
                Ok(if has("sat") { line.replace(");", "));") } else { line })
            }
            "rem" => self.apply(&format!("rem<{}>", cpp(kind)), kind, &operands, 2),
            "min" | "max" => {
                let function = format!("{}<{}, {}>", parts[0], cpp(kind), has("NaN"));
                self.apply(&function, kind, &operands, 2)
            }
            "neg" | "abs" => {
                self.apply(&format!("{}<{}>", parts[0], cpp(kind)), kind, &operands, 1)
            }
            "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => {
                let function = format!("ptx::{}<{}>", parts[0], cpp(kind));
                self.apply(&function, kind, &operands, 1)
            }
            "copysign" => self.apply(&format!("ptx::copysign<{}>", cpp(kind)), kind, &operands, 2),
            "and" | "or" | "xor" => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let sign = match parts[0] {
                    "and" => "&",
                    "or" => "|",
                    _ => "^",
                };
                self.set(at(0)?, kind, &format!("({})({a} {sign} {b})", cpp(kind)))
            }
            "not" => {
                let a = self.value(at(1)?, kind)?;
                let sign = if kind == "pred" { "!" } else { "~" };
                self.set(at(0)?, kind, &format!("({})({sign}({a}))", cpp(kind)))
            }
            "shl" | "shr" => {
                let (a, n) = (self.value(at(1)?, kind)?, self.value(at(2)?, "u32")?);
                self.set(at(0)?, kind, &format!("{}<{}>({a}, {n})", parts[0], cpp(kind)))
            }
            "shf" => {
                let (low, high) = (self.value(at(1)?, "u32")?, self.value(at(2)?, "u32")?);
                let n = self.value(at(3)?, "u32")?;
                let left = has("l");
                self.set(
                    at(0)?,
                    "u32",
                    &format!("funnel<{left}, {}>({low}, {high}, {n})", has("wrap")),
                )
            }
            "clz" | "popc" => {
                let a = self.value(at(1)?, kind)?;
                self.set(at(0)?, "u32", &format!("{}<{}>({a})", parts[0], cpp(kind)))
            }
            "brev" => self.apply(&format!("brev<{}>", cpp(kind)), kind, &operands, 1),
            "bfe" => {
                let a = self.value(at(1)?, kind)?;
                let (start, length) = (self.value(at(2)?, "u32")?, self.value(at(3)?, "u32")?);
                self.set(at(0)?, kind, &format!("bfe<{}>({a}, {start}, {length})", cpp(kind)))
            }
            "bfi" => {
                let (a, b) = (self.value(at(1)?, kind)?, self.value(at(2)?, kind)?);
                let (start, length) = (self.value(at(3)?, "u32")?, self.value(at(4)?, "u32")?);
                self.set(at(0)?, kind, &format!("bfi<{}>({a}, {b}, {start}, {length})", cpp(kind)))
            }
            "prmt" => self.apply("prmt", "b32", &operands, 3),
            "lop3" => {
                let list: Result<Vec<String>, String> =
                    operands[1..].iter().map(|operand| self.value(operand, "b32")).collect();
                self.set(at(0)?, "b32", &format!("lop3({})", list?.join(", ")))
            }
            "selp" => {
                let (a, b) = (self.value(at(1)?, &word(kind))?, self.value(at(2)?, &word(kind))?);
                let p = self.value(at(3)?, "pred")?;
                self.set(at(0)?, &word(kind), &format!("{p} ? {a} : {b}"))
            }
            "setp" => self.setp(&modifiers, kind, &operands),
            "set" => {
                let from = kinds.get(1).copied().ok_or("two types")?;
                let (a, b) = (self.value(at(1)?, from)?, self.value(at(2)?, from)?);
                let compare = compare(modifiers.first().ok_or("a comparison")?);
                let test = format!("ptx::{compare}<{}>({a}, {b})", cpp(from));
                self.set(at(0)?, kind, &format!("truth<{}>({test})", cpp(kind)))
            }
            "cvt" => self.cvt(&kinds, &modifiers, &operands),
            "bra" => Ok(format!("goto L_{};", identifier(at(0)?))),
            "ret" | "exit" => Ok("return;".to_owned()),
            "call" => self.call(instruction),
            "bar" | "barrier" => {
                self.all.needs_fibers = true;
                match (has("warp"), at(0)?, operands.len()) {
                    (true, ..) => Ok("shim::warp_barrier();".to_owned()),
                    (false, "0", 1) => Ok("shim::block_barrier();".to_owned()),
                    _ => Err("a barrier of some threads".to_owned()),
                }
            }
            "shfl" => self.shuffle(&modifiers, &operands),
            "vote" => {
                self.all.needs_fibers = true;
                let p = self.value(at(1)?, "pred")?;
                match has("ballot") {
                    true => self.set(at(0)?, "b32", &format!("ballot({p})")),
                    false => Err("a vote other than ballot".to_owned()),
                }
            }
            "atom" | "red" => self.atomic(parts[0] == "red", kind, &modifiers, &operands),
            "membar" | "fence" | "prefetch" | "prefetchu" | "pragma" => Ok(String::new()),
            "trap" => Ok("fault(\"a trap\", 0);".to_owned()),
            "mma" => self.tensor_cores(&parts, &operands),
            "ldmatrix" => {
                self.all.needs_fibers = true;
                if !has("x4") {
                    return Err("other than four matrices".to_owned());
                }
                let from = self.address(at(1)?, "shared")?;
                let turned = has("trans");
                let mut line =
                    format!("{{ u32 m[4]; load_matrices_of(m, (const void *)({from}), {turned}); ");
                for (index, register) in list(at(0)?).into_iter().enumerate() {
                    line += &self.set(register, "b32", &format!("m[{index}]"))?;
                }
                Ok(line + "}")
            }
            "cp" => self.copy(&modifiers, &operands),
            _ => Err("an instruction that is not known".to_owned()),
        }
    }

    fn apply(
        &mut self,
        function: &str,
        kind: &str,
        operands: &[&str],
        count: usize,
    ) -> Result<String, String> {
        if operands.len() != count + 1 {
            return Err(format!("expected {} operands", count + 1));
        }
        let half = kind.strip_suffix("x2");
        let kind = if half.is_some() { "b32" } else { kind };
        let arguments: Result<Vec<String>, String> =
            operands[1..].iter().map(|operand| self.value(operand, kind)).collect();
        let arguments = arguments?.join(", ");
        let value = match half {
            None => format!("{function}({arguments})"),
            Some(half) => {
                let of_half = function.replace("x2", "");
                format!("halves<{half}>([](auto... x) {{ return {of_half}(x...); }}, {arguments})")
            }
        };
        self.set(operands[0], kind, &value)
    }

    fn mov(&mut self, kind: &str, to: &str, from: &str) -> Result<String, String> {
        let kind = word(kind);
        if to.starts_with('{') {
            let value = self.value(from, &kind)?;
            let parts = list(to);
            let bits = size(&kind) * 8 / parts.len().max(1);
            let mut line = format!("{{ u64 whole = (u64){value}; ");
            for (index, register) in parts.into_iter().enumerate() {
                let part = format!("(u{bits})(whole >> {})", bits * index);
                line += &self.set(register, &format!("u{bits}"), &part)?;
            }
            return Ok(line + "}");
        }
        if from.starts_with('{') {
            let parts = list(from);
            let bits = size(&kind) * 8 / parts.len().max(1);
            let mut value = String::from("0");
            for (index, part) in parts.into_iter().enumerate() {
                let part = self.value(part, &format!("u{bits}"))?;
                value += &format!(" | (u64){part} << {}", bits * index);
            }
            return self.set(to, &kind, &format!("({kind})({value})"));
        }
        let value = self.value(from, &kind)?;
        self.set(to, &kind, &value)
    }

    fn memory(
        &mut self,
        name: &str,
        kind: &str,
        modifiers: &[&str],
        first: &str,
        second: &str,
    ) -> Result<String, String> {
        let spaces = ["param", "global", "shared", "local", "const"];
        let space = modifiers.iter().copied().find(|m| spaces.contains(m)).unwrap_or("generic");
        let (place, registers) = if name == "st" { (first, second) } else { (second, first) };
        let address = self.address(place, space)?;
        let registers = list(registers);
        let (bytes, ty) = (size(kind), cpp(kind));
        let mut line = format!("{{ u64 a = {address}; aligned(a, {}); ", bytes * registers.len());
        for (index, register) in registers.into_iter().enumerate() {
            let place = format!("a + {}", bytes * index);
            line += &match name {
                "st" => format!("write<{ty}>({place}, {});", self.value(register, kind)?),
                _ => self.set(register, kind, &format!("read<{ty}>({place})"))?,
            };
        }
        Ok(line + "}")
    }

    fn setp(
        &mut self,
        modifiers: &[&str],
        kind: &str,
        operands: &[&str],
    ) -> Result<String, String> {
        let [to, a, b, rest @ ..] = operands else { return Err("too few operands".to_owned()) };
        let (a, b) = (self.value(a, kind)?, self.value(b, kind)?);
        let compare = compare(modifiers.first().ok_or("a comparison")?);
        let mut test = format!("ptx::{compare}<{}>({a}, {b})", cpp(kind));
        if let [with] = rest {
            let with = self.value(with, "pred")?;
            let sign = match modifiers.get(1) {
                Some(&"and") => "&&",
                Some(&"or") => "||",
                Some(&"xor") => "!=",
                other => return Err(format!("what is {other:?}?")),
            };
            test = format!("({test}) {sign} ({with})");
        }
        match to.split_once('|') {
            Some(_) => Err("two results".to_owned()),
            None => self.set(to, "pred", &test),
        }
    }

    fn cvt(
        &mut self,
        kinds: &[&str],
        modifiers: &[&str],
        operands: &[&str],
    ) -> Result<String, String> {
        let [to, from] = kinds else { return Err("two types".to_owned()) };
        if let Some(half) = to.strip_suffix("x2") {
            let [register, high, low] = operands else { return Err("three operands".to_owned()) };
            let (high, low) = (self.value(high, from)?, self.value(low, from)?);
            return self.set(register, "b32", &format!("cvt_pair<{half}>({high}, {low})"));
        }
        let [register, operand] = operands else { return Err("two operands".to_owned()) };
        let whole = ["rni", "rzi", "rmi", "rpi"].into_iter().find(|w| modifiers.contains(w));
        let whole = whole.map_or("NOT_WHOLE".to_owned(), str::to_uppercase);
        let (is_saturated, rounding) = (modifiers.contains(&"sat"), rounding(modifiers));
        let value = self.value(operand, from)?;
        let (to_type, from_type) = (cpp(to), cpp(from));
        let value =
            format!("cvt<{to_type}, {from_type}, {whole}, {rounding}, {is_saturated}>({value})");
        self.set(register, to, &value)
    }

    fn call(&mut self, instruction: &Instruction) -> Result<String, String> {
        let name = instruction.callee().ok_or("a call of nothing")?;
        if self.all.module.function(name).is_none() {
            let what = if name == "__assertfail" { "a failed assertion" } else { name };
            return Ok(format!("fault(\"{}\", 0);", what.replace('"', "")));
        }
        let places = instruction.operands.iter().filter(|operand| operand.starts_with('('));
        let places: String = places
            .flat_map(|operand| list(operand))
            .map(|place| format!(", V_{}", identifier(place)))
            .collect();
        Ok(format!("F_{}(T{places});", identifier(name)))
    }

    fn shuffle(&mut self, modifiers: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        let [to, value, by, limits, _mask] = operands else {
            return Err("five operands".to_owned());
        };
        let how = ["up", "down", "bfly", "idx"].into_iter().find(|how| modifiers.contains(how));
        let how = how.ok_or("a way")?.to_uppercase();
        let (value, by) = (self.value(value, "b32")?, self.value(by, "b32")?);
        let limits = self.value(limits, "b32")?;
        let (to, valid) = match to.split_once('|') {
            Some((to, valid)) => (to, Some(valid)),
            None => (*to, None),
        };
        let mut line =
            format!("{{ bool valid; u32 other = shuffle<{how}>({value}, {by}, {limits}, valid); ");
        line += &self.set(to, "b32", "other")?;
        if let Some(valid) = valid {
            line += &self.set(valid, "pred", "valid")?;
        }
        Ok(line + "}")
    }

    fn atomic(
        &mut self,
        is_reduction: bool,
        kind: &str,
        modifiers: &[&str],
        operands: &[&str],
    ) -> Result<String, String> {
        let (to, operands) =
            if is_reduction { ("_", operands) } else { (operands[0], &operands[1..]) };
        let space = modifiers.iter().copied().find(|m| ["global", "shared"].contains(m));
        let place =
            self.address(operands.first().ok_or("an address")?, space.unwrap_or("generic"))?;
        let value = self.value(operands.get(1).ok_or("a value")?, kind)?;
        let ty = cpp(kind);
        let ops = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let op = ops.into_iter().find(|op| modifiers.contains(op)).ok_or("an operation")?;
        let new = match op {
            "add" => format!("add<{ty}>(old, value)"),
            "min" | "max" => format!("{op}<{ty}, false>(old, value)"),
            "and" => "old & value".to_owned(),
            "or" => "old | value".to_owned(),
            "xor" => "old ^ value".to_owned(),
            "exch" => "value".to_owned(),
            "cas" => {
                let third = self.value(operands.get(2).ok_or("a third operand")?, kind)?;
                format!("old == value ? {third} : old")
            }
            other => return Err(format!("{other} of an atomic")),
        };
        let change = format!(
            "change<{ty}>({place}, [&]({ty} old) {{ {ty} value = {value}; return ({ty})({new}); }})"
        );
        match to {
            "_" => Ok(format!("{change};")),
            to => self.set(to, kind, &change),
        }
    }

    fn tensor_cores(&mut self, parts: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        let half = match parts {
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", a, b, "f32"] if a == b => a,
            _ => return Err("a product of another shape".to_owned()),
        };
        let [d, a, b, c] = operands else { return Err("four operands".to_owned()) };
        let mut line = String::from("{ float c[4] = {");
        for register in list(c) {
            line += &format!("{}, ", self.value(register, "f32")?);
        }
        line += "}; const u32 a[4] = {";
        for register in list(a) {
            line += &format!("{}, ", self.value(register, "b32")?);
        }
        let b: Result<Vec<String>, String> =
            list(b).into_iter().map(|register| self.value(register, "b32")).collect();
        line += &format!("}}; multiply_add(c, a, {}, {half}{{}}); ", b?.join(", "));
        for (index, register) in list(d).into_iter().enumerate() {
            line += &self.set(register, "f32", &format!("c[{index}]"))?;
        }
        Ok(line + "}")
    }

    fn copy(&mut self, modifiers: &[&str], operands: &[&str]) -> Result<String, String> {
        self.all.needs_fibers = true;
        if modifiers.contains(&"wait_all") {
            return Ok("shim::end_copies();".to_owned());
        }
        if !modifiers.contains(&"global") {
            return Err("another copy than of global memory, or a wait for some".to_owned());
        }
        let [to, from, bytes, rest @ ..] = operands else {
            return Err("three operands".to_owned());
        };
        let (to, from) = (self.address(to, "shared")?, self.address(from, "generic")?);
        let bytes = self.value(bytes, "u32")?;
        let there = match rest {
            [there] => self.value(there, "u32")?,
            _ => bytes.clone(),
        };
        Ok(format!("copy_some({to}, {from}, {bytes}, {there});"))
    }
}
