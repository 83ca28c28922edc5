#!/usr/bin/env python3
"""Plants faults in the inline assembly of include/chunkattn/detail/cuda/ptx.cuh, as it stands in the PTX of
CHUNKATTN_PTX, and asks whether a test program notices each.

    mutate.py WORK PROGRAM [ARGUMENT...]

Exit: 0 all are noticed, 1 one is not, or none of its kind is in the PTX."""

import os
import re
import subprocess
import sys

REGISTER = r"(%\w+)"


def swapped(opcode, first, second):
    """Operands number `first` and `second` of the instruction exchanged."""
    def edit(match):
        registers = re.findall(r"%\w+", match[0])
        parts = re.split(r"%\w+", match[0])
        registers[first], registers[second] = registers[second], registers[first]
        return "".join(part + register for part, register in zip(parts, registers + [""]))
    return (re.escape(opcode) + r"[^;\n]*;", edit)


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
MUTANTS = {
    **{f"mma: a[{i}] and a[{i + 1}]": swapped(MMA, 4 + i, 5 + i) for i in range(3)},
    "mma: b0 and b1": swapped(MMA, 8, 9),
    **{f"mma: d[{i}] and d[{i + 1}]": swapped(MMA, i, i + 1) for i in range(3)},
    **{f"mma: c[{i}] and c[{i + 1}]": swapped(MMA, 10 + i, 11 + i) for i in range(3)},
    "mma: c is not added to": (re.escape(MMA) + r" ({[^}]*}, {[^}]*}, {[^}]*}), {[^}]*}", rf"{MMA} \1, {{0f00000000, 0f00000000, 0f00000000, 0f00000000}}"),
    "mma: the other element type": (re.escape("f32.f16.f16.f32"), "f32.bf16.bf16.f32"),
    **{f"ldmatrix: {i} and {i + 1}": swapped("ldmatrix.sync.aligned.m8n8.x4.shared.b16", i, i + 1) for i in range(3)},
    **{f"ldmatrix.trans: {i} and {i + 1}": swapped("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", i, i + 1) for i in range(3)},
    "ldmatrix: no .trans": (r"x4\.trans\.", "x4."),
    "ldmatrix: .trans everywhere": (r"x4\.shared", "x4.trans.shared"),
    "cvt: halves": swapped("cvt.rn.f16x2.f32", 1, 2),
    "cvt: the other element type": (r"cvt\.rn\.f16x2", "cvt.rn.bf16x2"),
    "ex2: its argument": (rf"ex2\.approx\.ftz\.f32 {REGISTER}, {REGISTER}", r"mov.f32 \1, \2"),
    "cp.async: never read": (rf"(cp\.async\.cg[^;]*, 16), {REGISTER}", r"\1, 0"),
    "cp.async: always read": (rf"(cp\.async\.cg[^;]*, 16), {REGISTER}", r"\1, 16"),
    "cp.async: no commit": (r"\tcp\.async\.commit_group;\n", "\n"),
    **{f"cp.async: {n + 1} are pending, not {n}": (f"wait_group {n};", f"wait_group {n + 1};") for n in range(3)},
    "bar.sync: none": (r"bar\.sync \t0;", ""),
    "bar.sync: not the last one": (r"bar\.sync \t0;(?![\s\S]*bar\.sync)", ""),
    "flags: never set": (r"st\.release\.gpu\.global\.u32 [^;]*;", ""),
    "flags: not looked at": (rf"ld\.acquire\.gpu\.global\.u32 {REGISTER}, [^;]*;", r"mov.u32 \1, 6;"),
    "fence: none": (r"membar\.gl;", ""),
}


def edited(text, pattern, replacement):
    """Each kernel by itself, so that 'the last one' is one in each; and how many places changed."""
    kernels = re.split(r"(?=\.visible \.entry)", text)
    done = [re.subn(pattern, replacement, kernel) for kernel in kernels]
    return "".join(kernel for kernel, _ in done), sum(count for _, count in done)


def main():
    work, program = sys.argv[1:3]  # and what else the program is called with
    texts = [open(path).read() for path in os.environ["CHUNKATTN_PTX"].split(":")]
    # One kernel is enough, of which the PTX is short: 16-bit K/V, heads of 16.
    name = "attention_kernelINS0_4halfELi16ELi16ENS0_9NoVariantEEE"
    head = texts[0][:texts[0].index(".visible .entry")]
    kernel = next(k for text in texts for k in re.split(r"(?=\.visible \.entry)", text) if k.startswith(".visible") and name in k[:400])
    path = os.path.join(work, "mutant.ptx")
    environment = {**os.environ, "CHUNKATTN_PTX": path, "CHUNKATTN_SEED": "4", "CHUNKATTN_PTX_FORMS": os.devnull}
    command = [program, *sys.argv[3:], "--abort-after=1",
               "--test-case=a scale of any size*,pairs of several heads*,rows that see nothing*,a NaN in the first row of q*,a ring of any depth*"]

    def fails(text):
        with open(path, "w") as file:
            file.write(text)
        try:
            return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode != 0
        except subprocess.TimeoutExpired:
            return True

    if fails(head + kernel):
        print("FAILED: the program fails without a fault")
        return 1
    missed = 0
    for mutant, (pattern, replacement) in MUTANTS.items():
        text, places = edited(head + kernel, pattern, replacement)
        noticed = places > 0 and fails(text)
        missed += not noticed
        print(f"{'noticed' if noticed else 'NOT NOTICED'}: {mutant} ({places} places)", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants are noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
