"""How the store holds keys and values: `[quantize] method` of a recipe; the first one is the default."""

from export.stages.quantize.by_layer import ByLayer, Uniform
from export.stages.quantize.floats import Float16 as Float16
from export.stages.quantize.floats import Float32 as Float32
from export.stages.quantize.int8 import Int8 as Int8

Methods = Uniform | ByLayer
