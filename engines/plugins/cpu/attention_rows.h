// Rows of keys and values as a path reads them: numbers to floats, codes to vectors, scales of tokens and channels.
// Part of attention_path.h, which says what must be defined before.
#pragma once
#include <math.h>
#include <string.h>

#include "attention.h"

namespace {

using namespace unicache;

INLINE constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE const void* at(const void* numbers, int64_t type, int64_t index) {
    return static_cast<const char*>(numbers) + index * (type == UNICACHE_FLOAT16 ? 2 : 4);
}

// Asks for as many numbers behind these: scales and biases are read a tile at a time, as codes are.
void widen(const void* numbers, int64_t type, int64_t first, int64_t count, float* out) {
    const void *from = at(numbers, type, first), *end = at(from, type, count), *next = at(end, type, count);
    for (const char* line = static_cast<const char*>(end); line < next; line += 64) __builtin_prefetch(line);
    if (type == UNICACHE_FLOAT32) {
        memcpy(out, from, count * sizeof(float));
        return;
    }
    const uint16_t* half = static_cast<const uint16_t*>(from);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, halves(half + i));
    uint16_t last[LANES] = {};
    float wide[LANES];
    for (int64_t j = i; j < count; j++) last[j - i] = half[j];
    store(wide, halves(last));
    for (int64_t j = i; j < count; j++) out[j] = wide[j - i];
}

void narrow(const float* from, int64_t count, void* numbers, int64_t type, int64_t first) {
    void* out = const_cast<void*>(at(numbers, type, first));
    if (type == UNICACHE_FLOAT32) {
        memcpy(out, from, count * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        float wide[LANES] = {};
        uint16_t half[LANES];
        const int64_t some = least(LANES, count - i);
        memcpy(wide, from + i, some * sizeof(float));
        to_halves(half, load(wide));
        memcpy(static_cast<uint16_t*>(out) + i, half, some * sizeof(uint16_t));
    }
}

// Keys or values of one KV head: codes and scales, or floats where `codes` is null.
struct Rows {
    const int8_t* codes;
    const void *floats, *scales;
    int64_t type, bits, head_dim, bytes, token_blocks, channel_blocks;
    int64_t tokens_each, channels_each;  // that share a scale

    // The scales of a block of tokens, one a channel.
    void channel_scales(int64_t block, float* out) const {
        widen(scales, type, block * channel_blocks, channel_blocks, out);
        if (channels_each == 1) return;
        for (int64_t i = channel_blocks - 1, end = head_dim; i >= 0; end = least(i * channels_each, head_dim), i--) {
            const float scale = out[i];
            for (int64_t d = least(i * channels_each, head_dim); d < end; d++) out[d] = scale;
        }
    }

    // The scales of some tokens, for `of_tokens` to choose from.
    const float* load_scales(int64_t start, int64_t tokens, float* out) const {
        const int64_t first = start / tokens_each, last = (start + tokens - 1) / tokens_each;
        widen(scales, type, first * channel_blocks, (last - first + 1) * channel_blocks, out);
        return out;
    }

    // Of those, the scales of a block of channels, one a token.
    void of_tokens(const float* loaded, int64_t start, int64_t tokens, int64_t block, float* out) const {
        loaded += block;
        if (tokens_each == 1) {
            // Strides that a compiler knows it reads in vectors.
            if (channel_blocks == 1)
                memcpy(out, loaded, tokens * sizeof(float));
            else if (channel_blocks == 2)
                for (int64_t t = 0; t < tokens; t++) out[t] = loaded[2 * t];
            else
                for (int64_t t = 0; t < tokens; t++) out[t] = loaded[t * channel_blocks];
            return;
        }
        for (int64_t t = 0, left = tokens_each - start % tokens_each; t < tokens; t++, left--) {
            if (left == 0) loaded += channel_blocks, left = tokens_each;
            out[t] = *loaded;
        }
    }
};

Rows store_rows(const UnicacheAttention& a, const UnicacheStore& store, int64_t head) {
    const int64_t bytes = store.bits == 8 ? a.head_dim : (a.head_dim + 1) / 2;
    const int64_t scale_head = store.scale_batch == 1 ? head % a.kv_heads : head;
    return {store.codes + head * a.slots * bytes,
            nullptr,
            at(store.scale, store.scale_type, scale_head * store.token_blocks * store.channel_blocks),
            store.scale_type,
            store.bits,
            a.head_dim,
            bytes,
            store.token_blocks,
            store.channel_blocks,
            store.token_blocks ? (a.slots + store.token_blocks - 1) / store.token_blocks : 1,
            (a.head_dim + store.channel_blocks - 1) / store.channel_blocks};
}

Rows window_rows(const UnicacheAttention& a, const void* window, int64_t head) {
    return {nullptr, at(window, a.type, head * a.window * a.head_dim), nullptr, a.type, 0, a.head_dim, 0, 1, 1, 1, 1};
}

// How the scales of keys or values are multiplied in.
enum class Scales { none, folded, factors, unpacked };

// Query rows, whose every float is multiplied with what comes from a tile, in SETS.
struct Queries {
    const float* rows;
    const int64_t count, width;
    float *const memory, *scaled;

    static int64_t room(int64_t rows, int64_t width) { return SETS * rows * width; }  // floats of memory
    Queries(float* memory, int64_t rows, int64_t width, const Rows&, Scales)
        : rows(nullptr), count(rows), width(width), memory(memory), scaled(memory) {}
    void use(int64_t set) { rows = scaled = memory + set * count * width; }
    // `by`: factors of the channels, or null.
    void set(const float* queries, const float* by) {
        rows = by ? scaled : queries;
        for (int64_t r = 0; by && r < count * width; r += width)
            for (int64_t d = 0; d < width; d += LANES)
                store(scaled + r + d, load(queries + r + d) * load(by + d));
    }

    // Whether a path has a way of its own to read such codes, and that.
    static constexpr bool takes(const Rows&, Scales) { return false; }
    template <class F>
    static void with_blocks(const Rows&, int64_t, const F&) {}
};

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls pass(Count<N>, first row) for all rows, N at a time, and for those left.
template <int N, class Pass>
INLINE void in_passes(int64_t rows, const Pass& pass, int64_t first = 0) {
    for (; first + N <= rows; first += N) pass(Count<N>{}, first);
    if constexpr (N > 1)
        if (first < rows) in_passes<N - 1>(rows, pass, first);
}

// Asks for rows a tile behind these: codes come from memory that no cache holds, in a model of many layers, and a
// processor that fetches on its own stops at every page.
INLINE void ask_ahead(const int8_t* rows, int64_t many, int64_t bytes) {
    for (int64_t i = 0; i < many * bytes; i += 64) __builtin_prefetch(rows + TILE * bytes + i);
}

// What a tile's rows are read from: vector `column` of a token is EACH vectors of floats, the second `half` columns on.
struct Floats {
    static constexpr int EACH = 1;
    const float* rows;
    int64_t half;
    static constexpr int64_t least_run() { return 0; }
    int64_t channel(int64_t first, int) const { return first; }
    void ask_ahead(int64_t, int64_t) const {}
    INLINE void get(int64_t token, int64_t column, Vec (&out)[EACH]) const {
        out[0] = load(rows + token * half + column);
    }
};

template <int PER_BYTE>
struct Codes {
    static constexpr int EACH = PER_BYTE;
    const int8_t* rows;
    int64_t half;
    static constexpr int64_t least_run() { return 0; }
    int64_t channel(int64_t first, int part) const { return first + part * half; }
    INLINE void ask_ahead(int64_t token, int64_t many) const { ::ask_ahead(rows + token * half, many, half); }
    INLINE void get(int64_t token, int64_t column, Vec (&out)[EACH]) const {
        const int8_t* from = rows + token * half + column;
        if constexpr (EACH == 1)
            out[0] = codes8(from);
        else
            codes4(from, out[0], out[1]);
    }
};

// Codes of one token -> floats, one at a time: rows that are no whole number of vectors.
void unpack_row(const Rows& rows, const int8_t* codes, float* out) {
    if (rows.bits == 8) {
        for (int64_t d = 0; d < rows.head_dim; d++) out[d] = codes[d];
    } else {
        for (int64_t d = 0; d < rows.bytes; d++) out[d] = (codes[d] & 15) - 8;
        for (int64_t d = rows.bytes; d < rows.head_dim; d++) out[d] = codes[d - rows.bytes] >> 4;
    }
}

template <class Source>
void unpack_rows(const Source& source, int64_t tokens, int64_t width, float* tile) {
    for (int64_t t = 0; t < tokens; t++) {
        source.ask_ahead(t, 1);
        for (int64_t d = 0; d < source.half; d += LANES) {
            Vec x[Source::EACH];
            source.get(t, d, x);
            for (int i = 0; i < Source::EACH; i++) store(tile + t * width + i * source.half + d, x[i]);
        }
    }
}

// Tokens start .. -> floats [tokens, width]. `by`: room for a row of scales, where they are to be multiplied; or null.
void unpack(const Rows& rows, bool whole, int64_t start, int64_t tokens, int64_t width, float* by, float* tile) {
    const int8_t* codes = rows.codes + start * rows.bytes;
    if (!rows.codes) {
        for (int64_t t = 0; t < tokens; t++)
            widen(rows.floats, rows.type, (start + t) * rows.head_dim, rows.head_dim, tile + t * width);
    } else if (whole) {
        if (rows.bits == 8)
            unpack_rows(Codes<1>{codes, rows.bytes}, tokens, width, tile);
        else
            unpack_rows(Codes<2>{codes, rows.bytes}, tokens, width, tile);
    } else {
        for (int64_t t = 0; t < tokens; t++) unpack_row(rows, codes + t * rows.bytes, tile + t * width);
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = rows.head_dim; d < width; d++) tile[t * width + d] = 0;
    if (!by) return;
    for (int64_t t = 0; t < tokens; t++) {
        if (t == 0 || (start + t) % rows.tokens_each == 0) rows.channel_scales((start + t) / rows.tokens_each, by);
        for (int64_t d = 0; d < rows.head_dim; d++) tile[t * width + d] *= by[d];
    }
}

}  // namespace
