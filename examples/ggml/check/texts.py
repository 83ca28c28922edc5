#!/usr/bin/env python3
"""Greedy texts of llama.cpp's programs with and without the plugin, which must be the same.

usage: texts.py BIN PLUGIN MODEL [--types f32,f16,bf16] [--tokens N]

llama-completion with prompts of their own; llama-server with requests at once that share a prompt, by unified K/V.
MODEL is to have F32 weights: products with quantised ones round their inputs to 8 bits, so that a difference in the
last bit becomes one that changes texts (llama.cpp's with -fa on and -fa off differ then, too). Types are those of K/V
memory: llama.cpp casts F32 to F16 before attention. ggml rounds queries, and for F16 sums, to K/V's 16 bits, which the
plugin does not, so a text may differ with any type: f32's have all been equal, and are failures if they are not; of the
others differences are shown."""
import argparse
import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

PROMPTS = [
    "Once upon a time there was a lighthouse keeper who",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "Question: Why is the sky blue?\nAnswer:",
]
SHARED = ("You are the clerk of a small library. The library is open from nine to five, but on Sundays. "
          "Books are lent for four weeks, films for one. Who is late pays ten cents a day. ") * 8


def completion(options, kind, prompt, plugin):
    command = [os.path.join(options.bin, "llama-completion"), "-m", options.model, "-p", prompt, "-n", str(options.tokens),
               "--temp", "0", "-fa", "on", "-ctk", kind, "-ctv", kind, "-no-cnv", "-c", "2048", "--no-warmup",
               "--simple-io", "--no-display-prompt"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(options, plugin), stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout, plugin_calls(done.stderr)


def environment(options, plugin):
    env = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    if plugin:
        env.update(GGML_BACKEND_PATH=options.plugin, CHUNKATTN_GGML_STATISTICS="1")
    return env


def plugin_calls(stderr):
    lines = [line for line in stderr.splitlines() if "chunkattn:" in line and " calls" in line]
    return int(lines[-1].split("chunkattn:")[1].split(" calls")[0]) if lines else 0


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def served(options, kind, plugin):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.path.join(options.bin, "llama-server"), "-m", options.model, "--port", str(port), "-np", "4", "-kvu",
               "-fa", "on", "-ctk", kind, "-ctv", kind, "-c", "8192", "--no-webui"]
    log = open(os.path.join(options.folder, f"server.{kind}.{plugin}.log"), "w+", encoding="utf-8")
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment(options, plugin))
    try:
        for _ in range(600):
            if server.poll() is not None:
                sys.exit(f"FAILED: llama-server ended: {log.name}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        bodies = [{"prompt": SHARED + prompt, "n_predict": options.tokens, "temperature": 0, "cache_prompt": True}
                  for prompt in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            replies = [reply["content"] for reply in pool.map(lambda body: post(port, "/completion", body), bodies)]
    finally:
        server.terminate()
        server.wait()
        log.close()
    with open(log.name, encoding="utf-8") as written:
        if plugin and plugin_calls(written.read()) == 0:
            sys.exit(f"FAILED: the plugin computed nothing: {log.name}")
    return replies


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bin")
    parser.add_argument("plugin")
    parser.add_argument("model")
    parser.add_argument("--types", default="f32,bf16,f16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", default=".", help="where logs of servers go")
    options = parser.parse_args()
    options.plugin = os.path.abspath(options.plugin)
    failed = False
    for kind in options.types.split(","):
        pairs = []
        for prompt in PROMPTS:
            stock, _ = completion(options, kind, prompt, False)
            ours, calls = completion(options, kind, prompt, True)
            if calls == 0:
                sys.exit("FAILED: the plugin computed nothing")
            pairs.append(("llama-completion", stock, ours))
        pairs += [("llama-server", *both) for both in zip(served(options, kind, False), served(options, kind, True))]
        for program in ("llama-completion", "llama-server"):
            texts = [(stock, ours) for name, stock, ours in pairs if name == program]
            same = sum(stock == ours for stock, ours in texts)
            print(f"{program}, K/V {kind}: {same} of {len(texts)} texts of {options.tokens} tokens are the same", flush=True)
            failed = failed or (same < len(texts) and kind == "f32")
            for stock, ours in texts:
                if stock != ours:
                    at = len(os.path.commonprefix([stock, ours]))
                    print(f"  equal for {at} characters, then {stock[at:at + 40]!r} without and {ours[at:at + 40]!r} with")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
