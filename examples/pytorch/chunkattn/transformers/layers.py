"""What a model asks of its attention, found out by a short run, and refused where kernels lack it.

A model may call its attention in any order and from any number of modules: what counts here is the
number of a call within a forward pass, its slot.
"""

import dataclasses
import inspect

import torch
from transformers import DynamicCache, cache_utils
from transformers.masking_utils import sdpa_mask

import chunkattn

from . import interface

# Kinds of layers (configuration.layer_types) that carry a state from token to token: states.py.
RECURRENT = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "ssm", "rglru", "xlstm", "rwkv"}
# Kinds that do not: of models whose class is for hybrids, these alone run.
STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
# A window is looked for at these positions; what is no window differs at one of them.
PROBED = (0, 1, 2, 7, 100, 1000, 8191, 8192, 8193, 65536, 131071)


class Unsupported(ValueError):
    """A model that cannot run on the tree; says why."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Slots that are alike share one Attention and one KvCache."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float


@dataclasses.dataclass
class Slot:
    """One call of attention within a forward pass."""

    module: torch.nn.Module
    name: str
    num_qo_heads: int
    geometry: Geometry
    window: int | None
    soft_cap: float | None
    has_sinks: bool


class Probe:
    """Stands for attention in a run whose results are not used."""

    def __init__(self, names):
        self.names, self.slots, self.masks, self.kept = names, [], {}, []

    def mask(self, *args, mask_function, **arguments):
        window = window_of(mask_function)
        for name in ("allow_is_causal_skip", "dtype", "config"):
            arguments.pop(name, None)
        mask = sdpa_mask(*args, mask_function=mask_function, allow_is_causal_skip=False, **arguments)
        self.kept.append(mask)  # so that no other one gets its id
        self.masks[id(mask)] = window
        return mask

    def attend(self, module, query, key, value, attention_mask, arguments):
        name = self.names.get(id(module), type(module).__name__)
        if attention_mask is None:
            raise Unsupported(f"{name}: has no causal mask, only one of its own if any")
        if id(attention_mask) not in self.masks:
            raise Unsupported(f"{name}: its mask is not made by transformers.masking_utils")
        window = self.masks[id(attention_mask)]
        if arguments.get("is_causal") is False or window is False:
            raise Unsupported(f"{name}: its mask is neither causal nor a causal window")
        if query.shape[2] != key.shape[2]:
            raise Unsupported(f"{name}: attends to keys of something else than the tokens (cross-attention)")
        sizes = (key.shape[3], value.shape[3])
        if not any(size[0] >= sizes[0] and size[1] >= sizes[1] for size in chunkattn.head_sizes()):
            raise Unsupported(f"{name}: heads of {sizes[0]}:{sizes[1]}: expected sizes within one that kernels were "
                              f"compiled for: {chunkattn.head_sizes()}")  # fmt: skip
        scale = arguments.get("scaling")
        self.slots.append(Slot(
            module, name, query.shape[1],
            Geometry(key.shape[1], key.shape[3], value.shape[3], scale or query.shape[3] ** -0.5),
            window, arguments.get("softcap"), arguments.get("s_aux") is not None,
        ))  # fmt: skip
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def window_of(mask_function):
    """The size of a causal window, None for no window, False for another mask.

    Asks the function itself, beyond the length of any tensor: a mask that reads tensors is no window.
    """
    window = None
    for query in sorted(PROBED, reverse=True):
        keys = torch.arange(query + 3)
        at = (torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.zeros(1, 1, 1, 1, dtype=torch.long),
              torch.full((1, 1, 1, 1), query), keys[None, None, None])  # fmt: skip
        try:
            seen = mask_function(*at)
        except (IndexError, RuntimeError):
            return False
        seen = torch.as_tensor(seen).expand(1, 1, 1, query + 3)[0, 0, 0]
        count = int(seen.sum())
        if query == max(PROBED) and 0 < count <= query:
            window = count
        expected = (keys <= query) & (keys > query - (window or query + 1))
        if not torch.equal(seen, expected):
            return False
    return window


def unwrapped(model):
    """The model of transformers that torch.compile() or PEFT wraps; adapters are in its layers."""
    while True:
        inner = model._modules.get("_orig_mod")  # torch.compile()
        if inner is None and hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None)):
            for name, adapter in model.peft_config.items():
                if adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None):
                    raise Unsupported(f"{type(model).__name__}: its adapter '{name}' ({type(adapter).__name__}) depends "
                                      "on the text as a whole: expected adapters within layers, as LoRA's")  # fmt: skip
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def has_states(model):
    """Whether any of its layers has a state that is not K/V of tokens."""
    text = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or []) | set(getattr(text, "layers_block_type", None) or [])
    # That its class may have states is no matter if its layers, all of which it names, have none.
    return bool(kinds & RECURRENT) or (getattr(model, "_is_stateful", False) and not (kinds and kinds <= STATELESS))


def cache_with_states(model):
    """A cache of transformers', and the indices of the layers that have states in it. Raises Unsupported."""
    kind = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    try:
        cache = DynamicCache(config=model.config)
    except Exception as error:
        raise Unsupported(f"{type(model).__name__} has recurrent layers, and transformers has no cache for it: "
                          f"{type(error).__name__}: {error}") from error  # fmt: skip
    indices = [at for at, layer in enumerate(cache.layers) if isinstance(layer, kind)]
    if not indices:
        raise Unsupported(f"{type(model).__name__} has recurrent layers whose states transformers' cache lacks")
    return cache, indices


def refuse_by_configuration(model):
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder model: only decoders run")
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", None) or [0]):
        raise Unsupported(f"{type(model).__name__} scales queries by a token's place in the row that it is given "
                          "(attn_temperature_tuning), not by its position_ids")  # fmt: skip
    if has_states(model):
        cache_with_states(model)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "position_ids" not in parameters:
        raise Unsupported(f"{type(model).__name__}.forward() takes no position_ids: rows of several texts need them"
                          + (", and it does not name them" if takes_any else ""))  # fmt: skip
    if not callable(getattr(model, "_get_logits_processor", None)) or model.get_output_embeddings() is None:
        raise Unsupported(f"{type(model).__name__} gives no logits of tokens: load it as a model for causal LM")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise Unsupported(f"{type(model).__name__} is on {', '.join(sorted(devices))}: only models in host memory run")


def slots_of(model, configs):
    """What each call of attention in a forward pass asks, in their order.

    Raises Unsupported, with the reason.
    """
    refuse_by_configuration(model)
    probe = Probe({id(module): name for name, module in model.named_modules()})
    tokens = torch.arange(6)[None] % model.config.get_text_config(decoder=True).vocab_size
    with interface.running(configs, interface.PROBE, probe), torch.inference_mode():
        try:
            model(input_ids=tokens, position_ids=torch.arange(6)[None], use_cache=False)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"{type(model).__name__} does not run with an attention function of "
                              f"AttentionInterface: {type(error).__name__}: {error}") from error  # fmt: skip
    if not probe.slots:
        raise Unsupported(f"{type(model).__name__}: no layer calls attention by AttentionInterface")
    return probe.slots


def position_limit(model):
    """How many positions the model has, None if it does not say.

    Beyond what they were trained for, dynamic rotary embeddings depend on the longest text of a batch.
    """
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if each.get("rope_type") in ("dynamic", "longrope"):
            trained = each.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None)  # fmt: skip
            limit = min((x for x in (limit, trained) if x is not None), default=None)
    return limit
