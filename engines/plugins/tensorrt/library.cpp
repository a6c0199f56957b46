// The library's entries for TensorRT, and what the plugins share that needs no template.
#include <cstdarg>
#include <cstdio>

#include "quant_kv_attention.h"
#include "topk_gather.h"

namespace unicache {
namespace {

ILoggerFinder* logger_finder = nullptr;
std::string last_complaint;

const char* name_of(DataType type) {
    constexpr const char* NAMES[] = {
        "float32", "float16", "int8", "int32", "bool", "uint8", "float8", "bfloat16", "int64", "int4"};
    const size_t i = static_cast<size_t>(type);
    return i < sizeof NAMES / sizeof *NAMES ? NAMES[i] : "of a type that is not known here";
}

std::string names_of(unsigned types) {
    std::string names;
    for (int i = 0; types >> i; ++i)
        if (types >> i & 1) names += (names.empty() ? "" : " or ") + std::string(name_of(static_cast<DataType>(i)));
    return names;
}

std::string dims_of(const Tensor& tensor) {
    std::string names;
    for (int j = 0; j < tensor.rank(); ++j) names += (j ? ", " : "[") + std::string(tensor.dims[j]);
    return names + "]";
}

}  // namespace

std::string text(const char* format, ...) {
    char line[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(line, sizeof line, format, values);
    va_end(values);
    return line;
}

bool failed(const char* operator_name, const std::string& complaint) {
    if (complaint.empty()) return false;
    last_complaint = operator_name + (": " + complaint);
    ILogger* logger = logger_finder ? logger_finder->findLogger() : nullptr;
    if (logger) logger->log(ILogger::Severity::kERROR, last_complaint.c_str());
    return true;
}

std::string wrong_types(const Tensor* inputs, int count, const DataType* types) {
    for (int i = 0; i < count; ++i) {
        const Tensor& tensor = inputs[i];
        const char* type = name_of(types[i]);
        if (!(tensor.types & type_bit(types[i])))
            return text("%s is %s, supported: %s", tensor.name, type, names_of(tensor.types).c_str());
        if (tensor.like >= 0 && types[i] != types[tensor.like]) {
            const char* other = inputs[tensor.like].name;
            return text("%s is %s and %s is %s, not the same", tensor.name, type, other, name_of(types[tensor.like]));
        }
    }
    return "";
}

std::string wrong_shapes(const Tensor* inputs, int count, const Dims* shapes) {
    for (int i = 0; i < count; ++i) {
        const Tensor& tensor = inputs[i];
        if (shapes[i].nbDims != tensor.rank())
            return text("%s has %d dimensions, expected %s", tensor.name, shapes[i].nbDims, dims_of(tensor).c_str());
        for (int j = 0; j < tensor.rank(); ++j)
            for (int before = 0; before <= i; ++before)
                for (int d = 0; d < inputs[before].rank(); ++d) {
                    const long size = shapes[i].d[j], other = shapes[before].d[d];
                    if (size < 0 || other < 0 || size == other || std::strcmp(tensor.dims[j], inputs[before].dims[d]))
                        continue;
                    return text(
                        "%s has %ld %s, %s has %ld", tensor.name, size, tensor.dims[j], inputs[before].name, other);
                }
    }
    return "";
}

std::string wrong_sizes(std::initializer_list<Size> sizes) {
    for (const Size& s : sizes)
        if (s.size > s.most)
            return text(
                "%s %lld is not supported (at most %lld)",
                s.name,
                static_cast<long long>(s.size),
                static_cast<long long>(s.most));
    return "";
}

int64_t times(int64_t a, int64_t b) { return a < 0 || b < 0 ? -1 : a * b; }

std::string read(const PluginFieldCollection& fields, const std::vector<Attribute>& attributes) {
    for (const Attribute& attribute : attributes) {
        double number = 0;
        bool found = false;
        for (int i = 0; i < fields.nbFields && !found; ++i) {
            const PluginField& field = fields.fields[i];
            if (std::strcmp(field.name, attribute.name)) continue;
            found = field.data && field.length == 1;
            if (found && field.type == PluginFieldType::kFLOAT32)
                number = *static_cast<const float*>(field.data);
            else if (found && field.type == PluginFieldType::kINT32)
                number = *static_cast<const int32_t*>(field.data);
            else if (found && field.type == PluginFieldType::kINT64)
                number = static_cast<double>(*static_cast<const int64_t*>(field.data));
            else
                return text("attribute %s is no number of a known type", attribute.name);
        }
        if (!found && attribute.required) return text("attribute %s is missing", attribute.name);
        if (!found) continue;
        if (attribute.type == PluginFieldType::kFLOAT32)
            *static_cast<float*>(attribute.value) = static_cast<float>(number);
        else
            *static_cast<int32_t*>(attribute.value) = static_cast<int32_t>(number);
    }
    return "";
}

const IDimensionExpr* find_dimension(const Tensor* inputs, int count, const DimsExprs* shapes, const char* name) {
    for (int i = 0; i < count; ++i)
        for (int j = 0; j < inputs[i].rank(); ++j)
            if (!std::strcmp(inputs[i].dims[j], name)) return shapes[i].d[j];
    return nullptr;
}

Dims known(const DimsExprs& shape) {
    Dims dims{};
    dims.nbDims = shape.nbDims;
    for (int j = 0; j < shape.nbDims; ++j) dims.d[j] = shape.d[j]->isConstant() ? shape.d[j]->getConstantValue() : -1;
    return dims;
}

}  // namespace unicache

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { unicache::logger_finder = finder; }

// The last complaint since it was asked for, or "": TensorRT-RTX has a finder that finds no logger.
extern "C" const char* unicache_complaint() {
    static std::string told;
    told.swap(unicache::last_complaint);
    unicache::last_complaint.clear();
    return told.c_str();
}

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static unicache::Creator<unicache::QuantKVAttention> quant_kv_attention;
    static unicache::Creator<unicache::TopKGather> topk_gather;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&quant_kv_attention, &topk_gather};
    count = sizeof creators / sizeof *creators;
    return creators;
}
