// Runs attention calls from a file on an instruction path, where the test's own process cannot: under an emulator.
//   cpu_driver FILE PATH
// FILE: the number of calls, their UnicacheAttention, whose pointers are offsets into the file (0: NULL), and the tensors.
// It is written back with the outputs in place. The exit code is that of the first call that fails.
//   cpu_driver rows PATH
// compares products of few rows with a loop; the exit code is 1 if they differ.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../engines/plugins/cpu/cpu.h"

static int rows(const char* path) {
    for (int64_t m : {1, 5})
        for (int64_t k : {1, 37, 300})
            for (int64_t n : {1, 45, 5000})
                for (int transposed : {0, 1}) {
                    std::vector<float> x(m * k), w(k * n), y(m * n, NAN);
                    for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i % 17) / 8 - 1;
                    for (size_t i = 0; i < w.size(); i++) w[i] = static_cast<float>(i % 23) / 16 - 0.5f;
                    if (unicache_cpu_row_matmul(x.data(), w.data(), y.data(), m, k, n, transposed, path, nullptr))
                        return 1;
                    for (int64_t i = 0; i < m; i++)
                        for (int64_t j = 0; j < n; j++) {
                            double sum = 0;
                            for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * w[transposed ? j * k + l : l * n + j];
                            if (!(std::fabs(y[i * n + j] - sum) < 1e-3)) return 1;
                        }
                }
    return 0;
}

int main(int count, char** arguments) {
    if (count != 3) return 64;
    if (!std::strcmp(arguments[1], "rows")) return rows(arguments[2]);
    std::FILE* file = std::fopen(arguments[1], "r+b");
    if (!file) return 66;
    std::fseek(file, 0, SEEK_END);
    std::vector<char> memory(std::ftell(file));
    std::rewind(file);
    if (std::fread(memory.data(), 1, memory.size(), file) != memory.size()) return 66;
    const auto place = [&](auto& pointer) {
        if (pointer) pointer = reinterpret_cast<decltype(+pointer)>(memory.data() + reinterpret_cast<uintptr_t>(pointer));
    };
    const int64_t calls = *reinterpret_cast<int64_t*>(memory.data());
    for (int64_t i = 0; i < calls; i++) {
        UnicacheAttention a = reinterpret_cast<UnicacheAttention*>(memory.data() + sizeof(int64_t))[i];
        place(a.query), place(a.key.codes), place(a.key.scale), place(a.value.codes), place(a.value.scale);
        place(a.store_bias), place(a.key_window), place(a.value_window), place(a.window_bias);
        place(a.output), place(a.store_mass), place(a.window_mass);
        if (int error = unicache_cpu_quant_kv_attention(&a, arguments[2], nullptr)) return error;
    }
    std::rewind(file);
    return std::fwrite(memory.data(), 1, memory.size(), file) == memory.size() ? std::fclose(file) : 74;
}
