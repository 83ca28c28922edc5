#!/usr/bin/env python3
"""check_budgets.py: what the library costs its users, against tools/budgets.txt.

Counted are code lines (neither blank nor comment) of all headers that some public ones include, public names
(check_public.py says which), and words of README.md and docs/*.md. The budget of compile time is held by compile_time.sh.
"""

import pathlib
import re
import sys

import check_public

ROOT, HEADERS = check_public.ROOT, check_public.HEADERS
BUDGETS = ROOT / "tools" / "budgets.txt"
PROGRAM = ("prefix_tree.hpp", "kv_cache.hpp", "attention_plan.hpp", "chunk_attention.hpp")


def is_code(line):
    return line.strip() and not line.strip().startswith("//")


def included(path):
    """What a header includes of ours, on a CPU: .cuh under nvcc, *_windows.hpp for Windows only."""
    for name in re.findall(r'^ *#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
        if path.suffix == ".cuh" or not name.endswith(".cuh"):
            if not name.endswith("_windows.hpp"):
                yield (path.parent / name).resolve()


def code_lines(paths):
    """Of these headers and all that they include."""
    seen, left = set(), list(paths)
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            left.extend(included(path))
    return sum(1 for path in seen for line in path.read_text(encoding="utf-8").splitlines() if is_code(line))


def measure():
    headers = [path for path in HEADERS.rglob("*.*") if path.suffix in (".hpp", ".cuh")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {
        "tree_lines": code_lines([HEADERS / "prefix_tree.hpp"]),
        "program_lines": code_lines(HEADERS / name for name in PROGRAM),
        "header_lines": code_lines(headers),
        "public_names": sum(len(names) for names in check_public.count_names().values()),
        "docs_words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def main():
    text = BUDGETS.read_text(encoding="utf-8")
    budgets = {name: float(most) for name, most in re.findall(r"^(\w+) +([\d.]+)$", text, re.M)}
    found, status = measure(), 0
    if set(budgets) != set(found) | {"compile_time"}:
        sys.exit(f"FAILED: tools/budgets.txt has {', '.join(budgets)}; expected {', '.join(found)}, compile_time")
    for name, n in found.items():
        print(f"{name}: {n} of {budgets[name]:g}, {100 * n / budgets[name]:.0f} %")
        if n > budgets[name]:
            status = 1
            print(f"FAILED: {name} is above its budget: remove something, or raise it by a commit that says why")
    sys.exit(status)


main()
