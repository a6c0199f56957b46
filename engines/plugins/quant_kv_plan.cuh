// What QuantKVAttention's kernels are told: the arguments, checked, and how the work is cut among blocks.
#pragma once
#include "quant_kv_rows.cuh"

namespace {

constexpr unsigned WARP = 32, WARPS = 4, THREADS = WARP * WARPS;                // of a block that attends
constexpr unsigned COMBINE_WARPS = 8, COMBINE_THREADS = WARP * COMBINE_WARPS;  // of a block that combines
constexpr unsigned MOST_DIM = UNICACHE_MOST_HEAD_DIM, MOST_ROWS = 4;           // channels of a row, rows of a block
// Blocks have stretches of tokens: short enough that the device has some for every multiprocessor, and not longer than
// LONGEST, so that the last ones to finish are not far behind; a multiple of GRAIN, and not many more blocks than
// MOST_BLOCKS, as what each leaves behind is read again.
constexpr unsigned GRAIN = 16 * WARPS, LONGEST = 512, MOST_BLOCKS = 1024, BLOCKS_PER_MULTIPROCESSOR = 4;

struct Plan {
    UnicacheAttention a;
    Scales key, value;
    unsigned rows, lanes;                  // rows: queries of all query heads of a KV head; lanes: of a token
    unsigned stretch, store_parts, parts;  // tokens of a part; parts of the store; and with those of the window
    float* sums;                           // [heads, parts, rows, head_dim]: weighted values
    float* softmax;                        // [heads, parts, rows, 2]: largest logit, sum of weights
    float* logits;                         // [heads, rows, slots + window], or NULL where no mass is wanted
};

int64_t ceiling(int64_t x, int64_t by) { return (x + by - 1) / by; }

bool in_range(const UnicacheAttention& a) {
    constexpr int64_t MOST = UNICACHE_MOST_HEADS, MOST_TOKENS = UNICACHE_MOST_TOKENS;  // see Divisor
    auto type = [](int64_t x) { return x == UNICACHE_FLOAT32 || x == UNICACHE_FLOAT16; };
    auto within = [](int64_t x, int64_t low, int64_t high) { return low <= x && x <= high; };
    auto store = [&](const UnicacheStore& s) {
        const bool blocks = within(s.token_blocks, 1, a.slots) && within(s.channel_blocks, 1, a.head_dim);
        return (s.bits == 8 || s.bits == 4) && type(s.scale_type) &&
               (a.slots == 0 || (blocks && (s.scale_batch == 1 || s.scale_batch == a.batch)));
    };
    return within(a.batch, 1, MOST) && within(a.kv_heads, 1, MOST) && within(a.batch * a.kv_heads, 1, MOST) &&
           within(a.group, 1, MOST) && within(a.queries, 1, MOST) && within(a.group * a.queries, 1, MOST) &&
           within(a.slots, 0, MOST_TOKENS) && within(a.window, 0, MOST_TOKENS) &&
           within(a.queries * a.window, 0, UINT32_MAX) && within(a.head_dim, 1, MOST_DIM) && type(a.type) &&
           type(a.store_bias_type) && type(a.window_bias_type) && store(a.key) && store(a.value);
}

// Whether pointers are there, and to whole numbers.
bool in_place(const UnicacheAttention& a) {
    auto whole = [](const void* x, int64_t type) {
        return reinterpret_cast<uintptr_t>(x) % (type == UNICACHE_FLOAT16 ? 2 : 4) == 0;
    };
    auto at = [&](const void* x, int64_t type) { return x && whole(x, type); };
    auto store = [&](const UnicacheStore& s) { return s.codes && at(s.scale, s.scale_type); };
    return at(a.query, a.type) && at(a.output, a.type) && whole(a.store_mass, a.type) && whole(a.window_mass, a.type) &&
           (a.slots == 0 || (store(a.key) && store(a.value) && at(a.store_bias, a.store_bias_type))) &&
           (a.window == 0 ||
            (at(a.key_window, a.type) && at(a.value_window, a.type) && at(a.window_bias, a.window_bias_type)));
}

Scales scales_of(const UnicacheAttention& a, const UnicacheStore& store) {
    if (a.slots == 0) return {{}, true, 1, 1, 1, Divisor::of(1), Divisor::of(1), true};
    const Divisor tokens = Divisor::of(ceiling(a.slots, store.token_blocks));
    const Divisor channels = Divisor::of(ceiling(a.head_dim, store.channel_blocks));
    const bool eights = channels.by % 8 == 0 && (store.bits == 8 || a.head_dim % 16 == 0);
    return {{store.scale, store.scale_type == UNICACHE_FLOAT16},
            store.scale_batch == 1,
            static_cast<unsigned>(a.kv_heads),
            static_cast<unsigned>(store.token_blocks),
            static_cast<unsigned>(store.channel_blocks),
            tokens,
            channels,
            eights || store.channel_blocks == 1};
}

Plan plan_of(const UnicacheAttention& a, int64_t multiprocessors) {
    Plan plan{};
    plan.a = a;
    plan.key = scales_of(a, a.key), plan.value = scales_of(a, a.value);
    plan.rows = static_cast<unsigned>(a.group * a.queries);
    plan.lanes = 1;
    while (plan.lanes * CHANNELS < a.head_dim) plan.lanes *= 2;

    const int64_t tokens = (a.slots + a.window) * a.batch * a.kv_heads * ceiling(plan.rows, MOST_ROWS);
    int64_t stretch = tokens / (multiprocessors * BLOCKS_PER_MULTIPROCESSOR);
    if (stretch > LONGEST) stretch = LONGEST;
    if (stretch < tokens / MOST_BLOCKS) stretch = tokens / MOST_BLOCKS;
    plan.stretch = static_cast<unsigned>(ceiling(stretch + 1, GRAIN) * GRAIN);
    plan.store_parts = static_cast<unsigned>(ceiling(a.slots, plan.stretch));
    plan.parts = static_cast<unsigned>(plan.store_parts + ceiling(a.window, plan.stretch));
    return plan;
}

// Lays out the workspace, where there is one, and returns its bytes.
size_t lay_out(Plan& plan, void* workspace) {
    const UnicacheAttention& a = plan.a;
    const size_t rows = static_cast<size_t>(a.batch * a.kv_heads) * plan.rows, parts = rows * plan.parts;
    const size_t sums = parts * a.head_dim, softmax = parts * 2, logits = rows * (a.slots + a.window);
    if (workspace) {
        plan.sums = static_cast<float*>(workspace), plan.softmax = plan.sums + sums;
        plan.logits = a.store_mass || a.window_mass ? plan.softmax + softmax : nullptr;
    }
    return sizeof(float) * (sums + softmax + logits + 1);
}

// Whether the fast kernels take it: rows are whole chunks of 16 channels, aligned for their loads, and the scales of
// values are factors of the output or of weights.
bool wide(const Plan& plan) {
    const UnicacheAttention& a = plan.a;
    auto aligned = [](const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
    return a.head_dim % CHANNELS == 0 && (plan.value.folded() || plan.value.halves) &&
           aligned(a.key.codes, 2 * a.key.bits) && aligned(a.value.codes, 2 * a.value.bits) &&
           aligned(a.key_window, 16) && aligned(a.value_window, 16);
}

}  // namespace
