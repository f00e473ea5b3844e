// The family ROWS for any machine: vectors of four floats, which are NEON on aarch64 and SSE2 on
// x86-64.

#include <cstring>

#include "linear_rows.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace k3 {
namespace {

struct Portable {
    typedef float Vec __attribute__((vector_size(16)));
    static constexpr int LANES = 4, PER_LANE = 1;
    static constexpr int ROWS = 8, X_BYTES = 24 << 10;
    static constexpr bool ROOMY = false;
    static constexpr int AHEAD = 1024;

    static Vec zero() { return Vec{}; }
    static Vec load(const float* p) {
        Vec v;
        std::memcpy(&v, p, 16);
        return v;
    }
    static void pin(Vec&) {}
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }
    static Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
        return vfmaq_f32(c, a, b);
#else
        return a * b + c;
#endif
    }
    static float sum(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }

    // Accumulators for 16 registers; NEON has 32.
    template <class D>
    static constexpr int side_by_side(int rb) {
        return rb == 1 ? 4 : rb == 2 ? 2 : 1;
    }

    // `count` elements, zeros behind them.
    template <class T, int SPACE>
    struct Bytes {
        T at[SPACE];
        void load(const uint8_t* p, int64_t count) {
            if (count == SPACE) {
                std::memcpy(at, p, sizeof at);
            } else {
                std::memset(at, 0, sizeof at);
                std::memcpy(at, p, size_t(count) * sizeof(T));
            }
        }
    };

    struct Plain {
        static constexpr bool SCALED = false;
        static constexpr int SCALE_BYTES = 0, INTERLEAVE = 1;
        Vec scale() const { return zero(); }
    };

    struct F32 : Plain {
        static constexpr int COLUMNS = 4, VECTORS = 1, BYTES = 16;
        Bytes<float, 4> raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) { raw.load(p, columns); }
        Vec vec(int) const { return Portable::load(raw.at); }
    };

    struct Bf16 : Plain {
        static constexpr int COLUMNS = 8, VECTORS = 2, BYTES = 16;
        Bytes<uint16_t, 8> raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) { raw.load(p, columns); }
        Vec vec(int j) const {
            Vec v{};
            for (int i = 0; i < 4; i++) v[i] = from_bf16(raw.at[4 * j + i]);
            return v;
        }
    };

    struct F16 : Plain {
        static constexpr int COLUMNS = 4, VECTORS = 1, BYTES = 8;
        Bytes<uint16_t, 4> raw;
        void load(const uint8_t* p, int64_t columns, const uint8_t*) { raw.load(p, columns); }
        Vec vec(int) const {
            Vec v{};
            for (int i = 0; i < 4; i++) v[i] = from_f16(raw.at[i]);
            return v;
        }
    };

    struct Int8 {
        static constexpr int COLUMNS = 64, VECTORS = 16, INTERLEAVE = 1, BYTES = 64;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 2;
        const int8_t* raw;
        uint16_t bits;
        void load(const uint8_t* p, int64_t, const uint8_t* s) {
            raw = reinterpret_cast<const int8_t*>(p);
            std::memcpy(&bits, s, 2);
        }
        Vec vec(int j) const {
            Vec v{};
            for (int i = 0; i < 4; i++) v[i] = raw[4 * j + i];
            return v;
        }
        Vec scale() const { return zero() + from_bf16(bits); }
    };

    struct Mxfp4 {
        static constexpr int COLUMNS = 32, VECTORS = 8, INTERLEAVE = 8, BYTES = 16;
        static constexpr bool SCALED = true;
        static constexpr int SCALE_BYTES = 1;
        uint32_t raw[4];
        uint8_t exponent;
        void load(const uint8_t* p, int64_t, const uint8_t* s) {
            std::memcpy(raw, p, 16);
            exponent = *s;
        }
        Vec vec(int j) const {
            static constexpr float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                                4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                                -2.0f, -3.0f, -4.0f, -6.0f};
            Vec v{};
            for (int i = 0; i < 4; i++) v[i] = table[raw[i] >> 4 * j & 15];
            return v;
        }
        Vec scale() const {
            return zero() + float_of(exponent ? uint32_t(exponent) << 23 : 0x00400000);
        }
    };

    static int64_t prepare_most(Kind, Dtype, const void*, int64_t, float*) { return 0; }
};

}  // namespace

const RowKernels rows_portable = kernels<Portable>();

}  // namespace k3
