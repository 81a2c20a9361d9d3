//! Pieces of a text give the ids of the whole text.

use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokens for the bytes as `ByteLevel` writes them, and some merges.
fn byte_level_model() -> Value {
    let letters = "abcdesty .,'!12ĠĊčéä中ã\u{102}\u{10a}-—ÃĤ©Ģ¸Ń";
    let merges =
        ["t h", "Ġ t", "Ġt h", "a b", "Ċ Ċ", "Ġ Ġ", ". Ċ", "e Ġ", "1 2", "' s", "ĠĠ a", "ab e"];
    let mut vocab = serde_json::Map::new();
    let mut add = |token: String| {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    };
    add("<unk>".to_owned());
    letters.chars().for_each(|letter| add(letter.to_string()));
    add("h".to_owned());
    merges.iter().for_each(|merge| add(merge.replace(' ', "")));
    json!({"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "vocab": vocab,
           "merges": merges})
}

/// Tokens like sentencepiece's; no token has a space after another character.
fn sentencepiece_model(more: &[&str]) -> Value {
    let merges = ["t h", "▁ t", "▁t h", "a b", "▁ ▁", "1 2", "▁▁ a", "ab e"];
    let mut vocab = serde_json::Map::new();
    let letters = "abcdesthy.,!12▁中é\n<>/";
    let tokens = letters.chars().map(String::from).chain(merges.map(|m| m.replace(' ', "")));
    for token in tokens.chain(more.iter().map(|merge| merge.replace(' ', ""))) {
        let id = vocab.len() + 1;
        vocab.entry(token).or_insert(id.into());
    }
    vocab.insert("<unk>".to_owned(), 0.into());
    let merges: Vec<&str> = merges.iter().chain(more).copied().collect();
    json!({"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "vocab": vocab,
           "merges": merges})
}

fn added(content: &str, strip: bool, normalized: bool) -> Value {
    json!({"id": 0, "content": content, "special": true, "single_word": false, "lstrip": strip,
           "rstrip": strip, "normalized": normalized})
}

fn tokenizer(
    normalizer: Value,
    pre_tokenizer: Value,
    model: Value,
    added: Vec<Value>,
) -> TokenizerFile {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let file = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer,
                      "pre_tokenizer": pre_tokenizer, "model": model});
    std::fs::write(&path, file.to_string()).unwrap();
    TokenizerFile::read(Path::new(&path)).unwrap()
}

/// Tokenizers of the published kinds, by name, and whether they allow cuts.
fn tokenizers() -> Vec<(&'static str, TokenizerFile, bool)> {
    let null = || Value::Null;
    let byte_level = |regex: bool, prefix: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true,
               "use_regex": regex})
    };
    let split = |pattern: Value, behavior: &str| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
    let regex = |regex: &str| split(json!({"Regex": regex}), "Isolated");
    let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "pretokenizers": parts});
    let normalizers = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let spaces = || replace(" ", "▁");
    let prepend = || json!({"type": "Prepend", "prepend": "▁"});
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
    let ends = || vec![added("</s>", false, false), added("<t h>", false, false)];
    let strips = || vec![added("</s>", true, false), added("  ", false, true)];
    let llama2_ends = || vec![added("</s>", false, true)];
    let bytes = byte_level_model;
    let pieces = || sentencepiece_model(&[]);
    let deepseek = || {
        sequence(vec![
            regex(r"\p{N}{1,3}"),
            regex("[一-龥぀-ゟ゠-ヿ]+"),
            regex(
                r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            byte_level(false, false),
        ])
    };
    let unigram = || {
        json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", -9.0], ["▁", -2.0], ["▁t", -3.0],
               ["t", -2.5], ["h", -2.5], ["th", -4.0], ["▁ab", -3.5], ["a", -2.0], ["b", -2.0]]})
    };
    let bert = || {
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                         "strip_accents": null, "lowercase": true})
    };
    let wordpiece = || {
        json!({"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 20,
               "vocab": {"<unk>": 0, "th": 1, "##e": 2, "t": 3, "##h": 4, "ab": 5, "中": 6, ".": 7}})
    };
    vec![
        ("gpt2", tokenizer(null(), byte_level(true, false), bytes(), ends()), true),
        ("prefix", tokenizer(null(), byte_level(true, true), bytes(), strips()), true),
        (
            "llama3",
            tokenizer(
                null(),
                sequence(vec![regex(LLAMA3), byte_level(false, false)]),
                bytes(),
                ends(),
            ),
            true,
        ),
        (
            "qwen",
            tokenizer(
                json!({"type": "NFC"}),
                sequence(vec![regex(LLAMA3), byte_level(false, false)]),
                bytes(),
                strips(),
            ),
            true,
        ),
        ("deepseek", tokenizer(null(), deepseek(), bytes(), ends()), true),
        (
            "digits",
            tokenizer(
                null(),
                sequence(vec![
                    json!({"type": "Digits", "individual_digits": true}),
                    byte_level(true, false),
                ]),
                bytes(),
                ends(),
            ),
            true,
        ),
        (
            "llama2",
            tokenizer(normalizers(vec![prepend(), spaces()]), null(), pieces(), ends()),
            true,
        ),
        (
            "llama2 ends",
            tokenizer(normalizers(vec![prepend(), spaces()]), null(), pieces(), llama2_ends()),
            true,
        ),
        (
            "crossing",
            tokenizer(
                normalizers(vec![prepend(), spaces()]),
                null(),
                sentencepiece_model(&["e ▁", "e▁ th"]),
                ends(),
            ),
            true,
        ),
        (
            "gemma",
            tokenizer(
                spaces(),
                split(json!({"String": " "}), "MergedWithPrevious"),
                pieces(),
                ends(),
            ),
            true,
        ),
        ("metaspace", tokenizer(null(), metaspace("always", true), pieces(), ends()), true),
        ("first", tokenizer(null(), metaspace("first", false), pieces(), strips()), true),
        (
            "t5",
            tokenizer(
                json!({"type": "NFKC"}),
                sequence(vec![json!({"type": "WhitespaceSplit"}), metaspace("always", true)]),
                unigram(),
                ends(),
            ),
            true,
        ),
        (
            "unigram",
            tokenizer(
                normalizers(vec![
                    json!({"type": "NFKC"}),
                    json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}),
                ]),
                metaspace("always", true),
                unigram(),
                ends(),
            ),
            true,
        ),
        (
            "bert",
            tokenizer(bert(), json!({"type": "BertPreTokenizer"}), wordpiece(), strips()),
            true,
        ),
        // Tokenizers without cuts.
        (
            "first word",
            tokenizer(
                null(),
                sequence(vec![json!({"type": "WhitespaceSplit"}), metaspace("first", true)]),
                pieces(),
                ends(),
            ),
            false,
        ),
        ("no words", tokenizer(null(), byte_level(false, false), bytes(), ends()), false),
        (
            "lengths",
            tokenizer(null(), json!({"type": "FixedLength", "length": 5}), pieces(), ends()),
            false,
        ),
        ("across", tokenizer(null(), regex(r"\S+[ \n]\S+|\s"), pieces(), ends()), false),
        ("gaps", tokenizer(null(), regex("[ab]+"), unigram(), ends()), false),
        (
            "strip",
            tokenizer(
                json!({"type": "Strip", "strip_left": true, "strip_right": true}),
                byte_level(true, false),
                bytes(),
                ends(),
            ),
            false,
        ),
        ("whole unigram", tokenizer(spaces(), null(), unigram(), ends()), false),
        (
            "crossing replacement",
            tokenizer(
                json!({"type": "Replace", "pattern": {"Regex": "e[ \\n]t"}, "content": "a"}),
                byte_level(true, false),
                bytes(),
                ends(),
            ),
            false,
        ),
    ]
}

fn ids(file: &TokenizerFile, text: &str) -> Vec<u32> {
    file.tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// The ids of a text in the smallest pieces, and the number of pieces.
fn ids_of_pieces(file: &TokenizerFile, text: &str) -> (Vec<u32>, usize) {
    let cuts = Cuts::of(file);
    let pieces: Vec<&str> = cuts.pieces(&file.tokenizer, text, 1).collect();
    (pieces.iter().flat_map(|piece| ids(file, piece)).collect(), pieces.len())
}

#[test]
fn published_tokenizers_are_cut() {
    for (name, file, cut) in tokenizers() {
        let (of_pieces, pieces) = ids_of_pieces(&file, &"the 12th abe ab.\nthe end ".repeat(20));
        assert_eq!(of_pieces, ids(&file, &"the 12th abe ab.\nthe end ".repeat(20)), "{name}");
        assert_eq!(pieces > 20, cut, "{name}: {pieces} pieces");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pieces_give_the_ids_of_the_whole(
        parts in proptest::collection::vec(proptest::sample::select(vec![
            " ", " ", " ", "\n", "\n", "\r\n", "\t", "a", "b", "th", "e", "s", "'s", "'", ".", "!", "12",
            "1", "é", "e\u{301}", "\u{301}", "中", "。", "\u{a0}", "\u{3000}", "¨", "▁", "</s>", "<t h>",
            "<t", "h>", "—", "t", "ab", "\u{200d}", "\u{fdfa}", "\u{600}", "ﬁ", "\u{ad}",
        ]), 0..40)
    ) {
        let text = parts.concat();
        TOKENIZERS.with(|tokenizers| {
            for (name, file, _) in tokenizers {
                let (of_pieces, _) = ids_of_pieces(file, &text);
                prop_assert_eq!(of_pieces, ids(file, &text), "{} {:?}", name, text);
            }
            Ok(())
        })?;
    }
}

thread_local! {
    static TOKENIZERS: Vec<(&'static str, TokenizerFile, bool)> = tokenizers();
}
