// Which instruction sets this machine has, and the tasks of a call spread over threads.

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "call.h"

using Step = void (*)(const Call &, int64_t);

// The instruction sets that the kernel was compiled for, the best first: KEYSHIFT_HAS_… says which there are.
#define KERNEL(isa)                                                                                              \
    extern "C" void keyshift_task_##isa(const Call &, int64_t);                                                  \
    extern "C" void keyshift_combine_##isa(const Call &, int64_t);
#if defined(KEYSHIFT_HAS_avx512_bf16)
KERNEL(avx512_bf16)
#endif
#if defined(KEYSHIFT_HAS_avx512)
KERNEL(avx512)
#endif
#if defined(KEYSHIFT_HAS_avx2)
KERNEL(avx2)
#endif
KERNEL(baseline)

namespace {

struct Kernel {
    const char *name;
    Step task, combine;
    bool supported;
};

const std::vector<Kernel> &kernels() {
    static const std::vector<Kernel> all = [] {
        std::vector<Kernel> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        [[maybe_unused]] const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
#define ADD(isa, supported) found.push_back({#isa, keyshift_task_##isa, keyshift_combine_##isa, supported});
#if defined(KEYSHIFT_HAS_avx512_bf16)
        ADD(avx512_bf16, avx512 && __builtin_cpu_supports("avx512bf16"))
#endif
#if defined(KEYSHIFT_HAS_avx512)
        ADD(avx512, avx512)
#endif
#if defined(KEYSHIFT_HAS_avx2)
        ADD(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#endif
        ADD(baseline, true)
        return found;
    }();
    return all;
}

// GOMP_parallel of the OpenMP runtime that the process has anyway; two pools of threads would fight for the cores.
using Parallel = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);

struct Work {
    const Call &call;
    Step step;
    int64_t count;
    std::atomic<int64_t> next{0};
};

void take(void *data) {
    auto &work = *static_cast<Work *>(data);
    for (int64_t index; (index = work.next++) < work.count;) work.step(work.call, index);
}

void spread(const Call &call, Step step, int64_t count, int64_t threads, Parallel parallel) {
    Work work{call, step, count};
    threads = std::min(threads, count);
    if (threads <= 1) return take(&work);
    if (parallel) return parallel(take, &work, unsigned(threads), 0);
    std::vector<std::thread> helpers;
    for (int64_t i = 1; i < threads; i++) helpers.emplace_back(take, &work);
    take(&work);
    for (auto &helper : helpers) helper.join();
}

// Whether the pages that a sequence's queries look at exist.
bool has_pages(const Call &call, int64_t b) {
    if (!call.tables) return true;
    const int64_t *starts = call.starts ? call.starts + b * call.queries : nullptr;
    const int64_t first = starts ? std::max<int64_t>(*std::min_element(starts, starts + call.queries), 0) : 0;
    const int64_t end = call.lengths[b];
    for (int64_t index = first / call.page; index * call.page < end; index++) {
        const int64_t page = page_at(call, b, index);
        if (page < 0 || page >= call.pages) return false;
    }
    return true;
}

}  // namespace

// Of what sources this was compiled.
extern "C" const char *keyshift_digest() { return KEYSHIFT_DIGEST; }

extern "C" const char *keyshift_kernel_name(int64_t kernel) {
    return kernel < int64_t(kernels().size()) ? kernels()[kernel].name : nullptr;
}

extern "C" bool keyshift_kernel_supported(int64_t kernel) { return kernels()[kernel].supported; }

// The first sequence of which a page that would be read does not exist; -1, and the call done, where all do.
extern "C" int64_t keyshift_stream_attention(const Call &call, int64_t kernel, int64_t threads, Parallel parallel) {
    for (int64_t b = 0; b < call.batch; b++)
        if (!has_pages(call, b)) return b;
    const Kernel &chosen = kernels()[kernel];
    spread(call, chosen.task, tasks(call), threads, parallel);
    spread(call, chosen.combine, call.batch * query_blocks(call) * call.heads, threads, parallel);
    return -1;
}
