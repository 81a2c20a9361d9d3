"""Small random decoders with tokenizers, one for each architecture that GGUF files are written for.

    python gguf_models.py DIR [NAME ...]

Weights are large enough that logits differ visibly, so that the greedy text of a correct reader is the same in f16.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "Hello, world! It's 12345 o'clock; we'll see 3 apples and 42 pears.",
    "Bytes äöü ß 漢字 🚀\nand\n\n  indented\ttext   with    spaces.  ",
    "def f(x):\n    return x**2 + 1  # done\n",
    "I'VE SAID: \"no\" — don't you'd they're 1999-2026",
    "<|user|> asks <tool> something <|end|> x",
]
SPECIAL = ["<unk>", "<s>", "<|end|>", "<|user|>"]
PLAIN = ["<tool>"]

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pre, ignore_merges=False, bos=False):
    """A byte-level BPE, trained on the texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    bytes_ = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = bytes_(True)
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_(True)])
    else:
        regex = dict(cl100k=CL100K, qwen2=QWEN2)[pre]
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_(False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_tokens(PLAIN)
    if bos:
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]),
        ])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    )


def sentencepiece(directory, space=True, keep_model=True):
    """A SentencePiece BPE, as `tokenizer.model` with `tokenizer.json` or as the latter alone."""
    import sentencepiece as spm

    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.txt"
    text.write_text("\n".join(line for t in TEXTS * 4 for line in t.split("\n") if line.strip()))
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "tokenizer"), vocab_size=400, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=space,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, hard_vocab_limit=False, minloglevel=2, split_digits=True,
    )
    text.unlink()
    (directory / "tokenizer.vocab").unlink()
    model = spm.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab and not piece.startswith("<0x"):
                merges.append((left, right, score))
    merges.sort(key=lambda m: (m[2], len(m[0]), len(m[1])), reverse=True)
    tokenizer = Tokenizer(models.BPE(vocab, [(a, b) for a, b, _ in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = ([normalizers.Prepend("▁")] if space else []) + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + ([decoders.Strip(" ", 1, 0)] if space else []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    if not keep_model:
        (directory / "tokenizer.model").unlink()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def rope(kind, **keys):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **keys))


SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
GROUPED = dict(SMALL, num_key_value_heads=2)
WIDE = dict(GROUPED, hidden_size=256, intermediate_size=512)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(factor=4.0, original_max_position_embeddings=32)

# Name: configuration of the vocabulary's size, and the tokenizer of a directory.
MODELS = {
    "llama": (lambda v: hf.LlamaConfig(**GROUPED, vocab_size=v, attention_bias=True, mlp_bias=True, **rope("llama3", **LLAMA3)), lambda d: byte_level("cl100k", True, bos=True)),
    "llama_spm": (lambda v: hf.LlamaConfig(**SMALL, vocab_size=v + 5, tie_word_embeddings=True), lambda d: sentencepiece(d)),
    "llama_yarn": (lambda v: hf.LlamaConfig(**WIDE, vocab_size=v, **rope("yarn", **YARN)), lambda d: byte_level("smollm")),
    "llama_yarn_factor": (lambda v: hf.LlamaConfig(**GROUPED, vocab_size=v, **rope("yarn", attention_factor=1.3, **YARN)), lambda d: byte_level("smollm")),
    "llama_linear": (lambda v: hf.LlamaConfig(**SMALL, vocab_size=v, **rope("linear", factor=2.5)), lambda d: byte_level("gpt-2")),
    "mistral": (lambda v: hf.MistralConfig(**GROUPED, vocab_size=v, head_dim=32, sliding_window=None), lambda d: sentencepiece(d, keep_model=False)),
    "mistral_window": (lambda v: hf.MistralConfig(**GROUPED, vocab_size=v, sliding_window=96), lambda d: byte_level("gpt-2")),
    "qwen2": (lambda v: hf.Qwen2Config(**GROUPED, vocab_size=v, tie_word_embeddings=True), lambda d: byte_level("qwen2")),
    "qwen3": (lambda v: hf.Qwen3Config(**GROUPED, vocab_size=v, head_dim=24), lambda d: byte_level("qwen2")),
    "gemma": (lambda v: hf.GemmaConfig(**GROUPED, vocab_size=v, head_dim=32), lambda d: sentencepiece(d, space=False)),
    "gemma2": (lambda v: hf.Gemma2Config(**{**GROUPED, "num_hidden_layers": 4}, vocab_size=v, head_dim=32, sliding_window=8, query_pre_attn_scalar=32), lambda d: sentencepiece(d, space=False)),
    "gemma3_text": (
        lambda v: hf.Gemma3TextConfig(
            **{**GROUPED, "num_hidden_layers": 7}, vocab_size=v, head_dim=32, sliding_window=8, query_pre_attn_scalar=32,
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            ),
        ),
        lambda d: sentencepiece(d, space=False, keep_model=False),
    ),
    "gemma3_pattern": (
        lambda v: hf.Gemma3TextConfig(
            **GROUPED, vocab_size=v, head_dim=32, sliding_window=8, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        lambda d: sentencepiece(d, space=False),
    ),
    "gpt2": (
        lambda v: hf.GPT2Config(vocab_size=v, n_positions=128, n_embd=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2),
        lambda d: byte_level("gpt-2"),
    ),
    "phi3": (
        lambda v: hf.Phi3Config(**GROUPED, vocab_size=v, pad_token_id=0, original_max_position_embeddings=128, sliding_window=None),
        lambda d: byte_level("cl100k"),
    ),
    "phi3_long": (
        lambda v: hf.Phi3Config(
            **GROUPED, vocab_size=v, pad_token_id=0, original_max_position_embeddings=32, sliding_window=None,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1.5, 2.5, 4.0, 5.0, 6.0, 7.0],
            ),
        ),
        lambda d: byte_level("cl100k"),
    ),
    "olmo2": (lambda v: hf.Olmo2Config(**GROUPED, vocab_size=v, pad_token_id=0), lambda d: byte_level("cl100k")),
    "olmo2_tied": (lambda v: hf.Olmo2Config(**GROUPED, vocab_size=v, pad_token_id=0, tie_word_embeddings=True), lambda d: byte_level("cl100k")),
    "smollm3": (lambda v: hf.SmolLM3Config(**{**GROUPED, "num_hidden_layers": 5}, vocab_size=v, pad_token_id=0), lambda d: byte_level("cl100k", True)),
    "gpt_neox": (lambda v: hf.GPTNeoXConfig(**SMALL, vocab_size=v), lambda d: byte_level("gpt-2")),
    "gpt_neox_sequential": (
        lambda v: hf.GPTNeoXConfig(**SMALL, vocab_size=v, use_parallel_residual=False, tie_word_embeddings=True, hidden_act="gelu_new"),
        lambda d: byte_level("gpt-2"),
    ),
}


def fill(model, seed):
    """Random values; norms differ from their initial ones."""
    rng = np.random.Generator(np.random.PCG64(seed))
    gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            shape = tuple(parameter.shape)
            if parameter.dim() == 1:
                values = rng.uniform(-0.2, 0.2, shape)
                if "norm" in name.lower() or ".ln_" in name:
                    values = values + (1.0 if name.endswith("weight") and not gemma else 0.0)
            elif "embed" in name or ".wte" in name or ".wpe" in name:
                values = rng.normal(0, 1.0, shape)
            else:
                values = rng.normal(0, shape[-1] ** -0.5, shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def make(name, directory):
    config, tokenizer = MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer(directory)
    model = hf.AutoModelForCausalLM.from_config(config(len(tokenizer)), attn_implementation="eager").float().eval()
    fill(model, sorted(MODELS).index(name) + 1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        make(name, out / name)
