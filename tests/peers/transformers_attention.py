#!/usr/bin/env python3
"""Compares attention with that of `transformers`, for models of five families.

    transformers_attention.py ATTEND [--rounds N] [--seed S]

Small models with random weights read a few random texts with a common beginning. What each layer hands to
its attention (q and k rotated, v) goes to ATTEND (attend.cpp), which computes it through a prefix tree in
steps of random sizes, with K/V in fp32, fp16 and bf16 and with the variant that docs/variants.md names for
the model. It has to agree with the model's own eager attention, in double precision, on the same K/V
rounded to the type. Masks, scales, caps and sinks are transformers' own. Exit 0: all agree. 1: not so. 77:
torch or transformers is not there.
"""
import argparse
import importlib
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torch
    import transformers
except ImportError as error:
    print(f"SKIPPED: comparing attention needs Python's packages torch and transformers ({error})")
    sys.exit(77)

NUM_DECODE = 4
# Of the largest |v|: what fp32 sums over some hundred keys and an fp32 softmax on their side may cost;
# 16-bit K/V are multiplied in two terms where the machine has a matrix unit (docs/cpu.md).
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-5, "bf16": 4e-5}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COMMON = dict(vocab_size=97, hidden_size=96, intermediate_size=32, max_position_embeddings=4096)


def configurations(draw):
    """(name, module, model class, configuration) of each family, with random groups and windows."""
    def heads():
        kv = draw.choice([1, 2, 4])
        return dict(num_attention_heads=kv * draw.choice([1, 2, 3, 4, 6]), num_key_value_heads=kv)

    def window():
        return draw.choice([1, 5, 16, 37, 100, 128])

    mixed = ["sliding_attention", "full_attention"]
    t = transformers
    yield "Llama", "llama", t.LlamaModel, t.LlamaConfig(**COMMON, **heads(), head_dim=64, num_hidden_layers=1)
    yield "Mistral", "mistral", t.MistralModel, t.MistralConfig(
        **COMMON, **heads(), head_dim=128, num_hidden_layers=1, sliding_window=window())
    yield "Gemma 2", "gemma2", t.Gemma2Model, t.Gemma2Config(
        **COMMON, **heads(), head_dim=256, num_hidden_layers=2, layer_types=mixed, sliding_window=window(),
        query_pre_attn_scalar=draw.choice([144, 224, 256]), attn_logit_softcapping=draw.choice([5.0, 50.0]))
    yield "Gemma 3", "gemma3", t.Gemma3TextModel, t.Gemma3TextConfig(
        **COMMON, **heads(), head_dim=256, num_hidden_layers=2, layer_types=mixed, sliding_window=window(),
        query_pre_attn_scalar=draw.choice([168, 256]))
    yield "gpt-oss", "gpt_oss", t.GptOssModel, t.GptOssConfig(
        **COMMON, **heads(), head_dim=64, num_hidden_layers=2, layer_types=mixed, sliding_window=window(),
        num_local_experts=2, num_experts_per_tok=1)


class Recorder:
    """Stands in for a module's eager_attention_forward() and keeps what it was asked and answered."""

    def __init__(self, module, shared, spread):
        self.module, self.theirs = module, module.eager_attention_forward
        self.spread = spread  # of the logits
        self.shared = shared
        self.calls = []  # per text and layer: (layer, q, k, v, {type: answer})
        self.prefix = {}  # layer: K and V of the first text, so that equal tokens have equal bits

    def __enter__(self):
        self.module.eager_attention_forward = self
        return self

    def __exit__(self, *_):
        self.module.eager_attention_forward = self.theirs

    def __call__(self, layer, q, k, v, mask, **arguments):
        if layer.layer_idx in self.prefix:
            for x, first in zip((k, v), self.prefix[layer.layer_idx]):
                x[:, :, : self.shared] = first[:, :, : self.shared]
        else:
            self.prefix[layer.layer_idx] = (k, v)
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * arguments["scaling"]
        q = q * (self.spread / logits.std())
        answers = {}
        for name, dtype in TYPES.items():
            k_of, v_of = (x.to(dtype).double() for x in (k, v))
            out, _ = self.theirs(layer, q.double(), k_of, v_of, mask.double(), **arguments)
            answers[name] = out[0]  # [length][num_qo_heads][head_dim]
        self.calls.append((layer, q, k, v, answers))
        return self.theirs(layer, q, k, v, mask, **arguments)


def rows(x):
    """[1][heads][length][head_dim] as bytes [length][heads][head_dim]."""
    return x[0].transpose(0, 1).contiguous().float().numpy().tobytes()


def write_case(path, texts, calls, seed):
    """The layer's variant comes from the configuration as docs/variants.md reads it, not from a mask."""
    layer, q, k, *_ = calls[0]
    config = layer.config
    kind = getattr(config, "layer_types", None)
    windowed = kind[layer.layer_idx] == "sliding_attention" if kind else getattr(config, "sliding_window", None)
    scale = getattr(config, "query_pre_attn_scalar", config.head_dim) ** -0.5
    sinks = layer.sinks.detach() if hasattr(layer, "sinks") else torch.empty(0)
    with open(path, "wb") as file:
        file.write(struct.pack(
            "<iiiiffiIii", q.shape[1], k.shape[1], q.shape[3], config.sliding_window if windowed else 0, scale,
            getattr(config, "attn_logit_softcapping", None) or 0, len(sinks), seed, NUM_DECODE, len(texts)))
        file.write(sinks.float().numpy().tobytes())
        for text, (_, q, k, v, _) in zip(texts, calls):
            file.write(struct.pack(f"<i{len(text)}i", len(text), *text))
            for x in (q, k, v):
                file.write(rows(x))


def compare(attend, folder, texts, calls, seed):
    """Greatest difference per type, in units of the largest |v|; every token is computed by some sequence."""
    write_case(folder / "case", texts, calls, seed)
    subprocess.run([attend, folder / "case", folder / "out"], check=True)
    ours = torch.frombuffer(bytearray((folder / "out").read_bytes()), dtype=torch.float32)
    off, at = {}, 0
    for name in TYPES:
        off[name], computed = 0.0, 0
        for text, (*_, v, answers) in zip(texts, calls):
            theirs = answers[name]
            mine = ours[at : at + theirs.numel()].view(theirs.shape).double()
            at += theirs.numel()
            there = ~mine.isnan().flatten(1).all(1)
            assert there[-NUM_DECODE - 1 :].all(), "a row at a text's end was not computed"
            computed += int(there.sum())
            difference = (mine - theirs)[there].abs().max().item() / v.abs().max().item()
            off[name] = max(off[name], difference) if difference == difference else float("inf")
        distinct = {tuple(text[: i + 1]) for text in texts for i in range(len(text))}
        assert computed >= len(distinct), f"{computed} rows were computed of {len(distinct)} distinct tokens"
    assert at == ours.numel()
    return off


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("attend", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, seed {options.seed}")
    print("greatest difference of an output, in units of the largest |v|, in any round and layer")
    draw = random.Random(options.seed)
    torch.manual_seed(options.seed)
    worst = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for n in range(options.rounds):
            shared = draw.randrange(0, 200)
            prefix = [draw.randrange(97) for _ in range(shared)]
            texts = [prefix + [(i * 31 + j * draw.randrange(1, 97)) % 97 for j in range(draw.randrange(8, 120))]
                     for i in range(4)]
            for family, module, model_class, config in configurations(draw):
                config._attn_implementation = "eager"
                model = model_class(config).float().eval()
                for name, parameter in model.named_parameters():
                    if name.endswith("sinks"):
                        parameter.normal_(0, 2)
                source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
                with Recorder(source, shared, draw.choice([0.3, 1.0, 4.0])) as recorder:
                    for text in texts:
                        model(torch.tensor([text]), use_cache=False)
                for layer in range(config.num_hidden_layers):
                    calls = [call for call in recorder.calls if call[0].layer_idx == layer]
                    off = compare(options.attend, pathlib.Path(folder), texts, calls, draw.randrange(2**32))
                    key = (family, config.layer_types[layer] if config.num_hidden_layers > 1 else "")
                    for name in TYPES:
                        worst.setdefault(key, {}).setdefault(name, 0.0)
                        worst[key][name] = max(worst[key][name], off[name])
            print(f"round {n + 1} of {options.rounds}: {shared} shared tokens", flush=True)
    print(f"{'':30}" + "".join(f"{name:>10}" for name in TYPES))
    for (family, kind), off in worst.items():
        print(f"{family + ' ' + kind:30}" + "".join(f"{off[name]:10.1e}" for name in TYPES))
    wrong = [key for key, off in worst.items() if any(off[name] > TOLERANCE[name] for name in TYPES)]
    if wrong:
        print("NOT within " + ", ".join(f"{value:.0e} ({name})" for name, value in TOLERANCE.items()))
        return 1
    print("all within " + ", ".join(f"{value:.0e} ({name})" for name, value in TOLERANCE.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
