//! PTX as text: the functions of a module, and their statements.

/// A module: the contents of one PTX file.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) functions: Vec<Function>,
    /// Variables outside of functions, in the order of the file.
    pub(crate) variables: Vec<Variable>,
}

/// A kernel, or a function that a kernel calls.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) is_entry: bool,
    pub(crate) returns: Vec<Variable>,
    pub(crate) parameters: Vec<Variable>,
    /// `None` for a mere declaration.
    pub(crate) body: Option<Vec<Statement>>,
}

/// A declared parameter or memory object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Variable {
    pub(crate) name: String,
    /// `param`, `shared`, `global`, `const` or `local`.
    pub(crate) space: String,
    pub(crate) align: usize,
    /// Bytes; 0 if the launch sets the size.
    pub(crate) bytes: usize,
    /// Values of the elements, if initialised.
    pub(crate) values: Option<Vec<u64>>,
    /// Bytes of one element.
    pub(crate) element: usize,
}

/// A statement of a function body.
#[derive(Debug, PartialEq)]
pub(crate) enum Statement {
    Label(String),
    Open,
    Close,
    /// Type and names of registers.
    Registers(String, Vec<String>),
    Variable(Variable),
    Instruction(Instruction),
}

/// `@predicate name operands`
#[derive(Debug, PartialEq)]
pub(crate) struct Instruction {
    /// The register, and whether it must be false.
    pub(crate) predicate: Option<(String, bool)>,
    /// Parts of the name between dots.
    pub(crate) name: Vec<String>,
    pub(crate) operands: Vec<String>,
}

impl Module {
    /// The function of this name with a body.
    pub(crate) fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name && function.body.is_some())
    }
}

impl Instruction {
    /// The name of the called function, if the instruction is a `call`.
    pub(crate) fn callee(&self) -> Option<&str> {
        let is_call = self.name.first().is_some_and(|name| name == "call");
        let mut names = self.operands.iter().filter(|operand| !operand.starts_with('('));
        names.next().filter(|_| is_call).map(String::as_str)
    }
}

fn size_of(kind: &str) -> usize {
    match kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()) {
        "8" => 1,
        "16" => 2,
        "32" | "16x2" => 4,
        _ => 8,
    }
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        let tail = &rest[at..];
        rest = match tail.as_bytes().get(1) {
            Some(b'/') => tail.find('\n').map_or("", |end| &tail[end..]),
            Some(b'*') => tail.find("*/").map_or("", |end| &tail[end + 2..]),
            _ => {
                out.push('/');
                &tail[1..]
            }
        };
    }
    out.push_str(rest);
    out
}

/// Splits at commas outside brackets.
pub(crate) fn split(list: &str) -> Vec<String> {
    let (mut depth, mut part, mut parts) = (0, String::new(), Vec::new());
    for c in list.chars() {
        match c {
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' => depth -= 1,
            _ => {}
        }
        match c == ',' && depth == 0 {
            true => parts.push(std::mem::take(&mut part).trim().to_owned()),
            false => part.push(c),
        }
    }
    if !part.trim().is_empty() {
        parts.push(part.trim().to_owned());
    }
    parts
}

/// Parses `.param .align 4 .b8 name[16]`, also with values: `= {1, 2}` or `= 3`.
fn variable(text: &str) -> Variable {
    let (declared, values) = match text.split_once('=') {
        Some((declared, values)) => (declared, Some(values)),
        None => (text, None),
    };
    let (mut space, mut align, mut element, mut name, mut count) =
        (String::new(), 0, 8, String::new(), Some(1));
    let mut words = declared.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            ".param" | ".shared" | ".global" | ".const" | ".local" => space = word[1..].to_owned(),
            ".align" => align = words.next().and_then(|n| n.parse().ok()).unwrap_or(1),
            ".visible" | ".extern" | ".weak" | ".common" | ".ptr" => {}
            _ if word.starts_with('.') => element = size_of(&word[1..]),
            _ => name.push_str(word),
        }
    }
    if let Some((before, dims)) = name.clone().split_once('[') {
        name = before.to_owned();
        let dims = dims.trim_end_matches(']').split("][").map(|n| n.parse::<usize>().ok());
        count = dims.product();
    }
    let values = values.map(|values| {
        split(values.trim().trim_start_matches('{').trim_end_matches('}'))
            .iter()
            .map(|value| integer(value).unwrap_or(0))
            .collect()
    });
    let bytes = count.unwrap_or(0) * element;
    Variable { name, space, align: align.max(element), bytes, values, element }
}

/// Parses an integer in PTX notation.
pub(crate) fn integer(text: &str) -> Option<u64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// Parses the variables of `(.., ..)`; also returns the rest of the text.
fn parameters(text: &str) -> (Vec<Variable>, &str) {
    let Some(text) = text.trim_start().strip_prefix('(') else { return (Vec::new(), text) };
    let end = text.find(')').unwrap_or(text.len());
    let list = split(&text[..end]).iter().map(|p| variable(p)).collect();
    (list, text.get(end + 1..).unwrap_or(""))
}

/// Parses a declaration before `{` or `;`: `.visible .entry name(..)` or `.func (..) name(..)`.
fn function(text: &str) -> Option<Function> {
    let is_entry = text.contains(".entry");
    let at = text.find(if is_entry { ".entry" } else { ".func" })?;
    let rest = &text[at + if is_entry { 6 } else { 5 }..];
    let (returns, rest) = parameters(rest);
    let rest = rest.trim_start();
    let end = rest.find(|c: char| c == '(' || c.is_whitespace()).unwrap_or(rest.len());
    let (parameters, _) = parameters(&rest[end..]);
    let name = rest[..end].to_owned();
    Some(Function { name, is_entry, returns, parameters, body: None })
}

/// The end of a block; `text` begins after its `{`.
fn block_end(text: &str) -> usize {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Parses a module.
pub(crate) fn parse(text: &str) -> Module {
    let text = without_comments(text);
    let mut module = Module::default();
    let mut rest = text.as_str();
    loop {
        rest = rest.trim_start();
        // Directives that end with the line, without `;`.
        if [".version", ".target", ".address_size", ".file"].iter().any(|d| rest.starts_with(d)) {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
            continue;
        }
        let Some(end) = rest.find(['{', ';']) else { return module };
        let head = &rest[..end];
        let is_function = head.contains(".entry") || head.contains(".func");
        if is_function {
            let has_body = rest[end..].starts_with('{');
            let length = if has_body { block_end(&rest[end + 1..]) } else { 0 };
            if let Some(mut function) = function(head) {
                function.body = has_body.then(|| statements(&rest[end + 1..end + 1 + length]));
                module.functions.push(function);
            }
            rest = &rest[end + 1 + length..];
            rest = rest.strip_prefix('}').unwrap_or(rest);
        } else {
            // `.global .. = {..};`
            let Some(end) = rest.find(';') else { return module };
            if [".global", ".const", ".shared"].iter().any(|space| head.contains(space)) {
                module.variables.push(variable(&rest[..end]));
            }
            rest = &rest[end + 1..];
        }
    }
}

fn statements(text: &str) -> Vec<Statement> {
    let mut list = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        if let Some(tail) = rest.strip_prefix('{') {
            list.push(Statement::Open);
            rest = tail.trim_start();
            continue;
        }
        if let Some(tail) = rest.strip_prefix('}') {
            list.push(Statement::Close);
            rest = tail.trim_start();
            continue;
        }
        let end = rest.find(';').unwrap_or(rest.len());
        let word = rest.find(|c: char| !(c.is_alphanumeric() || "_$".contains(c))).unwrap_or(0);
        if word > 0 && word < end && rest[word..].starts_with(':') {
            list.push(Statement::Label(rest[..word].to_owned()));
            rest = rest[word + 1..].trim_start();
            continue;
        }
        if rest.starts_with(".loc") && !rest.starts_with(".local") {
            rest = rest.find('\n').map_or("", |end| rest[end..].trim_start());
            continue;
        }
        if let Some(statement) = statement(rest[..end].trim()) {
            list.push(statement);
        }
        rest = rest.get(end + 1..).unwrap_or("").trim_start();
    }
    list
}

fn statement(text: &str) -> Option<Statement> {
    if text.is_empty() || text.starts_with(".pragma") {
        return None;
    }
    if let Some(rest) = text.strip_prefix(".reg") {
        let rest = rest.trim_start();
        let (kind, names) = rest.split_once(char::is_whitespace)?;
        let mut all = Vec::new();
        for name in split(names) {
            match name.split_once('<') {
                Some((stem, count)) => {
                    let count: usize = count.trim_end_matches('>').parse().ok()?;
                    all.extend((0..count).map(|i| format!("{stem}{i}")));
                }
                None => all.push(name),
            }
        }
        return Some(Statement::Registers(kind.trim_start_matches('.').to_owned(), all));
    }
    if text.starts_with('.') {
        return Some(Statement::Variable(variable(text)));
    }
    let (predicate, text) = match text.strip_prefix('@') {
        Some(rest) => {
            let (register, text) = rest.split_once(char::is_whitespace)?;
            let (register, negated) = match register.strip_prefix('!') {
                Some(register) => (register, true),
                None => (register, false),
            };
            (Some((register.to_owned(), negated)), text.trim_start())
        }
        None => (None, text),
    };
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let name = text[..end].split('.').map(str::to_owned).collect();
    Some(Statement::Instruction(Instruction { predicate, name, operands: split(&text[end..]) }))
}
