// The family ROWS: who computes which rows when.  Arithmetic is in the file of the instruction set.
//
// Tasks are blocks of weight rows; a block meets all rows of x that are prepared at the time, so
// that its weights come from memory once.

#include <algorithm>
#include <vector>

#include "linear.h"

namespace k3 {

namespace {

constexpr int64_t BLOCK_BYTES = 128 << 10;  // weights of a task: about 10 us of reading
constexpr int64_t BLOCK_MOST = 512;         // weight rows of a task
constexpr int64_t X_ROWS = 32;   // rows of x at a time: in float32 they stay in the second cache
constexpr int64_t MLP_BYTES = 16 << 20;  // of float32 intermediates at a time
constexpr double READ_NS = 1.0 / 12, MAC_NS = 1.0 / 25;  // a byte, a multiply-add; roughly

enum Slot { X = 0, MIDDLE = 1, ROUNDED = 2, BLOCK = 3, BLOCK_UP = 4 };

int64_t block_rows(const Weight& w) {
    int64_t bytes = w.row_bytes() + w.scale_bytes();
    return std::clamp<int64_t>(BLOCK_BYTES / bytes / 8 * 8, 8, BLOCK_MOST);
}

double cost(const Weight& w, int64_t rows) {
    return w.n * std::max((w.row_bytes() + w.scale_bytes()) * READ_NS, w.k * rows * MAC_NS);
}

float* floats(int slot, int64_t count) {
    return static_cast<float*>(scratch(slot, size_t(count) * sizeof(float)));
}

uint8_t* at(void* base, int64_t elements, size_t size) {
    return static_cast<uint8_t*>(base) + size_t(elements) * size;
}

// Rows [begin, end) of w times rows of x, rounded into out [rows, w.n].
void product(const RowKernels& isa, Dtype dtype, const Weight& w, int64_t begin, int64_t end,
             const float* const* x, int64_t rows, void* out) {
    const size_t size = dtype == F32 ? 4 : 2;
    const int64_t wide = end - begin;
    float* block = floats(BLOCK, std::min(rows, X_ROWS) * wide);
    for (int64_t r = 0; r < rows; r += X_ROWS) {
        int64_t some = std::min(X_ROWS, rows - r);
        isa.dot(w, begin, end, x + r, some, block, wide);
        for (int64_t i = 0; i < some; i++)
            isa.store(dtype, block + i * wide, wide, at(out, (r + i) * w.n + begin, size));
    }
}

// One expert, or the part of its rows that is computed at a time.
struct Part {
    const Job* job;
    int64_t begin, count;
    int64_t middle;  // its first row among the intermediates
};

struct Block {
    const Part* part;
    int64_t begin, end;  // weight rows
};

std::vector<Block> blocks_of(const std::vector<Part>& parts, bool down) {
    std::vector<Block> blocks;
    for (const Part& part : parts) {
        const Weight& w = down ? part.job->down : part.job->gate;
        const int64_t step = block_rows(w);
        for (int64_t i = 0; i < w.n; i += step)
            blocks.push_back({&part, i, std::min(i + step, w.n)});
    }
    return blocks;
}

// Distinct layouts of x, prepared once for all jobs: usually one.
struct Prepared {
    Kind kind;
    std::vector<const float*> row;
};

struct Mlp {
    const Call& call;
    const Activation& act;
    const RowKernels& isa;
    int64_t inner;  // widest
    std::vector<Prepared> x;
    float* middle;     // [rows, stride] prepared for `down`
    uint8_t* rounded;  // [rows, inner] in dtype
    int64_t stride;

    // The rows of a part, as they were prepared for a weight of this kind.
    std::vector<const float*> rows_of(Kind kind, const Part& part) const {
        std::vector<const float*> rows(part.count);
        for (const Prepared& p : x)
            if (p.kind == kind)
                for (int64_t i = 0; i < part.count; i++)
                    rows[i] = p.row[part.job->row(part.begin + i)];
        return rows;
    }

    void gate_up(const Block& b) {
        const Part& part = *b.part;
        const Job& job = *part.job;
        const int64_t wide = b.end - b.begin;
        const auto for_gate = rows_of(job.gate.kind, part), for_up = rows_of(job.up.kind, part);
        float* gate = floats(BLOCK, X_ROWS * wide);
        float* up = floats(BLOCK_UP, X_ROWS * wide);
        for (int64_t r = 0; r < part.count; r += X_ROWS) {
            int64_t some = std::min(X_ROWS, part.count - r);
            isa.dot(job.gate, b.begin, b.end, for_gate.data() + r, some, gate, wide);
            isa.dot(job.up, b.begin, b.end, for_up.data() + r, some, up, wide);
            for (int64_t i = 0; i < some; i++)
                isa.activate(act, call.dtype, gate + i * wide, up + i * wide, wide,
                             at(rounded, (part.middle + r + i) * inner + b.begin, call.size()));
        }
    }

    void widen(const Part& part, int64_t i) {
        isa.prepare(part.job->down.kind, call.dtype,
                    at(rounded, (part.middle + i) * inner, call.size()), part.job->down.k,
                    middle + (part.middle + i) * stride);
    }

    void down(const Block& b) {
        const Part& part = *b.part;
        std::vector<const float*> source(part.count);
        for (int64_t i = 0; i < part.count; i++) source[i] = middle + (part.middle + i) * stride;
        product(isa, call.dtype, part.job->down, b.begin, b.end, source.data(), part.count,
                at(part.job->out, part.begin * part.job->down.n, call.size()));
    }

    void run(const std::vector<Part>& parts, int64_t rows) {
        double first = 0, second = 0;
        for (const Part& p : parts) {
            first += cost(p.job->gate, p.count) + cost(p.job->up, p.count);
            second += cost(p.job->down, p.count);
        }
        const auto ups = blocks_of(parts, false), downs = blocks_of(parts, true);
        share(call.pool, ups.size(), first, [&](int64_t i) { gate_up(ups[i]); });
        std::vector<std::pair<const Part*, int64_t>> each;
        for (const Part& p : parts)
            for (int64_t i = 0; i < p.count; i++) each.push_back({&p, i});
        share(call.pool, rows, double(rows * inner), [&](int64_t i) {
            widen(*each[i].first, each[i].second);
        });
        share(call.pool, downs.size(), second, [&](int64_t i) { down(downs[i]); });
    }
};

void prepare_x(Mlp& mlp, const Job* jobs, int64_t count, int64_t k) {
    std::vector<Kind> kinds;
    for (int64_t j = 0; j < count; j++)
        for (Kind kind : {jobs[j].gate.kind, jobs[j].up.kind})
            if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    std::vector<char> used(mlp.call.x_rows, 0);
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < jobs[j].count; i++) used[jobs[j].row(i)] = 1;
    int64_t total = 0;
    for (Kind kind : kinds) total += mlp.isa.width(kind, k);
    float* at = floats(X, mlp.call.x_rows * total);
    for (Kind kind : kinds) {
        Prepared p{kind, std::vector<const float*>(mlp.call.x_rows)};
        const int64_t width = mlp.isa.width(kind, k);
        for (int64_t i = 0; i < mlp.call.x_rows; i++) p.row[i] = at + i * width;
        share(mlp.call.pool, mlp.call.x_rows, double(mlp.call.x_rows * k), [&](int64_t i) {
            if (used[i])
                mlp.isa.prepare(kind, mlp.call.dtype, mlp.call.row(i, k), k, at + i * width);
        });
        mlp.x.push_back(std::move(p));
        at += mlp.call.x_rows * width;
    }
}

int64_t middle_rows(int64_t stride) { return std::max<int64_t>(X_ROWS, MLP_BYTES / (4 * stride)); }

}  // namespace

int64_t rows_scratch(int threads, int64_t rows, int64_t job_rows, int64_t k, int64_t inner) {
    const RowKernels& isa = row_kernels(k3::isa(), F32);
    const int64_t wide = isa.width(W_MXFP4, k), middle = isa.width(W_MXFP4, inner);
    // Two formats among the jobs of a call; float32 intermediates, rounded and prepared.
    return 4 * (2 * rows * wide + 2 * std::min(job_rows, middle_rows(middle)) * middle +
                2 * threads * X_ROWS * BLOCK_MOST);
}

namespace {

// Weights of one kind, whose layout of x they share.
void linears_of(const Call& call, const std::vector<std::pair<Weight, void*>>& weights) {
    // what stays float32 is as if x had been float32
    const RowKernels& isa = row_kernels(k3::isa(), call.result == F32 ? F32 : call.dtype);
    const Weight& first = weights[0].first;
    const int64_t width = isa.width(first.kind, first.k);
    const int64_t most = std::min(X_ROWS, call.x_rows);
    float* x = floats(X, most * width);
    struct Task {
        const std::pair<Weight, void*>* to;
        int64_t begin, end;
    };
    std::vector<Task> tasks;
    for (const auto& each : weights)
        for (int64_t n = each.first.n, step = block_rows(each.first), i = 0; i < n; i += step)
            tasks.push_back({&each, i, std::min(i + step, n)});
    for (int64_t r = 0; r < call.x_rows; r += X_ROWS) {
        const int64_t some = std::min(X_ROWS, call.x_rows - r);
        const float* source[X_ROWS];
        for (int64_t i = 0; i < some; i++) {
            isa.prepare(first.kind, call.dtype, call.row(r + i, first.k), first.k, x + i * width);
            source[i] = x + i * width;
        }
        double time = 0;
        for (const auto& each : weights) time += cost(each.first, some);
        share(call.pool, tasks.size(), time, [&](int64_t i) {
            const auto& [w, out] = *tasks[i].to;
            product(isa, call.result, w, tasks[i].begin, tasks[i].end, source, some,
                    at(out, r * w.n, call.result_size()));
        });
    }
}

}  // namespace

void linears_rows(const Call& call, const Weight* w, void* const* out, int64_t count) {
    std::vector<std::pair<Weight, void*>> alike;
    std::vector<char> done(count, 0);
    for (int64_t i = 0; i < count; i++) {
        if (done[i]) continue;
        alike.clear();
        for (int64_t j = i; j < count; j++)
            if (w[j].kind == w[i].kind) alike.push_back({w[j], out[j]}), done[j] = 1;
        linears_of(call, alike);
    }
}

void experts_rows(const Call& call, const Job* jobs, int64_t count, const Activation& act) {
    Mlp mlp{call, act, row_kernels(k3::isa(), call.dtype), 0, {}, nullptr, nullptr, 0};
    for (int64_t j = 0; j < count; j++) {
        mlp.inner = std::max(mlp.inner, jobs[j].gate.n);
        mlp.stride = std::max(mlp.stride, mlp.isa.width(jobs[j].down.kind, jobs[j].down.k));
    }
    prepare_x(mlp, jobs, count, jobs[0].gate.k);
    const int64_t most = middle_rows(mlp.stride);
    std::vector<Part> parts;
    int64_t rows = 0;
    auto flush = [&] {
        if (!rows) return;
        mlp.middle = floats(MIDDLE, rows * mlp.stride);
        mlp.rounded = static_cast<uint8_t*>(scratch(ROUNDED, rows * mlp.inner * call.size()));
        mlp.run(parts, rows);
        parts.clear(), rows = 0;
    };
    for (int64_t j = 0; j < count; j++)
        for (int64_t begin = 0; begin < jobs[j].count;) {
            int64_t some = std::min(jobs[j].count - begin, most - rows);
            parts.push_back({&jobs[j], begin, some, rows});
            rows += some, begin += some;
            if (rows == most) flush();
        }
    flush();
}

}  // namespace k3
