#!/usr/bin/env python3
"""K/V memory of models with sliding windows in Generator, beside K/V of all tokens: a table of docs/windows.md.

    python3 bench/pytorch/windows.py            # all, some minutes; --texts 8192 for a length alone

Layers and windows are those of Gemma 3 4B and gpt-oss-20b; weights are small and random. Eight texts come one after
another, so that the second one parts where nobody knew of it; 512 tokens of each are its own. Fails where a ratio is
beyond its limit, or where a text is another one than with K/V of all tokens.
"""

import argparse
import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

from chunkattn.transformers import Generator

SMALL = dict(vocab_size=257, hidden_size=32, intermediate_size=32, num_attention_heads=1, num_key_value_heads=1,
             head_dim=32, max_position_embeddings=65536)  # fmt: skip
KINDS = ["full_attention", "sliding_attention"]
STEP, OWN, NEW = 2048, 512, 4


def gemma3():
    kinds = [KINDS[(layer + 1) % 6 != 0] for layer in range(34)]
    return transformers.Gemma3TextConfig(
        **SMALL, num_hidden_layers=34, sliding_window=1024, layer_types=kinds)  # fmt: skip


def gpt_oss():
    kinds = [KINDS[layer % 2 == 0] for layer in range(24)]
    return transformers.GptOssConfig(**SMALL, num_hidden_layers=24, sliding_window=128, layer_types=kinds,
                                     num_local_experts=2, num_experts_per_tok=1)  # fmt: skip


# Name, configuration, and by (texts, tokens of each) the limit of K/V, None for none.
SHAPES = [
    ("Gemma 3 4B: 34 layers, 29 with a window of 1,024", gemma3,
     {(1, 32768): 0.20, (8, 32768): 0.30, (1, 8192): 0.30, (8, 8192): 0.55}),
    ("gpt-oss-20b: 24 layers, 12 with a window of 128", gpt_oss,
     {(1, 32768): 0.55, (8, 32768): 0.55, (1, 8192): None, (8, 8192): None}),
]  # fmt: skip


def make(config):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that attention matters
    return model


def run(model, prompts, swa_full):
    """Texts, bytes of K/V while all are live, at the peak, and rows computed."""
    generator = Generator(model, max_chunks=sum(map(len, prompts)) // 64 + 64, step_tokens=STEP, swa_full=swa_full,
                          typical_length=8192, check=False)  # fmt: skip
    requests = []
    live = len(prompts) + NEW
    for prompt in prompts:
        request = generator.submit(prompt, max_new_tokens=live + NEW, eos_token_id=None, do_sample=False)
        requests.append(request)
        while not request.tokens:
            generator.step()
    used = generator.kv_bytes_used
    peak = used  # a group's is within a step, when the chunks of its rows are there, too
    for group in generator.tree.windows:
        stats = group.stats()
        more = stats["peak_used_chunks"] - stats["used_chunks"]
        peak += more * generator._memory.bytes_per_chunk[group.window]
    while generator.has_work:
        generator.step()
    return [request.tokens for request in requests], used, peak, generator.stats["rows"] - generator.stats["new_tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="*", default=[32768, 8192], help="tokens of a text")
    options = parser.parse_args()
    wrong = []
    print("| shape | texts | K/V of all tokens, MiB | with windows | ratio | limit | at the peak | rows computed |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name, config, limits in SHAPES:
        model = make(config())
        for (count, tokens), limit in limits.items():
            if tokens not in options.texts:
                continue
            draw = random.Random(count * tokens)
            shared = [draw.randrange(257) for _ in range(tokens - OWN)]
            prompts = [shared + [draw.randrange(257) for _ in range(OWN)] for _ in range(count)]
            expected, whole, _, _ = run(model, prompts, swa_full=True)
            texts, used, peak, rows = run(model, prompts, swa_full=False)
            print(f"| {name} | {count} of {tokens:,} | {whole / 2**20:.1f} | {used / 2**20:.1f} | {used / whole:.3f} | "
                  f"{limit or ''} | {peak / whole:.3f} | {rows:,} |", flush=True)  # fmt: skip
            if limit and used > limit * whole:
                wrong.append(f"{name}, {count} of {tokens}: {used / whole:.3f} of K/V of all tokens, expected {limit}")
            if texts != expected:
                wrong.append(f"{name}, {count} of {tokens}: texts {texts}, expected {expected}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
