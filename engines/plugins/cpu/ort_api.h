// What custom operators need of ONNX Runtime's C API, declared by hand, so that the library builds with a compiler
// alone.
//
// The API is a table of functions that only grows at its end: a slot's number and its function's type never change.
// This file holds the numbers of the slots called here and the layout of OrtCustomOp, as of API version 20.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t API_VERSION = 20;                                    // of ONNX Runtime 1.20
constexpr int INVALID_ARGUMENT = 2, RUNTIME_EXCEPTION = 6;              // OrtErrorCode
constexpr int FLOAT = 1, INT8 = 3, INT32 = 6, INT64 = 7, FLOAT16 = 10;  // ONNXTensorElementDataType
constexpr int ANY = 0;                                                  // of a custom operator's input: every type
constexpr int REQUIRED = 0, OPTIONAL = 1;                               // OrtCustomOpInputOutputCharacteristic

struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;
struct ShapeContext;
using Table = void* const*;

struct ApiBase {
    Table (*table)(uint32_t version);  // null where this ONNX Runtime is older
    const char* (*version)();
};

template <int Slot, class Result, class... Arguments>
Result call(Table table, Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(table[Slot])(arguments...);
}

inline Status* create_status(Table api, int code, const char* message) { return call<0, Status*>(api, code, message); }
inline Status* create_domain(Table api, const char* name, Domain** out) { return call<26, Status*>(api, name, out); }
inline Status* add_operator(Table api, Domain* domain, const struct Operator* op) {
    return call<27, Status*>(api, domain, op);
}
inline Status* add_domain(Table api, SessionOptions* options, Domain* domain) {
    return call<28, Status*>(api, options, domain);
}
inline Status* data(Table api, const Value* value, void** out) {
    return call<51, Status*>(api, const_cast<Value*>(value), out);
}
inline Status* element_type(Table api, const TensorInfo* info, int* out) { return call<60, Status*>(api, info, out); }
inline Status* rank(Table api, const TensorInfo* info, size_t* out) { return call<61, Status*>(api, info, out); }
inline Status* dimensions(Table api, const TensorInfo* info, int64_t* out, size_t count) {
    return call<62, Status*>(api, info, out, count);
}
inline Status* tensor_info(Table api, const Value* value, TensorInfo** out) {
    return call<65, Status*>(api, value, out);
}
inline Status* attribute(Table api, const KernelInfo* info, const char* name, float* out) {
    return call<85, Status*>(api, info, name, out);
}
inline Status* attribute(Table api, const KernelInfo* info, const char* name, int64_t* out) {
    return call<86, Status*>(api, info, name, out);
}
inline Status* input(Table api, const KernelContext* context, size_t index, const Value** out) {
    return call<90, Status*>(api, context, index, out);
}
// Null in `out` where the graph does not want this output.
inline Status* output(Table api, KernelContext* context, size_t index, const int64_t* shape, size_t rank, Value** out) {
    return call<91, Status*>(api, context, index, shape, rank, out);
}
inline void release(Table api, Status* status) { call<93, void>(api, status); }
inline void release(Table api, TensorInfo* info) { call<99, void>(api, info); }
// Batches 0: the threads of the session fetch one task after the other.
inline Status* parallel_for(Table api, const KernelContext* context, void (*task)(void* data, size_t index),
                            size_t count, size_t batches, void* data) {
    return call<274, Status*>(api, context, task, count, batches, data);
}

// OrtCustomOp. What is null is not called.
struct Operator {
    uint32_t version;
    void* (*create)(const Operator*, Table, const KernelInfo*);
    const char* (*name)(const Operator*);
    const char* (*provider)(const Operator*);
    int (*input_type)(const Operator*, size_t);
    size_t (*inputs)(const Operator*);
    int (*output_type)(const Operator*, size_t);
    size_t (*outputs)(const Operator*);
    void (*compute)(void* kernel, KernelContext*);
    void (*destroy)(void* kernel);
    int (*input_characteristic)(const Operator*, size_t);
    int (*output_characteristic)(const Operator*, size_t);
    int (*input_memory)(const Operator*, size_t);
    int (*variadic_input_least)(const Operator*);
    int (*variadic_input_homogeneous)(const Operator*);
    int (*variadic_output_least)(const Operator*);
    int (*variadic_output_homogeneous)(const Operator*);
    Status* (*create_v2)(const Operator*, Table, const KernelInfo*, void** kernel);
    Status* (*compute_v2)(void* kernel, KernelContext*);
    Status* (*infer_shapes)(const Operator*, ShapeContext*);
    int (*first_version)(const Operator*);
    int (*last_version)(const Operator*);
    size_t (*may_inplace)(int** inputs, int** outputs);
    void (*release_may_inplace)(int* inputs, int* outputs);
    size_t (*alias)(int** inputs, int** outputs);
    void (*release_alias)(int* inputs, int* outputs);
};
static_assert(sizeof(void*) == 8 && sizeof(Operator) == 208, "OrtCustomOp of a 64-bit platform");

}  // namespace ort
