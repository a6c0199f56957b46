"""Perplexity of English under weights in fewer bits, by the formulas that export/build.py --weights takes.

    python scripts/smollm2.py build/smollm2
    python scripts/weights_perplexity.py build/smollm2

Each line is a model of its own, in PyTorch: bits and group of the layers; head and embedding table take 8 bits. The
text is read in pieces of 1024 tokens; without --text it is a novel, see english.py.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

import english
from engines.errors import Parser, command, positive
from export.weights import Grid
from reporting import markdown

PIECE = 1024
# Of the layers, and of head and embedding table; None: as they are.
FORMS: dict[str, tuple[Grid | None, Grid | None]] = {
    "float32": (None, None),
    "int8 / 128": (Grid(8, 128), Grid(8, 128)),
    "int4 / 32": (Grid(4, 32), Grid(8, 128)),
    "int4 / 64": (Grid(4, 64), Grid(8, 128)),
    "int4 / 128": (Grid(4, 128), Grid(8, 128)),
    "int4 / 32, head and table too": (Grid(4, 32), Grid(4, 32)),
}


def perplexity(model: Any, pieces: torch.Tensor) -> float:
    """Of every token of a piece but the first, [pieces, PIECE]."""
    with torch.no_grad():
        losses = [model(piece[None], labels=piece[None]).loss.double() for piece in pieces]
    return math.exp(torch.stack(losses).mean())


def quantize(model: Any, layers: Grid | None, table: Grid | None) -> float:
    """Move the weights onto their grids; the MiB that they then take, scales included."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    done, size = set(), 0.0
    for module in model.modules():
        grid = table if module in ends else layers
        for weight in module.parameters(recurse=False):
            if weight.data_ptr() in done:
                continue
            done.add(weight.data_ptr())
            stored = isinstance(module, (nn.Linear, nn.Embedding)) and weight.ndim == 2 and grid is not None
            if stored and grid is not None:
                weight.data.copy_(grid.nearest(weight.data))
            size += weight.numel() * (grid.bits / 8 + 4 / grid.group_of(weight.shape[1]) if stored and grid else 4)
    return size / 2**20


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="scripts/weights_perplexity.py", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a language model")
    parser.add_argument("--text", type=Path, help="a file to read (default: a novel)")
    parser.add_argument("--tokens", type=positive, default=4 * PIECE, metavar="N", help=f"default: {4 * PIECE}")
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    text = args.text.read_text() if args.text else english.novels()["persuasion"]
    tokenizer: Any = AutoTokenizer.from_pretrained(args.checkpoint, local_files_only=True)
    pieces = torch.tensor(tokenizer(text)["input_ids"][: max(args.tokens // PIECE, 1) * PIECE]).view(-1, PIECE)
    rows = [["weights", "MiB", "perplexity", "change, %"]]
    base = None
    for name, grids in track(FORMS.items(), "reading", transient=True):
        model: Any = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32, local_files_only=True)
        size, found = quantize(model.eval(), *grids), perplexity(model, pieces)
        base = base or found
        rows.append([name, f"{size:.1f}", f"{found:.3f}", f"{100 * (found / base - 1):+.2f}"])
    print("\n".join(markdown(rows)) + f"\n{pieces.numel()} tokens in pieces of {PIECE}")


if __name__ == "__main__":
    sys.exit(main())
