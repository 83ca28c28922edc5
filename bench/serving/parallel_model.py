#!/usr/bin/env python3
"""Prints what a simple model says of 1 to 1,024 ranks: steps under tensor parallelism, and replicas with
and without prefix-aware routing. Nothing is measured but four constants, and these on one machine.
The model leaves out attention itself, uneven popularity and load, and networks slower than the memory of one
machine: put your own constants in."""

import argparse
from dataclasses import dataclass

# --- measured: one rank is one thread, two processors of an AMD EPYC (Zen 4), Open MPI 4.1.4, 2026-11-22:
# `serve generate --threads 1` on SmolLM2 in bf16 (60 tokens less 10; 602 less 11), and
# `mpirun -n 2 serve_mpi_ranks measure` (2 messages a sum) ---------------------------------------------
WEIGHT_RATE = 9.6e9  # bytes of weights read per second in a decode step
PREFILL_RATE = 147e9  # products of a weight and an activation per second, in prefill
MESSAGE_SECONDS = 0.9e-6  # of one message between ranks, without its bytes
MESSAGE_RATE = 1.4e9  # bytes per second that a rank sends
# --- chosen: the model and the load ------------------------------------------------------------------


@dataclass
class Shape:
    layers: int
    dim: int
    weights: float  # in all
    vocabulary: int
    kv_heads: int
    kv_bytes: int  # of a token, all layers, both of K and V


LLAMA3_8B = Shape(32, 4096, 8.0e9, 128256, 8, 2 * 32 * 1024 * 2)
BYTES_OF_WEIGHT = 2  # bf16


def sum_seconds(ranks, size):
    """A sum over the ranks of `size` bytes: each sends every other one a share, adds, and sends the
    sum of its share to every other one."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (MESSAGE_SECONDS + size / ranks / MESSAGE_RATE)


def step_seconds(shape, ranks, rows):
    """A decode step of `rows` sequences on `ranks` ranks that split the weights."""
    work = max(shape.weights * BYTES_OF_WEIGHT / WEIGHT_RATE, shape.weights * rows / PREFILL_RATE) / ranks
    sums = (2 * shape.layers + 1) * sum_seconds(ranks, 4 * rows * shape.dim)
    logits = 4 * rows * shape.vocabulary * (ranks - 1) / ranks / MESSAGE_RATE
    broadcast = 5 * (ranks - 1) * MESSAGE_SECONDS if ranks > 1 else 0.0
    return work + sums + logits + broadcast


def prefill_seconds(shape, ranks, tokens, step_tokens=512):
    sums = (2 * shape.layers + 1) * sum_seconds(ranks, 4 * min(tokens, step_tokens) * shape.dim)
    return shape.weights * tokens / PREFILL_RATE / ranks + sums * max(1.0, tokens / step_tokens)


def hit_rate(prompts, replicas, room, aware):
    """How often a shared prompt is cached where the request goes, all equally likely: each replica sees
    all of them, or those that were dealt to it."""
    seen = max(1.0, prompts / replicas) if aware else prompts
    return min(1.0, room / seen)


def requests_per_second(shape, ranks, load, hit):
    """Of one replica that is never idle: a request's own prefill and its part of decode steps."""
    prefill = prefill_seconds(shape, ranks, load.own + (1 - hit) * load.shared)
    return 1 / (prefill + load.outputs * step_seconds(shape, ranks, load.batch) / load.batch)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64, help="distinct shared prompts")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of each")
    parser.add_argument("--own", type=int, default=128, help="tokens of a request after it")
    parser.add_argument("--outputs", type=int, default=512, help="tokens generated")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a replica at once")
    parser.add_argument("--room", type=int, default=8, help="shared prompts that a replica's cache holds")
    load = parser.parse_args()
    shape = LLAMA3_8B

    print("MODELLED, not measured: Llama-3-8B's shape, bf16, one thread per rank")
    print("\ntensor parallel, a step of one sequence and of", load.batch)
    print("ranks  step(1) ms  step(batch) ms  of it sums  sent per rank and step, 1 row")
    for ranks in (1, 2, 4, 8):
        alone, batch = step_seconds(shape, ranks, 1), step_seconds(shape, ranks, load.batch)
        sums = (2 * shape.layers + 1) * sum_seconds(ranks, 4 * load.batch * shape.dim)
        sent = (2 * shape.layers + 1) * 2 * (ranks - 1) / ranks * 4 * shape.dim
        print(f"{ranks:5}  {1e3 * alone:10.1f}  {1e3 * batch:14.1f}  {100 * sums / batch:8.1f} %"
              f"  {sent / 1e6:18.2f} MB")
    print(f"\nreplicas of 8 ranks; {load.prompts} shared prompts of {load.shared} tokens, room for {load.room}")
    print("ranks  replicas  hits, any  hits, aware  requests/s, any  requests/s, aware")
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
        replicas = ranks // 8
        hits = [hit_rate(load.prompts, replicas, load.room, aware) for aware in (False, True)]
        rates = [replicas * requests_per_second(shape, 8, load, hit) for hit in hits]
        print(f"{ranks:5}  {replicas:8}  {100 * hits[0]:7.1f} %  {100 * hits[1]:9.1f} %"
              f"  {rates[0]:15.2f}  {rates[1]:17.2f}")


if __name__ == "__main__":
    main()
