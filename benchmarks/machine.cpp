// What this machine can do at most: bytes read from memory and multiply-adds, per second, for so many threads.
// decode.py compiles it for the machine it runs on and prints its measurements beside those of the kernels.

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

typedef float Floats __attribute__((vector_size(64)));

template <typename Work>
static double seconds(int threads, Work work) {
    const auto began = std::chrono::steady_clock::now();
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; i++) helpers.emplace_back(work, i);
    work(0);
    for (auto &helper : helpers) helper.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

static volatile float kept;

// Bytes per second of reading so many floats once.
extern "C" double read_rate(const float *data, int64_t count, int threads) {
    const int64_t share = count / threads / 64 * 64;
    const double took = seconds(threads, [=](int thread) {
        const Floats *from = reinterpret_cast<const Floats *>(data + thread * share);
        Floats sums[4] = {};
        for (int64_t i = 0; i < share / 16; i += 4)
            for (int k = 0; k < 4; k++) sums[k] += from[i + k];
        const Floats sum = sums[0] + sums[1] + sums[2] + sums[3];
        kept = sum[0];
    });
    return 4.0 * share * threads / took;
}

// Floating-point operations per second of fused multiply-adds in registers, two for each.
extern "C" double multiply_add_rate(int threads) {
    constexpr int CHAINS = 20, ROUNDS = 4000000;
    const double took = seconds(threads, [](int) {
        Floats sums[CHAINS], factor = Floats{} + 0.999f, added = Floats{} + 0.001f;
        for (int i = 0; i < CHAINS; i++) sums[i] = Floats{} + float(i);
        for (int round = 0; round < ROUNDS; round++)
#pragma GCC unroll 20
            for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + added;
        Floats sum = {};
        for (int i = 0; i < CHAINS; i++) sum += sums[i];
        kept = sum[0];
    });
    return 2.0 * 16 * CHAINS * ROUNDS * threads / took;
}
