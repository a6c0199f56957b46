"""A plan as a table for a person and as JSON for a program."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from calibration.plan import PAYS, Most, Planner, Row, size

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 112  # of the table where no terminal says how wide it is


def as_json(planner: Planner, rows: list[Row], refused: dict[str, str]) -> dict[str, Any]:
    decoder = planner.checkpoint.decoder
    return {
        "device": dataclasses.asdict(planner.device),
        "model": {
            "checkpoint": str(planner.checkpoint.path),
            "parameters": sum(p.numel() for p in planner.checkpoint.model.parameters()),
            "layers": decoder.num_layers,
            "kv_heads": decoder.kv_heads,
            "head_dim": decoder.head_dim,
            "image_tokens": planner.checkpoint.image_tokens,
        },
        "chat": dataclasses.asdict(planner.chat),
        "weights": planner.weights,
        "weight_bytes": planner.weight_bytes,
        "vision_weight_bytes": planner.vision_weight_bytes,
        "step_weight_bytes": planner.step_weight_bytes,
        "reserve_bytes": planner.reserve,
        "free_bytes": planner.free,
        "kv_bytes_per_token_fp16": decoder.fp16_token_bytes,
        "time_saved_from_tokens": planner.pays_from,
        "recipes": [dataclasses.asdict(row) for row in rows],
        "refused": refused,
    }


def show(console: Console, planner: Planner, rows: list[Row], refused: dict[str, str]) -> None:
    from rich.table import Table

    device, chat, checkpoint, decoder = planner.device, planner.chat, planner.checkpoint, planner.checkpoint.decoder
    console.print(
        f"{device.name}: {size(device.memory.value)} of memory, {device.bandwidth.value / 1e9:g} GB/s, "
        f"{device.fp16.value / 1e12:g} TFLOP/s fp16, {device.int8.value / 1e12:g} TOP/s int8"
    )
    console.print(
        f"{checkpoint.path.name}: {sum(p.numel() for p in checkpoint.model.parameters()) / 1e6:,.1f} M parameters, "
        f"{size(planner.weight_bytes)} in {planner.weights}, {size(planner.step_weight_bytes)} of them read at every "
        f"token; {size(planner.reserve)} in reserve"
    )
    console.print(
        f"left for KV: {size(planner.free)}; an fp16 cache takes {decoder.fp16_token_bytes:,} bytes a token"
        if planner.free >= 0
        else f"nothing is left for KV: {size(-planner.free)} too much; see  --weights  and  --reserve"
    )
    tokens, text = planner.prompt(chat)
    console.print(
        f"prompt: {tokens:,} tokens, {chat.images} image{'s' * (chat.images > 1)} of {checkpoint.image_tokens} and "
        f"{text} of text in {chat.turns} turn{'s' * (chat.turns > 1)}; then an answer of {chat.answer}"
    )
    table = Table(
        "recipe", "bucket", "KV", "of fp16", "B/token", "tokens", "images", "turns", "prefill", "decode", "KV read"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row.recipe,
            str(row.bucket),
            size(row.kv_bytes),
            f"{row.kv_bytes / row.kv_bytes_fp16:.1%}",
            f"{row.kv_bytes_per_token:,.0f}",
            *(_most(what) for what in (row.tokens, row.images, row.turns)),
            _time(row.prefill_seconds),
            _time(row.decode_seconds),
            f"{row.kv_share:.1%}",
        )
    if rows:
        console.print(table)
        console.print(
            "tokens, images, turns: the most that fit, the rest as asked; * where not the memory ends them, but the "
            "positions or the recipe\n"
            "prefill, decode: of the prompt and of one token, at least; KV read: its share of what a decode step reads"
        )
    for row in rows:
        console.print(f"{row.recipe}: {row.verdict}")
    for name, reason in refused.items():
        console.print(f"{name}: not planned: {reason}")
    console.print(
        f"below {planner.pays_from:,} tokens an fp16 cache is less than {PAYS:.0%} of what a decode step reads: "
        "there is little time to save there"
    )


def _most(what: Most) -> str:
    return f"{what.count:,}{'' if what.limit == 'memory' else '*'}"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
