"""Decoder models of transformers on chunkattn: see `Generator`."""

from .generator import Generator
from .layers import Unsupported
from .requests import Event, Output, Request

__all__ = ["Event", "Generator", "Output", "Request", "Unsupported"]
