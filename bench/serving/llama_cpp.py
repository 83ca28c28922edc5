#!/usr/bin/env python3
"""Stock llama.cpp and the same with our plugin (examples/ggml), in turn, by llama.cpp's own llama-batched-bench.

    python3 bench/serving/llama_cpp.py --bin build/llama/llama.cpp/bin \\
        --plugin build/llama/plugin/libggml-chunkattn.so --model model.gguf --out report.json

--batch sequences decode --tokens tokens each after --shared tokens that they have in common (llama-batched-bench
-pps, unified K/V), or after --own tokens of their own where --shared is 0. Stock and plugin take turns, --rounds
times; the median counts. The file is written after each cell, and cells that are in it already are not run again.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from experiment import numbers, processor


def run(options, cell, plugin):
    """One process: tokens per second of prompts and of decoding, and what the plugin counted."""
    shared, batch = cell["shared"], cell["batch"]
    prompt = shared or options.own
    context = (shared if shared else batch * prompt) + batch * options.tokens + 256
    command = [os.path.join(options.bin, "llama-batched-bench"), "-m", options.model, "-c", str(context),
               "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(options.tokens), "-npl", str(batch),
               "-t", str(options.threads), "-fa", "on", "-ctk", cell["kv"], "-ctv", cell["kv"],
               "--output-format", "jsonl"]
    command += ["-pps"] if shared else []
    command += ["-kvu"] if shared or options.unified else []
    env = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    if plugin:
        env.update(GGML_BACKEND_PATH=os.path.abspath(options.plugin), CHUNKATTN_GGML_STATISTICS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    output = done.stdout + done.stderr
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and "speed_tg" in line]
    if done.returncode != 0 or len(lines) != 1:
        sys.exit(f"FAILED: {' '.join(command)}\n{output[-3000:]}")
    result = {name: lines[0][name] for name in ("speed_pp", "speed_tg", "t_pp", "t_tg")}
    if plugin:
        counted = re.search(r"chunkattn: (\d+) calls, (\d+) plans, of which (\d+) as tables; plans ([\d.]+) ms, "
                            r"attention ([\d.]+) ms", output)
        if not counted or int(counted[1]) == 0:
            sys.exit(f"FAILED: the plugin computed nothing: {' '.join(command)}\n{output[-3000:]}")
        result["plan_share"] = float(counted[4]) / 1e3 / (result["t_pp"] + result["t_tg"])
        result["tables"] = int(counted[3])
    return result


def summary(cell):
    stock, ours = ([run[name] for run in cell[which]] for which in ("stock", "plugin") for name in ["speed_tg"])
    pp = [statistics.median(run["speed_pp"] for run in cell[which]) for which in ("stock", "plugin")]
    tg = statistics.median(stock), statistics.median(ours)
    share = statistics.median(run["plan_share"] for run in cell["plugin"])
    return (f"| {cell['shared']} | {cell['batch']} | {cell['kv']} | {tg[0]:.1f} | {tg[1]:.1f} | {tg[1] / tg[0]:.2f} "
            f"| {pp[0]:.1f} | {pp[1]:.1f} | {pp[1] / pp[0]:.2f} | {100 * share:.2f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--plugin", required=True, help="libggml-chunkattn.so")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--shared", default="0,1024,4096")
    parser.add_argument("--own", type=int, default=512, help="tokens of each prompt where nothing is shared")
    parser.add_argument("--tokens", type=int, default=32, help="decoded by each sequence")
    parser.add_argument("--kv", default="f16", help="types of K/V: f32, f16, bf16")
    parser.add_argument("--unified", action="store_true", help="unified K/V where nothing is shared, too")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    report = {"date": datetime.date.today().isoformat(), "processor": processor(), "model": options.model,
              "threads": options.threads, "tokens": options.tokens, "own": options.own, "cells": []}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text(encoding="utf-8"))
    print(f"{report['processor']}, {options.threads} threads, {options.model}, -fa on")
    print("| shared | sequences | K/V | decode stock, t/s | with plugin | faster | prompt stock, t/s | with plugin "
          "| faster | plans |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for shared in numbers(options.shared):
        for batch in numbers(options.batch):
            for kind in options.kv.split(","):
                key = {"shared": shared, "batch": batch, "kv": kind}
                known = [cell for cell in report["cells"] if key.items() <= cell.items()]
                cell = known[0] if known else {**key, "stock": [], "plugin": []}
                if not known:
                    for _ in range(options.rounds):
                        cell["stock"].append(run(options, cell, False))
                        cell["plugin"].append(run(options, cell, True))
                    report["cells"].append(cell)
                    if options.out:
                        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                print(summary(cell), flush=True)


if __name__ == "__main__":
    main()
