"""What becomes of tokens beyond the capacity: `[merge] method` of a recipe; the first one is the default."""

from export.stages.merge.d2o import D2O
from export.stages.merge.evict import Evict
from export.stages.merge.three_way import ThreeWay

Methods = Evict | ThreeWay | D2O
