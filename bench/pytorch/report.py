#!/usr/bin/env python3
"""Writes the table and the plot of docs/pytorch.md from what generate.py measured.

    python3 bench/pytorch/report.py     # docs/benchmarks/pytorch_*.json

The table's place is between the lines `<!-- table pytorch -->` and `<!-- end -->`; the plot is
docs/benchmarks/pytorch.svg. Needs no packages.
"""

import html
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "pytorch.md"
NAMES = {"7b-2-layers": "7B shape, 2 layers", "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M"}
PEERS = ("generate", "generate_batch")
TYPES = {"bfloat16": "bf16", "float32": "fp32"}
LEFT, WIDTH, ROW, SCALE_TOP = 270, 860, 20, 24


def cells():
    """(model, cell, report) of all that has a peer's figure, in the table's order."""
    found = []
    for path in sorted(DATA.glob("pytorch_*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        for entry in results["cells"]:
            if "chunkattn" in entry["report"] and best(entry["report"], "tokens_per_s"):
                found.append((NAMES.get(results["context"]["model"], results["context"]["model"]), entry["cell"],
                              entry["report"]))  # fmt: skip
    return sorted(found, key=lambda e: (e[0], e[1]["dtype"], e[1]["shared"], e[1]["batch"]))


def best(report, what):
    """The better of transformers' modes, None where none was measured."""
    return max((report[peer][what] for peer in PEERS if (report.get(peer) or {}).get(what)), default=None)


def table(found):
    lines = ["| model | K/V | shared | b | ours | `generate` | ours / better |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for model, cell, report in found:
        ours = report["chunkattn"]["tokens_per_s"]
        theirs = (report.get("generate") or {}).get("tokens_per_s")
        said = f"{theirs:.1f}" if theirs else "failed" if "generate" in report else ""
        lines.append(f"| {model} | {TYPES[cell['dtype']]} | {cell['shared']} | {cell['batch']} | {ours:.1f} | "
                     f"{said} | {ours / best(report, 'tokens_per_s'):.2f} |")  # fmt: skip
    return "\n".join(lines)


def plot(found):
    """Bars: how many times the tokens per second of the better mode; a line at 1."""
    ratios = [report["chunkattn"]["tokens_per_s"] / best(report, "tokens_per_s") for *_, report in found]
    top = max(1.5, *ratios)
    by_one = (WIDTH - LEFT - 60) / top
    parts = []
    for i, ((model, cell, _), ratio) in enumerate(zip(found, ratios)):
        y = SCALE_TOP + i * ROW
        label = f"{model}, {TYPES[cell['dtype']]}, {cell['shared']} shared, b = {cell['batch']}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
                     f'<rect x="{LEFT}" y="{y + 3}" width="{ratio * by_one:.1f}" height="{ROW - 6}" fill="#0072b2"/>'
                     f'<text x="{LEFT + ratio * by_one + 5:.1f}" y="{y + 14}">{ratio:.2f}</text>')  # fmt: skip
    height, one = SCALE_TOP + len(found) * ROW + 6, LEFT + by_one
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
            f'font-size="12" fill="#222"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
            f'<text x="{LEFT}" y="15">tokens per second, of the better of transformers\' modes</text>{"".join(parts)}'
            f'<line x1="{one:.1f}" y1="{SCALE_TOP}" x2="{one:.1f}" y2="{height - 4}" stroke="#d55e00"/></svg>\n')  # fmt: skip


def main():
    found = cells()
    (DATA / "pytorch.svg").write_text(plot(found), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split("<!-- table pytorch -->\n")
    after = rest.split("<!-- end -->")[1]
    PAGE.write_text(f"{before}<!-- table pytorch -->\n{table(found)}\n<!-- end -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
