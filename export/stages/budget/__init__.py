"""How many tokens each layer keeps: `[budget] method` of a recipe; the first one is the default."""

from export.stages.budget.cosine import Cosine

Methods = Cosine
