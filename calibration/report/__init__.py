"""`report.html`: what a model looks at, what recipes keep of it, and what that costs, on one page."""

FILE = "report.html"
SAMPLES = 32  # that the attention map is measured on where none is given: fewer would be warned of
