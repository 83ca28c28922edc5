#!/usr/bin/env python3
"""Compares `serve score` with `transformers` on the same GGUF file, both in fp32.

    compare_logits.py SERVE MODEL.gguf [--seed S]

Teacher-forced over 20 prompts of 5 to 2,000 tokens: the greatest logit is the same token, except
where its lead over the second is below 1e-3, at no more than 1 % of the positions, which are listed.
The perplexity of a text of 5,000 tokens agrees within 0.1 %. Exit 0: so it is. 1: it is not. 77: the
packages are not there.
"""
import argparse
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    print(f"SKIPPED: comparing logits needs Python's packages torch, transformers, gguf, accelerate ({error})")
    sys.exit(77)

LENGTHS = [5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1500, 2000]
LONG = 5000
LEAD = 1e-3


def texts_of_the_library():
    """English with code between: the pages and headers of this repository."""
    root = pathlib.Path(__file__).resolve().parents[3]
    files = sorted(root.glob("docs/*.md")) + sorted(root.glob("include/chunkattn/detail/tree/*.hpp"))
    return "\n".join(file.read_text() for file in files)


def ours(serve, model, sequences):
    """Per sequence: (greatest token, its lead, log-probability of the next token) of each position."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sequences, file)
        file.flush()
        command = [serve, "score", "--model", model, "--tokens", file.name, "--weights", "fp32", "--kv", "fp32"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def theirs(model, sequence):
    with torch.inference_mode():
        logits = model(torch.tensor([sequence])).logits[0]
    two = logits.topk(2).values
    following = torch.tensor(sequence[1:])
    log_p = torch.log_softmax(logits[:-1].double(), -1).gather(1, following[:, None])[:, 0]
    return logits.argmax(-1).tolist(), (two[:, 0] - two[:, 1]).tolist(), log_p.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    folder, name = str(arguments.model.parent), arguments.model.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()

    tokens = tokenizer(texts_of_the_library()).input_ids
    sequences = []
    for length in LENGTHS + [LONG]:
        first = rng.randrange(len(tokens) - length)
        sequences.append(tokens[first:first + length])

    positions, different, wrong = 0, [], 0
    for number, (sequence, mine) in enumerate(zip(sequences, ours(arguments.serve, str(arguments.model), sequences))):
        greatest, leads, log_p = theirs(model, sequence)
        if len(sequence) == LONG:
            perplexity = [math.exp(-sum(values) / len(values)) for values in (mine["log_p"], log_p)]
            break
        positions += len(sequence)
        for at, (a, b, lead) in enumerate(zip(mine["greatest"], greatest, leads, strict=True)):
            if a != b:
                different.append((number, at, lead))
                wrong += lead >= LEAD
    for number, at, lead in different:
        print(f"  prompt {number} of {LENGTHS[number]} tokens, position {at}: another token, lead {lead:.2g}")
    print(f"greatest logit: the same at {positions - len(different)} of {positions} positions, "
          f"{wrong} differ by a lead of {LEAD} or more")
    off = abs(perplexity[0] / perplexity[1] - 1)
    print(f"perplexity of {LONG} tokens: {perplexity[0]:.5f}, transformers {perplexity[1]:.5f}: {off:.2e} apart")
    return wrong > 0 or len(different) > positions / 100 or not off < 1e-3


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
