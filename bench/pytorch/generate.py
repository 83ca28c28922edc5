#!/usr/bin/env python3
"""chunkattn.transformers.Generator beside transformers' own generate() and generate_batch().

    python3 bench/pytorch/generate.py --model SMOLLM2.gguf --out smollm2.json
    python3 bench/pytorch/generate.py --shape 7b-2-layers --dtypes bfloat16 --out 7b.json

Each cell is a batch of prompts with a common beginning, from an empty cache to the last of --new tokens
each, greedily. The modes take turns in one process, --rounds times; the median counts. Generator is made and run
once before it is measured, the others too where that costs little, so memory and matrix products are set up:

    chunkattn       Generator: one prefix tree
    generate        the common beginning is computed once, its cache expanded to the batch, then generate()
    generate_batch  transformers' continuous batching, over its own paged cache

`prefill` is the time of the same batch with one new token; what is beyond it is decoding. The file is written
after each run of a mode, and what is in it already is not run again: --seconds ends early, and the next call continues.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

from chunkattn import instruction_set
from chunkattn.transformers import Generator

clock = time.perf_counter
STARTED = clock()
MODES = ("chunkattn", "generate", "generate_batch")
WARM_UP = 4096  # tokens of all prompts up to which modes run once before they are measured
SHAPES = {
    "7b-2-layers": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32,
                        num_key_value_heads=32, vocab_size=32000, max_position_embeddings=8192),
    "tiny": dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=1000, max_position_embeddings=8192, head_dim=64),
}  # fmt: skip


def load(options, dtype):
    if options.shape:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[options.shape]))
    else:
        path = pathlib.Path(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    return model.to(getattr(torch, dtype)).eval()


def prompts_of(cell, vocabulary):
    common = [(97 * i + 31) % (vocabulary - 20) + 10 for i in range(cell["shared"])]
    own = cell["own"]
    return [common + [(31 * i + 7 * b + 1) % (vocabulary - 20) + 10 for i in range(own - 1)] + [10 + b]
            for b in range(cell["batch"])]  # fmt: skip


_generator = (None, None, None)  # of a model and a cell: an engine that has run before


def by_chunkattn(model, cell, prompts, new):
    global _generator
    if _generator[:2] != (model, cell):
        _generator = (None, None, None)  # its memory first
        tokens = sum(map(len, prompts)) + cell["batch"] * (cell["new"] + 64)
        generator = Generator(model, max_chunks=tokens // 64 + 2 * cell["batch"] + 2, check=False)
        _generator = (model, cell, generator)
        by_chunkattn(model, cell, prompts, 2)
    generator = _generator[2]
    generator.tree.clear()
    begin = clock()
    requests = generator.generate(prompts, max_new_tokens=new, do_sample=False, eos_token_id=None)
    return clock() - begin, [request.tokens for request in requests]


def by_generate(model, cell, prompts, new):
    ids = torch.tensor(prompts)
    begin = clock()
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        if cell["shared"]:
            model(input_ids=ids[:1, : cell["shared"]], past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(cell["batch"])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new,
                             do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    return clock() - begin, out[:, ids.shape[1] :].tolist()


def by_generate_batch(model, cell, prompts, new):
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By itself it takes nearly all memory that is free, and clears it. The tokens of a step are as ours.
    pages = sum((len(prompt) + new) // 256 + 2 for prompt in prompts)
    batching = transformers.ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512)
    begin = clock()
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching,
                                   warmup=False)  # fmt: skip
    lasted = clock() - begin
    by_prompt = {tuple(result.prompt_ids): list(result.generated_tokens) for result in results.values()}
    texts = [by_prompt.get(tuple(prompt), []) for prompt in prompts]
    if any(len(text) != new for text in texts):
        raise RuntimeError(f"generate_batch() gave {[len(text) for text in texts]} tokens, expected {new} each")
    return lasted, texts


RUN = {"chunkattn": by_chunkattn, "generate": by_generate, "generate_batch": by_generate_batch}


def measure(model, cell, entry, options, save):
    """Runs what is missing of a cell, modes in turn. False if time was up before all was done."""
    prompts = prompts_of(cell, model.config.vocab_size)
    warmed = set() if cell["batch"] * (cell["shared"] + cell["own"]) <= WARM_UP else set(MODES)
    for number in range(options.rounds):
        for mode in options.modes:
            runs = entry["runs"].setdefault(mode, {"prefill_s": [], "all_s": []})
            if "failed" in runs or len(runs["all_s"]) > number:
                continue
            if clock() - STARTED > options.seconds:
                return False
            try:
                if mode not in warmed:
                    warmed.add(mode)
                    RUN[mode](model, cell, prompts, 2)
                first, _ = RUN[mode](model, cell, prompts, 1)
                seconds, texts = RUN[mode](model, cell, prompts, cell["new"])
            except Exception as error:  # of a peer: the table says so
                if mode == "chunkattn":
                    raise
                runs["failed"] = f"{type(error).__name__}: {error}"[:300]
            else:
                runs["prefill_s"].append(first)
                runs["all_s"].append(seconds)
                runs["texts"] = [zlib.crc32(repr(text).encode()) for text in texts]
            save()
    return True


def report_of(cell, runs):
    """By mode: medians, and how many texts equal those of chunkattn."""
    report = {}
    for mode, of_mode in runs.items():
        if "failed" in of_mode:
            report[mode] = {"failed": of_mode["failed"]}
            continue
        if not of_mode["all_s"]:
            continue
        first, last = (statistics.median(of_mode[name]) for name in ("prefill_s", "all_s"))
        theirs = runs.get("chunkattn", {}).get("texts", of_mode["texts"])
        report[mode] = {
            "prefill_s": first, "all_s": last, "tokens_per_s": cell["batch"] * cell["new"] / last,
            "decode_tokens_per_s": cell["batch"] * (cell["new"] - 1) / (last - first) if last > first else None,
            "texts_equal": sum(a == b for a, b in zip(of_mode["texts"], theirs)),
        }  # fmt: skip
    return report


def processor():
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    name, family, model = (fields.get(key, "?").strip() for key in ("Model name", "CPU family", "Model"))
    return f"{name} (family {family}, model {model}), {os.cpu_count()} cores"


def numbers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a GGUF file")
    which.add_argument("--shape", choices=SHAPES, help="random weights")
    parser.add_argument("--out", required=True, help="JSON file, continued where it exists")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float32"])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--shared", type=numbers, default=[0, 1024, 4096])
    parser.add_argument("--own", type=int, default=64, help="tokens of a prompt after what is shared")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, for a machine that is not "
                        "alone; with OMP_NUM_THREADS=1, as threads of OpenMP wait by spinning")
    options = parser.parse_args()
    if options.cpu_time:
        global clock, STARTED
        clock = time.process_time
        STARTED = clock()
    transformers.utils.logging.set_verbosity_error()
    path = pathlib.Path(options.out)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"context": {}, "cells": []}
    results["context"] |= {
        "processor": processor(), "instruction_set": instruction_set(), "threads": torch.get_num_threads(),
        "clock": "processor time" if options.cpu_time else "time",
        "torch": torch.__version__, "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(), "model": options.shape or pathlib.Path(options.model).name,
        "command": shlex.join(["bench/pytorch/generate.py", *(pathlib.Path(part).name for part in sys.argv[1:])]),
    }  # fmt: skip
    for dtype in options.dtypes:
        if not run_type(dtype, results, path, options):
            return 75  # EX_TEMPFAIL: call again
    return 0


def run_type(dtype, results, path, options):
    """All cells of one type. False if time was up before."""
    def save():
        for each in results["cells"]:
            each["report"] = report_of(each["cell"], each["runs"])
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    model = None
    for shared in options.shared:
        for batch in options.batches:
            cell = {"dtype": dtype, "shared": shared, "batch": batch, "own": options.own, "new": options.new}
            entry = next((each for each in results["cells"] if each["cell"] == cell), None)
            if entry is None:
                results["cells"].append(entry := {"cell": cell, "runs": {}})
            wanted = [entry["runs"].get(mode, {"all_s": []}) for mode in options.modes]
            if all("failed" in runs or len(runs["all_s"]) >= options.rounds for runs in wanted):
                continue
            model = model or load(options, dtype)
            whole = measure(model, cell, entry, options, save)
            print(line_of(cell, report_of(cell, entry["runs"])), flush=True)
            if not whole:
                return False
    return True


def line_of(cell, report):
    said = "  ".join(
        f"{mode} failed" if "failed" in of_mode else
        f"{mode} {of_mode['tokens_per_s']:.1f} ({of_mode['decode_tokens_per_s'] or float('nan'):.1f})"
        for mode, of_mode in report.items())  # fmt: skip
    return f"{cell['dtype']:9} shared {cell['shared']:5} b {cell['batch']:3}  tokens/s (decoding):  {said}"


if __name__ == "__main__":
    sys.exit(main())
