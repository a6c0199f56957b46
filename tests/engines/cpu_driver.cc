// Runs attention calls from a file on an instruction path, where the test's own process cannot: under an emulator.
//   cpu_driver FILE PATH
// FILE: the number of calls, their UnicacheAttention, whose pointers are offsets into the file (0: NULL), and the tensors.
// It is written back with the outputs in place. The exit code is that of the first call that fails.
#include <cstdio>
#include <vector>

#include "../../engines/plugins/cpu/cpu.h"

int main(int count, char** arguments) {
    if (count != 3) return 64;
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
