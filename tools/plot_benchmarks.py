#!/usr/bin/env python3
"""Draws docs/benchmarks/*.svg and rewrites the tables of docs/benchmarks.md, from committed JSON.

    python3 tools/plot_benchmarks.py            # needs matplotlib
    python3 tools/plot_benchmarks.py --png DIR  # the plots as PNG there too, to look at

What measured the JSON files stands above each table in docs/benchmarks.md. A table's place is
between the lines `<!-- table NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "benchmarks"
DOCUMENT = ROOT / "docs" / "benchmarks.md"

# One colour per way of computing, the same in every plot (colour-blind safe).
COLOURS = {
    "chunkattn": "#0072b2",
    "paged, shared pages": "#e69f00",
    "paged, own pages": "#d55e00",
    "naive": "#999999",
}


def read(name):
    path = DATA / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# --- reading the reports --------------------------------------------------------------------------

TYPES = ["fp32", "fp16", "bf16", "int8"]
METHODS = {
    "ours": "chunkattn",
    "paged_shared_pages": "paged, shared pages",
    "paged_unshared": "paged, own pages",
    "naive": "naive",
}


def read_decode():
    """All runs of bench/decode, from the reports named decode*.json, and their contexts."""
    runs, contexts, seen = [], [], set()
    for path in sorted(DATA.glob("decode*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        contexts.append(report["context"])
        for run in report["benchmarks"]:
            if run["name"] in seen:
                continue  # measured in two reports: the first counts
            seen.add(run["name"])
            method, dtype, *parts = run["name"].split("/")
            fields = dict(part.split(":", 1) for part in parts if ":" in part)
            run |= {"method": METHODS[method], "dtype": dtype, "cold": "cold" in parts}
            run |= {"fields": fields, "heads": fields["heads"].replace(":", "/")}
            run["chunk"] = int(fields.get("chunk", 64))
            runs.append(run)
    return runs, contexts


def select(runs, **wanted):
    """Runs with these values; keys of the name (b, shared, own) as text, others as read."""
    return [
        run
        for run in runs
        if all(run.get(key, run["fields"].get(key)) == value for key, value in wanted.items())
    ]


# --- plots ----------------------------------------------------------------------------------------


def save(figure, name, png):
    figure.savefig(DATA / f"{name}.svg", metadata={"Date": None})
    if png:
        figure.savefig(pathlib.Path(png) / f"{name}.png", dpi=110)
    print(f"docs/benchmarks/{name}.svg")


PLOTS = {
    "ratio_to_floor": "Time over floor for every case",
    "completion": "Token rate against completion tokens",
    "batch": "Token rate against batch size",
}


def images():
    """Markdown for the plots that there are."""
    return {
        name: f"![{text}](benchmarks/{name}.svg)"
        for name, text in PLOTS.items()
        if (DATA / f"{name}.svg").exists()
    }


def style(axes, title, xlabel, ylabel):
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def figure_legend(figure, axes, columns):
    handles = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncol=columns, frameon=False
    )


def plot_lines(plt, name, panels, xlabel, png):
    """panels: [(title, {label: [(x, y)]})]"""
    if not any(series for _, series in panels):
        return
    width = max(6.5, 3.7 * len(panels))
    figure, grid = plt.subplots(1, len(panels), figsize=(width, 4), squeeze=False)
    for axes, (title, series) in zip(grid.flat, panels):
        for label, points in series.items():
            points = sorted(points)
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o",
                markersize=4,
                label=label,
                color=COLOURS[label],
            )
        axes.set_xlim(left=0)
        style(axes, title, xlabel, "query tokens per ms")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure_legend(figure, grid.flat, 4)
    save(figure, name, png)


def plot_ratios(plt, rows, png):
    """Every case's time over its floor. rows: [(case, dtype, ratio)]"""
    names = list(dict.fromkeys(name for name, _, _ in rows))
    dtypes = list(dict.fromkeys(dtype for _, dtype, _ in rows))
    figure, axes = plt.subplots(figsize=(8.5, 0.9 + 0.42 * len(names)))
    colours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]
    height = 0.8 / len(dtypes)
    for i, dtype in enumerate(dtypes):
        found = {name: ratio for name, kind, ratio in rows if kind == dtype}
        places = [n + (i + 0.5) * height - 0.4 for n, name in enumerate(names) if name in found]
        values = [found[name] for name in names if name in found]
        axes.barh(places, values, height, label=dtype, color=colours[i % 4])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("time ÷ floor (1 = the machine's own limit)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncol=len(dtypes), borderaxespad=0
    )
    figure.tight_layout()
    save(figure, "ratio_to_floor", png)


def draw_decode(plt, runs, png):
    prefixes = [run for run in runs if run["cold"] and run["chunk"] == 64 and "b" in run["fields"]]
    ratios = []
    for run in select(prefixes, method="chunkattn", b="32"):
        fields = run["fields"]
        if fields["own"] == "64" or fields["shared"] == "0":
            name = f"{run['heads']}, {fields['shared']} + {fields['own']}"
            order = (-int(run["heads"].split("/")[1]), fields["shared"] == "0")
            order += (int(fields["shared"]), int(fields["own"]), TYPES.index(run["dtype"]))
            ratios.append((order, name, run["dtype"], run["ratio"]))
    plot_ratios(plt, [row[1:] for row in sorted(ratios)], png)

    def rates(chosen, axis):
        series = {}
        for run in chosen:
            x = run["fields"][axis]
            if x.isdigit():
                rate = int(run["fields"]["b"]) / run["ms"]
                series.setdefault(run["method"], []).append((int(x), rate))
        return {label: series[label] for label in COLOURS if label in series}

    fp16 = select(prefixes, dtype="fp16", heads="32/32")
    panels = []
    for shared in ("1024", "2048", "4096"):
        series = rates(select(fp16, b="32", shared=shared), "own")
        if len(series) > 1:  # not ours alone
            panels.append((f"{shared} shared tokens, fp16, b = 32", series))
    plot_lines(plt, "completion", panels, "completion tokens of each sequence", png)
    series = rates(select(fp16, shared="2048", own="64"), "b")
    panel = ("2048 shared + 64 own tokens, fp16", series)
    plot_lines(plt, "batch", [panel], "batch size", png)


# --- tables ---------------------------------------------------------------------------------------


def table(head, rows):
    align = ["---"] + ["---:"] * (len(head) - 1)
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, align, *rows)]
    return "\n".join(lines)


def figure_text(value):
    """Three digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


SHOWN = re.compile(
    r"match(_splintered)?/4096|insert_new/4096|insert_below_shared/64|append/65536|speculate/65536"
    r"|decode_step/(32|256|10000)|plan_rebuild/.*|fork/128/16|evict/(1000|1000000)"
    r"|insert_evicting/1000000|join_among_siblings/10000"
)


def tree_table(report):
    """Google Benchmark's counters; those in ns and µs, and the time of the rest."""
    rows = []
    for run in report["benchmarks"]:
        name = run["name"].replace("/manual_time", "")
        name = re.sub(r"/iterations:\d+", "", name)
        if not SHOWN.fullmatch(name):
            continue
        figures = []
        for key, value in run.items():
            unit = {"ns": "ns", "us": "µs"}.get(key.rsplit("_", 1)[-1])
            if unit and isinstance(value, float):
                label = key.rsplit("_", 1)[0].replace("_", " ")
                figures.append(f"{label} {figure_text(value)} {unit}")
        if not figures:
            figures = [f"{figure_text(run['real_time'])} {run['time_unit']} per operation"]
        rows.append([f"`{name}`", "; ".join(figures)])
    return "| operation | cost |\n| --- | --- |\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)


def interleaved_table(report):
    """Ours beside the paged kernel where nothing is shared."""
    rows = []
    for run in report["benchmarks"]:
        _, dtype, heads, batch, _, own, *_ = run["name"].split("/")
        heads, batch, own = (part.split(":", 1)[1] for part in (heads, batch, own))
        figures = [f"{run['ratio_to_paged']:.3f}", f"{run['upper_95']:.3f}", run["iterations"]]
        rows.append([f"b{batch} {heads.replace(':', '/')}, 0 + {own}", dtype, *figures])
    return table(["case", "K/V", "ours / paged", "upper 95 % bound", "pairs of steps"], rows)


def decode_tables(runs, contexts):
    """Prefixes beside paged attention, and the trees."""
    prefixes = {}
    for run in select(runs, dtype="fp16", heads="32/32", cold=True, chunk=64):
        if "b" in run["fields"]:
            case = tuple(run["fields"][key] for key in ("b", "shared", "own"))
            prefixes.setdefault(case, {})[run["method"]] = run
    rows = []
    for case, found in sorted(prefixes.items(), key=lambda one: [int(x) for x in one[0] if x.isdigit()]):
        if len(found) < 3:
            continue
        b, shared, own = case
        ours = found["chunkattn"]
        row = [b, f"{shared} + {own}", f"**{ours['ms']:.2f}**", f"{ours['ratio']:.2f}"]
        for method in ("paged, shared pages", "paged, own pages"):
            row.append(f"{found[method]['ms']:.2f} ({found[method]['ms'] / ours['ms']:.1f})")
        rows.append(row)
    head = ["sequences (fp16, 32/32)", "shared + own", "chunkattn", "of the floor", "paged, shared pages", "paged, own pages"]
    tables = {"decode": table(head, rows)}

    trees = {}
    for run in runs:
        if "tree" in run["fields"]:
            trees.setdefault(run["heads"], {}).setdefault(run["fields"]["tree"], {})[run["method"]] = run
    rows = []
    for heads, found in sorted(trees.items()):
        pairs = [(t["chunkattn"], t["paged, shared pages"]) for t in found.values() if len(t) > 1]
        rates = sorted(paged["ms"] / ours["ms"] for ours, paged in pairs)
        ratios = sorted(ours["ratio"] for ours, _ in pairs)
        mean = math.exp(sum(map(math.log, rates)) / len(rates))
        rows.append([heads, len(pairs), f"{mean:.2f}", f"{rates[0]:.2f} to {rates[-1]:.2f}"])
        rows[-1].append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
    head = ["heads", "trees", "faster by, geometric mean", "least to most", "time ÷ floor"]
    tables["trees"] = table(head, rows)

    spans = {}
    for context in contexts:
        for name in ("dram_read_GB/s", "cache_read_GB/s", "fma_peak_GFLOP/s"):
            spans.setdefault(name, []).append(float(context[name]))

    def span(name):
        low, high = min(spans[name]), max(spans[name])
        return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"

    context = contexts[0]
    caches = ", ".join(
        f"L{cache['level']} {cache['size'] >> 10} KB"
        for cache in context["caches"]
        if cache["type"] != "Instruction"
    )
    tables["machine"] = table(
        ["machine", ""],
        [
            ["processor", f"AMD EPYC (Zen 5), a virtual machine with {context['num_cpus']} cores"],
            ["caches", caches],
            ["date", context["date"][:10]],
            ["read bandwidth, 2 threads", f"{span('dram_read_GB/s')} GB/s"],
            ["last-level cache, 2 threads", f"{span('cache_read_GB/s')} GB/s"],
            ["fp32 multiply-add peak, 2 threads", f"{span('fma_peak_GFLOP/s')} GFLOP/s"],
            ["K/V sets in rotation", f"{context['cold_MB']} MB"],
        ],
    )
    return tables


def write_tables(tables):
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, content in tables.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"{DOCUMENT}: no place for table {name}")
        text = pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)
    DOCUMENT.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", help="also write PNG files into this folder")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Ids and text that do not change from run to run.
    plt.rcParams.update({"svg.hashsalt": "chunkattn", "svg.fonttype": "path", "font.size": 9})
    tables = {}
    if tree := read("tree.json"):
        tables["tree"] = tree_table(tree)
    if interleaved := read("interleaved.json"):
        tables["interleaved"] = interleaved_table(interleaved)
    runs, contexts = read_decode()
    if runs:
        draw_decode(plt, runs, arguments.png)
        tables |= decode_tables(runs, contexts)
    write_tables(tables | images())


if __name__ == "__main__":
    main()
