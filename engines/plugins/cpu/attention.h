// QuantKVAttention on a CPU, inside: what attention.cc, which shares out the work, and the paths, one file an
// instruction set, know of each other.
#pragma once
#include <utility>

#include "cpu.h"
#include "paths.h"

#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

namespace unicache {

constexpr int64_t TILE = 128;            // tokens that a path works on at a time
constexpr int64_t PART = 2048;           // slots of a KV head that one task attends to: a whole number of tiles
constexpr int64_t MOST_CHANNELS = 512;  // of rows that are read as codes, and not unpacked
constexpr int64_t SETS = TILE / 16;      // of scaled queries: for as many blocks of keys as a tile may have
constexpr int64_t STRIDE = MOST_CHANNELS + 64;  // of a row of queries as whole numbers of 16 bits
constexpr int64_t ALIGN = 16;            // floats: what starts at a multiple of it starts a cache line

// One call. A KV head has `parts` parts: stretches of its store, and its window, the last. Each is attended to by
// itself, by any thread; a second pass puts a head's parts together.
struct Job {
    UnicacheAttention a;
    int64_t rows;            // query rows that share the keys of a KV head: group * queries
    int64_t width;           // of a row of floats: head_dim up to a multiple of ALIGN
    int64_t parts, tiles;    // of a KV head
    float* output;           // [heads, parts, rows, width], relative to `largest`, not yet divided by `total`
    float *largest, *total;  // [heads, parts, rows]
    float* weights;  // [heads, tiles, rows, TILE], relative to `tops` [heads, tiles, rows]; null: no mass is wanted
    float* tops;
    int64_t scratch;  // floats that a task needs for itself
};

// Calls f with each of 0 .. N - 1 as a constant: what it indexes stays in registers, which no compiler promises of a
// loop.
template <class F, int... I>
INLINE void repeat(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
INLINE void repeat(const F& f) {
    repeat(f, std::make_integer_sequence<int, N>{});
}

}  // namespace unicache
