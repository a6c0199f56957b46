// The path for AVX-512 with VNNI: codes are multiplied as the bytes that they are, four at a time in each lane, and
// never become floats.
//
// Queries, times their keys' scales, and weights, times their values', become whole numbers of DIGITS bytes, of which
// the largest of a row is the largest there is: of 16 bits, signed and unsigned. So a logit is off by at most 2^-16 of
// the row's largest number times the sum of the token's codes, and a tile's part of the output by 2^-17 of the tile's
// largest weight times the sum of its codes: less than 1 / 100 of what the codes' own rounding to 8 bits may take.
// tests/engines/attention_inputs.py states it (`rounding`).
//
// What binds it: two digits of the queries and two of the weights are 16 dpbusd for 64 channels of a token and four
// rows, 8 cycles where two start in one. Of a tile in the first-level cache a Zen 5 takes, in cycles a token: logits
// 6.4, the softmax 1.8, digits of the weights 1.1, the output 4.4; for 4 bits with a scale for every 32 tokens of a key
// and 32 channels of a value, digits of the queries 4.3 and of the weights 2.2. So 4 bits take longer than 8 with four
// rows, and less time with one, where reading binds.
#if defined(__x86_64__)
#include "vnni.h"

namespace {

// Query rows, also as signed digits.
struct Digits : Queries {
    static constexpr bool SIGNED_WEIGHTS = false;
    Bytes* digits;        // [rows, blocks, DIGITS, 4]: in quarter i of the j-th channels 16 i + 4 j .. + 3, four times
    float* step;          // [rows]
    int32_t* offset;      // [rows]: what a product with codes larger by 128 has too much
    int64_t blocks;
    Sums (*products)[4];  // [rows]: of the blocks so far

    static int64_t room(int64_t rows, int64_t width) { return rows * (3 * width + 66); }
    Digits(float* memory, int64_t rows, int64_t width)
        : Queries(memory, rows, width),
          digits(reinterpret_cast<Bytes*>(memory + rows * width)),
          step(memory + rows * (3 * width + 64)),
          offset(reinterpret_cast<int32_t*>(step + rows)),
          blocks(width / BLOCK),
          products(reinterpret_cast<Sums(*)[4]>(memory + 3 * rows * width)) {}
    INLINE Bytes* of(int64_t row, int64_t block) const { return digits + (row * blocks + block) * DIGITS * 4; }

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
        const bool whole = rows.head_dim == BLOCK || rows.head_dim % (rows.bits == 8 ? BLOCK : 2 * BLOCK) == 0;
        const int64_t each = rows.channels_each;
        return whole &&
               (scales != Scales::factors || rows.channel_blocks == 1 || each == BLOCK / 2 || each % BLOCK == 0);
    }

    // Four rows at a time, so that what is one number a row takes as many steps as one row would.
    void set(const float* queries, const float* by, int64_t count, bool taken) {
        if (!taken) return Queries::set(queries, by, count, taken);
        in_passes<4>(count, [&](auto n, int64_t first) {
            constexpr int N = n.value;
            const float* const row = queries + first * width;
            const auto scaled = [&](int64_t r, int64_t d) INLINED {
                return by ? load(row + r * width + d) * load(by + d) : load(row + r * width + d);
            };
            Sums most[4] = {}, of_rows[4] = {};
            for (int64_t d = 0; d < width; d += LANES)
                repeat<N>([&](auto r) INLINED { most[r] = larger(most[r], (Sums)_mm512_abs_ps(scaled(r, d))); });
            const Vec tops = finite_or_nan(fold<Sums>(most, larger)), inverse = fill(SIGNED_TOP) / tops;
            const Bytes one = _mm512_set1_epi16(1), half = _mm512_set1_epi16(128), even = _mm512_set1_epi16(255);
            for (int64_t b = 0; b < blocks; b++)
                repeat<N>([&](auto r) INLINED {
                    Bytes x[4];
                    repeat<4>([&](auto i) INLINED {
                        x[i] = _mm512_cvtps_epi32(scaled(r, b * BLOCK + i * LANES) * of_four<r>(inverse));
                    });
                    const Bytes ab = _mm512_packs_epi32(x[0], x[1]), cd = _mm512_packs_epi32(x[2], x[3]);
                    of_rows[r] = (Sums)_mm512_dpwssd_epi32(_mm512_dpwssd_epi32((Bytes)of_rows[r], ab, one), cd, one);
                    // Each digit is from -128 to 127.
                    const auto above = [&](Bytes y) INLINED { return _mm512_srai_epi16(_mm512_add_epi16(y, half), 8); };
                    const Bytes low = in_order(_mm512_packus_epi16(ab & even, cd & even));
                    const Bytes high = in_order(_mm512_packs_epi16(above(ab), above(cd)));
                    Bytes* const to = of(first + r, b);
                    repeat<4>([&](auto j) INLINED {
                        constexpr auto dword = static_cast<_MM_PERM_ENUM>(j * 0x55);
                        to[j] = _mm512_shuffle_epi32(low, dword), to[4 + j] = _mm512_shuffle_epi32(high, dword);
                    });
                });
            const Sums sums = fold<Sums>(of_rows, [](Sums a, Sums b) INLINED { return a + b; });
            store_four<N>(step + first, tops * fill(1 / SIGNED_TOP));
            store_four<N>(offset + first, sums << 7);
        });
    }
};

// Quarters of a and b, neighbours added.
INLINE Sums pairs(Sums a, Sums b) {
    const Bytes even = _mm512_shuffle_i32x4((Bytes)a, (Bytes)b, 0x88);
    return (Sums)even + (Sums)_mm512_shuffle_i32x4((Bytes)a, (Bytes)b, 0xdd);
}

// The keys of 16 tokens stay in registers, and two rows of queries have as many sums as there are registers for.
template <Kind KIND>
INLINE void all_logits(const Digits& queries, int64_t rows, const Blocks<KIND>& keys, int64_t first, int64_t last,
                       float* out) {
    Whole<16> whole;
    for (int64_t t = first; t < last; t += 16) {
        const int8_t* const row = whole.at(keys.rows + t * keys.bytes, last - t, keys.bytes);
        for (int64_t b = 0; b < queries.blocks; b++) {
            Bytes key[4][4];
            keys.keys(row, b, keys.rows + (t + TILE) * keys.bytes, key);
            in_passes<2>(rows, [&](auto n, int64_t r) INLINED {
                constexpr int N = n.value;
                Sums sum[N][4] = {};
                const auto add_digit = [&](auto digit) INLINED {
                    repeat<4>([&](auto j) INLINED {
                        repeat<N>([&](auto i) INLINED {
                            const Bytes query = queries.of(r + i, b)[4 * digit + j];
                            repeat<4>([&](auto g) INLINED { sum[i][g] = dot(sum[i][g], key[g][j], query); });
                        });
                    });
                };
                add_digit(std::integral_constant<int, 1>{});
                repeat<N>([&](auto i) INLINED { repeat<4>([&](auto g) INLINED { sum[i][g] = sum[i][g] << 8; }); });
                add_digit(std::integral_constant<int, 0>{});
                repeat<N>([&](auto i) INLINED {
                    Sums* const before = queries.products[r + i];
                    if (b > 0) repeat<4>([&](auto g) INLINED { sum[i][g] += before[g]; });
                    if (b + 1 < queries.blocks) {
                        repeat<4>([&](auto g) INLINED { before[g] = sum[i][g]; });
                    } else {
                        const Sums all = pairs(pairs(sum[i][0], sum[i][1]), pairs(sum[i][2], sum[i][3]));
                        store(out + (r + i) * TILE + t,
                              floats(all - queries.offset[r + i]) * fill(queries.step[r + i] * keys.UNIT));
                    }
                });
            });
        }
    }
}

// A tile's weights as unsigned digits, each row of its own step: one scale of a store, be it of a masked token, leaves
// the others as exact as they were. The digits of four tokens, or for 4 bits of every other of eight, are neighbours.
struct Weights {
    uint8_t digits[DIGITS][TILE];
    float step;
};

// Of N rows of weights * by.
template <int N, bool FOUR>
INLINE void set(const float* weights, const float* by, Weights* out) {
    const auto scaled = [&](int64_t r, int64_t t) INLINED { return load(weights + r * TILE + t) * load(by + t); };
    Sums most[4] = {};
    repeat<N>([&](auto r) INLINED {
        repeat<TILE / LANES>([&](auto i) INLINED {
            most[r] = larger(most[r], (Sums)_mm512_abs_ps(scaled(r, i * LANES)));
        });
    });
    const Vec tops = finite_or_nan(fold<Sums>(most, larger)), inverse = fill(UNSIGNED_TOP) / tops;
    const Vec steps = tops * fill(1 / UNSIGNED_TOP);
    const Bytes even = _mm512_set1_epi16(255);
    repeat<N>([&](auto r) INLINED {
        out[r].step = steps[int{r}];
        repeat<TILE / 64>([&](auto run) INLINED {
            Bytes x[4];
            repeat<4>([&](auto i) INLINED {
                x[i] = _mm512_cvtps_epi32(scaled(r, 64 * run + i * LANES) * of_four<r>(inverse));
            });
            const Bytes ab = _mm512_packus_epi32(x[0], x[1]), cd = _mm512_packus_epi32(x[2], x[3]);
            const Bytes low = _mm512_packus_epi16(ab & even, cd & even);
            const Bytes high = _mm512_packus_epi16(_mm512_srli_epi16(ab, 8), _mm512_srli_epi16(cd, 8));
            repeat<DIGITS>([&](auto k) INLINED {
                const Bytes alternate = _mm512_set4_epi32(0x0f0d0b09, 0x0e0c0a08, 0x07050301, 0x06040200);
                const Bytes digits = in_order(k ? high : low);
                _mm512_storeu_si512(out[r].digits[k] + 64 * run,
                                    FOUR ? _mm512_shuffle_epi8(digits, alternate) : digits);
            });
        });
    });
}

INLINE Bytes everywhere(const uint8_t* from) {
    int32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

// output = output * shrink + x * step
INLINE void add(float* output, float shrink, Bytes x, float step) {
    store(output, fma(load(output), fill(shrink), floats((Sums)x) * fill(step)));
}

// output = output * shrink + weights @ values, for N rows and 64 channels from `first`. SAME: its halves have the same
// weights.
template <int N, bool SAME>
INLINE void mix_run(const Weights* const (&weights)[2], const Blocks<EIGHT_BITS>& values, int64_t tokens, int64_t first,
                    const float* shrink, int64_t width, float* output) {
    Sums all[N][4];
    repeat<2>([&](auto half) INLINED {  // of each quarter, the low or the high eight channels
        Sums sum[N][DIGITS][2] = {};
        Whole<4> four;
        for (int64_t t = 0; t < tokens; t += 4) {
            const int8_t* row = four.at(values.rows + t * values.bytes, tokens - t, values.bytes) + first;
            const Bytes x = load_bytes(row), y = load_bytes(row + values.bytes);
            const Bytes z = load_bytes(row + 2 * values.bytes), w = load_bytes(row + 3 * values.bytes);
            const Bytes xy = half ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
            const Bytes zw = half ? _mm512_unpackhi_epi8(z, w) : _mm512_unpacklo_epi8(z, w);
            const Bytes value[2] = {_mm512_unpacklo_epi16(xy, zw), _mm512_unpackhi_epi16(xy, zw)};
            values.ask(t, 2 * first + 64 * half);
            repeat<N>([&](auto n) INLINED {
                repeat<DIGITS>([&](auto k) INLINED {
                    Bytes weight = everywhere(weights[0][n].digits[k] + t);
                    if constexpr (!SAME)
                        weight = _mm512_mask_blend_epi32(0xff00, weight, everywhere(weights[1][n].digits[k] + t));
                    repeat<2>([&](auto j) INLINED { sum[n][k][j] = dot(sum[n][k][j], weight, value[j]); });
                });
            });
        }
        repeat<N>([&](auto n) INLINED {
            repeat<2>([&](auto j) INLINED { all[n][2 * half + j] = (sum[n][1][j] << 8) + sum[n][0][j]; });
        });
    });
    repeat<N>([&](auto n) INLINED {
        const Bytes a = (Bytes)all[n][0], b = (Bytes)all[n][1], c = (Bytes)all[n][2], d = (Bytes)all[n][3];
        const Bytes ab = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
        const Bytes cd = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
        float* const to = output + n * width + first;
        const float step = weights[0][n].step, step_high = weights[SAME ? 0 : 1][n].step;
        add(to, shrink[n], _mm512_shuffle_i32x4(ab, cd, 0x88), step);
        add(to + 16, shrink[n], _mm512_shuffle_i32x4(ab, cd, 0xdd), step);
        add(to + 32, shrink[n], _mm512_shuffle_i32x4(ab_high, cd_high, 0x88), step_high);
        add(to + 48, shrink[n], _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd), step_high);
    });
}

// The same of 32 channels of 4 bits, of which two rows are in a vector: even and odd tokens have their own.
template <int N, Kind KIND, bool HIGH>
INLINE void mix_half(const Weights* weights, const Blocks<KIND>& values, int64_t tokens, int64_t first,
                     const float* shrink, int64_t width, float* output) {
    Sums sum[N][DIGITS][2] = {};
    Whole<8> eight;
    const int64_t column = first - (HIGH ? values.bytes : 0);
    const Bytes in_turn = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (int64_t t = 0; t < tokens; t += 8) {
        const int8_t* row = eight.at(values.rows + t * values.bytes, tokens - t, values.bytes) + column;
        const auto two = [&](int64_t from) INLINED {
            const int8_t* at = row + from * values.bytes;
            const Bytes both =
                KIND == FOUR_BITS_OF_64
                    ? load_bytes(at)  // one row behind the other
                    : _mm512_inserti64x4(_mm512_castsi256_si512(load_half(at)), load_half(at + values.bytes), 1);
            const Bytes x = _mm512_permutexvar_epi32(in_turn, both);
            return HIGH ? x & _mm512_set1_epi8(-16)
                        : _mm512_ternarylogic_epi64(_mm512_slli_epi32(x, 4), _mm512_set1_epi8(-16),
                                                    _mm512_set1_epi8(-128), 0x6a);  // (a & b) ^ c
        };
        const Bytes x = two(0), y = two(2), z = two(4), w = two(6);
        const Bytes xy = _mm512_unpacklo_epi8(x, y), xy_high = _mm512_unpackhi_epi8(x, y);
        const Bytes zw = _mm512_unpacklo_epi8(z, w), zw_high = _mm512_unpackhi_epi8(z, w);
        // [j][0]: of even tokens, in quarter i channels 8 i + 4 j .. + 3; [j][1]: of odd ones.
        const Bytes value[2][2] = {{_mm512_unpacklo_epi16(xy, zw), _mm512_unpackhi_epi16(xy, zw)},
                                   {_mm512_unpacklo_epi16(xy_high, zw_high), _mm512_unpackhi_epi16(xy_high, zw_high)}};
        values.ask(t, 2 * first);
        repeat<N>([&](auto n) INLINED {
            repeat<DIGITS>([&](auto k) INLINED {
                repeat<2>([&](auto odd) INLINED {
                    const Bytes weight = everywhere(weights[n].digits[k] + t + 4 * odd);
                    repeat<2>([&](auto j) INLINED { sum[n][k][j] = dot(sum[n][k][j], weight, value[j][odd]); });
                });
            });
        });
    }
    const Bytes low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = low + 4;
    repeat<N>([&](auto n) INLINED {
        Bytes x[2];
        repeat<2>([&](auto j) INLINED { x[j] = (Bytes)((sum[n][1][j] << 8) + sum[n][0][j]); });
        float* const to = output + n * width + first;
        const float step = weights[n].step * values.UNIT;
        add(to, shrink[n], _mm512_permutex2var_epi64(x[0], low, x[1]), step);
        add(to + 16, shrink[n], _mm512_permutex2var_epi64(x[0], high, x[1]), step);
    });
}

template <int N, bool, Kind KIND>
INLINE void mix_run(const Weights* const (&weights)[2], const Blocks<KIND>& values, int64_t tokens, int64_t first,
                    const float* shrink, int64_t width, float* output) {
    if (first < values.bytes)
        mix_half<N, KIND, false>(weights[0], values, tokens, first, shrink, width, output);
    else
        mix_half<N, KIND, true>(weights[0], values, tokens, first, shrink, width, output);
}

template <Kind KIND>
INLINE void mix_all(const float* weights, bool, const float* const (&by)[2], float* const (&room)[2], int64_t rows,
                    const Blocks<KIND>& values, int64_t tokens, int64_t first, int64_t last, const float* shrink,
                    int64_t width, float* output) {
    const bool same = Blocks<KIND>::FOUR || by[0] == by[1];
    Weights* const digits[2] = {reinterpret_cast<Weights*>(room[0]), reinterpret_cast<Weights*>(room[1])};
    in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
        set<n.value, Blocks<KIND>::FOUR>(weights + r * TILE, by[0], digits[0] + r);
        if (!same) set<n.value, Blocks<KIND>::FOUR>(weights + r * TILE, by[1], digits[1] + r);
    });
    for (int64_t d = first; d < last; d += Blocks<KIND>::RUN)
        in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
            float* const to = output + r * width;
            const Weights* const of[2] = {digits[0] + r, digits[1] + r};
            if (same)
                mix_run<n.value, true>(of, values, tokens, d, shrink + r, width, to);
            else
                mix_run<n.value, false>(of, values, tokens, d, shrink + r, width, to);
        });
}

}  // namespace

#include "attention_path.h"

const unicache::Path unicache::avx512vnni = {attend<Digits>, finish};
#endif
