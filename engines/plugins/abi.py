"""`kernels.h` in Python: the structures that compiled kernels take. Pointers are addresses, on the host or a GPU."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p

FLOAT32, FLOAT16 = 0, 1  # UnicacheType


class Store(Structure):
    """Codes and scales of keys or values: `UnicacheStore`."""

    _fields_ = (
        ("codes", c_void_p),
        ("scale", c_void_p),
        *((name, c_int64) for name in ("scale_type", "bits", "scale_batch", "token_blocks", "channel_blocks")),
    )


class Attention(Structure):
    """Arguments of QuantKVAttention: `UnicacheAttention`."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "queries", "slots", "window", "head_dim")),
        *((name, c_int64) for name in ("type", "store_bias_type", "window_bias_type")),
        ("softmax_scale", c_float),
        ("query", c_void_p),
        ("key", Store),
        ("value", Store),
        *((name, c_void_p) for name in ("store_bias", "key_window", "value_window", "window_bias")),
        *((name, c_void_p) for name in ("output", "store_mass", "window_mass")),
    )


class Rows(Structure):
    """A tensor of TopKGather: `UnicacheRows`."""

    _fields_ = (("source", c_void_p), ("target", c_void_p), ("bytes", c_int64))
