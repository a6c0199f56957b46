"""How the slots are shared out between text and visual tokens: `[modality] method`; the first one is the default."""

from export.stages.modality.density import Density
from export.stages.modality.joint import Joint

Methods = Joint | Density
