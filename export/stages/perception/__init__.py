"""Which visual tokens enter the language model: `[perception] method` of a recipe; the first one is the default."""

from export.stages.perception.diversity import Diversity

Methods = Diversity
