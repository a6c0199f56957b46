"""Formulas of the attention map: pure functions on tensors, one definition each, in its docstring."""
