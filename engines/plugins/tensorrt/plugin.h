// What the plugins share: from the description of an operator, TensorRT's four interfaces and a creator.
//
// An operator says what it takes and gives (tables of tensors, types and named dimensions), what else is wrong with
// some inputs, how much workspace it needs and how it runs. From that follow the shape and type functions, formats,
// serialization, and an error for everything that it does not support, when the network is made.
//
// Only the first versions of TensorRT's interfaces are used (v_1_0, in its headers since 10.0), and nothing of TensorRT
// is linked: one library is loaded by TensorRT 10, 11 and TensorRT-RTX, whichever headers it was compiled with.
#pragma once
#include <NvInferRuntime.h>

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

namespace unicache {

using namespace nvinfer1;

constexpr char NAMESPACE[] = "unicache", VERSION[] = "1";

// A set of types.
constexpr unsigned type_bit(DataType type) { return 1u << static_cast<int>(type); }
constexpr unsigned FLOAT = type_bit(DataType::kFLOAT) | type_bit(DataType::kHALF);
constexpr unsigned FLOAT32 = type_bit(DataType::kFLOAT), INT8 = type_bit(DataType::kINT8);
constexpr unsigned INT32 = type_bit(DataType::kINT32), INT64 = type_bit(DataType::kINT64);

// An input or output. Dimensions of one name are equal; an output's is an input's, or an attribute of the operator.
struct Tensor {
    const char* name;
    unsigned types;
    const char* dims[4];
    int like = -1;  // the input before it that has the same type
    int rank() const { return dims[3] ? 4 : 3; }
};

// An attribute of the ONNX node: a field that TensorRT reads from the node, stores in the plan, and gives back.
// One that is not required keeps its value where the node has none.
struct Attribute {
    Attribute(const char* name, int32_t& value, bool required = true)
        : name(name), type(PluginFieldType::kINT32), value(&value), required(required) {}
    Attribute(const char* name, float& value) : name(name), type(PluginFieldType::kFLOAT32), value(&value) {}
    const char* name;
    PluginFieldType type;
    void* value;
    bool required = true;
};

// What a kernel has a limit for.
struct Size {
    const char* name;
    int64_t size, most;
};

// printf into a string.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// True where there is a complaint. It goes to TensorRT's log, after the operator's name.
bool failed(const char* operator_name, const std::string& complaint);

// Complaints, or "". A size of -1 is not known yet.
std::string wrong_types(const Tensor* inputs, int count, const DataType* types);
std::string wrong_shapes(const Tensor* inputs, int count, const Dims* shapes);
std::string wrong_sizes(std::initializer_list<Size> sizes);
int64_t times(int64_t a, int64_t b);  // -1 where one is not known yet
std::string read(const PluginFieldCollection& fields, const std::vector<Attribute>& attributes);

// The input's dimension of that name; NULL: none has it.
const IDimensionExpr* find_dimension(const Tensor* inputs, int count, const DimsExprs* shapes, const char* name);
Dims known(const DimsExprs& shape);

template <class Operator>
class Plugin final : public IPluginV3,
                     public IPluginV3OneCore,
                     public IPluginV3OneBuild,
                     public IPluginV3OneRuntime {
    static constexpr int INPUTS = sizeof Operator::INPUTS / sizeof(Tensor);
    static constexpr int OUTPUTS = sizeof Operator::OUTPUTS / sizeof(Tensor);

    Operator op;
    std::vector<PluginField> fields;
    PluginFieldCollection collection{};

    static const Tensor& tensor(int i) { return i < INPUTS ? Operator::INPUTS[i] : Operator::OUTPUTS[i - INPUTS]; }

    bool wrong(const Dims* shapes) const {
        std::string complaint = wrong_shapes(Operator::INPUTS, INPUTS, shapes);
        return failed(Operator::NAME, complaint.empty() ? op.wrong(shapes) : complaint);
    }

    bool wrong(const PluginTensorDesc* inputs) const {
        DataType types[INPUTS];
        Dims shapes[INPUTS];
        for (int i = 0; i < INPUTS; ++i) types[i] = inputs[i].type, shapes[i] = inputs[i].dims;
        return failed(Operator::NAME, wrong_types(Operator::INPUTS, INPUTS, types)) || wrong(shapes);
    }

  public:
    explicit Plugin(const Operator& op) : op(op) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        if (type == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
        if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
        return static_cast<IPluginV3OneRuntime*>(this);
    }
    IPluginV3* clone() noexcept override { return new Plugin(op); }

    const char* getPluginName() const noexcept override { return Operator::NAME; }
    const char* getPluginVersion() const noexcept override { return VERSION; }
    const char* getPluginNamespace() const noexcept override { return NAMESPACE; }

    int32_t getNbOutputs() const noexcept override { return OUTPUTS; }

    int32_t getOutputDataTypes(
        DataType* output, int32_t, const DataType* input, int32_t count) const noexcept override {
        if (count != INPUTS) return failed(Operator::NAME, text("has %d inputs, expected %d", count, INPUTS));
        if (failed(Operator::NAME, wrong_types(Operator::INPUTS, INPUTS, input))) return 1;
        for (int i = 0; i < OUTPUTS; ++i) {
            const Tensor& out = Operator::OUTPUTS[i];  // like an input, or of one type
            output[i] = out.like < 0 ? static_cast<DataType>(__builtin_ctz(out.types)) : input[out.like];
        }
        return 0;
    }

    int32_t getOutputShapes(
        const DimsExprs* input,
        int32_t count,
        const DimsExprs*,
        int32_t,
        DimsExprs* output,
        int32_t,
        IExprBuilder& builder) noexcept override {
        if (count != INPUTS) return failed(Operator::NAME, text("has %d inputs, expected %d", count, INPUTS));
        Dims shapes[INPUTS];
        for (int i = 0; i < INPUTS; ++i) shapes[i] = known(input[i]);
        if (wrong(shapes)) return 1;
        for (int i = 0; i < OUTPUTS; ++i) {
            const Tensor& out = Operator::OUTPUTS[i];
            output[i].nbDims = out.rank();
            for (int j = 0; j < out.rank(); ++j) {
                output[i].d[j] = find_dimension(Operator::INPUTS, INPUTS, input, out.dims[j]);
                for (const Attribute& each : op.attributes())
                    if (!output[i].d[j] && !std::strcmp(each.name, out.dims[j]))
                        output[i].d[j] = builder.constant(*static_cast<const int32_t*>(each.value));
            }
        }
        return 0;
    }

    bool supportsFormatCombination(
        int32_t i, const DynamicPluginTensorDesc* tensors, int32_t, int32_t) noexcept override {
        const PluginTensorDesc& desc = tensors[i].desc;
        const int like = tensor(i).like;
        return desc.format == TensorFormat::kLINEAR && tensor(i).types & type_bit(desc.type) &&
               (like < 0 || desc.type == tensors[like].desc.type);
    }

    int32_t configurePlugin(
        const DynamicPluginTensorDesc* input, int32_t, const DynamicPluginTensorDesc*, int32_t) noexcept override {
        PluginTensorDesc inputs[INPUTS];
        for (int i = 0; i < INPUTS; ++i) inputs[i] = input[i].desc;
        return wrong(inputs);
    }

    size_t getWorkspaceSize(
        const DynamicPluginTensorDesc* input,
        int32_t,
        const DynamicPluginTensorDesc*,
        int32_t) const noexcept override {
        PluginTensorDesc inputs[INPUTS];
        for (int i = 0; i < INPUTS; ++i) inputs[i] = input[i].desc, inputs[i].dims = input[i].max;
        return op.workspace(inputs);
    }

    int32_t onShapeChange(
        const PluginTensorDesc* input, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
        return wrong(input);
    }

    int32_t enqueue(
        const PluginTensorDesc* input,
        const PluginTensorDesc*,
        const void* const* inputs,
        void* const* outputs,
        void* workspace,
        cudaStream_t stream) noexcept override {
        int error = op.run(input, inputs, outputs, workspace, stream);
        const char* why = cudaGetErrorString(static_cast<cudaError_t>(error));
        return failed(Operator::NAME, error ? text("the kernel failed: CUDA error %d, %s", error, why) : "");
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

    const PluginFieldCollection* getFieldsToSerialize() noexcept override {
        fields.clear();
        for (const Attribute& each : op.attributes()) fields.emplace_back(each.name, each.value, each.type, 1);
        collection = {static_cast<int32_t>(fields.size()), fields.data()};
        return &collection;
    }
};

template <class Operator>
class Creator final : public IPluginCreatorV3One {
    std::vector<PluginField> fields;
    PluginFieldCollection collection;

  public:
    Creator() {
        for (const Attribute& each : Operator().attributes()) fields.emplace_back(each.name, nullptr, each.type, 1);
        collection = {static_cast<int32_t>(fields.size()), fields.data()};
    }
    IPluginV3* createPlugin(const char*, const PluginFieldCollection* given, TensorRTPhase) noexcept override {
        Operator op;
        if (failed(Operator::NAME, read(*given, op.attributes()))) return nullptr;
        return new Plugin<Operator>(op);
    }
    const PluginFieldCollection* getFieldNames() noexcept override { return &collection; }
    const char* getPluginName() const noexcept override { return Operator::NAME; }
    const char* getPluginVersion() const noexcept override { return VERSION; }
    const char* getPluginNamespace() const noexcept override { return NAMESPACE; }
};

}  // namespace unicache
