// What every file of the native library shares: the thread pool, the instruction sets, scratch
// memory.  Knows nothing of operators.  Plain C ABI outside (k3_*), no exception crosses it.
#pragma once

#include <cstddef>
#include <cstdint>

#define K3_API extern "C" __attribute__((visibility("default")))

// Raised whenever a C function changes for its callers, so that an old build is refused (kernels/native.py).
constexpr int K3_ABI = 10;

namespace k3 {

// Best last; the numbers are those of kernels/native.py.  A machine has at most five of them.
enum Isa : int { PORTABLE = 0, NEON = 1, AVX2 = 2, AVX512 = 3, AVX512_BF16 = 4, AMX = 5 };

// Types of activations and of dense weights; the numbers are those of kernels/native.py.
enum Dtype : int { F32 = 0, BF16 = 1, F16 = 2 };

// The instruction set in force for calls from this thread: the best one until k3_use_isa.
Isa isa();
bool isa_runs(Isa which);

struct Pool;
using Task = void (*)(void* context, int64_t index);

// This thread's buffer number `slot` (< SCRATCH_SLOTS) of at least `bytes`, 64-byte aligned, grown
// on demand and freed with the thread; contents are whatever was there.  Throws std::bad_alloc.
// Slots 0..7 belong to linear_*, 8..15 to seq_*.
constexpr int SCRATCH_SLOTS = 16;
void* scratch(int slot, size_t bytes);

// Below this many nanoseconds of work waking another thread costs more than it saves.
constexpr double WORTH_WAKING_NS = 60e3;

}  // namespace k3

// Calls task(context, i) for each i < count, shared out between the pool's threads and the caller;
// 0, or 1 when memory ran out (the only failure a task may have).  pool may be null: the caller
// does it alone, as it does when another thread is using the pool.
K3_API int k3_run(k3::Pool* pool, k3::Task task, void* context, int64_t count);
