#!/usr/bin/env python3
"""Draws docs/benchmarks/serving.svg and rewrites the tables of docs/serve.md.

    python3 bench/serving/plot.py            # needs matplotlib; without it only the tables

From docs/benchmarks/serving_*.json, which experiment.py wrote. A table's place is between the lines
`<!-- table NAME -->` and `<!-- end -->`, NAME being that of the file.
"""

import json
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "docs" / "benchmarks"
DOCUMENT = ROOT / "docs" / "serve.md"
MODES = {
    "tree": ("chunkattn", "#0072b2"),
    "paged_prefix": ("paged, prefix caching", "#e69f00"),
    "paged": ("paged, nothing shared", "#d55e00"),
}


def groups_of(results):
    """{(prompt, shared, load, mode): [report]}"""
    groups = {}
    for entry in results["cells"]:
        cell = entry["cell"]
        key = (cell["prompt"], cell["shared"], cell["load"], cell["cache"])
        groups.setdefault(key, []).append(entry["report"])
    return groups


def median(reports, value):
    return statistics.median(value(report) for report in reports)


def cells_of(reports_by_mode):
    """The figures of a row: those of all modes that were run, side by side."""

    def side_by_side(value, digits):
        return ", ".join(f"{median(reports, value):.{digits}f}" for reports in reports_by_mode)

    early = any(report["capped"] for reports in reports_by_mode for report in reports)
    yield side_by_side(lambda r: 1e3 * r["normalised_latency"], 1)
    yield side_by_side(lambda r: r["tokens_per_second"], 0) + (" (ended early)" if early else "")


def table_of(groups):
    lines = ["| prompt | arrivals | ms/token | tokens/s |", "| --- | --- | --- | --- |"]
    for prompt, shared, load in sorted(
        {key[:3] for key in groups}, key=lambda k: (k[0], -k[1], 0 if k[2] == "full" else 1 + k[2])
    ):
        modes = [groups[key] for mode in MODES if (key := (prompt, shared, load, mode)) in groups]
        share = "shared" if shared == prompt else f"{shared} shared" if shared else "own"
        arrivals = "burst" if load == "full" else f"{modes[0][0]['arguments']['rate']:.2f}/s"
        lines.append("| " + " | ".join([f"{prompt} {share}", arrivals, *cells_of(modes)]) + " |")
    return "\n".join(lines)


def draw(all_groups):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib: no plot")
        return
    matplotlib.rcParams["svg.hashsalt"] = "chunkattn"
    panels = [
        (name, prompt)
        for name, groups in all_groups.items()
        for prompt in sorted({k[0] for k in groups if k[1] and k[2] != "full"})
    ]
    if not panels:
        return
    figure, grid = plt.subplots(1, len(panels), figsize=(3.7 * len(panels), 3.8), squeeze=False)
    for axes, (name, prompt) in zip(grid.flat, panels):
        for mode, (label, colour) in MODES.items():
            points = sorted(
                (reports[0]["arguments"]["rate"],
                 1e3 * median(reports, lambda r: r["normalised_latency"]))
                for (p, shared, load, cache), reports in all_groups[name].items()
                if p == prompt and shared and load != "full" and cache == mode
            )
            if points:
                axes.plot(*zip(*points), marker="o", markersize=4, label=label, color=colour)
        axes.set_title(f"{name}, {prompt} shared tokens", fontsize=10)
        axes.set_xlabel("requests per second")
        axes.set_ylabel("ms per token, from arrival")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="lower center", ncol=3,
                  frameon=False)
    figure.savefig(DATA / "serving.svg", metadata={"Date": None})
    print("docs/benchmarks/serving.svg")


def main():
    all_groups = {}
    text = DOCUMENT.read_text(encoding="utf-8")
    for path in sorted(DATA.glob("serving_*.json")):
        name = path.stem.removeprefix("serving_")
        all_groups[name] = groups_of(json.loads(path.read_text(encoding="utf-8")))
        text = re.sub(
            rf"(<!-- table {name} -->\n).*?(<!-- end -->)",
            lambda found: f"{found[1]}{table_of(all_groups[found[1].split()[2]])}\n{found[2]}",
            text,
            flags=re.S,
        )
    DOCUMENT.write_text(text, encoding="utf-8")
    print("docs/serve.md")
    draw(all_groups)


if __name__ == "__main__":
    main()
