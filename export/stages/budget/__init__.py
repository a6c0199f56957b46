"""How many tokens each layer keeps: `[budget] method` of a recipe; the first one is the default."""

from export.stages.budget.anchor_map import AnchorMap
from export.stages.budget.cosine import Cosine
from export.stages.budget.measured import Measured
from export.stages.budget.pyramid import Pyramid
from export.stages.budget.uniform import Uniform

Methods = Cosine | Uniform | Pyramid | AnchorMap | Measured
