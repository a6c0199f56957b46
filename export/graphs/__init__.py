"""The five static-shape graphs of a bundle, as PyTorch modules around Hugging Face's own layers."""

from export.graphs.compact import Compact as Compact
from export.graphs.decode import Decode as Decode
from export.graphs.extend import Extend as Extend
from export.graphs.graph import NEW as NEW
from export.graphs.graph import Graph as Graph
from export.graphs.graph import Stateful as Stateful
from export.graphs.graph import added as added
from export.graphs.prefill import Prefill as Prefill
from export.graphs.state import Decoder as Decoder
from export.graphs.state import State as State
from export.graphs.vision import Vision as Vision
from export.graphs.vision import split as split
