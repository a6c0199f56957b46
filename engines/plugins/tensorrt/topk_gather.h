// The operator TopKGather: export/operators.py states what it computes, topk_gather.cu computes it.
#pragma once
#include "../kernels.h"
#include "plugin.h"

extern "C" int unicache_topk_gather(
    const float* score, const UnicacheRows* rows, int64_t* index, int heads, int tokens, int k, cudaStream_t stream);

namespace unicache {

struct TopKGather {
    static constexpr char NAME[] = "TopKGather";
    static constexpr Tensor INPUTS[] = {
        {"score", FLOAT32, {"batch", "kv_heads", "tokens"}},
        {"key", FLOAT | INT8, {"batch", "kv_heads", "tokens", "head_dim"}},
        {"value", FLOAT | INT8, {"batch", "kv_heads", "tokens", "head_dim"}},
        {"positions", INT32, {"batch", "kv_heads", "tokens"}},
        {"bias", FLOAT, {"batch", "kv_heads", "tokens"}},
    };
    static constexpr Tensor OUTPUTS[] = {
        {"key", FLOAT | INT8, {"batch", "kv_heads", "k", "head_dim"}, 1},
        {"value", FLOAT | INT8, {"batch", "kv_heads", "k", "head_dim"}, 2},
        {"positions", INT32, {"batch", "kv_heads", "k"}},
        {"bias", FLOAT, {"batch", "kv_heads", "k"}, 4},
        {"index", INT64, {"batch", "kv_heads", "k"}},
    };

    int32_t k = 0;

    std::vector<Attribute> attributes() { return {{"k", k}}; }

    std::string wrong(const Dims* input) const {
        const int64_t tokens = input[0].d[2];
        if (k < 1) return text("k %d is not supported (at least 1)", k);
        if (tokens >= 0 && k > tokens) return text("k %d is more than the %ld tokens", k, static_cast<long>(tokens));
        const int64_t width = std::max(input[1].d[3], input[2].d[3]);
        return wrong_sizes({
            {"batch * kv_heads", times(input[0].d[0], input[0].d[1]), UNICACHE_MOST_HEADS},
            {"tokens", tokens, INT32_MAX},
            {"k * head_dim", times(k, width), UINT32_MAX / sizeof(float)},
        });
    }

    size_t workspace(const PluginTensorDesc*) const { return 0; }

    int run(
        const PluginTensorDesc* input, const void* const* inputs, void* const* outputs, void*, cudaStream_t stream) {
        UnicacheRows rows[4];
        for (int i = 0; i < 4; ++i) {
            const PluginTensorDesc& desc = input[i + 1];
            const int64_t width = desc.dims.nbDims == 4 ? desc.dims.d[3] : 1;
            rows[i] = {inputs[i + 1], outputs[i], width * size_of(desc.type)};
        }
        const Dims& score = input[0].dims;
        return unicache_topk_gather(
            static_cast<const float*>(inputs[0]),
            rows,
            static_cast<int64_t*>(outputs[4]),
            static_cast<int>(score.d[0] * score.d[1]),
            static_cast<int>(score.d[2]),
            k,
            stream);
    }

  private:
    static int64_t size_of(DataType type) {
        return type == DataType::kINT8 ? 1 : type == DataType::kHALF ? 2 : 4;
    }
};

}  // namespace unicache
