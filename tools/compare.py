#!/usr/bin/env python3
"""Measures this working tree's attention against an earlier commit's: both are loaded into one
process, which runs their decode steps in turn. Prints the ratio of each case's times, this tree over
that commit, with its median and 95 % interval. Below 1 this tree is the faster.

    tools/compare.py COMMIT [--filter TEXT] [--rounds N] [--cpu-time] [--cxx COMPILER] [--flags OPTIONS]

Needs git and a compiler. The commit's headers are used with this tree's bench/compare: one whose
interface differs does not compile.
"""
import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench" / "compare"


def fail(message):
    sys.exit(f"compare: {message}")


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


def compile_(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        fail(f"does not compile: {' '.join(map(str, command))}\n{result.stderr[:2000]}")


def main():
    parser = argparse.ArgumentParser(description="This tree's decode steps against a commit's.")
    parser.add_argument("commit")
    parser.add_argument("--filter", default="", help="part of the names of the cases to run; those of prefill are run if it has "
                             "that word")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--cpu-time", action="store_true",
                        help="processor time of one thread, where others use the machine as well")
    parser.add_argument("--cxx", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--flags", default="-march=native", help="for both, beside -O3 -DNDEBUG")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        fail(f"--rounds is {arguments.rounds}; expected at least 1")

    folder = ROOT / "build" / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    source = checkout(arguments.commit, folder)
    print(f"compiling {source.name}, then this tree", flush=True)
    libraries = []
    for headers, name in ((source, source.name), (ROOT, "this")):
        library = folder / f"{name}.so"
        compile_([arguments.cxx, "-std=c++20", "-O3", "-DNDEBUG", *arguments.flags.split(), "-fPIC",
                  "-shared", "-fvisibility=hidden", "-pthread", f"-I{headers / 'include'}", f"-I{BENCH}",
                  "-o", library, BENCH / "steps.cpp"])
        libraries.append(library)
    program = folder / "compare_steps"
    compile_([arguments.cxx, "-std=c++20", "-O2", f"-I{ROOT}", f"-I{ROOT / 'include'}", f"-I{BENCH}", "-o", program,
              BENCH / "main.cpp", "-ldl", "-pthread"])
    return subprocess.run([program, *libraries, str(arguments.rounds),
                           "cpu" if arguments.cpu_time else "wall", arguments.filter]).returncode


if __name__ == "__main__":
    sys.exit(main())
