// Kernel of the operator unicache::QuantKVAttention: a few queries over a quantized store and a full-precision window.
//
// What it computes is stated by `quant_kv_attention` in export/operators.py. To decode is to read the store once, so
// the work is cut along the tokens (split-K): a block reads one stretch of the store, or of the window, for up to ROWS
// rows (the queries of all query heads of a KV head), and leaves its largest logit, sum of weights and weighted values;
// a second kernel combines the stretches. Further rows are further blocks, next to it, that find the stretch in L2.
//
// Codes are not staged in shared memory: a lane loads 16 channels of a token and keeps those channels of the queries and
// of the sums in registers; so many `lanes` as a row has chunks, to a power of two, share a token, and other groups of
// the warp have the next tokens. Each group of lanes has a softmax of its own, merged at the end of the stretch.
#include "quant_kv_plan.cuh"
#include "quant_kv_rows.cuh"

// Tests only: tokens left out at the end of every warp's run. A build with 1 is wrong, and the parity test must say so.
#ifndef END_SHIFT
#define END_SHIFT 0
#endif

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu, NO_END = 0xffffffffu;
constexpr float LOG2_E = 1.44269504f;  // logits are to the base 2
constexpr float LOWEST = -1e4f;        // masks are finite, so that a fully masked row stays finite
constexpr float NOTHING = -3e38f;      // below every logit
constexpr float SLACK = 12;            // weights may grow to 2^12 before all sums are scaled down: it is rarely done

// A row's softmax so far: weights are relative to `top`.
template <unsigned ROWS>
struct State {
    float sum[ROWS][CHANNELS], top[ROWS], total[ROWS];

    __device__ __forceinline__ void shrink(unsigned r, float new_top) {
        const float by = power_of_two(top[r] - new_top);
        top[r] = new_top, total[r] *= by;
        SIMT_FOR(i, CHANNELS) sum[r][i] *= by;
    }
};

__device__ __forceinline__ unsigned least(unsigned x, unsigned y) { return x < y ? x : y; }

// One warp's run of tokens; KEY and VALUE: bits of the numbers, of codes in the store or of floats in the window.
template <unsigned KEY, unsigned VALUE, unsigned ROWS, bool WIDE>
__device__ __forceinline__ void attend(const Plan& plan, const float (&queries)[ROWS][MOST_DIM], State<ROWS>& state) {
    constexpr bool STORE = KEY <= 8;
    constexpr unsigned TOKENS = !WIDE || !STORE ? 1 : ROWS == 1 ? 4 : 2;  // of a lane at a time: what registers allow
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.z, row0 = blockIdx.x * ROWS;
    const unsigned chunk = lane % plan.lanes, group = lane / plan.lanes, groups = WARP / plan.lanes;
    const unsigned head_dim = static_cast<unsigned>(a.head_dim);

    const unsigned count = static_cast<unsigned>(STORE ? a.slots : a.window);
    const unsigned part = blockIdx.y - (STORE ? 0 : plan.store_parts), run = plan.stretch / WARPS;
    const unsigned begin = least(part * plan.stretch + warp * run, count), end = least(begin + run, count);

    const unsigned key_bytes = (head_dim * KEY + 7) / 8, value_bytes = (head_dim * VALUE + 7) / 8;
    const int64_t tokens_before = static_cast<int64_t>(head) * count;
    const uint8_t* keys = static_cast<const uint8_t*>(STORE ? a.key.codes : a.key_window) + tokens_before * key_bytes;
    const uint8_t* values =
        static_cast<const uint8_t*>(STORE ? a.value.codes : a.value_window) + tokens_before * value_bytes;
    const Numbers all_bias{STORE ? a.store_bias : a.window_bias,
                           (STORE ? a.store_bias_type : a.window_bias_type) == UNICACHE_FLOAT16};
    const unsigned in_batch = head / static_cast<unsigned>(a.kv_heads), asked = static_cast<unsigned>(a.queries);
    const Numbers bias = all_bias.from(STORE ? tokens_before : static_cast<int64_t>(in_batch) * asked * count);
    float* logits = nullptr;
    if (plan.logits)
        logits = plan.logits + (STORE ? 0 : a.slots) +
                 (static_cast<int64_t>(head) * plan.rows + row0) * (a.slots + a.window);

    const Numbers key_scale = plan.key.of(head), value_scale = plan.value.of(head);
    const bool scaled_logits = STORE && plan.key.per_token(), scaled_queries = STORE && !scaled_logits;
    const bool scaled_weights = STORE && !plan.value.folded() && plan.value.halves;
    const bool scaled_values = STORE && !WIDE && !plan.value.folded() && !plan.value.halves;
    // The rows' queries, times the scale of keys of a block of tokens, which ends before token q_end.
    float q[ROWS][CHANNELS];
    unsigned q_end = 0;
    auto load_queries = [&](unsigned token) {
        const unsigned block = scaled_queries ? plan.key.tokens(token) : 0, here = opaque(chunk);
        q_end = scaled_queries ? (block + 1) * static_cast<unsigned>(plan.key.tokens.by) : NO_END;
        unsigned scale[CHANNELS];
        SIMT_FOR(i, CHANNELS) {
            const unsigned channel = least(channel_of(KEY, here, i, head_dim), head_dim - 1);
            if (scaled_queries) scale[i] = key_scale.bits(plan.key.index(block, channel));
        }
        SIMT_FOR(i, CHANNELS) {
            const unsigned channel = channel_of(KEY, here, i, head_dim);
            const float by = scaled_queries ? key_scale.number(scale[i]) : 1;
            SIMT_FOR(r, ROWS) q[r][i] = channel < head_dim ? queries[r][channel] * by : 0;
        }
    };

    // What a lane loads of a step's tokens; a lane beyond the row's chunks loads the first, and its queries are zeros.
    Chunk<KEY> key[TOKENS];
    Chunk<VALUE> value[TOKENS];
    unsigned added[TOKENS] = {}, logit_scale[TOKENS] = {}, weight_scale[TOKENS][2] = {};
    const unsigned from = !WIDE || chunk * CHANNELS < head_dim ? chunk : 0;
    const unsigned low = least(channel_of(VALUE, from, 0, head_dim), head_dim - 1);
    const unsigned high = least(channel_of(VALUE, from, CHANNELS / 2, head_dim), head_dim - 1);
    auto token_of = [&](unsigned first, unsigned t) { return least(first + t * groups + group, end - 1); };
    auto load_keys = [&](unsigned first) {
        SIMT_FOR(t, TOKENS) {
            const unsigned token = token_of(first, t);
            key[t].template load<WIDE>(keys + static_cast<int64_t>(token) * key_bytes, key_bytes, from);
            if (STORE) added[t] = bias.bits(token);
            if (scaled_logits) logit_scale[t] = key_scale.bits(plan.key.tokens(token));
        }
    };
    auto load_values = [&](unsigned first) {
        SIMT_FOR(t, TOKENS) {
            const unsigned token = token_of(first, t);
            value[t].template load<WIDE>(values + static_cast<int64_t>(token) * value_bytes, value_bytes, from);
            if (!scaled_weights) continue;
            const unsigned block = plan.value.tokens(token);
            weight_scale[t][0] = value_scale.bits(plan.value.index(block, low));
            weight_scale[t][1] = value_scale.bits(plan.value.index(block, high));
        }
    };
    if (begin < end) load_keys(begin), load_values(begin);

    const unsigned step = groups * TOKENS;
    for (unsigned first = begin; first < end; first += step) {
        float logit[ROWS][TOKENS];
        SIMT_FOR(t, TOKENS) {
            const unsigned token = token_of(first, t);
            if (token >= q_end) load_queries(token);
            float x[CHANNELS];
            key[t].numbers(x);
            SIMT_FOR(r, ROWS) {
                logit[r][t] = 0;
                SIMT_FOR(i, CHANNELS) logit[r][t] += q[r][i] * x[i];
            }
        }
        for (unsigned by = 1; by < plan.lanes; by *= 2)
            SIMT_FOR(r, ROWS) SIMT_FOR(t, TOKENS) logit[r][t] += __shfl_xor_sync(ALL_LANES, logit[r][t], by);
        bool grows = false, live[TOKENS];
        SIMT_FOR(t, TOKENS) {
            live[t] = first + t * groups + group + END_SHIFT < end;
            const float scale = scaled_logits ? key_scale.number(logit_scale[t]) : 1;
            float add = fmaxf(bias.number(added[t]), LOWEST) * LOG2_E;
            SIMT_FOR(r, ROWS) {
                if (!STORE) add = fmaxf(bias[(row0 + r) % asked * count + token_of(first, t)], LOWEST) * LOG2_E;
                const float sum = logit[r][t] * scale + add;
                logit[r][t] = live[t] ? sum : NOTHING;
                grows |= logit[r][t] > state.top[r] + SLACK;
            }
        }
        if (first + step < end) load_keys(first + step);  // keys travel while values are worked on, and the reverse
        if (logits && chunk == 0)
            SIMT_FOR(r, ROWS) SIMT_FOR(t, TOKENS)
                if (live[t] && row0 + r < plan.rows)
                    logits[r * (a.slots + a.window) + token_of(first, t)] = logit[r][t];
        if (__any_sync(ALL_LANES, grows)) {
            SIMT_FOR(r, ROWS) {
                float top = state.top[r];
                SIMT_FOR(t, TOKENS) top = fmaxf(top, logit[r][t]);
                state.shrink(r, top);
            }
        }

        SIMT_FOR(t, TOKENS) {
            float x[CHANNELS];
            value[t].numbers(x);
            if (scaled_values) {
                const unsigned block = plan.value.tokens(token_of(first, t)), here = opaque(chunk);
                SIMT_FOR(i, CHANNELS) {
                    const unsigned channel = least(channel_of(VALUE, here, i, head_dim), head_dim - 1);
                    x[i] *= value_scale[plan.value.index(block, channel)];
                }
            }
            float scale[2];
            SIMT_FOR(half, 2) scale[half] = scaled_weights ? value_scale.number(weight_scale[t][half]) : 1;
            SIMT_FOR(r, ROWS) {
                const float weight = live[t] ? power_of_two(logit[r][t] - state.top[r]) : 0;
                state.total[r] += weight;
                SIMT_FOR(i, CHANNELS) state.sum[r][i] += weight * scale[i / 8] * x[i];
            }
        }
        if (first + step < end) load_values(first + step);
    }
}

// Grid: chunks of rows, parts of the tokens, heads (batch * kv_heads).
template <unsigned ROWS, bool WIDE>
__global__ void __launch_bounds__(THREADS, ROWS == 1 && WIDE ? 3 : 2)
attend_part(const __grid_constant__ Plan plan) {
    __shared__ float queries[ROWS][MOST_DIM], sums[WARPS][ROWS][MOST_DIM], tops[WARPS][ROWS], totals[WARPS][ROWS];
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = blockIdx.y, head = blockIdx.z;
    const unsigned row0 = blockIdx.x * ROWS, head_dim = static_cast<unsigned>(a.head_dim);
    const bool store = part < plan.store_parts;

    const Numbers query =
        Numbers{a.query, a.type == UNICACHE_FLOAT16}.from((static_cast<int64_t>(head) * plan.rows + row0) * head_dim);
    const unsigned own = least(ROWS, plan.rows - row0) * head_dim;
    for (unsigned i = threadIdx.x; i < ROWS * head_dim; i += THREADS)
        queries[i / head_dim][i % head_dim] = i < own ? query[i] * (a.softmax_scale * LOG2_E) : 0;
    __syncthreads();

    State<ROWS> state;
    SIMT_FOR(r, ROWS) {
        state.top[r] = NOTHING, state.total[r] = 0;
        SIMT_FOR(i, CHANNELS) state.sum[r][i] = 0;
    }
    if (!store) {
        if (a.type == UNICACHE_FLOAT16) attend<16, 16, ROWS, WIDE>(plan, queries, state);
        else attend<32, 32, ROWS, WIDE>(plan, queries, state);
    } else if (a.key.bits == 8) {
        if (a.value.bits == 8) attend<8, 8, ROWS, WIDE>(plan, queries, state);
        else attend<8, 4, ROWS, WIDE>(plan, queries, state);
    } else {
        if (a.value.bits == 8) attend<4, 8, ROWS, WIDE>(plan, queries, state);
        else attend<4, 4, ROWS, WIDE>(plan, queries, state);
    }

    // Merge the groups of lanes by shuffles, then the warps through shared memory.
    SIMT_FOR(r, ROWS) {
        float top = state.top[r];
        for (unsigned by = plan.lanes; by < WARP; by *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, by));
        state.shrink(r, top);
        for (unsigned by = plan.lanes; by < WARP; by *= 2) {
            state.total[r] += __shfl_xor_sync(ALL_LANES, state.total[r], by);
            SIMT_FOR(i, CHANNELS) state.sum[r][i] += __shfl_xor_sync(ALL_LANES, state.sum[r][i], by);
        }
        if (lane == 0) tops[warp][r] = top, totals[warp][r] = state.total[r];
    }
    if (lane < plan.lanes) {
        const Numbers value_scale = plan.value.of(head);
        SIMT_FOR(i, CHANNELS) {
            const unsigned channel = channel_of(store ? static_cast<unsigned>(a.value.bits) : 32, lane, i, head_dim);
            if (channel == head_dim) continue;
            const float scale = store && plan.value.folded() ? value_scale[plan.value.index(0, channel)] : 1;
            SIMT_FOR(r, ROWS) sums[warp][r][channel] = state.sum[r][i] * scale;
        }
    }
    __syncthreads();
    const int64_t row = (static_cast<int64_t>(head) * plan.parts + part) * plan.rows + row0;
    for (unsigned i = threadIdx.x; i < own; i += THREADS) {
        const unsigned r = i / head_dim, channel = i % head_dim;
        float top = NOTHING, sum = 0, total = 0;
        for (unsigned w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][r]);
        for (unsigned w = 0; w < WARPS; ++w) {
            const float shrink = power_of_two(tops[w][r] - top);
            sum += sums[w][r][channel] * shrink, total += totals[w][r] * shrink;
        }
        plan.sums[row * head_dim + i] = sum;
        if (channel == 0) plan.softmax[2 * (row + r)] = top, plan.softmax[2 * (row + r) + 1] = total;
    }
}

// Called by a warp: the largest logit of a row over all parts, and the sum of its weights relative to that.
__device__ void softmax_of_row(const Plan& plan, unsigned head, unsigned row, float* top, float* total) {
    const float* softmax = plan.softmax + 2 * (static_cast<int64_t>(head) * plan.parts * plan.rows + row);
    *top = NOTHING, *total = 0;
    for (unsigned part = threadIdx.x % WARP; part < plan.parts; part += WARP)
        *top = fmaxf(*top, softmax[2 * static_cast<int64_t>(part) * plan.rows]);
    for (unsigned by = 1; by < WARP; by *= 2) *top = fmaxf(*top, __shfl_xor_sync(ALL_LANES, *top, by));
    for (unsigned part = threadIdx.x % WARP; part < plan.parts; part += WARP) {
        const float* of_part = softmax + 2 * static_cast<int64_t>(part) * plan.rows;
        *total += of_part[1] * power_of_two(of_part[0] - *top);
    }
    for (unsigned by = 1; by < WARP; by *= 2) *total += __shfl_xor_sync(ALL_LANES, *total, by);
}

// Grid: one block a row, for its output, and then one for every COMBINE_THREADS tokens, for their masses; heads.
__global__ void __launch_bounds__(COMBINE_THREADS)
combine_parts(const __grid_constant__ Plan plan) {
    __shared__ float sums[COMBINE_WARPS][MOST_DIM];
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.y;
    const unsigned head_dim = static_cast<unsigned>(a.head_dim);
    const bool half = a.type == UNICACHE_FLOAT16;
    float top, total;
    if (blockIdx.x < plan.rows) {
        const unsigned row = blockIdx.x;
        softmax_of_row(plan, head, row, &top, &total);
        float sum[MOST_DIM / WARP] = {};
        for (unsigned part = warp; part < plan.parts; part += COMBINE_WARPS) {
            const int64_t of_part = (static_cast<int64_t>(head) * plan.parts + part) * plan.rows + row;
            const float shrink = power_of_two(plan.softmax[2 * of_part] - top);
            SIMT_FOR(i, MOST_DIM / WARP) {
                const unsigned channel = i * WARP + lane;
                if (channel < head_dim) sum[i] += plan.sums[of_part * head_dim + channel] * shrink;
            }
        }
        SIMT_FOR(i, MOST_DIM / WARP) sums[warp][i * WARP + lane] = sum[i];
        __syncthreads();
        if (threadIdx.x < head_dim) {
            float all = 0;
            for (unsigned w = 0; w < COMBINE_WARPS; ++w) all += sums[w][threadIdx.x];
            const int64_t at = (static_cast<int64_t>(head) * plan.rows + row) * head_dim + threadIdx.x;
            Numbers{a.output, half}.set(at, total > 0 ? all / total : 0);  // total is 0 where there is no token at all
        }
        return;
    }
    const unsigned slots = static_cast<unsigned>(a.slots), window = static_cast<unsigned>(a.window);
    const unsigned token = (blockIdx.x - plan.rows) * COMBINE_THREADS + threadIdx.x;
    float mass = 0;
    for (unsigned row = 0; row < plan.rows; ++row) {
        softmax_of_row(plan, head, row, &top, &total);
        const float* logits = plan.logits + (static_cast<int64_t>(head) * plan.rows + row) * (slots + window);
        if (token < slots + window) mass += power_of_two(logits[token] - top) / total;
    }
    mass /= static_cast<float>(a.group);
    if (token < slots) {
        if (a.store_mass) Numbers{a.store_mass, half}.set(static_cast<int64_t>(head) * slots + token, mass);
    } else if (token < slots + window && a.window_mass) {
        Numbers{a.window_mass, half}.set(static_cast<int64_t>(head) * window + token - slots, mass);
    }
}

}  // namespace

// Bytes; of the shapes alone, on any device, whether masses are wanted or not. 0 where the arguments are out of range.
extern "C" size_t unicache_quant_kv_attention_workspace(const UnicacheAttention* arguments) {
    if (!in_range(*arguments)) return 0;
    Plan plan = plan_of(*arguments, MOST_BLOCKS);
    return lay_out(plan, nullptr);
}

// Pointers are to the device. Returns a cudaError_t: 0 where the work is on the stream, 1 (invalid value) where an
// argument is out of range.
extern "C" int unicache_quant_kv_attention(const UnicacheAttention* arguments, void* workspace, cudaStream_t stream) {
    constexpr int INVALID_VALUE = 1;
    const UnicacheAttention& a = *arguments;
    if (!in_range(a) || !in_place(a) || !workspace) return INVALID_VALUE;
    const int count = multiprocessors();
    Plan plan = plan_of(a, count > 0 ? count : 1);
    lay_out(plan, workspace);

    const unsigned heads = static_cast<unsigned>(a.batch * a.kv_heads);
    if (plan.parts) {
        const dim3 one(plan.rows, plan.parts, heads), four((plan.rows + 3) / 4, plan.parts, heads), block(THREADS);
        if (!wide(plan)) SIMT_LAUNCH((attend_part<1, false>), one, block, stream, plan);
        else if (plan.rows == 1) SIMT_LAUNCH((attend_part<1, true>), one, block, stream, plan);
        else SIMT_LAUNCH((attend_part<MOST_ROWS, true>), four, block, stream, plan);
        if (int error = last_error()) return error;
    }
    const int64_t tokens = plan.logits ? a.slots + a.window : 0;
    const dim3 grid(static_cast<unsigned>(plan.rows + ceiling(tokens, COMBINE_THREADS)), heads);
    SIMT_LAUNCH(combine_parts, grid, dim3(COMBINE_THREADS), stream, plan);
    return last_error();
}
