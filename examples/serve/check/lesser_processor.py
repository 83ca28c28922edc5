#!/usr/bin/env python3
"""The programs as on processors without AVX-512, which these variables make of any.

usage: lesser_processor.py SERVE [--plain SERVE] [--demo SHARED_PROMPT] [--model FILE.gguf]

`serve run` is healthy only when it can answer, answers a request and a chat, still runs then, and ends well. A build
without kernels for them (CHUNKATTN_NATIVE) runs its own; --plain and --demo are builds with all kernels."""
import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request

from gguf_files import write_tiny_chat_model

SHAPE = {"dim": 64, "hidden_dim": 172, "num_layers": 2, "num_qo_heads": 8, "num_kv_heads": 4,
         "vocab_size": 300, "max_positions": 1024}
LIMIT = 120  # seconds


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=LIMIT))


def environment(isa):
    lesser = dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX2", DNNL_MAX_CPU_ISA="AVX2")
    lesser.pop("CHUNKATTN_CPU_ISA", None)
    return dict(lesser, CHUNKATTN_CPU_ISA=isa) if isa else lesser


def check(serve, options, isa, chat=None, has_all=False):
    """`chat`: what the reply to a question must contain, where the model chats."""
    process = subprocess.Popen([serve, "run", *options, "--port", "0", "--quiet"], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env=environment(isa))
    try:
        said, url = [], ""
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving"):
                url = line.split(" at ")[1].split()[0]
            if line.startswith("stop"):
                break
        if not has_all and isa and "this build has no" in said[-1]:
            return check(serve, options, "", chat)
        assert url, "it ended at once: " + "".join(said)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        assert ask(url, "/health")["status"] == "ok"
        reply = ask(url, "/v1/completions", {"prompt": "one " * 40, "max_tokens": 4})
        # Random weights may draw the token that ends a text.
        assert reply["usage"]["completion_tokens"] >= 1 or reply["choices"][0]["finish_reason"] == "stop", reply
        if chat is not None:
            reply = ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital "
                        "of France?"}], "max_tokens": 12, "temperature": 0})
            assert reply["usage"]["completion_tokens"] >= 1, reply
            assert chat in reply["choices"][0]["message"]["content"], reply
        assert ask(url, "/health")["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT) == 0, process.returncode
    finally:
        process.kill()


def run(isa, *command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", timeout=LIMIT,
                          env=environment(isa))
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve")
    parser.add_argument("--plain", default="", help="a build of it with all kernels")
    parser.add_argument("--demo", default="", help="such a build of examples/shared_prompt")
    parser.add_argument("--model", default="", help="a GGUF file that can chat")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape, tiny = os.path.join(folder, "shape.json"), os.path.join(folder, "tiny.gguf")
        with open(shape, "w", encoding="ascii") as file:
            json.dump(SHAPE, file)
        write_tiny_chat_model(tiny, 1)
        servers = texts = demos = 0
        has_avx2 = platform.machine() in ("x86_64", "AMD64")
        for isa in ("avx2", "portable") if has_avx2 else ("portable",):
            for options in [], ["--weights", "fp32"], ["--products", "own"]:
                check(arguments.serve, ["--random", shape, *options], isa)
                servers += 1
            if arguments.model:
                check(arguments.serve, ["--model", arguments.model], isa, "Paris")
                servers += 1
            if arguments.plain:
                model = ["--model", tiny, "--kv", "fp32"]
                check(arguments.plain, model, isa, "", has_all=True)
                servers += 1
                said = run(isa, arguments.plain, "generate", *model, "--prompt", "one", "--max-tokens", "5")
                assert "5 tokens generated" in said, said
                texts += 1
            if arguments.demo:
                said = run(isa, arguments.demo, "--requests", "4", "--system-tokens", "300", "--rounds", "1",
                           "--no-tree")
                assert f", {isa}\n" in said, said
                demos += 1
    print(f"a lesser processor  {servers} servers answered, {texts} texts, {demos} demos")
    return 0


if __name__ == "__main__":
    sys.exit(main())
