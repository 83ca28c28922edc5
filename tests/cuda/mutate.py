#!/usr/bin/env python3
"""Deletes and weakens what orders the kernels' memory, one place at a time, and runs the emulated tests.

Deleted: barriers, waits, commits, and calls that wait, look, load or publish. Weakened: a wait that lets
one group more stay under way, an acquire or release made plain, a flag or a launch compared with the one
before, the order of tickets; of what is made for the next task, its place, or the time from which on it
may be made.

A mutant that no test notices is a survivor: either the statement is not needed, or the tests are
too weak. Mutants are compiled and run `--jobs` at a time.

Usage: mutate.py [--jobs 2] [--cxx g++] [--only 3,7] [--json FILE] [--list]
(--only: mutants by their number in --list.) A mutant takes about 15 s on an idle core, nearly all
of it the compiler's.
Exit: 0 no mutant has survived, 1 otherwise, or where the kernels have no place for one of these.
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
FILES = ["tile_feed.cuh", "tile_attention.cuh", "run_tasks.cuh", "merge.cuh", "write.cuh", "quantized.cuh"]
STATEMENTS = [r"ptx::barrier", r"ptx::cp_async_wait", r"ptx::cp_async_commit", r"ptx::store_release", r"partials\.wait",
              r"partials\.look", r"publish_partials", r"queue\.fetch", r"load_ahead", r"feed_?\.load_tiles",
              r"feed\.load_queries", r"feed\.end", r"Narrow::widen"]
DELETED = "/* deleted */;"
WEAKER = [  # (what, what becomes of it)
    (r"cp_async_wait\((.*)\);", r"cp_async_wait(\1 + 1);"),
    (r"ptx::load_acquire\((.*?)\)", r"*\1"),
    (r"ptx::store_release\((.*), launch\);", r"*(\1) = launch;"),
    (r"(==|!=) launch_\.number", r"\1 launch_.number - 1"),
    (r"counters->launches \+ 1,", "counters->launches,"),
    (r"num_pairs \+ 2 \* ptx", "num_pairs + ptx"),
    (r"last_row >> bits", "first_row >> bits"),
    (r"first_row >> bits; tile", "first_row >> 6; tile"),  # flags of large tiles
    (r"advance\(feed\.tiles_beside\(\)\)", "advance(feed.tiles_beside() + 1)"),
    (r"tables_\[\(count_ \+ 1\) % 2\]", "tables_[count_ % 2]"),  # over those of the task at work
    (r"\(count_ \+ ahead\) % 3", "(count_ + ahead) % 2"),  # likewise its Task
    (r"args_\.num_stages\) - 1;", "args_.num_stages - 1);"),  # accumulators where K/V stands
    (r"accumulator_stages % args", "accumulator_stages - 1 % args"),  # K/V where accumulators stand
    (r"first_stage_ \+ num_tiles_\)", "first_stage_ + num_tiles_ + 1)"),
    (r"num_stages - Layout::accumulator_stages;", "num_stages - 1;"),  # likewise, where they take two stages
    (r"\(1 \+ group / ", "(group / "),  # groups of threads leave results where accumulators stand
    (r"num_tiles - stages \+ 1", "num_tiles - stages"),  # the next task's tables a tile too early
    (r"stages - 1 - num_tiles;", "stages - num_tiles;"),  # another tile of the next task
    (r"more < feed_", "more <= feed_"),  # one that it has not
    (r"if \(Place\(\).kv_warp == 0\) store_rows", "store_rows"),  # those whose results are added add, too
    (r"(table_scales\(.*, stage\)) \+ kv_tile;", r"\1;"),  # 8 bits: scales of a later tile
]
TESTS = ["cuda_kernels_test", "cuda_quantized_test", "cuda_large_tiles_test"]  # those behind for what those before let live
CASES = ("emulated kernels*,prefill*,the order of turns*,tasks in a row*,pairs of several*,a task waits*,a NaN*,"
         "few rows*,attention over*,large tiles*")


def mutants(found):
    """Every mutant; adds to `found` what there is one of."""
    for name in FILES:
        path = os.path.join(ROOT, "include", "chunkattn", "detail", "cuda", name)
        for number, line in enumerate(open(path), 1):
            for statement in STATEMENTS:
                if re.match(rf"\s*(if \(.*\) )?{statement}\(.*\);", line):
                    found.add(statement)
                    yield name, number, line.strip(), DELETED
            for pattern, weaker in WEAKER:
                if re.search(pattern, line):
                    found.add(pattern)
                    changed = re.sub(pattern, weaker, line.rstrip("\n"))
                    yield name, number, changed.strip(), changed


def run(mutant, cxx, work):
    name, number, statement, changed = mutant
    tree = tempfile.mkdtemp(dir=work)
    shutil.copytree(os.path.join(ROOT, "include"), os.path.join(tree, "include"))
    path = os.path.join(tree, "include", "chunkattn", "detail", "cuda", name)
    lines = open(path).read().splitlines()
    lines[number - 1] = changed
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
    return name, number, ("deleted: " if changed == DELETED else "") + statement, verdict


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--cxx", default=os.environ.get("CXX", "g++"))
    options.add_argument("--only", help="numbers of mutants, from 0")
    options.add_argument("--json", help="write the verdicts there")
    options.add_argument("--list", action="store_true")
    options = options.parse_args()
    found = set()
    all_mutants = list(mutants(found))
    gone = [pattern for pattern in STATEMENTS + [weaker[0] for weaker in WEAKER] if pattern not in found]
    if gone:  # the kernels are written otherwise now: nothing would be tried of this
        print("NOWHERE in the kernels:", *gone, sep="\n  ")
        return 1
    if options.list:
        for i, mutant in enumerate(all_mutants):
            print(i, *mutant[:3], "(deleted)" if mutant[3] == DELETED else "(weakened)", sep=": ")
        return 0
    if options.only:
        all_mutants = [all_mutants[int(i)] for i in options.only.split(",")]
    survivors = 0
    verdicts = []
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, number, statement, verdict in pool.map(lambda m: run(m, options.cxx, work), all_mutants):
            survivors += verdict == "SURVIVED"
            verdicts.append({"file": name, "line": number, "statement": statement, "verdict": verdict})
            print(f"{name}:{number}: {statement:80} {verdict}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(verdicts, file, indent=1)
    print(f"{len(all_mutants)} mutants, {survivors} survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
