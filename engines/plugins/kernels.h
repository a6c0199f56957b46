// The two operators' kernels, as C sees them: what the CUDA kernels, the CPU kernels, the TensorRT plugins, the ONNX
// Runtime library and (through ctypes, engines/plugins/abi.py) Python agree on. export/operators.py states what they
// compute. All tensors are contiguous and row-major, and lie where the kernel runs.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum UnicacheType { UNICACHE_FLOAT32 = 0, UNICACHE_FLOAT16 = 1 };

// What the CUDA kernels take, at most: heads or rows lie along a grid's y or z; tokens of a store or a window.
enum UnicacheMost { UNICACHE_MOST_HEADS = 65535, UNICACHE_MOST_TOKENS = 1 << 20, UNICACHE_MOST_HEAD_DIM = 256 };

// Codes in int8 bytes, and one scale a block of tokens and channels: slot c and channel d have the scale
// [c / ceil(slots / token_blocks), d / ceil(head_dim / channel_blocks)].
struct UnicacheStore {
    const int8_t* codes;  // [batch, kv_heads, slots, head_dim, or ceil(head_dim / 2) of 4 bits]
    const void* scale;    // [scale_batch, kv_heads, token_blocks, channel_blocks]
    int64_t scale_type;   // UnicacheType
    int64_t bits;         // of a code: 8; or 4: byte + 128 = 16 h + l holds l - 8 of channel j and h - 8 of j + bytes
    int64_t scale_batch;  // batch, or 1: all share it
    int64_t token_blocks, channel_blocks;
};

// QuantKVAttention.
struct UnicacheAttention {
    int64_t batch, kv_heads, group, queries, slots, window, head_dim;
    int64_t type;                               // UnicacheType of query, windows, output and masses
    int64_t store_bias_type, window_bias_type;  // UnicacheType
    float softmax_scale;
    const void* query;  // [batch, kv_heads * group, queries, head_dim]
    struct UnicacheStore key, value;
    const void* store_bias;    // [batch, kv_heads, slots]
    const void* key_window;    // [batch, kv_heads, window, head_dim]
    const void* value_window;  // the same
    const void* window_bias;   // [batch, queries, window]
    void* output;              // as query
    void* store_mass;          // [batch, kv_heads, slots]; NULL: not wanted
    void* window_mass;         // [batch, kv_heads, window]; NULL: not wanted
};

// TopKGather: a tensor [heads, tokens, bytes] to copy rows from, and [heads, k, bytes] to copy them to.
struct UnicacheRows {
    const void* source;
    void* target;
    int64_t bytes;
};

#ifdef __cplusplus
}
#endif
