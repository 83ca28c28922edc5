"""Where `./dev mutate` plants faults, which tests try them, and what is left out, with the reason."""
import os

from explained import EXPLAINED  # noqa: F401



def has_amx():
    """Whether the processor has a matrix unit."""
    try:
        with open("/proc/cpuinfo") as file:
            return "amx_tile" in file.read()
    except OSError:
        return False


ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
INCLUDE = "include"  # copied and instrumented
WATCHED = ["tests"]  # --resume starts again when anything here has changed
LEAST_RATE = 0.95  # of those that are not explained

# The public headers of the layers below chunkattn/detail.
PUBLIC = {
    "tree": ["chunkattn/allocator.hpp", "chunkattn/tree_options.hpp", "chunkattn/prefix_tree.hpp",
             "chunkattn/sequence.hpp", "chunkattn/step.hpp"],
    "plan": ["chunkattn/plan_view.hpp", "chunkattn/attention_plan.hpp"],
    "kv": ["chunkattn/kv_view.hpp", "chunkattn/kv_cache.hpp"],
    "attention": ["chunkattn/attention_options.hpp", "chunkattn/variants.hpp", "chunkattn/merge_state.hpp"],
    "cpu": ["chunkattn/chunk_attention.hpp"],
}
# Globs below INCLUDE.
HEADERS = [
    "chunkattn/detail/tree/*.hpp",
    "chunkattn/detail/plan/*.hpp",
    "chunkattn/detail/kv/*.hpp",
    "chunkattn/detail/attention/*.hpp",
    "chunkattn/detail/cpu/*.hpp",
    "chunkattn/detail/cpu/isa/*.hpp",
    *PUBLIC["tree"], *PUBLIC["plan"], *PUBLIC["kv"], *PUBLIC["attention"], *PUBLIC["cpu"],
    "chunkattn/cache/*.hpp",
    "chunkattn/cache/detail/*.hpp",
    "chunkattn/debug/reference.hpp",
    "chunkattn/debug/tree.hpp",
    "chunkattn/debug/detail/node_text.hpp",
    "chunkattn/events/*.hpp",
    "chunkattn/events/detail/*.hpp",
    "chunkattn/interop/*.hpp",
    "chunkattn/tiers/*.hpp",
    "chunkattn/tiers/detail/*.hpp",
    "chunkattn/transfer/*.hpp",
    "chunkattn/transfer/detail/*.hpp",
    "chunkattn/executor.hpp",
]

# ---- tests ------------------------------------------------------------------------------------

TESTS = ["tests/*/*_test.cpp"]
LEFT_OUT_TESTS = {
    "cli_examples_test": "runs example programs that were built elsewhere",
    "cuda_*": "tests of the CUDA backend, whose headers are not mutated",
    "ptx_*": "tests of the machine that runs PTX, which no header of the library is part of",
}
# Which programs are tried first for which header, as globs; all others that reach a fault follow.
FIRST = [
    ("chunkattn/executor.hpp", ["executor_test", "attention_threads_test"]),
    ("chunkattn/detail/cpu/task_queue.hpp", ["cpu_schedule_test", "attention_threads_test"]),
    ("chunkattn/detail/cpu/schedule.hpp", ["cpu_schedule_test", "cpu_cut_test", "attention_threads_test"]),
    ("chunkattn/detail/cpu/checks.hpp", ["cpu_checks_test", "attention_errors_test"]),
    ("chunkattn/detail/cpu/walk.hpp", ["cpu_walk_test"]),
    ("chunkattn/detail/cpu/isa/write.hpp", ["cpu_write_test", "kv_cache_test"]),
    ("chunkattn/detail/cpu/isa/partial_results.hpp", ["cpu_lock_test", "cpu_cut_test", "attention_threads_test"]),
    ("chunkattn/detail/support/spin_lock.hpp", ["cpu_lock_test"]),
    ("chunkattn/detail/cpu/isa/evaluate.hpp", ["attention_variants_test"]),
    ("chunkattn/detail/cpu/isa/dot*.hpp", ["dots_test", "pairs_test", "dots_shapes_test", "pairs_shapes_test"]),
    ("chunkattn/detail/cpu/isa/byte_unit.hpp", ["dots_test", "dots_shapes_test"]),
    ("chunkattn/detail/cpu/isa/int*.hpp", ["dots_test", "dots_shapes_test"]),
    ("chunkattn/detail/cpu/isa/pair_unit.hpp", ["pairs_test", "pairs_shapes_test"]),
    ("chunkattn/detail/cpu/isa/line_tile.hpp", ["rare_states_test", "pairs_test", "dots_test"]),
    ("chunkattn/detail/cpu/isa/rules.hpp", ["variant_seams_test", "attention_variants_test"]),
    ("chunkattn/detail/cpu/*", ["attention_errors_test", "attention_invariant_test", "attention_oracle_test", "attention_alone_test"]),
    ("chunkattn/detail/attention/state.hpp", ["softmax_state_test"]),
    ("chunkattn/merge_state.hpp", ["merge_state_test"]),
    ("chunkattn/detail/attention/lanes.hpp", ["attention_variants_test"]),
    ("chunkattn/variants.hpp", ["variant_seams_test", "attention_variants_test"]),
    ("chunkattn/interop/block_table.hpp", ["block_table_test"]),
    ("chunkattn/interop/*", ["paged_plan_test", "paged_attention_test"]),
    ("chunkattn/detail/kv/quantized.hpp", ["quantized_test"]),
    ("chunkattn/detail/kv/*", ["kv_cache_test"]),
    ("chunkattn/transfer/*", ["kv_transfer_test", "swap_test", "companion_test"]),
    ("chunkattn/tiers/*", ["tiers_test", "tier_directory_test", "tier_files_test", "tier_observer_test", "tier_companions_test"]),
    ("chunkattn/events/*", ["mirror_test", "tree_events_test"]),
    ("chunkattn/cache/admission.hpp", ["rank_test"]),
    ("chunkattn/cache/annotations.hpp", ["annotations_test"]),
    ("chunkattn/cache/detail/slot_values.hpp", ["annotations_test"]),
    ("chunkattn/cache/checkpoints.hpp", ["checkpoint_test"]),
    ("chunkattn/cache/detail/*checkpoint*", ["checkpoint_test"]),
    ("chunkattn/cache/*", ["learning_test", "tenant_test"]),
    ("chunkattn/detail/tree/ret*", ["pin_test", "tree_retention_test", "default_policy_test"]),
    ("chunkattn/detail/plan/*", ["plan_figure2_test", "plan_steps_test"]),
    ("chunkattn/detail/tree/*", ["tree_handles_test", "tree_retention_test", "tree_chunks_test", "tree_counts_test",
                               "tree_failure_test"]),
]
# The public headers of a layer are tried as the layer is, where they have no line of their own.
FIRST += [(header, tests) for layer, headers in PUBLIC.items() for pattern, tests in FIRST
          if pattern == f"chunkattn/detail/{layer}/*" for header in headers]

MAIN = "tests/main.cpp"
FOLDERS = ["tests", "."]
# -O1 compiles in half of the time of -O2 and runs fast enough. The assertions of the standard library
# are those that tests/CMakeLists.txt turns on; what leaves an array is noticed as the sanitizers' runs do.
FLAGS = ["-std=c++20", "-O1", "-D_GLIBCXX_ASSERTIONS", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error", "-w", "-fmax-errors=0", "-Werror=vla", "-Wno-narrowing", "-pthread"]
DEFINES = ['-DCHUNKATTN_SOURCE_DIR="@ROOT@"', '-DCHUNKATTN_BINARY_DIR="@WORK@"']
NATIVE = ["-march=native"]
# How the variants are built that tests/CMakeLists.txt declares there.
DECLARED = "tests/CMakeLists.txt"
VARIANTS = {"portable": ["-march=native", "-DCHUNKATTN_ISA=portable"], "avx2": ["-mavx2", "-mfma", "-mf16c", "-DCHUNKATTN_ISA=avx2"],
            "tiles": ["-march=native", "-DCHUNKATTN_SOFTWARE_TILES", "-include", "support/software_tiles.hpp"],
            "dots": ["-march=native", "-DCHUNKATTN_SOFTWARE_DOTS", "-include", "support/software_dots.hpp"], "plain": []}
# --fast: the tests of these programs, and how those without a variant are built there.
FAST = "tests/fast.cmake"
FAST_NATIVE = ["-march=native", "-DCHUNKATTN_ISA=native"]

ARGUMENTS = ["--abort-after=1"]  # doctest: the first failure is enough
ENVIRONMENT = {"CHUNKATTN_SEED": "20261121"}  # the same random inputs in every run
MEMORY_KB = 16 << 20  # of addresses
SLACK_SECONDS = 10  # beyond the factor
SURVEY_SECONDS = 600

# ---- faults that are not planted ----------------------------------------------------------------

# A fault is left out where all keys of a rule agree with it: `headers` globs, names of `functions`
# it is in, `operators`, regular expressions for the `text` of its lines or for all that it `changes`,
# `calls` it stands in (arguments from `from_argument` to `to_argument`; without these also the
# statement that is nothing but the call). Only what cannot change a result belongs here; the report
# counts what each rule took.
CPU = ["*/cpu/*.hpp", *PUBLIC["cpu"]]
AHEAD = "asks for memory ahead of its use: no result depends on it"
TIME = "estimated time: decides only how work is cut"
KERNEL = "which of several kernels or how long to spin: the result is the same"
MORE = "how much memory is reserved: more than what is needed is no fault"
EITHER = "the same either way round"
MESSAGE = "the text of an error"
CHECK = "a check of tests, which finds nothing where all is well"

EXCLUDED = [
    dict(calls=["CHUNKATTN_PREFETCH", "CHUNKATTN_PREFETCH_WRITE", "prefetch", "prefetch_near", "__builtin_prefetch",
                "look_ahead", "prefetch_end", "prefetch_some"], reason=AHEAD),
    dict(functions=["look_ahead", "prefetch_victims", "prefetch_end", "prefetch", "prefetch_near", "prefetch_some"], reason=AHEAD),
    dict(headers=["*/prefetch.hpp"], reason=AHEAD),
    dict(headers=CPU, changes=r"(ahead|lines)\.(start|settle|advance|grant_\w+)\(.*|ahead = lines;|\w*burst|ahead",
         reason=AHEAD),
    dict(headers=CPU, text=r"max_burst|^burst\(|^const (auto|int) \w*burst = |Rows::packed && cold",
         reason=AHEAD),
    dict(headers=CPU, functions=["burst_of"], reason=AHEAD),
    dict(headers=CPU, functions=["block_logits"], text=r"^half, ", reason=AHEAD),
    dict(headers=CPU, text=r"(tile|line|whole|i) == 0[,)]", changes="==|0", reason=AHEAD),

    dict(calls=["item_ns"], reason=TIME),
    dict(headers=["*/schedule.hpp"], functions=["item_ns", "rows_per_block", "total_ns"], reason=TIME),
    dict(headers=["*/schedule.hpp"], functions=["cut_items", "take", "rest_of"],
         text=r"\b(few|share|target|room|fraction|tokens_ns|taken|total|work|parts|blocks|cost)\b", reason=TIME),
    dict(headers=CPU, functions=["prepare"], text=r"\b(cost\.|min_tasks|has_products)", reason=TIME),

    dict(headers=CPU, text=r"lines.count - tile \* tile_lines > |\bleft >= |count > 2", operators=["comparison"],
         reason=KERNEL),
    dict(headers=[*CPU, "*/base/*.hpp", "*/executor.hpp"], text=r"spin_limit|spin_pause|__builtin_ia32_pause", reason=KERNEL),

    dict(calls=["reserve"], reason=MORE),
    dict(text=r"\bcapacity\(\)", reason=MORE),
    dict(headers=CPU, text=r"const std::size_t stride = ", reason=MORE),

    dict(calls=["min", "max", "swap", "merge_states", "fits", "_mm_max_ps", "_mm256_max_ps", "_mm512_cmpeq_epi16_mask"], operators=["swapped arguments"], reason=EITHER),
    dict(calls=["fma", "_mm_fmadd_ps", "_mm256_fmadd_ps", "_mm512_fmadd_ps"], operators=["swapped arguments"],
         to_argument=1, reason=EITHER),
    dict(calls=["_mm512_maskz_max_ps", "dot_int16"], operators=["swapped arguments"], from_argument=1, reason=EITHER),
    dict(text=r"([\w.\[\]]+) [<>] ([\w.\[\]]+) \? (\1 : \2|\2 : \1)", operators=["comparison"],
         reason="the larger of two equal values is either"),

    dict(headers=["*/elements.hpp"], functions=["store_narrowed"], changes="return;",
         reason="what follows is compiled for other vectors only"),

    dict(calls=["fail_argument"], from_argument=0, reason=MESSAGE),
    dict(calls=["check_argument"], from_argument=1, reason=MESSAGE),
    dict(calls=["check_size"], from_argument=4, reason=MESSAGE),
    dict(functions=["is_consistent", "is_ordered"], reason=CHECK),
    dict(functions=["fail_other_draft"], operators=["deleted statement"],
         reason="a function that never returns: without its call the compiler takes for granted that it is not reached"),
]
if not has_amx():
    EXCLUDED.append(dict(headers=["*/isa/tiles.hpp"], functions=["AmxTiles", "~AmxTiles"],
                         reason="the matrix unit, which this processor lacks: tests run the software model"))
