// QuantKVAttention on a CPU: the arguments of its kernel, all in C types. `export/operators.py` states what it computes.
#pragma once
#include <cstdint>

extern "C" {

// Codes in int8 bytes, and one scale a block of tokens and channels; row-major.
struct UnicacheStore {
    const int8_t* codes;  // [batch, kv_heads, slots, head_dim or ceil(head_dim / 2)]
    const float* scale;   // [scale_batch, kv_heads, token_blocks, channel_blocks]
    int64_t bits;         // of a code: 8 or 4
    int64_t scale_batch;  // batch, or 1: all share it
    int64_t token_blocks, channel_blocks;
};

struct UnicacheAttention {
    int64_t batch, kv_heads, group, queries, slots, window, head_dim;
    float softmax_scale;
    const float* query;  // [batch, kv_heads * group, queries, head_dim]
    UnicacheStore key, value;
    const float* store_bias;    // [batch, kv_heads, slots]
    const float* key_window;    // [batch, kv_heads, window, head_dim]
    const float* value_window;  // the same
    const float* window_bias;   // [batch, queries, window]
    float* output;              // as query
    float* store_mass;          // [batch, kv_heads, slots]
    float* window_mass;         // [batch, kv_heads, window]
};

// Whether this processor runs a path: "plain", "avx2" or "avx512".
int unicache_attention_runs(const char* path);

// KV heads first .. last - 1 of the batch * kv_heads, which any threads may share out. `path`: NULL is the fastest that
// runs here. Returns 0, or 1 where the path does not run here, 2 where memory is out.
int unicache_attention(const UnicacheAttention* arguments, int64_t first, int64_t last, const char* path);
}
