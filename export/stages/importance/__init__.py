"""What a cached token is worth: `[importance] method` of a recipe; the first one is the default."""

from export.stages.importance.decayed import Decayed
from export.stages.importance.expected_attention import ExpectedAttention
from export.stages.importance.frequency import Frequency
from export.stages.importance.h2o import H2O
from export.stages.importance.keydiff import KeyDiff
from export.stages.importance.knorm import KNorm
from export.stages.importance.random import Random
from export.stages.importance.signals import Signals
from export.stages.importance.snapkv import SnapKV
from export.stages.importance.streaming_llm import StreamingLLM
from export.stages.importance.uniform import Uniform
from export.stages.importance.value_norm import ValueNorm
from export.stages.importance.vl_cache import VLCache

Methods = (
    SnapKV
    | VLCache
    | H2O
    | Decayed
    | Frequency
    | ExpectedAttention
    | Signals
    | KeyDiff
    | KNorm
    | ValueNorm
    | StreamingLLM
    | Random
    | Uniform
)
