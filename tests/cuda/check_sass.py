#!/usr/bin/env python3
"""Compiles ptx_wrappers.cu and checks the machine code of each wrapper: which instruction, with which
qualifiers, and that every operand stands in its place. An operand is known by where it was loaded
from or is stored to.

Usage: check_sass.py [--arch 80,90a,100a,120a]
Exit: 0 passed, 1 failed, 77 no nvcc or no disassembler.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

from check_ptxas import HERE, ROOT, find_disassembler, find_nvcc, supported


def instructions(sass):
    """{kernel: its instructions, without control codes}."""
    kernels = {}
    for function in re.split(r"\bFunction : ", sass)[1:]:
        kernels[function.split()[0]] = [text for _, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", function)]
    return kernels


class Kernel:
    def __init__(self, name, code):
        self.name, self.code = name, code
        self.loads, self.stores = {}, {}  # offset -> registers, of global memory
        for text in code:
            found = re.match(r"(?:@\S+ )?LDG\.E\S* (R\d+), .*?\[R\d+(?:\.64)?(?:\+(0x[0-9a-f]+))?\]", text)
            if found:
                self.loads.setdefault(int(found[2] or "0", 16), []).append(found[1])
            found = re.match(r"STG\.E\S* .*?\[R\d+(?:\.64)?(?:\+(0x[0-9a-f]+))?\], (R\d+)", text)
            if found:
                self.stores[int(found[1] or "0", 16)] = found[2]

    def only(self, pattern):
        """The one instruction that matches."""
        found = [m for m in (re.search(pattern, text) for text in self.code) if m]
        assert len(found) == 1, f"{len(found)} instructions match {pattern}"
        return found[0]

    def place(self, pattern):
        return next((i for i, text in enumerate(self.code) if re.search(pattern, text)), None)

    def load(self, offset):
        assert len(self.loads.get(offset, [])) == 1, f"loads at {offset}: {self.loads}"
        return self.loads[offset][0]


def register(name, i):
    return f"R{int(name[1:]) + i}"


def check_copy(k):
    k.only(r"LDGSTS\.E\.BYPASS\.LTC128B\.128\S* \[R\S*\], .*P\d")
    waits = [rf"DEPBAR\.LE SB0, 0x{left}\b" for left in (2, 1, 0)]
    order = [k.place(p) for p in (r"LDGSTS", r"LDGDEPBAR", *waits)]
    assert None not in order and order == sorted(order), f"copy, commit, waits stand at {order}"


def check_matrices(k, transposed):
    first = k.only(r"LDSM\.16\.MT88\.4 (R\d+)," if transposed else r"LDSM\.16\.M88\.4 (R\d+),")[1]
    for i in range(4):
        assert k.stores[4 * i] == register(first, i), f"matrix {i} is in {k.stores[4 * i]}, of {first} on"


def check_mma(k, suffix):
    d, a, b, c = k.only(r"HMMA\.16816\.F32" + suffix + r" (R\d+), (R\d+), (R\d+), (R\d+)\b").groups()
    for i in range(4):
        assert k.load(4 * i) == register(c, i), f"c[{i}]"
        assert k.load(16 + 4 * i) == register(a, i), f"a[{i}]"
        assert k.stores[4 * i] == register(d, i), f"d[{i}]"
    for i in range(2):
        assert k.load(32 + 4 * i) == register(b, i), f"b[{i}]"


def check_pack(k, kind):
    out, high, low = k.only(rf"F2FP{kind}\.PACK_AB (R\d+), (R\d+), (R\d+)").groups()
    assert (low, high) == (k.load(0), k.load(4)), f"low {low}, high {high}: {k.loads}"
    assert k.stores[0] == out


def check_exp2(k):
    # No scaling around it: that is what .ftz is for.
    out, x = k.only(r"MUFU\.EX2 (R\d+), (R\d+)").groups()
    assert x == k.load(0) and out == k.stores[0]
    assert k.place(r"FMUL") is None, "the argument is scaled"


def check_max(k):
    out, a, b = k.only(r"FMNMX\S* (R\d+), (R\d+), (R\d+), !PT").groups()
    assert {a, b} == {k.load(0), k.load(4)} and out == k.stores[0]


def check_rounded_product(k):
    product, a, b = k.only(r"FMUL (R\d+), (R\d+), (R\d+)").groups()
    out, *terms = k.only(r"FADD (R\d+), (R\d+), (R\d+)").groups()
    assert {a, b} == {k.load(0), k.load(4)} and set(terms) == {product, k.load(8)} and out == k.stores[0]


def check_fma(k):
    out, a, b, c = k.only(r"FFMA (R\d+), (R\d+), (R\d+), (R\d+)").groups()
    assert {a, b} == {k.load(0), k.load(4)} and c == k.load(8) and out == k.stores[0]


def check_quotient(k):
    x = k.only(r"MUFU\.RCP R\d+, (R\d+)")[1]
    assert x == k.load(4), "not the reciprocal of the divisor"


def check_exchange(k):
    out, x = k.only(r"SHFL\.BFLY PT, (R\d+), (R\d+), 0x2, 0x1f").groups()
    assert x == k.load(0) and out == k.stores[0]


def check_meet(k):
    order = [k.place(p) for p in (r"STS", r"BAR\.SYNC", r"LDS")]
    assert None not in order and order == sorted(order), f"store, barrier, load stand at {order}"


def check_release(k):
    data, fence, flag = (k.place(p) for p in (r"STG\.E \S*", r"MEMBAR\.\S*GPU", r"STG\.E\.STRONG\.GPU"))
    assert None not in (data, fence, flag) and data < fence < flag, f"data, fence, flag stand at {data, fence, flag}"


def check_order(k):
    stores = [i for i, text in enumerate(k.code) if "STG.E" in text]
    fence = k.place(r"MEMBAR\.\S*GPU")
    assert len(stores) == 2 and fence is not None and stores[0] < fence < stores[1], f"stores and fence stand at {stores, fence}"


def check_acquire(k):
    flag, stale, data = (k.place(p) for p in (r"LDG\.E\.STRONG\.GPU", r"CCTL\.IVALL", r"LDG\.E (?!\.STRONG)"))
    assert None not in (flag, stale, data) and flag < stale < data, f"flag, cache, data stand at {flag, stale, data}"
    assert k.place(r"NANOSLEEP") is not None


def check_far(k):
    assert k.place(r"\bLD\.") is None and sum("LDG.E" in text for text in k.code) == 2, "a generic load"


def check_ticket(k):
    k.only(r"ATOMG\.E\.ADD\.(?:STRONG\.)?GPU")


# No one instruction: where a thread stands, what keeps the compiler from looking ahead, a library's function.
NO_INSTRUCTION = {"thread_index", "block_index", "grid_size", "block_size", "opaque", "log2"}


def unchecked():
    """Wrappers of ptx.cuh that no kernel here uses."""
    with open(os.path.join(ROOT, "include", "chunkattn", "detail", "cuda", "ptx.cuh")) as file:
        wrappers = set(re.findall(r"^CHUNKATTN_DEVICE [\w:*& ]+?[ *&](\w+)\(", file.read(), re.MULTILINE))
    with open(os.path.join(HERE, "ptx_wrappers.cu")) as file:
        used = set(re.findall(r"\bptx::(\w+)", file.read()))
    assert len(wrappers) > 20, f"not the wrappers: {sorted(wrappers)}"
    return sorted(wrappers - used - NO_INSTRUCTION)


CHECKS = {
    "copy_16": check_copy,
    "load_matrices": lambda k: check_matrices(k, False),
    "load_transposed": lambda k: check_matrices(k, True),
    "multiply_half": lambda k: check_mma(k, ""),
    "multiply_bfloat16": lambda k: check_mma(k, r"\.BF16"),
    "pack_half": lambda k: check_pack(k, r"(?:\.F16\.F32)?"),
    "pack_bfloat16": lambda k: check_pack(k, r"\.BF16(?:\.F32)?"),
    "power_of_2": check_exp2,
    "greater": check_max,
    "rounded_product": check_rounded_product,
    "multiply_add": check_fma,
    "quotient": check_quotient,
    "exchange": check_exchange,
    "vote": lambda k: k.only(r"VOTE\.ANY"),
    "meet": check_meet,
    "release": check_release,
    "load_far": check_far,
    "order": check_order,
    "acquire": check_acquire,
    "ticket": check_ticket,
}


def find_tools():
    """nvcc and a disassembler. Without one of them the script ends."""
    nvcc = find_nvcc()
    disassembler = nvcc and find_disassembler(nvcc)
    if disassembler is None:
        print(f"SKIPPED: {os.path.basename(sys.argv[0])} needs {'nvcc' if nvcc is None else 'cuobjdump'}")
        sys.exit(77)
    return nvcc, disassembler


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--arch", default="80,90a,100a,120a")
    options = options.parse_args()
    nvcc, disassembler = find_tools()
    failures = len(unchecked())
    for name in unchecked():
        print(f"FAILED: {name} of ptx.cuh is in no kernel of ptx_wrappers.cu")
    for arch in options.arch.split(","):
        if not supported(nvcc, arch):
            print(f"sm_{arch}: this nvcc does not know it, NOT checked")
            continue
        with tempfile.TemporaryDirectory() as work:
            cubin = os.path.join(work, "wrappers.cubin")
            subprocess.run([nvcc, "-std=c++20", "-O3", "-I" + os.path.join(ROOT, "include"), "-gencode",
                            f"arch=compute_{arch},code=sm_{arch}", "-cubin", "-o", cubin,
                            os.path.join(HERE, "ptx_wrappers.cu")], check=True)
            sass = subprocess.run([disassembler, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
        kernels = instructions(sass)
        good = 0
        for name, check in CHECKS.items():
            try:
                check(Kernel(name, kernels[name]))
                good += 1
            except (AssertionError, KeyError) as error:
                failures += 1
                print(f"FAILED: sm_{arch}: {name}: {error}")
                print("   ", "\n    ".join(kernels.get(name, [])))
        print(f"sm_{arch}: {good} of {len(CHECKS)} wrappers are what they should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
