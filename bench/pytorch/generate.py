#!/usr/bin/env python3
"""chunkattn.transformers.Generator beside transformers' own generate() and generate_batch().

    python3 bench/pytorch/generate.py --model SMOLLM2.gguf --out smollm2.json
    python3 bench/pytorch/generate.py --shape 7b-2-layers --dtypes bfloat16 --out 7b.json

Each cell is a batch of prompts with a common beginning, from an empty cache to the last of --new tokens
each, greedily. The modes take turns in one process, --rounds times; the median counts:

    chunkattn       Generator: one prefix tree
    generate        the common beginning is computed once, its cache expanded to the batch, then generate()
    generate_batch  transformers' continuous batching, over its own paged cache

`prefill` is the time of the same batch with one new token; what is beyond it is decoding. The file is written
after each cell, and cells that are in it already are not run again.
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

from chunkattn import instruction_set
from chunkattn.transformers import Generator

clock = time.perf_counter
MODES = ("chunkattn", "generate", "generate_batch")
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


def by_chunkattn(model, cell, prompts, new):
    tokens = sum(map(len, prompts)) + cell["batch"] * (new + 64)
    generator = Generator(model, max_chunks=tokens // 64 + 2 * cell["batch"] + 2, check=False)
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


def measure(model, cell, options):
    """Seconds of prefill and of all, of each mode; how many texts equal those of chunkattn."""
    prompts = prompts_of(cell, model.config.vocab_size)
    times, texts, failed = {mode: ([], []) for mode in options.modes}, {}, {}
    for _ in range(options.rounds):
        for mode in options.modes:
            if mode in failed:
                continue
            try:
                times[mode][0].append(RUN[mode](model, cell, prompts, 1)[0])
                seconds, texts[mode] = RUN[mode](model, cell, prompts, cell["new"])
                times[mode][1].append(seconds)
            except Exception as error:  # of a peer: the table says so
                if mode == "chunkattn":
                    raise
                failed[mode] = f"{type(error).__name__}: {error}"[:300]
    report = {}
    for mode, (prefill, whole) in times.items():
        if mode in failed:
            report[mode] = {"failed": failed[mode]}
            continue
        first, last = statistics.median(prefill), statistics.median(whole)
        report[mode] = {
            "prefill_s": first, "all_s": last, "tokens_per_s": cell["batch"] * cell["new"] / last,
            "decode_tokens_per_s": cell["batch"] * (cell["new"] - 1) / max(1e-9, last - first),
            "texts_equal": sum(a == b for a, b in zip(texts[mode], texts.get("chunkattn", texts[mode]))),
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
    parser.add_argument("--own", type=int, default=64, help="tokens of a prompt behind what is shared")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, for a machine that is not "
                        "alone; with OMP_NUM_THREADS=1, as threads of OpenMP wait by spinning")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = time.process_time
    transformers.utils.logging.set_verbosity_error()
    path = pathlib.Path(options.out)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"context": {}, "cells": []}
    results["context"] |= {
        "processor": processor(), "instruction_set": instruction_set(), "threads": torch.get_num_threads(),
        "clock": "processor time" if options.cpu_time else "time",
        "torch": torch.__version__, "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(), "model": options.shape or pathlib.Path(options.model).name,
        "command": shlex.join(sys.argv),
    }  # fmt: skip
    done = [entry["cell"] for entry in results["cells"]]
    for dtype in options.dtypes:
        model = load(options, dtype)
        for shared in options.shared:
            for batch in options.batches:
                cell = {"dtype": dtype, "shared": shared, "batch": batch, "own": options.own, "new": options.new}
                if cell in done:
                    continue
                report = measure(model, cell, options)
                results["cells"].append({"cell": cell, "report": report})
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                said = "  ".join(
                    f"{mode} failed" if "failed" in of_mode else
                    f"{mode} {of_mode['tokens_per_s']:.1f} ({of_mode['decode_tokens_per_s']:.1f})"
                    for mode, of_mode in report.items())  # fmt: skip
                print(f"{dtype:9} shared {shared:5} b {batch:3}  tokens/s (decoding):  {said}", flush=True)


if __name__ == "__main__":
    main()
