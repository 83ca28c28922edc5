#!/usr/bin/env python3
"""Runs other projects' decode attention on this CPU beside ours, and joins the tables.

    python3 bench/peers/cpu_peers.py --decode build/bench/decode_bench --json peers.json

For each case: bench/decode first, then every peer, each library in a process of its own, K/V sets
in rotation so that each step finds its data cold. Where PyTorch cannot be imported, a virtual
environment is made (--venv) and the packages are installed there with pip; they take 6 GB.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = ["numpy", "torch", "openvino", "onnxruntime", "onnx"]
LIBRARIES = ["torch_cpu", "openvino_cpu", "onnxruntime_cpu"]
if os.environ.get("CHUNKATTN_LLAMA_LIB"):
    LIBRARIES.append("llama_cpu")  # from a build of llama.cpp, not a package


def ensure_packages(venv):
    """Starts this script again inside the virtual environment if a package is missing here."""
    if all(importlib.util.find_spec(package) for package in PACKAGES):
        return
    python = pathlib.Path(venv).expanduser() / "bin" / "python"
    if os.environ.get("CHUNKATTN_PEERS_VENV"):
        sys.exit(f"{python}: the packages are still missing; install {' '.join(PACKAGES)}")
    if not python.exists():
        print(f"installing {' '.join(PACKAGES)} into {venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    os.environ["CHUNKATTN_PEERS_VENV"] = "1"
    os.execv(python, [str(python), *sys.argv])


def run_peers(library, case, arguments):
    """The results of one library on one case, from a fresh process."""
    command = [*shlex.split(arguments.prefix), sys.executable, str(HERE / "run_one.py"), library]
    command += [json.dumps(dataclasses.asdict(case)), f"--threads={arguments.threads}"]
    command += [f"--seconds={arguments.seconds}"]
    command += ["--warm"] * arguments.warm + ["--check-only"] * arguments.check_only
    command += [f"--peers={arguments.peers}"]
    # PyTorch's own switch for huge pages; numpy asks for them by itself.
    environment = os.environ | {
        "THP_MEM_ALLOC_ENABLE": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
        "OPENVINO_LOG_LEVEL": "0",
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return [{"peer": library, "failed": f"exit status {done.returncode}"}]
    return json.loads(done.stdout.strip().splitlines()[-1])


# --- our own program ------------------------------------------------------------------------------

METHODS = {
    "ours": "chunkattn",
    "ours_bf16_queries": "chunkattn, bf16 queries",
    "ours_one_term": "chunkattn, one term",
    "paged_shared_pages": "paged, shared pages",
    "paged_unshared": "paged, own pages",
    "naive": "naive",
}


def run_decode(case, entry, arguments):
    """Adds our program's figures for the case, and the floor that it measured."""
    name = f"{case.dtype}/heads:{case.num_qo_heads}:{case.num_kv_heads}/b:{case.batch}"
    name += f"/shared:{case.shared}/own:{case.private}/{'warm' if arguments.warm else 'cold'}"
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [*shlex.split(arguments.prefix), arguments.decode]
        wanted = [key for key, method in METHODS.items()
                  if method.startswith("chunkattn") or arguments.peers in method]
        command += [f"--benchmark_filter=^({'|'.join(wanted)})/{name}(/m|$)"]
        command += [f"--benchmark_out={out.name}", "--benchmark_out_format=json"]
        environment = os.environ | {"CHUNKATTN_BENCH_THREADS": str(arguments.threads)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        text = pathlib.Path(out.name).read_text(encoding="utf-8")
    if not text.strip():
        return  # the program has no such case
    report = json.loads(text)
    for key in ("dram_read_GB/s", "cache_read_GB/s", "fma_peak_GFLOP/s", "cold_MB"):
        entry.setdefault("machine", {})[key] = float(report["context"][key])
    for run in report["benchmarks"]:
        method = METHODS[run["name"].split("/")[0]]
        row = {"peer": method, "kind": method, "ours": True, "main": method == "chunkattn"}
        row |= {"shares": run["name"].startswith(("ours", "paged_shared"))}
        row |= {"ms": run["ms"], "processor_ms": run["processor_ms"]}
        if row["main"]:
            entry["floor_ms"] = run["floor_ms"]
        entry["results"].append(row)


# --- tables ---------------------------------------------------------------------------------------


def describe_machine():
    model = "unknown CPU"
    try:
        for line in open("/proc/cpuinfo", encoding="utf-8"):
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {"cpu": model, "date": datetime.date.today().isoformat()}


def markdown(report):
    """One table per case: who, milliseconds, ratio to the floor, to our time, to our processor time."""
    lines = []
    for entry in report["cases"]:
        case = Case(**entry["case"])
        floor = entry.get("floor_ms")
        head = f"floor {floor:.2f} ms" if floor else "floor not measured"
        lines += [f"### {case.name}", "", head, ""]
        lines += ["| | ms | × floor | × ours | processor ms | × ours | max error |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        rows = sorted(entry["results"], key=lambda row: row.get("ms", float("inf")))
        ours = next((row for row in rows if row.get("main")), None)
        for row in rows:
            if "failed" in row:
                lines.append(f"| {row['peer']} | failed: {row['failed']} | | | | | |")
                continue
            if "ms" not in row:
                continue
            cells = [f"**{row['peer']}**" if row.get("main") else row["peer"], f"{row['ms']:.2f}"]
            cells += [f"{row['ms'] / floor:.2f}" if floor else ""]
            cells += [f"{row['ms'] / ours['ms']:.2f}" if ours else "", f"{row['processor_ms']:.2f}"]
            cells += [f"{row['processor_ms'] / ours['processor_ms']:.2f}" if ours else ""]
            cells += [f"{row['max_error']:.1e}" if "max_error" in row else ""]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", help="the bench/decode program; without it, peers alone")
    parser.add_argument("--json", help="write (and, where it exists, extend) this report")
    parser.add_argument("--markdown", help="write the tables here; standard output otherwise")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--peers", default="", help="peers whose name contains this")
    parser.add_argument("--dtypes", default="fp32,fp16,bf16,int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per peer and case")
    parser.add_argument("--warm", action="store_true", help="one K/V set, no rotation")
    parser.add_argument("--prefix", default="", help="command put before every measurement")
    parser.add_argument("--check-only", action="store_true", help="outputs, no times")
    parser.add_argument("--venv", default="~/.cache/chunkattn-peers")
    arguments = parser.parse_args()
    ensure_packages(arguments.venv)
    global Case, cases
    from cases import Case, cases

    report = {"machine": describe_machine(), "threads": arguments.threads, "cases": []}
    if arguments.json and os.path.exists(arguments.json):
        with open(arguments.json, encoding="utf-8") as file:
            report["cases"] = json.load(file)["cases"]
    for case in cases(arguments.dtypes.split(",")):
        if arguments.only not in case.name:
            continue
        print(case.name, file=sys.stderr, flush=True)
        entry = {"case": dataclasses.asdict(case), "cold": not arguments.warm, "results": []}
        if arguments.decode and not arguments.check_only:
            run_decode(case, entry, arguments)
        for library in arguments.libraries.split(","):
            entry["results"] += run_peers(library, case, arguments)
        for row in entry["results"]:
            value = row.get("failed") or (f"{row['ms']:.2f} ms" if "ms" in row else "ok")
            print(f"  {row['peer']:42} {value}", file=sys.stderr, flush=True)
        report["cases"] = [old for old in report["cases"] if old["case"] != entry["case"]]
        report["cases"].append(entry)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)
                file.write("\n")
    if not arguments.check_only:
        text = markdown(report)
        if arguments.markdown:
            pathlib.Path(arguments.markdown).write_text(text, encoding="utf-8")
        else:
            print(text)
    return int(any("failed" in row for entry in report["cases"] for row in entry["results"]))


if __name__ == "__main__":
    sys.exit(main())
