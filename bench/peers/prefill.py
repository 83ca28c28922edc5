#!/usr/bin/env python3
"""Causal prefill on this CPU: PyTorch's flash attention beside ours, a few steps of each in turn.

    python3 bench/peers/prefill.py --pairs build/release/bench/pairs_bench [--threads 2] [--rounds 7]

Equal prompts with 32 query heads over 8 KV heads of 128 elements. The ratio is PyTorch's time over
ours within a round; above 1 we are faster. PyTorch's bf16 is held against our bf16 K/V with fp32
and bf16 queries, and with one term, and against int8 K/V, for which PyTorch has no attention.
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
import time

import torch

CASES = [(4, 2048), (1, 8192)]
QO_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = {  # what of pairs_bench is held against each: its group and type
    "fp32": [("prefill", "fp32")],
    "bf16": [("prefill", "bf16"), ("prefill_dots", "bf16_queries"), ("prefill_dots", "bf16_one_term"),
             ("prefill_dots", "int8")],
}


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def tensors(batch, tokens, dtype):
    shape = lambda heads: (batch, heads, tokens, HEAD_DIM)
    return [torch.randn(shape(heads)).to(dtype) for heads in (QO_HEADS, KV_HEADS, KV_HEADS)]


def check(dtype):
    """PyTorch computes what is meant, before it is timed."""
    q, k, v = tensors(2, 70, dtype)
    group = QO_HEADS // KV_HEADS
    wide = [x.double().repeat_interleave(group, 1) for x in (k, v)]
    logits = q.double() @ wide[0].transpose(2, 3) / math.sqrt(HEAD_DIM)
    logits += torch.full_like(logits, -math.inf).triu(1)
    error = (logits.softmax(3) @ wide[1] - attention(q, k, v).double()).abs().max().item()
    if error > (1e-5 if dtype == torch.float32 else 3e-2):
        sys.exit(f"PyTorch's output in {dtype} is off by {error}")


def ours(program, threads, name):
    """Median milliseconds of three steps."""
    run = subprocess.run(
        [program, f"--filter={name}", "--rounds=3", f"--threads={threads}"],
        stdout=subprocess.PIPE, text=True, check=True,
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith(name))
    return float(re.split(r"\s+", line[len(name):].strip())[3])


def theirs(inputs):
    times = []
    for _ in range(4):
        start = time.perf_counter()
        attention(*inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", required=True, help="path of pairs_bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--types", default="fp32,bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; "
          f"{arguments.threads} threads, {arguments.rounds} rounds")
    print(f"{'prompts':10} {'ours':13} {'PyTorch ms':>11} {'ours ms':>9} {'ratio':>6} {'min':>6} {'max':>6}")
    for element in arguments.types.split(","):
        dtype = TYPES[element]
        check(dtype)
        for batch, tokens in CASES:
            inputs = tensors(batch, tokens, dtype)
            names = [f"{group}:4x512/{batch}x{tokens}/{name}" for group, name in OURS[element]]
            rounds = [[theirs(inputs)] + [ours(arguments.pairs, arguments.threads, name) for name in names]
                      for _ in range(arguments.rounds)]
            for i, (_, name) in enumerate(OURS[element], 1):
                ratios = sorted(times[0] / times[i] for times in rounds)
                print(f"{f'{batch} x {tokens}':10} {name:13} "
                      f"{statistics.median(times[0] for times in rounds):11.1f} "
                      f"{statistics.median(times[i] for times in rounds):9.1f} "
                      f"{statistics.median(ratios):6.2f} {ratios[0]:6.2f} {ratios[-1]:6.2f}",
                      flush=True)


if __name__ == "__main__":
    main()
