// The operators of seq.h for AVX2 with FMA.
#if defined(__x86_64__)

#include "seq.h"

#pragma GCC target("avx2,fma,f16c")
#define K3_BYTES 32
#include "seq_table.h"

const k3::SeqOps k3::SEQ_AVX2 = K3_SEQ_OPS;

#endif
