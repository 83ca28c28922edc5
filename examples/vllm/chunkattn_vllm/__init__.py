"""A plugin for stock vLLM on CPUs: its attention is chunkattn's. vLLM calls register() at its start.

CHUNKATTN_VLLM=off leaves vLLM as it is.
"""
import logging
import os

SUPPORTED = ("0.30", "0.31", "0.32")  # minor versions: what vLLM asks of backends is part of no promise between them

log = logging.getLogger("vllm.chunkattn")  # below vLLM's own, so that it is shown as that is


def register():
    """Puts the backend in the place of vLLM's CPU_ATTN, or says why not: vLLM then runs without it."""
    if os.environ.get("CHUNKATTN_VLLM") == "off":
        return
    try:
        _register()
    except Exception as error:  # vLLM does not catch them
        log.warning("chunkattn is not used: %s", error)


def _register():
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if ".".join(vllm.__version__.split(".")[:2]) not in SUPPORTED:
        raise RuntimeError(f"vLLM {vllm.__version__}: expected one of {', '.join(f'{v}.x' for v in SUPPORTED)}")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import library, sharing

    library.load()
    sharing.show()
    # CPU_ATTN's place, because vLLM asks for no other backend on CPUs.
    register_backend(AttentionBackendEnum.CPU_ATTN, "chunkattn_vllm.backend.Backend")
    log.info("chunkattn is the attention of this process (CHUNKATTN_VLLM=off: vLLM's own)")


def statistics():
    """What steps have shared so far: {"steps", "pages_read", "pages_alone"}, of this process and those that vLLM started."""
    from . import sharing

    return sharing.statistics()
