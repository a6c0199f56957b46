// The operator QuantKVAttention: export/operators.py states what it computes, quant_kv_attention.cu computes it.
#pragma once
#include "../kernels.h"
#include "plugin.h"

extern "C" size_t unicache_quant_kv_attention_workspace(const UnicacheAttention* arguments);
extern "C" int unicache_quant_kv_attention(const UnicacheAttention* arguments, void* workspace, cudaStream_t stream);

namespace unicache {

struct QuantKVAttention {
    static constexpr char NAME[] = "QuantKVAttention";

    static constexpr Tensor INPUTS[] = {
        {"query", FLOAT, {"batch", "heads", "queries", "head_dim"}},
        {"key_store", INT8, {"batch", "kv_heads", "slots", "key_bytes"}},
        {"key_scale", FLOAT, {"key_scale_batch", "kv_heads", "key_token_blocks", "key_channel_blocks"}},
        {"value_store", INT8, {"batch", "kv_heads", "slots", "value_bytes"}},
        {"value_scale", FLOAT, {"value_scale_batch", "kv_heads", "value_token_blocks", "value_channel_blocks"}},
        {"store_bias", FLOAT, {"batch", "kv_heads", "slots"}},
        {"key_window", FLOAT, {"batch", "kv_heads", "window", "head_dim"}, 0},
        {"value_window", FLOAT, {"batch", "kv_heads", "window", "head_dim"}, 0},
        {"window_bias", FLOAT, {"batch", "queries", "window"}},
    };
    static constexpr Tensor OUTPUTS[] = {
        {"output", FLOAT, {"batch", "heads", "queries", "head_dim"}, 0},
        {"store_mass", FLOAT, {"batch", "kv_heads", "slots"}, 0},
        {"window_mass", FLOAT, {"batch", "kv_heads", "window"}, 0},
    };

    float scale = 0;
    int32_t key_bits = 0, value_bits = 0;
    int32_t masses = 1;  // 0: no node reads them, and they are not computed

    std::vector<Attribute> attributes() {
        return {{"scale", scale}, {"key_bits", key_bits}, {"value_bits", value_bits}, {"masses", masses, false}};
    }

    std::string wrong(const Dims* input) const {
        const long batch = input[0].d[0], heads = input[0].d[1], head_dim = input[0].d[3], kv_heads = input[1].d[1];
        const long queries = input[0].d[2], slots = input[1].d[2], window = input[6].d[2];
        const std::string sizes = wrong_sizes({
            {"head_dim", head_dim, UNICACHE_MOST_HEAD_DIM},
            {"batch * kv_heads", times(batch, kv_heads), UNICACHE_MOST_HEADS},
            {"heads / kv_heads * queries", times(kv_heads > 0 ? heads / kv_heads : -1, queries), UNICACHE_MOST_HEADS},
            {"slots", slots, UNICACHE_MOST_TOKENS},
            {"window", window, UNICACHE_MOST_TOKENS},
            {"queries * window", times(queries, window), UINT32_MAX},
        });
        if (!sizes.empty()) return sizes;
        if (heads >= 0 && kv_heads > 0 && heads % kv_heads)
            return text("%ld heads are not a multiple of the %ld kv_heads", heads, kv_heads);
        const std::string key = wrong_store("key", key_bits, input[1], input[2], batch, head_dim);
        return key.empty() ? wrong_store("value", value_bits, input[3], input[4], batch, head_dim) : key;
    }

    size_t workspace(const PluginTensorDesc* input) const {
        const UnicacheAttention a = arguments(input);
        return unicache_quant_kv_attention_workspace(&a);
    }

    int run(
        const PluginTensorDesc* input,
        const void* const* inputs,
        void* const* outputs,
        void* workspace,
        cudaStream_t stream) const {
        UnicacheAttention a = arguments(input);
        a.query = inputs[0];
        a.key.codes = static_cast<const int8_t*>(inputs[1]), a.key.scale = inputs[2];
        a.value.codes = static_cast<const int8_t*>(inputs[3]), a.value.scale = inputs[4];
        a.store_bias = inputs[5], a.key_window = inputs[6], a.value_window = inputs[7], a.window_bias = inputs[8];
        a.output = outputs[0];
        if (masses) a.store_mass = outputs[1], a.window_mass = outputs[2];
        return unicache_quant_kv_attention(&a, workspace, stream);
    }

  private:
    // Sizes of -1 are not known yet.
    static std::string wrong_store(
        const char* of, int bits, const Dims& codes, const Dims& scales, long batch, long head_dim) {
        if (bits != 8 && bits != 4) return text("%s_bits %d is not supported (8 or 4)", of, bits);
        const long slots = codes.d[2], bytes = codes.d[3], expected = bits == 8 ? head_dim : (head_dim + 1) / 2;
        if (head_dim >= 0 && bytes >= 0 && bytes != expected)
            return text("%s_store has %ld bytes a slot, %d bits of head_dim %ld are %ld", of, bytes, bits, head_dim, expected);
        const long scale_batch = scales.d[0], token_blocks = scales.d[2], channel_blocks = scales.d[3];
        if (scale_batch >= 0 && batch >= 0 && scale_batch != 1 && scale_batch != batch)
            return text("%s_scale has %ld in the batch, expected 1 or %ld", of, scale_batch, batch);
        if (slots > 0 && (token_blocks == 0 || token_blocks > slots))
            return text("%s_scale has %ld blocks of the %ld slots", of, token_blocks, slots);
        if (head_dim > 0 && (channel_blocks == 0 || channel_blocks > head_dim))
            return text("%s_scale has %ld blocks of the %ld channels", of, channel_blocks, head_dim);
        return "";
    }

    // All but the pointers.
    UnicacheAttention arguments(const PluginTensorDesc* input) const {
        auto type = [&](int i) { return input[i].type == DataType::kHALF ? UNICACHE_FLOAT16 : UNICACHE_FLOAT32; };
        auto store = [&](int scales, int64_t bits) {
            const Dims& dims = input[scales].dims;
            return UnicacheStore{nullptr, nullptr, type(scales), bits, dims.d[0], dims.d[2], dims.d[3]};
        };
        const Dims &query = input[0].dims, &codes = input[1].dims;
        UnicacheAttention a{};
        a.batch = query.d[0], a.kv_heads = codes.d[1], a.group = query.d[1] / codes.d[1], a.queries = query.d[2];
        a.slots = codes.d[2], a.window = input[6].dims.d[2], a.head_dim = query.d[3];
        a.type = type(0), a.store_bias_type = type(5), a.window_bias_type = type(8);
        a.softmax_scale = scale;
        a.key = store(2, key_bits), a.value = store(4, value_bits);
        return a;
    }
};

}  // namespace unicache
