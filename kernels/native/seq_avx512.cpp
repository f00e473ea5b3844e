// The operators of seq.h for AVX-512.
#if defined(__x86_64__)

#include "seq.h"

// GCC bug 105593: its header leaves a value undefined on purpose, and warns of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define K3_BYTES 64
#include "seq_table.h"

const k3::SeqOps k3::SEQ_AVX512 = K3_SEQ_OPS;

#endif
