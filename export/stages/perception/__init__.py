"""Which visual tokens enter the language model: `[perception] method` of a recipe; the first one is the default."""

from export.stages.perception.attention import Attention
from export.stages.perception.coverage import Coverage
from export.stages.perception.dart import Dart
from export.stages.perception.diversity import Diversity
from export.stages.perception.random import Random
from export.stages.perception.uniform import Uniform

Methods = Diversity | Coverage | Attention | Dart | Random | Uniform
