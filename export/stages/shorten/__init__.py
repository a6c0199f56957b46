"""Where the prompt gets shorter inside the decoder: `[shorten] method` of a recipe; the first one is the default."""

from export.stages.shorten.fastv import FastV
from export.stages.shorten.tome import ToMe
from export.stages.shorten.whole import Whole

Methods = Whole | FastV | ToMe
