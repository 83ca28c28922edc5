#!/usr/bin/env python3
"""The paper's end-to-end experiment (section 4.2, Table 4 and Figure 5) on `serve bench`.

    python3 bench/serving/experiment.py --serve build/serve/examples/serve/serve \\
        --model SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2.json
    python3 bench/serving/experiment.py --serve ... --random shape.json --out shape.json

Prompts of --prompts tokens of which all or none are shared, --completion tokens, at most --batch
sequences, each in the engine's three modes: the tree, pages without sharing, and pages shared by
prefix caching. First all requests arrive at once: what the engine can do. Then they arrive at
--rates times what prefix caching reached there, as Poisson arrivals. Modes take turns, --rounds
times; the median counts. A cell that takes more than --minutes is ended, and its report says so.
The file is written after each cell, and cells that are in it already are not run again.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

MODES = ["tree", "paged_prefix", "paged"]


def numbers(text):
    return [float(part) if "." in part else int(part) for part in text.split(",")]


def processor():
    """What lscpu says of it, by the fields that name a model."""
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    name = fields.get("Model name", "unknown").strip()
    family, model = (fields.get(key, "?").strip() for key in ("CPU family", "Model"))
    return f"{name} (family {family}, model {model}), {os.cpu_count()} cores"


def run_cell(options, cell):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [options.serve, "bench", "--json", str(report)]
        command += ["--model", options.model] if options.model else ["--random", options.random]
        command += ["--cache", cell["cache"], "--rate", f"{cell['rate']:.6f}"]
        command += ["--requests", str(cell["requests"]), "--max-batch", str(options.batch)]
        command += ["--prompt-tokens", str(cell["prompt"]), "--shared-tokens", str(cell["shared"])]
        command += ["--completion-tokens", str(options.completion)]
        command += ["--max-seconds", str(60 * options.minutes), *shlex.split(options.more)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text(encoding="utf-8"))


def key_of(cell):
    return tuple(cell[name] for name in ("prompt", "shared", "load", "cache", "round"))


class Experiment:
    def __init__(self, options):
        self.options = options
        self.path = pathlib.Path(options.out)
        self.results = {"context": {}, "cells": []}
        if self.path.exists():
            self.results = json.loads(self.path.read_text(encoding="utf-8"))
        self.done = {key_of(entry["cell"]): entry for entry in self.results["cells"]}
        context = self.results["context"]
        context["processor"] = processor()
        context["date"] = datetime.date.today().isoformat()
        context.setdefault("commands", []).append(shlex.join(sys.argv))

    def run(self, cell):
        if key_of(cell) in self.done:
            return self.done[key_of(cell)]["report"]
        report = run_cell(self.options, cell)
        entry = {"cell": cell, "report": report}
        self.results["cells"].append(entry)
        self.done[key_of(cell)] = entry
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(
            f"{cell['cache']:>12}  n_p {cell['prompt']}  n_s {cell['shared']}  load {cell['load']}"
            f"  {1e3 * report['normalised_latency']:8.2f} ms/token"
            f"  {report['requests_per_second']:7.3f} requests/s"
            f"  {report['peak_kv_bytes'] / 2**20:8.1f} MiB",
            flush=True,
        )
        return report

    def run_load(self, prompt, shared, load, rate, modes):
        """All modes in turn; returns the median rate that prefix caching reached."""
        options = self.options
        requests = options.requests if shared else options.unshared_requests
        reached = []
        for number in range(options.rounds if load == "full" else 1):
            for mode in modes:
                cell = {"prompt": prompt, "shared": shared, "load": load, "rate": rate}
                cell |= {"cache": mode, "round": number, "requests": requests}
                report = self.run(cell)
                if mode == "paged_prefix":
                    reached.append(report["requests_per_second"])
        return sorted(reached)[len(reached) // 2]

    def run_all(self):
        options = self.options
        for prompt in options.prompts:
            for shared in (prompt, 0):
                modes = MODES if not shared or prompt in options.paged else MODES[:2]
                full = self.run_load(prompt, shared, "full", 0, modes)
                if not shared:
                    continue  # nothing differs; one load shows how much it costs
                for share in options.rates:
                    self.run_load(prompt, shared, share, share * full, modes[:2])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", required=True, help="the program")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", default="", help="a GGUF file")
    model.add_argument("--random", default="", help="a shape, with random weights")
    parser.add_argument("--out", required=True, help="JSON file, continued where it exists")
    parser.add_argument("--prompts", type=numbers, default=[1024, 2048, 4096])
    parser.add_argument("--paged", type=numbers, default=[1024, 2048, 4096],
                        help="prompt lengths of which all is shared to run without sharing, too")
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--unshared-requests", type=int, default=32)
    parser.add_argument("--rates", type=numbers, default=[0.6, 0.9, 1.2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--more", default="", help="further options of serve bench")
    Experiment(parser.parse_args()).run_all()


if __name__ == "__main__":
    main()
