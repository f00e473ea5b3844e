// Matrix products x W^T and expert MLPs: what the files linear_*.cpp and api_linear.cpp share.
//
// Two families.  ROWS: activations widened to float32 once a call, weights decoded in registers,
// one dot product a pair of rows in float32 with fused multiply-adds (linear_rows.h).  TILES: the
// matrix unit of AMX, or AVX-512's products of pairs, on bfloat16 activations and weights rounded to
// bfloat16 (tiles.cpp).
// In both, the operations of one output value depend on its two rows alone.
#pragma once

#include "native.h"

namespace k3 {

// Number formats of weights; the numbers are those of kernels/linear_native.py.
// INT8: int8 [n, k], a bfloat16 scale for 64 columns.  MXFP4: kernels/mxfp4.py.
enum Kind : int { W_F32 = 0, W_BF16 = 1, W_F16 = 2, W_INT8 = 3, W_MXFP4 = 4 };

struct Weight {
    Kind kind;
    const uint8_t *data, *scale;
    int64_t n, k;

    int64_t row_bytes() const {
        return kind == W_F32 ? 4 * k : kind == W_INT8 ? k : kind == W_MXFP4 ? k / 2 : 2 * k;
    }
    int64_t scale_bytes() const {  // of one row
        return kind == W_INT8 ? k / 64 * 2 : kind == W_MXFP4 ? k / 32 : 0;
    }
    const uint8_t* row(int64_t i) const { return data + i * row_bytes(); }
    const uint8_t* row_scale(int64_t i) const { return scale + i * scale_bytes(); }
};

struct Activation {
    int name;  // 0: silu, 1: situ
    float beta, linear_beta;  // linear_beta 0: the up branch has no cap
};

// One expert page: rows (numbers of rows of x, null: 0, 1, ...) through its three weights.
struct Job {
    const int64_t* rows;
    int64_t count;
    Weight gate, up, down;
    void* out;  // [count, down.n]

    int64_t row(int64_t i) const { return rows ? rows[i] : i; }
};

struct Call {
    Pool* pool;
    Dtype dtype;  // of x
    const void* x;
    int64_t x_rows;
    Dtype result;

    size_t size() const { return dtype == F32 ? 4 : 2; }
    size_t result_size() const { return result == F32 ? 4 : 2; }
    const void* row(int64_t i, int64_t k) const {
        return static_cast<const uint8_t*>(x) + size_t(i) * k * size();
    }
};

// What an instruction set brings to the family ROWS.
struct RowKernels {
    // How many floats a prepared row of x takes for a weight of this kind.
    int64_t (*width)(Kind kind, int64_t k);
    // A row of x, widened and laid out for that kind; columns beyond k are zero.
    void (*prepare)(Kind kind, Dtype dtype, const void* x, int64_t k, float* out);
    // out[r * stride + i - begin] = x[r] . weight row i, for begin <= i < end.
    void (*dot)(const Weight& w, int64_t begin, int64_t end, const float* const* x, int64_t rows,
                float* out, int64_t stride);
    // Round to dtype.
    void (*store)(Dtype dtype, const float* in, int64_t n, void* out);
    // out = act(gate, up), each rounded to dtype first, as the result is.
    void (*activate)(const Activation& act, Dtype dtype, float* gate, float* up, int64_t n,
                     void* out);
};

// Those of an instruction set for activations of this type.
const RowKernels& row_kernels(Isa isa, Dtype dtype);
extern const RowKernels rows_portable;
#if defined(__x86_64__)
extern const RowKernels rows_avx2, rows_avx512, rows_avx512_bf16;
#endif

// Whether the family TILES computes this product; else ROWS does.
bool takes_tiles(const Call& call, Kind kind, bool decode);

// Several weights times the same x.
void linears_rows(const Call& call, const Weight* w, void* const* out, int64_t count);
void experts_rows(const Call& call, const Job* jobs, int64_t count, const Activation& act);
void linear_tiles(const Call& call, const Weight& w, void* out);
void experts_tiles(const Call& call, const Job* jobs, int64_t count, const Activation& act);

// Upper bounds of the scratch memory of a call: `rows` of x and `job_rows` of all jobs together,
// `k` columns of x, `inner` those between the weights of a job.
int64_t rows_scratch(int threads, int64_t rows, int64_t job_rows, int64_t k, int64_t inner);
int64_t tiles_scratch(int threads, int64_t rows, int64_t job_rows, int64_t k, int64_t inner);

struct OutOfMemory {};

// k3_run for the drivers: memory failures as an exception, and alone where it is not worth waking.
template <class F>
void share(Pool* pool, int64_t count, double nanoseconds, const F& f) {
    auto task = [](void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
    if (k3_run(nanoseconds < WORTH_WAKING_NS ? nullptr : pool, task, const_cast<F*>(&f), count))
        throw OutOfMemory();
}

}  // namespace k3
