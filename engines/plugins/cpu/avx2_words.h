// Codes as whole numbers of 16 bits, multiplied with queries and weights of 16 bits (numbers.h), on AVX2.
//
// What binds it on a Zen 3, whose store comes from memory in 23 cycles a token (four query heads and a KV head of 64
// channels; scripts/cpu_peaks.cc): it takes 42. The 32 multiplications of 16 numbers start two a cycle. But each has an
// addition, and codes that are widened and brought beside their neighbours', and of the four operations that a cycle
// may start, 3 do: the output takes 18, with its weights' numbers. Of the logits' 17, five are the sums over a vector's
// lanes: to have tokens in lanes instead, as with VNNI, takes as many to turn the codes. The softmax takes 5.
#pragma once
#include "attention_rows.h"

namespace {

typedef long long Bytes __attribute__((vector_size(32)));
typedef int32_t Sums __attribute__((vector_size(32)));

INLINE Bytes load_bytes(const void* from) { return (Bytes)_mm256_loadu_si256(static_cast<const __m256i*>(from)); }
INLINE Sums everywhere(int32_t x) { return (Sums)_mm256_set1_epi32(x); }
INLINE Bytes everywhere(const int16_t* two) {
    int32_t both;
    memcpy(&both, two, sizeof both);
    return (Bytes)everywhere(both);
}
INLINE Bytes whole(Vec x) { return (Bytes)_mm256_cvtps_epi32(x); }
INLINE Vec floats(Sums x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE Sums magnitude(Vec x) { return (Sums)x & everywhere(0x7fffffff); }
INLINE Sums larger(Sums a, Sums b) { return (Sums)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE Sums products(Bytes a, Bytes b) { return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE Sums dot(Sums sum, Bytes a, Bytes b) { return sum + products(a, b); }

template <class T, class F>
INLINE T fold(const T (&x)[4], const F& f) {
    const auto low = [](T a, T b) INLINED { return (T)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); };
    const auto high = [](T a, T b) INLINED { return (T)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); };
    const __m256i ab = (__m256i)f(low(x[0], x[1]), high(x[0], x[1]));
    const __m256i cd = (__m256i)f(low(x[2], x[3]), high(x[2], x[3]));
    const T all = f((T)_mm256_unpacklo_epi64(ab, cd), (T)_mm256_unpackhi_epi64(ab, cd));
    return f(all, (T)_mm256_permute2x128_si256((__m256i)all, (__m256i)all, 1));
}
template <int LANE>
INLINE Vec of_four(Vec x) {
    return _mm256_permute_ps(x, LANE * 0x55);
}
INLINE Bytes packed(Bytes a, Bytes b) {
    return (Bytes)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0xd8);
}
INLINE void store_packed(int16_t* to, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)x); }
// Of 16, or of none.
INLINE Bytes some(int64_t many, int16_t number) {
    return (Bytes)_mm256_set1_epi16(many > 0 ? number : static_cast<int16_t>(0));
}

// [a, b] of sums of halves, [a, b] of the same of whole vectors.
INLINE Sums sums_of_halves(Sums a, Sums b) {
    return (Sums)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20) +
           (Sums)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31);
}
// T lanes for each of N rows.
template <int N, int T>
INLINE void store_rows(float* out, Vec x) {
    const __m128 half[2] = {_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)};
    repeat<N>([&](auto n) INLINED {
        float* const row = out + n * TILE;
        if constexpr (T == 8)
            store(row, x);
        else if constexpr (T == 4)
            _mm_storeu_ps(row, half[n]);
        else if constexpr (n % 2 == 0)
            _mm_storel_pi(reinterpret_cast<__m64*>(row), half[n / 2]);
        else
            _mm_storeh_pi(reinterpret_cast<__m64*>(row), half[n / 2]);
    });
}

INLINE Bytes words(const int8_t* from) {
    return (Bytes)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Rows of codes, 16 bytes of which are multiplied together: of 4 bits, their low halves and their high ones apart.
constexpr int RUN = 16;
template <int BITS>
struct Words : Codes<8 / BITS> {
    static constexpr int64_t least_run() { return RUN; }
    INLINE const int8_t* row(int64_t t) const { return this->rows + t * this->half; }

    // Of such words, or of two of them in a lane. Low halves are larger by 8.
    template <int PART>
    static INLINE Bytes part(Bytes x) {
        if constexpr (BITS == 8)
            return x;
        else
            return PART ? (Bytes)_mm256_srai_epi16((__m256i)x, 4) : x & (Bytes)_mm256_set1_epi16(15);
    }
};

INLINE bool multiplies(const Rows& rows, Scales scales) {
    const int64_t each = rows.channels_each;
    const bool runs = each % RUN == 0 && (rows.bits == 8 || rows.bytes % each == 0);
    return rows.bytes % RUN == 0 && rows.head_dim % (rows.bits == 8 ? RUN : 2 * RUN) == 0 &&
           (scales != Scales::factors || rows.channel_blocks == 1 || runs);
}
template <class F>
INLINE void with_codes(const Rows& rows, const int8_t* codes, const F& f) {
    if (rows.bits == 8)
        f(Words<8>{{codes, rows.bytes}});
    else
        f(Words<4>{{codes, rows.bytes}});
}

}  // namespace

#include "numbers.h"

namespace {

// Of N rows from `r` and T tokens at a time, whose sums are the lanes of one vector: T of the first row, of the next ...
template <int N, int BITS>
INLINE void row_logits(const Numbers& queries, int64_t r, const Words<BITS>& keys, int64_t first, int64_t last,
                       float* out) {
    constexpr int T = N > 2 ? 2 : LANES / N;
    const int16_t* const numbers = queries.numbers + r * STRIDE;
    float step[LANES];
    int32_t offset[LANES];
    for (int i = 0; i < LANES; i++) {
        const int64_t row = r + least(i / T, N - 1);
        step[i] = queries.step[row], offset[i] = queries.offset[row];
    }
    for (int64_t t = first; t < last; t += T) {
        if (r == 0) keys.ask_ahead(t, T);
        const int8_t* row[T];
        repeat<T>([&](auto i) INLINED { row[i] = keys.row(least(t + i, last - 1)); });
        Sums sum[LANES];
        const auto add = [&](int64_t d, auto more) INLINED {
            Bytes key[T];
            repeat<T>([&](auto i) INLINED { key[i] = words(row[i] + d); });
            repeat<Words<BITS>::EACH>([&](auto part) INLINED {
                Bytes codes[T];
                repeat<T>([&](auto i) INLINED { codes[i] = keys.template part<part>(key[i]); });
                repeat<N>([&](auto n) INLINED {
                    const Bytes query = load_bytes(numbers + n * STRIDE + part * keys.half + d);
                    repeat<T>([&](auto i) INLINED {
                        Sums& to = sum[n * T + i];
                        to = part || more ? dot(to, codes[i], query) : products(codes[i], query);
                    });
                });
            });
        };
        add(0, std::false_type{});
        for (int64_t d = RUN; d < keys.half; d += RUN) add(d, std::true_type{});
        repeat<LANES - N * T>([&](auto i) INLINED { sum[N * T + i] = sum[i]; });  // of no row
        const Sums all = sums_of_halves(of_halves(sum[0], sum[1], sum[2], sum[3]),
                                        of_halves(sum[4], sum[5], sum[6], sum[7]));
        const Vec logits = floats(BITS == 4 ? all - (Sums)load_bytes(offset) : all) * load(step);
        store_rows<N, T>(out + r * TILE + t, logits);
    }
}

template <int BITS>
INLINE void all_logits(const Numbers& queries, int64_t rows, const Words<BITS>& keys, int64_t first, int64_t last,
                       float* out) {
    in_passes<4>(rows, [&](auto n, int64_t r) INLINED { row_logits<n.value>(queries, r, keys, first, last, out); });
}

// output = output * shrink + weights @ values, of N rows and one half of K runs of codes from byte `first`.
template <int N, int K, int PART, int BITS>
INLINE void mix_runs(const Weights* weights, const Words<BITS>& values, int64_t tokens, int64_t first, bool ask,
                     const float* shrink, int64_t width, float* output) {
    Sums sum[N][K][2] = {};
    const int8_t* row = values.row(0) + first;
    const auto pair = [&](int64_t t, const int8_t* next) INLINED {
        repeat<K>([&](auto k) INLINED {
            const Bytes a = values.template part<PART>(words(row + k * RUN));
            const Bytes b = values.template part<PART>(words(next + k * RUN));
            const Bytes low = (Bytes)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
            const Bytes high = (Bytes)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
            repeat<N>([&](auto n) INLINED {
                const Bytes weight = everywhere(weights[n].numbers + t);
                sum[n][k][0] = dot(sum[n][k][0], low, weight);
                sum[n][k][1] = dot(sum[n][k][1], high, weight);
            });
        });
    };
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2, row += 2 * values.half) {
        if (ask) values.ask_ahead(t, 2);
        pair(t, row + values.half);
    }
    if (t < tokens) pair(t, row);  // the weight of a second is 0
    repeat<N>([&](auto n) INLINED {
        repeat<K>([&](auto k) INLINED {
            repeat<2>([&](auto half) INLINED {
                Sums all = (Sums)_mm256_permute2x128_si256((__m256i)sum[n][k][0], (__m256i)sum[n][k][1],
                                                           half ? 0x31 : 0x20);
                if (BITS == 4 && PART == 0) all -= everywhere(weights[n].offset);
                float* const to = output + n * width + values.channel(first, PART) + k * RUN + half * LANES;
                store(to, fma(load(to), fill(shrink[n]), floats(all) * fill(weights[n].step)));
            });
        });
    });
}

template <int BITS>
INLINE void mix_all(const float* weights, bool, const float* const (&by)[2], float* const (&room)[2], int64_t rows,
                    const Words<BITS>& values, int64_t tokens, int64_t first, int64_t last, const float* shrink,
                    int64_t width, float* output) {
    Weights* numbers[2];
    set_all(weights, by, room, rows, numbers);
    in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
        in_passes<4 / n.value>((last - first) / RUN, [&](auto k, int64_t run) INLINED {
            repeat<Words<BITS>::EACH>([&](auto part) INLINED {
                const bool ask = r == 0 && part == 0 && first + run == 0;
                mix_runs<n.value, k.value, part.value>(numbers[part] + r, values, tokens, first + run * RUN, ask,
                                                       shrink + r, width, output + r * width);
            });
        });
    });
}

}  // namespace
