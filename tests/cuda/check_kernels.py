#!/usr/bin/env python3
"""Compiles attention kernels and checks what ptxas made of PTX that says more than it: no product and no matrix load is
predicated (all 32 lanes take part), nothing is read through the cache of constants, which would keep partial results
from before they were released, loads that acquire are there and each forgets what the cache of its multiprocessor has,
and stores that release, fences, atomics and products are as many as in PTX. Then plants a fault of each kind in the
machine code: each must be noticed.

Usage: check_kernels.py [--arch 80,90a,100a,120a] [--head-dim 64] [--jobs 2]
Exit: 0 passed, 1 failed, 77 no nvcc or no disassembler.
"""
import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile

from check_ptxas import compile_kernels, supported
from check_sass import find_tools, instructions

SOURCES = {"16 bits": ("kernels.cu", []), "8 bits": ("variant_kernels.cu", ["-DEIGHT_BITS_ONLY"])}
GUARD = r"^@!?U?P\d\s+"
# What PTX has, and what becomes of it.
ORDERED = {
    "acquires": (r"\bld\.acquire\.gpu\b", r"\bLDG\.E\S*\.STRONG\.GPU\b"),
    "releases": (r"\bst\.release\.gpu\b", r"\bSTG\.E\S*\.STRONG\.GPU\b"),
    "fences": (r"\b(?:membar\.gl|fence\.\S*gpu|st\.release\.gpu)\b", r"\bMEMBAR\.\S*GPU\b"),
    "atomics": (r"\batom\.", r"\bATOMG\."),
    "products": (r"\bmma\.sync\b", r"\bHMMA\."),
}
CALLS = 2  # of TaskQueue::draw() beside those of tasks, and of atomics in leave_launch()


def kernels_of(ptx):
    """{kernel: its PTX}, of attention kernels."""
    parts = re.split(r"\.visible \.entry (\w+)", ptx)
    return {name: text for name, text in zip(parts[1::2], parts[2::2]) if "attention_kernel" in name}


def counts(ptx, code):
    """{what: (in PTX, in machine code)}"""
    return {what: (len(re.findall(before, ptx)), sum(bool(re.search(after, text)) for text in code))
            for what, (before, after) in ORDERED.items()}


def faults(ptx, code):
    """What is wrong with a kernel's machine code."""
    found = [f"predicated: {text}" for text in code if re.match(GUARD + r"(?:HMMA|LDSM)\b", text)]
    found += [f"read as a constant: {text}" for text in code if re.search(r"\bLDG\.\S*CONSTANT", text)]
    number = counts(ptx, code)
    found += [f"{what}: {have} of {want} in PTX" for what, (want, have) in number.items()
              if have != want and not (what == "acquires" and want < have <= 2 * want)]  # ptxas takes loops apart
    acquires = number["acquires"][1] + len(re.findall(r"\bmembar\.gl\b", ptx))
    forgets = sum("CCTL.IVALL" in text for text in code)
    if forgets != acquires:
        found.append(f"{forgets} times the cache is forgotten, {acquires} acquires and fences")
    # run_task() is there once for each height: it looks and releases once, and waits but for 128 rows.
    heights = number["releases"][0]
    if heights not in (3, 4) or number["atomics"][0] != heights + 2 * CALLS:
        found.append(f"{heights} releases and {number['atomics'][0]} atomics in PTX")
    if not heights + 3 <= number["acquires"][0] <= 2 * heights + 3:  # nvcc may write the wait's loop with two loads
        found.append(f"{number['acquires'][0]} acquires in PTX")
    return found


def first(pattern, change):
    """A fault: the first instruction with `pattern`, changed."""
    def plant(code):
        at = next(i for i, text in enumerate(code) if re.search(pattern, text))
        return code[:at] + [changed for changed in [change(code[at])] if changed] + code[at + 1:]
    return plant


PLANTED = {
    "a product is predicated": first(r"^HMMA", lambda text: "@P0 " + text),
    "a product is predicated by all of a warp": first(r"^HMMA", lambda text: "@!UP1 " + text),
    "a matrix load is predicated": first(r"^LDSM", lambda text: "@!P3 " + text),
    "a load is of constants": first(r"LDG\.E(?!\S*STRONG)", lambda text: text.replace("LDG.E", "LDG.E.CONSTANT", 1)),
    "a load of 128 bits is of constants": first(r"LDG\.E\.128\b", lambda text: text.replace(".128", ".128.CONSTANT", 1)),
    "a load does not acquire": first(r"LDG\.E\.STRONG", lambda text: text.replace(".STRONG.GPU", "", 1)),
    "a load acquires of the block": first(r"LDG\.E\.STRONG", lambda text: text.replace(".STRONG.GPU", ".STRONG.CTA", 1)),
    "a load acquires that did not": first(r"LDG\.E(?!\S*STRONG)", lambda text: text.replace("LDG.E", "LDG.E.STRONG.GPU", 1)),
    "a store does not release": first(r"STG\.E\.STRONG", lambda text: text.replace(".STRONG.GPU", "", 1)),
    "a store is strong that was not": first(r"STG\.E(?!\S*STRONG)", lambda text: text.replace("STG.E", "STG.E.STRONG.GPU", 1)),
    "a cache is not forgotten": first(r"^CCTL\.IVALL", lambda text: None),
    "a fence is gone": first(r"MEMBAR\.\S*GPU", lambda text: None),
    "an atomic is gone": first(r"ATOMG", lambda text: None),
    "a product is gone": first(r"HMMA", lambda text: None),
}


def check(nvcc, disassembler, work, arch, head_dim, what):
    """Compiles one source. Returns what to print and what failed."""
    source, defined = SOURCES[what]
    where = f"sm_{arch} {what}"
    folder = os.path.join(work, arch + what[0])
    os.mkdir(folder)
    cubin = os.path.join(folder, "kernels.cubin")
    code, text = compile_kernels(nvcc, arch, head_dim, "half", cubin, source, [*defined, "--keep", "--keep-dir", folder])
    if code != 0:
        return [text], [f"{where}: does not compile"]
    [path] = [name for name in os.listdir(folder) if name.endswith(".ptx")]
    with open(os.path.join(folder, path)) as file:
        ptx = kernels_of(file.read())
    sass = instructions(subprocess.run([disassembler, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout)
    lines, failures = [], [] if ptx else [f"{where}: no attention kernel in the PTX"]
    for name, text in ptx.items():
        code = sass.get(name, [])
        failures += [f"{where}: {fault}" for fault in faults(text, code)]
        missed = [fault for fault, plant in PLANTED.items() if faults(text, plant(code)) == faults(text, code)] if code else []
        failures += [f"{where}: not noticed: {fault}" for fault in missed]
        lines.append(f"{where}: {len(code)} instructions, " +
                     ", ".join(f"{have} {kind}" for kind, (_, have) in counts(text, code).items()) +
                     f"; {len(PLANTED) - len(missed)} of {len(PLANTED)} planted faults noticed")
    return lines, failures


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--arch", default="80,90a,100a,120a")
    options.add_argument("--head-dim", default="64")
    options.add_argument("--jobs", type=int, default=2)
    options = options.parse_args()
    nvcc, disassembler = find_tools()
    failures = []
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = []
        for arch in options.arch.split(","):
            if supported(nvcc, arch):
                running += [pool.submit(check, nvcc, disassembler, work, arch, options.head_dim, what) for what in SOURCES]
            else:
                print(f"sm_{arch}: this nvcc does not know it, NOT checked")
        for done in running:
            lines, failed = done.result()
            print("\n".join(lines), flush=True)
            failures += failed
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
