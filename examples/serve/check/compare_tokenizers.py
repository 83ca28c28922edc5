#!/usr/bin/env python3
"""Compares `serve tokenize` with the `tokenizers` package on texts of many scripts.

    compare_tokenizers.py SERVE [--model FILE.gguf] [--texts N] [--seed S]

With --model the vocabulary of that file (byte-level, as SmolLM2's). Without, vocabularies that the
package trains on such texts here: byte-level with the pre-tokenizers of GPT-2 and of Llama 3, and one
as SentencePiece makes it. Exit 0: all agree. 1: they do not. 77: the package is not there.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

from gguf_files import metadata, write_vocabulary

try:
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
except ImportError:
    print("SKIPPED: comparing tokenizers needs Python's package tokenizers")
    sys.exit(77)

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
}

# First and last code points: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Georgian,
# Hangul, Kana, Han, mathematical letters, emoji, combining marks, punctuation, numbers, spaces.
RANGES = [(0x20, 0x7E), (0x20, 0x7E), (0x61, 0x7A), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA),
          (0x620, 0x64A), (0x660, 0x669), (0x904, 0x939), (0x93E, 0x94D), (0xE01, 0xE3A), (0x10D0, 0x10F0),
          (0xAC00, 0xAD00), (0x3041, 0x30FF), (0x4E00, 0x4F00), (0x1D400, 0x1D44F), (0x1F600, 0x1F64F),
          (0x300, 0x32F), (0x2010, 0x203A), (0x2150, 0x218B), (0x2460, 0x249B), (0x2000, 0x200F), (0x30, 0x39)]
WORDS = ["don't", "I'LL", "we've", "it'S", "he'd", "they're", "ONE'ſ", "  ", "\n", "\n\n ", "\t", "\r\n", " \n x",
         "\u3000", "\xa0", "\x85", "\u2028", "3.14159", "1234567", "½", "٣٤٥", "naïve", "e\u0301", "İstanbul", "ß",
         "日本語", "한국어", "עברית", "العربية", "हिन्दी", "ไทย", "🙂👍🏽", "👨‍👩‍👧", "{\"a\": [1, 2]}", "x = y_1 ** 2;",
         "http://a.b/c?d=e&f", "...", "!!!\n", "—", "<|im_start|>", "<|im_end|>", "<s>", "▁", "a" * 40, "\x00", "\x7f"]


def generated_texts(count, seed):
    rng = random.Random(seed)

    def run():
        first, last = rng.choice(RANGES)
        codes = (rng.randint(first, last) for _ in range(rng.randint(1, 8)))
        return "".join(c for c in map(chr, codes) if unicodedata.category(c) != "Cn")

    def text():
        parts = (rng.choice(WORDS) if rng.random() < 0.4 else run() for _ in range(rng.randint(0, 20)))
        return "".join(part + rng.choice(["", " ", " ", "  "]) for part in parts)

    return [text() for _ in range(count)]


def byte_level(name, tokens, types, merges):
    """As the package has it: special tokens by name, merges inside what the pre-tokenizer gives."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges,
                                     ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True)
                                  for t, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def from_file(path):
    values = metadata(path)
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    return byte_level(values["tokenizer.ggml.pre"], values["tokenizer.ggml.tokens"],
                      values["tokenizer.ggml.token_type"], merges)


def trained(name, corpus, path):
    """A vocabulary of 3,000 tokens, written to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    special = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=3000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token in special else 1 for token in tokens]
    merges = [tuple(merge) for merge in model["merges"]]
    write_vocabulary(path, {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0})
    return byte_level(name, tokens, types, merges)


def trained_sentence_piece(corpus, path):
    """Pieces with a sign for spaces and bytes for what is no piece, as Llama 2's. Scores are ranks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=1500, limit_alphabet=300, max_token_length=8, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [piece for piece in sorted(model["vocab"], key=model["vocab"].get) if piece not in first]
    tokens = first + pieces
    rank = {}  # of a piece: that of the first merge that makes it
    for i, (left, right) in enumerate(model["merges"]):
        rank.setdefault(left + right, i)
    known = set(pieces)  # SentencePiece knows no merges: any two pieces that together are one
    pairs = sorted((rank[piece], piece[:cut], piece[cut:]) for piece in pieces if piece in rank
                   for cut in range(1, len(piece)) if piece[:cut] in known and piece[cut:] in known)
    scores = [0.0] * len(first) + [-float(rank.get(piece, 10**6)) for piece in pieces]
    write_vocabulary(path, {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    other = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)},
                                 merges=[(left, right) for _, left, right in pairs],
                                 byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    other.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    other.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>")])
    return other


def compare(serve, model, tokenizer, texts, what):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(texts, file)
        file.flush()
        out = subprocess.run([serve, "tokenize", "--model", model, "--texts", file.name],
                             check=True, capture_output=True, text=True).stdout
    wrong = 0
    for text, ours in zip(texts, json.loads(out), strict=True):
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        if ours == theirs:
            continue
        wrong += 1
        if wrong <= 5:
            print(f"  {text!r}\n    serve      {[tokenizer.id_to_token(t) for t in ours]}\n"
                  f"    tokenizers {[tokenizer.id_to_token(t) for t in theirs]}")
    print(f"{what}: {len(texts) - wrong} of {len(texts)} texts have the same tokens")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--model")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    texts = generated_texts(arguments.texts, arguments.seed)
    if arguments.model:
        return compare(arguments.serve, arguments.model, from_file(arguments.model), texts, arguments.model)
    corpus = generated_texts(20000, arguments.seed + 1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in PRE_TOKENIZERS:
            path = str(pathlib.Path(folder) / f"{name}.gguf")
            wrong += compare(arguments.serve, path, trained(name, corpus, path), texts, name)
        path = str(pathlib.Path(folder) / "sentence_piece.gguf")
        plain = [text.replace("<s>", "") for text in texts]  # after it the package adds no space
        wrong += compare(arguments.serve, path, trained_sentence_piece(corpus, path), plain, "SentencePiece")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
