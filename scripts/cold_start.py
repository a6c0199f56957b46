"""One start: a process of its own, from nothing to the end of an answer; prints JSON. bench_load.py runs it many times.

python scripts/cold_start.py runtime build/demo-vlm --image photo.jpg "what is this?"
python scripts/cold_start.py transformers models/demo-vlm --image photo.jpg "what is this?"
"""

from __future__ import annotations

import time

BEGUN = time.monotonic()  # before anything is imported

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Mark = Callable[[str], None]


def memory() -> dict[str, int]:
    """Bytes of this process: now, at its peak, and of now those that are no file's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}
    return {name: int(status[field].split()[0]) * 1024 for name, field in names.items()}


def by_runtime(arguments: argparse.Namespace, mark: Mark) -> dict[str, Any]:
    import runtime

    mark("import")
    vlm = runtime.open(arguments.path, "ort", arguments.level, arguments.threads)
    mark("open")
    stream = vlm.stream(arguments.question, arguments.image, arguments.tokens, ignore_eos=True)
    for _ in stream:
        mark("first token")
    return {"tokens": stream.result.tokens, "kv_bytes": stream.result.stats.kv_bytes}


def by_transformers(arguments: argparse.Namespace, mark: Mark) -> dict[str, Any]:
    import torch
    from PIL import Image
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    mark("import")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    pictures = [Image.open(path).convert("RGB") for path in arguments.image]
    kind: Any = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    reader: Any = (AutoProcessor if pictures else AutoTokenizer).from_pretrained(arguments.path, local_files_only=True)
    model = kind.from_pretrained(arguments.path, dtype=torch.float32, local_files_only=True).eval()
    mark("open")
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": arguments.question}]
    messages = [{"role": "user", "content": content if pictures else arguments.question}]
    text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given: dict[str, Any] = {"images": pictures} if pictures else {"add_special_tokens": False}
    inputs = reader(text=text, return_tensors="pt", **given)
    length = inputs["input_ids"].shape[1]

    class Marks:
        """A streamer, which `generate` calls with the prompt first."""

        def put(self, ids: Any) -> None:
            if ids.numel() == 1:
                mark("first token")

        def end(self) -> None:
            pass

    rest = {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens, "do_sample": False}
    with torch.no_grad():
        out = model.generate(**inputs, **rest, streamer=Marks(), return_dict_in_generate=True)
    layers = [layer for layer in out.past_key_values.layers if layer.keys is not None]
    kv_bytes = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    return {"tokens": out.sequences[0, length:].tolist(), "kv_bytes": kv_bytes}


WAYS = {"runtime": by_runtime, "transformers": by_transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("path", type=Path, help="a bundle, or a checkpoint")
    parser.add_argument("question")
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--level")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--since", type=float, default=BEGUN, help="when it was started, by the system's clock")
    arguments = parser.parse_args()
    marks: dict[str, dict[str, float]] = {}

    def mark(name: str) -> None:
        marks.setdefault(name, {"seconds": time.monotonic() - arguments.since, **memory()})

    mark("python")
    told = WAYS[arguments.way](arguments, mark)
    mark("end")
    print(json.dumps(told | {"marks": marks}), flush=True)
    os._exit(0)  # what comes after the answer is not measured


if __name__ == "__main__":
    main()
