"""What transformers calls: the attention function and the mask function registered with it.

Within `running(model, what)` its configurations name an attention implementation that was registered by
`AttentionInterface.register()`; outside they are as before. So it is with forward() of modules that have a state
(states.py). Nothing else of a model is touched.
"""

import contextlib
import threading

import torch
from transformers import AttentionInterface, AttentionMaskInterface

STEP, PROBE = "chunkattn", "chunkattn_probe"
_thread = threading.local()
_lock = threading.RLock()  # several generators may have one model, whose configurations say what runs


def current_run():
    """What this thread computes."""
    run = getattr(_thread, "run", None)
    if run is None:
        raise RuntimeError(f"attention '{STEP}' was called outside of a Generator: a model that one is using in a "
                           "step cannot be called by another thread")  # fmt: skip
    return run


def _attend(module, query, key, value, attention_mask=None, **arguments):
    return current_run().attend(module, query, key, value, attention_mask, arguments), None


def _mask(*args, **arguments):
    return _thread.run.mask(*args, **arguments)


# For the former no mask function: transformers makes no masks then. The latter looks at them.
AttentionInterface.register(STEP, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _mask)


def configs_of(model):
    """The distinct configurations of a model and its parts."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


@contextlib.contextmanager
def running(configs, implementation, run=None):
    """Lets models with these configurations call `run` (STEP, PROBE) or what else is named.

    What torch.compile() has made of parts of them runs as Python: each step has another shape, and a compiler
    that traces what it calls would take the numbers of one run for constants.
    """
    with _lock, torch.compiler.set_stance("force_eager"):
        before = [config._attn_implementation for config in configs]
        outer = getattr(_thread, "run", None)
        _thread.run = run
        try:
            for config in configs:
                config._attn_implementation = implementation
            yield
        finally:
            for config, name in zip(configs, before):
                config._attn_implementation = name
            _thread.run = outer
