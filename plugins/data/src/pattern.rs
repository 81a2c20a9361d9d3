//! Regular expressions, reduced to the characters that follow each other in a match.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};

/// Maximum number of analysed pairs of places. Published tokenizers have less than a thousand.
const MAX_FOLLOWS: usize = 1 << 16;

/// Bytes of the shortest match; 0 if the expression cannot be analysed.
pub(crate) fn shortest_match(regex: &str) -> usize {
    let hir = regex_syntax::parse(regex).ok();
    hir.and_then(|hir| hir.properties().minimum_len()).unwrap_or(0)
}

/// A regular expression, reduced to the characters that follow each other in its matches.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// The characters that each place in the expression matches.
    places: Vec<ClassUnicode>,
    /// Places that follow each other in some match.
    follows: Vec<(usize, usize)>,
    /// Characters that are a match on their own.
    alone: ClassUnicode,
}

/// The first and the last places of the matches of a part of an expression.
struct Ends {
    first: Vec<usize>,
    last: Vec<usize>,
    /// Whether this part matches the empty text.
    empty: bool,
}

impl Pattern {
    /// Analyses an expression. Returns `None` if its matches depend on the surrounding text in
    /// another way than by `(?!\S)` (white space or the end follows).
    pub(crate) fn new(regex: &str) -> Option<Self> {
        // The parser misreads possessive quantifiers.
        let counts = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit() || byte == b',');
        let counted =
            regex.split("}+").any(|part| part.rsplit_once('{').is_some_and(|(_, n)| counts(n)));
        if counted || ["++", "*+", "?+"].iter().any(|quantifier| regex.contains(quantifier)) {
            return None;
        }
        // Dropping `(?!\S)` only adds matches, so no crossing is missed.
        let mut pattern =
            Self { places: Vec::new(), follows: Vec::new(), alone: ClassUnicode::empty() };
        let ends = pattern.add(&regex_syntax::parse(&regex.replace(r"(?!\S)", "")).ok()?)?;
        // Empty matches would split between all characters.
        if ends.empty || pattern.follows.len() > MAX_FOLLOWS {
            return None;
        }
        // With `(?!\S)` a single character may fail to match.
        let mut certain =
            Self { places: Vec::new(), follows: Vec::new(), alone: ClassUnicode::empty() };
        let without = regex_syntax::parse(&regex.replace(r"\s+(?!\S)|", "")).ok();
        if let Some(ends) = without.and_then(|hir| certain.add(&hir)) {
            for place in ends.first.iter().filter(|place| ends.last.contains(place)) {
                pattern.alone.union(&certain.places[*place]);
            }
        }
        Some(pattern)
    }

    /// The expression for one string.
    pub(crate) fn of_string(string: &str) -> Option<Self> {
        Self::new(&regex_syntax::escape(string))
    }

    /// The characters directly before `next` in some match.
    pub(crate) fn before(&self, next: char) -> ClassUnicode {
        let mut before = ClassUnicode::empty();
        for &(place, follower) in &self.follows {
            if contains(&self.places[follower], next) {
                before.union(&self.places[place]);
            }
        }
        before
    }

    /// Whether some match contains this character.
    pub(crate) fn has(&self, character: char) -> bool {
        self.places.iter().any(|place| contains(place, character))
    }

    /// Whether this character is a match on its own.
    pub(crate) fn matches_alone(&self, character: char) -> bool {
        contains(&self.alone, character)
    }

    fn place(&mut self, class: ClassUnicode) -> Ends {
        self.places.push(class);
        let place = self.places.len() - 1;
        Ends { first: vec![place], last: vec![place], empty: false }
    }

    fn add(&mut self, hir: &Hir) -> Option<Ends> {
        let nothing = || Ends { first: Vec::new(), last: Vec::new(), empty: true };
        Some(match hir.kind() {
            HirKind::Empty => nothing(),
            HirKind::Literal(literal) => {
                let mut ends = nothing();
                for character in std::str::from_utf8(&literal.0).ok()?.chars() {
                    let range = ClassUnicodeRange::new(character, character);
                    let next = self.place(ClassUnicode::new([range]));
                    ends = self.concatenate(ends, next);
                }
                ends
            }
            HirKind::Class(Class::Unicode(class)) => self.place(class.clone()),
            HirKind::Class(Class::Bytes(_)) | HirKind::Look(_) => return None,
            HirKind::Repetition(repetition) => {
                let mut ends = self.add(&repetition.sub)?;
                if repetition.max != Some(1) {
                    self.follow(&ends.last.clone(), &ends.first);
                }
                ends.empty |= repetition.min == 0;
                ends
            }
            HirKind::Capture(capture) => self.add(&capture.sub)?,
            HirKind::Concat(parts) => {
                let mut ends = nothing();
                for part in parts {
                    let next = self.add(part)?;
                    ends = self.concatenate(ends, next);
                }
                ends
            }
            HirKind::Alternation(parts) => {
                let mut ends = Ends { empty: false, ..nothing() };
                for part in parts {
                    let part = self.add(part)?;
                    ends.first.extend(part.first);
                    ends.last.extend(part.last);
                    ends.empty |= part.empty;
                }
                ends
            }
        })
    }

    fn concatenate(&mut self, mut left: Ends, mut right: Ends) -> Ends {
        self.follow(&left.last, &right.first);
        if left.empty {
            left.first.extend(&right.first);
        }
        if right.empty {
            right.last.extend(left.last);
        }
        Ends { first: left.first, last: right.last, empty: left.empty && right.empty }
    }

    fn follow(&mut self, from: &[usize], to: &[usize]) {
        for &from in from {
            if self.follows.len() > MAX_FOLLOWS {
                return;
            }
            self.follows.extend(to.iter().map(|&to| (from, to)));
        }
    }
}

/// Whether a class contains a character.
pub(crate) fn contains(class: &ClassUnicode, character: char) -> bool {
    class.iter().any(|range| (range.start()..=range.end()).contains(&character))
}
