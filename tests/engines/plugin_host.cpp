// A TensorRT that runs one plugin on the host: it asks what TensorRT asks, in its order, and hands over real memory.
// Compiled together with the plugins, and with the kernels through engines/plugins/simt.h.
#include <NvInferRuntime.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

using namespace nvinfer1;

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace {

class Size final : public IDimensionExpr, apiv::VDimensionExpr {
    int64_t value;
    bool isConstant() const override { return value >= 0; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }

  public:
    explicit Size(int64_t value) : value(value) { mImpl = this; }
    int64_t get() const { return value; }
};

class Builder final : public IExprBuilder, apiv::VExprBuilder {
    std::deque<Size> sizes;
    const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&, const IDimensionExpr&) override {
        std::abort();
    }
    const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
        std::abort();
    }

  public:
    Builder() { mImpl = this; }
    const IDimensionExpr* constant(int64_t value) override { return &sizes.emplace_back(value); }
};

IPluginCreatorV3One* find(const char* name) {
    int32_t count;
    IPluginCreatorInterface* const* creators = getCreators(count);
    for (int i = 0; i < count; ++i) {
        auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
        if (!std::strcmp(creator->getPluginName(), name)) return creator;
    }
    return nullptr;
}

}  // namespace

// As engines/plugins/tensorrt has it in tests/engines/test_plugins.py.
struct HostTensor {
    int32_t type, rank;
    int64_t dims[4];
    void* data;
};

// Runs a plugin; without `execute`, only types and shapes of the outputs are found. A size of -1 is not known yet.
// Returns 0, or which step refused.
extern "C" int run_plugin(
    const char* name, const PluginField* fields, int field_count, HostTensor* tensors, int inputs, int outputs, int execute) {
    IPluginCreatorV3One* creator = find(name);
    if (!creator) return 1;
    const PluginFieldCollection given{field_count, fields};
    std::unique_ptr<IPluginV3> made(creator->createPlugin(name, &given, TensorRTPhase::kBUILD));
    if (!made) return 2;
    auto runtime_of = [](IPluginV3& plugin) {
        return static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    };
    // Through a plan: what is stored makes the plugin that runs, and a clone of it is an execution context's.
    const PluginFieldCollection* stored = runtime_of(*made)->getFieldsToSerialize();
    std::unique_ptr<IPluginV3> loaded(creator->createPlugin(name, stored, TensorRTPhase::kRUNTIME));
    if (!loaded) return 3;
    made.reset();
    std::unique_ptr<IPluginV3> plugin(loaded->clone());
    loaded.reset();
    auto* core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    auto* build = static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    auto* runtime = runtime_of(*plugin);
    if (std::strcmp(core->getPluginName(), name) || std::strcmp(core->getPluginNamespace(), "unicache")) return 4;
    if (build->getNbOutputs() != outputs) return 5;

    HostTensor* out = tensors + inputs;
    std::vector<DataType> types(inputs), out_types(outputs);
    Builder builder;
    std::vector<DimsExprs> shapes(inputs), out_shapes(outputs);
    for (int i = 0; i < inputs; ++i) {
        types[i] = static_cast<DataType>(tensors[i].type);
        shapes[i].nbDims = tensors[i].rank;
        for (int j = 0; j < tensors[i].rank; ++j) shapes[i].d[j] = builder.constant(tensors[i].dims[j]);
    }
    if (build->getOutputDataTypes(out_types.data(), outputs, types.data(), inputs)) return 6;
    if (build->getOutputShapes(shapes.data(), inputs, nullptr, 0, out_shapes.data(), outputs, builder)) return 7;
    for (int i = 0; i < outputs; ++i) {
        out[i].type = static_cast<int32_t>(out_types[i]);
        out[i].rank = out_shapes[i].nbDims;
        for (int j = 0; j < out[i].rank; ++j) out[i].dims[j] = static_cast<const Size*>(out_shapes[i].d[j])->get();
    }
    if (!execute) return 0;

    std::vector<DynamicPluginTensorDesc> dynamic(inputs + outputs);
    std::vector<PluginTensorDesc> desc(inputs + outputs);
    std::vector<const void*> sources(inputs);
    std::vector<void*> targets(outputs);
    for (int i = 0; i < inputs + outputs; ++i) {
        Dims dims{tensors[i].rank, {}};
        std::memcpy(dims.d, tensors[i].dims, sizeof tensors[i].dims);
        desc[i] = {dims, static_cast<DataType>(tensors[i].type), TensorFormat::kLINEAR, 1};
        dynamic[i] = {desc[i], dims, dims, dims};
        (i < inputs ? sources[i] : const_cast<const void*&>(targets[i - inputs])) = tensors[i].data;
    }
    for (int i = 0; i < inputs + outputs; ++i) {
        if (!build->supportsFormatCombination(i, dynamic.data(), inputs, outputs)) return 8;
        auto other = dynamic;
        other[i].desc.format = TensorFormat::kCHW32;
        if (build->supportsFormatCombination(i, other.data(), inputs, outputs)) return 8;
    }
    const DynamicPluginTensorDesc* dynamic_out = dynamic.data() + inputs;
    if (build->configurePlugin(dynamic.data(), inputs, dynamic_out, outputs)) return 9;
    std::vector<char> workspace(build->getWorkspaceSize(dynamic.data(), inputs, dynamic_out, outputs) + 64, 0x7f);
    char* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    if (runtime->onShapeChange(desc.data(), inputs, desc.data() + inputs, outputs)) return 10;
    const int failed =
        runtime->enqueue(desc.data(), desc.data() + inputs, sources.data(), targets.data(), aligned, nullptr);
    return failed ? 11 : 0;
}
