// Codes as bytes, and numbers as bytes: what the path for AVX-512 with VNNI is made of.
#pragma once
#include "avx512.h"

#include "attention_rows.h"

namespace {

typedef long long Bytes __attribute__((vector_size(64)));  // not __m512i, arrays of which GCC keeps in memory
typedef int32_t Sums __attribute__((vector_size(64)));
constexpr int DIGITS = 2;        // bytes of a number, the lowest first
constexpr int BLOCK = 64;        // channels
constexpr float LEAST = 1e-30f;  // of a row's largest number: its inverse is finite
constexpr float SIGNED_TOP = 127 * 256 + 127, UNSIGNED_TOP = 65535;  // the largest numbers of two digits

INLINE Sums dot(Sums sum, Bytes unsigned_bytes, Bytes signed_bytes) {
    return (Sums)_mm512_dpbusd_epi32((Bytes)sum, unsigned_bytes, signed_bytes);
}
INLINE Vec floats(Sums x) { return _mm512_cvtepi32_ps((Bytes)x); }
INLINE Bytes load_bytes(const void* from) { return _mm512_loadu_si512(from); }
INLINE __m256i load_half(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

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

// Bits of what is not finite are above those of all other numbers without their sign, compared as whole numbers.
INLINE Sums larger(Sums a, Sums b) { return (Sums)_mm512_max_epi32((Bytes)a, (Bytes)b); }
// What has no finite inverse is taken for a little that has.
INLINE Vec finite_or_nan(Sums x) {
    const Vec largest = (Vec)larger(x, (Sums)fill(LEAST));
    return fma(largest, fill(0), largest);
}

// Bytes of four vectors of whole numbers that were packed twice.
INLINE Bytes in_order(Bytes x) {
    const Bytes order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, x);
}

// Of the result of `fold`, whose quarters are alike: one of its lanes everywhere, and its first lanes.
template <int LANE>
INLINE Vec of_four(Vec x) {
    return _mm512_permute_ps(x, LANE * 0x55);
}
template <int N, class T>
INLINE void store_four(void* to, T x) {
    _mm_mask_storeu_epi32(to, (1 << N) - 1, _mm512_castsi512_si128((Bytes)x));
}

// So many rows; where fewer are left, a copy of those, with anything behind.
template <int MANY>
struct Whole {
    int8_t copy[MANY * MOST_CHANNELS];
    INLINE const int8_t* at(const int8_t* rows, int64_t left, int64_t bytes) {
        return left >= MANY ? rows : static_cast<const int8_t*>(memcpy(copy, rows, left * bytes));
    }
};

// Rows of codes. Of 4 bits, they become the high halves of bytes: codes 16 times as large.
enum Kind { EIGHT_BITS, FOUR_BITS_OF_64, FOUR_BITS };

template <Kind KIND>
struct Blocks {
    static constexpr bool FOUR = KIND != EIGHT_BITS;
    static constexpr int RUN = FOUR ? 32 : BLOCK;  // channels of values that are multiplied together
    static constexpr int EACH = FOUR ? 1 : 2;      // parts of a run that may have weights of their own
    static constexpr float UNIT = FOUR ? 1.f / 16 : 1;
    const int8_t* rows;
    int64_t bytes, half;  // of a row, and its channels
    static constexpr int64_t least_run() { return RUN; }
    static constexpr int64_t channel(int64_t first, int part) { return first + part * BLOCK / 2; }

    // For a line of the second half of the next tile of values, as this one's token `t` comes; the first half is asked
    // for before, by the softmax.
    INLINE void ask(int64_t t, int64_t offset) const {
        __builtin_prefetch(rows + (TILE + TILE / 2 + t / 2) * bytes + offset);
    }

    // Codes of channels from 64 b, larger by 128. Of 64 channels of 4 bits, a row has the low and the high halves of 32
    // bytes; of more, a block is the low or the high halves of 64.
    INLINE Bytes get(const int8_t* row, int64_t b) const {
        const Bytes top = _mm512_set1_epi8(-128);
        if constexpr (!FOUR) return _mm512_xor_si512(load_bytes(row + b * BLOCK), top);
        Bytes x, high;  // codes of high halves are not larger by 8 yet, those of low halves are
        if constexpr (KIND == FOUR_BITS_OF_64) {
            const Bytes low = _mm512_zextsi256_si512(_mm256_set1_epi8(-1));
            x = _mm512_sllv_epi64(_mm512_broadcast_i64x4(load_half(row)), low & 4);
            high = ~low;
        } else {
            const bool above = b * BLOCK >= bytes;
            high = _mm512_set1_epi8(above ? -1 : 0);
            x = _mm512_sll_epi64(load_bytes(row + b * BLOCK - (above ? bytes : 0)), _mm_cvtsi32_si128(above ? 0 : 4));
        }
        return _mm512_ternarylogic_epi64(x, _mm512_set1_epi8(-16), high & top, 0x6a);  // (a & b) ^ c
    }

    // Block `b` of the keys of 16 tokens: in out[g][j] a lane is four channels of a token, in quarter i channels
    // 16 i + 4 j .. + 3 of tokens 4 g .. + 3. Asks for a block of later rows on the way.
    INLINE void keys(const int8_t* row, int64_t b, const int8_t* ask, Bytes (&out)[4][4]) const {
        constexpr int LINES = FOUR ? 2 : 4;  // that a block of four rows is
        repeat<4>([&](auto g) INLINED {
            repeat<LINES>([&](auto i) INLINED { __builtin_prefetch(ask + ((4 * b + g) * LINES + i) * 64); });
            const Bytes x = get(row, b), y = get(row + bytes, b);
            const Bytes z = get(row + 2 * bytes, b), w = get(row + 3 * bytes, b);
            const Bytes xy = _mm512_unpacklo_epi32(x, y), xy_high = _mm512_unpackhi_epi32(x, y);
            const Bytes zw = _mm512_unpacklo_epi32(z, w), zw_high = _mm512_unpackhi_epi32(z, w);
            out[g][0] = _mm512_unpacklo_epi64(xy, zw), out[g][1] = _mm512_unpackhi_epi64(xy, zw);
            out[g][2] = _mm512_unpacklo_epi64(xy_high, zw_high), out[g][3] = _mm512_unpackhi_epi64(xy_high, zw_high);
            row += 4 * bytes;
        });
    }
};

}  // namespace
