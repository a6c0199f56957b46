"""The floor of each CUDA kernel on a device: what it moves and what it issues, and the time of the larger of both.

python -m engines.plugins.roofline    prints the tables of ROOFLINE.md
"""

from __future__ import annotations

from dataclasses import dataclass

GIGA, MICRO, WARP, CHUNK, SCHEDULERS = 1e9, 1e6, 32, 16, 4


@dataclass(frozen=True)
class Device:
    """A GPU. A multiprocessor has four schedulers, and each issues one warp's instruction a cycle."""

    name: str
    bandwidth: float  # bytes/s
    multiprocessors: int
    clock: float  # Hz
    source: str

    @property
    def issue(self) -> float:
        """Warp instructions/s."""
        return self.multiprocessors * SCHEDULERS * self.clock


DEVICES = (
    Device("AGX Orin 64GB", 204.8e9, 16, 1.3e9, "NVIDIA Jetson AGX Orin Series Data Sheet: 2048 cores at 1.3 GHz"),
    Device("Orin NX 16GB", 102e9, 8, 0.918e9, "NVIDIA Jetson Orin NX Series Data Sheet: 1024 cores at 918 MHz"),
    Device("H200 SXM", 4.8e12, 132, 1.98e9, "NVIDIA H200 Datasheet: 67 TFLOPS of FP32, from 132 x 128 cores"),
)

# Instructions of the inner loop a lane and token (16 channels), counted in the machine code of sm_87 by bits of a code
# and rows of a block, where keys have a scale a channel and values one a token; of the window's float16 too (bits 16).
INSTRUCTIONS = {(8, 4): 311, (4, 4): 320, (16, 4): 321, (8, 1): 171, (4, 1): 179, (16, 1): 137}


@dataclass(frozen=True)
class Work:
    """What a kernel does: bytes of device memory, multiply-adds (counted as two), instructions of a warp."""

    bytes: float
    operations: float
    instructions: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes

    def bandwidth_floor(self, device: Device) -> float:
        return self.bytes / device.bandwidth

    def issue_floor(self, device: Device) -> float:
        return self.instructions / device.issue

    def floor(self, device: Device) -> float:
        """Seconds, at best; launches (some microseconds each) come on top."""
        return max(self.bandwidth_floor(device), self.issue_floor(device))


def attention(
    slots: int,
    bits: int = 8,
    window: int = 128,
    batch: int = 1,
    kv_heads: int = 8,
    group: int = 4,
    queries: int = 1,
    head_dim: int = 128,
) -> Work:
    """QuantKVAttention, one call: codes of `bits`, a float16 window and biases; scales float16, one a key's channel and
    one a value's token. What blocks leave for the second kernel stays in the cache, and is left out."""
    heads, rows = batch * kv_heads, group * queries
    at_a_time = 1 if rows == 1 else 4
    lanes = 1 << (max(1, -(-head_dim // CHUNK)) - 1).bit_length()
    store = slots * (2 * head_dim * bits / 8 + 2 + 2) + head_dim * 2
    recent = window * 2 * head_dim * 2
    ends = 2 * rows * head_dim * 2
    chunks = -(-rows // at_a_time)
    issued = slots * INSTRUCTIONS[bits, at_a_time] + window * INSTRUCTIONS[16, at_a_time]
    return Work(
        bytes=heads * (store + recent + ends) + batch * queries * window * 2,
        operations=heads * 4 * rows * (slots + window) * head_dim,
        instructions=heads * chunks * lanes * issued / WARP,
    )


def topk_gather(tokens: int, k: int, batch: int = 1, kv_heads: int = 8, row_bytes: int = 256) -> Work:
    """TopKGather, one call: scores read once from memory (and five times more from the cache), float16 rows of keys and
    values, positions and biases read and written. The operations are comparisons."""
    heads = batch * kv_heads
    moved = 2 * k * (2 * row_bytes + 4 + 2) + 8 * k
    return Work(bytes=heads * (4 * tokens + moved), operations=heads * 6 * tokens, instructions=0)


ROUND = 700  # cycles of a block between two readings of scores: a load from the cache, a match, a histogram; assumed


def select_latency(tokens: int, device: Device) -> float:
    """Seconds that TopKGather selects: one block a head, all at once; six readings, 1024 scores a round."""
    return 6 * -(-tokens // 1024) * ROUND / device.clock


def attention_table(group: int = 4) -> str:
    names = " | ".join(f"{device.name}: memory, issue, floor (us)" for device in DEVICES)
    rows = [f"| slots | bits | MB | operations a byte | {names} |", "|---" * (4 + len(DEVICES)) + "|"]
    for slots in (1024, 4096, 16384):
        for bits in (8, 4):
            work = attention(slots, bits, group=group)
            cells = [
                f"{work.bandwidth_floor(each) * MICRO:.1f}, {work.issue_floor(each) * MICRO:.1f}, "
                f"**{work.floor(each) * MICRO:.1f}**"
                for each in DEVICES
            ]
            head = f"| {slots} | {bits} | {work.bytes / 1e6:.2f} | {work.intensity:.1f} | "
            rows.append(head + " | ".join(cells) + " |")
    return "\n".join(rows)


def topk_table() -> str:
    names = " | ".join(f"{device.name}: memory, selection (us)" for device in DEVICES)
    rows = [f"| tokens | k | MB | {names} |", "|---" * (3 + len(DEVICES)) + "|"]
    for tokens, k in ((4096, 1024), (16384, 4096), (131_072, 16384)):
        work = topk_gather(tokens, k)
        cells = [
            f"{work.bandwidth_floor(each) * MICRO:.1f}, {select_latency(tokens, each) * MICRO:.0f}" for each in DEVICES
        ]
        rows.append(f"| {tokens} | {k} | {work.bytes / 1e6:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    for title, table in (
        ("QuantKVAttention, 4 query heads a KV head", attention_table()),
        ("QuantKVAttention, 1 query head a KV head", attention_table(group=1)),
        ("TopKGather", topk_table()),
    ):
        print(f"{title}\n\n{table}\n")


if __name__ == "__main__":
    main()
