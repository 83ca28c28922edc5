#!/usr/bin/env python3
"""`serve run` as on processors without AVX-512, which these variables make of any.

usage: lesser_processor.py SERVE [--model FILE.gguf]

Is healthy only when it can answer, answers a request and a chat, still runs then, and ends well. A build without
kernels for them (CHUNKATTN_NATIVE) runs its own."""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request

SHAPE = {"dim": 64, "hidden_dim": 172, "num_layers": 2, "num_qo_heads": 8, "num_kv_heads": 4,
         "vocab_size": 300, "max_positions": 1024}
LIMIT = 120  # seconds


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=LIMIT))


def check(serve, options, isa, chats):
    environment = dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX2", DNNL_MAX_CPU_ISA="AVX2")
    if isa:
        environment["CHUNKATTN_CPU_ISA"] = isa
    process = subprocess.Popen([serve, "run", *options, "--port", "0", "--quiet"], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        said, url = [], ""
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving"):
                url = line.split(" at ")[1].split()[0]
            if line.startswith("stop"):
                break
        if isa and "this build has no" in said[-1]:
            return check(serve, options, "", chats)
        assert url, "it ended at once: " + "".join(said)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        assert ask(url, "/health")["status"] == "ok"
        usage = ask(url, "/v1/completions", {"prompt": "one " * 40, "max_tokens": 4})["usage"]
        assert usage["completion_tokens"] >= 1, usage
        if chats:
            reply = ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital "
                        "of France?"}], "max_tokens": 12, "temperature": 0})
            assert "Paris" in reply["choices"][0]["message"]["content"], reply
        assert ask(url, "/health")["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT) == 0, process.returncode
    finally:
        process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--model", default="", help="a GGUF file that can chat")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = os.path.join(folder, "shape.json")
        with open(shape, "w", encoding="ascii") as file:
            json.dump(SHAPE, file)
        count = 0
        for isa in "avx2", "portable":
            for options in [], ["--weights", "fp32"], ["--products", "own"]:
                check(arguments.serve, ["--random", shape, *options], isa, False)
                count += 1
            if arguments.model:
                check(arguments.serve, ["--model", arguments.model], isa, True)
                count += 1
    print(f"a lesser processor  {count} servers answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
