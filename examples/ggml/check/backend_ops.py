#!/usr/bin/env python3
"""Counts what test-backend-ops says of FLASH_ATTN_EXT: cases taken, passed, declined, by head size and type.

usage: backend_ops.py LOG --heads "64;192:128"

Exit status 1 if a case that was taken failed, or if one was declined that the plugin is to take: K and V in F32,
F16 or BF16 alike, with heads of the sizes that it was built with, or shorter ones down to half of one of them."""
import argparse
import collections
import re
import sys


def expected(fields, sizes):
    types = {fields["type_K"], fields["type_V"]}
    k, v = int(fields["hsk"]), int(fields["hsv"])
    fits = any(k <= size_k and v <= size_v and size_k + size_v <= 2 * (k + v) for size_k, size_v in sizes)
    return fits and len(types) == 1 and types <= {"f32", "f16", "bf16"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("log")
    parser.add_argument("--heads", required=True)
    options = parser.parse_args()
    sizes = {(int(size.split(":")[0]), int(size.split(":")[-1])) for size in options.heads.split(";")}
    with open(options.log, encoding="utf-8", errors="replace") as log:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read())
    counts = collections.defaultdict(collections.Counter)
    wrong = []
    for match in re.finditer(r"FLASH_ATTN_EXT\((.*?)\): (.*)", text):
        fields = dict(re.findall(r"(\w+)=([^,\[]+|\[[^\]]*\])", match[1]))
        result = "declined" if "not supported" in match[2] else "passed" if "OK" in match[2] else "failed"
        counts[fields["hsk"], fields["hsv"], fields["type_K"], fields["type_V"]][result] += 1
        if result == "failed" or (result == "declined" and expected(fields, sizes)):
            wrong.append(match[0])
    if not counts:
        sys.exit("FAILED: no case was run; see the log")
    taken, total = collections.Counter(), collections.Counter()
    for (size, value_size, k, v), of in counts.items():
        total.update(of)
        if of["passed"] + of["failed"] > 0:
            taken[f"{size}:{value_size}"] += of["passed"] + of["failed"]
    types = sorted({k for (_, _, k, _), of in counts.items() if of["passed"]})
    print(f"{sum(total.values())} cases: {total['passed']} taken and passed, {total['failed']} taken and failed, "
          f"{total['declined']} declined")
    print(f"taken: K/V of {', '.join(types)}; heads " +
          ", ".join(f"{size} ({n})" for size, n in sorted(taken.items(), key=lambda x: int(x[0].split(":")[0]))))
    declined = collections.Counter()
    for (size, value_size, k, v), of in counts.items():
        reason = f"K/V {k}" if k == v else "mixed types"
        if k == v and k in ("f32", "f16", "bf16"):
            reason = f"heads {size}:{value_size}"
        declined[reason] += of["declined"]
    print("declined: " + ", ".join(f"{reason} ({n})" for reason, n in sorted(declined.items()) if n))
    for line in wrong[:20]:
        print("WRONG:", line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
