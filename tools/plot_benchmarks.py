#!/usr/bin/env python3
"""Draws docs/benchmarks/*.svg and rewrites the tables of docs/benchmarks.md, from committed JSON.

    python3 tools/plot_benchmarks.py            # needs matplotlib
    python3 tools/plot_benchmarks.py --png DIR  # the plots as PNG there too, to look at

What measured the JSON files stands above each table in docs/benchmarks.md. A table's place is
between the lines `<!-- table NAME -->` and `<!-- end -->`.
"""

import argparse
import json
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
    "PyTorch shared prefix": "#009e73",
    "PyTorch, own copies": "#56b4e9",
    "OpenVINO, shared pages": "#cc79a7",
    "ONNX Runtime": "#555555",
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


def peer_label(row):
    """The plots show each library's best way of its kind."""
    name = row["peer"]
    if row.get("ours"):
        return row["kind"]
    if name.startswith("PyTorch"):
        return "PyTorch shared prefix" if row["shares"] else "PyTorch, own copies"
    if name.startswith("OpenVINO"):
        return "OpenVINO, shared pages" if row["shares"] else None
    return "ONNX Runtime"


def best_by_label(entry):
    best = {}
    for row in entry["results"]:
        label = peer_label(row)
        if label and "ms" in row and row["ms"] < best.get(label, {"ms": float("inf")})["ms"]:
            best[label] = row
    return best


# --- plots ----------------------------------------------------------------------------------------


def save(figure, name, png):
    figure.savefig(DATA / f"{name}.svg", metadata={"Date": None})
    if png:
        figure.savefig(pathlib.Path(png) / f"{name}.png", dpi=110)
    print(f"docs/benchmarks/{name}.svg")


PLOTS = {
    "shared_length": "Token rate against the length of the shared prefix",
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


def plot_shared_length(plt, report, png):
    """Token rate against the length of the shared prefix: the paper's Table 3 as bars."""
    panels = [(heads, dtype) for heads in (32, 8) for dtype in ("fp32", "bf16")]
    figure, grid = plt.subplots(2, 2, figsize=(10.5, 7.6))
    for axes, (heads, dtype) in zip(grid.flat, panels):
        entries = [
            entry
            for entry in report["cases"]
            if entry["case"]["num_kv_heads"] == heads and entry["case"]["dtype"] == dtype
        ]
        entries.sort(key=lambda entry: entry["case"]["shared"])
        best = [best_by_label(entry) for entry in entries]
        labels = [label for label in COLOURS if any(label in one for one in best)]
        for i, label in enumerate(labels):
            rates = [
                entry["case"]["batch"] / one[label]["ms"] if label in one else 0
                for entry, one in zip(entries, best)
            ]
            width = 0.85 / len(labels)
            places = [n + (i + 0.5) * width - 0.425 for n in range(len(entries))]
            axes.bar(places, rates, width, label=label, color=COLOURS[label])
        names = []
        for entry in entries:
            shared, private = entry["case"]["shared"], entry["case"]["private"]
            names.append(f"{shared} + {private}" if shared else f"none\n({private} own)")
        axes.set_xticks(range(len(entries)), names)
        title = f"{dtype}, 32 query heads, {heads} KV heads"
        style(axes, title, "shared + own tokens", "query tokens per ms")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure_legend(figure, grid.flat, 4)
    save(figure, "shared_length", png)


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


def peers_tables(report):
    """For each geometry and type: rows are peers, columns the cases; ms and the ratio to ours."""
    parts = []
    groups = {}
    for entry in report["cases"]:
        case = entry["case"]
        groups.setdefault((case["num_kv_heads"], case["dtype"]), []).append(entry)
    for (heads, dtype), entries in groups.items():
        entries.sort(key=lambda entry: (entry["case"]["shared"] == 0, entry["case"]["shared"]))
        head = [f"32/{heads} heads, {dtype}: ms (× ours)"]
        head += [f"{entry['case']['shared']} + {entry['case']['private']}" for entry in entries]
        names = list(dict.fromkeys(row["peer"] for entry in entries for row in entry["results"]))
        rows = []
        floors = [entry.get("floor_ms") for entry in entries]
        if all(floors):
            rows.append(["*floor*", *(f"*{floor:.2f}*" for floor in floors)])
        for name in names:
            cells = []
            for entry in entries:
                found = {row["peer"]: row for row in entry["results"]}
                ours = next((r["ms"] for r in entry["results"] if r.get("main")), None)
                row = found.get(name, {})
                if "ms" not in row:
                    cells.append("failed" if "failed" in row else "")
                elif row.get("main") or not ours:
                    cells.append(f"**{row['ms']:.2f}**")
                else:
                    cells.append(f"{row['ms']:.2f} ({row['ms'] / ours:.1f})")
            rows.append([f"**{name}**" if name == "chunkattn" else name, *cells])
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def figure_text(value):
    """Three digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tree_table(report):
    """Google Benchmark's counters; those in ns and µs, and the time of the rest."""
    rows = []
    for run in report["benchmarks"]:
        name = run["name"].replace("/manual_time", "")
        name = re.sub(r"/iterations:\d+", "", name)
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
    """Prefix cases by geometry, and the trees."""
    rows = []
    prefixes = [run for run in runs if "b" in run["fields"]]
    for run in prefixes:
        fields = run["fields"]
        case = f"b{fields['b']} {run['heads']}, {fields['shared']} + {fields['own']}"
        case += f", chunk {run['chunk']}" if run["chunk"] != 64 else ""
        method = f"**{run['method']}**" if run["method"] == "chunkattn" else run["method"]
        state = "cold" if run["cold"] else "warm"
        figures = [f"{run['ms']:.2f}", f"{run['floor_ms']:.2f}", f"{run['ratio']:.2f}"]
        figures += [f"{run['GFLOP/s']:.0f}", f"{run['GB/s']:.1f}"]
        rows.append([case, run["dtype"], state, method, *figures])
    order = list(dict.fromkeys(METHODS.values()))
    def key(row):
        batch, heads, shared, _, own = row[0].replace(",", "").split()[:5]
        figures = (int(batch[1:]), -int(heads.split("/")[1]), shared == "0", int(shared))
        own = int(own) if own.isdigit() else 10**6
        return (*figures, own, row[0], TYPES.index(row[1]), row[2], order.index(row[3].strip("*")))

    rows.sort(key=key)
    head = ["case", "K/V", "", "kernel", "ms", "floor", "ratio", "GFLOP/s", "GB/s"]
    tables = {"decode": table(head, rows)}

    trees = {}
    for run in runs:
        if "tree" in run["fields"]:
            trees.setdefault((int(run["fields"]["tree"]), run["heads"]), {})[run["method"]] = run
    if trees:
        rows = []
        for (index, heads), found in sorted(trees.items(), key=lambda one: (one[0][0], one[0][1])):
            ours, paged = found.get("chunkattn"), found.get("paged, shared pages")
            if ours and paged:
                speedup = f"{paged['ms'] / ours['ms']:.2f}"
                rows.append(
                    [index, heads, f"{ours['ms']:.2f}", f"{ours['ratio']:.2f}"]
                    + [f"{paged['ms']:.2f}", speedup]
                )
        head = ["tree", "heads", "ours, ms", "ratio", "paged, shared pages, ms", "speed-up"]
        tables["trees"] = table(head, rows)

    spans = {}
    for context in contexts:
        for name in ("dram_read_GB/s", "cache_read_GB/s", "fma_peak_GFLOP/s"):
            spans.setdefault(name, []).append(float(context[name]))

    def span(name):
        low, high = min(spans[name]), max(spans[name])
        return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"

    context = contexts[0]
    cpu = read("peers.json")
    model = cpu["machine"]["cpu"] if cpu else "see the JSON"
    caches = ", ".join(
        f"L{cache['level']} {cache['size'] >> 10} KB"
        for cache in context["caches"]
        if cache["type"] != "Instruction"
    )
    tables["machine"] = table(
        ["machine", ""],
        [
            ["processor", f"{model}, a virtual machine with {context['num_cpus']} cores"],
            ["caches", caches],
            ["date", context["date"][:10]],
            ["read bandwidth, 2 threads", f"{span('dram_read_GB/s')} GB/s"],
            ["last-level cache, 2 threads", f"{span('cache_read_GB/s')} GB/s"],
            ["fp32 multiply-add peak, 2 threads", f"{span('fma_peak_GFLOP/s')} GFLOP/s"],
            ["K/V sets in rotation", f"{context['cold_MB']} MB"],
        ],
    )
    return tables


def bytes_table():
    """The paper's memory operations (elements) and ours, as MB in fp16; b=32, h=32, d=128, c=64."""
    b, h, d, c = 32, 32, 128, 64
    rows = []
    for shared, own in ((0, 1024), (0, 2048), (1024, 64), (2048, 64), (4096, 64)):
        n = shared + own
        r = shared / n
        naive = b * h * d * (2 + 2 * n)
        paper = b * h * d * (2 * n * r * (1 / b + 1 / c) + 2 + 2 * n * (1 - r))
        ours = [2 * kv * d * (shared + b * own) + 2 * b * h * d for kv in (32, 8)]
        figures = [f"{2 * elements / 1e6:.1f}" for elements in (naive, paper, *ours)]
        rows.append([f"{shared} + {own}", *figures])
    head = ["shared + own tokens: MB, fp16", "no sharing (Eqn 4)", "paper (Eqn 3)"]
    return table([*head, "ours, 32/32 heads", "ours, 32/8 heads"], rows)


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
    tables = {"bytes": bytes_table()}
    if peers := read("peers.json"):
        if len(peers["cases"]) >= 16:  # all panels, or no plot
            plot_shared_length(plt, peers, arguments.png)
        tables["peers"] = peers_tables(peers)
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
