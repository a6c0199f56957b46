"""Models of text alone: a decoder, and nothing that sees."""

from __future__ import annotations

from export.decoder import decoder_of
from export.families.family import Family

TEXT = Family(None, lambda model: decoder_of(model, model.model))
