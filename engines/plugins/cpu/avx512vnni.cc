// The path for AVX-512 with VNNI: codes of whole blocks of 64 channels are multiplied as the bytes that they are.
//
// Queries and weights become whole numbers of 24 bits, as exact as floats of the largest among them, in three bytes
// each: four products of a byte and a code are one instruction, and a code is never turned into a float. The four codes
// in a lane are four channels of a token for the logits, and four tokens of a channel for the output.
#if defined(__x86_64__)
#include "avx512.h"

#include "attention_rows.h"

namespace {

typedef __m512i Bytes;
typedef int32_t Sums __attribute__((vector_size(64)));          // not __m512i, arrays of which GCC keeps in memory
constexpr int DIGITS = 3;                                       // bytes of a number, the lowest first
constexpr int BLOCK = 64;                                       // channels
constexpr float LEAST = 1e-30f;                                 // of a row's largest number: its inverse is finite
constexpr float SIGNED_TOP = 8323000, UNSIGNED_TOP = 16777000;  // a little less than fits, for the rounding

INLINE Sums dot(Sums sum, Bytes unsigned_bytes, Bytes signed_bytes) {
    return (Sums)_mm512_dpbusd_epi32((Bytes)sum, unsigned_bytes, signed_bytes);
}
INLINE Vec floats(Sums x) { return _mm512_cvtepi32_ps((Bytes)x); }
INLINE Vec value_of(Sums low, Sums middle, Sums high) {
    return fma(fma(floats(high), fill(256), floats(middle)), fill(256), floats(low));
}
INLINE Bytes load_bytes(const void* from) { return _mm512_loadu_si512(from); }
// The lowest byte of every lane.
INLINE void store16(void* to, Sums lanes) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8((Bytes)lanes));
}

// Rows of codes, a block of channels at a time. Of 4 bits, 64 channels are the low and the high halves of 32 bytes; of
// more, a block is the low or the high halves of 64.
enum Kind { EIGHT_BITS, FOUR_BITS_OF_64, FOUR_BITS };

template <Kind KIND>
struct Blocks {
    static constexpr int EACH = 2;  // halves of a block: they may have weights of their own
    static constexpr int OFFSET = KIND == EIGHT_BITS ? 128 : 8;
    const int8_t* rows;
    int64_t bytes, half;  // of a row, and its channels
    static constexpr int64_t least_run() { return BLOCK; }
    static constexpr int64_t channel(int64_t first, int part) { return first + part * BLOCK / 2; }

    // Codes of channels from 64 b, larger by OFFSET, so that they are unsigned.
    INLINE Bytes get(const int8_t* row, int64_t b) const {
        if constexpr (KIND == EIGHT_BITS) return _mm512_xor_si512(load_bytes(row + b * BLOCK), _mm512_set1_epi8(-128));
        const Bytes nibble = _mm512_set1_epi8(15);
        if constexpr (KIND == FOUR_BITS_OF_64) {
            const Bytes both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
            const Bytes high = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(-1), 1);
            const Bytes x = _mm512_srlv_epi64(both, _mm512_and_si512(high, _mm512_set1_epi64(4)));
            return _mm512_xor_si512(_mm512_and_si512(x, nibble), _mm512_and_si512(high, _mm512_set1_epi8(8)));
        }
        const bool high = b * BLOCK >= bytes;
        const Bytes x =
            _mm512_srl_epi64(load_bytes(row + (b * BLOCK - (high ? bytes : 0))), _mm_cvtsi32_si128(high ? 4 : 0));
        return _mm512_xor_si512(_mm512_and_si512(x, nibble), _mm512_set1_epi8(high ? 8 : 0));
    }
};

// Lane i of the result: all lanes of x[i] put together.
template <class T, class F>
INLINE T fold(const T (&x)[4], const F& f) {
    const auto low = [](T a, T b) INLINED { return (T)_mm512_unpacklo_epi32((Bytes)a, (Bytes)b); };
    const auto high = [](T a, T b) INLINED { return (T)_mm512_unpackhi_epi32((Bytes)a, (Bytes)b); };
    const Bytes ab = (Bytes)f(low(x[0], x[1]), high(x[0], x[1])), cd = (Bytes)f(low(x[2], x[3]), high(x[2], x[3]));
    T all = f((T)_mm512_unpacklo_epi64(ab, cd), (T)_mm512_unpackhi_epi64(ab, cd));
    all = f(all, (T)_mm512_shuffle_i32x4((Bytes)all, (Bytes)all, 0x4e));
    return f(all, (T)_mm512_shuffle_i32x4((Bytes)all, (Bytes)all, 0xb1));
}

// The largest of each row in a lane, without its sign; NaN for a row with a number that is not finite: bits of such are
// above those of all others, compared as whole numbers.
INLINE Vec largest_of(const float* rows, int64_t many, int64_t width, int64_t numbers) {
    const auto larger = [](Sums a, Sums b) INLINED { return (Sums)_mm512_max_epi32((Bytes)a, (Bytes)b); };
    Sums most[4];
    for (int64_t r = 0; r < 4; r++) {
        most[r] = (Sums)fill(LEAST);
        for (int64_t i = 0; r < many && i < numbers; i += LANES)
            most[r] = larger(most[r], (Sums)_mm512_abs_ps(load(rows + r * width + i)));
    }
    const Vec largest = (Vec)fold<Sums>(most, larger);
    return fma(largest, fill(0), largest);
}

// So many rows; where fewer are left, a copy of those, with anything behind.
template <int MANY>
struct Whole {
    int8_t copy[MANY * MOST_CHANNELS];
    INLINE const int8_t* at(const int8_t* rows, int64_t left, int64_t bytes) {
        return left >= MANY ? rows : static_cast<const int8_t*>(memcpy(copy, rows, left * bytes));
    }
};

// Query rows, also as signed digits.
struct Digits : Queries {
    static constexpr bool SIGNED_WEIGHTS = false;
    int8_t* bytes;  // [rows, DIGITS, width]
    float* step;    // [rows]
    int32_t* sums;  // [rows, DIGITS]

    static int64_t room(int64_t rows, int64_t width) { return rows * (width + 4); }
    Digits(float* memory, int64_t rows, int64_t width)
        : Queries(nullptr, rows, width),
          bytes(reinterpret_cast<int8_t*>(memory)),
          step(memory + rows * width),
          sums(reinterpret_cast<int32_t*>(step + rows)) {}

    template <class F>
    static void with_blocks(const Rows& rows, int64_t start, const F& f) {
        const int8_t* codes = rows.codes + start * rows.bytes;
        if (rows.bits == 8)
            f(Blocks<EIGHT_BITS>{codes, rows.bytes, rows.head_dim});
        else if (rows.head_dim == BLOCK)
            f(Blocks<FOUR_BITS_OF_64>{codes, rows.bytes, rows.head_dim});
        else
            f(Blocks<FOUR_BITS>{codes, rows.bytes, rows.head_dim});
    }
    static bool takes(const Rows& rows, Scales scales) {
        if (!rows.codes || scales == Scales::unpacked || rows.head_dim > MOST_CHANNELS) return false;
        // Digits of a query that are of use for a few tokens only take longer than they save.
        if (scales == Scales::folded && rows.token_blocks > 1 && rows.tokens_each < TILE) return false;
        const bool whole = rows.head_dim == BLOCK || rows.head_dim % (rows.bits == 8 ? BLOCK : 2 * BLOCK) == 0;
        const int64_t each = rows.channels_each;
        return whole &&
               (scales != Scales::factors || rows.channel_blocks == 1 || each == BLOCK / 2 || each % BLOCK == 0);
    }

    // Four rows at a time, so that what is one number a row takes as many steps as one row would.
    void set(const float* queries, int64_t count, bool taken) {
        rows = queries;
        if (!taken) return;
        for (int64_t first = 0; first < count; first += 4) {
            const int64_t some = least(4, count - first);
            float largest[LANES], inverse[LANES];
            const Vec tops = largest_of(queries + first * width, some, width, width);
            store(largest, tops * fill(1 / SIGNED_TOP)), store(inverse, fill(SIGNED_TOP) / tops);
            Sums sum[DIGITS][4] = {};
            for (int64_t r = 0; r < some; r++) {
                const float* row = queries + (first + r) * width;
                int8_t *low = bytes + (first + r) * DIGITS * width, *middle = low + width, *high = middle + width;
                Sums of_all = {}, of_above = {}, of_top = {};
                for (int64_t d = 0; d < width; d += LANES) {
                    const Sums all = (Sums)_mm512_cvtps_epi32(load(row + d) * fill(inverse[r]));
                    const Sums above = (all + 128) >> 8, top = (above + 128) >> 8;  // each digit is from -128 to 127
                    store16(low + d, all), store16(middle + d, above), store16(high + d, top);
                    of_all += all, of_above += above, of_top += top;
                }
                sum[0][r] = of_all - (of_above << 8), sum[1][r] = of_above - (of_top << 8), sum[2][r] = of_top;
                step[first + r] = largest[r];
            }
            for (int k = 0; k < DIGITS; k++) {
                const Sums of_rows = fold<Sums>(sum[k], [](Sums a, Sums b) INLINED { return a + b; });
                for (int64_t r = 0; r < some; r++) sums[(first + r) * DIGITS + k] = of_rows[r];
            }
        }
    }
};

INLINE Bytes everywhere(const void* four) {
    int32_t bits;
    memcpy(&bits, four, sizeof bits);
    return _mm512_set1_epi32(bits);
}

// Quarters of four vectors, transposed.
INLINE void transpose_quarters(const Bytes (&x)[4], Bytes (&out)[4]) {
    const Bytes ab = _mm512_shuffle_i32x4(x[0], x[1], 0x44), ab_high = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    const Bytes cd = _mm512_shuffle_i32x4(x[2], x[3], 0x44), cd_high = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    out[0] = _mm512_shuffle_i32x4(ab, cd, 0x88), out[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
    out[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88), out[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// Block `b` of 16 tokens' keys, transposed: [i] is four channels, a lane a token.
template <Kind KIND>
INLINE void by_token(const Blocks<KIND>& keys, const int8_t* rows, int64_t b, Bytes* out) {
    Bytes dwords[4][4];  // [j][group]: of four tokens the dwords 4 i + j, for a quarter i
    repeat<4>([&](auto group) INLINED {
        const int8_t* first = rows + 4 * group * keys.bytes;
        const Bytes x = keys.get(first, b), y = keys.get(first + keys.bytes, b);
        const Bytes z = keys.get(first + 2 * keys.bytes, b), w = keys.get(first + 3 * keys.bytes, b);
        const Bytes xy = _mm512_unpacklo_epi32(x, y), xy_high = _mm512_unpackhi_epi32(x, y);
        const Bytes zw = _mm512_unpacklo_epi32(z, w), zw_high = _mm512_unpackhi_epi32(z, w);
        dwords[0][group] = _mm512_unpacklo_epi64(xy, zw), dwords[1][group] = _mm512_unpackhi_epi64(xy, zw);
        dwords[2][group] = _mm512_unpacklo_epi64(xy_high, zw_high),
        dwords[3][group] = _mm512_unpackhi_epi64(xy_high, zw_high);
    });
    repeat<4>([&](auto j) INLINED {
        Bytes of_tokens[4];
        transpose_quarters(dwords[j], of_tokens);
        repeat<4>([&](auto i) INLINED { out[4 * i + j] = of_tokens[i]; });
    });
}

// Logits of N query rows and 32 keys, of which those from `in_tile` on are not kept.
template <int N>
INLINE void multiply(const Digits& queries, int64_t row, const Bytes (&keys)[2][MOST_CHANNELS / 4], int offset,
                     int64_t in_tile, float* out) {
    const int64_t width = queries.width;
    const int8_t* digits = queries.bytes + row * DIGITS * width;
    Sums sum[N][DIGITS][2];
    repeat<N>([&](auto n) INLINED {
        repeat<DIGITS>([&](auto k) INLINED {
            sum[n][k][0] = sum[n][k][1] = Sums{} - offset * queries.sums[(row + n) * DIGITS + k];
        });
    });
    for (int64_t i = 0; i < width / 4; i++) {
        const Bytes first = keys[0][i], second = keys[1][i];
        repeat<N>([&](auto n) INLINED {
            repeat<DIGITS>([&](auto k) INLINED {
                const Bytes query = everywhere(digits + (n * DIGITS + k) * width + 4 * i);
                sum[n][k][0] = dot(sum[n][k][0], first, query);
                sum[n][k][1] = dot(sum[n][k][1], second, query);
            });
        });
    }
    repeat<N>([&](auto n) INLINED {
        repeat<2>([&](auto g) INLINED {
            if (16 * g < in_tile)  // a run of tokens may start at any 16: what is behind the tile is another row's
                store(out + n * TILE + 16 * g,
                      value_of(sum[n][0][g], sum[n][1][g], sum[n][2][g]) * fill(queries.step[row + n]));
        });
    });
}

template <int N, Kind KIND>
INLINE void logits(const Digits& queries, int64_t row, const Blocks<KIND>& keys, int64_t first, int64_t last,
                   float* out) {
    Whole<32> whole;
    for (int64_t t = first; t < last; t += 32) {
        const int8_t* rows = whole.at(keys.rows + t * keys.bytes, last - t, keys.bytes);
        if (row == 0) ask_ahead(keys.rows + t * keys.bytes, 32, keys.bytes);
        Bytes of_tokens[2][MOST_CHANNELS / 4];
        for (int64_t b = 0; b < queries.width / BLOCK; b++) {
            by_token(keys, rows, b, of_tokens[0] + b * 16);
            by_token(keys, rows + 16 * keys.bytes, b, of_tokens[1] + b * 16);
        }
        multiply<N>(queries, row, of_tokens, keys.OFFSET, TILE - t, out + t);
    }
}

// N rows of weights as unsigned digits, each of its own step: one scale of a store, be it of a masked token, leaves the
// others as exact as they were.
template <int N>
struct Weights {
    uint8_t digits[N][DIGITS][TILE];
    float step[LANES], total[N];  // of all weights of a row, as they are in digits

    INLINE void set(const float* weights) {
        float inverses[LANES];
        const Vec tops = largest_of(weights, N, TILE, TILE);
        store(step, tops * fill(1 / UNSIGNED_TOP)), store(inverses, fill(UNSIGNED_TOP) / tops);
        for (int n = 0; n < N; n++, weights += TILE) {
            const Vec inverse = fill(inverses[n]);
            Sums sum = {};
            for (int64_t t = 0; t < TILE; t += LANES) {
                const Sums all = (Sums)_mm512_cvtps_epi32(load(weights + t) * inverse);
                store16(digits[n][0] + t, all), store16(digits[n][1] + t, all >> 8),
                    store16(digits[n][2] + t, all >> 16);
                sum += all;
            }
            total[n] = _mm512_reduce_add_ps(floats(sum)) * step[n];
        }
    }
};

// output = output * shrink + weights @ values, for rows ROW .. ROW + N - 1 of the weights and a block of channels.
// SAME: its halves have the same weights.
template <int N, int ROW, bool SAME, int ROWS_OF, Kind KIND>
INLINE void mix_block(const Weights<ROWS_OF> (&weights)[2], const Blocks<KIND>& values, int64_t tokens, int64_t b,
                      const float* shrink, int64_t width, float* output) {
    Sums sum[N][DIGITS][4] = {};
    Whole<4> four;
    // Codes of 8 bits as they are; those of 4 bits 8 too large, which the result makes up for.
    const auto codes = [&](const int8_t* row) INLINED {
        const Bytes code = values.get(row, b);
        return KIND == EIGHT_BITS ? _mm512_xor_si512(code, _mm512_set1_epi8(-128)) : code;
    };
    for (int64_t t = 0; t < tokens; t += 4) {
        const int8_t* rows = four.at(values.rows + t * values.bytes, tokens - t, values.bytes);
        if (ROW == 0 && b == 0) ask_ahead(values.rows + t * values.bytes, 4, values.bytes);
        const Bytes x = codes(rows), y = codes(rows + values.bytes);
        const Bytes z = codes(rows + 2 * values.bytes), w = codes(rows + 3 * values.bytes);
        const Bytes xy = _mm512_unpacklo_epi8(x, y), xy_high = _mm512_unpackhi_epi8(x, y);
        const Bytes zw = _mm512_unpacklo_epi8(z, w), zw_high = _mm512_unpackhi_epi8(z, w);
        // [j]: of quarter i, channels 16 i + 4 j .. + 3, a lane each.
        const Bytes value[4] = {_mm512_unpacklo_epi16(xy, zw), _mm512_unpackhi_epi16(xy, zw),
                                _mm512_unpacklo_epi16(xy_high, zw_high), _mm512_unpackhi_epi16(xy_high, zw_high)};
        repeat<N>([&](auto n) INLINED {
            repeat<DIGITS>([&](auto k) INLINED {
                Bytes weight = everywhere(weights[0].digits[ROW + n][k] + t);
                if constexpr (!SAME)
                    weight = _mm512_mask_blend_epi32(0xff00, weight, everywhere(weights[1].digits[ROW + n][k] + t));
                repeat<4>([&](auto j) INLINED { sum[n][k][j] = dot(sum[n][k][j], weight, value[j]); });
            });
        });
    }
    repeat<N>([&](auto n) INLINED {
        Bytes x[4], in_order[4];
        const Weights<ROWS_OF>&low = weights[0], &high = weights[SAME ? 0 : 1];
        const Vec step = _mm512_mask_blend_ps(0xff00, fill(low.step[ROW + n]), fill(high.step[ROW + n]));
        const Vec total = _mm512_mask_blend_ps(0xff00, fill(low.total[ROW + n]), fill(high.total[ROW + n]));
        repeat<4>([&](auto j) INLINED {
            const Vec value = value_of(sum[n][0][j], sum[n][1][j], sum[n][2][j]) * step;
            x[j] = (Bytes)(KIND == EIGHT_BITS ? value : value - total * fill(values.OFFSET));
        });
        transpose_quarters(x, in_order);
        repeat<4>([&](auto j) INLINED {
            float* to = output + (ROW + n) * width + b * BLOCK + j * LANES;
            store(to, fma(load(to), fill(shrink[ROW + n]), (Vec)in_order[j]));
        });
    });
}

template <int N, Kind KIND>
INLINE void mix_columns(const float* const (&of)[2], const Blocks<KIND>& values, int64_t tokens, int64_t first,
                        int64_t last, const float* shrink, int64_t width, float* output) {
    Weights<N> weights[2];
    weights[0].set(of[0]);
    if (of[0] != of[1]) weights[1].set(of[1]);
    for (int64_t b = first / BLOCK; b < last / BLOCK; b++)
        repeat<(N + 1) / 2>([&](auto half) INLINED {  // two rows are as many sums as there are registers for
            constexpr int ROW = 2 * half, SOME = N - ROW < 2 ? N - ROW : 2;
            if (of[0] == of[1])
                mix_block<SOME, ROW, true>(weights, values, tokens, b, shrink, width, output);
            else
                mix_block<SOME, ROW, false>(weights, values, tokens, b, shrink, width, output);
        });
}

}  // namespace

#include "attention_path.h"

const unicache::Path unicache::avx512vnni = {attend<Digits>, finish};
#endif
