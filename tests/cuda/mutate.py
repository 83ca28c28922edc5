#!/usr/bin/env python3
"""Deletes each barrier, wait and commit of the kernels in turn and runs the emulated tests.

A mutant that no test notices is a survivor: either the statement is not needed, or the tests are
too weak. docs/cuda.md explains each. Mutants are compiled and run `--jobs` at a time.

Usage: mutate.py [--jobs 2] [--cxx g++] [--only 3,7] [--json FILE] [--list]
(--only: mutants by their number in --list.) A mutant takes about 15 s on an idle core, nearly all
of it the compiler's.
Exit: 0 every survivor is expected, 1 otherwise.
"""
import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FILES = ["tile_attention.cuh", "merge.cuh", "append.cuh"]
STATEMENT = re.compile(r"^\s*ptx::(barrier|cp_async_wait|cp_async_commit)\(.*\);")
TESTS = ["cuda_kernels_test"]
CASES = "emulated kernels*,prefill*,the order of turns*,a NaN*"

# Statements whose absence the emulator cannot show; docs/cuda.md says why each stays.
EXPECTED_SURVIVORS = {}


def mutants():
    for name in FILES:
        path = os.path.join(ROOT, "include", "chunkattn", "cuda", name)
        for number, line in enumerate(open(path), 1):
            if STATEMENT.match(line):
                yield name, number, line.strip()


def run(mutant, cxx, work):
    name, number, statement = mutant
    tree = os.path.join(work, f"{name}.{number}")
    shutil.copytree(os.path.join(ROOT, "include"), os.path.join(tree, "include"))
    path = os.path.join(tree, "include", "chunkattn", "cuda", name)
    lines = open(path).read().splitlines()
    lines[number - 1] = "/* deleted */"
    open(path, "w").write("\n".join(lines) + "\n")
    verdict = "SURVIVED"
    for test in TESTS:
        program = os.path.join(tree, test)
        subprocess.run([cxx, "-std=c++20", "-O0", "-DCHUNKATTN_FEW_KERNELS", "-I", os.path.join(tree, "include"), "-I",
                        os.path.join(ROOT, "tests"), "-I", ROOT, os.path.join(ROOT, "tests", "cuda", test + ".cpp"),
                        os.path.join(ROOT, "tests", "main.cpp"), "-pthread", "-o", program], check=True)
        try:
            done = subprocess.run([program, "--abort-after=1", "--test-case=" + CASES], capture_output=True, timeout=300)
            if done.returncode != 0:
                verdict = "noticed"
        except subprocess.TimeoutExpired:
            verdict = "noticed (hangs)"
        if verdict != "SURVIVED":
            break
    shutil.rmtree(tree)
    return name, number, statement, verdict


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--cxx", default=os.environ.get("CXX", "g++"))
    options.add_argument("--only", help="numbers of mutants, from 0")
    options.add_argument("--json", help="write the verdicts there")
    options.add_argument("--list", action="store_true")
    options = options.parse_args()
    all_mutants = list(mutants())
    if options.list:
        for i, mutant in enumerate(all_mutants):
            print(i, *mutant, sep=": ")
        return 0
    if options.only:
        all_mutants = [all_mutants[int(i)] for i in options.only.split(",")]
    unexpected = 0
    verdicts = []
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, number, statement, verdict in pool.map(lambda m: run(m, options.cxx, work), all_mutants):
            expected = any(statement.startswith(known) for known in EXPECTED_SURVIVORS.get(name, []))
            note = " (expected, see docs/cuda.md)" if verdict == "SURVIVED" and expected else ""
            unexpected += verdict == "SURVIVED" and not expected
            verdicts.append({"file": name, "line": number, "statement": statement, "verdict": verdict})
            print(f"{name}:{number}: {statement:60} {verdict}{note}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(verdicts, file, indent=1)
    print(f"{len(all_mutants)} mutants, {unexpected} unexpected survivors")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
