#!/usr/bin/env python3
"""Models with recurrent layers in Generator beside transformers' generate() on a batch: a table of docs/pytorch.md.

    OMP_NUM_THREADS=1 python3 bench/pytorch/hybrids.py            # --families NAME..., --rounds N

Weights are small and random: 4 layers, one of them attention. Tokens computed are those of prompts and new ones;
processor time is that of one process, the best of some rounds, in turn. Prompts of one scenario have the same length, so
that a batch has no padding. Fails where a text is another one than generate()'s, but for tokens that are as likely.
"""

import argparse
import os
import random
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers as t

from chunkattn.transformers import Generator

SMALL = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=4, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
TEXTS, NEW = 16, 8


def kinds(other):
    return [other if layer % 4 != 2 else "full_attention" for layer in range(4)]


FAMILIES = {
    "Qwen 3.5 (Gated DeltaNet)": lambda: t.Qwen3_5TextConfig(
        **SMALL, head_dim=64, layer_types=kinds("linear_attention"), linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64),
    "LFM2 (short convolution)": lambda: t.Lfm2Config(**SMALL, layer_types=kinds("conv")),
    "Granite 4 (Mamba 2)": lambda: t.GraniteMoeHybridConfig(
        **SMALL, layer_types=kinds("linear_attention"), num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=512, position_embedding_type="rope", mamba_n_heads=16, mamba_d_state=64),
    "Jamba (Mamba 1)": lambda: t.JambaConfig(
        **SMALL, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
        use_mamba_kernels=False),
}  # fmt: skip


def texts_of(draw, shared, own):
    """Prompts with a common beginning."""
    common = [draw.randrange(3, 1000) for _ in range(shared)]
    return [common + [draw.randrange(3, 1000) for _ in range(own)] for _ in range(TEXTS)]


def forked(draw, length):
    """Prompts of which each parts from an earlier one at a random position."""
    texts = [[draw.randrange(3, 1000) for _ in range(length)]]
    while len(texts) < TEXTS:
        known = draw.choice(texts)[: draw.randrange(length)]
        texts.append(known + [draw.randrange(3, 1000) for _ in range(length - len(known))])
    return texts


SCENARIOS = {
    "512 shared, 32 own": lambda draw: texts_of(draw, 512, 32),
    "512 that part anywhere": lambda draw: forked(draw, 512),
    "256, nothing shared": lambda draw: texts_of(draw, 0, 256),
}


def make(config):
    torch.manual_seed(1)
    model = t.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that what a layer sees matters
    return model


def ours(model, prompts):
    generator = Generator(model, kv_bytes=1 << 28, check=False)
    begin = time.process_time()
    requests = generator.generate(prompts, max_new_tokens=NEW, eos_token_id=None, do_sample=False)
    return [request.tokens for request in requests], time.process_time() - begin, generator.stats["rows"]


def theirs(model, prompts):
    ids = torch.tensor(prompts)
    begin = time.process_time()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=None,
                         do_sample=False)  # fmt: skip
    spent = time.process_time() - begin
    return out[:, ids.shape[1] :].tolist(), spent, ids.numel() + len(prompts) * (NEW - 1)


def differ(model, prompt, ours, theirs):
    """Whether texts part where one token was clearly more likely."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None:
        return False
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours[:at]]), use_cache=False).logits[0, -1]
    return abs(float(logits[ours[at]] - logits[theirs[at]])) > 2e-4 * float(logits.abs().max())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="names, or how they begin")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    wrong = []
    print(f"| model | {TEXTS} texts | tokens computed | theirs | processor time | theirs | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name, config in FAMILIES.items():
        if not any(name.startswith(wanted) for wanted in options.families):
            continue
        model = make(config())
        for scenario, draw in SCENARIOS.items():
            prompts = draw(random.Random(scenario))
            best = [[], []]
            for _ in range(options.rounds):
                found = [run(model, prompts) for run in (ours, theirs)]
                for each, (_, spent, _) in zip(best, found):
                    each.append(spent)
            (texts, _, rows), (expected, _, all_rows) = found
            mine, other = map(min, best)
            print(f"| {name} | {scenario} | {rows:,} | {all_rows:,} | {mine:.2f} s | {other:.2f} s | {mine / other:.2f} |",
                  flush=True)  # fmt: skip
            if any(differ(model, *each) for each in zip(prompts, texts, expected)):
                wrong.append(f"{name}, {scenario}: texts differ")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
