"""Muon for the hidden matrices, AdamW for the rest.

Not torch.optim.Muon: that one orthogonalises in bfloat16, one matrix at a time, which takes 26 seconds a step on a CPU
without bfloat16 units. Here the matrices of one shape go through the iteration together, in float32: 0.5 seconds.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
ITERATIONS = 4
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, [n, rows, columns] (Muon, Jordan et al. 2024)."""
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizer:
    """Both optimizers behind one `step(lr)`, with the gradient norm clipped to 1.

    Args:
        named: name and parameter; matrices go to Muon unless the name says embedding or head.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        rest = []
        for name, p in named:
            if p.ndim == 2 and "embed" not in name and "head" not in name:
                self.groups[p.shape].append(p)
            else:
                rest.append(p)
        self.momentum = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}
        self.adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self.parameters = [*rest, *(p for ps in self.groups.values() for p in ps)]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients and clear them; parameters without a gradient (a frozen tower) stay as they are."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for shape, ps in self.groups.items():
            live = [i for i, p in enumerate(ps) if p.grad is not None]
            if not live:
                continue
            grad = torch.stack([ps[i].grad for i in live])  # type: ignore[misc]
            momentum = self.momentum[shape][live].lerp_(grad, 1 - MOMENTUM)
            self.momentum[shape][live] = momentum
            update = orthogonalise(grad.lerp_(momentum, MOMENTUM))  # Nesterov
            scale = lr * 0.2 * max(shape) ** 0.5  # the size of an AdamW step
            for i, u in zip(live, update, strict=True):
                ps[i].mul_(1 - lr * WEIGHT_DECAY).sub_(u, alpha=scale)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for p in self.parameters:
            p.grad = None

    def state(self) -> dict[str, Any]:
        """What `load` needs to go on."""
        return {"momentum": list(self.momentum.values()), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of an optimizer over the same parameters."""
        self.momentum = dict(zip(self.momentum, state["momentum"], strict=True))
        self.adam.load_state_dict(state["adam"])
