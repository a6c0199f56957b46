// The kernel of a path. The file that includes this one defines how many rows are multiplied together (ROWS), how many
// at most read codes, not unpacked floats (DIRECT), and for how many sums there are registers (KEPT). And vectors of
// LANES floats:
//   Vec; load, store, fill (all lanes), fma (a * b + c), maximum (NaN where the second is), nearest (whole numbers),
//   scale (x * 2^n), top (the largest lane), sums (of four vectors each, or of two), codes8 and codes4 (LANES bytes to
//   floats), halves (from float16) and to_halves.
//
// Keys and values of a KV head are read once, a tile of tokens at a time, for all query rows of its group. Codes become
// floats in registers, or in a tile that stays in the first-level cache where there are many rows. Scales are factors
// of the query or the logits (keys), and of the weights or the output (values), wherever their blocks allow it. The
// softmax is online: weights are relative to the largest logit so far, and what was summed before is scaled down when a
// larger one comes. The weights are kept, for the attention that every slot received.
//
// A logit that is NaN or +inf makes a NaN of its row's total, and so of the output: a model that overflows must not
// talk on.
#include <math.h>

#include "attention_rows.h"

namespace {

constexpr float LOWEST = -1e4f;    // masks are finite, so that a fully masked row stays finite
constexpr float NOTHING = -3e38f;  // below every logit
constexpr float LOG2_E = 1.44269504f;

// 2^x, of numbers up to 0: 2^n for the nearest whole number, times a polynomial of the rest, off by 1.6e-7 at most;
// exactly 0 below -150.
INLINE Vec power_of_two(Vec x) {
    x = maximum(fill(-160.f), x);
    const Vec n = nearest(x), rest = x - n;
    Vec series = fill(0.001326472731f);
    constexpr float terms[] = {0.009671512991f, 0.05550733581f, 0.2402224243f, 0.6931470037f, 1.f};
    for (float term : terms) series = fma(series, rest, fill(term));
    return scale(series, n);
}

// Logits [N, TILE] of N query rows and the keys of tokens first .. last - 1.
template <int N, class Source>
INLINE void logits(const Queries& queries, int64_t row, const Source& keys, int64_t first, int64_t last, float* out) {
    constexpr int T = N * 4 <= KEPT ? 4 : 2;
    const float* query = queries.rows + row * queries.width;
    for (int64_t t = first; t < last; t += T) {
        if (row == 0) keys.ask_ahead(t, T);
        Vec sum[N][T];
        repeat<N>([&](auto n) INLINED { repeat<T>([&](auto i) INLINED { sum[n][i] = fill(0); }); });
        for (int64_t d = 0; d < keys.half; d += LANES)
            repeat<T>([&](auto i) INLINED {
                Vec key[Source::EACH];
                keys.get(least(t + i, last - 1), d, key);
                repeat<N>([&](auto n) INLINED {
                    repeat<Source::EACH>([&](auto e) INLINED {
                        sum[n][i] = fma(key[e], load(query + n * queries.width + e * keys.half + d), sum[n][i]);
                    });
                });
            });
        sums(sum, out + t, TILE);
    }
}

// output [N, W vectors from `column`, and as many `half` columns on] = output * shrink[N] + weights [N, TILE] @ values.
template <int N, int W, class Source>
INLINE void mix(const float* const (&weights)[2], const Source& values, int64_t tokens, int64_t column,
                const float* shrink, int64_t width, float* output) {
    constexpr int EACH = Source::EACH;
    Vec sum[N][W][EACH];
    for (int n = 0; n < N; n++)
        for (int w = 0; w < W; w++)
            for (int e = 0; e < EACH; e++)
                sum[n][w][e] = load(output + n * width + column + w * LANES + e * values.half) * fill(shrink[n]);
    for (int64_t t = 0; t < tokens; t++) {
        if (column == 0) values.ask_ahead(t, 1);
        for (int w = 0; w < W; w++) {
            Vec value[EACH];
            values.get(t, column + w * LANES, value);
            for (int e = 0; e < EACH; e++)
                for (int n = 0; n < N; n++) sum[n][w][e] = fma(value[e], fill(weights[e][n * TILE + t]), sum[n][w][e]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int w = 0; w < W; w++)
            for (int e = 0; e < EACH; e++)
                store(output + n * width + column + w * LANES + e * values.half, sum[n][w][e]);
}

template <int N, class Source>
INLINE void mix_columns(const float* const (&weights)[2], const Source& values, int64_t tokens, int64_t first,
                        int64_t last, const float* shrink, int64_t width, float* output) {
    constexpr int W = least(4, KEPT / N) / Source::EACH;
    int64_t d = first;
    for (; d + W * LANES <= last; d += W * LANES) mix<N, W>(weights, values, tokens, d, shrink, width, output);
    for (; d < last; d += LANES) mix<N, 1>(weights, values, tokens, d, shrink, width, output);
}

// Logits [rows, TILE].
template <class Source>
INLINE void all_logits(const Queries& queries, int64_t rows, const Source& keys, int64_t first, int64_t last,
                       float* out) {
    in_passes<ROWS>(rows, [&](auto n, int64_t r) { logits<n.value>(queries, r, keys, first, last, out + r * TILE); });
}

// output [rows, columns first .. last - 1] = output * shrink[rows] + (weights * by) @ values. `by`: of the tokens, for
// each of the source's parts; all 1, if not `scaled`. `factored`: room for the products.
template <class Source>
INLINE void mix_all(const float* weights, bool scaled, const float* const (&by)[2], float* const (&factored)[2],
                    int64_t rows, const Source& values, int64_t tokens, int64_t first, int64_t last,
                    const float* shrink, int64_t width, float* output) {
    const float* of[2] = {weights, weights};
    for (int e = 0; scaled && e < Source::EACH; e++) {
        of[e] = e && by[e] == by[0] ? of[0] : factored[e];
        for (int64_t i = 0; of[e] == factored[e] && i < rows * TILE; i += LANES)
            store(factored[e] + i, load(weights + i) * load(by[e] + i % TILE));
    }
    in_passes<ROWS>(rows, [&](auto n, int64_t r) {
        const float* const of_row[2] = {of[0] + r * TILE, of[1] + r * TILE};
        mix_columns<n.value>(of_row, values, tokens, first, last, shrink + r, width, output + r * width);
    });
}

// Keys: into the query, for every block of tokens; into the logits; or into the unpacked rows.
Scales of_keys(const Rows& keys) {
    if (!keys.codes) return Scales::none;
    if (keys.token_blocks == 1 || keys.tokens_each % 16 == 0) return Scales::folded;
    return keys.channel_blocks == 1 ? Scales::factors : Scales::unpacked;
}

// Values: into the output; into the weights, for every block of channels; or into the unpacked rows.
Scales of_values(const Rows& values) {
    if (!values.codes) return Scales::none;
    if (values.token_blocks == 1) return Scales::folded;
    const bool vectors =
        values.channels_each % LANES == 0 && (values.bits == 8 || values.bytes % values.channels_each == 0);
    return values.channel_blocks == 1 || vectors ? Scales::factors : Scales::unpacked;
}

// Calls f with a tile's rows as they are best read: codes, or floats in `tile`, to which they are unpacked.
template <class QueryRows, class F>
INLINE void with_rows(const Rows& rows, Scales scales, int64_t readers, int64_t start, int64_t tokens, int64_t width,
                      float* by, float* tile, const F& f) {
    const int8_t* codes = rows.codes + start * rows.bytes;
    const bool whole = rows.codes && rows.head_dim % (LANES * (rows.bits == 8 ? 1 : 2)) == 0;
    if (QueryRows::takes(rows, scales)) {
        QueryRows::with_blocks(rows, start, f);
    } else if (whole && readers <= DIRECT && rows.head_dim <= MOST_CHANNELS && scales != Scales::unpacked) {
        if (rows.bits == 8)
            f(Codes<1>{codes, rows.bytes});
        else
            f(Codes<2>{codes, rows.bytes});
    } else {
        unpack(rows, whole, start, tokens, width, scales == Scales::unpacked ? by : nullptr, tile);
        f(Floats{tile, width});
    }
}

// Logits [rows, TILE] -> weights relative to the largest logit of their row so far. `bias`: of row r % biases.
// `totals`: of earlier weights, [rows, LANES]. `shrink`: what all earlier sums of a row are scaled by. In two loops, so
// that rows do not wait for one another.
INLINE void online_softmax(const float* factors, const float* bias, int64_t biases, int64_t tokens, int64_t rows,
                           float* weights, float* largest, float* totals, float* shrink) {
    for (int64_t r = 0, query = 0; r < rows; r++, query = query + 1 < biases ? query + 1 : 0) {
        float *row = weights + r * TILE, before = largest[r];
        const float* of_row = bias + query * TILE;
        for (int64_t t = tokens; t < TILE; t++) row[t] = 0;  // and a bias that leaves nothing of them
        Vec most = fill(before);
        for (int64_t t = 0; t < TILE; t += LANES) {
            const Vec logit = fma(load(row + t), load(factors + t), load(of_row + t));
            store(row + t, logit);
            most = maximum(most, logit);
        }
        largest[r] = top(most);
        shrink[r] = power_of_two(fill((before - largest[r]) * LOG2_E))[0];  // a branch would often be guessed wrong
    }
    for (int64_t r = 0; r < rows; r++) {
        Vec sum = load(totals + r * LANES) * fill(shrink[r]);
        for (int64_t t = 0; t < TILE; t += LANES) {
            const Vec weight = power_of_two((load(weights + r * TILE + t) - fill(largest[r])) * fill(LOG2_E));
            store(weights + r * TILE + t, weight);
            sum = sum + weight;
        }
        store(totals + r * LANES, sum);
    }
}

// Memory that a task has for itself, taken in whole cache lines.
struct Scratch {
    float* next;
    float* take(int64_t floats) {
        float* taken = next;
        next += (floats + ALIGN - 1) / ALIGN * ALIGN;
        return taken;
    }
};

template <class QueryRows>
void attend(const Job& job, int64_t head, int64_t part, float* memory) {
    const UnicacheAttention& a = job.a;
    const int64_t rows = job.rows, width = job.width, head_dim = a.head_dim, state = (head * job.parts + part) * rows;
    const bool window = part + 1 == job.parts;
    const Rows keys = window ? window_rows(a, a.key_window, head) : store_rows(a, a.key, head);
    const Rows values = window ? window_rows(a, a.value_window, head) : store_rows(a, a.value, head);
    const Scales key_scales = of_keys(keys);
    const Scales value_scales = of_values(values);
    const int64_t begin = window ? 0 : part * PART, end = window ? a.window : least(begin + PART, a.slots);
    const int64_t biases = window ? a.queries : 1;  // of a token: the window has one for each query

    Scratch scratch{memory};
    float *query = scratch.take(rows * width), *tile = scratch.take(TILE * width);
    float *by = scratch.take(width), *shrink = scratch.take(rows), *room = scratch.take(TILE * width);
    float *factors = scratch.take(TILE), *bias = scratch.take(biases * TILE);
    float* const unkept = scratch.take(rows * TILE);
    float* const shared[2] = {scratch.take(TILE), scratch.take(TILE)};
    float* const ones = scratch.take(TILE);
    float* const factored[2] = {scratch.take(rows * TILE), scratch.take(rows * TILE)};
    float *output = job.output + state * width, *largest = job.largest + state;
    float *totals = scratch.take(rows * LANES), *total = job.total + state;
    QueryRows queries(scratch.take(QueryRows::room(rows, width)), rows, width, keys, key_scales);

    for (int64_t r = 0; r < rows; r++) {
        float* q = query + r * width;
        widen(a.query, a.type, (head * rows + r) * head_dim, head_dim, q);
        for (int64_t d = 0; d < width; d++) q[d] = d < head_dim ? q[d] * a.softmax_scale : 0;
        for (int64_t d = 0; d < width; d++) output[r * width + d] = 0;
        largest[r] = NOTHING;
        store(totals + r * LANES, fill(0));
    }
    if (key_scales != Scales::folded) queries.set(query, nullptr);
    for (int64_t d = 0; d < width; d++) by[d] = 0;
    for (int64_t t = 0; t < TILE; t++) factors[t] = ones[t] = shared[0][t] = shared[1][t] = 1;

    int64_t in_query = -1;  // the last block of tokens whose scales are in a set of queries
    for (int64_t start = begin, tokens; start < end; start += tokens) {
        tokens = least(TILE, end - start);
        const int64_t tile_number = head * job.tiles + (window ? (a.slots + TILE - 1) / TILE : 0) + start / TILE;
        float* weights = job.weights ? job.weights + tile_number * rows * TILE : unkept;

        if (key_scales == Scales::folded)
            for (int64_t last = (start + tokens - 1) / keys.tokens_each; in_query < last;) {
                in_query = in_query < start / keys.tokens_each ? start / keys.tokens_each : in_query + 1;
                keys.channel_scales(in_query, by);
                queries.use(in_query % SETS);
                queries.set(query, by);
            }
        with_rows<QueryRows>(keys, key_scales, rows, start, tokens, width, by, tile, [&](const auto& source) {
            for (int64_t first = 0, last = tokens; first < tokens; first = last, last = tokens) {
                if (key_scales == Scales::folded) {
                    const int64_t block = (start + first) / keys.tokens_each;
                    last = least(tokens, (block + 1) * keys.tokens_each - start);
                    queries.use(block % SETS);
                }
                all_logits(queries, rows, source, first, last, weights);
            }
        });
        if (key_scales == Scales::factors) {
            keys.of_tokens(keys.load_scales(start, tokens, room), start, tokens, 0, factors);
            for (int64_t t = 0; t < TILE; t += LANES)  // inf becomes NaN: no logit is to be -inf, which is a mask
                store(factors + t, fma(load(factors + t), fill(0), load(factors + t)));
        }

        for (int64_t i = 0; i < biases; i++) {
            float* of = bias + i * TILE;
            if (window)
                widen(a.window_bias, a.window_bias_type, (head / a.kv_heads * a.queries + i) * end + start, tokens, of);
            else
                widen(a.store_bias, a.store_bias_type, head * a.slots + start, tokens, of);
            for (int64_t t = 0; t < TILE; t += LANES) store(of + t, maximum(fill(LOWEST), load(of + t)));
            for (int64_t t = tokens; t < TILE; t++) of[t] = NOTHING;
        }
        online_softmax(factors, bias, biases, tokens, rows, weights, largest, totals, shrink);
        if (job.weights) memcpy(job.tops + tile_number * rows, largest, rows * sizeof(float));

        if (value_scales == Scales::factors) values.load_scales(start, tokens, room);
        with_rows<QueryRows>(values, value_scales, rows, start, tokens, width, by, tile, [&](const auto& source) {
            const bool by_weight = value_scales == Scales::factors;
            const int64_t run = values.channels_each > source.least_run() ? values.channels_each : source.least_run();
            const int64_t each = by_weight && values.channel_blocks > 1 ? run : source.half;
            for (int64_t first = 0; first < source.half; first += each) {
                const float* scales[2] = {ones, ones};
                for (int e = 0; by_weight && e < source.EACH; e++) {
                    const int64_t block = source.channel(first, e) / values.channels_each;
                    scales[e] = scales[0];
                    if (e && block == source.channel(first, 0) / values.channels_each) continue;
                    const bool as_they_are = values.tokens_each == 1 && values.channel_blocks == 1;
                    scales[e] = as_they_are && tokens == TILE ? room : shared[e];
                    if (scales[e] != room) values.of_tokens(room, start, tokens, block, shared[e]);
                }
                mix_all(weights, by_weight, scales, factored, rows, source, tokens, first,
                        least(first + each, source.half), shrink, width, output);
            }
        });
    }
    for (int64_t r = 0; r < rows; r++) {
        total[r] = 0;
        for (int64_t i = 0; i < LANES; i++) total[r] += totals[r * LANES + i];
    }
    if (value_scales != Scales::folded || begin == end) return;
    values.channel_scales(0, by);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < head_dim; d++) output[r * width + d] *= by[d];
}

// Of row `row` in all parts of a head: the largest logit, and the total relative to it.
void whole_row(const Job& job, int64_t head, int64_t row, float& largest, float& total) {
    largest = NOTHING, total = 0;
    for (int64_t p = head * job.parts; p < (head + 1) * job.parts; p++)
        if (job.largest[p * job.rows + row] > largest) largest = job.largest[p * job.rows + row];
    for (int64_t p = head * job.parts; p < (head + 1) * job.parts; p++)
        total += job.total[p * job.rows + row] * expf(job.largest[p * job.rows + row] - largest);
}

// Of all parts one output, by the task of the window's; of every part the attention that its tokens received: summed
// over the queries, averaged over the group.
void finish(const Job& job, int64_t head, int64_t part, float* memory) {
    const UnicacheAttention& a = job.a;
    const bool window = part + 1 == job.parts;
    const int64_t begin = window ? 0 : part * PART, end = window ? a.window : least(begin + PART, a.slots);
    void* const mass = window ? a.window_mass : a.store_mass;
    if (!window && !mass) return;
    Scratch scratch{memory};
    float *largest = scratch.take(job.rows), *total = scratch.take(job.rows), *sum = scratch.take(job.width);
    for (int64_t r = 0; r < job.rows; r++) whole_row(job, head, r, largest[r], total[r]);

    for (int64_t r = 0; window && r < job.rows; r++) {
        for (int64_t d = 0; d < job.width; d++) sum[d] = 0;
        for (int64_t p = head * job.parts; p < (head + 1) * job.parts; p++) {
            const float share = total[r] == 0 ? 0 : expf(job.largest[p * job.rows + r] - largest[r]) / total[r];
            for (int64_t d = 0; d < a.head_dim; d++) sum[d] += job.output[(p * job.rows + r) * job.width + d] * share;
        }
        narrow(sum, a.head_dim, a.output, a.type, (head * job.rows + r) * a.head_dim);
    }

    for (int64_t start = begin; mass && start < end; start += TILE) {
        const int64_t tile = head * job.tiles + (window ? (a.slots + TILE - 1) / TILE : 0) + start / TILE;
        float received[TILE] = {};
        for (int64_t r = 0; r < job.rows; r++) {
            const float share = expf(job.tops[tile * job.rows + r] - largest[r]) / (total[r] * a.group);
            for (int64_t t = 0; t < TILE; t++) received[t] += job.weights[(tile * job.rows + r) * TILE + t] * share;
        }
        narrow(received, least(TILE, end - start), mass, a.type, head * (window ? a.window : a.slots) + start);
    }
}

}  // namespace
