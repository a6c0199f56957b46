"""How the store holds keys and values: `[quantize] method` of a recipe; the first one is the default."""

from export.stages.quantize.floats import Float16, Float32
from export.stages.quantize.int4 import Int4
from export.stages.quantize.int8 import Int8
from export.stages.quantize.kivi import Kivi

Methods = Int8 | Int4 | Kivi | Float16 | Float32
