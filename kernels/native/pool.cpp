// Threads that sleep when idle, the instruction sets of this machine, scratch memory.
//
// A call is never held up by a thread that has not woken yet: the caller takes tasks until none is
// left and then waits only for threads that are inside one.

#include "native.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace k3 {

namespace {

std::atomic<int64_t> held{0};  // bytes of all threads' scratch memory

struct Buffer {
    void* memory = nullptr;
    size_t size = 0;

    void resize(size_t bytes) {
        std::free(memory);
        memory = bytes ? std::aligned_alloc(4096, bytes) : nullptr;
        held += memory ? int64_t(bytes) - int64_t(size) : -int64_t(size);
        size = memory ? bytes : 0;
    }
    ~Buffer() { resize(0); }
};

thread_local Buffer buffers[SCRATCH_SLOTS];

#if defined(__x86_64__)
uint64_t enabled_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

struct Features {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;

    Features() {
        uint32_t a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
        bool f16c = c & bit_F16C, fma = c & bit_FMA;
        uint64_t state = enabled_state();
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = f16c && fma && (b & bit_AVX2) && (state & 6) == 6;
        bool wide = (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512VL) &&
                    (b & bit_AVX512DQ);
        avx512 = avx2 && wide && (state & 0xe6) == 0xe6;
        const bool unit = (d & (1u << 24)) && (d & (1u << 22));  // AMX-TILE, AMX-BF16
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) avx512_bf16 = avx512 && (a & (1u << 5));
        amx = avx512_bf16 && unit && (state >> 17 & 3) == 3 && permitted();
    }

    // Linux hands the 8 KB of tile state only to processes that ask (ARCH_REQ_XCOMP_PERM, 18).
    static bool permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
};

bool detect(Isa which) {
    static const Features has;
    switch (which) {
        case PORTABLE: return true;
        case AVX2: return has.avx2;
        case AVX512: return has.avx512;
        case AVX512_BF16: return has.avx512_bf16;
        case AMX: return has.amx;
        default: return false;
    }
}
#elif defined(__aarch64__)
bool detect(Isa which) { return which == PORTABLE || which == NEON; }
#else
bool detect(Isa which) { return which == PORTABLE; }
#endif

Isa best() {
    for (int i = AMX; i > PORTABLE; i--)
        if (detect(Isa(i))) return Isa(i);
    return PORTABLE;
}

thread_local int in_force = -1;  // the caller decides; its tasks carry what they need

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

bool isa_runs(Isa which) { return detect(which); }

Isa isa() {
    static const Isa fastest = best();
    return in_force < 0 ? fastest : Isa(in_force);
}

void* scratch(int slot, size_t bytes) {
    Buffer& buffer = buffers[slot];
    if (buffer.size < bytes) {
        buffer.resize((bytes + 4095) & ~size_t(4095));
        if (!buffer.memory) throw std::bad_alloc();
    }
    return buffer.memory;
}

struct Pool {
    std::mutex one_call;  // held by the caller that uses the threads
    std::mutex guard;     // of everything below that is not atomic
    std::condition_variable wake, left;
    std::vector<std::thread> threads;
    Task task = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int wanted = 0;  // how many more threads may join the present call
    bool closing = false;
    std::atomic<int64_t> next{0};
    std::atomic<int> inside{0}, failed{0};

    void drain() {
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
                task(context, i);
        } catch (...) {
            failed = 1;
            next = count;
        }
    }

    void serve() {
        std::unique_lock<std::mutex> lock(guard);
        for (;;) {
            wake.wait(lock, [&] { return closing || wanted > 0; });
            if (closing) return;
            wanted--, inside++;
            lock.unlock();
            drain();
            lock.lock();
            if (--inside == 0) left.notify_one();
        }
    }

    int run(Task t, void* c, int64_t n) {
        int helpers = int(n - 1 < int64_t(threads.size()) ? n - 1 : int64_t(threads.size()));
        {
            std::lock_guard<std::mutex> lock(guard);
            task = t, context = c, count = n, next = 0, failed = 0, wanted = helpers;
        }
        for (int i = 0; i < helpers; i++) wake.notify_one();
        drain();
        // A few microseconds of patience: the others are usually in their last task.
        for (int i = 0; i < 100 && inside.load(std::memory_order_acquire); i++) relax();
        std::unique_lock<std::mutex> lock(guard);
        wanted = 0;
        left.wait(lock, [&] { return inside == 0; });
        return failed;
    }
};

namespace {

int alone(Task task, void* context, int64_t count) {
    try {
        for (int64_t i = 0; i < count; i++) task(context, i);
        return 0;
    } catch (...) {
        return 1;
    }
}

}  // namespace

}  // namespace k3

K3_API int k3_abi() { return K3_ABI; }

K3_API int k3_isa_runs(int which) { return k3::isa_runs(k3::Isa(which)); }

K3_API int64_t k3_scratch_held() { return k3::held; }

K3_API int k3_isa() { return k3::isa(); }

K3_API void k3_use_isa(int which) { k3::in_force = which; }

K3_API void k3_pool_delete(k3::Pool* pool) {
    if (!pool) return;
    {
        std::lock_guard<std::mutex> lock(pool->guard);
        pool->closing = true;
    }
    pool->wake.notify_all();
    for (auto& thread : pool->threads) thread.join();
    delete pool;
}

// threads - 1 threads and the caller; null when they cannot be had.
K3_API k3::Pool* k3_pool_new(int threads) {
    auto* pool = new (std::nothrow) k3::Pool;
    if (!pool) return nullptr;
    try {
        for (int i = 1; i < threads; i++) pool->threads.emplace_back([pool] { pool->serve(); });
        return pool;
    } catch (...) {
        k3_pool_delete(pool);
        return nullptr;
    }
}

K3_API int k3_run(k3::Pool* pool, k3::Task task, void* context, int64_t count) {
    if (!pool || pool->threads.empty() || count <= 1 || !pool->one_call.try_lock())
        return k3::alone(task, context, count);
    int failed = pool->run(task, context, count);
    pool->one_call.unlock();
    return failed;
}

// Reads all of data once, shared out like the weights of a product; returns a sum that keeps the
// compiler honest.  For measuring what memory gives.
K3_API uint64_t k3_read(k3::Pool* pool, const uint64_t* data, int64_t words) {
    struct Read {
        const uint64_t* data;
        int64_t words;
        std::atomic<uint64_t> sum{0};
    } read{data, words};
    constexpr int64_t STEP = 1 << 17;  // 1 MiB
    auto task = [](void* context, int64_t i) {
        Read& r = *static_cast<Read*>(context);
        uint64_t sum = 0;
        const int64_t end = (i + 1) * STEP < r.words ? (i + 1) * STEP : r.words;
        for (int64_t j = i * STEP; j < end; j++) sum += r.data[j];
        r.sum += sum;
    };
    k3_run(pool, task, &read, (words + STEP - 1) / STEP);
    return read.sum;
}
