// One source, compiled for each instruction set; the processor chooses when it runs. Not registered with ONNX Runtime
// yet: sessions still run the function body of `export/onnx_functions.py`.
//   g++ -O3 -std=c++17 -shared -fPIC attention.cc -o libunicache_cpu.so
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

namespace {

constexpr int64_t TILE = 32;        // tokens unpacked at a time: 16 KB of head_dim 128, half of a first-level cache
constexpr float LOWEST = -1e4f;     // masks are finite, so that a fully masked row stays finite
constexpr float NOTHING = -3e38f;   // below every logit

struct alignas(64) Line {
    float x[16];
};

// Zeros that start on a cache line.
class Buffer {
    std::vector<Line> lines;

public:
    explicit Buffer(int64_t floats) : lines(floats / 16 + 1, Line{}) {}
    float* data() { return lines[0].x; }
};

// Rows of one KV head: codes and scales, or floats where `codes` is null.
struct Rows {
    const int8_t* codes;
    const float* floats;
    const float* scale;
    int64_t bits, count, head_dim, bytes, token_blocks, channel_blocks;

    // One scale a channel (or one in all) is a factor of the query or of the output: rows are read without it.
    bool folds() const { return codes && token_blocks == 1; }
    int64_t tokens_each() const { return (count + token_blocks - 1) / token_blocks; }

    // The scales of a block of tokens, one a channel.
    void channel_scales(int64_t block, float* out) const {
        const int64_t each = (head_dim + channel_blocks - 1) / channel_blocks;
        for (int64_t i = 0; i < channel_blocks; i++) {
            const int64_t begin = std::min(i * each, head_dim), end = std::min(begin + each, head_dim);
            std::fill(out + begin, out + end, scale[block * channel_blocks + i]);
        }
    }
};

Rows store_rows(const UnicacheAttention& a, const UnicacheStore& store, int64_t b, int64_t head) {
    const int64_t bytes = store.bits == 8 ? a.head_dim : (a.head_dim + 1) / 2;
    const int64_t scale_head = store.scale_batch == 1 ? head - b * a.kv_heads : head;
    return {store.codes + head * a.slots * bytes,
            nullptr,
            store.scale + scale_head * store.token_blocks * store.channel_blocks,
            store.bits,
            a.slots,
            a.head_dim,
            bytes,
            store.token_blocks,
            store.channel_blocks};
}

Rows window_rows(const UnicacheAttention& a, const float* window, int64_t head) {
    return {nullptr, window + head * a.window * a.head_dim, nullptr, 32, a.window, a.head_dim, 0, 0, 0};
}

}  // namespace

#define PATH plain
#define LANES 4
#include "attention_path.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define PATH avx2
#define LANES 8
#include "attention_path.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#define PATH avx512
#define LANES 16
#include "attention_path.h"
#pragma GCC pop_options
#endif

namespace {

struct Path {
    const char* name;
    bool runs;
    void (*attend)(const UnicacheAttention&, int64_t head);
};

// Fastest first.
const std::vector<Path>& paths() {
    static const std::vector<Path> all = {
#if defined(__x86_64__)
        {"avx512",
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
         avx512::attend},
        {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), avx2::attend},
#endif
        {"plain", true, plain::attend},
    };
    return all;
}

const Path* find(const char* name) {
    for (const Path& path : paths())
        if (path.runs && (!name || !std::strcmp(name, path.name))) return &path;
    return nullptr;
}

}  // namespace

int unicache_attention_runs(const char* path) { return path && find(path); }

int unicache_attention(const UnicacheAttention* arguments, int64_t first, int64_t last, const char* name) {
    const Path* path = find(name);
    if (!path) return 1;
    try {
        for (int64_t head = first; head < last; head++) path->attend(*arguments, head);
    } catch (const std::bad_alloc&) {
        return 2;
    }
    return 0;
}
