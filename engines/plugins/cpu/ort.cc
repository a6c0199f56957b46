// Registers the CPU kernels with ONNX Runtime as the operators unicache::QuantKVAttention and unicache::TopKGather:
// where this library is registered a node runs the kernel, elsewhere the function body that its model brings. And
// unicache::RowMatMul, which no file has: engines/products.py puts it in the place of MatMul and Gemm.
#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cpu.h"
#include "ort_api.h"

namespace {

using Shape = std::vector<int64_t>;

ort::Table api;

// What a user reads: it names the operator and the input.
struct Refused {
    std::string message;
};

// A status of ONNX Runtime, passed on.
struct Failed {
    ort::Status* status;
};

void check(ort::Status* status) {
    if (status) throw Failed{status};
}

template <class Body>
ort::Status* guarded(Body body) {
    try {
        body();
        return nullptr;
    } catch (const Failed& failed) {
        return failed.status;
    } catch (const Refused& refused) {
        return ort::create_status(api, ort::INVALID_ARGUMENT, refused.message.c_str());
    } catch (const std::exception& error) {
        return ort::create_status(api, ort::RUNTIME_EXCEPTION, error.what());
    }
}

std::string text(const Shape& shape) {
    std::string joined;
    for (int64_t size : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
    return "[" + joined + "]";
}

struct Tensor {
    const char* name;
    const void* data;
    int type;
    Shape shape;

    int64_t bytes() const { return type == ort::INT8 ? 1 : type == ort::FLOAT16 ? 2 : 4; }
    int64_t width() const { return shape[3]; }
    UnicacheType floats() const { return type == ort::FLOAT16 ? UNICACHE_FLOAT16 : UNICACHE_FLOAT32; }
};

// One run of an operator: its inputs by number, its outputs, its session's threads.
class Run {
    const char* name;
    ort::KernelContext* context;
    ort::Status* status = nullptr;

    static int parallel(void* self, void (*task)(void*, size_t), size_t count, void* data) {
        Run& run = *static_cast<Run*>(self);
        run.status = ort::parallel_for(api, run.context, task, count, 0, data);
        return run.status ? UNICACHE_INVALID : 0;
    }

public:
    const UnicacheThreads threads{parallel, this};

    Run(const char* name, ort::KernelContext* context) : name(name), context(context) {}

    void refuse(const std::string& message) const { throw Refused{std::string(name) + ": " + message}; }

    // Of any rank, if 0 is expected.
    Tensor input(size_t index, const char* input_name, size_t expected_rank) const {
        const ort::Value* value = nullptr;
        check(ort::input(api, context, index, &value));
        if (!value) refuse(std::string(input_name) + " is missing");
        ort::TensorInfo* info;
        check(ort::tensor_info(api, value, &info));
        Tensor tensor{input_name, nullptr, 0, {}};
        size_t rank = 0;
        ort::Status* status = ort::element_type(api, info, &tensor.type);
        if (!status) status = ort::rank(api, info, &rank);
        tensor.shape.resize(rank);
        if (!status) status = ort::dimensions(api, info, tensor.shape.data(), rank);
        ort::release(api, info);
        check(status);
        void* data;
        check(ort::data(api, value, &data));
        tensor.data = data;
        if (expected_rank && rank != expected_rank)
            refuse(std::string(input_name) + " must have " + std::to_string(expected_rank) + " dimensions, got " +
                   text(tensor.shape));
        return tensor;
    }

    void expect(const Tensor& tensor, const Shape& shape) const {
        if (tensor.shape != shape)
            refuse(std::string(tensor.name) + " must be " + text(shape) + ", got " + text(tensor.shape));
    }

    // Null where the graph does not want it.
    void* output(size_t index, const Shape& shape) const {
        ort::Value* value = nullptr;
        check(ort::output(api, context, index, shape.data(), shape.size(), &value));
        void* data = nullptr;
        if (value) check(ort::data(api, value, &data));
        return data;
    }

    void done(int code) const {
        check(status);
        if (code == UNICACHE_NO_MEMORY) throw std::bad_alloc();
        if (code) refuse("the kernel does not take these sizes");
    }
};

class QuantKVAttention {
    float scale;
    int64_t bits[2], masses = 1;  // masses 0: no node reads them, and they are not computed

    UnicacheStore store(const Run& run, const Tensor& codes, const Tensor& scale, int64_t bits,
                        const Shape& rows) const {
        const int64_t head_dim = rows[3], bytes = bits == 8 ? head_dim : (head_dim + 1) / 2;
        run.expect(codes, {rows[0], rows[1], rows[2], bytes});
        const auto fits = [](int64_t blocks, int64_t size) { return blocks <= size && (blocks > 0 || size == 0); };
        if ((scale.shape[0] != 1 && scale.shape[0] != rows[0]) || scale.shape[1] != rows[1] ||
            !(scale.shape[2] == 1 || fits(scale.shape[2], rows[2])) || !fits(scale.shape[3], head_dim))
            run.refuse(std::string(scale.name) + " is " + text(scale.shape) + ", which does not fit rows of " +
                       text(rows));
        return {static_cast<const int8_t*>(codes.data),
                scale.data,
                scale.floats(),
                bits,
                scale.shape[0],
                scale.shape[2],
                scale.shape[3]};
    }

public:
    static constexpr const char* NAME = "QuantKVAttention";

    explicit QuantKVAttention(const ort::KernelInfo* info) {
        check(ort::attribute(api, info, "scale", &scale));
        check(ort::attribute(api, info, "key_bits", &bits[0]));
        check(ort::attribute(api, info, "value_bits", &bits[1]));
        if (ort::Status* missing = ort::attribute(api, info, "masses", &masses)) ort::release(api, missing);
        for (int64_t each : bits)
            if (each != 8 && each != 4)
                throw Refused{std::string(NAME) + ": bits must be 8 or 4, got " + std::to_string(each)};
    }

    void operator()(Run& run) const {
        const Tensor query = run.input(0, "query", 4);
        const Tensor key_store = run.input(1, "key_store", 4), key_scale = run.input(2, "key_scale", 4);
        const Tensor value_store = run.input(3, "value_store", 4), value_scale = run.input(4, "value_scale", 4);
        const Tensor store_bias = run.input(5, "store_bias", 3);
        const Tensor key_window = run.input(6, "key_window", 4), value_window = run.input(7, "value_window", 4);
        const Tensor window_bias = run.input(8, "window_bias", 3);

        const int64_t batch = query.shape[0], heads = query.shape[1], queries = query.shape[2],
                      head_dim = query.width();
        const int64_t kv_heads = key_store.shape[1], slots = key_store.shape[2], window = key_window.shape[2];
        const Shape rows{batch, kv_heads, slots, head_dim};
        if (head_dim == 0 || kv_heads == 0 || heads % kv_heads)
            run.refuse("query is " + text(query.shape) + ", which does not fit " + std::to_string(kv_heads) +
                       " KV heads");
        run.expect(store_bias, {batch, kv_heads, slots});
        run.expect(key_window, {batch, kv_heads, window, head_dim});
        run.expect(value_window, key_window.shape);
        run.expect(window_bias, {batch, queries, window});
        for (const Tensor* tensor : {&key_scale, &value_scale, &store_bias, &window_bias})
            if (tensor->type != ort::FLOAT && tensor->type != ort::FLOAT16)
                run.refuse(std::string(tensor->name) + " must be float or float16");
        UnicacheAttention arguments{};
        arguments.batch = batch, arguments.kv_heads = kv_heads, arguments.group = heads / kv_heads;
        arguments.queries = queries, arguments.slots = slots, arguments.window = window, arguments.head_dim = head_dim;
        arguments.type = query.floats();
        arguments.store_bias_type = store_bias.floats(), arguments.window_bias_type = window_bias.floats();
        arguments.softmax_scale = scale;
        arguments.query = query.data;
        arguments.key = store(run, key_store, key_scale, bits[0], rows);
        arguments.value = store(run, value_store, value_scale, bits[1], rows);
        arguments.store_bias = store_bias.data, arguments.window_bias = window_bias.data;
        arguments.key_window = key_window.data, arguments.value_window = value_window.data;
        arguments.output = run.output(0, query.shape);
        void* const store_mass = run.output(1, store_bias.shape);
        void* const window_mass = run.output(2, {batch, kv_heads, window});
        if (masses) arguments.store_mass = store_mass, arguments.window_mass = window_mass;
        run.done(unicache_cpu_quant_kv_attention(&arguments, nullptr, &run.threads));
    }
};

class TopKGather {
    int64_t k;

public:
    static constexpr const char* NAME = "TopKGather";

    explicit TopKGather(const ort::KernelInfo* info) { check(ort::attribute(api, info, "k", &k)); }

    void operator()(Run& run) const {
        const Tensor score = run.input(0, "score", 3);
        const std::array<Tensor, 4> tensors{run.input(1, "key", 4), run.input(2, "value", 4),
                                            run.input(3, "positions", 3), run.input(4, "bias", 3)};
        const int64_t heads = score.shape[0] * score.shape[1], tokens = score.shape[2];
        if (k < 0 || k > tokens) run.refuse("k is " + std::to_string(k) + ", of " + std::to_string(tokens) + " tokens");
        Shape kept = score.shape;
        kept[2] = k;
        std::array<UnicacheRows, 4> rows;
        std::vector<char> unwanted[5];  // an output that the graph leaves out is written here
        const auto target = [&](size_t index, const Shape& shape, int64_t bytes) {
            void* data = run.output(index, shape);
            if (data) return data;
            unwanted[index].resize(heads * k * bytes);
            return static_cast<void*>(unwanted[index].data());
        };
        for (size_t i = 0; i < tensors.size(); i++) {
            const Tensor& tensor = tensors[i];
            Shape expected = score.shape, shape = kept;
            int64_t bytes = tensor.bytes();
            if (i < 2) {
                expected.push_back(tensor.width()), shape.push_back(tensor.width());
                bytes *= tensor.width();
            }
            run.expect(tensor, expected);
            rows[i] = {tensor.data, target(i, shape, bytes), bytes};
        }
        int64_t* index = static_cast<int64_t*>(target(4, kept, sizeof(int64_t)));
        const float* scores = static_cast<const float*>(score.data);
        run.done(unicache_cpu_topk_gather(scores, rows.data(), index, heads, tokens, k, &run.threads));
    }
};

class RowMatMul {
    int64_t transposed = 0;

public:
    static constexpr const char* NAME = "RowMatMul";

    explicit RowMatMul(const ort::KernelInfo* info) {
        if (ort::Status* missing = ort::attribute(api, info, "transB", &transposed)) ort::release(api, missing);
    }

    void operator()(Run& run) const {
        const Tensor x = run.input(0, "x", 0), w = run.input(1, "w", 2);
        const int64_t inputs = w.shape[transposed ? 1 : 0], outputs = w.shape[transposed ? 0 : 1];
        if (x.shape.empty() || x.shape.back() != inputs)
            run.refuse("x is " + text(x.shape) + ", which does not fit w of " + text(w.shape));
        Shape shape = x.shape;
        shape.back() = outputs;
        int64_t rows = 1;
        for (size_t i = 0; i + 1 < shape.size(); i++) rows *= shape[i];
        float* y = static_cast<float*>(run.output(0, shape));
        const float *from = static_cast<const float*>(x.data), *by = static_cast<const float*>(w.data);
        if (y) run.done(unicache_cpu_row_matmul(from, by, y, rows, inputs, outputs, transposed, nullptr, &run.threads));
    }
};

// An operator for some types of its inputs and outputs; ONNX Runtime takes those of one name together and picks by
// types.
struct Registered : ort::Operator {
    std::vector<int> input_types, output_types;
};

const Registered& of(const ort::Operator* op) { return *static_cast<const Registered*>(op); }

template <class Kernel>
Registered registered(std::vector<int> input_types, std::vector<int> output_types) {
    Registered op{};
    op.input_types = std::move(input_types), op.output_types = std::move(output_types);
    op.version = ort::API_VERSION;
    op.name = [](const ort::Operator*) { return Kernel::NAME; };
    op.provider = [](const ort::Operator*) { return "CPUExecutionProvider"; };
    op.inputs = [](const ort::Operator* op) { return of(op).input_types.size(); };
    op.outputs = [](const ort::Operator* op) { return of(op).output_types.size(); };
    op.input_type = [](const ort::Operator* op, size_t index) { return of(op).input_types[index]; };
    op.output_type = [](const ort::Operator* op, size_t index) { return of(op).output_types[index]; };
    op.input_characteristic = [](const ort::Operator*, size_t) { return ort::REQUIRED; };
    op.output_characteristic = [](const ort::Operator*, size_t) { return ort::OPTIONAL; };
    op.input_memory = [](const ort::Operator*, size_t) { return 0; };
    op.create_v2 = [](const ort::Operator*, ort::Table, const ort::KernelInfo* info, void** kernel) {
        return guarded([&] { *kernel = new Kernel(info); });
    };
    op.compute_v2 = [](void* kernel, ort::KernelContext* context) {
        return guarded([&] {
            Run run(Kernel::NAME, context);
            (*static_cast<const Kernel*>(kernel))(run);
        });
    };
    op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    return op;
}

const std::deque<Registered>& operators() {
    static const std::deque<Registered> all = [] {
        using namespace ort;
        std::deque<Registered> ops;
        ops.push_back(registered<RowMatMul>({FLOAT, FLOAT}, {FLOAT}));
        for (int t : {FLOAT, FLOAT16}) {
            ops.push_back(registered<QuantKVAttention>({t, INT8, ANY, INT8, ANY, ANY, t, t, ANY}, {t, t, t}));
            for (int key : {FLOAT, FLOAT16, INT8})
                for (int value : {FLOAT, FLOAT16, INT8})
                    ops.push_back(registered<TopKGather>({FLOAT, key, value, INT32, t}, {key, value, INT32, t, INT64}));
        }
        return ops;
    }();
    return all;
}

ort::Domain* domain() {
    static ort::Domain* const made = [] {
        ort::Domain* domain;
        check(ort::create_domain(api, "unicache", &domain));
        for (const Registered& op : operators()) check(ort::add_operator(api, domain, &op));
        return domain;
    }();
    return made;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
    api = base->table(ort::API_VERSION);
    if (!api) {
        const std::string message = std::string("unicache operators need ONNX Runtime 1.") +
                                    std::to_string(ort::API_VERSION) + " or newer, this is " + base->version();
        for (uint32_t version = ort::API_VERSION; !api && --version;) api = base->table(version);
        return api ? ort::create_status(api, ort::RUNTIME_EXCEPTION, message.c_str()) : nullptr;
    }
    return guarded([&] { check(ort::add_domain(api, options, domain())); });
}
