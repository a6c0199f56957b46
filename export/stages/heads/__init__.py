"""KV heads that become one: `[heads]`."""

from export.stages.heads.heads import Heads, attentions
from export.stages.heads.moments import HeadMoments

__all__ = ["HeadMoments", "Heads", "attentions"]
