"""A model repository for NVIDIA Triton Inference Server: a bundle that Triton's Python backend answers with.

    OUT/README.md
    OUT/NAME/config.pbtxt      inputs, outputs, instances
    OUT/NAME/1/model.py        `runtime.triton`, which runs the bundle
    OUT/NAME/1/bundle/         the bundle's files, copied, or a link to its folder

One model for all graphs: what a client asks of a graph alone (embeddings, KV stores) would be the runtime itself.
Inputs and outputs are named as those of Triton's vLLM backend, so that /generate and /generate_stream take the same.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from engines import bundle as bundles
from engines import trt
from engines.errors import UserError
from engines.ort import MAX_THREADS

TEXT, IMAGES, STREAM, SAMPLING = "text_input", "image", "stream", "sampling_parameters"  # inputs
ANSWER, STATS = "text_output", "stats"  # outputs
VERSION, BUNDLE = "1", "bundle"
MODEL = f'''"""Needs the package unicache-edge in Triton's Python."""

from pathlib import Path

from runtime.triton import Model


class TritonPythonModel(Model):
    bundle = Path(__file__).with_name("{BUNDLE}")
'''
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
CONFIG = """\
name: {name}
backend: "python"
max_batch_size: 0  # one request at a time and instance, whatever waits: no dynamic_batching
model_transaction_policy {{ decoupled: true }}  # an answer may come in pieces
input [
  {{ name: "{TEXT}" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "{IMAGES}" data_type: TYPE_STRING dims: [ -1 ] optional: true }},
  {{ name: "{STREAM}" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "{SAMPLING}" data_type: TYPE_STRING dims: [ 1 ] optional: true }}
]
output [
  {{ name: "{ANSWER}" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "{STATS}" data_type: TYPE_STRING dims: [ 1 ] }}
]
instance_group [ {{ count: {instances} kind: KIND_MODEL }} ]  # the runtime chooses what it runs on
{parameters}"""
README = """\
{name}: a UniCache Edge bundle, answered by Triton's Python backend. In its container: pip install PACKAGE
tritonserver --model-repository . ; curl localhost:8000/v2/models/{name}/generate -d '{{"{TEXT}": "what is it?"}}'
Also {IMAGES} (files, or data URLs), {STREAM} (for generate_stream), {SAMPLING} (JSON: max_tokens, temperature, ...).
"""
NAMES = {"TEXT": TEXT, "IMAGES": IMAGES, "STREAM": STREAM, "SAMPLING": SAMPLING, "ANSWER": ANSWER, "STATS": STATS}


def write(
    path: Path,
    out: Path,
    name: str | None = None,
    instances: int = 1,
    link: bool = False,
    level: str | None = None,
    backend: str | None = None,
    threads: int | None = None,
) -> str:
    """Write the repository, whole or not at all -> the model's name.

    Args:
        path: the bundle's folder.
        name: of the model; default: that of the bundle's folder.
        instances: processes that answer, each with its own weights.
        link: link to the bundle's folder instead of copying its files.
        level, backend, threads: what the bundle is opened with; None leaves one out.

    Raises:
        UserError: the bundle is damaged, `out` exists, or an option names what there is not.
    """
    bundle, out = bundles.read(path), Path(out)
    name = name or bundle.path.resolve().name
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of a model: give one of letters, digits, - and _ by  --name")
    if level is not None and level not in bundle.manifest.levels:
        raise UserError(f"no level {level!r} in {path}: choose {', '.join(bundle.manifest.levels)}")
    if backend not in (None, *(known := (trt.AUTO, *trt.NAMES))):
        raise UserError(f"unknown backend {backend!r}: choose {', '.join(known)}")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UserError(f"threads must be from 1 to {MAX_THREADS}, got {threads}")
    options = {"level": level, "backend": backend, "threads": threads}
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists: choose another --out or remove it")
    with bundles.writing(out) as folder:
        version = folder / name / VERSION
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config(name, instances, options), encoding="utf-8")
        (version / "model.py").write_text(MODEL, encoding="utf-8")
        (folder / "README.md").write_text(README.format(name=name, **NAMES), encoding="utf-8")
        if link:
            (version / BUNDLE).symlink_to(bundle.path.resolve(), target_is_directory=True)
        else:
            for file in (*bundle.manifest.files, bundles.MANIFEST, bundles.CHECKSUM):
                (version / BUNDLE / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(bundle.file(file), version / BUNDLE / file)
    return name


def config(name: str, instances: int, options: Mapping[str, object]) -> str:
    """config.pbtxt."""
    lines = (
        f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(str(value))} }} }}\n"
        for key, value in options.items()
        if value is not None
    )
    return CONFIG.format(name=_quoted(name), instances=instances, parameters="".join(lines), **NAMES)


def _quoted(text: str) -> str:
    """A string of protobuf's text format, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False)
