"""What steps have shared: counted where the engine computes, seen in the log and among vLLM's metrics.

vLLM computes in other processes than the one whose /metrics are read. Counters go through a folder of files as
prometheus_client writes them for servers of several processes: vLLM's own folder if it has one (several API servers),
else one of ours, which the process that makes its children's environment adds to its metrics.
"""
import atexit
import logging
import os
import shutil
import tempfile
import threading
import time

log = logging.getLogger("vllm.chunkattn")
FOLDER = "CHUNKATTN_VLLM_METRICS"  # the environment's name of our folder, for the processes that vLLM starts
COUNTERS = {
    "steps": "Batches that chunkattn has planned, once for each group of layers.",
    "pages_read": "K/V blocks that a layer has read: what requests share once.",
    "pages_alone": "K/V blocks that a layer would have read, had each request read its own.",
}


def folder():
    """Where processes put what they have counted; None: nowhere."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR") or os.environ.get(FOLDER)


def show():
    """Adds the counters of this process and those that it starts to vLLM's metrics."""
    if os.environ.get(FOLDER):
        return  # it was started by one that has
    made, owner = tempfile.mkdtemp(prefix="chunkattn_vllm_"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
    os.environ[FOLDER] = made
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    MultiProcessCollector(REGISTRY, path=made)


def statistics():
    """The sums over all processes that were started by this one, and itself."""
    from prometheus_client.mmap_dict import MmapedDict

    totals = dict.fromkeys(COUNTERS, 0)
    place = folder()
    for name in os.listdir(place) if place else []:
        if name.startswith("counter_chunkattn"):
            for key, value, *_ in MmapedDict.read_all_values_from_file(os.path.join(place, name)):
                for counter in COUNTERS:
                    if f'"vllm:chunkattn_{counter}_total"' in key:
                        totals[counter] += int(value)
    return totals


class Counters:
    """Those of one engine. Used by one thread."""

    def __init__(self, model, engine):
        self.totals = dict.fromkeys(COUNTERS, 0)
        self.said, self.timer = dict(self.totals), None
        self.file = None
        if place := folder():
            from prometheus_client.mmap_dict import MmapedDict, mmap_key

            # A name that prometheus_client does not give itself; it reads those that begin with "counter_".
            self.file = MmapedDict(os.path.join(place, f"counter_chunkattn{os.getpid()}e{engine}t{time.time_ns()}.db"))
            labels = ["model_name", "engine"], [model, str(engine)]
            self.keys = {name: mmap_key(f"vllm:chunkattn_{name}", f"vllm:chunkattn_{name}_total", *labels, text)
                         for name, text in COUNTERS.items()}

    def add(self, pages_read, pages_alone):
        """A batch was planned."""
        for name, count in zip(COUNTERS, (1, pages_read, pages_alone)):
            self.totals[name] += count
            if self.file is not None:
                self.file.write_value(self.keys[name], float(self.totals[name]), 0.0)
        if self.timer is None and log.isEnabledFor(logging.INFO):
            self.timer = threading.Timer(float(os.environ.get("VLLM_LOG_STATS_INTERVAL", 10)), self.say)
            self.timer.daemon = True
            self.timer.start()

    def say(self):
        """Says in the log what came since the last time."""
        self.timer = None
        now = dict(self.totals)
        steps, read, alone = (now[name] - self.said[name] for name in COUNTERS)
        self.said = now
        times = f": {alone / read:.2f} times as many" if read else ""
        log.info("chunkattn: %d steps read %d K/V blocks; without sharing %d%s", steps, read, alone, times)
