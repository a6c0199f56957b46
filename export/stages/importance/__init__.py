"""What a cached token is worth: `[importance] method` of a recipe; the first one is the default."""

from export.stages.importance.snapkv import SnapKV

Methods = SnapKV
