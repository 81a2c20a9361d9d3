//! Suggestions for an unknown key, plugin or variable.

use super::catalogue::{KnownKey, KnownTable, known_keys};
use super::foreign;

/// Up to this many keys are always listed.
const FEW: usize = 8;
/// Up to this many keys are listed if none is similar to the written one.
const MANY: usize = 20;

/// Completes "unknown key `table.key`" with a suggestion and the table's keys.
pub(crate) fn for_key(table: &str, key: &str, expected: &[String], known: &[KnownTable]) -> String {
    let meant = meant_key(table, key, expected, &known_keys(known));
    let mut text = meant.as_ref().map_or(String::new(), |meant| format!("; {meant}"));
    if expected.is_empty() {
        return text;
    }
    let of = match table {
        "" => "at the top level".to_owned(),
        table => format!("of `{table}`"),
    };
    let similar = similar(key, expected);
    text += &match (expected.len(), &meant) {
        (0..=FEW, _) => format!(" (the keys {of} are {})", expected.join(", ")),
        (_, Some(_)) => String::new(),
        (..) if !similar.is_empty() => format!(" (similar keys {of}: {})", similar.join(", ")),
        (..=MANY, None) => format!(" (the keys {of} are {})", expected.join(", ")),
        (count, None) => format!(" (`--help` lists the {count} keys {of})"),
    };
    text
}

fn meant_key(table: &str, key: &str, expected: &[String], all: &[KnownKey]) -> Option<String> {
    let same = expected.iter().find(|name| foreign::letters(name) == foreign::letters(key));
    if let Some(same) = same {
        return Some(format!("did you mean `{same}`?"));
    }
    let foreign: Vec<String> = foreign::keys(key)
        .into_iter()
        .filter(|path| all.iter().any(|known| known.path() == *path))
        .map(str::to_owned)
        .collect();
    if !foreign.is_empty() {
        return Some(did_you_mean(&foreign));
    }
    if let Some(advice) = foreign::without_key(key) {
        return Some(advice.to_owned());
    }
    // A plugin may be read with only the end of its path.
    let is_here = |known: &&KnownKey| {
        known.table == table || (!table.is_empty() && known.table.ends_with(&format!(".{table}")))
    };
    let of_name = || all.iter().filter(|known| known.name == key);
    let mut paths: Vec<String> =
        of_name().filter(|known| !is_here(known) && !known.in_list).map(KnownKey::path).collect();
    paths.dedup();
    if !paths.is_empty() {
        return Some(did_you_mean(&paths));
    }
    if let Some(near) = nearest(key, expected) {
        return Some(format!("did you mean `{near}`?"));
    }
    let mut plugins: Vec<String> = of_name()
        .filter_map(|known| known.plugin)
        .map(|(kind, name)| format!("the {kind} `{name}`"))
        .collect();
    plugins.truncate(4);
    (!plugins.is_empty())
        .then(|| format!("it is an option of {}", super::problem::one_of(&plugins)))
}

fn did_you_mean(paths: &[String]) -> String {
    let quoted: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
    format!("did you mean {}?", super::problem::one_of(&quoted))
}

/// Returns at most six keys that share a word with `key`.
fn similar<'a>(key: &str, expected: &'a [String]) -> Vec<&'a str> {
    let words = |name: &str| -> Vec<String> {
        let words = name.split(['_', '-', '.']).filter(|word| word.len() > 2);
        words.map(|word| word.trim_end_matches('s').to_lowercase()).collect()
    };
    let of_key = words(key);
    let shares = |name: &&String| words(name).iter().any(|word| of_key.contains(word));
    expected.iter().filter(shares).map(String::as_str).take(6).collect()
}

/// Returns a suggestion for an unknown plugin name.
pub(crate) fn for_plugin(kind: &str, name: &str, names: &[&str]) -> Option<String> {
    let owned: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let same = names.iter().copied().find(|other| foreign::plain(other) == foreign::plain(name));
    let foreign = foreign::plugin(kind, name).filter(|meant| names.contains(meant));
    if let Some(meant) = same.or(foreign).or_else(|| nearest(name, &owned)) {
        return Some(format!("did you mean `{meant}`?"));
    }
    foreign::without_plugin(kind, name).map(|advice| format!("{advice}."))
}

/// Returns the variable of a key, or one of `others`, that `variable` resembles. All lack the
/// prefix.
pub(crate) fn for_variable(
    variable: &str,
    others: &[&str],
    known: &[KnownTable],
) -> Option<String> {
    let keys = known_keys(known);
    let of_key = keys
        .iter()
        .filter(|key| !key.in_list)
        .map(|key| (key.path().replace('.', "_"), key.path().replace('.', "__").to_uppercase()));
    let others = others.iter().map(|other| (other.to_lowercase(), (*other).to_owned()));
    let written = variable.to_lowercase();
    let limit = written.chars().count() / 6;
    of_key
        .chain(others)
        .map(|(plain, meant)| (strsim::damerau_levenshtein(&written, &plain), meant))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, meant)| meant)
}

/// Returns the candidate with the smallest edit distance to `word`; `None` if none is similar.
///
/// Of several it is the one that differs by a doubled letter only, or else has the nearest length.
pub fn nearest<'a>(word: &str, candidates: &'a [String]) -> Option<&'a str> {
    let word = word.to_lowercase();
    let length = word.chars().count();
    let limit = (length / 3).max(1);
    candidates
        .iter()
        .map(|c| {
            let (lower, lengths) = (c.to_lowercase(), c.chars().count().abs_diff(length));
            let distance = strsim::damerau_levenshtein(&word, &lower);
            let differs = without_repeats(&word) != without_repeats(&lower);
            (distance, differs, lengths, c.as_str())
        })
        .filter(|(distance, ..)| *distance <= limit)
        .min()
        .map(|(.., candidate)| candidate)
}

/// Returns the letters of a word, without those that repeat the one before.
fn without_repeats(word: &str) -> Vec<char> {
    let mut letters: Vec<char> = word.chars().collect();
    letters.dedup();
    letters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_of_several() {
        let names = ["adam", "adamw", "fsdp", "fsdp2", "muon", "sgd"].map(str::to_owned);
        let found = |word: &str| nearest(word, &names);
        assert_eq!(found("adamv"), Some("adamw"));
        assert_eq!(found("adm"), Some("adam"));
        assert_eq!(found("fsdpp"), Some("fsdp"));
        assert_eq!(found("fsdp3"), Some("fsdp2"));
        assert_eq!(found("Mouon"), Some("muon"));
        assert_eq!(found("shampoo"), None);
    }
}
