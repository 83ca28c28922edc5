#!/usr/bin/env python3
"""K/V that `serve` holds for a model with Gemma 3 4B's layers, where windows give memory back and where they do not.

    window_memory.py SERVE [--threads N]

34 layers, of which 29 have a window of 1,024, random weights of a tiny width, steps of 2,048 tokens of prompts. By the
program's own counts: K/V in the step with most tokens, windows that are kept for others included, and at most; and
both as part of what `--windows keep` holds. Texts must be the same, and parts within the bounds. A minute or two of
two cores. Exit 0: so it is. 1: it is not."""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

SHAPE = {"dim": 8, "hidden_dim": 16, "num_layers": 34, "num_qo_heads": 1, "num_kv_heads": 1, "vocab_size": 259,
         "max_positions": 40000, "window": 1024, "global_every": 6}
# sequences, tokens of each, of these its own, the bound of K/V in the step with most tokens
CASES = [(1, 32768, 32768, 0.20), (8, 32768, 512, 0.30), (1, 8192, 8192, 0.30), (8, 8192, 512, 0.55)]
NEW_TOKENS = 16


def prompts(count, length, own, rng):
    """Of letters, each a token of the random model, which puts one in front."""
    letters = lambda n: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))
    shared = letters(length - own - 1)
    return [{"prompt": shared + letters(own), "max_tokens": NEW_TOKENS} for _ in range(count)]


def run(serve, folder, jobs, windows, threads):
    (folder / "prompts.json").write_text(json.dumps(jobs))
    out = subprocess.run(
        [serve, "generate", "--random", folder / "shape.json", "--prompts", folder / "prompts.json", "--stagger", "0",
         "--step-tokens", "2048", "--windows", windows, "--weights", "fp32", "--kv", "fp32", "--products", "own",
         "--mode", "batch_invariant", "--threads", str(threads)], check=True, stdout=subprocess.PIPE).stdout
    text = re.sub(rb"\x1b\[[0-9;]*m", b"", out).decode("utf-8", "replace")
    held = float(re.search(r"K/V +([\d.]+) MiB, by themselves", text).group(1))
    most = re.search(r"K/V of all was ([\d.]+) MiB at most", text)
    rows = int(re.search(r"(\d+) through the model", text).group(1))
    texts = [text.split(job["prompt"])[1][:NEW_TOKENS] for job in jobs]
    return texts, held, float(most.group(1)) if most else held, rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(1)
    good = True
    print("sequences x tokens (own)   K/V, MiB   kept whole   part (bound)   at its peak   rows")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "shape.json").write_text(json.dumps(SHAPE))
        for count, length, own, bound in CASES:
            jobs = prompts(count, length, own, rng)
            texts, held, most, rows = run(arguments.serve, folder, jobs, "give-back", arguments.threads)
            others, whole, _, _ = run(arguments.serve, folder, jobs, "keep", arguments.threads)
            good &= texts == others and held <= bound * whole
            print(f"{count} x {length} ({own})".ljust(27) + f"{held:8.2f}   {whole:10.2f}   {held / whole:.3f} ({bound:.2f})"
                  f"   {most / whole:11.3f}   {rows}{'' if texts == others else '   OTHER TEXTS'}", flush=True)
    print("as it should be" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
