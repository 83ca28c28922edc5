#!/usr/bin/env python3
"""llama-server, the same with our plugin (examples/ggml), and `serve`, as clients see them.

    python3 bench/serving/servers.py --bin build/llama/llama.cpp/bin \\
        --plugin build/llama/plugin/libggml-chunkattn.so --serve build/serve/examples/serve/serve \\
        --model model.gguf --out report.json

--batch clients send a completion each at the same time: --shared tokens that all have in common, --own tokens of
their own, --tokens to be generated, greedily, as a stream. In a round each server gets prompts that it has never
seen (cold), then others after the same shared tokens (warm). Servers take turns, --rounds times; the median counts.

ttft: the mean over clients of the time to the first token. total: to the last token of the last client. cpu: processor
time of the server, threads that wait by spinning included. The file is written after each round, and rounds that are in
it already are not run again.
"""

import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from experiment import numbers, processor

SERVERS = ("stock", "plugin", "serve")


class Server:
    """One of SERVERS as a child, ready for requests."""

    def __init__(self, name, options, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        largest = max(numbers(options.shared)) + options.own + options.tokens + 64
        cells = max(numbers(options.batch)) * largest
        if name == "serve":
            kind = {"f16": "fp16"}.get(options.kv, options.kv)
            command = [options.serve, "run", "--model", options.model, "--port", str(self.port), "--quiet", "--threads",
                       str(options.threads), "--kv", kind, "--weights", options.weights, "--chunks",
                       str(cells // 64 + 64), "--timeout", "600"]
        else:
            command = [os.path.join(options.bin, "llama-server"), "-m", options.model, "--port", str(self.port),
                       "-t", str(options.threads), "-c", str(cells), "-np", str(max(numbers(options.batch))), "-kvu",
                       "-fa", "on", "-ctk", options.kv, "-ctv", options.kv, "-b", "2048", "-ub", "512",
                       "--cache-ram", "0", "--no-webui"]
        env = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
        if name == "plugin":
            env["GGML_BACKEND_PATH"] = os.path.abspath(options.plugin)
        self.name, self.command = name, command
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"FAILED: {name} ended: {log.name}")
            try:
                if self.request("GET", "/health").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        self.end()
        sys.exit(f"FAILED: {name} did not start: {log.name}")

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, prompt, options):
        """Seconds to the first event with a choice and to the end, and the number of tokens."""
        body = {"prompt": prompt, "max_tokens": options.tokens, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True},
                "logit_bias": {str(token): -100 for token in numbers(options.never)}}
        begin, first, tokens = time.perf_counter(), None, 0
        response = self.request("POST", "/v1/completions", json.dumps(body))
        if response.status != 200:
            raise RuntimeError(f"{self.name} answered {response.status}: {response.read()[:500]}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and first is None:
                first = time.perf_counter() - begin
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first, time.perf_counter() - begin, tokens

    def end(self):
        self.process.terminate()
        self.process.wait()


def prompts_of(cell, series, variant, options):
    """`series` chooses the shared tokens, `variant` those of each prompt's own."""
    def tokens(count, *seed):
        return random.Random(repr(seed)).choices(range(200, options.vocabulary - 100), k=count)
    common = tokens(cell["shared"], series)
    return [common + tokens(options.own, series, variant, b) for b in range(cell["batch"])]


def run(server, cell, prompts, options):
    before = server.cpu_seconds()
    with concurrent.futures.ThreadPoolExecutor(cell["batch"]) as pool:
        begin = time.perf_counter()
        replies = list(pool.map(lambda prompt: server.complete(prompt, options), prompts))
        total = time.perf_counter() - begin
    wrong = [tokens for _, _, tokens in replies if tokens != options.tokens]
    if wrong:
        sys.exit(f"FAILED: {server.name} generated {wrong} tokens, expected {options.tokens} (see --never)")
    return {"ttft": statistics.mean(first for first, _, _ in replies), "total": total,
            "cpu": server.cpu_seconds() - before}


def table_of(report):
    columns = [name if at > 0 else what.format(name)
               for what in ("TTFT {}, s", "tokens/s {}", "CPU {}, ms/token") for at, name in enumerate(SERVERS)]
    lines = ["| shared | clients | prompts | " + " | ".join(columns) + " |",
             "| ---: | ---: | --- |" + " ---: |" * len(columns)]
    for entry in report["cells"]:
        cell, tokens = entry["cell"], entry["cell"]["batch"] * report["tokens"]
        for kind in ("cold", "warm"):
            row = {"ttft": [], "total": [], "cpu": []}
            for name in SERVERS:
                runs = [each for each in entry["runs"] if each["server"] == name and each["prompts"] == kind]
                for what, values in row.items():
                    values.append(statistics.median(run[what] for run in runs) if runs else float("nan"))
            said = [f"{value:.2f}" for value in row["ttft"]]
            said += [f"{tokens / value:.1f}" for value in row["total"]]
            said += [f"{1e3 * value / tokens:.1f}" for value in row["cpu"]]
            lines.append(f"| {cell['shared']} | {cell['batch']} | {kind} | " + " | ".join(said) + " |")
    return "\n".join(lines)


def measure(options, report, save):
    servers = []
    with tempfile.NamedTemporaryFile("w", prefix="servers", suffix=".log", delete=False) as log:
        try:
            for name in options.servers.split(","):
                servers.append(Server(name, options, log))
                print(f"{name}: {' '.join(servers[-1].command)}", file=sys.stderr)
                server = servers[-1]
                server.complete(prompts_of({"shared": 0, "batch": 1}, -1, 0, options)[0], options)  # warms up
            series = 0
            for number in range(options.rounds):
                for entry in report["cells"]:
                    series += 1
                    cell = entry["cell"]
                    for server in servers[number % len(servers):] + servers[:number % len(servers)]:
                        if sum(run["server"] == server.name for run in entry["runs"]) > 2 * number:
                            continue
                        for variant, kind in enumerate(("cold", "warm")):
                            result = run(server, cell, prompts_of(cell, series, variant, options), options)
                            entry["runs"].append({"server": server.name, "prompts": kind, **result})
                            save()
        finally:
            for server in servers:
                server.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--plugin", required=True, help="libggml-chunkattn.so")
    parser.add_argument("--serve", required=True, help="the program")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--shared", default="0,1024,4096")
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt's own")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each")
    parser.add_argument("--kv", default="f16", help="type of K/V: f16, bf16")
    parser.add_argument("--weights", default="auto", help="of serve; llama-server has those of the file")
    parser.add_argument("--vocabulary", type=int, default=49152, help="tokens are below this number")
    parser.add_argument("--never", default="0,2", help="tokens that would end a text")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    report = {"date": datetime.date.today().isoformat(), "processor": processor(), "threads": options.threads,
              "model": pathlib.Path(options.model).name, "kv": options.kv, "weights of serve": options.weights,
              "own": options.own, "tokens": options.tokens, "cells": []}
    if options.out.exists():
        report = json.loads(options.out.read_text(encoding="utf-8"))

    def save():
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    for shared in numbers(options.shared):
        for batch in numbers(options.batch):
            cell = {"shared": shared, "batch": batch}
            if all(entry["cell"] != cell for entry in report["cells"]):
                report["cells"].append({"cell": cell, "runs": []})
    measure(options, report, save)
    print(table_of(report))


if __name__ == "__main__":
    main()
