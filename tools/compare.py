#!/usr/bin/env python3
"""Measures this working tree's attention against an earlier commit's: both are loaded into one
process, which runs their decode steps in turn. Prints the ratio of each case's times, this tree over
that commit, with its median and 95 % interval. Below 1 this tree is the faster.

    tools/compare.py COMMIT [--filter TEXT] [--rounds N] [--cpu-time] [--cxx COMPILER] [--flags OPTIONS]

Needs git and a compiler. Each version is called by its own bench/compare/steps.cpp, so that names may differ
between them; what is measured, bench/compare/steps.hpp, has to be the same.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench" / "compare"
STEPS = "steps.hpp"  # what a version is asked for


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


def code(text):
    """A source without comments and empty lines."""
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def oldest_comparable():
    """The first of the commits since which steps.hpp says what it says here."""
    def git(*arguments):
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout

    here, oldest = code((BENCH / STEPS).read_text()), "this tree"
    for commit in git("log", "--format=%h", "--", BENCH / STEPS).split():
        if code(git("show", f"{commit}:{(BENCH / STEPS).relative_to(ROOT)}")) != here:
            break
        oldest = git("log", "-1", "--format=%h of %as", commit).strip()
    return oldest


def steps_of(source):
    """The steps.cpp of a version, beside this tree's steps.hpp."""
    theirs = source / BENCH.relative_to(ROOT)
    if not (theirs / STEPS).exists() or code((theirs / STEPS).read_text()) != code((BENCH / STEPS).read_text()):
        fail(f"COMMIT is {source.name}, whose bench/compare/steps.hpp is another; the oldest that can be compared is "
             f"{oldest_comparable()}")
    beside = source / "compared"
    beside.mkdir(exist_ok=True)
    shutil.copy(theirs / "steps.cpp", beside)
    shutil.copy(BENCH / STEPS, beside)
    return beside / "steps.cpp"


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
    steps = steps_of(source)
    print(f"compiling {source.name}, then this tree", flush=True)
    libraries = []
    for headers, name, program in ((source, source.name, steps), (ROOT, "this", BENCH / "steps.cpp")):
        library = folder / f"{name}.so"
        compile_([arguments.cxx, "-std=c++20", "-O3", "-DNDEBUG", *arguments.flags.split(), "-fPIC",
                  "-shared", "-fvisibility=hidden", "-pthread", f"-I{headers / 'include'}", "-o", library, program])
        libraries.append(library)
    program = folder / "compare_steps"
    compile_([arguments.cxx, "-std=c++20", "-O2", f"-I{ROOT}", f"-I{ROOT / 'include'}", f"-I{BENCH}", "-o", program,
              BENCH / "main.cpp", "-ldl", "-pthread"])
    return subprocess.run([program, *libraries, str(arguments.rounds),
                           "cpu" if arguments.cpu_time else "wall", arguments.filter]).returncode


if __name__ == "__main__":
    sys.exit(main())
