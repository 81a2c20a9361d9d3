//! Splits command lines into words like a shell.

/// The commands of a text: line (from 0) and words without quotes. Variable assignments before a
/// command are dropped.
pub(super) fn commands(text: &str) -> Vec<(usize, Vec<String>)> {
    let mut commands = Vec::new();
    let (mut words, mut word): (Vec<String>, Option<String>) = (Vec::new(), None);
    let mut quote = None;
    let (mut line, mut start) = (0, 0);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\n' {
            line += 1;
        }
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') if chars.peek() == Some(&'\n') => {
                chars.next();
                line += 1;
                words.extend(word.take());
            }
            (None, '\\') => word.get_or_insert_default().extend(chars.next()),
            (None, '#') if word.is_none() => {
                while chars.peek().is_some_and(|&c| c != '\n') {
                    chars.next();
                }
            }
            (None, '\n' | ';' | '|' | '&' | '(' | ')' | '<' | '>') => {
                words.extend(word.take());
                push(&mut commands, start, std::mem::take(&mut words));
                start = line;
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, c) => {
                if words.is_empty() && word.is_none() {
                    start = line;
                }
                word.get_or_insert_default().push(c);
            }
        }
    }
    words.extend(word);
    push(&mut commands, start, words);
    commands
}

fn push(commands: &mut Vec<(usize, Vec<String>)>, line: usize, words: Vec<String>) {
    let is_variable = |word: &&String| {
        let name = word.split_once('=').map_or("", |(name, _)| name);
        !name.is_empty()
            && name.chars().all(|c| c.is_ascii_uppercase() || "_0123456789".contains(c))
    };
    let words = words.iter().skip_while(is_variable).filter(|word| *word != "…");
    let words: Vec<String> = words.cloned().collect();
    if !words.is_empty() {
        commands.push((line, words));
    }
}
