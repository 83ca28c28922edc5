"""One fault: fault.py NAME MODEL. Exit 0: vLLM is left as it is or, for `forward` and `killed`, ends with the error."""
import os
import signal
import sys
import threading
from unittest import mock

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if sys.argv[1:2] == ["killed"] else "0",
               "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import psutil
import vllm
from chunkattn_vllm import library, register
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def forward(model):
    """A step whose page tables are wrong."""
    build = library.Plan.build

    def wrong(plan, block_table, seq_lens, query_start_loc, num_sequences):
        return build(plan, block_table, seq_lens * 0 - 7, query_start_loc, num_sequences)

    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=128)
    library.Plan.build = wrong
    try:
        llm.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)
    except library.Error as error:
        print(error)
        return 0
    return "nothing was raised"


def killed(model):
    """The engine's process ends while it computes: what generate() makes of it within 20 s."""
    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=4096)
    engine = max(psutil.Process().children(), key=lambda child: child.memory_info().rss)
    ended = ["generate() does not return"]

    def generate():
        try:
            llm.generate(["Hello"] * 8, SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
            ended[0] = "generate() returned"
        except Exception as error:
            ended[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    thread.join(2)
    if not thread.is_alive():
        return f"it ended before it was killed: {ended[0]}"
    engine.send_signal(signal.SIGKILL)
    thread.join(20)
    print(f"killed: {ended[0]}", flush=True)
    sys.stderr.flush()
    os._exit(0)  # stock vLLM 0.32 waits for ever


def unregistered(change):
    """What keeps the plugin from being used."""
    path = AttentionBackendEnum.CPU_ATTN.get_path()
    if "chunkattn" in path:
        return "the plugin is in use before it is called"
    with change:
        register()
    return AttentionBackendEnum.CPU_ATTN.get_path() != path


def main(fault, model):
    if fault in ("forward", "killed"):
        return {"forward": forward, "killed": killed}[fault](model)
    return unregistered({"version": mock.patch.object(vllm, "__version__", "0.99.1"),
                         "library": mock.patch.object(library, "__file__", "/none/library.py"),
                         "c_version": mock.patch.object(library, "VERSION", -1)}[fault])


if __name__ == "__main__":  # vLLM may start processes that import this
    sys.exit(main(*sys.argv[1:]))
