"""`report.html`: what a model looks at, what recipes keep of it, and what that costs, on one page."""
