// Codes widened to 16 bits, and numbers of 16 bits: what the path for AVX-512 with VNNI is made of.
#pragma once
#include "avx512.h"

#include "attention_rows.h"

namespace {

typedef long long Bytes __attribute__((vector_size(64)));  // not __m512i, arrays of which GCC keeps in memory
typedef int32_t Sums __attribute__((vector_size(64)));

// sum + a * b of the low halves of each lane + of the high halves.
INLINE Sums dot(Sums sum, Bytes a, Bytes b) { return (Sums)_mm512_dpwssd_epi32((Bytes)sum, a, b); }
INLINE Bytes whole(Vec x) { return (Bytes)_mm512_cvtps_epi32(x); }
INLINE Sums magnitude(Vec x) { return (Sums)_mm512_abs_ps(x); }
INLINE Vec floats(Sums x) { return _mm512_cvtepi32_ps((Bytes)x); }
INLINE Bytes load_bytes(const void* from) { return _mm512_loadu_si512(from); }
INLINE Sums everywhere(int32_t x) { return (Sums)_mm512_set1_epi32(x); }
INLINE Bytes everywhere(const int16_t* two) {
    int32_t both;
    memcpy(&both, two, sizeof both);
    return (Bytes)everywhere(both);
}
// So many of a mask's 64, 32 or 16 bits, from none to all of them.
INLINE uint64_t first_of(int64_t many) { return many <= 0 ? 0 : many >= 64 ? ~0ull : (1ull << many) - 1; }

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
// Of the result of `fold`, whose quarters are alike: one of its lanes everywhere.
template <int LANE>
INLINE Vec of_four(Vec x) {
    return _mm512_permute_ps(x, LANE * 0x55);
}
// a's and b's whole numbers as 16 bits each; of every four the first, the third, the second and the fourth, as `dot` is
// to have them beside the bytes of a lane.
INLINE Bytes packed(Bytes a, Bytes b) {
    const Bytes all = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(a, b));
    return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(all, 0xd8), 0xd8);
}

INLINE void store_packed(int16_t* to, Bytes x) { _mm512_storeu_si512(to, x); }
INLINE Bytes some(int64_t many, int16_t number) {
    return _mm512_maskz_set1_epi16(static_cast<__mmask32>(first_of(many)), number);
}

// So many rows; where fewer are left, a copy of those, with anything behind.
template <int MANY>
struct Whole {
    int8_t copy[MANY * MOST_CHANNELS];
    INLINE const int8_t* at(const int8_t* rows, int64_t left, int64_t bytes) {
        return left >= MANY ? rows : static_cast<const int8_t*>(memcpy(copy, rows, left * bytes));
    }
};

// Rows of codes, each of BYTES, or of any number where that is 0. Of four bytes in a lane, codes are widened in pairs,
// as `dot` takes them: pair 0 is of bytes 0 and 2, pair 1 of bytes 1 and 3; of 4 bits these are the low halves, and the
// high ones are pairs 2 and 3. Low halves are larger by 8.
template <int BITS, int BYTES>
struct Blocks {
    static constexpr bool FOUR = BITS == 4;
    static constexpr int PAIRS = FOUR ? 4 : 2, STEP = FOUR ? 8 : 4;
    static constexpr int RUN = FOUR ? 32 : 64;  // bytes of values that are multiplied together: 64 channels,
    static constexpr int EACH = 2;              // in two parts that may have weights of their own
    const int8_t* rows;
    int64_t bytes, half;  // of a row
    int64_t row_bytes() const { return BYTES ? BYTES : bytes; }
    static constexpr int64_t least_run() { return RUN; }
    int64_t channel(int64_t first, int part) const { return first + part * (FOUR ? bytes : 32); }

    template <int PAIR>
    static INLINE Bytes pair(Bytes x) {
        if constexpr (!FOUR)
            return _mm512_srai_epi16(PAIR ? x : _mm512_slli_epi16(x, 8), 8);
        else if constexpr (PAIR < 2)
            return (PAIR ? _mm512_srli_epi16(x, 8) : x) & _mm512_set1_epi16(15);
        else
            return _mm512_srai_epi16(PAIR == 3 ? x : _mm512_slli_epi16(x, 8), 12);
    }

    // 16 bytes of the keys of 16 tokens: in lane t of out[j] bytes 4 j .. + 3 of token t.
    INLINE void keys(const int8_t* row, Bytes (&out)[4]) const {
        Bytes x[4];
        repeat<4>([&](auto q) INLINED {
            repeat<4>([&](auto i) INLINED {
                const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i * row_bytes()));
                x[i] = q == 0 ? (Bytes)_mm512_castsi128_si512(quarter)
                              : (Bytes)_mm512_mask_broadcast_i32x4(x[i], 0xf << 4 * q, quarter);
            });
            row += 4 * row_bytes();
            // One address after the other, in place of sixteen that registers have no room for.
            if (!BYTES) asm("" : "+r"(row));
        });
        const Bytes ab = _mm512_unpacklo_epi32(x[0], x[1]), ab_high = _mm512_unpackhi_epi32(x[0], x[1]);
        const Bytes cd = _mm512_unpacklo_epi32(x[2], x[3]), cd_high = _mm512_unpackhi_epi32(x[2], x[3]);
        out[0] = _mm512_unpacklo_epi64(ab, cd), out[1] = _mm512_unpackhi_epi64(ab, cd);
        out[2] = _mm512_unpacklo_epi64(ab_high, cd_high), out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }

    // Values of STEP tokens, the 64 channels of the run from byte `first`. Of 8 bits: in quarter q of out[i] lanes are
    // channels 16 q + 4 i .. of four tokens, one a byte. Of 4 bits: in quarter q of out[2 odd + i] they are bytes
    // 8 q + 4 i .. of tokens odd, 4 + odd, 2 + odd and 6 + odd. `in`: which bytes of the run a row has.
    INLINE void values(const int8_t* row, int64_t first, uint64_t in, Bytes (&out)[4]) const {
        Bytes x[4];
        row += first;
        repeat<4>([&](auto i) INLINED {
            if constexpr (!FOUR) {
                x[i] = _mm512_maskz_loadu_epi8(in, row + i * bytes);
            } else {
                const __mmask32 half = static_cast<__mmask32>(in);
                const Bytes two =
                    BYTES ? load_bytes(row)
                                : (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(half, row)),
                                                            _mm256_maskz_loadu_epi8(half, row + bytes), 1);
                constexpr int turn = i == 1 ? 2 : i == 2 ? 1 : int{i};
                x[turn] = _mm512_permutexvar_epi32(
                    _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), two);
                row += 2 * bytes;
            }
        });
        const Bytes ab = _mm512_unpacklo_epi8(x[0], x[1]), ab_high = _mm512_unpackhi_epi8(x[0], x[1]);
        const Bytes cd = _mm512_unpacklo_epi8(x[2], x[3]), cd_high = _mm512_unpackhi_epi8(x[2], x[3]);
        const Bytes a = _mm512_unpacklo_epi16(ab, cd), b = _mm512_unpackhi_epi16(ab, cd);
        const Bytes c = _mm512_unpacklo_epi16(ab_high, cd_high), d = _mm512_unpackhi_epi16(ab_high, cd_high);
        out[0] = a, out[FOUR ? 2 : 1] = b, out[FOUR ? 1 : 2] = c, out[3] = d;
    }
    // Those sums in the order of their channels: 32 of each part.
    static INLINE void in_order(Sums (&x)[4]) {
        const Bytes a = (Bytes)x[0], b = (Bytes)x[1], c = (Bytes)x[2], d = (Bytes)x[3];
        if constexpr (FOUR) {
            const Bytes low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = low + 4;
            x[0] = (Sums)_mm512_permutex2var_epi64(a, low, b), x[1] = (Sums)_mm512_permutex2var_epi64(a, high, b);
            x[2] = (Sums)_mm512_permutex2var_epi64(c, low, d), x[3] = (Sums)_mm512_permutex2var_epi64(c, high, d);
        } else {
            const Bytes ab = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
            const Bytes cd = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
            x[0] = (Sums)_mm512_shuffle_i32x4(ab, cd, 0x88), x[1] = (Sums)_mm512_shuffle_i32x4(ab, cd, 0xdd);
            x[2] = (Sums)_mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
            x[3] = (Sums)_mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
        }
    }
};

// Numbers of 16 bits are multiplied with such codes.
INLINE bool multiplies(const Rows& rows, Scales scales) {
    const int64_t each = rows.channels_each, run = rows.bits == 8 ? 64 : 32;
    const bool runs = each == 32 || (each % run == 0 && (rows.bits == 8 || rows.bytes % each == 0));
    return rows.head_dim % (rows.bits == 8 ? 16 : 32) == 0 &&
           (scales != Scales::factors || rows.channel_blocks == 1 || runs);
}
template <class F>
INLINE void with_codes(const Rows& rows, const int8_t* codes, const F& f) {
    if (rows.bits == 8)
        f(Blocks<8, 0>{codes, rows.bytes, rows.bytes});
    else if (rows.bytes == 32)
        f(Blocks<4, 32>{codes, rows.bytes, rows.bytes});
    else
        f(Blocks<4, 0>{codes, rows.bytes, rows.bytes});
}

}  // namespace

#include "numbers.h"
