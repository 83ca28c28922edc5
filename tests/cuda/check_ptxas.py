#!/usr/bin/env python3
"""Compiles the CUDA kernels and checks what ptxas and the disassembler say of them.

No warnings, no spills, no stack frame; registers low enough for the blocks per multiprocessor that
the kernels are tuned for; tensor-core and 16-byte asynchronous copy instructions in the machine
code, where cuobjdump or nvdisasm is at hand (PATH, the toolkit, or Triton's package). Prints one
line per kernel and the time to compile the CUDA umbrella header.

Usage: check_ptxas.py [--arch 80,90a] [--head-dim 16,64,96,128,256,192:128,256:64] [--quick | --tuned]
(192:128: heads of K of 192 elements, of V of 128)
Exit: 0 passed, 1 failed, 77 no nvcc.
"""
import argparse
import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.join(ROOT, "tests", "cuda")

# Compiled where the toolkit has them; the tuning is for the older ones.
NEWER = ["100a", "120a"]

# Registers that allow two blocks of 128 threads per multiprocessor (65536 each).
MAX_REGISTERS = 255

HEIGHTS = (128, 64, 32, 16)  # rows of a tile, where there are such

# The loop over KV tiles at head_dim 128, with the branches that few tiles take: instructions in a tile of 128, 64,
# 32 and 16 rows at most. Three in a hundred more than nvcc 13.0 makes of it. In tiles of 64 and 128 a thread has twice
# the outputs of others, so the branches that rescale them or make NaN of some have 200 instructions more there. Values
# are added up apart from outputs: an FADD for each output and 32 tokens, 256 in tiles of 128 rows, 128 in those of 64.
MAX_LOOP = {"80": (2142, 1573, 1022, 894), "90a": (2176, 1568, 1039, 907), "100a": (2166, 1603, 1100, 976),
            "120a": (2404, 1700, 1115, 969)}


def find_nvcc():
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return nvcc if os.path.exists(nvcc) else None


def find_disassembler(nvcc):
    tool = shutil.which("cuobjdump") or os.path.join(os.path.dirname(nvcc), "cuobjdump")
    if os.path.exists(tool):
        return tool
    for base in sys.path:
        found = glob.glob(os.path.join(base, "triton", "**", "bin", "cuobjdump"), recursive=True)
        if found:
            return found[0]
    return os.environ.get("CUOBJDUMP")


def supported(nvcc, arch):
    listing = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    return not listing or "sm_" + arch.rstrip("af") in listing


def compile_kernels(nvcc, arch, head_dim, element, out, source="kernels.cu", defined=()):
    k, _, v = head_dim.partition(":")
    command = [nvcc, "-std=c++20", "-O3", "-I" + os.path.join(ROOT, "include"),
               "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xptxas", "-v,-warn-spills",
               "-Xcompiler", "-Wall,-Wextra", f"-DHEAD_DIM={k}", f"-DVALUE_DIM={v or k}", f"-DELEMENT={element}", *defined,
               "-cubin", "-o", out, os.path.join(HERE, source)]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def parse(text):
    """(kernel name, registers, stack, spill stores, spill loads) of each kernel."""
    name = None
    numbers = None
    for line in text.splitlines():
        found = re.search(r"Compiling entry function '(\w+)'", line)
        if found:
            name = re.search(r"(attention|write|write_quantized|merge_states|begin_step)_kernel", found[1])[0]
        found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if found:
            numbers = [int(x) for x in found.groups()]
        found = re.search(r"Used (\d+) registers", line)
        if found and name:
            yield [name, int(found[1])] + numbers
            name = None


def loops(function):
    """(instructions, HMMA among them) of each innermost loop with HMMA, by HMMA, the most first."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", function)]
    found = []
    for at, text in code:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) <= at:
            body = [t for a, t in code if int(target[1], 16) <= a <= at]
            found.append((int(target[1], 16), at, len(body), sum("HMMA" in t for t in body)))
    found = [loop for loop in found if loop[3]]
    innermost = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return sorted([loop[2:] for loop in innermost], key=lambda loop: -loop[1])


def check(nvcc, disassembler, work, arch, head_dim, element):
    """Compiles one configuration. Returns what to print and what failed."""
    lines, failures = [], []
    where = f"sm_{arch} head_dim {head_dim} {element}"
    cubin = os.path.join(work, f"kernels_{arch}_{head_dim.replace(':', '_')}_{element}.cubin")
    start = time.time()
    code, text = compile_kernels(nvcc, arch, head_dim, element, cubin)
    seconds = time.time() - start
    if code != 0:
        return [text], [f"{where}: does not compile"]
    for line in text.splitlines():
        if "warning" in line.lower():
            failures.append(f"{where}: {line}")
    kernels = list(parse(text))
    if len(kernels) != 4:
        failures.append(f"{where}: {len(kernels)} kernels in the report, not 4")
    for name, registers, stack, stores, loads in kernels:
        lines.append(f"{where:34} {name:22} {registers:4} registers, {stack} bytes stack, "
                     f"{stores + loads} bytes spilled")
        if stack or stores or loads:
            failures.append(f"{where}: {name} spills")
        if registers > MAX_REGISTERS:
            failures.append(f"{where}: {name} needs {registers} registers")
    lines.append(f"{where:34} compiled in {seconds:.1f} s")
    if disassembler:
        sass = subprocess.run([disassembler, "--dump-sass", cubin], capture_output=True, text=True).stdout
        for function in re.split(r"\bFunction : ", sass)[1:]:
            if re.search(r"\bI2F\.U64\b", function):
                failures.append(f"{where}: {function.split()[0]} divides 64-bit integers")
            if "attention_kernel" not in function:
                continue
            mma = len(re.findall(r"\bHMMA\.16816", function))
            copies = len(re.findall(r"\bLDGSTS\.E\.(?:\w+\.)*128", function))
            local = len(re.findall(r"\b(?:LDL|STL)\b", function))
            lengths = [length for length, _ in loops(function)]
            bodies = dict(zip(HEIGHTS[-len(lengths):], lengths))
            lines.append(f"{where:34} {mma} HMMA.16816, {copies} LDGSTS.128, {local} local accesses, loops of "
                         f"{', '.join(map(str, bodies.values()))} instructions")
            if head_dim == "128":
                failures += [f"{where}: {bodies.get(rows)} instructions in the loop of {rows} rows, not {most}"
                             for rows, most in zip(HEIGHTS, MAX_LOOP.get(arch, ())) if bodies.get(rows, most + 1) > most]
            if not mma or not copies or local:
                failures.append(f"{where}: machine code lacks HMMA or LDGSTS, or uses local memory")
    return lines, failures


def check_variants(nvcc, work, arch):
    """Compiles the attention kernel with each variant of the library and over K/V of 8 bits, and the
    kernels that store such and merge states. Returns as check()."""
    where = f"sm_{arch} variants"
    start = time.time()
    code, text = compile_kernels(nvcc, arch, "128", "half", os.path.join(work, f"variants_{arch}.cubin"),
                                 "variant_kernels.cu")
    if code != 0:
        return [text], [f"{where}: do not compile"]
    kernels = list(parse(text))
    failures = [f"{where}: {line}" for line in text.splitlines() if "warning" in line.lower()]
    if any(stack or stores or loads for _, _, stack, stores, loads in kernels):
        failures.append(f"{where}: a kernel spills")
    if len(kernels) != 12:
        failures.append(f"{where}: {len(kernels)} kernels in the report, not 12")
    registers = ", ".join(str(kernel[1]) for kernel in kernels)
    return [f"{where:34} {registers} registers, compiled in {time.time() - start:.1f} s"], failures


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--arch", default="80,90a")
    options.add_argument("--head-dim", default="16,64,96,128,256,192:128,256:64")
    options.add_argument("--quick", action="store_true", help="one element type, no variants, no umbrella timing")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--tuned", action="store_true",
                         help="head_dim 64 and 128, both element types, and one configuration for "
                              "heads of V of their own and for each newer architecture this nvcc "
                              "has; no umbrella timing")
    options = options.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("SKIPPED: check_ptxas.py needs nvcc")
        return 77
    disassembler = find_disassembler(nvcc)
    failures = []
    configurations = []
    for arch in options.arch.split(","):
        if not supported(nvcc, arch):
            print(f"sm_{arch}: this nvcc does not know it, NOT checked")
            continue
        dims = "64,128" if options.tuned else options.head_dim
        for head_dim in dims.split(","):
            for element in ["half"] if options.quick else ["half", "bfloat16"]:
                configurations.append((arch, head_dim, element))
    if options.tuned:
        for arch in NEWER:
            if supported(nvcc, arch):
                configurations.append((arch, "128", "half"))
        configurations.append(("90a", "192:128", "bfloat16"))
        configurations.append(("90a", "64:128", "half"))
    with tempfile.TemporaryDirectory() as work:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            checks = [pool.submit(check, nvcc, disassembler, work, *c) for c in configurations]
            checks += [pool.submit(check_variants, nvcc, work, arch) for arch in options.arch.split(",")
                       if not options.quick and supported(nvcc, arch)]
            checks += [pool.submit(check_variants, nvcc, work, arch) for arch in NEWER
                       if options.tuned and supported(nvcc, arch)]
            for done in checks:
                lines, failed = done.result()
                print("\n".join(lines), flush=True)
                failures += failed
        if not options.quick and not options.tuned:
            source = os.path.join(work, "umbrella.cu")
            with open(source, "w") as file:
                file.write('#include "chunkattn/cuda.cuh"\nint main() {}\n')
            start = time.time()
            subprocess.run([nvcc, "-std=c++20", "-I" + os.path.join(ROOT, "include"),
                            "-gencode", "arch=compute_90a,code=sm_90a", "-c", "-o", os.devnull, source], check=True)
            print(f"cuda.cuh alone compiles in {time.time() - start:.1f} s")
    if not disassembler:
        print("no cuobjdump: the machine code was NOT looked at")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
