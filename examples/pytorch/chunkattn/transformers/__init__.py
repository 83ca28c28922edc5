"""Decoder models of transformers on chunkattn: see `Generator`."""

from .generator import Generator
from .layers import Unsupported
from .requests import Event, Output, Request
from .scoring import Score

__all__ = ["Event", "Generator", "Output", "Request", "Score", "Unsupported"]
