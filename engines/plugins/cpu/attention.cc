// QuantKVAttention on a CPU: the fastest path that this processor runs, and its work shared out among threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace {

using namespace unicache;

constexpr int64_t WORTH_THREADS = 1 << 19;  // multiplications: fewer take less time than waking a thread

int64_t up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

float* floats(int64_t count) { return static_cast<float*>(std::aligned_alloc(64, up(count * sizeof(float), 64))); }

struct Work {
    const Job& job;
    decltype(Path::attend) step;
    std::atomic<bool> no_memory;
    std::atomic<float*> spare;  // scratch of a task that is done: memory of the system for each takes 2 % of a call
};

void run(void* data, size_t task) {
    Work& work = *static_cast<Work*>(data);
    float* scratch = work.spare.exchange(nullptr);
    if (!scratch) scratch = floats(work.job.scratch);
    if (scratch)
        work.step(work.job, task / work.job.parts, task % work.job.parts, scratch);
    else
        work.no_memory = true;
    std::free(work.spare.exchange(scratch));
}

int share_out(const Job& job, decltype(Path::attend) step, const UnicacheThreads* threads) {
    const size_t tasks = job.a.batch * job.a.kv_heads * job.parts;
    Work work{job, step, {false}, {nullptr}};
    int error = 0;
    if (threads && tasks > 1) {
        error = threads->run(threads->context, run, tasks, &work);
    } else {
        for (size_t task = 0; task < tasks; task++) run(&work, task);
    }
    std::free(work.spare);
    return error ? error : work.no_memory ? UNICACHE_NO_MEMORY : 0;
}

}  // namespace

int unicache_cpu_quant_kv_attention(const UnicacheAttention* arguments, const char* name,
                                    const UnicacheThreads* threads) {
    const Path* path = find(name);
    if (!path) return UNICACHE_INVALID;
    Job job{};
    const UnicacheAttention& a = job.a = *arguments;
    job.rows = a.group * a.queries, job.width = up(a.head_dim, ALIGN);
    job.parts = (a.slots + PART - 1) / PART + 1;
    job.tiles = up(a.slots, TILE) / TILE + up(a.window, TILE) / TILE;
    const int64_t rows = a.batch * a.kv_heads * job.rows;
    const bool mass = a.store_mass || a.window_mass;
    const int64_t output = rows * job.parts * job.width, states = up(rows * job.parts, ALIGN);
    const int64_t weights = mass ? rows * job.tiles * TILE : 0, tops = mass ? rows * job.tiles : 0;
    float* memory = floats(output + 2 * states + weights + tops);
    if (!memory) return UNICACHE_NO_MEMORY;
    job.output = memory, job.largest = memory + output, job.total = job.largest + states;
    if (mass) job.weights = job.total + states, job.tops = job.weights + weights;
    // Queries, and their sets as floats and as whole numbers; two tiles and a row of floats; totals; weights thrice and
    // biases of every query; a few single rows and columns.
    job.scratch = (job.rows + 2 * TILE + 1) * job.width + SETS * job.rows * (job.width + STRIDE / 2 + 2) +
                  (3 * job.rows + a.queries + 4) * TILE + 16 * job.rows + 2 * (job.width + up(job.rows, ALIGN));

    if (rows * (a.slots + a.window) * a.head_dim < WORTH_THREADS) threads = nullptr;
    int error = share_out(job, path->attend, threads);
    if (!error) error = share_out(job, path->finish, mass ? threads : nullptr);
    std::free(memory);
    return error;
}
