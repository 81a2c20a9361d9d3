//! SentencePiece's BPE in a `tokenizer.json`, with merges instead of scores.
//!
//! llama.cpp joins the two neighbours whose joined piece has the highest score. Merges give the
//! same tokens under two conditions. A piece has a merge for every pair of pieces that it consists
//! of. And the merges of one piece come before the merges of the next, if the two have a common
//! character. Both hold for merges that were made of scores: Llama 2, Mistral, Gemma. Added tokens
//! need no order, because they are cut out of a text before.

use std::collections::{BTreeMap, HashMap, HashSet};

use fulgurite_error::Result;
use serde_json::Value as Json;

use super::special::Special;
use super::{Kind, Token, Vocabulary, bpe, fail};

/// Reads the model of a `tokenizer.json`.
///
/// # Errors
/// If no scores say the same as the merges, or text is prepared in another way than SentencePiece
/// does.
pub(super) fn read(json: &Json, special: Special) -> Result<Vocabulary> {
    let model = &json["model"];
    let adds_space = Some(adds_space(json)?);
    let texts = bpe::tokens(model)?;
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let added: HashSet<&str> = added.filter_map(|token| token["content"].as_str()).collect();
    let scores = scores(&texts, &bpe::merges(model)?, &added)?;
    let unknown = model["unk_token"].as_str();
    let token = |(id, text): (usize, Option<String>)| match text {
        None => Token::unused(id),
        Some(text) => {
            let kind = match text.as_str() {
                text if Some(text) == unknown => Kind::Unknown,
                text if is_byte(text) => Kind::Byte,
                _ => Kind::Normal,
            };
            let score = scores.get(text.as_str()).copied().unwrap_or(0.0);
            Token { text, score, kind }
        }
    };
    let tokens = texts.clone().into_iter().enumerate().map(token).collect();
    let merges = Vec::new();
    Ok(Vocabulary {
        kind: ("llama", "default"),
        tokens,
        merges,
        adds_space,
        stripping: None,
        special,
    })
}

/// Whether a token is a byte: `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|text| text.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Returns the scores of the pieces that merges make. Texts are cut at `added` tokens before.
fn scores<'a>(
    texts: &'a [Option<String>],
    merges: &[[String; 2]],
    added: &HashSet<&str>,
) -> Result<HashMap<&'a str, f32>> {
    let pieces: HashSet<&str> = texts.iter().flatten().map(String::as_str).collect();
    let has: HashSet<(&str, &str)> =
        merges.iter().map(|[left, right]| (left.as_str(), right.as_str())).collect();
    // First and last merge of each piece.
    let mut ranks: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (rank, [left, right]) in merges.iter().enumerate() {
        let entry = ranks.entry(format!("{left}{right}")).or_insert((rank, rank));
        entry.1 = rank;
    }
    for piece in ranks.keys() {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            let both = pieces.contains(left) && pieces.contains(right);
            if both && !has.contains(&(left, right)) {
                return fail(&format!(
                    "tokenizer.json: no scores of SentencePiece say the same as its merges: {piece:?} is made in \
                     another way than of {left:?} and {right:?}"
                ));
            }
        }
    }
    let mut order: Vec<(&String, &(usize, usize))> = ranks.iter().collect();
    order.sort_by_key(|(_, (first, _))| *first);
    // Pieces whose merges have not all come yet.
    let mut open: Vec<(&String, usize)> = Vec::new();
    for (piece, (first, last)) in order.iter().filter(|(piece, _)| !added.contains(piece.as_str()))
    {
        open.retain(|(_, end)| end > first);
        // Pieces without a common character never compete for a neighbour.
        let mixed = open.iter().find(|(other, _)| piece.chars().any(|c| other.contains(c)));
        if let Some((other, _)) = mixed {
            return fail(&format!(
                "tokenizer.json: no scores of SentencePiece say the same as its merges: those of {other:?} are mixed \
                 with those of {piece:?}"
            ));
        }
        open.push((piece, *last));
    }
    let rank: HashMap<&str, usize> =
        order.iter().enumerate().map(|(rank, (piece, _))| (piece.as_str(), rank)).collect();
    let score = |text: &'a str| Some((text, -(*rank.get(text)? as f32)));
    Ok(texts.iter().flatten().filter_map(|text| score(text)).collect())
}

/// Whether text gets a space before it. Checks that it is prepared as SentencePiece does.
fn adds_space(json: &Json) -> Result<bool> {
    let normalizer = &json["normalizer"];
    let steps = match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"].as_array().map_or(&[][..], Vec::as_slice),
        None => &[],
        Some(_) => std::slice::from_ref(normalizer),
    };
    let (mut prepends, mut replaces) = (false, false);
    for step in steps {
        match step["type"].as_str() {
            Some("Prepend") if step["prepend"] == "▁" => prepends = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == "▁" => {
                replaces = true;
            }
            _ => return fail(&format!("tokenizer.json: GGUF lacks the normalizer {step}")),
        }
    }
    let pre = &json["pre_tokenizer"];
    match pre["type"].as_str() {
        None if replaces => Ok(prepends),
        // A split at spaces, after all spaces were replaced.
        Some("Split") if replaces && pre["pattern"]["String"] == " " => Ok(prepends),
        Some("Metaspace") if !replaces && pre["replacement"] == "▁" && pre["split"] == false => {
            Ok(pre["prepend_scheme"] != "never")
        }
        _ => fail(&format!("tokenizer.json: SentencePiece does not split text like {pre}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<Option<String>> {
        texts.iter().map(|text| Some((*text).to_owned())).collect()
    }

    fn merges(merges: &[(&str, &str)]) -> Vec<[String; 2]> {
        merges.iter().map(|(a, b)| [(*a).to_owned(), (*b).to_owned()]).collect()
    }

    #[test]
    fn merges_become_scores() {
        let texts = texts(&["a", "b", "c", "bc", "ab", "abc"]);
        let found = scores(
            &texts,
            &merges(&[("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]),
            &HashSet::new(),
        )
        .unwrap();
        assert_eq!((found["bc"], found["ab"], found["abc"]), (0.0, -1.0, -2.0));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn merges_without_scores_are_refused() {
        let texts = texts(&["a", "b", "c", "bc", "ab", "abc"]);
        let error = |list: &[(&str, &str)]| {
            scores(&texts, &merges(list), &HashSet::new()).unwrap_err().to_string()
        };
        let incomplete = error(&[("b", "c"), ("a", "b"), ("a", "bc")]);
        assert!(incomplete.contains("\"abc\"") && incomplete.contains("\"ab\""), "{incomplete}");
        let list = [("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c")];
        assert!(scores(&texts, &merges(&list), &HashSet::from(["abc"])).is_ok());
        let mixed = error(&[("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c")]);
        assert!(mixed.contains("mixed"), "{mixed}");
    }

    #[test]
    fn pieces_without_common_characters_may_mix() {
        let texts = texts(&["a", "aa", "aaa", "b", "bb", "bbb"]);
        let list = [("a", "a"), ("b", "b"), ("a", "aa"), ("b", "bb"), ("aa", "a"), ("bb", "b")];
        let found = scores(&texts, &merges(&list), &HashSet::new()).unwrap();
        assert!(found["aa"] > found["aaa"] && found["bb"] > found["bbb"]);
    }
}
