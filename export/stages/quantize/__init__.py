"""How the store holds keys and values: `[quantize] method` of a recipe; the first one is the default."""

from export.stages.quantize.floats import Float16, Float32
from export.stages.quantize.int4 import Int4
from export.stages.quantize.int8 import Int8
from export.stages.quantize.k8v4 import K8V4
from export.stages.quantize.kivi import Kivi
from export.stages.quantize.mixed import Mixed
from export.stages.quantize.per_head import PerHead
from export.stages.quantize.per_token import PerToken
from export.stages.quantize.turboquant import TurboQuant

Methods = Int8 | PerHead | PerToken | K8V4 | Mixed | Int4 | Kivi | TurboQuant | Float16 | Float32
