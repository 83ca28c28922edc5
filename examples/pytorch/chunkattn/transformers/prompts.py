"""What a user gives: prompts as tokens, and whole numbers."""

import collections.abc
import numbers

import torch


def whole(name, value, low, high=None):
    """Raises ValueError if `value` is no whole number within the limits."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} = {value!r}: expected a whole number")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} = {value}: expected at least {low}" + (f", at most {high}" if high else ""))


def _ids_of(given, name):
    """What a tokenizer gives: its tokens, and which of them count."""
    if not isinstance(given, collections.abc.Mapping):
        return given, None
    if "input_ids" not in given:
        raise ValueError(f"{name} = a mapping of {', '.join(map(repr, given))}: expected 'input_ids'")
    return given["input_ids"], given.get("attention_mask")


def rows_of(prompts):
    """A list of prompts, without padding."""
    if isinstance(prompts, str):
        raise ValueError("prompts = text: expected a list of prompts")
    ids, mask = _ids_of(prompts, "prompts")
    try:
        if mask is None:
            return list(ids)
        return [[token for token, counts in zip(*both) if counts] for both in zip(_listed(ids), _listed(mask))]
    except TypeError:
        raise ValueError(f"prompts = {_said(ids)}: expected a list of prompts") from None


def _said(given):
    return "None" if given is None else type(given).__name__


def _listed(table):
    return table.tolist() if hasattr(table, "tolist") else table


def tokens_of(prompt, tokenizer, vocabulary, name="prompt", least=1):
    """The tokens of a prompt: text, a list or array of tokens, or what a tokenizer gives."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name} = text: expected token ids, or a Generator with a tokenizer")
        prompt = tokenizer(prompt).input_ids
    ids, mask = _ids_of(prompt, name)
    if mask is not None and not torch.as_tensor(mask).all():
        raise ValueError(f"{name}.attention_mask = with zeros: expected a {name} without padding")
    if ids is None:
        raise ValueError(f"{name} = None: expected text or a list of tokens")
    try:
        tensor = torch.as_tensor(list(ids) if isinstance(ids, range) else ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} = {type(ids).__name__}: expected a list of tokens ({error})") from None
    if tensor.device.type == "meta":
        raise ValueError(f"{name} = on device meta: expected tokens that have values")
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise ValueError(f"{name}.shape = {tuple(tensor.shape)}: expected the tokens of one text")
    tokens = tensor.tolist()
    bad = [token for token in tokens if type(token) is not int or not 0 <= token < vocabulary]
    if len(tokens) < least:
        raise ValueError(f"{name} = []: expected one token at least")
    if bad:
        raise ValueError(f"{name} = {bad[0]}: expected tokens from 0 to {vocabulary - 1}")
    return tokens
