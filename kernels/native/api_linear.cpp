// The C functions that kernels/linear_native.py and experts_native.py call.

#include <new>
#include <vector>

#include "linear.h"
#include "words.h"

namespace k3 {

const RowKernels& row_kernels(Isa isa, Dtype dtype) {
#if defined(__x86_64__)
    // with the matrix unit it would be no quicker (as many multiply-adds a second)
    if (isa == AVX512_BF16 && dtype == BF16) return rows_avx512_bf16;
    if (isa >= AVX512) return rows_avx512;
    if (isa == AVX2) return rows_avx2;
#else
    (void)isa, (void)dtype;
#endif
    return rows_portable;
}

#if !defined(__x86_64__)
void linear_tiles(const Call& call, const Weight& w, void* out) { linears_rows(call, &w, &out, 1); }
void experts_tiles(const Call& call, const Job* jobs, int64_t count, const Activation& act) {
    experts_rows(call, jobs, count, act);
}
int64_t tiles_scratch(int, int64_t, int64_t, int64_t, int64_t) { return 0; }
#endif

// TILES needs bfloat16 products; F32 and F16 weights would lose digits as bfloat16, and results too.
bool takes_tiles(const Call& call, Kind kind, bool decode) {
    bool narrow = kind == W_BF16 || kind == W_INT8 || kind == W_MXFP4;
    return isa() >= AVX512_BF16 && !decode && call.dtype == BF16 && call.result == BF16 && narrow;
}

}  // namespace k3

namespace {

constexpr int JOB_FIELDS = 14;  // of kernels/experts_native.py, in this order

k3::Weight weight_of(const int64_t* f, int64_t n, int64_t k) {
    return {k3::Kind(f[0]), reinterpret_cast<const uint8_t*>(f[1]),
            reinterpret_cast<const uint8_t*>(f[2]), n, k};
}

template <class F>
int guarded(const F& f) {
    try {
        f();
        return 0;
    } catch (...) {  // memory is the only thing that can be missing
        return 1;
    }
}

}  // namespace

// Several weights times the same x.  fields: for each weight kind, data, scale, n; the results lie
// one after the other in out, each [rows, n] of the type `result`.  k: columns of x.
K3_API int k3_linear(k3::Pool* pool, int dtype, int result, const void* x, int64_t rows, int64_t k,
                     const int64_t* fields, int64_t count, void* out, int decode) {
    return guarded([&] {
        k3::Call call{pool, k3::Dtype(dtype), x, rows, k3::Dtype(result)};
        std::vector<k3::Weight> by_rows;
        std::vector<void*> places;
        auto* to = static_cast<uint8_t*>(out);
        for (int64_t i = 0; i < count; i++) {
            const k3::Weight w = weight_of(fields + 4 * i, fields[4 * i + 3], k);
            if (k3::takes_tiles(call, w.kind, decode))
                linear_tiles(call, w, to);
            else
                by_rows.push_back(w), places.push_back(to);
            to += size_t(rows) * w.n * call.result_size();
        }
        if (!by_rows.empty()) linears_rows(call, by_rows.data(), places.data(), by_rows.size());
    });
}

// fields: for each job rows, count, then kind, data, scale of gate, up and down, then the width
// inside, the width of the result and its address.  k: columns of x.
K3_API int k3_experts(k3::Pool* pool, int dtype, const void* x, int64_t x_rows, int64_t k,
                      const int64_t* fields, int64_t count, int act, float beta,
                      float linear_beta, int decode) {
    return guarded([&] {
        k3::Call call{pool, k3::Dtype(dtype), x, x_rows, k3::Dtype(dtype)};
        std::vector<k3::Job> rows, tiles;
        for (int64_t j = 0; j < count; j++) {
            const int64_t* f = fields + j * JOB_FIELDS;
            k3::Job job{reinterpret_cast<const int64_t*>(f[0]), f[1], weight_of(f + 2, f[11], k),
                        weight_of(f + 5, f[11], k), weight_of(f + 8, f[12], f[11]),
                        reinterpret_cast<void*>(f[13])};
            bool all = takes_tiles(call, job.gate.kind, decode) &&
                       takes_tiles(call, job.up.kind, decode) &&
                       takes_tiles(call, job.down.kind, decode);
            (all ? tiles : rows).push_back(job);
        }
        k3::Activation activation{act, beta, linear_beta};
        if (!rows.empty()) experts_rows(call, rows.data(), rows.size(), activation);
        if (!tiles.empty()) experts_tiles(call, tiles.data(), tiles.size(), activation);
    });
}

K3_API int64_t k3_linear_scratch(int threads, int64_t rows, int64_t job_rows, int64_t k,
                                 int64_t inner) {
    const int64_t plain = k3::rows_scratch(threads, rows, job_rows, k, inner);
    if (k3::isa() < k3::AVX512_BF16) return plain;
    return plain + k3::tiles_scratch(threads, rows, job_rows, k, inner);
}

K3_BY_WORDS(k3_linear)
K3_BY_WORDS(k3_experts)
