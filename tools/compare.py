#!/usr/bin/env python3
"""Measures this working tree against an earlier commit, whose headers and bench are built as they
were: the same benchmarks of both in turn, and the ratio of each case's times, this one over that
one, with its median and 95 % interval. Below 1 this tree is the faster.

    tools/compare.py COMMIT [--filter REGEX]... [--rounds N] [--out FILE]

Needs git, cmake, and what the benchmarks need (./dev compare installs it).
"""
import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Shared and unshared, grouped heads and not; each group is one run of each program.
DEFAULT_FILTERS = [
    f"^ours/{element}/heads:32:{kv_heads}/b:32/(shared:(1024|4096)/own:64|shared:0/own:1024)/"
    for element in ("fp32", "bf16")
    for kv_heads in (32, 8)
]


def fail(message):
    sys.exit(f"compare: {message}")


def build(source, folder):
    """decode_bench of a source tree, with the options of this machine."""
    log = folder.parent / f"{folder.name}.log"
    commands = [
        ["cmake", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release",
         "-DCHUNKATTN_BUILD_TESTS=OFF", "-DCHUNKATTN_BUILD_EXAMPLES=OFF",
         "-DCHUNKATTN_BUILD_BENCH=ON", "-DCHUNKATTN_CUDA=OFF"],
        ["cmake", "--build", folder, "--target", "decode_bench", "-j", str(os.cpu_count())],
    ]
    with open(log, "w") as out:
        for command in commands:
            if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode != 0:
                fail(f"cannot build {source}: see {log}")
    return folder / "bench" / "decode_bench"


def checkout(commit, folder):
    """The files of a commit in a folder, without touching the working tree."""
    name = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", f"{commit}^{{commit}}"],
                          capture_output=True, text=True)
    if name.returncode != 0:
        fail(f"COMMIT is {commit}; expected a commit of this repository: {name.stderr.strip()}")
    source = folder / name.stdout.strip()
    if not source.exists():
        source.mkdir(parents=True)
        archive = subprocess.Popen(["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", source], stdin=archive.stdout, check=True)
    return source


def milliseconds(program, regex):
    run = subprocess.run([program, f"--benchmark_filter={regex}", "--benchmark_format=json"],
                         capture_output=True, text=True)
    if run.returncode != 0:
        fail(f"{program} failed: {run.stderr.strip()}")
    if not run.stdout:
        fail(f"--filter is {regex}; expected to match a benchmark of {program}")
    return {case["name"]: case["ms"] for case in json.loads(run.stdout)["benchmarks"]}


def summary(ratios):
    """Median and the order statistics around it that hold it with 95 %, whatever the shape."""
    ratios = sorted(ratios)
    n = len(ratios)
    reach = 1.96 * math.sqrt(n) / 2
    at = lambda i: ratios[min(max(round(i), 0), n - 1)]
    return at((n - 1) / 2), at((n - 1) / 2 - reach), at((n - 1) / 2 + reach)


def main():
    parser = argparse.ArgumentParser(description="This tree's decode_bench against a commit's.")
    parser.add_argument("commit")
    parser.add_argument("--filter", action="append", help="of benchmarks; several: one run each")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where all times are written, as JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        fail(f"--rounds is {arguments.rounds}; expected at least 1")

    folder = ROOT / "build" / "compare"
    source = checkout(arguments.commit, folder)
    print(f"building {source.name}, then this tree", flush=True)
    programs = [build(source, folder / f"{source.name}-build"), build(ROOT, folder / "this-build")]

    times = {}  # case: [milliseconds of that commit, of this tree]
    filters = arguments.filter or DEFAULT_FILTERS
    for number in range(arguments.rounds):
        for regex in filters:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            for which in order:
                for case, ms in milliseconds(programs[which], regex).items():
                    times.setdefault(case, ([], []))[which].append(ms)
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(times, indent=1) + "\n")

    print(f"\n{'case':60} {'ratio':>7} {'95 %':>15} {source.name + ' ms':>12} {'this ms':>9}")
    medians = []
    for case, (old, new) in times.items():
        if len(old) != len(new):
            print(f"{case:60} only one of the two has it")
            continue
        ratio, low, high = summary([b / a for a, b in zip(old, new)])
        medians.append(ratio)
        print(f"{case:60} {ratio:7.3f} {low:7.3f} {high:7.3f} {sorted(old)[len(old) // 2]:12.3f} "
              f"{sorted(new)[len(new) // 2]:9.3f}")
    mean = math.exp(sum(map(math.log, medians)) / max(1, len(medians)))
    print(f"\n{len(medians)} cases, geometric mean of the medians {mean:.3f}")


if __name__ == "__main__":
    main()
